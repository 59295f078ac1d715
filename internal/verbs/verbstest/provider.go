// Package verbstest is an RDMA provider for tests: queue pairs that talk to each
// other within one process, in a few hundred lines. It fails where it is told
// to, and keeps watch on its caller: whoever destroys what is in use, or calls
// what may not be called concurrently, is found out by Violations.
//
// One lock covers the whole provider. It is simple, not fast.
package verbstest

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// Name is the provider's name.
const Name = "fake"

// ErrHang, returned by a Fail function for "resolve address", "resolve route" or
// "connect", lets the operation begin and never end. For "flush" any error
// leaves the posted work requests of a queue pair in error outstanding.
var ErrHang = errors.New("begins and never ends")

// Provider is the fake. Make it with New.
type Provider struct {
	mu         sync.Mutex
	fail       func(op string) error
	listeners  map[netip.AddrPort]*id
	bound      map[netip.AddrPort][]*id
	qps        map[uint32]*qp
	live       map[string]int
	options    map[string]any
	regions    map[uint32]*mr
	remote     bool
	violations []string
	serial     uint32
	dev        *device
}

// New returns a provider with one device.
func New() *Provider {
	p := &Provider{
		listeners: make(map[netip.AddrPort]*id),
		bound:     make(map[netip.AddrPort][]*id),
		qps:       make(map[uint32]*qp),
		live:      make(map[string]int),
		options:   make(map[string]any),
		regions:   make(map[uint32]*mr),
	}
	p.dev = &device{p}
	return p
}

// Name implements verbs.Provider.
func (p *Provider) Name() string { return Name }

// Device returns the device.
func (p *Provider) Device() verbs.Device { return p.dev }

// SetFail makes every operation ask f, by the manual page's verb ("reg mr",
// "create qp", "post send" for each request, ...). It fails with the error that
// f returns. Nil is back to normal.
func (p *Provider) SetFail(f func(op string) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail = f
}

// Live returns how many objects of each kind have not been destroyed. Kinds
// with none are left out.
func (p *Provider) Live() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	live := maps.Clone(p.live)
	maps.DeleteFunc(live, func(_ string, n int) bool { return n == 0 })
	return live
}

// Violations returns what callers did wrong.
func (p *Provider) Violations() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.violations...)
}

// Option returns the value that an option ("set TOS", ...) of any id was last set
// to, or nil.
func (p *Provider) Option(op string) any {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.options[op]
}

// AllowRemoteAccess makes it no violation to register memory with remote access.
func (p *Provider) AllowRemoteAccess() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.remote = true
}

// Inject puts a completion of the test's own into the CQ of a queue pair.
func (p *Provider) Inject(qpNum uint32, wc verbs.WC) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.qps[qpNum].cq.push(wc, true)
}

// Fault completes the oldest send or receive that a queue pair has outstanding
// with an error, after which both ends are in error and flush the rest, as with a
// device. It reports whether there was one.
func (p *Provider) Fault(qpNum uint32, op verbs.Op, s verbs.Status) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.qps[qpNum]
	switch {
	case q == nil || q.bad:
		return false
	case op == verbs.OpSend && q.sends.n > 0:
		q.cq.push(verbs.WC{WRID: q.sends.front().wr.WRID, Op: op, Status: s}, true)
		q.sends.pop()
	case op == verbs.OpRecv && q.recvs.n > 0:
		q.cq.push(verbs.WC{WRID: q.recvs.front().WRID, Op: op, Status: s}, true)
		q.recvs.pop()
	default:
		return false
	}
	q.abort()
	return true
}

// Pair returns two makers of queue pairs. What one makes is connected to what
// the other makes, with no connection manager.
func (p *Provider) Pair() (a, b *End) {
	a, b = &End{p: p}, &End{p: p}
	a.peer, b.peer = b, a
	return a, b
}

// End is one end of a Pair.
type End struct {
	p    *Provider
	peer *End
	qp   *qp
}

// CreateQP makes the end's queue pair.
func (e *End) CreateQP(d verbs.PD, c verbs.CQ, want verbs.QPCap) (verbs.QP, error) {
	e.p.mu.Lock()
	defer e.p.mu.Unlock()
	q, err := e.p.newQP(nil, d.(*pd), c.(*cq), want)
	if err != nil {
		return nil, err
	}
	e.qp = q
	if e.peer.qp != nil {
		connect(e.qp, e.peer.qp)
	}
	return q, nil
}

// try asks the test whether the operation fails. The lock is held.
func (p *Provider) try(op string) error {
	if p.fail == nil {
		return nil
	}
	return p.fail(op)
}

// demand records a violation unless ok. The lock is held.
func (p *Provider) demand(ok bool, format string, args ...any) {
	if !ok {
		p.violations = append(p.violations, fmt.Sprintf(format, args...))
	}
}

// NewEventChannel implements verbs.Provider.
func (p *Provider) NewEventChannel() (verbs.EventChannel, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.try("create event channel"); err != nil {
		return nil, err
	}
	c, err := newChannel(p)
	if err == nil {
		p.live["channel"]++
	}
	return c, err
}

type device struct{ p *Provider }

func (d *device) Name() string { return Name + "0" }

func (d *device) Attr() verbs.DeviceAttr {
	return verbs.DeviceAttr{MaxQPWR: 1024, MaxSGE: 4, MaxCQE: 4096, MaxInline: 256}
}

func (d *device) AllocPD() (verbs.PD, error) {
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	if err := d.p.try("alloc pd"); err != nil {
		return nil, err
	}
	d.p.live["pd"]++
	return &pd{p: d.p}, nil
}

func (d *device) CreateCQ(depth int) (verbs.CQ, error) {
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	if err := d.p.try("create cq"); err != nil {
		return nil, err
	}
	d.p.live["cq"]++
	c := &cq{p: d.p, notify: make(chan struct{}, 1)}
	c.wcs.buf = make([]verbs.WC, depth+4) // some for Inject
	return c, nil
}

type pd struct {
	p        *Provider
	mrs, qps int
}

func (d *pd) RegMR(b []byte, access verbs.Access) (verbs.MR, error) {
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	if err := d.p.try("reg mr"); err != nil {
		return nil, err
	}
	d.p.demand(access == verbs.AccessLocalWrite || d.p.remote, "memory registered with access %#x", access)
	d.mrs++
	d.p.live["mr"]++
	d.p.serial++
	m := &mr{d, b, d.p.serial, access}
	d.p.regions[m.key] = m
	return m, nil
}

func (d *pd) Dealloc() error {
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	if err := d.p.try("dealloc pd"); err != nil {
		return err
	}
	d.p.demand(d.mrs == 0 && d.qps == 0, "PD deallocated with %d MRs and %d QPs", d.mrs, d.qps)
	d.p.live["pd"]--
	return nil
}

type mr struct {
	pd     *pd
	mem    []byte
	key    uint32
	access verbs.Access
}

func (m *mr) LKey() uint32         { return m.key }
func (m *mr) RKey() uint32         { return m.key }
func (m *mr) Access() verbs.Access { return m.access }

func (m *mr) Dereg() error {
	m.pd.p.mu.Lock()
	defer m.pd.p.mu.Unlock()
	if err := m.pd.p.try("dereg mr"); err != nil {
		return err
	}
	m.pd.mrs--
	m.pd.p.live["mr"]--
	delete(m.pd.p.regions, m.key)
	return nil
}

// errInvalid is what a call gets that makes no sense at its time.
func errInvalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, syscall.EINVAL)...)
}
