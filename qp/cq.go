package qp

import (
	"errors"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// CQ is a completion queue with a completion channel of its own. It serves one
// QP in its life, so a late completion can't be taken for another QP's.
//
// Poll, Arm and Wake may be called by anyone at any time. Waiting without
// losing a completion takes the order poll, arm, poll again, wait.
type CQ struct {
	v     verbs.CQ
	depth int

	mu      sync.Mutex // one Poll at a time; guards what follows
	closing atomic.Bool
	qp      *QP
	used    bool // had a QP

	waitMu sync.Mutex // one Wait at a time; never held together with mu while blocked
	wakeMu sync.Mutex // keeps Wake from a queue that is gone
	gone   bool       // guarded by waitMu, mu and wakeMu: written with all, read with any
}

// Depth returns how many completions the queue holds.
func (c *CQ) Depth() int { return c.depth }

// Poll takes up to len(wc) completions, ibv_poll_cq(3), and returns how many.
// It never blocks, and never waits for a PostSend in progress. In software
// providers it is what moves data.
//
// A completion that matches no outstanding work request is not delivered; the
// error is then an *AccountingError, and the completions returned with it are
// good. A completion whose status is bad is no error of Poll: see StatusErr.
// Who polls until QP.Outstanding is 0 looks at it after every Poll, whatever
// that returned.
func (c *CQ) Poll(wc []WC) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return 0, opError("poll", errClosed)
	}
	for {
		polled, err := c.v.Poll(wc)
		if err != nil {
			err = opError("poll", err)
		}
		good := 0
		for i := range wc[:polled] {
			deliver, bad := c.account(&wc[i])
			if bad != nil {
				err = errors.Join(err, opError("poll", bad))
			}
			if deliver {
				wc[good] = wc[i]
				good++
			}
		}
		// 0 must mean an empty queue, not one whose head was kept back: the
		// caller may be about to wait.
		if good > 0 || polled == 0 || err != nil {
			return good, err
		}
	}
}

// account enters a completion into the books of its QP. The caller holds mu.
func (c *CQ) account(wc *WC) (deliver bool, err error) {
	if c.qp == nil {
		return false, &AccountingError{Op: wc.Op, WRID: wc.WRID, Status: wc.Status}
	}
	return c.qp.complete(wc)
}

// Arm asks for the next completion to end a Wait, ibv_req_notify_cq(3): any, or
// only that of a solicited message or an error. A completion that came before
// Arm ends no Wait: poll again after it.
func (c *CQ) Arm(solicitedOnly bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return opError("arm", errClosed)
	}
	return opError("arm", c.v.Arm(solicitedOnly))
}

// Wait parks the goroutine until the armed queue has a completion, until Wake
// or Close, or spuriously, ibv_get_cq_event(3). It also acks the event. One
// goroutine waits at a time; another that calls Wait meanwhile takes its turn
// afterwards. Close ends it with net.ErrClosed.
func (c *CQ) Wait() error {
	c.waitMu.Lock()
	defer c.waitMu.Unlock()
	if c.closing.Load() {
		return opError("wait", errClosed)
	}
	err := c.v.Wait()
	if c.closing.Load() {
		err = errClosed
	}
	return opError("wait", err)
}

// Wake ends the Wait in progress, or else the next one.
func (c *CQ) Wake() {
	c.wakeMu.Lock()
	defer c.wakeMu.Unlock()
	if !c.gone {
		c.v.Wake()
	}
}

// Close destroys the queue and its completion channel, ibv_destroy_cq(3), and
// ends a Wait in progress. While a QP is attached it returns a *BusyError.
func (c *CQ) Close() error {
	if err := c.beginClose(); err != nil {
		return opError("destroy cq", err)
	}
	c.Wake()
	c.waitMu.Lock()
	defer c.waitMu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wakeMu.Lock()
	defer c.wakeMu.Unlock()
	if err := c.v.Destroy(); err != nil {
		c.closing.Store(false) // it may be tried again
		return opError("destroy cq", err)
	}
	c.gone = true
	return nil
}

func (c *CQ) beginClose() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Load() {
		return errClosed
	}
	if c.qp != nil {
		return &BusyError{Object: "completion queue", QPs: 1}
	}
	c.closing.Store(true)
	return nil
}

// attach reserves the queue for q.
func (c *CQ) attach(q *QP) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Load() {
		return errClosed
	}
	if c.used {
		return &LimitError{What: "QPs of one CQ in its life", Value: 2, Limit: 1, Fix: "make a CQ for each QP", Errno: syscall.EINVAL}
	}
	c.qp, c.used = q, true
	return nil
}

// unattach undoes attach for a QP that could not be made.
func (c *CQ) unattach() {
	c.mu.Lock()
	c.qp, c.used = nil, false
	c.mu.Unlock()
}
