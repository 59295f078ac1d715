//go:build cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// id is an rdma_cm_id.
type id struct {
	handle uint64 // the rdma_cm_id's context
	c      *C.struct_rdma_cm_id
	ch     atomic.Pointer[eventChannel] // written with mu and both channels' locks held

	mu        sync.Mutex // one call of the library at a time, but for connect
	listening bool       // written with mu and the channel's lock held
	destroyed bool

	// Guarded by the channel's lock.
	qp        *qp
	dialing   bool // Connect was called
	connected bool // from ESTABLISHED to DISCONNECTED
	keep      net.KeepAliveConfig
}

// ids finds an id by the context that an event names. An entry is gone before
// its rdma_cm_id, and its handle is never used again.
var ids struct {
	sync.Mutex
	next uint64
	m    map[uint64]*id
}

func newID(ch *eventChannel) *id {
	i := &id{keep: net.KeepAliveConfig{Enable: true}}
	i.ch.Store(ch)
	ids.Lock()
	defer ids.Unlock()
	if ids.m == nil {
		ids.m = make(map[uint64]*id)
	}
	ids.next++
	i.handle = ids.next
	ids.m[i.handle] = i
	return i
}

func lookup(handle uint64) *id {
	ids.Lock()
	defer ids.Unlock()
	return ids.m[handle]
}

func (i *id) unregister() {
	ids.Lock()
	defer ids.Unlock()
	delete(ids.m, i.handle)
}

// lockChannel locks the id's channel and returns it.
func (i *id) lockChannel() *eventChannel {
	for {
		ch := i.ch.Load()
		ch.mu.Lock()
		if i.ch.Load() == ch {
			return ch
		}
		ch.mu.Unlock()
	}
}

// advance follows what an event says about the id. The channel's lock is held.
func (i *id) advance(ev *verbs.Event) {
	switch ev.Type {
	case verbs.EventAddrResolved:
		// Seen when the device vanished meanwhile (rdma-core issue 1547).
		if i.c.verbs == nil {
			ev.Type, ev.Err = verbs.EventAddrError, eventError(verbs.EventAddrError, int(syscall.ENODEV))
		}
	case verbs.EventEstablished:
		i.connected = true
		if i.qp != nil {
			i.qp.keep.set(i.keep)
			if i.dialing {
				i.qp.dialed()
			}
		}
	case verbs.EventDisconnected:
		i.connected = false
		if i.qp == nil {
			break
		}
		if !i.qp.dev.iwarp {
			// On iWARP the kernel does this. Here nobody would end our side, and
			// until we have answered the peer isn't told that the connection is
			// over (15 attempts of 4 s each).
			i.qp.beginEnd()
			C.rn_disconnect(i.c)
		} else if i.qp.dev.quirk == quirkSIW {
			i.qp.beginEnd()
			_ = i.qp.finishEnd(true)
		}
	case verbs.EventDeviceRemoval:
		if i.c.verbs != nil {
			removed(i.c.verbs)
		}
	}
}

// call makes one call of the library.
func (i *id) call(name string, f func() C.int) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.destroyed {
		return opError(name, net.ErrClosed)
	}
	return opError(name, errnoOf(int(f())))
}

func (i *id) Bind(a netip.AddrPort) error {
	sa, err := toSockaddr(a)
	if err != nil {
		return opError("rdma_bind_addr", err)
	}
	return i.call("rdma_bind_addr", func() C.int { return C.rn_bind_addr(i.c, unsafe.Pointer(&sa)) })
}

func (i *id) Listen(backlog int) error {
	return i.call("rdma_listen", func() C.int {
		ret := C.rn_listen(i.c, C.int(max(backlog, 1)))
		if ret == 0 {
			ch := i.lockChannel()
			i.listening = true
			ch.mu.Unlock()
		}
		return ret
	})
}

func (i *id) ResolveAddr(src, dst netip.AddrPort, timeout time.Duration) error {
	const op = "rdma_resolve_addr"
	to, err := toSockaddr(dst)
	if err != nil {
		return opError(op, err)
	}
	var from sockaddr
	var fromPtr unsafe.Pointer
	if src.IsValid() {
		if from, err = toSockaddr(src); err != nil {
			return opError(op, err)
		}
		fromPtr = unsafe.Pointer(&from)
	}
	err = i.call(op, func() C.int {
		return C.rn_resolve_addr(i.c, fromPtr, unsafe.Pointer(&to), milliseconds(timeout))
	})
	if errors.Is(err, syscall.ENODEV) {
		return fmt.Errorf("the way to %v leads over no RDMA device: %w", dst.Addr(), err)
	}
	return err
}

func (i *id) ResolveRoute(timeout time.Duration) error {
	return i.call("rdma_resolve_route", func() C.int { return C.rn_resolve_route(i.c, milliseconds(timeout)) })
}

// milliseconds rounds up, and makes no timeout out of a negative one.
func milliseconds(d time.Duration) C.int {
	const most = 1 << 30
	ms := (d + time.Millisecond - 1) / time.Millisecond
	return C.int(min(max(ms, 1), most))
}

func (i *id) CreateQP(p verbs.PD, c verbs.CQ, want verbs.QPCap) (verbs.QP, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	q, err := newQP(i, p.(*pd), c.(*cq), want)
	if err != nil {
		return nil, opError("rdma_create_qp", err)
	}
	return q, nil
}

// Connect is rdma_connect(3). It doesn't hold the id's lock: siw connects a TCP
// socket in it, and waits. What fails at once is reported as what fails later.
func (i *id) Connect(p verbs.ConnParam) error {
	const op = "rdma_connect"
	data, n := privateData(p.PrivateData)
	ch := i.lockChannel()
	i.dialing = true
	depth := i.qp.depth(p)
	ch.mu.Unlock()
	ret := C.rn_connect(i.c, data, n, C.uint8_t(p.ResponderResources), depth,
		C.uint8_t(p.RetryCount), C.uint8_t(p.RNRRetryCount))
	err := opError(op, errnoOf(int(ret)))
	if t, later := connectFailure(err); later {
		ch := i.lockChannel()
		ch.push(&verbs.Event{Type: t, ID: i, Err: err})
		ch.mu.Unlock()
		return nil
	}
	return err
}

func (i *id) Accept(p verbs.ConnParam) error {
	data, n := privateData(p.PrivateData)
	return i.call("rdma_accept", func() C.int {
		ch := i.lockChannel()
		depth := i.qp.depth(p)
		ch.mu.Unlock()
		return C.rn_accept(i.c, data, n, C.uint8_t(p.ResponderResources), depth,
			C.uint8_t(p.RetryCount), C.uint8_t(p.RNRRetryCount))
	})
}

func (i *id) Reject(b []byte) error {
	data, n := privateData(b)
	return i.call("rdma_reject", func() C.int { return C.rn_reject(i.c, data, n) })
}

func privateData(b []byte) (unsafe.Pointer, C.uint8_t) {
	if len(b) == 0 {
		return nil, 0
	}
	return unsafe.Pointer(&b[0]), C.uint8_t(len(b))
}

// Disconnect is rdma_disconnect(3). A connection that the peer has ended is no
// error: the queue pair is then in the error state, too. On siw it blocks until the
// peer has acknowledged what was sent, for a second at most.
func (i *id) Disconnect() error {
	i.awaitAcks()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.destroyed {
		return opError("rdma_disconnect", net.ErrClosed)
	}
	ch := i.lockChannel()
	q := i.qp
	ch.mu.Unlock()
	if q != nil {
		q.beginEnd()
	}
	err := errnoOf(int(C.rn_disconnect(i.c)))
	if q != nil {
		err = errors.Join(ignoreNotConnected(err), q.finishEnd(err != nil))
	}
	return opError("rdma_disconnect", err)
}

// ignoreNotConnected drops what rdma_disconnect says when there is no connection
// any more.
func ignoreNotConnected(err error) error {
	switch err {
	case syscall.EINVAL, syscall.ENOTCONN, syscall.ENODEV, syscall.ENXIO, syscall.EIO:
		return nil
	}
	return err
}

// Destroy is rdma_destroy_id(3). The kernel refuses connect requests that nobody
// got.
func (i *id) Destroy() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.destroyed {
		return opError("rdma_destroy_id", net.ErrClosed)
	}
	i.unregister()
	ch := i.lockChannel()
	orphans := ch.take(i)
	ch.mu.Unlock()
	for _, ev := range orphans {
		if child, ok := ev.ID.(*id); ok && child != i {
			child.Reject(nil)
			child.Destroy()
		}
	}
	if err := errnoOf(int(C.rn_destroy_id(i.c))); err != nil {
		return opError("rdma_destroy_id", err)
	}
	i.destroyed = true
	return nil
}

func (i *id) LocalAddr() netip.AddrPort {
	return i.addr(func(a *C.struct_rdma_addr) unsafe.Pointer { return unsafe.Pointer(&a.src_storage) })
}

func (i *id) RemoteAddr() netip.AddrPort {
	return i.addr(func(a *C.struct_rdma_addr) unsafe.Pointer { return unsafe.Pointer(&a.dst_storage) })
}

// addr reads an address, which librdmacm changes in calls and while getting
// events.
func (i *id) addr(which func(*C.struct_rdma_addr) unsafe.Pointer) netip.AddrPort {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.destroyed {
		return netip.AddrPort{}
	}
	ch := i.lockChannel()
	local := *(*sockaddr)(unsafe.Pointer(&i.c.route.addr.src_storage))
	sa := *(*sockaddr)(which(&i.c.route.addr))
	ch.mu.Unlock()
	a := sa.addrPort()
	if a.Addr().IsLinkLocalUnicast() && a.Addr().Zone() == "" { // as on the passive side
		return netip.AddrPortFrom(a.Addr().WithZone(zoneOf(local.addrPort().Addr())), a.Port())
	}
	return a
}

func (i *id) Device() verbs.Device {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.destroyed {
		return nil
	}
	ch := i.lockChannel()
	ctx := i.c.verbs
	ch.mu.Unlock()
	if ctx == nil {
		return nil
	}
	return deviceOf(ctx)
}

// SetKeepAlive sets when a quiet peer is probed and given up, if that isn't earlier,
// when the transport's own retries are over. It fails on a connection of siw's
// where nobody tells what its TCP knows, and on one of another iWARP device whose
// peer answers no RDMA READs.
func (i *id) SetKeepAlive(k net.KeepAliveConfig) error {
	ch := i.lockChannel()
	i.keep = k
	q := i.qp
	if q == nil || !i.connected {
		ch.mu.Unlock()
		return nil
	}
	q.keep.set(k)
	able := q.canProbe()
	ch.mu.Unlock()
	switch {
	case !k.Enable:
		return nil
	case !able:
		return fmt.Errorf("keepalive with an iWARP peer that answers no RDMA READs: %w (%w)", errors.ErrUnsupported, syscall.EOPNOTSUPP)
	case q.keep.proof == byTCP:
		if _, err := tcpInfo(i.LocalAddr(), i.RemoteAddr()); err != nil {
			return fmt.Errorf("keepalive on siw needs the kernel module tcp_diag: %w (%w)", errors.ErrUnsupported, err)
		}
	}
	return nil
}

// SetLogger does nothing: the kernel turns peers away and tells nobody.
func (i *id) SetLogger(*slog.Logger) {}
