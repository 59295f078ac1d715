package iwarp

import (
	"errors"
	"io"
	"net"
	"syscall"
)

// errnoError gives an error that has no errno one, so that every failure maps
// to what librdmacm would report.
type errnoError struct {
	err   error
	errno syscall.Errno
}

func (e *errnoError) Error() string   { return e.err.Error() }
func (e *errnoError) Unwrap() []error { return []error{e.err, e.errno} }

func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	errors.As(err, &errno)
	return errno
}

// withErrno returns err with an errno in its tree: its own, ETIMEDOUT for a
// timeout, ECONNRESET for an early end, or else def.
func withErrno(err error, def syscall.Errno) error {
	if err == nil || errnoOf(err) != 0 {
		return err
	}
	var ne net.Error
	switch {
	case errors.As(err, &ne) && ne.Timeout():
		def = syscall.ETIMEDOUT
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		def = syscall.ECONNRESET
	}
	return &errnoError{err: err, errno: def}
}
