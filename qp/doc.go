// Package qp is queue pairs and their memory: protection domains, registered
// memory and the pool that cuts it into blocks, completion queues, and the work
// requests that pass between them. Its terms are those of libibverbs, and its
// rules those of the manual pages that each type names.
//
// The package keeps the accounts that a provider does not: a work request is
// outstanding from the post until its completion was polled, and completes
// exactly once; nothing is closed while something uses it, and a Close that
// refuses returns a *BusyError and changes nothing.
//
// Queue pairs are made by package cm, with ID.CreateQP.
//
// Every error carries a syscall.Errno for errors.Is and errors.As. Locks are
// taken in the order guard of the QP (the id's lock), QP.sendMu, QP.recvMu,
// QP.errMu, CQ.waitMu, CQ.mu, CQ.wakeMu; PD.mu and Pool.mu come last.
package qp
