package keepalive

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestSilence(t *testing.T) {
	for _, c := range []struct {
		retransmits, probes uint8
		want                time.Duration
	}{{0, 0, 0}, {1, 1, 0}, {2, 0, 5 * time.Second}, {0, 2, 5 * time.Second}} {
		require.Equal(t, c.want, Silence(&unix.TCPInfo{Retransmits: c.retransmits, Probes: c.probes, Last_ack_recv: 5000}))
	}
}
