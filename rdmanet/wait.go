package rdmanet

import (
	"errors"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/qp"
)

// Waiting. There is no goroutine that serves a connection: whoever waits polls
// the completion queue, one of them at a time, the leader. The others follow,
// until the leader's polling gives them what they want, or until the leader has
// what it wants and another takes the lead. So a message that somebody waits for
// costs one wake-up, and an idle connection nothing.

// waiter is somebody who may wait: the reader, the writer, or who sets up or
// closes the connection.
type waiter struct {
	ready    func() bool   // what it waits for; takes Conn.mu
	note     chan struct{} // of capacity 1: look again
	deadline *deadline
	sends    bool // it waits for send completions too
}

var longAgo = time.Unix(1, 0)

type waitState struct {
	read, write waiter
	lead        chan struct{} // of capacity 1: full while somebody leads
	leader      atomic.Pointer[waiter]
	parked      atomic.Bool // the leader is, or is about to be, in CQ.Wait
	spin        spinner
	moderator   moderator
	waitPolls   bool             // CQ.Wait polls
	wcs         [pollBatch]qp.WC // pollMu
}

// pollBatch is how many completions are taken at a time: few, so that payload is
// still in the cache when it is read.
const pollBatch = 4

func (s *waitState) init(c *Conn) {
	s.lead = make(chan struct{}, 1)
	s.read = waiter{ready: c.canRead, note: make(chan struct{}, 1), deadline: makeDeadline(func() { c.wakeup(&s.read) })}
	s.write = waiter{ready: c.canWrite, note: make(chan struct{}, 1), deadline: makeDeadline(func() { c.wakeup(&s.write) }), sends: true}
	s.spin.limit, s.moderator.limit = c.cfg.Spin, c.cfg.Moderation
}

// onDevice fills in what Config leaves open, for a device.
func (s *waitState) onDevice() {
	if s.spin.limit == 0 {
		s.spin.limit = deviceSpin()
	}
	if s.moderator.limit == 0 {
		s.moderator.limit = deviceNap()
	}
}

// waitFor returns nil when w is ready, or why it stopped waiting: its deadline
// is over, or the connection was closed. It may be called with readMu or writeMu
// held, and with no other lock.
func (c *Conn) waitFor(w *waiter) error {
	for {
		if w.ready() {
			return nil
		}
		if err := c.interrupted(w); err != nil {
			return err
		}
		select {
		case c.wait.lead <- struct{}{}:
			return c.leadFor(w)
		default:
		}
		// The leader may have armed the queue for less than w needs.
		if err := c.arm(w); err != nil {
			return err
		}
		if c.poll() > 0 {
			continue
		}
		select {
		case c.wait.lead <- struct{}{}:
			return c.leadFor(w)
		case <-w.note:
		case <-w.deadline.over():
		case <-c.done:
		}
	}
}

// leadFor waits as the leader.
func (c *Conn) leadFor(w *waiter) error {
	s := &c.wait
	s.leader.Store(w)
	defer func() {
		s.leader.Store(nil)
		<-s.lead // a follower takes over
	}()
	spun := false
	// A queue whose Wait looks for itself needs no look before the first one.
	for look := !s.waitPolls || s.moderator.limit > 0; ; look = true {
		if look {
			polled := c.poll()
			if w.ready() {
				return nil
			}
			if polled > 0 {
				continue
			}
		}
		if c.tx.creditLate.Swap(false) {
			c.returnCredits(w == &s.read)
		}
		if err := c.interrupted(w); err != nil {
			return err
		}
		if !spun {
			spun = true
			if w == &s.read && c.tx.asked.Swap(false) {
				s.moderator.stop()
				if c.spin(w) {
					return nil
				}
			}
		}
		if c.doze(w) {
			continue
		}
		if err := c.park(w); err != nil {
			return err
		}
	}
}

// park waits in the netpoller. The order is arm, poll, say so, look, wait: what
// comes between two steps is seen by the next, or ends the wait.
func (c *Conn) park(w *waiter) error {
	s := &c.wait
	if err := c.arm(w); err != nil {
		return err
	}
	if !s.waitPolls && c.poll() > 0 {
		return nil
	}
	s.parked.Store(true)
	defer s.parked.Store(false)
	if w.ready() || c.interrupted(w) != nil {
		return nil
	}
	c.stats.parks.Add(1)
	err := c.cq.Wait()
	c.tx.socketFull.Store(false)
	c.note(&s.write)
	return c.checkQueue(err)
}

func (c *Conn) arm(w *waiter) error { return c.checkQueue(c.cq.Arm(!w.sends)) }

// checkQueue ends the connection if its completion queue has failed.
func (c *Conn) checkQueue(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, net.ErrClosed):
		return net.ErrClosed
	}
	c.mu.Lock()
	c.fail(err)
	c.mu.Unlock()
	c.changed()
	return err
}

// interrupted returns why w has to stop waiting.
func (c *Conn) interrupted(w *waiter) error {
	if w.deadline.expired() {
		return os.ErrDeadlineExceeded
	}
	if c.closed.Load() && (w == &c.wait.read || w == &c.wait.write) {
		return net.ErrClosed
	}
	return nil
}

// wakeup makes w look again, wherever it waits.
func (c *Conn) wakeup(w *waiter) {
	c.note(w)
	if c.cq != nil && c.wait.leader.Load() == w {
		c.cq.Wake()
	}
}

func (c *Conn) note(w *waiter) {
	select {
	case w.note <- struct{}{}:
	default:
	}
}

// changed tells those who might wait for it that the state has changed. A leader
// that is polling sees that for itself; one that has parked since must be woken.
func (c *Conn) changed() {
	c.note(&c.wait.read)
	c.note(&c.wait.write)
	if c.wait.parked.Load() {
		if w := c.wait.leader.Load(); w != nil && w.ready() {
			c.cq.Wake()
		}
	}
}

// poll takes completions and acts on them. It returns how many there were.
func (c *Conn) poll() int {
	c.pollMu.Lock()
	defer c.pollMu.Unlock()
	wcs := c.wait.wcs[:]
	n, err := c.cq.Poll(wcs)
	if n == 0 && err == nil {
		return 0
	}
	c.mu.Lock()
	for i := range wcs[:n] {
		c.completed(&wcs[i])
	}
	if err != nil && !errors.Is(err, net.ErrClosed) {
		c.fail(err)
	}
	c.mu.Unlock()
	c.repostControl()
	c.releaseSpent()
	c.changed()
	return n
}
