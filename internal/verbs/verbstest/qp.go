package verbstest

import (
	"sync/atomic"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// fifo is a queue of fixed capacity.
type fifo[T any] struct {
	buf     []T
	head, n int
}

func (f *fifo[T]) push() *T {
	f.n++
	return &f.buf[(f.head+f.n-1)%len(f.buf)]
}

func (f *fifo[T]) front() *T { return &f.buf[f.head] }

func (f *fifo[T]) pop() {
	f.head = (f.head + 1) % len(f.buf)
	f.n--
}

func (f *fifo[T]) full() bool { return f.n == len(f.buf) }

// cq is a completion queue. The provider's lock guards it.
type cq struct {
	p      *Provider
	qps    int
	wcs    fifo[verbs.WC]
	armed  bool
	only   bool // armed for solicited completions
	notify chan struct{}
	waits  atomic.Int32
}

func (c *cq) push(wc verbs.WC, solicited bool) {
	c.p.demand(!c.wcs.full(), "completion queue overflows")
	if c.wcs.full() {
		return
	}
	*c.wcs.push() = wc
	if c.armed && (!c.only || solicited || wc.Status != verbs.StatusSuccess) {
		c.armed = false
		c.Wake()
	}
}

func (c *cq) Poll(wc []verbs.WC) (n int, err error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if err := c.p.try("poll cq"); err != nil {
		return 0, err
	}
	for n < len(wc) && c.wcs.n > 0 {
		wc[n] = *c.wcs.front()
		c.wcs.pop()
		n++
	}
	return n, nil
}

func (c *cq) Arm(solicitedOnly bool) error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if err := c.p.try("req notify cq"); err != nil {
		return err
	}
	c.only = solicitedOnly && (c.only || !c.armed)
	c.armed = true
	return nil
}

func (c *cq) Wait() error {
	alone := c.waits.Add(1) == 1
	defer c.waits.Add(-1)
	c.p.mu.Lock()
	c.p.demand(alone, "two goroutines wait for one CQ")
	c.p.mu.Unlock()
	<-c.notify
	return nil
}

func (c *cq) Wake() {
	select {
	case c.notify <- struct{}{}:
	default:
	}
}

func (c *cq) Destroy() error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if err := c.p.try("destroy cq"); err != nil {
		return err
	}
	c.p.demand(c.qps == 0 && c.waits.Load() == 0, "CQ destroyed with %d QPs and %d waiters", c.qps, c.waits.Load())
	c.p.live["cq"]--
	return nil
}

// qp is a queue pair. The provider's lock guards it.
type qp struct {
	p                *Provider
	id               *id // nil for one of a Pair
	pd               *pd
	cq               *cq
	num              uint32
	cap              verbs.QPCap
	peer             *qp // nil until connected
	bad              bool
	destroyed        bool
	sends            fifo[send]
	recvs            fifo[verbs.RecvWR]
	sending, recving atomic.Int32
}

// send is a posted send that waits for the peer's receive.
type send struct {
	wr     verbs.SendWR
	sgl    []verbs.SGE
	inline []byte
}

// newQP makes a queue pair. The lock is held.
func (p *Provider) newQP(i *id, d *pd, c *cq, want verbs.QPCap) (*qp, error) {
	if err := p.try("create qp"); err != nil {
		return nil, err
	}
	p.demand(c.qps == 0, "CQ serves two QPs")
	p.serial++
	q := &qp{p: p, id: i, pd: d, cq: c, num: p.serial, cap: want}
	q.cap.MaxInline = p.dev.Attr().MaxInline
	q.cap.SendWR++ // as devices do that round up
	q.sends.buf = make([]send, want.SendWR)
	q.recvs.buf = make([]verbs.RecvWR, want.RecvWR)
	p.qps[q.num] = q
	c.qps++
	d.qps++
	p.live["qp"]++
	return q, nil
}

func connect(a, b *qp) { a.peer, b.peer = b, a }

func (q *qp) Num() uint32      { return q.num }
func (q *qp) Cap() verbs.QPCap { return q.cap }

func (q *qp) PostSend(wr []verbs.SendWR) (int, error) {
	alone := q.sending.Add(1) == 1
	defer q.sending.Add(-1)
	q.p.mu.Lock()
	defer q.p.mu.Unlock()
	q.p.demand(alone, "PostSend runs concurrently with itself")
	defer q.progress()
	for i := range wr {
		if err := q.p.try("post send"); err != nil {
			return i, err
		}
		if q.peer == nil && !q.bad {
			return i, errInvalid("QP %d is not connected", q.num)
		}
		if q.sends.full() {
			q.p.demand(false, "send queue overflows")
			return i, errInvalid("send queue overflows")
		}
		q.sends.push().copy(&wr[i])
	}
	return len(wr), nil
}

func (s *send) copy(wr *verbs.SendWR) {
	s.wr = *wr
	s.inline = s.inline[:0]
	s.sgl = s.sgl[:0]
	for _, e := range wr.SGL {
		if wr.Inline {
			s.inline = append(s.inline, e.Data...)
		} else {
			s.sgl = append(s.sgl, e)
		}
	}
	if wr.Inline {
		s.sgl = append(s.sgl, verbs.SGE{Data: s.inline})
	}
	s.wr.SGL = nil
}

func (q *qp) PostRecv(wr []verbs.RecvWR) (int, error) {
	alone := q.recving.Add(1) == 1
	defer q.recving.Add(-1)
	q.p.mu.Lock()
	defer q.p.mu.Unlock()
	q.p.demand(alone, "PostRecv runs concurrently with itself")
	defer q.received()
	for i := range wr {
		if err := q.p.try("post recv"); err != nil {
			return i, err
		}
		if q.recvs.full() {
			q.p.demand(false, "receive queue overflows")
			return i, errInvalid("receive queue overflows")
		}
		*q.recvs.push() = wr[i]
	}
	return len(wr), nil
}

// received uses receives that were posted. The lock is held.
func (q *qp) received() {
	if q.bad {
		q.flush()
	} else if q.peer != nil {
		q.peer.progress()
	}
}

// progress delivers what can be delivered, or flushes. The lock is held.
func (q *qp) progress() {
	if q.bad {
		q.flush()
		return
	}
	for q.peer != nil && !q.peer.bad && q.sends.n > 0 {
		s := q.sends.front()
		if s.wr.Op != verbs.WRSend {
			if !q.access(s) {
				return
			}
			continue
		}
		if q.peer.recvs.n == 0 {
			return
		}
		r := *q.peer.recvs.front()
		n := 0
		for _, e := range s.sgl {
			n += len(e.Data)
		}
		if n > len(r.SGE.Data) {
			q.peer.cq.push(verbs.WC{WRID: r.WRID, Op: verbs.OpRecv, Status: verbs.StatusLocLenErr}, true)
			q.cq.push(verbs.WC{WRID: s.wr.WRID, Op: verbs.OpSend, Status: verbs.StatusRemInvReqErr}, true)
			q.sends.pop()
			q.peer.recvs.pop()
			q.abort()
			return
		}
		at := 0
		for _, e := range s.sgl {
			at += copy(r.SGE.Data[at:], e.Data)
		}
		q.peer.cq.push(verbs.WC{WRID: r.WRID, Op: verbs.OpRecv, ByteLen: n}, s.wr.Solicited)
		if s.wr.Signaled {
			q.cq.push(verbs.WC{WRID: s.wr.WRID, Op: verbs.OpSend}, false)
		}
		q.sends.pop()
		q.peer.recvs.pop()
	}
}

// flush completes all that is posted. The lock is held.
func (q *qp) flush() {
	if q.p.try("flush") != nil {
		return
	}
	for ; q.sends.n > 0; q.sends.pop() {
		q.cq.push(verbs.WC{WRID: q.sends.front().wr.WRID, Op: verbs.OpSend, Status: verbs.StatusWRFlushErr}, true)
	}
	for ; q.recvs.n > 0; q.recvs.pop() {
		q.cq.push(verbs.WC{WRID: q.recvs.front().WRID, Op: verbs.OpRecv, Status: verbs.StatusWRFlushErr}, true)
	}
}

// abort moves both ends to the error state. The lock is held.
func (q *qp) abort() {
	for _, end := range []*qp{q, q.peer} {
		if end != nil && !end.destroyed {
			end.bad = true
			end.flush()
		}
	}
}

func (q *qp) SetError() error {
	q.p.mu.Lock()
	defer q.p.mu.Unlock()
	if err := q.p.try("modify qp"); err != nil {
		return err
	}
	q.abort()
	if q.id != nil {
		q.id.disconnected(errReset)
	}
	return nil
}

func (q *qp) Destroy() error {
	q.p.mu.Lock()
	defer q.p.mu.Unlock()
	if err := q.p.try("destroy qp"); err != nil {
		return err
	}
	q.p.demand(q.sending.Load() == 0 && q.recving.Load() == 0, "QP destroyed during a post")
	q.destroyed = true
	if q.peer != nil {
		q.abort()
		q.peer.peer = nil
	}
	if q.id != nil {
		q.id.qp = nil
	}
	delete(q.p.qps, q.num)
	q.cq.qps--
	q.pd.qps--
	q.p.live["qp"]--
	return nil
}
