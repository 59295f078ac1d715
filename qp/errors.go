package qp

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
)

// opError builds every error of this package: it says what was tried, and
// makes sure that errors.As finds a syscall.Errno. A nil err stays nil.
func opError(op string, err error) error {
	if err == nil {
		return nil
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		err = fmt.Errorf("%w (%w)", err, syscall.EIO)
	}
	return fmt.Errorf("qp: %s: %w", op, err)
}

// errClosed is both net.ErrClosed and EBADF.
var errClosed = fmt.Errorf("%w (%w)", net.ErrClosed, syscall.EBADF)

// BusyError reports that something could not be closed because it is in use.
// The refused call changed nothing. It wraps EBUSY.
type BusyError struct {
	Object  string // what is busy, such as "protection domain"
	MRs     int    // memory regions that live in it
	QPs     int    // queue pairs that use it
	Buffers int    // buffers that were not released
	Sends   int    // send requests that have not completed
	Recvs   int    // receive requests that have not completed
}

func (e *BusyError) Error() string {
	var uses []string
	for _, u := range []struct {
		n    int
		what string
	}{
		{e.MRs, "memory region(s) not closed"},
		{e.QPs, "queue pair(s) not closed"},
		{e.Buffers, "buffer(s) not released"},
		{e.Sends, "send(s) not completed"},
		{e.Recvs, "receive(s) not completed"},
	} {
		if u.n != 0 {
			uses = append(uses, fmt.Sprintf("%d %s", u.n, u.what))
		}
	}
	return e.Object + " is in use: " + strings.Join(uses, ", ")
}

// Unwrap returns EBUSY.
func (e *BusyError) Unwrap() error { return syscall.EBUSY }

// LimitError reports a value beyond a limit, and what to do about it. It wraps
// its Errno: EINVAL, or ENOBUFS for the budget of a Pool.
type LimitError struct {
	What  string // what is limited
	Value int64  // what was asked for
	Limit int64  // the most, or if Value is less the least, that it may be
	Fix   string
	Errno syscall.Errno
}

func (e *LimitError) Error() string {
	than := "more than the limit of"
	if e.Value < e.Limit {
		than = "less than"
	}
	return fmt.Sprintf("%s: %d is %s %d: %v; %s", e.What, e.Value, than, e.Limit, e.Errno, e.Fix)
}

// Unwrap returns e.Errno.
func (e *LimitError) Unwrap() error { return e.Errno }

// FullError reports a post to a queue that has no room: as many requests are
// outstanding as it is deep. It wraps ENOMEM, which is what ibv_post_send(3)
// returns.
type FullError struct {
	Op    Op // the queue
	Depth int
}

func (e *FullError) Error() string {
	return fmt.Sprintf("all %d entries of the %s queue are outstanding: %v; poll for completions first", e.Depth, e.Op, syscall.ENOMEM)
}

// Unwrap returns ENOMEM.
func (e *FullError) Unwrap() error { return syscall.ENOMEM }

// AccountingError reports a completion that matches no outstanding work
// request: one too many, one of an unknown request, or a receive out of order.
// It is a fault of the provider or device, and ends any trust in the queue
// pair. It wraps EPROTO.
type AccountingError struct {
	QP     uint32
	Op     Op
	WRID   uint64
	Status Status
}

func (e *AccountingError) Error() string {
	which := "an outstanding send"
	if e.Op == OpRecv {
		which = "the oldest outstanding receive"
	}
	return fmt.Sprintf("QP %d: %s completion for WR %#x (%v) does not match %s", e.QP, e.Op, e.WRID, e.Status, which)
}

// Unwrap returns EPROTO.
func (e *AccountingError) Unwrap() error { return syscall.EPROTO }

// StatusError is a completion whose status is not StatusSuccess. It wraps
// ETIMEDOUT when the peer did not answer, ECONNRESET when its queue pair had come
// to its end, ECANCELED for flushed work, and EIO otherwise.
type StatusError struct {
	Op        Op
	Status    Status
	VendorErr uint32 // the device's own code
}

// StatusErr returns nil for a completion that succeeded, and a *StatusError
// for any other.
func StatusErr(wc WC) error {
	if wc.Status == StatusSuccess {
		return nil
	}
	return &StatusError{Op: wc.Op, Status: wc.Status, VendorErr: wc.VendorErr}
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("qp: %s: %v", e.Op, e.Status)
	if e.VendorErr != 0 {
		s += fmt.Sprintf(" (vendor error %#x)", e.VendorErr)
	}
	return s
}

// Unwrap returns the errno of the status.
func (e *StatusError) Unwrap() error {
	switch e.Status {
	case StatusRetryExcErr, StatusRNRRetryExcErr, StatusRespTimeoutErr:
		return syscall.ETIMEDOUT
	case StatusWRFlushErr:
		return syscall.ECANCELED
	case StatusRemOpErr, StatusRemAbortErr: // the peer's queue pair is in error
		return syscall.ECONNRESET
	}
	return syscall.EIO
}

// MemlockError reports that memory could not be registered, most likely because
// RLIMIT_MEMLOCK is too low. It wraps the provider's error.
type MemlockError struct {
	Bytes int    // asked for
	Limit string // RLIMIT_MEMLOCK of this process, in bytes
	Err   error
}

func (e *MemlockError) Error() string {
	return fmt.Sprintf("%d bytes: %v; RLIMIT_MEMLOCK is %s: raise it (ulimit -l unlimited, LimitMEMLOCK= in systemd, or CAP_IPC_LOCK)",
		e.Bytes, e.Err, e.Limit)
}

// Unwrap returns e.Err.
func (e *MemlockError) Unwrap() error { return e.Err }
