package iwarp

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// sockopt reads an option of an id's TCP connection.
func sockopt(t *testing.T, i verbs.ID, level, option int) (value int) {
	t.Helper()
	mine := i.(*id)
	mine.mu.Lock()
	defer mine.mu.Unlock()
	raw, err := mine.conn.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) { value, err = unix.GetsockoptInt(int(fd), level, option) }))
	require.NoError(t, err)
	return value
}

// tosOf is what the id's packets carry.
func tosOf(t *testing.T, i verbs.ID) int {
	t.Helper()
	if i.LocalAddr().Addr().Is4() { // on an IPv6 socket, too
		return sockopt(t, i, unix.IPPROTO_IP, unix.IP_TOS)
	}
	return sockopt(t, i, unix.IPPROTO_IPV6, unix.IPV6_TCLASS)
}

// connectWith connects to a listener, after set has set the dialer's options, and
// returns the dialer and the id that the listener reports.
func connectWith(t *testing.T, ch *eventChannel, to netip.AddrPort, set func(verbs.ID)) (active, passive verbs.ID) {
	t.Helper()
	e := &end{t: t, ch: newChannel(t)}
	e.id = newTestID(t, e.ch)
	set(e.id)
	require.NoError(t, e.id.ResolveAddr(netip.AddrPort{}, to, time.Second))
	next(t, e.ch, verbs.EventAddrResolved)
	require.NoError(t, e.id.ResolveRoute(time.Second))
	next(t, e.ch, verbs.EventRouteResolved)
	require.ErrorIs(t, e.id.SetTOS(0), syscall.EINVAL, "too late")
	e.createQP(100)
	require.NoError(t, e.id.Connect(verbs.ConnParam{}))
	p := accept(t, ch, next(t, ch, verbs.EventConnectRequest), 100, verbs.ConnParam{})
	next(t, ch, verbs.EventEstablished)
	next(t, e.ch, verbs.EventEstablished)
	return e.id, p.id
}

func TestTOSIsThePacketsOfBothSides(t *testing.T) {
	const dialers, listeners = 46 << 2, 10 << 2
	for _, c := range []struct{ bind, to string }{
		{"127.0.0.1:0", "127.0.0.1"},
		{"[::1]:0", "::1"},
		{"[::]:0", "::1"},
		{"[::]:0", "127.0.0.1"},
	} {
		t.Run(c.bind+" "+c.to, func(t *testing.T) {
			ch := newChannel(t)
			l := newTestID(t, ch)
			require.NoError(t, l.SetTOS(listeners))
			require.NoError(t, l.Bind(netip.MustParseAddrPort(c.bind)))
			require.NoError(t, l.Listen(8))
			require.ErrorIs(t, l.SetTOS(0), syscall.EINVAL, "too late")
			to := netip.AddrPortFrom(netip.MustParseAddr(c.to), l.LocalAddr().Port())
			active, passive := connectWith(t, ch, to, func(i verbs.ID) { require.NoError(t, i.SetTOS(dialers)) })
			require.Equal(t, dialers, tosOf(t, active))
			require.Equal(t, listeners, tosOf(t, passive))

			active, _ = connectWith(t, ch, to, func(verbs.ID) {})
			require.Zero(t, tosOf(t, active))
		})
	}
}

func TestReuseAddrIsForDialers(t *testing.T) {
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 8)
	for _, on := range []bool{false, true} {
		active, _ := connectWith(t, ch, l.LocalAddr(), func(i verbs.ID) { require.NoError(t, i.SetReuseAddr(on)) })
		require.Equal(t, on, sockopt(t, active, unix.SOL_SOCKET, unix.SO_REUSEADDR) != 0)
	}
}

// A server that starts again finds its port free, without having asked for
// anything, though connections of its predecessor linger.
func TestAListenersAddressIsFreeAtOnce(t *testing.T) {
	ch := newChannel(t)
	l := newTestID(t, ch)
	require.NoError(t, l.SetReuseAddr(false))
	require.NoError(t, l.Bind(netip.MustParseAddrPort("127.0.0.1:0")))
	require.NoError(t, l.Listen(8))
	addr := l.LocalAddr()
	c, err := net.Dial("tcp", addr.String())
	require.NoError(t, err)
	defer c.Close()
	var served *net.TCPConn
	ln := l.(*id).listener
	eventually(t, "a connection in its set-up", func() bool {
		ln.mu.Lock()
		defer ln.mu.Unlock()
		if len(ln.halfOpen) > 0 {
			served = ln.halfOpen[0].conn
		}
		return served != nil
	})
	served.CloseWrite() // first, so that the port is in FIN_WAIT or TIME_WAIT here
	ln.close()
	listenOn(t, ch, addr.String(), 8)
}

func TestAckTimeoutIsTCPs(t *testing.T) {
	err := newTestID(t, newChannel(t)).SetAckTimeout(14)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorIs(t, err, syscall.EOPNOTSUPP)
}
