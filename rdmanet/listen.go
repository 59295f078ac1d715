package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/internal/fair"
)

// DefaultBacklog is how many connections wait for Accept by default.
const DefaultBacklog = 256

// Listen waits for connections on an address: host:port, where an empty host is
// every address of this machine and port 0 is one that is free. The listener is a
// *Listener.
func Listen(network, address string) (net.Listener, error) {
	return (&ListenConfig{}).Listen(context.Background(), network, address)
}

// ListenConfig has the options of listening. The zero value is Listen.
type ListenConfig struct {
	Config

	// Backlog is how many connections may wait for Accept, set-up included: 1
	// or more; 0 means 256. One more is refused, and its Dial fails with
	// ECONNREFUSED, unless a set-up has to make room for it: the oldest one of
	// the host that has the most of them, if that has at least two more than
	// the newcomer's, or else the oldest one, if it has taken half a second. A
	// set-up of which nothing comes ends after 10 s.
	Backlog int
}

// Listen waits for connections on an address, as the function Listen does. ctx
// limits the resolution of the address and nothing else.
func (lc *ListenConfig) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	l, err := lc.listen(ctx, network, address)
	if err != nil {
		return nil, opError(opListen, nil, namedAddr(address), err)
	}
	return l, nil
}

func (lc *ListenConfig) listen(ctx context.Context, network, address string) (*Listener, error) {
	cfg, err := lc.Config.resolve()
	if err != nil {
		return nil, err
	}
	backlog := lc.Backlog
	if backlog == 0 {
		backlog = DefaultBacklog
	}
	if backlog < 0 {
		return nil, fmt.Errorf("value %d of ListenConfig.Backlog must be 1 or more: %w", backlog, syscall.EINVAL)
	}
	f, err := parseNetwork(network)
	if err != nil {
		return nil, err
	}
	addrs, port, err := lookup(ctx, f, address)
	if err != nil {
		return nil, err
	}
	if len(addrs) == 0 {
		addrs = wildcard(f)
	}
	l, err := listenOn(cfg, backlog, netip.AddrPortFrom(pickListenAddr(addrs), port), f == family6)
	if ipv6Off(err) && len(addrs) > 1 {
		return listenOn(cfg, backlog, netip.AddrPortFrom(addrs[1], port), false)
	}
	return l, err
}

func listenOn(cfg Config, backlog int, addr netip.AddrPort, only6 bool) (*Listener, error) {
	l := &Listener{cfg: cfg, backlog: backlog, queue: make(chan *Conn, backlog), done: make(chan struct{}), gone: make(chan struct{}), setups: make(map[*setup]struct{})}
	l.deadline = makeDeadline(func() {})
	if err := l.open(addr, only6); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	l.addr = &Addr{netip.AddrPortFrom(addr.Addr(), l.legs[0].id.LocalAddr().Port())}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.opened = true
	l.checkLegs()
	return l, nil
}

// wildcard is every address of this machine; the second one is for machines
// without IPv6.
func wildcard(f family) []netip.Addr {
	switch f {
	case family4:
		return []netip.Addr{netip.IPv4Unspecified()}
	case family6:
		return []netip.Addr{netip.IPv6Unspecified()}
	}
	return []netip.Addr{netip.IPv6Unspecified(), netip.IPv4Unspecified()}
}

// pickListenAddr prefers IPv4 for a name, as package net does.
func pickListenAddr(addrs []netip.Addr) netip.Addr {
	for _, a := range addrs {
		if a.Is4() && !a.IsUnspecified() {
			return a
		}
	}
	return addrs[0]
}

// Listener takes connections. All methods may be called by any number of
// goroutines at any time.
//
// A peer's set-up runs beside Accept, which therefore never waits for a slow or
// silent peer: it returns connections whose dialer has said that it uses them.
type Listener struct {
	cfg      Config
	legs     []*leg // where it listens; at least one
	addr     *Addr
	backlog  int
	queue    chan *Conn // ready for Accept
	deadline *deadline
	done     chan struct{} // closed by Close
	gone     chan struct{} // closed when the devices of all legs are removed

	mu     sync.Mutex
	opened bool // legs is complete
	closed bool
	setups map[*setup]struct{} // under way
	wg     sync.WaitGroup      // their goroutines
}

var _ net.Listener = (*Listener)(nil)

// setup is a connection that is not yet ready for Accept.
type setup struct {
	host   netip.Prefix
	began  time.Time
	cancel context.CancelFunc
}

// stale is how long a set-up may take before another may push it out of a full
// backlog.
const stale = 500 * time.Millisecond

// Accept returns the next connection, a *Conn. It blocks until there is one, the
// deadline is over, or Close, which makes it fail with net.ErrClosed. It fails with
// ENODEV once all devices that it listened on are removed.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.accept()
	if err != nil {
		return nil, opError(opAccept, nil, l.addr, err)
	}
	return c, nil
}

func (l *Listener) accept() (*Conn, error) {
	select {
	case <-l.done:
		return nil, net.ErrClosed
	default:
	}
	if l.deadline.expired() {
		return nil, os.ErrDeadlineExceeded
	}
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-l.deadline.over():
		return nil, os.ErrDeadlineExceeded
	case <-l.gone:
		return nil, syscall.ENODEV
	}
}

// lost gives up a leg whose device is removed: the device waits for that.
func (l *Listener) lost(g *leg) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || g.gone {
		return
	}
	g.gone = true
	l.cfg.Logger.Info("rdma: device removed", "provider", string(g.provider), "addr", g.id.LocalAddr().String())
	l.wg.Go(func() { _ = g.destroy() })
	l.checkLegs()
}

// checkLegs ends Accept if no leg is left. l.mu is held.
func (l *Listener) checkLegs() {
	if l.opened && !slices.ContainsFunc(l.legs, func(g *leg) bool { return !g.gone }) {
		close(l.gone)
	}
}

// SetDeadline limits blocked and future calls of Accept. The zero time means no
// limit.
func (l *Listener) SetDeadline(t time.Time) error {
	select {
	case <-l.done:
		return opError(opSet, nil, l.addr, net.ErrClosed)
	default:
	}
	l.deadline.set(t)
	return nil
}

// Addr returns the address that is listened on, an *Addr, with the port that was
// chosen.
func (l *Listener) Addr() net.Addr { return l.addr }

// Providers returns the providers that it listens with.
func (l *Listener) Providers() []Provider {
	var ps []Provider
	for _, g := range l.legs {
		if !slices.Contains(ps, g.provider) {
			ps = append(ps, g.provider)
		}
	}
	return ps
}

// Close stops listening. Connections that nobody has accepted are reset; accepted
// ones are not touched. Blocked calls of Accept return net.ErrClosed.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return opError(opClose, nil, l.addr, net.ErrClosed)
	}
	l.closed = true
	close(l.done)
	for s := range l.setups {
		s.cancel()
	}
	l.mu.Unlock()
	l.deadline.stop()
	var errs []error
	for _, g := range l.legs {
		errs = append(errs, g.destroy()) // no more requests
	}
	l.wg.Wait()
	for {
		select {
		case c := <-l.queue:
			c.linger.Store(-1)
			_ = c.Close()
			continue
		default:
		}
		for _, g := range l.legs {
			errs = append(errs, g.provider.releaseLoop())
		}
		return opError(opClose, nil, l.addr, errors.Join(errs...))
	}
}

// request begins the set-up of a connection.
func (l *Listener) request(ev *cm.Event, p Provider) {
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	s := &setup{host: fair.Host(ev.ID.RemoteAddr().Addr()), began: time.Now(), cancel: cancel}
	l.mu.Lock()
	if l.closed { // between its step and now
		l.mu.Unlock()
		cancel()
		_ = ev.ID.Reject(refuse(reasonClosing, "").append(nil))
		_ = destroyID(ev.ID)
		return
	}
	why := l.admit(s)
	p.retainLoop()
	l.wg.Add(1)
	l.mu.Unlock()
	c := newConn(l.cfg, ev.ID)
	c.accepted = true
	go func() {
		defer l.wg.Done()
		defer cancel()
		if why == nil {
			why = l.ready(s, c, c.accept(ctx, ev.PrivateData))
		}
		if why != nil {
			l.turnAway(c, why)
		}
	}()
}

// admit notes a set-up, unless the backlog is full. l.mu is held.
func (l *Listener) admit(s *setup) error {
	if len(l.setups)+len(l.queue) >= l.backlog && !l.makeRoom(s.host) {
		return refuse(reasonBacklog, fmt.Sprintf("%d connections wait", l.backlog))
	}
	l.setups[s] = struct{}{}
	return nil
}

// makeRoom ends a set-up in favour of one of a host: one of the host that has the
// most, if it has more even then, or one that has had its time. l.mu is held.
func (l *Listener) makeRoom(host netip.Prefix) bool {
	count := make(fair.Count)
	for s := range l.setups {
		count[s.host]++
	}
	most, n := count.Most()
	crowded := n >= count[host]+2
	var oldest *setup
	for s := range l.setups {
		if (!crowded || s.host == most) && (oldest == nil || s.began.Before(oldest.began)) {
			oldest = s
		}
	}
	if oldest == nil || !crowded && time.Since(oldest.began) < stale {
		return false
	}
	delete(l.setups, oldest)
	oldest.cancel()
	return true
}

// ready ends a set-up; if it succeeded, and was not dropped meanwhile, Accept may
// have the connection.
func (l *Listener) ready(s *setup, c *Conn, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.setups[s]; !ok && err == nil {
		return refuse(reasonBacklog, "")
	}
	delete(l.setups, s)
	if err == nil {
		l.queue <- c // admit kept room for it
	}
	return err
}

// turnAway ends a connection that Accept will not return.
func (l *Listener) turnAway(c *Conn, why error) {
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if !closed {
		l.cfg.Logger.Info("rdma: connection refused", "provider", string(c.Provider()), "peer", c.id.RemoteAddr().String(), "err", why)
	}
	var r *refusal
	if !errors.As(why, &r) {
		r = refuse(reasonResources, "")
	}
	_ = c.id.Reject(r.append(nil)) // fails if it was accepted before: then it is reset
	c.linger.Store(-1)
	_ = c.Close()
}

// accept sets up the passive side and waits for the dialer to use it.
func (c *Conn) accept(ctx context.Context, private []byte) error {
	peer, refused := parseGreeting(private)
	if refused != nil {
		return refused
	}
	if err := c.open(); err != nil {
		return err
	}
	reply := peer.answer(c.cfg.greeting())
	peer.version = reply.version
	c.established(peer)
	if err := c.id.Accept(c.cfg.connParam(reply.append(nil))); err != nil {
		return err
	}
	if _, err := c.event(ctx, cm.EventEstablished); err != nil {
		return err
	}
	return c.awaitHello(ctx)
}

// awaitHello waits for the first frame.
func (c *Conn) awaitHello(ctx context.Context) error {
	limit := c.limit(setupTimeout)
	defer limit.stop()
	stop := context.AfterFunc(ctx, func() { limit.set(longAgo) })
	defer stop()
	hello := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.flow.hello || c.rx.err != nil || c.rx.flushed
	}
	if err := c.waitFor(&waiter{ready: hello, note: make(chan struct{}, 1), deadline: limit}); err != nil {
		return fmt.Errorf("the peer did not begin: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.flow.hello {
		if c.rx.err != nil {
			return c.rx.err
		}
		return fmt.Errorf("the peer went before it began: %w", syscall.ECONNRESET)
	}
	return nil
}
