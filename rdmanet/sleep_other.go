//go:build !linux

package rdmanet

import "time"

func sleep(d time.Duration) { time.Sleep(d) }
