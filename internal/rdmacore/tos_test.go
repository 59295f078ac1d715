//go:build cgo && linux

package rdmacore

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// The packets of a connect request to a neighbour that isn't there leave the lab's
// rxe0, which its own packets to itself don't.
func TestTOSIsOnTheWire(t *testing.T) {
	name := os.Getenv("RDMANET_LAB_RXE_INTERFACE")
	if name == "" {
		t.Skip("needs the lab's rxe0 (try: lab/guest)")
	}
	ifi, err := net.InterfaceByName(name)
	require.NoError(t, err)
	for _, to := range []string{"10.77.0.99", "fd77::99"} {
		neighbour := exec.Command("ip", "neigh", "replace", to, "lladdr", "02:00:00:00:00:99", "dev", name)
		require.NoError(t, neighbour.Run(), neighbour)
		for _, tos := range []uint8{0, 46 << 2} {
			t.Run(fmt.Sprintf("%s, TOS %d", to, tos), func(t *testing.T) {
				wire := sniff(t, ifi)
				ch := newTestChannel(t)
				i := newTestID(t, ch)
				require.NoError(t, i.SetTOS(tos))
				require.NoError(t, i.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(netip.MustParseAddr(to), 9), patience))
				next(t, ch, verbs.EventAddrResolved)
				require.NoError(t, i.ResolveRoute(patience))
				next(t, ch, verbs.EventRouteResolved)
				a := &end{t: t, ch: ch, id: i}
				a.createQP(64)
				t.Cleanup(a.free)
				require.NoError(t, i.Connect(testParam))
				require.Equal(t, tos, nextTOS(t, wire))
			})
		}
	}
}

// sniff returns a socket that gets an interface's packets from now on, from their IP
// header.
func sniff(t *testing.T, ifi *net.Interface) int {
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	require.NoError(t, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: ifi.Index}))
	patient := unix.NsecToTimeval(int64(time.Second))
	require.NoError(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patient))
	return fd
}

// nextTOS is the TOS of the next RoCE v2 packet: one to UDP port 4791.
func nextTOS(t *testing.T, wire int) uint8 {
	t.Helper()
	p := make([]byte, 2048)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		n, _, err := unix.Recvfrom(wire, p, 0)
		if err != nil || n < 48 {
			continue
		}
		tos, protocol, udp := p[1], p[9], p[20:]
		if p[0]>>4 == 6 {
			tos, protocol, udp = p[0]<<4|p[1]>>4, p[6], p[40:]
		}
		if protocol == unix.IPPROTO_UDP && binary.BigEndian.Uint16(udp[2:]) == 4791 {
			return tos
		}
	}
	require.Fail(t, "no RoCE packet")
	return 0
}
