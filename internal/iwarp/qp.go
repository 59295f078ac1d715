package iwarp

import (
	"fmt"
	"sync/atomic"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// qp is a queue pair: rx and tx are its halves, each with a lock of its own.
// Both open together; either may end by itself when the socket says so, and
// close.go has the ways in which the connection ends.
type qp struct {
	id  *id
	pd  *pd
	cq  *cq
	cap verbs.QPCap
	num uint32

	// Set by start, before a half is open.
	link       link
	crc        bool
	asked      bool // the peer may send RDMA READs
	maxPayload int  // of one FPDU; a tagged one could have 4 bytes more

	open atomic.Bool // rx.state is halfOpen, for those without its lock
	rx   rxState
	tx   txState
	end  ending
	keep keepAlive
}

// half is the state of one direction.
type half uint8

const (
	halfIdle half = iota // not connected yet
	halfOpen
	halfDead // what is posted is flushed
)

var qpNumbers atomic.Uint32

func newQP(i *id, p *pd, c *cq, want verbs.QPCap) (*qp, error) {
	switch {
	case want.SendWR < 1 || want.SendWR > attr.MaxQPWR:
		return nil, fmt.Errorf("create QP: %d send work requests (1 to %d): %w", want.SendWR, attr.MaxQPWR, syscall.EINVAL)
	case want.RecvWR < 1 || want.RecvWR > attr.MaxQPWR:
		return nil, fmt.Errorf("create QP: %d receive work requests (1 to %d): %w", want.RecvWR, attr.MaxQPWR, syscall.EINVAL)
	case want.SendSGE < 1 || want.SendSGE > attr.MaxSGE:
		return nil, fmt.Errorf("create QP: %d scatter/gather entries (1 to %d): %w", want.SendSGE, attr.MaxSGE, syscall.EINVAL)
	case want.SendWR+want.RecvWR > len(c.ring):
		return nil, fmt.Errorf("create QP: completion queue of %d entries is smaller than the %d work requests it must hold: %w",
			len(c.ring), want.SendWR+want.RecvWR, syscall.EINVAL)
	}
	want.MaxInline = attr.MaxInline
	q := &qp{id: i, pd: p, cq: c, cap: want, num: qpNumbers.Add(1)}
	q.keep.qp = q
	q.rx.posted = make([]recvWR, want.RecvWR)
	q.tx.queue = make([]sendWR, want.SendWR)
	q.tx.flusher, q.tx.flushedFn = q.flush, q.flushed
	if !c.qp.CompareAndSwap(nil, q) {
		return nil, fmt.Errorf("create QP: the completion queue serves another QP: %w", syscall.EBUSY)
	}
	return q, nil
}

func (q *qp) Num() uint32      { return q.num }
func (q *qp) Cap() verbs.QPCap { return q.cap }

// start takes over a connection whose set-up is done, and reports established
// before anything else can be reported about it.
func (q *qp) start(l link, a agreed, established *verbs.Event) error {
	q.rx.mu.Lock()
	defer q.rx.mu.Unlock()
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	if q.rx.state != halfIdle || q.tx.state != halfIdle {
		return fmt.Errorf("the QP is in the error state: %w", syscall.EINVAL)
	}
	q.link, q.crc, q.asked = l, a.crc, a.asked
	q.fitSegments()
	q.rx.state, q.tx.state = halfOpen, halfOpen
	q.rx.msn, q.tx.msn, q.rx.readMSN = 1, 1, 1
	q.tx.reads.start(a.ird, a.ord)
	q.rx.awaited, q.tx.gated = a.awaitPeer, a.awaitPeer
	if a.dialed {
		q.tx.nudger.begin(q.nudge)
	}
	q.id.post(established)
	q.open.Store(true)
	q.cq.Wake() // a Wait that began before there was a socket starts over
	return nil
}

// connection returns the link, or nil before start.
func (q *qp) connection() link {
	q.rx.mu.Lock()
	defer q.rx.mu.Unlock()
	return q.link
}

// Destroy detaches the QP. A live connection is aborted.
func (q *qp) Destroy() error {
	q.abort()
	q.cq.qp.CompareAndSwap(q, nil)
	return nil
}

// SetError is an abort: the peer sees a reset, as RFC 5040 section 5.3 has it.
func (q *qp) SetError() error {
	q.abort()
	return nil
}
