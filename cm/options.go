package cm

import (
	"math/bits"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// SetAFOnly is RDMA_OPTION_ID_AFONLY of rdma_set_option(3): a listener on the
// IPv6 wildcard takes no IPv4 connections. It has to come before Bind.
func (id *ID) SetAFOnly(on bool) error {
	return id.set("set AF only", func() error { return id.v.SetAFOnly(on) })
}

// SetReuseAddr is RDMA_OPTION_ID_REUSEADDR of rdma_set_option(3): the id may be
// bound to an address that others are bound to, if they have set it too, and
// connect from there to other peers than they do. Only one id can listen on an
// address, which in any case is free again when its listener is destroyed, though
// old connections linger on TCP. It has to come before Bind.
func (id *ID) SetReuseAddr(on bool) error {
	return id.call("set reuse address", "set it on a new id, before Bind", []state{stateIdle}, stateSame,
		func() error { return id.v.SetReuseAddr(on) })
}

// SetTOS is RDMA_OPTION_ID_TOS of rdma_set_option(3): the differentiated services
// field (RFC 2474) of the connection's packets, or on InfiniBand what the service
// level is chosen by. Over TCP the two lowest bits stay TCP's own. It has to come
// before ResolveRoute or Listen. An accepted connection sends with its listener's
// over TCP, and with its dialer's on RoCE and InfiniBand. The kernel's siw driver
// takes it and does nothing.
func (id *ID) SetTOS(tos uint8) error {
	return id.call("set TOS", "set it before ResolveRoute or Listen",
		[]state{stateIdle, stateBound, stateResolvingAddr, stateAddrResolved}, stateSame,
		func() error { return id.v.SetTOS(tos) })
}

// SetAckTimeout is RDMA_OPTION_ID_ACK_TIMEOUT of rdma_set_option(3): how long the
// queue pair waits for an acknowledgement before it sends again, as often as
// ConnParam.RetryCount says, and then fails with StatusRetryExcErr. d is rounded up
// to the next 4.096 µs·2^n, where n is 1 to 31: from 8.192 µs to 2h26m36s. A device
// may take longer. 0 means to wait for ever. It has to come before Connect or
// Accept, and concerns this side only.
//
// Where TCP does this (iWARP), it fails with errors.ErrUnsupported; before a device
// is known to be iWARP, the option is taken and means nothing there.
func (id *ID) SetAckTimeout(d time.Duration) error {
	return id.call("set ack timeout", "set it before Connect or Accept",
		[]state{stateIdle, stateBound, stateResolvingAddr, stateAddrResolved, stateResolvingRoute, stateRouteResolved, stateRequested},
		stateSame, func() error {
			n, err := ackTimeout(d)
			if err != nil {
				return err
			}
			return id.v.SetAckTimeout(n)
		})
}

// ackTimeoutUnit is what an ack time-out is a power of two of, 4.096 µs.
const ackTimeoutUnit = 4096 * time.Nanosecond

// ackTimeout returns the least n for which 4.096 µs·2^n is not less than d, or 0
// for 0.
func ackTimeout(d time.Duration) (uint8, error) {
	const most = ackTimeoutUnit << verbs.MaxAckTimeout
	if limit := min(max(d, 0), most); d != limit {
		return 0, &LimitError{What: "nanoseconds of ack time-out", Value: int64(d), Limit: int64(limit),
			Fix: "0 is no time-out", Errno: syscall.EINVAL}
	}
	if d == 0 {
		return 0, nil
	}
	units := uint64((d + ackTimeoutUnit - 1) / ackTimeoutUnit)
	return uint8(max(bits.Len64(units-1), 1)), nil
}
