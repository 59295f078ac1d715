package cm

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOpError(t *testing.T) {
	require.NoError(t, opError("connect", nil))
	for _, tc := range []struct {
		err   error
		errno syscall.Errno
		text  string
	}{
		{syscall.ECONNREFUSED, syscall.ECONNREFUSED, "cm: connect: connection refused"},
		{io.ErrUnexpectedEOF, syscall.EIO, "cm: connect: unexpected EOF (input/output error)"},
		{net.ErrClosed, syscall.EBADF, "cm: connect: use of closed network connection (bad file descriptor)"},
		{context.Canceled, syscall.ECANCELED, "cm: connect: context canceled (operation canceled)"},
		{context.DeadlineExceeded, syscall.ETIMEDOUT, "cm: connect: context deadline exceeded (connection timed out)"},
		{&BusyError{Object: "id"}, syscall.EBUSY, "cm: connect: id is in use: "},
		{&StateError{Call: "connect", State: "idle", Fix: "resolve first"}, syscall.EINVAL, "cm: connect: id is idle: invalid argument; resolve first"},
		{&EventError{Type: EventRejected, Err: syscall.ECONNREFUSED}, syscall.ECONNREFUSED, "cm: connect: REJECTED invalid AddrPort: connection refused"},
	} {
		err := opError("connect", tc.err)
		require.ErrorIs(t, err, tc.err)
		var errno syscall.Errno
		require.ErrorAs(t, err, &errno)
		require.Equal(t, tc.errno, errno)
		require.Equal(t, tc.text, err.Error())
	}
}

func TestFailureEventsHaveAnErrno(t *testing.T) {
	why := errors.New("reason")
	for typ, want := range map[EventType]syscall.Errno{
		EventAddrError:     syscall.EHOSTUNREACH,
		EventRouteError:    syscall.ENETUNREACH,
		EventUnreachable:   syscall.ETIMEDOUT,
		EventRejected:      syscall.ECONNREFUSED,
		EventConnectError:  syscall.ECONNABORTED,
		EventDeviceRemoval: syscall.ENODEV,
	} {
		require.ErrorIs(t, eventErr(typ, nil), want)
		require.ErrorIs(t, eventErr(typ, why), want)
		require.ErrorIs(t, eventErr(typ, why), why)
		require.NotErrorIs(t, eventErr(typ, syscall.EACCES), want, "the provider knows better")
	}
	require.NoError(t, eventErr(EventEstablished, nil))
	require.NoError(t, eventErr(EventDisconnected, nil))
	require.ErrorIs(t, eventErr(EventDisconnected, why), syscall.ECONNRESET)
}

func TestStateAdvancesWithEvents(t *testing.T) {
	for _, tc := range []struct {
		from  state
		event EventType
		to    state
	}{
		{stateResolvingAddr, EventAddrResolved, stateAddrResolved},
		{stateResolvingAddr, EventAddrError, stateBound},
		{stateResolvingRoute, EventRouteResolved, stateRouteResolved},
		{stateResolvingRoute, EventRouteError, stateAddrResolved},
		{stateConnecting, EventEstablished, stateConnected},
		{stateAccepting, EventEstablished, stateConnected},
		{stateConnecting, EventRejected, stateFailed},
		{stateConnecting, EventUnreachable, stateFailed},
		{stateAccepting, EventConnectError, stateFailed},
		{stateConnected, EventDisconnected, stateDisconnected},
		{stateConnected, EventEstablished, stateConnected},
		{stateConnected, EventTimewaitExit, stateConnected},
		{stateDisconnected, EventUnreachable, stateDisconnected},
	} {
		id := &ID{}
		id.state.Store(int32(tc.from))
		require.True(t, id.advance(tc.event))
		require.Equal(t, tc.to, state(id.state.Load()), "%v in state %v", tc.event, tc.from)
	}
	id := &ID{}
	id.state.Store(int32(stateConnected))
	require.True(t, id.advance(EventDisconnected))
	require.False(t, id.advance(EventDisconnected), "DISCONNECTED is reported once")
}
