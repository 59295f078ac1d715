package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
)

// Operations, as net.OpError.Op has them.
const (
	opDial   = "dial"
	opListen = "listen"
	opAccept = "accept"
	opRead   = "read"
	opWrite  = "write"
	opClose  = "close"
	opSet    = "set"
)

// opError builds every error of this package. io.EOF stays bare; a closed
// connection is net.ErrClosed; everything else wraps a syscall.Errno, a
// deadline's or a context's error.
func opError(op string, source, addr net.Addr, err error) error {
	if err == nil || err == io.EOF {
		return err // without an allocation: this is the path of success
	}
	if oe, ok := err.(*net.OpError); ok && oe.Net == "rdma" {
		return err // built already
	}
	switch {
	case errors.Is(err, net.ErrClosed):
		err = net.ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = os.ErrDeadlineExceeded
	}
	return &net.OpError{Op: op, Net: "rdma", Source: source, Addr: addr, Err: timeouter(reasonOf(err))}
}

// reasonOf takes the reason out of the error of a software provider's socket.
func reasonOf(err error) error {
	var oe *net.OpError
	var errno syscall.Errno
	if errors.As(err, &oe) && errors.As(oe.Err, &errno) {
		return oe.Err
	}
	return err
}

// timeouter makes an error say Timeout() where net.OpError looks for it.
func timeouter(err error) error {
	if _, ok := err.(interface{ Timeout() bool }); ok {
		return err
	}
	var t interface{ Timeout() bool }
	if errors.As(err, &t) && t.Timeout() {
		return &timeoutError{err}
	}
	return err
}

type timeoutError struct{ error }

func (e *timeoutError) Unwrap() error { return e.error }
func (*timeoutError) Timeout() bool   { return true }
func (*timeoutError) Temporary() bool { return true }

// protocolErrorf reports what a peer must not send. It wraps EPROTO.
func protocolErrorf(format string, a ...any) error {
	return fmt.Errorf("protocol error: "+format+": %w", append(a, syscall.EPROTO)...)
}

// ctxError turns a context's end into what net's dialer says.
func ctxError(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return &ctxTimeout{}
	}
	return ctx.Err()
}

// ctxTimeout is both os.ErrDeadlineExceeded's kind of error and
// context.DeadlineExceeded.
type ctxTimeout struct{}

func (*ctxTimeout) Error() string        { return "i/o timeout" }
func (*ctxTimeout) Timeout() bool        { return true }
func (*ctxTimeout) Temporary() bool      { return true }
func (*ctxTimeout) Is(target error) bool { return target == context.DeadlineExceeded }
