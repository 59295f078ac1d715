// Package keepalive is what the providers' keepalives have in common.
package keepalive

import (
	"cmp"
	"net"
	"time"
)

// WithDefaults fills in package net's defaults for what is zero: 9 probes 15 s apart,
// after 15 s. Negative values stay: they mean that something is left as it is.
func WithDefaults(c net.KeepAliveConfig) net.KeepAliveConfig {
	c.Idle = cmp.Or(c.Idle, 15*time.Second)
	c.Interval = cmp.Or(c.Interval, 15*time.Second)
	c.Count = cmp.Or(c.Count, 9)
	return c
}
