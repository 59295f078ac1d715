package iwarp

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/keepalive"
)

// tcpRTOMax is TCP_RTO_MAX_MS, which Linux has since 6.15.
const tcpRTOMax = 44

// askEvery makes TCP send again what the peer has not acknowledged, and ask for room
// a peer that has none, at that interval at most, where the kernel can; elsewhere
// the interval doubles each time, up to two minutes.
func (l *tcpLink) askEvery(d time.Duration) {
	d = min(max(d, time.Second), 2*time.Minute)
	_ = setsockopt(l.raw, unix.IPPROTO_TCP, tcpRTOMax, int(d.Milliseconds()))
}

// silence is how long the peer's host has said nothing though it was asked.
func (l *tcpLink) silence() time.Duration {
	var info *unix.TCPInfo
	err := l.raw.Control(func(fd uintptr) { info, _ = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err != nil || info == nil {
		return 0
	}
	return keepalive.Silence(info)
}
