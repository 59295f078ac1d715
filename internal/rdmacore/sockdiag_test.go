//go:build cgo && linux

package rdmacore

import (
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// sock_diag tells of a socket what its owner is told.
func TestTCPInfo(t *testing.T) {
	for _, ip := range []string{"127.0.0.1", "::1"} {
		t.Run(ip, func(t *testing.T) {
			l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
			if err != nil {
				t.Skip(err)
			}
			defer l.Close()
			c, err := net.Dial("tcp", l.Addr().String())
			require.NoError(t, err)
			defer c.Close()
			_, err = c.Write([]byte("abc"))
			require.NoError(t, err)
			local, remote := c.LocalAddr().(*net.TCPAddr).AddrPort(), c.RemoteAddr().(*net.TCPAddr).AddrPort()
			got, err := tcpInfo(local, remote)
			if err != nil && os.Getenv("RDMANET_LAB") == "" {
				t.Skipf("this kernel has no tcp_diag: %v", err)
			}
			require.NoError(t, err)
			raw, err := c.(*net.TCPConn).SyscallConn()
			require.NoError(t, err)
			require.NoError(t, raw.Control(func(fd uintptr) {
				want, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
				require.NoError(t, err)
				require.Equal(t, uint64(3), got.Bytes_sent)
				for _, of := range []func(*unix.TCPInfo) any{
					func(i *unix.TCPInfo) any { return i.State },
					func(i *unix.TCPInfo) any { return i.Snd_mss },
					func(i *unix.TCPInfo) any { return i.Bytes_sent },
					func(i *unix.TCPInfo) any { return i.Snd_wnd },
				} {
					require.Equal(t, of(want), of(&got))
				}
			}))
			_, err = tcpInfo(local, netip.AddrPortFrom(remote.Addr(), local.Port()))
			require.ErrorIs(t, err, unix.ENOENT)
		})
	}
}

func TestParseDiagOfBadAnswers(t *testing.T) {
	good := make([]byte, unix.SizeofNlMsghdr+diagMessageLen)
	attr := func(size, kind uint16, data ...byte) []byte {
		b := append([]byte(nil), good...)
		return append(append(b, byte(size), byte(size>>8), byte(kind), byte(kind>>8)), data...)
	}
	for name, b := range map[string][]byte{
		"nothing":               nil,
		"a header":              good[:unix.SizeofNlMsghdr],
		"no attribute":          good,
		"an attribute too long": attr(100, diagInfo, 1, 2, 3, 4),
		"an attribute of none":  attr(0, diagInfo, 1, 2, 3, 4),
		"another":               attr(6, 7, 1, 2),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseDiag(b)
			require.Error(t, err)
		})
	}
	info, err := parseDiag(attr(8, diagInfo, 1, 2, 3, 4))
	require.NoError(t, err)
	require.Equal(t, uint8(3), info.Retransmits)
}
