package iwarp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/fair"
	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// maxHalfOpen is how many connections of one listener may be in their set-up.
// When one more comes, the oldest of the host that has the most is closed: whoever
// floods a listener pushes out its own idlers, and an honest peer gets in, who is
// done in a round trip.
const maxHalfOpen = 256

// maxBacklog is what a backlog of 0 means, as in the kernel's rdma_cm.
const maxBacklog = 1024

// listener accepts TCP connections, reads their set-up requests side by side
// and reports them as connect requests.
type listener struct {
	id      *id
	ln      *net.TCPListener
	backlog int
	done    chan struct{} // closed with closed
	wg      sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	halfOpen []pending // oldest first
	waiting  int       // connect requests neither accepted nor rejected
}

// pending is a connection in its set-up.
type pending struct {
	conn *net.TCPConn
	host netip.Prefix
}

func (i *id) Listen(backlog int) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("listen", stateBound); err != nil {
		return err
	}
	if backlog <= 0 {
		backlog = maxBacklog
	}
	lc := net.ListenConfig{Control: i.options.control}
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(context.Background(), i.network(), i.local.String())
	if err != nil {
		return fmt.Errorf("listen: %w", withErrno(err, syscall.EINVAL))
	}
	l := &listener{id: i, ln: ln.(*net.TCPListener), backlog: backlog, done: make(chan struct{})}
	i.listener, i.state = l, stateListening
	port := ln.Addr().(*net.TCPAddr).AddrPort().Port()
	i.local = netip.AddrPortFrom(i.local.Addr(), port)
	l.wg.Go(l.accept)
	return nil
}

// network is the one to listen on. Package net would take IPv6 on the IPv4
// wildcard, too.
func (i *id) network() string {
	switch {
	case i.local.Addr().Is4():
		return "tcp4"
	case i.options.afOnly:
		return "tcp6"
	}
	return "tcp"
}

// accept runs until the listener is closed.
func (l *listener) accept() {
	const minPause, maxPause = 5 * time.Millisecond, time.Second
	pause := minPause
	for {
		conn, err := l.ln.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors or memory
			l.id.log.Load().Warn("rdma: accept failed", "provider", Name, "addr", l.ln.Addr().String(), "err", err)
			l.shrink()
			select {
			case <-time.After(pause):
			case <-l.done:
				return
			}
			pause = min(2*pause, maxPause)
			continue
		}
		pause = minPause
		if !l.enter(conn) {
			conn.Close()
			return
		}
		l.wg.Go(func() { l.setup(conn) })
	}
}

// enter notes a connection as half open, at the cost of another if need be.
func (l *listener) enter(conn *net.TCPConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	if len(l.halfOpen) == maxHalfOpen {
		l.drop()
	}
	l.halfOpen = append(l.halfOpen, pending{conn, fair.Host(conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr())})
	return true
}

// shrink closes a half-open connection, if there is one.
func (l *listener) shrink() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.halfOpen) > 0 {
		l.drop()
	}
}

// drop closes the oldest half-open connection of the host that has the most.
// l.mu is held.
func (l *listener) drop() {
	count := make(fair.Count)
	for _, h := range l.halfOpen {
		count[h.host]++
	}
	host, _ := count.Most()
	n := slices.IndexFunc(l.halfOpen, func(h pending) bool { return h.host == host })
	l.halfOpen[n].conn.Close() // its setup ends
	l.halfOpen = slices.Delete(l.halfOpen, n, n+1)
}

// setup reads one request and reports it, or turns the peer away.
func (l *listener) setup(conn *net.TCPConn) {
	conn.SetReadDeadline(time.Now().Add(setupTimeout))
	req, err := readSetup(conn, false)
	conn.SetReadDeadline(time.Time{})
	if !l.exit(conn) {
		err = errFlooded
	}
	if err == nil {
		err = l.admit(conn, req)
		if err == nil {
			return
		}
		if reject, err := replyTo(req, wire.SetupFrame{Reject: true}); err == nil {
			send(conn, reject)
		}
	}
	conn.Close()
	if !l.isClosed() {
		l.id.log.Load().Info("rdma: connection refused", "provider", Name, "peer", conn.RemoteAddr().String(), "err", err)
	}
}

// exit notes that a connection is no longer half open, unless it was dropped.
func (l *listener) exit(conn *net.TCPConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := slices.IndexFunc(l.halfOpen, func(h pending) bool { return h.conn == conn })
	if n < 0 {
		return false
	}
	l.halfOpen = slices.Delete(l.halfOpen, n, n+1)
	return true
}

// admit reports a connect request, if it can be met and there is room for it.
func (l *listener) admit(conn *net.TCPConn, req wire.SetupFrame) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return net.ErrClosed
	case req.Markers:
		return errMarkers
	case l.waiting >= l.backlog:
		return fmt.Errorf("backlog of %d connect requests is full", l.backlog)
	}
	l.waiting++
	l.request(conn, req)
	return nil
}

func (l *listener) isClosed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

var errFlooded = fmt.Errorf("pushed out by %d newer connections that are in their set-up", maxHalfOpen)

// request reports a connect request with a new id. l.mu is held.
func (l *listener) request(conn *net.TCPConn, req wire.SetupFrame) {
	l.id.events.Lock()
	defer l.id.events.Unlock()
	child := newID(l.id.events.ch)
	child.state, child.conn, child.request, child.parent = stateRequested, conn, req, l
	child.local = unmapped(conn.LocalAddr().(*net.TCPAddr).AddrPort())
	child.remote = unmapped(conn.RemoteAddr().(*net.TCPAddr).AddrPort())
	child.log.Store(l.id.log.Load())
	l.id.events.ch.push(&verbs.Event{
		Type: verbs.EventConnectRequest, ID: child, Listener: l.id, PrivateData: req.PrivateData,
	})
}

// leave takes a connect request out of the backlog.
func (l *listener) leave() {
	l.mu.Lock()
	l.waiting--
	l.mu.Unlock()
}

// close ends accept and all set-ups, and waits for them.
func (l *listener) close() {
	l.mu.Lock()
	again := l.closed
	l.closed = true
	for _, h := range l.halfOpen {
		h.conn.Close()
	}
	l.halfOpen = nil
	l.mu.Unlock()
	if !again {
		close(l.done)
		l.ln.Close()
	}
	l.wg.Wait()
}
