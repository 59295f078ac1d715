//go:build cgo && linux

package rdmacore

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What a TCP peer has not taken is seen from outside, on IPv4 and IPv6.
func TestUnackedOfATCPConnection(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		ln, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if err != nil {
			t.Log(err)
			continue
		}
		a, err := net.Dial("tcp", ln.Addr().String())
		require.NoError(t, err)
		b, err := ln.Accept()
		require.NoError(t, err)
		ln.Close()
		local, remote := addrPortOf(a.LocalAddr()), addrPortOf(a.RemoteAddr())
		if _, err := tcpInfo(local, remote); err != nil {
			skip(t, "no sock_diag (try: modprobe tcp_diag): "+err.Error())
		}
		require.False(t, unacked(local, remote))
		const size = 64 << 20 // more than the sockets' buffers hold
		wrote := make(chan error, 1)
		go func() {
			_, err := a.Write(make([]byte, size))
			wrote <- err
		}()
		require.Eventually(t, func() bool { return unacked(local, remote) }, patience, time.Millisecond, "b does not read")
		_, err = io.CopyN(io.Discard, b, size)
		require.NoError(t, err)
		require.NoError(t, <-wrote)
		require.Eventually(t, func() bool { return !unacked(local, remote) }, patience, time.Millisecond)
		a.Close()
		b.Close()
	}
}

func unacked(local, remote netip.AddrPort) bool {
	info, err := tcpInfo(local, remote)
	return err == nil && undelivered(&info)
}

func addrPortOf(a net.Addr) netip.AddrPort { return a.(*net.TCPAddr).AddrPort() }

func TestInterfaceOfAnAddress(t *testing.T) {
	lo := interfaceOf(netip.MustParseAddr("127.0.0.1"))
	require.Positive(t, lo)
	ifi, err := net.InterfaceByIndex(lo)
	require.NoError(t, err)
	require.NotZero(t, ifi.Flags&net.FlagLoopback)
	require.Zero(t, interfaceOf(netip.MustParseAddr("192.0.2.1")))
}
