package verbsfault

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// channel is an event channel.
type channel struct {
	verbs.EventChannel
	p *Provider

	mu     sync.Mutex
	queue  []*verbs.Event // to be reported
	late   []*verbs.Event // to be reported some time, or never
	behind []*verbs.Event // to be reported after the next one
}

func (c *channel) NewID() (verbs.ID, error) {
	if err := c.p.ask("EventChannel.NewID"); err != nil {
		return nil, err
	}
	v, err := c.EventChannel.NewID()
	if err != nil {
		return nil, err
	}
	i := c.wrap(v)
	c.mu.Lock()
	defer c.mu.Unlock()
	i.known = true
	return i, nil
}

// wrap returns the id around one of the wrapped provider's.
func (c *channel) wrap(v verbs.ID) *id {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	i := c.p.ids[v]
	if i == nil {
		i = &id{ID: v, p: c.p, ch: c}
		c.p.ids[v] = i
	}
	return i
}

// GetEvent acks the wrapped provider's event as it comes; whether ours is acked is
// in the books.
func (c *channel) GetEvent() (*verbs.Event, error) {
	if err := c.p.ask("EventChannel.GetEvent"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) == 0 {
		v, err := c.EventChannel.GetEvent()
		if err != nil {
			return nil, err
		}
		ev := *v
		ev.ID = c.wrap(v.ID)
		if v.Listener != nil {
			ev.Listener = c.wrap(v.Listener)
		}
		if err := c.EventChannel.AckEvent(v); err != nil {
			return nil, err
		}
		c.decide(&ev)
	}
	ev := c.queue[0]
	c.queue = c.queue[1:]
	ev.ID.(*id).known = true
	c.p.note(func(b *Books) { b.Events++ })
	return ev, nil
}

// decide does with an event what the test wants. c.mu is held.
func (c *channel) decide(ev *verbs.Event) {
	fate := c.p.fate(ev.Type)
	if len(fate) == 0 {
		c.late = append(c.late, ev) // for ever
	}
	behind := c.behind
	c.behind = nil
	defer func() { c.queue = append(c.queue, behind...) }()
	for _, after := range fate {
		again := *ev
		switch after {
		case 0:
			c.queue = append(c.queue, &again)
			continue
		case Behind:
			c.behind = append(c.behind, &again)
			continue
		}
		c.late = append(c.late, &again)
		time.AfterFunc(after, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if i := slices.Index(c.late, &again); i >= 0 {
				c.late = slices.Delete(c.late, i, i+1)
				c.push(&again)
			}
		})
	}
}

// report reports an event of the test's own, unless its id is a request that nobody
// has got: of that nobody can know.
func (c *channel) report(ev *verbs.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ev.ID.(*id).known {
		c.push(ev)
	}
}

// push queues an event of which the descriptor does not tell. c.mu is held.
func (c *channel) push(ev *verbs.Event) {
	if ev.ID.(*id).isGone() {
		return
	}
	c.queue = append(c.queue, ev)
	_ = c.File().SetReadDeadline(time.Unix(1, 0)) // who waits looks again
}

// forget removes the events of an id, and returns the requests that nobody will
// get.
func (c *channel) forget(i *id) (orphans []*id) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, list := range []*[]*verbs.Event{&c.queue, &c.late, &c.behind} {
		*list = slices.DeleteFunc(*list, func(ev *verbs.Event) bool {
			child := ev.ID.(*id)
			if ev.Listener == verbs.ID(i) && !child.known && !slices.Contains(orphans, child) { // else it is reported twice
				orphans = append(orphans, child)
			}
			return ev.Listener == verbs.ID(i) || child == i
		})
	}
	return orphans
}

func (c *channel) AckEvent(*verbs.Event) error {
	return c.p.do("EventChannel.AckEvent", func() error {
		c.p.note(func(b *Books) { b.Events-- })
		return nil
	})
}

func (c *channel) Close() error {
	return c.p.do("EventChannel.Close", c.EventChannel.Close)
}

// id is an rdma_cm_id.
type id struct {
	verbs.ID
	p *Provider

	known bool // made by NewID, or its request was got; guarded by the channel's mu

	mu   sync.Mutex
	ch   *channel
	gone bool
}

func (i *id) channel() *channel {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.ch
}

func (i *id) isGone() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.gone
}

func (i *id) Bind(a netip.AddrPort) error {
	return i.p.do("ID.Bind", func() error { return i.ID.Bind(a) })
}

func (i *id) Listen(backlog int) error {
	return i.p.do("ID.Listen", func() error { return i.ID.Listen(backlog) })
}

func (i *id) ResolveAddr(src, dst netip.AddrPort, timeout time.Duration) error {
	return i.p.do("ID.ResolveAddr", func() error { return i.ID.ResolveAddr(src, dst, timeout) })
}

func (i *id) ResolveRoute(timeout time.Duration) error {
	return i.p.do("ID.ResolveRoute", func() error { return i.ID.ResolveRoute(timeout) })
}

func (i *id) CreateQP(d verbs.PD, c verbs.CQ, want verbs.QPCap) (verbs.QP, error) {
	if err := i.p.ask("ID.CreateQP"); err != nil {
		return nil, err
	}
	cq := c.(*cq)
	v, err := i.ID.CreateQP(d.(*pd).PD, cq.CQ, want)
	if err != nil {
		return nil, err
	}
	q := &qp{QP: v, p: i.p}
	cq.attach(q)
	return q, nil
}

func (i *id) Connect(param verbs.ConnParam) error {
	return i.p.do("ID.Connect", func() error { return i.ID.Connect(param) })
}

func (i *id) Accept(param verbs.ConnParam) error {
	return i.p.do("ID.Accept", func() error { return i.ID.Accept(param) })
}

func (i *id) Reject(private []byte) error {
	return i.p.do("ID.Reject", func() error { return i.ID.Reject(private) })
}

func (i *id) Disconnect() error { return i.p.do("ID.Disconnect", i.ID.Disconnect) }

func (i *id) Migrate(to verbs.EventChannel) error {
	return i.p.do("ID.Migrate", func() error {
		err := i.ID.Migrate(to.(*channel).EventChannel)
		if err == nil {
			i.mu.Lock()
			defer i.mu.Unlock()
			i.ch = to.(*channel)
		}
		return err
	})
}

// Destroy turns away, as a device does, the requests that nobody got.
func (i *id) Destroy() error {
	return i.p.do("ID.Destroy", func() error {
		orphans, err := i.destroy()
		for _, child := range orphans {
			_ = child.ID.Reject(nil)
			_, _ = child.destroy()
		}
		return err
	})
}

func (i *id) destroy() (orphans []*id, err error) {
	if err := i.ID.Destroy(); err != nil {
		return nil, err
	}
	i.mu.Lock()
	i.gone = true
	i.mu.Unlock()
	orphans = i.channel().forget(i)
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	delete(i.p.ids, i.ID)
	return orphans, nil
}

// Device is nil if the test has the call fail.
func (i *id) Device() verbs.Device {
	d := i.ID.Device()
	if i.p.ask("ID.Device") != nil || d == nil {
		return nil
	}
	return device{d, i.p}
}

func (i *id) SetKeepAlive(k net.KeepAliveConfig) error {
	return i.p.do("ID.SetKeepAlive", func() error { return i.ID.SetKeepAlive(k) })
}

func (i *id) SetAFOnly(on bool) error {
	return i.p.do("ID.SetAFOnly", func() error { return i.ID.SetAFOnly(on) })
}

var (
	_ verbs.EventChannel = (*channel)(nil)
	_ verbs.ID           = (*id)(nil)
)
