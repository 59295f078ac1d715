package rdmanet

import (
	"sync"
	"time"
)

// deadline is a time limit that can be waited for and changed meanwhile, after
// net.Pipe's.
type deadline struct {
	fired func() // called, besides closing the channel, when the time is over

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
	over := d.isOver()
	if over && (t.IsZero() || time.Until(t) > 0) {
		d.done = make(chan struct{})
	}
	switch left := time.Until(t); {
	case t.IsZero():
	case left > 0:
		done := d.done
		d.timer = time.AfterFunc(left, func() {
			close(done)
			d.fired()
		})
	case !over:
		close(d.done)
		d.fired()
	}
}

// over returns a channel that is closed when the time is over.
func (d *deadline) over() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.done
}

// expired reports whether the time is over.
func (d *deadline) expired() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.isOver()
}

func (d *deadline) isOver() bool {
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

// stop ends the timer.
func (d *deadline) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
	}
}
