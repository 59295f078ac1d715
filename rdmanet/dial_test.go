package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"math/rand/v2"

	"github.com/stretchr/testify/require"
)

// serve accepts and closes until the listener is closed.
func serve(l net.Listener) (accepted *atomic.Int32) {
	accepted = new(atomic.Int32)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			go c.Close()
		}
	}()
	return accepted
}

// refusing returns an address at which nobody listens.
func refusing(t testing.TB) string {
	l := listen(t, ListenConfig{})
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	return addr
}

// silent is an address where connect requests arrive and nobody answers.
func silent(t testing.TB) string {
	if testProvider() == ProviderIWARP {
		l, err := net.Listen("tcp", testAddr(t))
		require.NoError(t, err)
		t.Cleanup(func() { l.Close() })
		return l.Addr().String()
	}
	return silentOn(t, "")
}

// silentOn is silent with a provider.
func silentOn(t testing.TB, p Provider) string {
	r := newRaw(t, p)
	var err error
	r.id, err = r.ch.NewID()
	require.NoError(t, err)
	require.NoError(t, r.id.Bind(netip.MustParseAddrPort(testAddr(t))))
	require.NoError(t, r.id.Listen(64))
	return r.id.LocalAddr().String()
}

func TestDialIsCancelledAtAnyMoment(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		l := listen(t, ListenConfig{Config: cfg})
		serve(l)
		rng := rand.New(stream(1))
		var cancelled, connected int
		for range scaled(300, 3000) {
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(time.Duration(rng.IntN(600))*time.Microsecond, cancel)
			c, err := (&Dialer{Config: cfg}).DialContext(ctx, "rdma", l.Addr().String())
			switch {
			case err == nil:
				connected++
				require.NoError(t, c.Close())
			default:
				require.ErrorIs(t, err, context.Canceled)
				cancelled++
			}
			cancel()
		}
		t.Logf("%d cancelled, %d connected", cancelled, connected)
	})
}

func TestDialWithACancelledContextFails(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{})
	n := serve(l)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range scaled(100, 1000) {
		_, err := (&Dialer{}).DialContext(ctx, "rdma", l.Addr().String())
		require.ErrorIs(t, err, context.Canceled)
	}
	require.Zero(t, n.Load())
}

func TestConnectionOutlivesTheContextOfItsDial(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{})
	ctx, cancel := context.WithCancel(context.Background())
	accepted := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	c, err := (&Dialer{}).DialContext(ctx, "rdma", l.Addr().String())
	require.NoError(t, err)
	cancel()
	b := <-accepted
	closeLater(t, c, b)
	roundTrip(t, c, b, []byte("alive"))
}

func TestFailedDialsLeaveNothing(t *testing.T) {
	checkLeaks(t)
	refused := refusing(t)
	silent := silent(t)
	hold := listen(t, ListenConfig{}) // keeps the event loop, so that its descriptors don't come and go
	_ = hold
	n := scaled(1000, 5000)
	before, goroutines := fds(t), runtime.NumGoroutine()
	for i := range n {
		ctx, cancel := context.WithCancel(context.Background())
		var err error
		switch i % 4 {
		case 0, 1:
			_, err = (&Dialer{}).DialContext(ctx, "rdma", refused)
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
		case 2:
			time.AfterFunc(time.Duration(i%500)*time.Microsecond, cancel)
			_, err = (&Dialer{}).DialContext(ctx, "rdma", silent)
			require.ErrorIs(t, err, context.Canceled)
		case 3:
			d := Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1)}} // not ours
			_, err = d.DialContext(ctx, "rdma", refused)
			require.Error(t, err)
		}
		cancel()
	}
	eventually(t, func() bool { return fds(t) <= before+2 && runtime.NumGoroutine() <= goroutines+4 },
		"nothing is left: %d descriptors, were %d", fds(t), before)
}

// TestDialTriesAllAddresses of a name: here an address of the other family at
// which nobody listens comes first, or later.
func TestDialTriesAllAddresses(t *testing.T) {
	needsSoftware(t)
	checkLeaks(t)
	l, err := Listen("rdma4", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	n := serve(l)
	port := l.Addr().(*Addr).AddrPort().Port()
	v4, v6 := netip.MustParseAddrPort(fmt.Sprintf("127.0.0.1:%d", port)), netip.MustParseAddrPort(fmt.Sprintf("[::1]:%d", port))
	bad := netip.MustParseAddrPort(fmt.Sprintf("127.0.0.2:%d", port))
	cfg, err := Config{}.resolve()
	require.NoError(t, err)
	for i, dst := range [][]netip.AddrPort{{v4}, {v6, v4}, {v4, v6}, {bad, v4}, {bad, v6, v4}} {
		for _, delay := range []time.Duration{0, -1, time.Microsecond} {
			r := race{cfg: cfg}
			c, err := r.run(context.Background(), lanes(cfg.providers(), dst, delay))
			require.NoError(t, err, "%d, %v", i, delay)
			require.NoError(t, c.Close())
		}
	}
	r := race{cfg: cfg}
	_, err = r.run(context.Background(), lanes(cfg.providers(), []netip.AddrPort{bad, v6}, 0))
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.ErrorContains(t, err, bad.String(), "the first one's error")
	eventually(t, func() bool { return n.Load() == 15 }, "15 connections: %d", n.Load())
}

// TestLosersNeverComeOutOfAccept races two listeners' addresses.
func TestLosersNeverComeOutOfAccept(t *testing.T) {
	needsSoftware(t)
	checkLeaks(t)
	l, err := Listen("rdma", ":0") // both families
	require.NoError(t, err)
	defer l.Close()
	n := serve(l)
	port := l.Addr().(*Addr).AddrPort().Port()
	d := Dialer{FallbackDelay: time.Microsecond}
	rounds := scaled(100, 1000)
	for range rounds {
		c, err := d.Dial("rdma", fmt.Sprintf("localhost:%d", port))
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	eventually(t, func() bool { return n.Load() >= int32(rounds) }, "all are accepted")
	require.EqualValues(t, rounds, n.Load())
}

func TestDialFromALocalAddress(t *testing.T) {
	needsSoftware(t)
	checkLeaks(t)
	l := listen(t, ListenConfig{})
	serve(l)
	for _, local := range []net.Addr{
		&net.TCPAddr{IP: net.IPv4(127, 0, 0, 3)}, AddrFrom(netip.MustParseAddrPort("127.0.0.3:0")),
	} {
		c, err := (&Dialer{LocalAddr: local}).Dial("rdma", l.Addr().String())
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(c.LocalAddr().String(), "127.0.0.3:"), c.LocalAddr())
		require.NoError(t, c.Close())
	}
	port := AddrFrom(netip.MustParseAddrPort(refusing(t)))
	c, err := (&Dialer{LocalAddr: &net.TCPAddr{Port: int(port.AddrPort().Port())}}).Dial("rdma", l.Addr().String())
	require.NoError(t, err)
	require.Equal(t, port.AddrPort().Port(), c.LocalAddr().(*Addr).AddrPort().Port())
	require.NoError(t, c.Close())
}

func TestNetworksRestrictFamilies(t *testing.T) {
	needsSoftware(t)
	checkLeaks(t)
	for _, tc := range []struct {
		listen, addr string
		v4, v6       bool
	}{
		{"rdma", ":0", true, true}, {"tcp", ":0", true, true}, {"rdma4", ":0", true, false}, {"tcp6", ":0", false, true}, {"rdma6", "[::]:0", false, true},
	} {
		l, err := Listen(tc.listen, tc.addr)
		require.NoError(t, err)
		serve(l)
		port := l.Addr().(*Addr).AddrPort().Port()
		for addr, want := range map[string]bool{"127.0.0.1": tc.v4, "::1": tc.v6} {
			c, err := Dial("rdma", net.JoinHostPort(addr, fmt.Sprint(port)))
			if want {
				require.NoError(t, err, "%v %s", tc, addr)
				require.NoError(t, c.Close())
			} else {
				require.ErrorIs(t, err, syscall.ECONNREFUSED, "%v %s", tc, addr)
			}
		}
		c, err := Dial(tc.listen, fmt.Sprintf(":%d", port)) // no host is this one
		require.NoError(t, err)
		require.NoError(t, c.Close())
		require.NoError(t, l.Close())
	}
}

func TestListenerCloseResetsTheBacklog(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		l := listen(t, ListenConfig{Config: cfg})
		var conns []net.Conn
		for range 8 {
			c, err := (&Dialer{Config: cfg}).Dial("rdma", l.Addr().String())
			require.NoError(t, err)
			closeLater(t, c)
			conns = append(conns, c)
		}
		eventually(t, func() bool { return len(l.queue) == len(conns) }, "they wait for Accept")
		blocked := rawConnect(t, cfg.Provider, l.addr.ap, honest(), 20) // a set-up that never ends
		_ = blocked
		within(t, patience, func() { require.NoError(t, l.Close()) })
		require.ErrorIs(t, l.Close(), net.ErrClosed)
		require.ErrorIs(t, l.SetDeadline(time.Now()), net.ErrClosed)
		_, err := l.Accept()
		require.ErrorIs(t, err, net.ErrClosed)
		for _, c := range conns {
			_ = c.SetReadDeadline(time.Now().Add(patience))
			_, err := c.Read(make([]byte, 1))
			require.ErrorIs(t, err, syscall.ECONNRESET)
		}
	})
}

func TestListenerCloseLeavesAcceptedConnections(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{}) // pair has closed the listener
	roundTrip(t, a, b, bytesOf(1, 100_000))
}

func TestListenerCloseEndsAccept(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{})
	errs := make(chan error, 8)
	for range cap(errs) {
		go func() {
			_, err := l.Accept()
			errs <- err
		}()
	}
	time.Sleep(5 * time.Millisecond) // most block; all are right anyway
	require.NoError(t, l.Close())
	for range cap(errs) {
		require.ErrorIs(t, <-errs, net.ErrClosed)
	}
}

// TestListenerCloseRacesDials has set-ups in every state.
func TestListenerCloseRacesDials(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for i := range scaled(30, 300) {
			checkLeaks(t)
			l := listen(t, ListenConfig{Config: cfg})
			serve(l)
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					for {
						c, err := (&Dialer{Config: cfg}).Dial("rdma", l.Addr().String())
						if err != nil {
							if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
								t.Error(err)
							}
							return
						}
						_ = c.SetDeadline(time.Now().Add(patience))
						_, _ = c.Read(make([]byte, 1))
						_ = c.Close()
					}
				})
			}
			time.Sleep(time.Duration(i%7) * time.Millisecond)
			require.NoError(t, l.Close())
			within(t, patience, wg.Wait)
		}
	})
}

func TestBacklogFullRefuses(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		var log logBuffer
		lcfg := cfg
		lcfg.Logger = log.logger()
		l := listen(t, ListenConfig{Config: lcfg, Backlog: 2})
		dial := func() (net.Conn, error) { return (&Dialer{Config: cfg}).Dial("rdma", l.Addr().String()) }
		for range 2 {
			c, err := dial()
			require.NoError(t, err)
			closeLater(t, c)
		}
		eventually(t, func() bool { return len(l.queue) == 2 }, "they wait for Accept")
		_, err := dial()
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.ErrorContains(t, err, "backlog")
		eventually(t, func() bool { return log.has("refused", "backlog") }, "it is logged: %s", &log)
		a, err := l.Accept() // room again
		require.NoError(t, err)
		closeLater(t, a)
		c, err := dial()
		require.NoError(t, err)
		closeLater(t, c)
	})
}

// TestAConnectionThatIsGoneComesOutOfAccept, and what it had sent can be read.
func TestAConnectionThatIsGoneComesOutOfAccept(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{})
	c, err := Dial("rdma", l.Addr().String())
	require.NoError(t, err)
	write(t, c, []byte("was here"))
	require.NoError(t, c.Close())
	a, err := l.Accept()
	require.NoError(t, err)
	require.Equal(t, "was here", string(read(t, a, 8)))
	requireEOF(t, a)
	require.NoError(t, a.Close())
}

// TestLookupKeepsTheZone: a link-local address is nothing without it.
func TestLookupKeepsTheZone(t *testing.T) {
	addrs, port, err := lookup(t.Context(), familyAny, "[fe80::1%eth7]:7471")
	require.NoError(t, err)
	require.Equal(t, uint16(7471), port)
	require.Equal(t, []netip.Addr{netip.MustParseAddr("fe80::1%eth7")}, addrs)
	require.Equal(t, "[fe80::1%eth7]:7471", AddrFrom(netip.AddrPortFrom(addrs[0], port)).String())
}

// TestLinkLocalAddressesConnect where the machine has one.
func TestLinkLocalAddressesConnect(t *testing.T) {
	checkLeaks(t)
	ap := linkLocal(t)
	l, err := Listen("rdma", netip.AddrPortFrom(ap, 0).String())
	require.NoError(t, err)
	defer l.Close()
	require.Equal(t, ap, l.Addr().(*Addr).AddrPort().Addr())
	a, b := pairOn(t, Config{}, l)
	closeLater(t, a, b)
	require.Equal(t, l.Addr(), a.RemoteAddr())
	require.Equal(t, ap.Zone(), b.RemoteAddr().(*Addr).AddrPort().Addr().Zone())
	write(t, a, []byte("hello"))
	require.Equal(t, []byte("hello"), read(t, b, 5))
}

// linkLocal returns a link-local IPv6 address of this machine, with its zone.
func linkLocal(t *testing.T) netip.Addr {
	interfaces, err := net.Interfaces()
	require.NoError(t, err)
	device := os.Getenv("RDMANET_LAB_RXE_INTERFACE")
	if os.Getenv("RDMANET_LAB_RXE4") == "" {
		device = os.Getenv("RDMANET_LAB_SIW_INTERFACE")
	}
	for _, i := range interfaces {
		if testProvider() == ProviderDevice && i.Name != device {
			continue
		}
		addrs, _ := i.Addrs()
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err == nil && i.Flags&net.FlagUp != 0 && p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() {
				return p.Addr().WithZone(i.Name)
			}
		}
	}
	t.Skip("no interface has a link-local IPv6 address; try: lab/guest, whose interfaces have one")
	return netip.Addr{}
}
