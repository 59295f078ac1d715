package cm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"github.com/rdmanet/rdmanet/qp"
)

// opError builds every error of this package: it says what was tried, and
// makes sure that errors.As finds a syscall.Errno. A nil err stays nil.
func opError(op string, err error) error {
	if err == nil {
		return nil
	}
	return &callError{op, withErrno(err, defaultErrno(err))}
}

// callError puts its text together only when it is asked, because a BusyError
// describes ids, and locks them for it, and errors are made with locks held.
type callError struct {
	op  string
	err error
}

func (e *callError) Error() string { return "cm: " + e.op + ": " + e.err.Error() }
func (e *callError) Unwrap() error { return e.err }

func defaultErrno(err error) syscall.Errno {
	switch {
	case errors.Is(err, net.ErrClosed):
		return syscall.EBADF
	case errors.Is(err, context.DeadlineExceeded):
		return syscall.ETIMEDOUT
	case errors.Is(err, context.Canceled):
		return syscall.ECANCELED
	}
	return syscall.EIO
}

// withErrno adds errno to an error that carries none.
func withErrno(err error, errno syscall.Errno) error {
	var have syscall.Errno
	if errors.As(err, &have) {
		return err
	}
	return fmt.Errorf("%w (%w)", err, errno)
}

var (
	errChannelClosed = fmt.Errorf("event channel: %w (%w)", net.ErrClosed, syscall.EBADF)
	errDestroyed     = fmt.Errorf("id was destroyed: %w (%w)", net.ErrClosed, syscall.EBADF)
)

// BusyError reports that something could not be closed, destroyed or moved
// because it is in use. The refused call changed nothing. It wraps EBUSY.
type BusyError struct {
	Object string   // what is busy: "event channel" or "id"
	IDs    []*ID    // live ids of the channel
	Events []*Event // events got and not acked
	QP     *qp.QP   // queue pair of the id, not closed
}

func (e *BusyError) Error() string {
	var uses []string
	if n := len(e.IDs); n > 0 {
		uses = append(uses, fmt.Sprintf("%d id(s) not destroyed (%s)", n, list(e.IDs)))
	}
	if n := len(e.Events); n > 0 {
		uses = append(uses, fmt.Sprintf("%d event(s) not acked (%s)", n, list(e.Events)))
	}
	if e.QP != nil {
		uses = append(uses, fmt.Sprintf("QP %d not closed", e.QP.Num()))
	}
	return e.Object + " is in use: " + strings.Join(uses, ", ")
}

// Unwrap returns EBUSY.
func (e *BusyError) Unwrap() error { return syscall.EBUSY }

// list names the first few things of a list that may be long.
func list[T fmt.Stringer](things []T) string {
	const few = 4
	var s []string
	for _, t := range things[:min(few, len(things))] {
		s = append(s, t.String())
	}
	if len(things) > few {
		s = append(s, "...")
	}
	return strings.Join(s, ", ")
}

// StateError reports a call that the id's state does not allow. It wraps
// EINVAL.
type StateError struct {
	Call  string // such as "connect"
	State string // the id's state
	Fix   string
}

func (e *StateError) Error() string {
	return fmt.Sprintf("id is %s: %v; %s", e.State, syscall.EINVAL, e.Fix)
}

// Unwrap returns EINVAL.
func (e *StateError) Unwrap() error { return syscall.EINVAL }

// EventError is an event that ended what ID.Wait waited for.
type EventError struct {
	Type        EventType
	Remote      netip.AddrPort
	Err         error  // why; carries a syscall.Errno
	PrivateData []byte // for EventRejected: what the peer had to say
}

func (e *EventError) Error() string { return fmt.Sprintf("%v %v: %v", e.Type, e.Remote, e.Err) }

// Unwrap returns e.Err.
func (e *EventError) Unwrap() error { return e.Err }

// eventErr returns the reason of an event, which for a failure is never nil.
func eventErr(t EventType, err error) error {
	var errno syscall.Errno
	switch t {
	case EventAddrError:
		errno = syscall.EHOSTUNREACH
	case EventRouteError:
		errno = syscall.ENETUNREACH
	case EventUnreachable:
		errno = syscall.ETIMEDOUT
	case EventRejected:
		errno = syscall.ECONNREFUSED
	case EventConnectError:
		errno = syscall.ECONNABORTED
	case EventDeviceRemoval:
		errno = syscall.ENODEV
	default:
		if err == nil {
			return nil
		}
		errno = syscall.ECONNRESET
	}
	if err == nil {
		return errno
	}
	return withErrno(err, errno)
}
