package rdmanet

import (
	"time"

	"golang.org/x/sys/unix"
)

// sleep sleeps in the kernel, for a moment: time.Sleep has a millisecond's
// resolution when nothing else happens, and wakes the runtime's monitor, which
// then looks around every 20 µs. A signal ends it early.
func sleep(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil)
}
