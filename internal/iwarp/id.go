package iwarp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// id is an rdma_cm_id over one TCP connection or listener.
type id struct {
	mu       sync.Mutex
	state    state
	local    netip.AddrPort
	remote   netip.AddrPort
	qp       *qp
	conn     *net.TCPConn    // set-up is under way or done
	request  wire.SetupFrame // what a passive id was asked
	cancel   context.CancelFunc
	listener *listener // of a listening id
	parent   *listener // of an id that came with a connect request
	afOnly   bool
	keep     net.KeepAliveConfig
	log      *slog.Logger
	wg       sync.WaitGroup // the dialing goroutine

	events struct { // innermost but for the channel's own lock
		sync.Mutex
		ch        *eventChannel
		destroyed bool
	}
}

type state uint8

const (
	stateIdle state = iota
	stateBound
	stateAddrResolved
	stateRouteResolved
	stateListening
	stateConnecting // active side: connect has begun
	stateRequested  // passive side: not yet accepted or rejected
	stateConnected  // until Destroy, whatever becomes of the connection
	stateFailed     // a connect failed, or a request was rejected
)

var stateNames = [...]string{"idle", "bound", "address resolved", "route resolved", "listening", "connecting",
	"connect requested", "connected", "failed"}

func (s state) String() string { return stateNames[s] }

func newID(ch *eventChannel) *id {
	i := &id{log: slog.New(slog.DiscardHandler), keep: net.KeepAliveConfig{Enable: true}}
	i.events.ch = ch
	return i
}

// post reports an event on the id's channel, unless the id is destroyed.
func (i *id) post(ev *verbs.Event) {
	i.events.Lock()
	defer i.events.Unlock()
	if !i.events.destroyed {
		ev.ID = i
		i.events.ch.push(ev)
	}
}

// in fails with EINVAL unless the id is in one of the states. i.mu is held.
func (i *id) in(op string, states ...state) error {
	for _, s := range states {
		if i.state == s {
			return nil
		}
	}
	return fmt.Errorf("%s: id is %v: %w", op, i.state, syscall.EINVAL)
}

func (i *id) Bind(a netip.AddrPort) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("bind", stateIdle); err != nil {
		return err
	}
	if !a.IsValid() {
		return fmt.Errorf("bind: invalid address: %w", syscall.EINVAL)
	}
	i.local, i.state = a, stateBound
	return nil
}

// ResolveAddr finds the local address that routes to dst, by connecting a
// datagram socket, which sends nothing.
func (i *id) ResolveAddr(src, dst netip.AddrPort, _ time.Duration) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("resolve address", stateIdle, stateBound); err != nil {
		return err
	}
	if !dst.IsValid() {
		return fmt.Errorf("resolve address: invalid destination: %w", syscall.EINVAL)
	}
	if i.state == stateBound {
		src = i.local
	}
	probe := net.Dialer{}
	if src.IsValid() {
		probe.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(src.Addr(), 0))
	}
	c, err := probe.Dial("udp", netip.AddrPortFrom(dst.Addr(), max(dst.Port(), 1)).String())
	if err != nil {
		i.post(&verbs.Event{Type: verbs.EventAddrError, Err: withErrno(err, syscall.EHOSTUNREACH)})
		return nil
	}
	if !src.IsValid() || src.Addr().IsUnspecified() {
		src = netip.AddrPortFrom(unmapped(c.LocalAddr().(*net.UDPAddr).AddrPort()).Addr(), src.Port())
	}
	c.Close()
	i.local, i.remote, i.state = src, dst, stateAddrResolved
	i.post(&verbs.Event{Type: verbs.EventAddrResolved})
	return nil
}

// ResolveRoute has nothing to find: TCP routes by address.
func (i *id) ResolveRoute(time.Duration) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("resolve route", stateAddrResolved); err != nil {
		return err
	}
	i.state = stateRouteResolved
	i.post(&verbs.Event{Type: verbs.EventRouteResolved})
	return nil
}

func (i *id) CreateQP(p verbs.PD, c verbs.CQ, want verbs.QPCap) (verbs.QP, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("create QP", stateAddrResolved, stateRouteResolved, stateRequested); err != nil {
		return nil, err
	}
	if i.qp != nil {
		return nil, fmt.Errorf("create QP: id has one: %w", syscall.EINVAL)
	}
	q, err := newQP(i, p.(*pd), c.(*cq), want)
	if err != nil {
		return nil, err
	}
	i.qp = q
	return q, nil
}

func (i *id) Connect(p verbs.ConnParam) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("connect", stateRouteResolved); err != nil {
		return err
	}
	if i.qp == nil {
		return fmt.Errorf("connect: id has no QP: %w", syscall.EINVAL)
	}
	ctx, cancel := context.WithCancel(context.Background())
	i.cancel, i.state = cancel, stateConnecting
	p.PrivateData = append([]byte(nil), p.PrivateData...)
	i.wg.Go(func() { i.dial(ctx, p) })
	return nil
}

// dial connects and reports how it went, unless ctx ends first.
func (i *id) dial(ctx context.Context, p verbs.ConnParam) {
	conn, reply, err := dialSetup(ctx, i.local, i.remote, p)
	i.mu.Lock()
	defer i.mu.Unlock()
	if ctx.Err() != nil {
		if conn != nil {
			conn.Close()
		}
		return
	}
	if err == nil {
		err = i.established(conn, reply.CRC || p.CRC)
	}
	if err != nil {
		i.state = stateFailed
		i.post(connectFailure(err))
		return
	}
	i.post(&verbs.Event{Type: verbs.EventEstablished, PrivateData: reply.PrivateData})
}

// established starts the QP on a connection whose set-up is done. i.mu is held.
func (i *id) established(conn *net.TCPConn, crc bool) error {
	conn.SetKeepAliveConfig(i.keep)
	if err := i.qp.start(conn, crc); err != nil {
		conn.Close()
		return err
	}
	i.conn, i.state = conn, stateConnected
	i.local = unmapped(conn.LocalAddr().(*net.TCPAddr).AddrPort())
	i.remote = unmapped(conn.RemoteAddr().(*net.TCPAddr).AddrPort())
	return nil
}

func (i *id) Accept(p verbs.ConnParam) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("accept", stateRequested); err != nil {
		return err
	}
	if i.qp == nil {
		return fmt.Errorf("accept: id has no QP: %w", syscall.EINVAL)
	}
	i.leaveBacklog()
	crc := i.request.CRC || p.CRC
	conn := i.conn
	if err := replySetup(conn, i.request, wire.SetupFrame{CRC: crc, PrivateData: p.PrivateData}); err != nil {
		i.state = stateFailed
		return fmt.Errorf("accept: %w", withErrno(err, syscall.ECONNRESET))
	}
	if err := i.established(conn, crc); err != nil {
		i.state = stateFailed
		return fmt.Errorf("accept: %w", withErrno(err, syscall.ECONNRESET))
	}
	i.post(&verbs.Event{Type: verbs.EventEstablished})
	return nil
}

func (i *id) Reject(privateData []byte) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("reject", stateRequested); err != nil {
		return err
	}
	i.leaveBacklog()
	i.state = stateFailed
	if err := replySetup(i.conn, i.request, wire.SetupFrame{Reject: true, PrivateData: privateData}); err != nil {
		return fmt.Errorf("reject: %w", withErrno(err, syscall.ECONNRESET))
	}
	i.conn.CloseWrite()
	return nil
}

func (i *id) leaveBacklog() {
	if i.parent != nil {
		i.parent.leave()
		i.parent = nil
	}
}

func (i *id) Disconnect() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("disconnect", stateConnected); err != nil {
		return err
	}
	i.qp.disconnect()
	return nil
}

func (i *id) Migrate(ch verbs.EventChannel) error {
	to, ok := ch.(*eventChannel)
	if !ok {
		return fmt.Errorf("migrate: event channel of another provider: %w", syscall.EINVAL)
	}
	i.events.Lock()
	defer i.events.Unlock()
	moved := i.events.ch.take(func(ev *verbs.Event) bool { return ev.ID == i || ev.Listener == i })
	i.events.ch = to
	for _, ev := range moved {
		to.push(ev)
	}
	return nil
}

// Destroy cancels whatever the id is doing and closes its connection or
// listener. Connect requests that nobody got are turned away.
func (i *id) Destroy() error {
	i.events.Lock()
	i.events.destroyed = true
	ch := i.events.ch
	i.events.Unlock()

	i.mu.Lock()
	if i.cancel != nil {
		i.cancel()
	}
	ln := i.listener
	i.leaveBacklog()
	i.mu.Unlock()
	if ln != nil {
		ln.close()
	}
	i.wg.Wait()
	for _, ev := range ch.take(func(ev *verbs.Event) bool { return ev.ID == i || ev.Listener == i }) {
		if child, ok := ev.ID.(*id); ok && child != i {
			child.Reject(nil)
			child.Destroy()
		}
	}

	i.mu.Lock()
	defer i.mu.Unlock()
	if i.qp != nil {
		i.qp.release()
	}
	if i.conn != nil {
		i.conn.Close()
	}
	return nil
}

func (i *id) LocalAddr() netip.AddrPort {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.local
}

func (i *id) RemoteAddr() netip.AddrPort {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.remote
}

func (i *id) Device() verbs.Device {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch i.state {
	case stateIdle, stateBound, stateListening:
		return nil
	}
	return device{}
}

// SetKeepAlive uses TCP's own keepalive: the peer's kernel answers it.
func (i *id) SetKeepAlive(k net.KeepAliveConfig) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.keep = k
	if i.conn == nil {
		return nil
	}
	return i.conn.SetKeepAliveConfig(k)
}

func (i *id) SetLogger(l *slog.Logger) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if l != nil {
		i.log = l
	}
}

// SetAFOnly keeps a listener on an IPv6 wildcard from taking IPv4.
func (i *id) SetAFOnly(on bool) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("set AF only", stateIdle, stateBound); err != nil {
		return err
	}
	i.afOnly = on
	return nil
}

// connectFailure says in librdmacm's terms why a connect failed, as rdma_cm's
// iWARP side does: REJECTED when somebody answered, UNREACHABLE when nobody did.
func connectFailure(err error) *verbs.Event {
	var rej *rejectedError
	if errors.As(err, &rej) {
		return &verbs.Event{Type: verbs.EventRejected, Err: withErrno(err, syscall.ECONNREFUSED), PrivateData: rej.privateData}
	}
	err = withErrno(err, syscall.EPROTO)
	ev := &verbs.Event{Type: verbs.EventConnectError, Err: err}
	switch errnoOf(err) {
	case syscall.ECONNREFUSED, syscall.ECONNRESET:
		ev.Type = verbs.EventRejected
	case syscall.ETIMEDOUT, syscall.EHOSTUNREACH, syscall.ENETUNREACH:
		ev.Type = verbs.EventUnreachable
	}
	return ev
}

// unmapped turns an IPv4 address in IPv6 form, as dual-stack sockets show it,
// into plain IPv4.
func unmapped(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}
