package rdmanet

import (
	"runtime"
	"time"
)

// Moderation: to be woken for each Write costs the reader of a stream more than
// the frames do, and on a software device the sender, too, whose processor wakes
// it. So it does not ask to be: it naps for as long as some frames take to arrive,
// and looks again, as network devices do with their interrupts. Who reads a stream
// is whoever has sent nothing since the last wait, and gets frames larger than a
// small write in quick succession. A nap is short against the window, so that the
// sender does not run out of credits for it.

// moderator decides whether a reader naps instead of parking, and for how long.
// Only the leader uses it.
type moderator struct {
	limit time.Duration // the longest nap; 0 or less: none
	nap   time.Duration // as last measured; 0: this is no stream
	seen  uint64        // frames when last asked
	empty int           // naps in a row in which none came

	begun         time.Time // of the measurement in progress; zero: none
	frames, bytes uint64    // at its begin
}

const (
	napShare   = 8 // a nap lasts for as long as this part of the window takes to arrive
	probeShare = 4 // a measurement, this part
	slowest    = 2 // naps for a frame: in a slower stream, being woken costs less
	emptyNaps  = 3 // in a row, and the stream has ended

	// shortestNap is about how exact the kernel's timers are.
	shortestNap   = 50 * time.Microsecond
	maxModeration = 10 * time.Millisecond
)

// next returns for how long to nap now, or 0, if the connection has received
// these many frames and bytes so far. The window is in frames.
func (m *moderator) next(now time.Time, frames, bytes uint64, window int) time.Duration {
	m.empty++
	if frames != m.seen {
		m.seen, m.empty = frames, 0
	}
	got := int(frames - m.frames)
	switch {
	case m.begun.IsZero() || m.empty > emptyNaps:
		m.nap = 0
	case got < max(2, window/probeShare):
		return m.nap
	default:
		m.nap = m.measured(now.Sub(m.begun)/time.Duration(got), int(bytes-m.bytes)/got, window)
	}
	m.begun, m.frames, m.bytes = now, frames, bytes
	return m.nap
}

// measured returns the nap for frames of a size that come at an interval.
func (m *moderator) measured(interval time.Duration, size, window int) time.Duration {
	nap := min(interval*time.Duration(max(window, napShare))/napShare, m.limit)
	if size <= smallWrite || interval/slowest > m.limit || nap < shortestNap {
		return 0
	}
	return nap
}

// stop says that what the reader waits for is no stream, but perhaps an answer.
func (m *moderator) stop() { m.begun, m.nap = time.Time{}, 0 }

// doze naps, if w reads a stream, and reports whether it did. Nothing interrupts a
// nap. A writer who begins to wait meanwhile has to wait for its end; if it waits
// on, it leads after this wait, and then nobody naps.
func (c *Conn) doze(w *waiter) bool {
	m := &c.wait.moderator
	if w != &c.wait.read || m.limit <= 0 {
		return false
	}
	nap := m.next(time.Now(), c.stats.framesReceived.Load(), c.stats.bytesRead.Load(), c.cfg.RecvDepth)
	if nap == 0 || !hold() {
		return false
	}
	defer unhold()
	runtime.Gosched() // a nap keeps the thread from those who have something to do
	c.stats.naps.Add(1)
	sleep(nap)
	return true
}
