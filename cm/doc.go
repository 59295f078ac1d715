// Package cm is the RDMA connection manager: event channels, ids and events,
// with the semantics of librdmacm on every provider. Read rdma_cm(7) first;
// each method names its manual page.
//
// What librdmacm leaves to its callers is checked here. A channel with live ids
// or unacked events can't be closed, nor can an id that has a queue pair or
// unacked events be destroyed: the *BusyError says what is in the way, and
// nothing has changed. A call in the wrong state is a *StateError, a value
// beyond a limit a *LimitError. Every error carries a syscall.Errno for
// errors.Is and errors.As, and a call on what is closed or destroyed is
// net.ErrClosed as well.
//
// All methods of all types may be called concurrently. Locks are taken in the
// order ID.mu, EventChannel.mu (of two channels the older first); those of
// package qp come after ID.mu, and never together with EventChannel.mu.
package cm
