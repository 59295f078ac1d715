package rdmanet

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOpError(t *testing.T) {
	a, b := AddrFrom(netip.MustParseAddrPort("10.0.0.1:1")), AddrFrom(netip.MustParseAddrPort("10.0.0.2:2"))
	inner := &net.OpError{Op: "dial", Net: "rdma", Err: syscall.ECONNREFUSED}
	for _, tc := range []struct {
		name    string
		err     error
		is      error
		text    string
		timeout bool
	}{
		{"closed", net.ErrClosed, net.ErrClosed, "read rdma 10.0.0.1:1->10.0.0.2:2: use of closed network connection", false},
		{"closed, wrapped", fmt.Errorf("poll: %w", net.ErrClosed), net.ErrClosed, "read rdma 10.0.0.1:1->10.0.0.2:2: use of closed network connection", false},
		{"deadline", os.ErrDeadlineExceeded, os.ErrDeadlineExceeded, "read rdma 10.0.0.1:1->10.0.0.2:2: i/o timeout", true},
		{"deadline, wrapped", fmt.Errorf("wait: %w", os.ErrDeadlineExceeded), os.ErrDeadlineExceeded, "read rdma 10.0.0.1:1->10.0.0.2:2: i/o timeout", true},
		{"errno", syscall.ECONNRESET, syscall.ECONNRESET, "read rdma 10.0.0.1:1->10.0.0.2:2: connection reset by peer", false},
		{"errno, wrapped", fmt.Errorf("x: %w", syscall.EPIPE), syscall.EPIPE, "read rdma 10.0.0.1:1->10.0.0.2:2: x: broken pipe", false},
		{"timeout", syscall.ETIMEDOUT, syscall.ETIMEDOUT, "read rdma 10.0.0.1:1->10.0.0.2:2: connection timed out", true},
		{"timeout, wrapped", fmt.Errorf("x: %w", syscall.ETIMEDOUT), syscall.ETIMEDOUT, "read rdma 10.0.0.1:1->10.0.0.2:2: x: connection timed out", true},
		{"context", &ctxTimeout{}, context.DeadlineExceeded, "read rdma 10.0.0.1:1->10.0.0.2:2: i/o timeout", true},
		{"cancelled", context.Canceled, context.Canceled, "read rdma 10.0.0.1:1->10.0.0.2:2: context canceled", false},
		{"refused", refuse(reasonBacklog, ""), syscall.ECONNREFUSED, "read rdma 10.0.0.1:1->10.0.0.2:2: refused: backlog full", false},
		{"a socket's", fmt.Errorf("cm: %w", &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}), syscall.ECONNREFUSED,
			"read rdma 10.0.0.1:1->10.0.0.2:2: connect: connection refused", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := opError(opRead, a, b, tc.err)
			require.ErrorIs(t, err, tc.is)
			require.EqualError(t, err, tc.text)
			var ne net.Error
			require.ErrorAs(t, err, &ne)
			require.Equal(t, tc.timeout, ne.Timeout())
			oe, ok := err.(*net.OpError)
			require.True(t, ok)
			require.Equal(t, "rdma", oe.Net)
			require.Equal(t, "read", oe.Op)
			require.Equal(t, net.Addr(a), oe.Source)
			require.Equal(t, net.Addr(b), oe.Addr)
		})
	}
	require.NoError(t, opError(opRead, a, b, nil))
	require.Equal(t, io.EOF, opError(opRead, a, b, io.EOF), "EOF stays bare")
	require.Equal(t, error(inner), opError(opDial, a, b, inner), "nothing is wrapped twice")
}

// requireOpError checks what every error of the package promises.
func requireOpError(t *testing.T, err error, op string, is error) {
	t.Helper()
	require.Error(t, err)
	require.ErrorIs(t, err, is)
	oe, ok := err.(*net.OpError)
	require.True(t, ok, "%T: %v", err, err)
	require.Equal(t, "rdma", oe.Net, "%v", err)
	require.Equal(t, op, oe.Op, "%v", err)
	require.NotNil(t, oe.Addr, "%v", err)
	require.NotEmpty(t, oe.Addr.String(), "%v", err)
}

func TestErrorsOfDial(t *testing.T) {
	checkLeaks(t)
	refused := refusing(t)
	l := listen(t, ListenConfig{})
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	soft := testProvider() == ProviderIWARP
	silent := silent(t)
	for _, tc := range []struct {
		name    string
		d       Dialer
		ctx     context.Context
		network string
		address string
		is      error
		has     string
		timeout bool
		skip    bool
	}{
		{name: "nobody listens", address: refused, is: syscall.ECONNREFUSED},
		{name: "cancelled", ctx: cancelled, address: refused, is: context.Canceled},
		{name: "timeout", d: Dialer{Timeout: 20 * time.Millisecond}, address: silent, is: context.DeadlineExceeded, timeout: true},
		{name: "deadline", d: Dialer{Deadline: time.Now().Add(20 * time.Millisecond)}, address: silent, is: context.DeadlineExceeded, timeout: true},
		{name: "deadline in the past", d: Dialer{Deadline: longAgo}, address: l.Addr().String(), is: context.DeadlineExceeded, timeout: true},
		{name: "not our address", d: Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1)}}, address: l.Addr().String(), is: syscall.EADDRNOTAVAIL, skip: !soft},
		{name: "other family", d: Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv6loopback}}, address: l.Addr().String(), is: syscall.EADDRNOTAVAIL, has: "family", skip: !soft},
		{name: "address of another kind", d: Dialer{LocalAddr: &net.UnixAddr{Name: "/tmp/x"}}, address: l.Addr().String(), is: syscall.EINVAL, has: "net.TCPAddr"},
		{name: "unknown provider", d: Dialer{Config: Config{Provider: "quantum"}}, address: l.Addr().String(), is: syscall.ENODEV, has: "iwarp"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.skip {
				t.Skip("not with this provider")
			}
			if tc.ctx == nil {
				tc.ctx = context.Background()
			}
			c, err := tc.d.DialContext(tc.ctx, "rdma", tc.address)
			require.Nil(t, c)
			requireOpError(t, err, "dial", tc.is)
			require.ErrorContains(t, err, tc.has)
			var ne net.Error
			require.ErrorAs(t, err, &ne)
			require.Equal(t, tc.timeout, ne.Timeout())
			if tc.is == syscall.ECONNREFUSED {
				require.Equal(t, tc.address, err.(*net.OpError).Addr.String())
			}
		})
	}
}

func TestErrorsOfNames(t *testing.T) {
	checkLeaks(t)
	for _, tc := range []struct {
		network, address string
		as               any
		has              string
	}{
		{"udp", "127.0.0.1:1", new(net.UnknownNetworkError), "unknown network udp"},
		{"", "127.0.0.1:1", new(net.UnknownNetworkError), "unknown network"},
		{"rdma", "127.0.0.1", new(*net.AddrError), "missing port"},
		{"rdma", "127.0.0.1:http-but-not-quite", new(*net.DNSError), "http-but-not-quite"},
		{"rdma", "127.0.0.1:70000", new(net.Error), "70000"},
		{"rdma", "no-such-host.invalid:1", new(*net.DNSError), "no-such-host.invalid"},
		{"rdma6", "127.0.0.1:1", new(*net.AddrError), "suitable"},
		{"rdma4", "[::1]:1", new(*net.AddrError), "suitable"},
	} {
		t.Run(tc.network+" "+tc.address, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			_, derr := (&Dialer{}).DialContext(ctx, tc.network, tc.address)
			_, lerr := (&ListenConfig{}).Listen(ctx, tc.network, tc.address)
			for op, err := range map[string]error{"dial": derr, "listen": lerr} {
				require.Error(t, err)
				require.ErrorAs(t, err, tc.as)
				require.ErrorContains(t, err, tc.has)
				oe, ok := err.(*net.OpError)
				require.True(t, ok)
				require.Equal(t, "rdma", oe.Net)
				require.Equal(t, op, oe.Op)
				require.Equal(t, tc.address, oe.Addr.String())
			}
		})
	}
}

func TestErrorsOfListen(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{})
	_, err := Listen("rdma", l.Addr().String())
	requireOpError(t, err, "listen", syscall.EADDRINUSE)
	_, err = Listen("rdma", "192.0.2.1:0")
	requireOpError(t, err, "listen", syscall.EADDRNOTAVAIL)
	_, err = (&ListenConfig{Backlog: -1}).Listen(context.Background(), "rdma", testAddr(t))
	requireOpError(t, err, "listen", syscall.EINVAL)
	require.ErrorContains(t, err, "Backlog must be 1 or more")
}

func TestErrorsOfConfigNameValueAndLimit(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{})
	for _, tc := range []struct {
		cfg Config
		is  error
		has []string
	}{
		{Config{BufferSize: 1023}, syscall.EINVAL, []string{"Config.BufferSize", "1023", "1024", "1048576"}},
		{Config{BufferSize: 1<<20 + 1}, syscall.EINVAL, []string{"Config.BufferSize", "1048577", "1024", "1048576"}},
		{Config{BufferSize: -1}, syscall.EINVAL, []string{"Config.BufferSize", "-1"}},
		{Config{RecvDepth: -1}, syscall.EINVAL, []string{"Config.RecvDepth", "-1", "1 to 4096"}},
		{Config{RecvDepth: 4097}, syscall.EINVAL, []string{"Config.RecvDepth", "4097", "4096"}},
		{Config{SendDepth: 4097}, syscall.EINVAL, []string{"Config.SendDepth", "4097", "4096"}},
		{Config{SendDepth: -5}, syscall.EINVAL, []string{"Config.SendDepth", "-5"}},
		{Config{Moderation: 10*time.Millisecond + 1}, syscall.EINVAL, []string{"Config.Moderation", "10.000001ms", "10ms"}},
		{Config{MaxRegistered: 1000}, syscall.EINVAL, []string{"Config.MaxRegistered", "1000"}},
		{Config{MaxRegistered: -1}, syscall.EINVAL, []string{"Config.MaxRegistered", "-1"}},
		{Config{Provider: "quantum"}, syscall.ENODEV, []string{"Config.Provider", "quantum", "iwarp", "auto"}},
	} {
		_, derr := (&Dialer{Config: tc.cfg}).Dial("rdma", l.Addr().String())
		_, lerr := (&ListenConfig{Config: tc.cfg}).Listen(context.Background(), "rdma", testAddr(t))
		for op, err := range map[string]error{"dial": derr, "listen": lerr} {
			requireOpError(t, err, op, tc.is)
			for _, has := range tc.has {
				require.ErrorContains(t, err, has)
			}
		}
	}
	for _, cfg := range []Config{
		{BufferSize: 1024}, {BufferSize: 1 << 20, RecvDepth: 2, SendDepth: 1}, {RecvDepth: 4096, BufferSize: 1024, SendDepth: 4096}, {Linger: -1}, {Provider: ProviderAuto},
		{KeepAlive: net.KeepAliveConfig{Idle: -1}},
	} {
		if cfg.Provider == ProviderAuto && testProvider() != ProviderIWARP {
			continue
		}
		a, b := pair(t, cfg)
		roundTrip(t, a, b, bytesOf(1, 10_000))
		closeLater(t, a, b)
	}
}

func TestErrorOfTheEnvironmentNamesIt(t *testing.T) {
	t.Setenv("RDMANET_PROVIDER", "quantum")
	_, err := Dial("rdma", "127.0.0.1:1")
	requireOpError(t, err, "dial", syscall.ENODEV)
	require.ErrorContains(t, err, "RDMANET_PROVIDER")
}

func init() {
	// echo serves until it is killed; its first argument is a number of bytes
	// that it reads before it stops reading.
	children["echo"] = func() {
		l, err := Listen("rdma", os.Getenv("RDMANET_TEST_ADDR"))
		if err != nil {
			panic(err)
		}
		fmt.Println(l.Addr())
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					if os.Getenv("RDMANET_TEST_SLEEPS") == "" {
						_, _ = io.Copy(c, c)
					}
				}()
			}
		}()
		_, _ = io.Copy(io.Discard, os.Stdin) // until the parent is gone
	}
}

func startEcho(t *testing.T, env ...string) (addr string, kill func()) {
	t.Helper()
	cmd, out := child(t, "echo", append(env, "RDMANET_TEST_ADDR="+testAddr(t))...)
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	return strings.TrimSpace(line), func() { require.NoError(t, cmd.Process.Kill()) }
}

// TestKilledPeerIsAReset, for whoever reads, writes, or both, whatever is on its
// way.
func TestKilledPeerIsAReset(t *testing.T) {
	for _, sleeps := range []bool{false, true} {
		t.Run(fmt.Sprint("peer sleeps ", sleeps), func(t *testing.T) {
			checkLeaks(t)
			var env []string
			if sleeps {
				env = append(env, "RDMANET_TEST_SLEEPS=1")
			}
			addr, kill := startEcho(t, env...)
			var conns []*Conn
			for range 3 {
				c, err := Dial("rdma", addr)
				require.NoError(t, err)
				closeLater(t, c)
				conns = append(conns, c.(*Conn))
			}
			errs := make(chan error, 2)
			for i, c := range conns {
				_ = c.SetDeadline(time.Now().Add(patience))
				if i != 1 {
					go func() {
						for {
							if _, err := c.Write(make([]byte, 100_000)); err != nil {
								errs <- err
								return
							}
						}
					}()
				}
			}
			if sleeps {
				eventually(t, func() bool { return conns[0].Stats().WriteStalls > 0 }, "writers block")
			} else {
				read(t, conns[0], 10_000)
			}
			kill()
			for range 2 {
				err := <-errs
				require.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE), "%v", err)
			}
			for _, c := range conns {
				_, err := io.Copy(io.Discard, c)
				require.ErrorIs(t, err, syscall.ECONNRESET)
				requireOpError(t, err, "read", syscall.ECONNRESET)
				began := time.Now()
				_ = c.Close()
				require.Less(t, time.Since(began), DefaultLinger+time.Second)
			}
			eventually(t, func() bool { // the kernel takes a moment
				_, err := Dial("rdma", addr)
				return errors.Is(err, syscall.ECONNREFUSED)
			}, "nobody listens")
		})
	}
}

// TestPeerKilledMidSendGivesBuffersBack, many times over.
func TestPeerKilledMidSendGivesBuffersBack(t *testing.T) {
	checkLeaks(t)
	for range scaled(10, 200) {
		addr, kill := startEcho(t, "RDMANET_TEST_SLEEPS=1")
		c, err := Dial("rdma", addr)
		require.NoError(t, err)
		failed := make(chan error, 1)
		_ = c.SetDeadline(time.Now().Add(patience))
		go func() {
			_, err := c.Write(make([]byte, 8<<20))
			failed <- err
		}()
		eventually(t, func() bool { return c.(*Conn).Stats().WriteStalls > 0 }, "it blocks")
		kill()
		require.Error(t, <-failed)
		require.NoError(t, c.Close())
	}
}

func TestErrorsOfRead(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{})
	require.NoError(t, a.CloseWrite())
	requireEOF(t, b)
	_, err := a.Write([]byte("x"))
	requireOpError(t, err, "write", syscall.EPIPE)
	requireOpError(t, a.CloseWrite(), "close", syscall.EPIPE)
	require.NoError(t, b.SetLinger(0))
	require.NoError(t, b.Close())
	_ = a.SetReadDeadline(time.Now().Add(patience))
	_, err = a.Read(make([]byte, 1))
	requireOpError(t, err, "read", syscall.ECONNRESET)
	_, err = b.Read(make([]byte, 1))
	requireOpError(t, err, "read", net.ErrClosed)
	requireOpError(t, b.Close(), "close", net.ErrClosed)
}
