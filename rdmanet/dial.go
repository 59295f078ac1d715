package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/cm"
)

// Bounds of a single attempt to connect.
const (
	resolveTimeout       = 5 * time.Second
	defaultFallbackDelay = 300 * time.Millisecond // RFC 8305, as in package net
)

// setupTimeout is how long a listener waits for a dialer. A variable for tests.
var setupTimeout = 10 * time.Second

// Dial connects to an address: host:port, where both may be names. Networks are
// rdma, rdma4 and rdma6; tcp, tcp4 and tcp6 mean the same. All addresses of a
// host are tried. The connection is a *Conn.
func Dial(network, address string) (net.Conn, error) {
	return (&Dialer{}).DialContext(context.Background(), network, address)
}

// DialTimeout is Dial with a limit on how long it takes in all.
func DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	return (&Dialer{Timeout: timeout}).DialContext(context.Background(), network, address)
}

// Dialer has the options of dialing. The zero value is Dial. It may be used by
// many goroutines.
type Dialer struct {
	Config

	// Timeout limits how long a dial takes in all, and Deadline when it ends;
	// the earlier counts, and so does the context's. Zero means none, and then
	// the provider's own limits apply, of some seconds for each address.
	Timeout  time.Duration
	Deadline time.Time
	// LocalAddr is the address to dial from: an *Addr, a *net.TCPAddr, or nil.
	// Only addresses of its family are dialed.
	LocalAddr net.Addr
	// FallbackDelay is how long to wait for a connection of the first address
	// family before the other one is tried beside it (RFC 8305). Zero means
	// 300 ms; negative, that they are tried one after the other.
	FallbackDelay time.Duration
}

// Dial is DialContext without a context.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext connects to an address, as Dial does. When ctx ends first it fails
// with the context's error; the connection does not end with ctx afterwards. It
// fits wherever a net.Dialer's DialContext does, such as in http.Transport.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := d.dial(ctx, network, address)
	if err != nil {
		return nil, opError(opDial, addrOrNil(d.LocalAddr), namedAddr(address), err)
	}
	return c, nil
}

func (d *Dialer) dial(ctx context.Context, network, address string) (*Conn, error) {
	if limit := d.deadline(time.Now()); !limit.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, limit)
		defer cancel()
	}
	cfg, err := d.Config.resolve()
	if err != nil {
		return nil, err
	}
	f, err := parseNetwork(network)
	if err != nil {
		return nil, err
	}
	local, err := addrPortOf(d.LocalAddr)
	if err != nil {
		return nil, err
	}
	addrs, port, err := lookup(ctx, f, address)
	if err != nil {
		return nil, err
	}
	if len(addrs) == 0 { // as with package net, no host is this one
		addrs = loopback(f)
	}
	var dst []netip.AddrPort
	for _, a := range addrs {
		if !local.Addr().IsValid() || local.Addr().Is4() == a.Is4() {
			dst = append(dst, netip.AddrPortFrom(a, port))
		}
	}
	if len(dst) == 0 {
		return nil, fmt.Errorf("no address of %s is of the family of local address %v: %w", address, local, syscall.EADDRNOTAVAIL)
	}
	r := &race{cfg: cfg, local: local, delay: d.FallbackDelay}
	return r.run(ctx, dst)
}

func (d *Dialer) deadline(now time.Time) time.Time {
	limit := d.Deadline
	if d.Timeout > 0 {
		if t := now.Add(d.Timeout); limit.IsZero() || t.Before(limit) {
			limit = t
		}
	}
	return limit
}

func loopback(f family) []netip.Addr {
	v4, v6 := netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()
	switch f {
	case family4:
		return []netip.Addr{v4}
	case family6:
		return []netip.Addr{v6}
	}
	return []netip.Addr{v4, v6}
}

func addrOrNil(a net.Addr) net.Addr {
	if ap, err := addrPortOf(a); err == nil && ap.IsValid() {
		return &Addr{ap}
	}
	return nil
}

// race tries the addresses of a name: those of the first one's family in turn,
// and after a delay, or when they have failed, the others' beside them. The first
// connection wins. Only the winner is committed, so a loser never comes out of
// anybody's Accept.
type race struct {
	cfg   Config
	local netip.AddrPort
	delay time.Duration
}

type dialed struct {
	c   *Conn
	err error
}

func (r *race) run(ctx context.Context, dst []netip.AddrPort) (*Conn, error) {
	var first, second []netip.AddrPort
	for _, a := range dst {
		if a.Addr().Is4() == dst[0].Addr().Is4() {
			first = append(first, a)
		} else {
			second = append(second, a)
		}
	}
	if r.delay < 0 {
		first, second = dst, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan dialed)
	start := func(dst []netip.AddrPort) {
		go func() {
			c, err := r.inTurn(ctx, dst)
			results <- dialed{c, err}
		}()
	}
	start(first)
	running := 1
	fallback := time.NewTimer(r.fallbackDelay())
	defer fallback.Stop()
	var firstErr error
	for {
		select {
		case <-fallback.C:
		case d := <-results:
			running--
			if d.err == nil {
				cancel()
				go closeLosers(results, running)
				return d.commit()
			}
			if firstErr == nil {
				firstErr = d.err
			}
		}
		if len(second) > 0 {
			start(second)
			second = nil
			running++
		}
		if running == 0 {
			return nil, firstErr
		}
	}
}

func (r *race) fallbackDelay() time.Duration {
	if r.delay == 0 {
		return defaultFallbackDelay
	}
	return r.delay
}

func closeLosers(results <-chan dialed, n int) {
	for range n {
		if d := <-results; d.err == nil {
			d.c.linger.Store(-1)
			_ = d.c.Close()
		}
	}
}

// commit sends HELLO, which makes the peer's Accept return the connection.
func (d dialed) commit() (*Conn, error) {
	if err := d.c.sendControl(frameHello, false); err != nil {
		_ = d.c.Close()
		return nil, err
	}
	return d.c, nil
}

// inTurn tries one address after the other, each with its share of the time.
func (r *race) inTurn(ctx context.Context, dst []netip.AddrPort) (*Conn, error) {
	var firstErr error
	for i, a := range dst {
		c, err := r.one(ctx, a, len(dst)-i)
		if err == nil {
			return c, nil
		}
		if firstErr == nil {
			firstErr = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, firstErr
}

// one tries one address. remaining says between how many, with this one, the time
// that is left is to be shared.
func (r *race) one(ctx context.Context, dst netip.AddrPort, remaining int) (*Conn, error) {
	outer := ctx
	if limit, ok := ctx.Deadline(); ok && remaining > 1 {
		const least = 2 * time.Second
		left := time.Until(limit)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, max(left/time.Duration(remaining), min(left, least)))
		defer cancel()
	}
	c, err := connect(ctx, r.cfg, r.local, dst)
	if err != nil {
		var source net.Addr
		if r.local.IsValid() {
			source = &Addr{r.local}
		}
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			err = ctxError(ctx)
			if outer.Err() != nil {
				err = ctxError(outer)
			}
		}
		return nil, opError(opDial, source, &Addr{dst}, err)
	}
	return c, nil
}

// connect makes one connection, which is not yet committed.
func connect(ctx context.Context, cfg Config, local, dst netip.AddrPort) (*Conn, error) {
	loop, err := acquireLoop(cfg.Provider)
	if err != nil {
		return nil, err
	}
	id, err := loop.ch.NewID()
	if err != nil {
		return nil, errors.Join(err, cfg.Provider.releaseLoop())
	}
	c := newConn(cfg, id)
	if err := c.connect(ctx, local, dst); err != nil {
		c.linger.Store(-1)
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Conn) connect(ctx context.Context, local, dst netip.AddrPort) error {
	if err := c.id.ResolveAddr(withFamily(local, dst), dst, resolveTimeout); err != nil {
		return err
	}
	if _, err := c.event(ctx, cm.EventAddrResolved); err != nil {
		return err
	}
	if err := c.id.ResolveRoute(resolveTimeout); err != nil {
		return err
	}
	if _, err := c.event(ctx, cm.EventRouteResolved); err != nil {
		return err
	}
	if err := c.open(); err != nil {
		return err
	}
	if err := c.id.Connect(c.cfg.connParam(c.cfg.greeting().append(nil))); err != nil {
		return err
	}
	ev, err := c.event(ctx, cm.EventEstablished)
	if err != nil {
		return err
	}
	peer, refused := parseGreeting(ev.PrivateData)
	if refused == nil && peer.version > protocolVersion {
		refused = refuse(reasonVersion, fmt.Sprintf("the reply is for version %d", peer.version))
	}
	if refused != nil {
		return fmt.Errorf("%v does not speak our protocol: %s: %w", dst, refused.text, syscall.EPROTO)
	}
	c.established(peer)
	return nil
}

// withFamily turns a local address of only a port into one that dst can be dialed
// from.
func withFamily(local, dst netip.AddrPort) netip.AddrPort {
	if local.Addr().IsValid() || local.Port() == 0 {
		return local
	}
	if dst.Addr().Is4() {
		return netip.AddrPortFrom(netip.IPv4Unspecified(), local.Port())
	}
	return netip.AddrPortFrom(netip.IPv6Unspecified(), local.Port())
}

// event waits for the id's next event, which should be of type want.
func (c *Conn) event(ctx context.Context, want cm.EventType) (*cm.Event, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case ev := <-c.cmEvents:
			switch {
			case ev.Type == want:
				return ev, nil
			case ev.Type == cm.EventAddrChange || ev.Type == cm.EventTimewaitExit:
				continue
			case ev.Type == cm.EventRejected:
				if r := parseRefusal(ev.PrivateData); r != nil {
					return nil, r
				}
			}
			if ev.Err != nil {
				return nil, ev.Err
			}
			return nil, fmt.Errorf("unexpected event %v: %w", ev.Type, syscall.ECONNRESET)
		}
	}
}
