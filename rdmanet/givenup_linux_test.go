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
		peers := map[string]func(testing.TB, labDevice) (addr string, waits func() bool){"silent": silentPeer}
		if d.siw {
			peers["deaf"] = deafPeer
		}
		for name, peer := range peers {
			t.Run(name, func(t *testing.T) {
				checkLeaks(t)
				l := echoes(t, d, Config{})
				addr, waits := peer(t, d)
				for try := 1; ; try++ {
					within(t, patience, func() {
						_, err := DialTimeout("rdma", addr, 300*time.Millisecond)
						requireOpError(t, err, "dial", context.DeadlineExceeded)
						c, err := Dial("rdma", l.Addr().String())
						require.NoError(t, err)
						require.NoError(t, echoed(c, bytesOf(1, 100_000)))
						require.NoError(t, c.Close())
					})
					if waits() {
						return
					}
					require.Less(t, try, 3, "somebody waited until the device had let go") // or the machine stood still
				}
			})
		}
	})
}

// silentPeer is one that takes connect requests and does not answer. It reports
// whether the device that sent one still waits for that, where it can be told.
func silentPeer(t testing.TB, d labDevice) (addr string, waits func() bool) {
	if !d.siw {
		return silentOn(t, ""), func() bool { return true }
	}
	l, err := net.Listen("tcp", net.JoinHostPort(d.addr, "0"))
	require.NoError(t, err)
	closeLater(t, l)
	return l.Addr().String(), func() bool {
		c, err := l.Accept()
		require.NoError(t, err)
		defer c.Close()
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err = io.Copy(io.Discard, c)
		return errors.Is(err, os.ErrDeadlineExceeded)
	}
}

// deafPeer is one whose TCP does not answer: the queue of those that nobody has
// accepted is full.
func deafPeer(t testing.TB, d labDevice) (addr string, waits func() bool) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	require.NoError(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: netip.MustParseAddr(d.addr).As4()}))
	require.NoError(t, unix.Listen(fd, 0))
	sa, err := unix.Getsockname(fd)
	require.NoError(t, err)
	addr = net.JoinHostPort(d.addr, strconv.Itoa(sa.(*unix.SockaddrInet4).Port))
	for {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			require.True(t, err.(net.Error).Timeout(), "%v", err)
			return addr, func() bool { return true } // till the end
		}
		closeLater(t, c)
	}
}
