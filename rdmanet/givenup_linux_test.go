package rdmanet

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestDialGivenUpHoldsUpNobody: siw keeps a connect until its peer answers, or for
// 10 s, and one to a host that does not answer TCP for two minutes.
func TestDialGivenUpHoldsUpNobody(t *testing.T) {
	onEachDevice(t, func(t *testing.T, d labDevice) {
		peers := map[string]func(testing.TB, labDevice) keptPeer{"silent": silentPeer}
		if d.siw {
			peers["deaf"] = deafPeer
		}
		for name, peer := range peers {
			t.Run(name, func(t *testing.T) {
				checkLeaks(t)
				l := echoes(t, d, Config{})
				p := peer(t, d)
				for try := 1; ; try++ {
					ctx, cancel := context.WithCancel(t.Context())
					given := make(chan error, 1)
					go func() {
						_, err := (&Dialer{}).DialContext(ctx, "rdma", p.addr)
						given <- err
					}()
					p.asked()
					cancel()
					within(t, patience, func() {
						requireOpError(t, <-given, "dial", context.Canceled)
						c, err := Dial("rdma", l.Addr().String())
						require.NoError(t, err)
						require.NoError(t, echoed(c, bytesOf(1, 100_000)))
						require.NoError(t, c.Close())
					})
					if p.waits() {
						return
					}
					require.Less(t, try, 3, "somebody waited until the device had let go") // or the machine stood still
				}
			})
		}
	})
}

// keptPeer is one that keeps a device waiting for it.
type keptPeer struct {
	addr  string
	asked func()      // returns when a connect is on its way
	waits func() bool // whether the device still waits, where it can be told
}

// longEnough is asked where nobody can tell.
func longEnough() { time.Sleep(300 * time.Millisecond) }

func yes() bool { return true }

// silentPeer is one that takes connect requests and does not answer.
func silentPeer(t testing.TB, d labDevice) keptPeer {
	if !d.siw {
		return keptPeer{silentOn(t, ""), longEnough, yes}
	}
	l, err := net.Listen("tcp", net.JoinHostPort(d.addr, "0"))
	require.NoError(t, err)
	closeLater(t, l)
	var c net.Conn
	return keptPeer{l.Addr().String(), func() {
		require.NoError(t, l.(*net.TCPListener).SetDeadline(time.Now().Add(patience)))
		c, err = l.Accept()
		require.NoError(t, err)
	}, func() bool {
		defer c.Close()
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err := io.Copy(io.Discard, c)
		return errors.Is(err, os.ErrDeadlineExceeded)
	}}
}

// deafPeer is one whose TCP does not answer: the queue of those that nobody has
// accepted is full.
func deafPeer(t testing.TB, d labDevice) keptPeer {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	require.NoError(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: netip.MustParseAddr(d.addr).As4()}))
	require.NoError(t, unix.Listen(fd, 0))
	sa, err := unix.Getsockname(fd)
	require.NoError(t, err)
	addr := net.JoinHostPort(d.addr, strconv.Itoa(sa.(*unix.SockaddrInet4).Port))
	for {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			require.True(t, err.(net.Error).Timeout(), "%v", err)
			return keptPeer{addr, longEnough, yes} // till the end
		}
		closeLater(t, c)
	}
}
