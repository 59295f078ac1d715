package verbstest

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

var errReset = fmt.Errorf("connection aborted: %w", syscall.ECONNRESET)

// channel is an event channel. Its pipe holds a byte while events wait. The
// provider's lock guards it.
type channel struct {
	p      *Provider
	r, w   *os.File
	fd     int // of r
	queue  []*verbs.Event
	got    map[*verbs.Event]bool // and not acked
	ids    int
	closed bool
}

func newChannel(p *Provider) (*channel, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	c := &channel{p: p, r: r, w: w, got: make(map[*verbs.Event]bool)}
	raw, err := r.SyscallConn()
	if err != nil {
		return nil, err
	}
	return c, raw.Control(func(fd uintptr) { c.fd = int(fd) })
}

func (c *channel) File() *os.File { return c.r }

func (c *channel) NewID() (verbs.ID, error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if err := c.p.try("create id"); err != nil {
		return nil, err
	}
	return c.newID(), nil
}

func (c *channel) newID() *id {
	c.ids++
	c.p.live["id"]++
	return &id{p: c.p, ch: c}
}

func (c *channel) push(ev *verbs.Event) {
	c.queue = append(c.queue, ev)
	if len(c.queue) == 1 {
		c.w.Write([]byte{0})
	}
}

// take removes and returns the events that match.
func (c *channel) take(match func(*verbs.Event) bool) (taken []*verbs.Event) {
	had := len(c.queue)
	c.queue = slices.DeleteFunc(c.queue, func(ev *verbs.Event) bool {
		if match(ev) {
			taken = append(taken, ev)
			return true
		}
		return false
	})
	if had > 0 && len(c.queue) == 0 {
		unix.Read(c.fd, make([]byte, 1))
	}
	return taken
}

func (c *channel) GetEvent() (*verbs.Event, error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if err := c.p.try("get cm event"); err != nil {
		return nil, err
	}
	if len(c.queue) == 0 {
		return nil, syscall.EAGAIN
	}
	first := c.queue[0]
	c.take(func(ev *verbs.Event) bool { return ev == first })
	c.got[first] = true
	return first, nil
}

func (c *channel) AckEvent(ev *verbs.Event) error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.p.demand(c.got[ev], "%v acked twice, or never got", ev.Type)
	delete(c.got, ev)
	return nil
}

func (c *channel) Close() error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if err := c.p.try("destroy event channel"); err != nil {
		return err
	}
	c.p.demand(c.ids == 0 && len(c.got) == 0 && !c.closed, "event channel closed with %d ids and %d unacked events", c.ids, len(c.got))
	c.closed = true
	c.p.live["channel"]--
	c.w.Close()
	return c.r.Close()
}

// id is an rdma_cm_id. The provider's lock guards it.
type id struct {
	p             *Provider
	ch            *channel
	local, remote netip.AddrPort
	bound         bool // to the device
	qp            *qp
	destroyed     bool
	reuse         bool // the address

	backlog   int  // of a listener
	listener  *id  // of a request that was neither accepted nor rejected
	peer      *id  // of a connection, or one being made
	connected bool // until DISCONNECTED
}

// post reports an event.
func (i *id) post(ev verbs.Event) {
	if i.destroyed {
		return
	}
	ev.ID = i
	i.ch.push(&ev)
}

// begin is the start of every call.
func (i *id) begin(op string) error {
	i.p.demand(!i.destroyed, "%s of a destroyed id", op)
	return i.p.try(op)
}

func (i *id) Bind(a netip.AddrPort) error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	if err := i.begin("bind"); err != nil {
		return err
	}
	if a.Port() == 0 {
		i.p.serial++
		a = netip.AddrPortFrom(a.Addr(), uint16(20000+i.p.serial%20000))
	}
	for _, other := range i.p.bound[a] {
		if !i.reuse || !other.reuse {
			return syscall.EADDRINUSE
		}
	}
	i.local = a
	i.p.bound[a] = append(i.p.bound[a], i)
	return nil
}

func (i *id) Listen(backlog int) error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	if err := i.begin("listen"); err != nil {
		return err
	}
	if i.p.listeners[i.local] != nil {
		return syscall.EADDRINUSE
	}
	i.p.listeners[i.local] = i
	i.backlog = max(backlog, 1)
	return nil
}

// async starts an operation and reports whether it will ever end.
func (i *id) async(op string) (ends bool, err error) {
	err = i.begin(op)
	if err == ErrHang {
		return false, nil
	}
	return err == nil, err
}

func (i *id) ResolveAddr(src, dst netip.AddrPort, _ time.Duration) error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	ends, err := i.async("resolve address")
	if !ends {
		return err
	}
	i.remote, i.bound = dst, true
	if !i.local.IsValid() {
		i.local = src
	}
	if !i.local.IsValid() {
		i.local = netip.AddrPortFrom(dst.Addr(), 0)
	}
	i.post(verbs.Event{Type: verbs.EventAddrResolved})
	return nil
}

func (i *id) ResolveRoute(time.Duration) error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	ends, err := i.async("resolve route")
	if ends {
		i.post(verbs.Event{Type: verbs.EventRouteResolved})
	}
	return err
}

func (i *id) CreateQP(d verbs.PD, c verbs.CQ, want verbs.QPCap) (verbs.QP, error) {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	i.p.demand(i.bound && i.qp == nil, "QP created on an id without a device, or with a QP")
	q, err := i.p.newQP(i, d.(*pd), c.(*cq), want)
	if err != nil {
		return nil, err
	}
	i.qp = q
	return q, nil
}

func (i *id) Connect(param verbs.ConnParam) error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	ends, err := i.async("connect")
	if !ends {
		return err
	}
	i.p.demand(i.qp != nil, "connect without a QP")
	l := i.p.listeners[i.remote]
	if l == nil || l.waiting() >= l.backlog {
		i.post(verbs.Event{Type: verbs.EventRejected, Err: syscall.ECONNREFUSED})
		return nil
	}
	child := l.ch.newID()
	child.bound, child.listener, child.peer = true, l, i
	child.local, child.remote = i.remote, i.local
	i.peer = child
	l.ch.push(&verbs.Event{Type: verbs.EventConnectRequest, ID: child, Listener: l,
		PrivateData: slices.Clone(param.PrivateData)})
	return nil
}

// waiting counts the requests of a listener that nobody has got.
func (i *id) waiting() (n int) {
	for _, ev := range i.ch.queue {
		if ev.Listener == i {
			n++
		}
	}
	return n
}

func (i *id) Accept(param verbs.ConnParam) error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	if err := i.begin("accept"); err != nil {
		return err
	}
	i.p.demand(i.qp != nil, "accept without a QP")
	if i.peer == nil || i.peer.qp == nil {
		return syscall.ECONNRESET
	}
	i.listener = nil
	i.connected, i.peer.connected = true, true
	connect(i.qp, i.peer.qp)
	i.post(verbs.Event{Type: verbs.EventEstablished})
	i.peer.post(verbs.Event{Type: verbs.EventEstablished, PrivateData: slices.Clone(param.PrivateData)})
	return nil
}

func (i *id) Reject(private []byte) error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	if err := i.begin("reject"); err != nil {
		return err
	}
	i.reject(private)
	return nil
}

func (i *id) reject(private []byte) {
	if i.peer != nil && i.listener != nil {
		i.peer.post(verbs.Event{Type: verbs.EventRejected, Err: syscall.ECONNREFUSED, PrivateData: slices.Clone(private)})
		i.peer.peer = nil
	}
	i.peer, i.listener = nil, nil
}

func (i *id) Disconnect() error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	if err := i.begin("disconnect"); err != nil {
		return err
	}
	if i.qp != nil {
		i.qp.abort()
	}
	i.disconnected(nil)
	return nil
}

// disconnected reports the end of a connection to both sides.
func (i *id) disconnected(err error) {
	for _, end := range []*id{i, i.peer} {
		if end != nil && end.connected {
			end.connected = false
			end.post(verbs.Event{Type: verbs.EventDisconnected, Err: err})
		}
	}
}

func (i *id) Migrate(to verbs.EventChannel) error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	if err := i.begin("migrate id"); err != nil {
		return err
	}
	i.migrate(to.(*channel))
	return nil
}

func (i *id) migrate(to *channel) {
	events := i.ch.take(func(ev *verbs.Event) bool { return ev.ID == i || ev.Listener == i })
	i.ch.ids--
	to.ids++
	i.ch = to
	for _, ev := range events {
		to.push(ev)
		if child := ev.ID.(*id); child != i {
			child.migrate(to)
		}
	}
}

func (i *id) Destroy() error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	if err := i.begin("destroy id"); err != nil {
		return err
	}
	i.awaitAcks()
	i.destroy()
	return nil
}

// awaitAcks waits, as rdma_destroy_id(3) does, until the id's events are acked:
// somebody may be between getting one and acking it. Who never does is at fault.
func (i *id) awaitAcks() {
	for end := time.Now().Add(5 * time.Second); ; {
		late := ""
		for ev := range i.ch.got {
			if ev.ID == i && ev.Type != verbs.EventConnectRequest {
				late = ev.Type.String()
			}
		}
		if late == "" {
			return
		}
		if time.Now().After(end) {
			i.p.demand(false, "id destroyed with an unacked %v", late)
			return
		}
		i.p.mu.Unlock()
		runtime.Gosched()
		i.p.mu.Lock()
	}
}

func (i *id) destroy() {
	i.p.demand(i.qp == nil, "id destroyed with a QP")
	if i.p.listeners[i.local] == i {
		delete(i.p.listeners, i.local)
	}
	if left := slices.DeleteFunc(i.p.bound[i.local], func(o *id) bool { return o == i }); len(left) > 0 {
		i.p.bound[i.local] = left
	} else {
		delete(i.p.bound, i.local)
	}
	i.disconnected(errReset)
	if i.listener != nil {
		i.reject(nil)
	}
	if i.peer != nil {
		i.peer.peer = nil
	}
	i.destroyed = true
	i.ch.ids--
	i.p.live["id"]--
	for _, ev := range i.ch.take(func(ev *verbs.Event) bool { return ev.ID == i || ev.Listener == i }) {
		if child := ev.ID.(*id); child != i {
			child.destroy()
		}
	}
}

func (i *id) LocalAddr() netip.AddrPort {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	return i.local
}

func (i *id) RemoteAddr() netip.AddrPort {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	return i.remote
}

func (i *id) Device() verbs.Device {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	if !i.bound {
		return nil
	}
	return i.p.dev
}

func (i *id) Endpoint() (verbs.Endpoint, bool) {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	if !i.bound {
		return verbs.Endpoint{}, false
	}
	gid := netip.AddrFrom16(i.local.Addr().As16())
	return verbs.Endpoint{Device: i.p.dev.Name(), Port: 1, Transport: "RoCE", LinkLayer: "Ethernet", GID: gid}, true
}

func (i *id) SetKeepAlive(net.KeepAliveConfig) error { return i.set("set keepalive", nil) }
func (i *id) SetAFOnly(on bool) error                { return i.set("set AF only", on) }
func (i *id) SetTOS(tos uint8) error                 { return i.set("set TOS", tos) }
func (i *id) SetAckTimeout(n uint8) error            { return i.set("set ack timeout", n) }
func (i *id) SetLogger(*slog.Logger)                 { _ = i.set("set logger", nil) }

func (i *id) SetReuseAddr(on bool) error {
	err := i.set("set reuse address", on)
	if err == nil {
		i.p.mu.Lock()
		defer i.p.mu.Unlock()
		i.reuse = on
	}
	return err
}

// set takes an option, and notes its value for Option.
func (i *id) set(op string, value any) error {
	i.p.mu.Lock()
	defer i.p.mu.Unlock()
	err := i.begin(op)
	if err == nil {
		i.p.options[op] = value
	}
	return err
}

var (
	_ verbs.Provider     = (*Provider)(nil)
	_ verbs.EventChannel = (*channel)(nil)
	_ verbs.ID           = (*id)(nil)
)
