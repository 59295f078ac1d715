package keepalive

import (
	"time"

	"golang.org/x/sys/unix"
)

// Silence is how long the peer's host of a TCP connection has said nothing, if TCP has
// asked it twice since, or else 0: once may be lost on the way.
func Silence(info *unix.TCPInfo) time.Duration {
	if info.Retransmits < 2 && info.Probes < 2 {
		return 0
	}
	return time.Duration(info.Last_ack_recv) * time.Millisecond
}
