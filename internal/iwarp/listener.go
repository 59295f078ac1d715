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

// maxHalfOpen is how many connections of one listener may be in their set-up.
// When one more comes, the oldest is closed: whoever floods a listener pushes
// out its own idlers, and an honest peer, who is done in a round trip, gets in.
const maxHalfOpen = 256

// listener accepts TCP connections, reads their set-up requests side by side
// and reports them as connect requests.
type listener struct {
	id      *id
	ln      *net.TCPListener
	log     *slog.Logger
	backlog int
	wg      sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	halfOpen []*net.TCPConn // oldest first
	waiting  int            // connect requests neither accepted nor rejected
}

func (i *id) Listen(backlog int) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in("listen", stateBound); err != nil {
		return err
	}
	network := "tcp"
	if i.afOnly && i.local.Addr().Is6() {
		network = "tcp6"
	}
	ln, err := (&net.ListenConfig{}).Listen(context.Background(), network, i.local.String())
	if err != nil {
		return fmt.Errorf("listen: %w", withErrno(err, syscall.EINVAL))
	}
	l := &listener{id: i, ln: ln.(*net.TCPListener), log: i.log, backlog: max(backlog, 1)}
	i.listener, i.state = l, stateListening
	port := ln.Addr().(*net.TCPAddr).AddrPort().Port()
	i.local = netip.AddrPortFrom(i.local.Addr(), port)
	l.wg.Go(l.accept)
	return nil
}

// accept runs until the listener is closed.
func (l *listener) accept() {
	for {
		conn, err := l.ln.AcceptTCP()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // out of descriptors or memory: let some go
			l.log.Warn("rdma: accept failed", "provider", Name, "addr", l.ln.Addr().String(), "err", err)
			time.Sleep(5 * time.Millisecond)
			continue
		}
		if !l.enter(conn) {
			conn.Close()
			return
		}
		l.wg.Go(func() { l.setup(conn) })
	}
}

// enter notes a connection as half open, at the cost of the oldest if need be.
func (l *listener) enter(conn *net.TCPConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	if len(l.halfOpen) == maxHalfOpen {
		l.halfOpen[0].Close()
		l.halfOpen = l.halfOpen[1:]
	}
	l.halfOpen = append(l.halfOpen, conn)
	return true
}

// setup reads one request and reports it.
func (l *listener) setup(conn *net.TCPConn) {
	conn.SetReadDeadline(time.Now().Add(setupTimeout))
	req, err := readSetup(conn, false)
	conn.SetReadDeadline(time.Time{})
	if err == nil && req.Markers {
		err = errMarkers
		replySetup(conn, req, wire.SetupFrame{Reject: true})
	}
	l.mu.Lock()
	for n, c := range l.halfOpen {
		if c == conn {
			l.halfOpen = append(l.halfOpen[:n:n], l.halfOpen[n+1:]...)
			break
		}
	}
	full := l.waiting >= l.backlog
	if err == nil && !full && !l.closed {
		l.waiting++
		l.request(conn, req)
		l.mu.Unlock()
		return
	}
	closed := l.closed
	l.mu.Unlock()
	if err == nil && full {
		err = fmt.Errorf("backlog of %d connect requests is full", l.backlog)
		replySetup(conn, req, wire.SetupFrame{Reject: true})
	}
	if !closed {
		l.log.Info("rdma: connection refused", "provider", Name, "peer", conn.RemoteAddr().String(), "err", err)
	}
	conn.Close()
}

// request reports a connect request with a new id. l.mu is held.
func (l *listener) request(conn *net.TCPConn, req wire.SetupFrame) {
	l.id.events.Lock()
	defer l.id.events.Unlock()
	child := newID(l.id.events.ch)
	child.state, child.conn, child.request, child.parent = stateRequested, conn, req, l
	child.local = unmapped(conn.LocalAddr().(*net.TCPAddr).AddrPort())
	child.remote = unmapped(conn.RemoteAddr().(*net.TCPAddr).AddrPort())
	child.log = l.log
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
	l.closed = true
	for _, c := range l.halfOpen {
		c.Close()
	}
	l.mu.Unlock()
	l.ln.Close()
	l.wg.Wait()
}
