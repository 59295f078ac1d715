package verbsfault

import (
	"slices"
	"sync"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// device is comparable, as a device must be.
type device struct {
	verbs.Device
	p *Provider
}

func (d device) AllocPD() (verbs.PD, error) {
	if err := d.p.ask("Device.AllocPD"); err != nil {
		return nil, err
	}
	v, err := d.Device.AllocPD()
	if err != nil {
		return nil, err
	}
	return &pd{v, d.p}, nil
}

func (d device) CreateCQ(depth int) (verbs.CQ, error) {
	if err := d.p.ask("Device.CreateCQ"); err != nil {
		return nil, err
	}
	v, err := d.Device.CreateCQ(depth)
	if err != nil {
		return nil, err
	}
	c := &cq{CQ: v, p: d.p}
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	d.p.cqs[c] = struct{}{}
	return c, nil
}

type pd struct {
	verbs.PD
	p *Provider
}

func (d *pd) RegMR(b []byte, access verbs.Access) (verbs.MR, error) {
	if err := d.p.ask("PD.RegMR"); err != nil {
		return nil, err
	}
	v, err := d.PD.RegMR(b, access)
	if err != nil {
		return nil, err
	}
	return &mr{v, d.p}, nil
}

func (d *pd) Dealloc() error { return d.p.do("PD.Dealloc", d.PD.Dealloc) }

type mr struct {
	verbs.MR
	p *Provider
}

func (m *mr) Dereg() error { return m.p.do("MR.Dereg", m.MR.Dereg) }

// cq is a completion queue.
type cq struct {
	verbs.CQ
	p *Provider

	mu   sync.Mutex
	qp   *qp
	held []completion // polled, and not yet reported
}

// completion is one that is to be reported some times more, or 0 if that is not
// decided.
type completion struct {
	verbs.WC
	times int
}

func (c *cq) attach(q *qp) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.qp = q
}

// Poll reports what the test lets it, in order within each queue.
func (c *cq) Poll(wc []verbs.WC) (n int, err error) {
	if err := c.p.ask("CQ.Poll"); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	polled, err := c.CQ.Poll(wc)
	for _, x := range wc[:polled] {
		c.qp.completed(x)
		c.held = append(c.held, completion{WC: x})
	}
	var blocked [2]bool
	still := c.held[:0]
	for _, x := range c.held {
		if !blocked[x.Op] && n < len(wc) {
			if x.times == 0 {
				x.times = c.p.times(x.WC)
			}
			reported := x.times > 0
			for ; x.times > 0 && n < len(wc); x.times-- {
				wc[n] = x.WC
				n++
			}
			if reported && x.times == 0 {
				continue
			}
		}
		blocked[x.Op] = true
		still = append(still, x)
	}
	c.held = still
	return n, err
}

func (c *cq) Arm(solicitedOnly bool) error {
	return c.p.do("CQ.Arm", func() error { return c.CQ.Arm(solicitedOnly) })
}

func (c *cq) Wait() error { return c.p.do("CQ.Wait", c.CQ.Wait) }

func (c *cq) Destroy() error {
	return c.p.do("CQ.Destroy", func() error {
		err := c.CQ.Destroy()
		if err == nil {
			c.p.mu.Lock()
			defer c.p.mu.Unlock()
			delete(c.p.cqs, c)
		}
		return err
	})
}

// qp is a queue pair, and what is posted to it.
type qp struct {
	verbs.QP
	p *Provider

	mu    sync.Mutex
	sends []uint64 // outstanding, oldest first
	recvs int      // outstanding
}

func (q *qp) PostSend(wr []verbs.SendWR) (int, error) {
	n, err := q.p.askEach("QP.PostSend", len(wr))
	if n == 0 {
		return 0, err
	}
	q.mu.Lock()
	for _, w := range wr[:n] {
		q.sends = append(q.sends, w.WRID) // first: it may complete before PostSend returns
	}
	q.mu.Unlock()
	took, refused := q.QP.PostSend(wr[:n])
	if took < n {
		q.mu.Lock()
		q.sends = q.sends[:len(q.sends)-(n-took)]
		q.mu.Unlock()
		err = refused
	}
	q.p.note(func(b *Books) { b.Posted += took })
	return took, err
}

func (q *qp) PostRecv(wr []verbs.RecvWR) (int, error) {
	n, err := q.p.askEach("QP.PostRecv", len(wr))
	if n == 0 {
		return 0, err
	}
	q.mu.Lock()
	q.recvs += n
	q.mu.Unlock()
	took, refused := q.QP.PostRecv(wr[:n])
	if took < n {
		q.mu.Lock()
		q.recvs -= n - took
		q.mu.Unlock()
		err = refused
	}
	q.p.note(func(b *Books) { b.Posted += took })
	return took, err
}

// completed enters a completion. A send completes those before it, which were not
// signaled.
func (q *qp) completed(wc verbs.WC) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if wc.Op == verbs.OpRecv {
		q.recvs--
	} else if i := slices.Index(q.sends, wc.WRID); i >= 0 {
		q.sends = q.sends[i+1:]
	}
}

func (q *qp) SetError() error { return q.p.do("QP.SetError", q.QP.SetError) }

func (q *qp) Destroy() error {
	return q.p.do("QP.Destroy", func() error {
		err := q.QP.Destroy()
		if err == nil {
			q.mu.Lock()
			left := len(q.sends) + q.recvs
			q.mu.Unlock()
			q.p.note(func(b *Books) { b.Unfinished += left })
		}
		return err
	})
}

var (
	_ verbs.Device = device{}
	_ verbs.PD     = (*pd)(nil)
	_ verbs.MR     = (*mr)(nil)
	_ verbs.CQ     = (*cq)(nil)
	_ verbs.QP     = (*qp)(nil)
)
