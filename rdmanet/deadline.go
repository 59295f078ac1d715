package rdmanet

import (
	"sync"
	"sync/atomic"
	"time"
)

// deadline is a time limit that can be waited for and changed meanwhile, after
// net.Pipe's.
type deadline struct {
	fired func() // called, besides closing the channel, when the time is over

	past atomic.Bool // the time is over

	mu    sync.Mutex
	timer *time.Timer
	done  chan struct{} // closed when the time is over
}

func makeDeadline(fired func()) *deadline {
	return &deadline{fired: fired, done: make(chan struct{})}
}

// set moves the deadline. A past time is over at once, the zero time never.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.done // the timer is closing it
	}
	d.timer = nil
	left := time.Until(t)
	if d.past.Load() && (t.IsZero() || left > 0) {
		d.past.Store(false)
		d.done = make(chan struct{})
	}
	switch {
	case t.IsZero():
	case left > 0:
		done := d.done
		d.timer = time.AfterFunc(left, func() { d.expire(done) })
	case !d.past.Load():
		d.expire(d.done)
	}
}

func (d *deadline) expire(done chan struct{}) {
	d.past.Store(true)
	close(done)
	d.fired()
}

// over returns a channel that is closed when the time is over.
func (d *deadline) over() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.done
}

// expired reports whether the time is over.
func (d *deadline) expired() bool { return d.past.Load() }

// stop ends the timer.
func (d *deadline) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.done // as in set
	}
	d.timer = nil
}
