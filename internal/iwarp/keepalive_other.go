//go:build !linux

package iwarp

import "time"

// Elsewhere TCP's own retries find out.

func (l *tcpLink) askEvery(time.Duration) {}

func (l *tcpLink) silence() time.Duration { return 0 }
