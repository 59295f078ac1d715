package iwarp

import (
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// connectTo connects to a listener and returns the addresses as the listening
// side sees them.
func connectTo(t *testing.T, ch *eventChannel, to netip.AddrPort) (local, remote netip.AddrPort) {
	t.Helper()
	e := resolved(t, newChannel(t), to)
	e.createQP(100)
	require.NoError(t, e.id.Connect(verbs.ConnParam{}))
	passive := accept(t, ch, next(t, ch, verbs.EventConnectRequest), 100, verbs.ConnParam{})
	next(t, ch, verbs.EventEstablished)
	next(t, e.ch, verbs.EventEstablished)
	require.Equal(t, passive.id.LocalAddr(), e.id.RemoteAddr())
	require.Equal(t, passive.id.RemoteAddr(), e.id.LocalAddr())
	return passive.id.LocalAddr(), passive.id.RemoteAddr()
}

func TestTheIPv6WildcardTakesIPv4(t *testing.T) {
	ch := newChannel(t)
	l := listenOn(t, ch, "[::]:0", 8)
	require.True(t, l.LocalAddr().Addr().Is6())
	port := l.LocalAddr().Port()
	for _, addr := range []string{"127.0.0.1", "::1", "::ffff:127.0.0.1"} {
		to := netip.AddrPortFrom(netip.MustParseAddr(addr), port)
		local, remote := connectTo(t, ch, to)
		require.Equal(t, unmapped(to), local)
		require.Equal(t, unmapped(to).Addr(), remote.Addr())
	}
}

func TestAListenerTakesOnlyItsOwnFamily(t *testing.T) {
	for _, c := range []struct {
		bind, takes, not string
		afOnly           bool
	}{
		{"0.0.0.0:0", "127.0.0.1", "::1", false},
		{"[::]:0", "::1", "127.0.0.1", true},
		{"127.0.0.1:0", "127.0.0.1", "::1", true},
		{"[::ffff:127.0.0.1]:0", "127.0.0.1", "::1", false},
	} {
		t.Run(c.bind, func(t *testing.T) {
			ch := newChannel(t)
			l := newTestID(t, ch)
			require.NoError(t, l.SetAFOnly(c.afOnly))
			require.NoError(t, l.Bind(netip.MustParseAddrPort(c.bind)))
			require.NoError(t, l.Listen(0))
			require.ErrorIs(t, l.SetAFOnly(false), syscall.EINVAL)
			port := l.LocalAddr().Port()
			connectTo(t, ch, netip.AddrPortFrom(netip.MustParseAddr(c.takes), port))
			e := resolved(t, newChannel(t), netip.AddrPortFrom(netip.MustParseAddr(c.not), port))
			e.createQP(100)
			require.NoError(t, e.id.Connect(verbs.ConnParam{}))
			require.ErrorIs(t, next(t, e.ch, verbs.EventRejected).Err, syscall.ECONNREFUSED)
		})
	}
}

// linkLocal returns a link-local address of this host, or skips.
func linkLocal(t *testing.T) netip.Addr {
	interfaces, err := net.Interfaces()
	require.NoError(t, err)
	for _, i := range interfaces {
		addrs, _ := i.Addrs()
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err == nil && p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() {
				return p.Addr().WithZone(i.Name)
			}
		}
	}
	t.Skip("no link-local IPv6 address: try ip link add d0 type dummy && ip link set d0 up")
	return netip.Addr{}
}

func TestLinkLocalAddressesKeepTheirZone(t *testing.T) {
	addr := linkLocal(t)
	ch := newChannel(t)
	l := listenOn(t, ch, netip.AddrPortFrom(addr, 0).String(), 8)
	local, remote := connectTo(t, ch, l.LocalAddr())
	require.Equal(t, addr, local.Addr())
	require.Equal(t, addr, remote.Addr())
}

func TestAddressErrorsAreEvents(t *testing.T) {
	for _, c := range []struct {
		name, src, dst string
		errno          syscall.Errno
	}{
		{"a source that is not ours", "192.0.2.1:0", "127.0.0.1:1", syscall.EADDRNOTAVAIL},
		{"link-local without a zone", "", "[fe80::1]:1", syscall.EINVAL},
		{"source of another family", "127.0.0.1:0", "[::1]:1", syscall.EHOSTUNREACH},
	} {
		t.Run(c.name, func(t *testing.T) {
			ch := newChannel(t)
			i := newTestID(t, ch)
			var src netip.AddrPort
			if c.src != "" {
				src = netip.MustParseAddrPort(c.src)
			}
			require.NoError(t, i.ResolveAddr(src, netip.MustParseAddrPort(c.dst), time.Second))
			require.ErrorIs(t, next(t, ch, verbs.EventAddrError).Err, c.errno)
			require.Nil(t, i.Device())
			// It may be tried again.
			require.NoError(t, i.ResolveAddr(netip.AddrPort{}, netip.MustParseAddrPort("127.0.0.1:1"), time.Second))
			next(t, ch, verbs.EventAddrResolved)
			require.NotNil(t, i.Device())
		})
	}
}

func TestADialerKeepsThePortItIsBoundTo(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	free := ln.Addr().(*net.TCPAddr).AddrPort()
	ln.Close()
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 8)
	e := &end{t: t, ch: newChannel(t)}
	e.id = newTestID(t, e.ch)
	require.NoError(t, e.id.Bind(netip.AddrPortFrom(netip.IPv4Unspecified(), free.Port())))
	require.NoError(t, e.id.ResolveAddr(netip.AddrPort{}, l.LocalAddr(), time.Second))
	next(t, e.ch, verbs.EventAddrResolved)
	require.Equal(t, free, e.id.LocalAddr())
	require.NoError(t, e.id.ResolveRoute(time.Second))
	next(t, e.ch, verbs.EventRouteResolved)
	e.createQP(100)
	require.NoError(t, e.id.Connect(verbs.ConnParam{}))
	ev := next(t, ch, verbs.EventConnectRequest)
	require.Equal(t, free, ev.ID.RemoteAddr())
	require.NoError(t, ev.ID.Destroy())
}

func TestListenSaysThatAPortIsTaken(t *testing.T) {
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 1)
	other := newTestID(t, ch)
	require.NoError(t, other.Bind(l.LocalAddr()))
	require.ErrorIs(t, other.Listen(1), syscall.EADDRINUSE)
}
