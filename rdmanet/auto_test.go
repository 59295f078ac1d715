package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs/verbstest"
)

// On the host the fake stands in for the device of ProviderAuto, except where a
// test asks for a real one.

// fakeFirst makes the fake what auto prefers.
func fakeFirst(t testing.TB) Config {
	was := automatic
	automatic = []Provider{verbstest.Name, ProviderIWARP}
	t.Cleanup(func() {
		automatic = was
		fake.SetFail(nil)
		loops.failed.Store(nil)
	})
	return Config{Provider: ProviderAuto}
}

// failing makes an operation of the fake fail.
func failing(op string, err error) {
	fake.SetFail(func(o string) error {
		if o == op {
			return err
		}
		return nil
	})
}

func listenAuto(t testing.TB, cfg Config, addr string) *Listener {
	t.Helper()
	l, err := (&ListenConfig{Config: cfg}).Listen(context.Background(), "rdma", addr)
	require.NoError(t, err)
	closeLater(t, l)
	return l.(*Listener)
}

// requireConnects dials and checks by which provider, at both ends.
func requireConnects(t *testing.T, cfg Config, l *Listener, addr string, by Provider) {
	t.Helper()
	type result struct {
		c   net.Conn
		err error
	}
	accepted := make(chan result, 1)
	go func() {
		c, err := l.Accept()
		accepted <- result{c, err}
	}()
	c, err := (&Dialer{Config: cfg}).Dial("rdma", addr)
	require.NoError(t, err)
	r := <-accepted
	require.NoError(t, r.err)
	closeLater(t, c, r.c)
	require.Equal(t, by, c.(*Conn).Provider())
	roundTrip(t, c.(*Conn), r.c.(*Conn), bytesOf(1, 100_000))
}

func TestAutoListensWithEveryProviderOnOnePort(t *testing.T) {
	checkLeaks(t)
	cfg := fakeFirst(t)
	l := listenAuto(t, cfg, "127.0.0.1:0")
	require.Equal(t, automatic, l.Providers())
	for _, p := range []Provider{ProviderAuto, verbstest.Name, ProviderIWARP, ProviderAuto} {
		by := p
		if p == ProviderAuto {
			by = verbstest.Name
		}
		requireConnects(t, Config{Provider: p}, l, l.Addr().String(), by)
	}
}

func TestAutoDialsWhatIsThere(t *testing.T) {
	checkLeaks(t)
	cfg := fakeFirst(t)
	for _, p := range automatic {
		l := listenAuto(t, Config{Provider: p}, "127.0.0.1:0")
		requireConnects(t, cfg, l, l.Addr().String(), p)
	}
}

// TestAutoFallsBackToSoftware whatever is wrong with the device.
func TestAutoFallsBackToSoftware(t *testing.T) {
	checkLeaks(t)
	cfg := fakeFirst(t)
	l := listenAuto(t, Config{Provider: ProviderIWARP}, "127.0.0.1:0")
	for _, op := range []string{"create event channel", "create id", "resolve address", "resolve route", "alloc pd", "reg mr", "create cq", "create qp", "connect"} {
		for _, err := range []error{syscall.ENODEV, syscall.EACCES, syscall.ENOMEM, verbstest.ErrHang} {
			t.Run(fmt.Sprintf("%s/%v", op, err), func(t *testing.T) {
				failing(op, err)
				loops.failed.Store(nil)
				requireConnects(t, cfg, l, l.Addr().String(), ProviderIWARP)
			})
		}
	}
	eventually(t, func() bool { // losers are closed meanwhile
		loops.Lock()
		defer loops.Unlock()
		return loops.m[verbstest.Name] == nil
	}, "the fake's event channel is closed")
	failing("create event channel", syscall.ENODEV)
	require.Equal(t, []Provider{ProviderIWARP}, listenAuto(t, cfg, "127.0.0.1:0").Providers())
	fake.SetFail(nil)
	loops.failed.Store(nil)
	failing("bind", syscall.ENODEV)
	require.Equal(t, []Provider{ProviderIWARP}, listenAuto(t, cfg, "127.0.0.1:0").Providers())
}

// TestAutoSaysWhatMatters: that there is no device is not why nobody answered.
func TestAutoSaysWhatMatters(t *testing.T) {
	checkLeaks(t)
	cfg := fakeFirst(t)
	failing("resolve address", syscall.ENODEV)
	_, err := (&Dialer{Config: cfg}).Dial("rdma", refusing(t))
	requireOpError(t, err, "dial", syscall.ECONNREFUSED)
}

func TestAutoLosersNeverComeOutOfAccept(t *testing.T) {
	checkLeaks(t)
	cfg, err := fakeFirst(t).resolve()
	require.NoError(t, err)
	l := listenAuto(t, cfg, "127.0.0.1:0")
	n := serve(l)
	const rounds = 50
	for range rounds {
		both := lanes(automatic, []netip.AddrPort{l.addr.ap}, 0)
		both[1].after = 0 // neck and neck
		c, err := (&race{cfg: cfg}).run(t.Context(), both)
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	eventually(t, func() bool { return n.Load() >= rounds }, "all are accepted")
	require.EqualValues(t, rounds, n.Load())
}

func TestAutoPortsThatAreTaken(t *testing.T) {
	checkLeaks(t)
	cfg := fakeFirst(t)
	l := listenAuto(t, Config{Provider: ProviderIWARP}, "127.0.0.1:0")
	for range 2 { // by software, and by the device
		_, err := (&ListenConfig{Config: cfg}).Listen(context.Background(), "rdma", l.Addr().String())
		requireOpError(t, err, "listen", syscall.EADDRINUSE)
		l = listenAuto(t, Config{Provider: verbstest.Name}, "127.0.0.1:0")
	}
}

func TestLanes(t *testing.T) {
	v4, v6, other := netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("[fd00::1]:1"), netip.MustParseAddrPort("10.0.0.2:1")
	d, s := ProviderDevice, ProviderIWARP
	dst := []netip.AddrPort{v4, v6, other}
	ms := time.Millisecond
	require.Equal(t, []lane{
		{d, []netip.AddrPort{v4, other}, 0}, {s, []netip.AddrPort{v4, other}, 250 * ms},
		{d, []netip.AddrPort{v6}, 300 * ms}, {s, []netip.AddrPort{v6}, 550 * ms},
	}, lanes([]Provider{d, s}, dst, 0))
	require.Equal(t, []lane{
		{d, []netip.AddrPort{v4, other}, 0}, {d, []netip.AddrPort{v6}, 100 * ms},
		{s, []netip.AddrPort{v4, other}, 250 * ms}, {s, []netip.AddrPort{v6}, 350 * ms},
	}, lanes([]Provider{d, s}, dst, 100*ms))
	require.Equal(t, []lane{{d, dst, 0}, {s, dst, 250 * ms}}, lanes([]Provider{d, s}, dst, -1))
	require.Equal(t, []lane{{s, []netip.AddrPort{v6}, 0}}, lanes([]Provider{s}, []netip.AddrPort{v6}, 0))
	loopback := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}
	require.Equal(t, []lane{{s, loopback, 250 * ms}}, lanes([]Provider{d, s}, loopback, 0))
	require.Equal(t, []lane{{d, loopback, 0}}, lanes([]Provider{d}, loopback, 0))
}

func TestWorse(t *testing.T) {
	refused := fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
	for _, first := range []error{nil, syscall.ENODEV, syscall.EACCES, syscall.EPERM} {
		require.Equal(t, refused, worse(first, refused))
	}
	require.Equal(t, refused, worse(refused, errors.New("later")))
}

// TestAutoAcrossProviders: what auto makes of real ones.
func TestAutoAcrossProviders(t *testing.T) {
	rxe, siw := os.Getenv("RDMANET_LAB_RXE4"), os.Getenv("RDMANET_LAB_SIW4")
	if rxe == "" || siw == "" {
		t.Skip("needs rxe and siw; try: lab/guest go test ./rdmanet")
	}
	checkLeaks(t)
	auto := Config{Provider: ProviderAuto}
	loopback := "127.0.0.1"
	for _, tc := range []struct {
		listen string
		dial   []string // these by a device; loopback in software too, if on is set
		on     bool
	}{
		{"", []string{rxe, siw, os.Getenv("RDMANET_LAB_RXE6"), os.Getenv("RDMANET_LAB_SIW6")}, true},
		{"0.0.0.0", []string{rxe, siw}, true},
		{rxe, []string{rxe}, false},
		{siw, []string{siw}, false},
		{loopback, nil, true},
	} {
		t.Run("listen on "+tc.listen, func(t *testing.T) {
			l := listenAuto(t, auto, net.JoinHostPort(tc.listen, "0"))
			_, port, err := net.SplitHostPort(l.Addr().String())
			require.NoError(t, err)
			for _, host := range tc.dial {
				requireConnects(t, auto, l, net.JoinHostPort(host, port), ProviderDevice)
				if host == rxe {
					requireConnects(t, Config{Provider: ProviderIWARP}, l, net.JoinHostPort(host, port), ProviderIWARP)
				}
			}
			if tc.on {
				requireConnects(t, auto, l, net.JoinHostPort(loopback, port), ProviderIWARP)
			}
		})
	}
	l := listenAuto(t, Config{Provider: ProviderIWARP}, net.JoinHostPort(rxe, "0"))
	requireConnects(t, auto, l, l.Addr().String(), ProviderIWARP) // nobody listens on the device
	taken, err := net.Listen("tcp", net.JoinHostPort(siw, "0"))
	require.NoError(t, err)
	defer taken.Close()
	_, err = (&ListenConfig{Config: auto}).Listen(context.Background(), "rdma", taken.Addr().String())
	requireOpError(t, err, "listen", syscall.EADDRINUSE)
}
