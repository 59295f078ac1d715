package keepalive

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestWithDefaults(t *testing.T) {
	s := 15 * time.Second
	for _, c := range []struct{ in, want net.KeepAliveConfig }{
		{net.KeepAliveConfig{}, net.KeepAliveConfig{Idle: s, Interval: s, Count: 9}},
		{net.KeepAliveConfig{Enable: true, Count: 1}, net.KeepAliveConfig{Enable: true, Idle: s, Interval: s, Count: 1}},
		{net.KeepAliveConfig{Idle: -1, Interval: -1, Count: -1}, net.KeepAliveConfig{Idle: -1, Interval: -1, Count: -1}},
	} {
		require.Equal(t, c.want, WithDefaults(c.in))
	}
}
