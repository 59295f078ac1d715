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

// resolveTimeout bounds the resolution of an address, and of a route.
const resolveTimeout = 5 * time.Second

// setupTimeout is how long a listener waits for a dialer. A variable for tests.
var setupTimeout = 10 * time.Second

// eventTimeout is how long to wait for what a provider should report by itself much
// sooner: TCP, under iWARP, gives up after two minutes. A variable for tests.
var eventTimeout = 3 * time.Minute

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
	// 300 ms; negative, that they are tried one after the other. Software begins
	// 250 ms after a device, or when that has failed, if ProviderAuto has both.
	FallbackDelay time.Duration
}

// Dial is DialContext without a context.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext connects to an address, as Dial does. When ctx ends first it fails
// with the context's error, and a device that is not done yet is waited for in the
// background; the connection does not end with ctx afterwards. It fits wherever a
// net.Dialer's DialContext does, such as in http.Transport.
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
	r := &race{cfg: cfg, local: local}
	return r.run(ctx, lanes(cfg.providers(), dst, d.FallbackDelay))
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

// letGo is how long a dial that is given up waits for what it gives back. siw takes
// up to 10 s, the time that it gives a peer to answer, and two minutes for a host
// that does not answer TCP.
const letGo = 100 * time.Millisecond

// connect makes one connection, which is not yet committed. It returns when ctx
// ends; what a provider does not let go then is waited for in the background.
func connect(ctx context.Context, cfg Config, p Provider, local, dst netip.AddrPort) (*Conn, error) {
	results := make(chan dialed, 1)
	go func() {
		c, err := connectNow(ctx, cfg, p, local, dst)
		results <- dialed{c, err}
	}()
	select {
	case d := <-results:
		return d.c, d.err
	case <-ctx.Done():
	}
	select {
	case d := <-results:
		return d.c, d.err
	case <-time.After(letGo):
		go closeLosers(results, 1)
		return nil, ctx.Err()
	}
}

// connectNow is connect, and gives everything back before it fails.
func connectNow(ctx context.Context, cfg Config, p Provider, local, dst netip.AddrPort) (*Conn, error) {
	loop, err := acquireLoop(p)
	if err != nil {
		return nil, err
	}
	id, err := loop.ch.NewID()
	if err != nil {
		return nil, errors.Join(err, p.releaseLoop())
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
	limit := time.NewTimer(eventTimeout)
	defer limit.Stop()
	for {
		select {
		case <-limit.C:
			return nil, fmt.Errorf("no event %v in %v: %w", want, eventTimeout, syscall.ETIMEDOUT)
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
