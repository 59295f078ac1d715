package iwarp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
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
	options  options
	keep     net.KeepAliveConfig
	log      atomic.Pointer[slog.Logger]
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
	i := &id{keep: net.KeepAliveConfig{Enable: true}}
	i.log.Store(slog.New(slog.DiscardHandler))
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
	i.local, i.state = unmapped(a), stateBound
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
	local, err := route(unmapped(src), unmapped(dst))
	if err != nil {
		i.post(&verbs.Event{Type: verbs.EventAddrError, Err: withErrno(err, syscall.EHOSTUNREACH)})
		return nil
	}
	i.local, i.remote, i.state = local, unmapped(dst), stateAddrResolved
	i.post(&verbs.Event{Type: verbs.EventAddrResolved})
	return nil
}

// route returns src with the address filled in that routes to dst.
func route(src, dst netip.AddrPort) (netip.AddrPort, error) {
	var probe net.Dialer
	fixed := src.IsValid() && !src.Addr().IsUnspecified()
	if fixed {
		probe.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(src.Addr(), 0))
	}
	c, err := probe.Dial("udp", netip.AddrPortFrom(dst.Addr(), max(dst.Port(), 1)).String())
	if err != nil {
		return src, err
	}
	defer c.Close()
	if fixed {
		return src, nil
	}
	local := unmapped(c.LocalAddr().(*net.UDPAddr).AddrPort())
	return netip.AddrPortFrom(local.Addr(), src.Port()), nil
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
	req, err := requestFrame(p)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	i.cancel, i.state = cancel, stateConnecting
	d := i.options.dialer(i.local)
	remote := i.remote
	i.wg.Go(func() { i.dial(ctx, d, remote, req, p) })
	return nil
}

// dial connects and reports how it went, unless ctx ends first.
func (i *id) dial(ctx context.Context, d *net.Dialer, remote netip.AddrPort, req wire.SetupFrame, p verbs.ConnParam) {
	conn, reply, err := dialSetup(ctx, d, remote, req)
	i.mu.Lock()
	defer i.mu.Unlock()
	if ctx.Err() != nil {
		if conn != nil {
			conn.Close()
		}
		return
	}
	if err == nil {
		err = i.accepted(conn, reply, p)
	}
	if err != nil {
		i.failed()
		i.post(connectFailure(err))
	}
}

// accepted goes on with a connection whose request has been accepted, or closes
// it. i.mu is held.
func (i *id) accepted(conn *net.TCPConn, reply wire.SetupFrame, p verbs.ConnParam) error {
	a, err := accepted(p, reply)
	if fault, ok := errors.AsType[*wire.ProtocolError](err); ok {
		t := wire.NewTerminate(fault.Code, nil, 0)
		conn.Write(terminateFPDU(&t, a.crc)) // best effort; nothing else was sent, so there is room
		conn.Close()
		return err
	}
	return i.established(conn, a, reply.PrivateData)
}

// established starts the QP on a connection whose set-up is done, and reports
// it. If it fails the connection is closed. i.mu is held.
func (i *id) established(conn *net.TCPConn, a agreed, privateData []byte) error {
	l, err := newTCPLink(conn)
	if err == nil {
		err = i.qp.start(l, a, &verbs.Event{Type: verbs.EventEstablished, PrivateData: privateData})
	}
	if err != nil {
		conn.Close()
		return err
	}
	watch(i.qp, l.raw)
	conn.SetKeepAliveConfig(i.keep)
	i.qp.keep.set(i.keep)
	i.conn, i.state = conn, stateConnected
	i.local = unmapped(conn.LocalAddr().(*net.TCPAddr).AddrPort())
	i.remote = unmapped(conn.RemoteAddr().(*net.TCPAddr).AddrPort())
	return nil
}

// failed ends an attempt to connect. i.mu is held.
func (i *id) failed() {
	i.state = stateFailed
	i.qp.abort()
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
	reply, agreed, err := accepting(i.request, p)
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	i.leaveBacklog()
	err = send(i.conn, reply)
	if err == nil {
		err = i.established(i.conn, agreed, nil)
	}
	if err != nil {
		i.failed()
		return fmt.Errorf("accept: %w", withErrno(err, syscall.ECONNRESET))
	}
	return nil
}

func (i *id) Reject(privateData []byte) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("reject", stateRequested); err != nil {
		return err
	}
	reply, err := replyTo(i.request, wire.SetupFrame{Reject: true, PrivateData: privateData})
	if err != nil {
		return fmt.Errorf("reject: %w", err)
	}
	i.leaveBacklog()
	i.state = stateFailed
	if err := send(i.conn, reply); err != nil {
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
	if i.events.ch == to {
		return nil
	}
	moved := i.events.ch.take(i.concerns)
	i.events.ch = to
	for _, ev := range moved {
		if child := ev.ID.(*id); child != i {
			child.Migrate(to) // nobody has it yet, so it has no events
		}
		to.push(ev)
	}
	return nil
}

// concerns reports whether an event is lost with the id.
func (i *id) concerns(ev *verbs.Event) bool { return ev.ID == i || ev.Listener == i }

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
	for _, ev := range ch.take(i.concerns) {
		if child := ev.ID.(*id); child != i {
			child.Reject(nil)
			child.Destroy()
		}
	}

	i.mu.Lock()
	defer i.mu.Unlock()
	if i.qp != nil && i.qp.release() {
		return nil
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

// Endpoint has nothing to say: there is no adapter.
func (i *id) Endpoint() (verbs.Endpoint, bool) { return verbs.Endpoint{}, false }

// SetKeepAlive uses TCP's own keepalive, which the peer's kernel answers, while
// nothing is on its way to the peer, and else what TCP knows of its
// acknowledgements. Idle and Interval are rounded up to seconds.
func (i *id) SetKeepAlive(k net.KeepAliveConfig) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.keep = k
	if i.conn == nil {
		return nil
	}
	if i.state == stateConnected {
		i.qp.keep.set(k)
	}
	return withErrno(i.conn.SetKeepAliveConfig(k), syscall.ENOTCONN)
}

func (i *id) SetLogger(l *slog.Logger) {
	if l != nil {
		i.log.Store(l)
	}
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
