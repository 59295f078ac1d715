package cm

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/qp"
)

// ID is an rdma_cm_id: what a socket is to TCP. Its asynchronous calls return
// once the operation has begun, and an event tells its result.
type ID struct {
	v       verbs.ID
	ch      atomic.Pointer[EventChannel] // written with mu and both channels' mu held
	state   atomic.Int32
	context atomic.Pointer[any]

	mu            sync.Mutex // one call of the provider at a time; guards what follows
	qp            *qp.QP
	disconnected  bool           // Disconnect was called
	gone          bool           // the provider's id is destroyed
	local, remote netip.AddrPort // what they were then

	queue []*Event // not yet got, oldest first; guarded by the channel's mu
}

// Channel returns the channel that reports the id's events.
func (id *ID) Channel() *EventChannel { return id.ch.Load() }

// Context returns what SetContext stored, or nil.
func (id *ID) Context() any {
	if c := id.context.Load(); c != nil {
		return *c
	}
	return nil
}

// SetContext stores a value of the user's, as rdma_create_id(3) does.
func (id *ID) SetContext(c any) { id.context.Store(&c) }

// String describes the id by its addresses and its state. It waits for a call in
// progress.
func (id *ID) String() string {
	return fmt.Sprintf("id %v->%v %v", id.LocalAddr(), id.RemoteAddr(), state(id.state.Load()))
}

// oldest returns the id's oldest event that waits. The caller holds the
// channel's mu.
func (id *ID) oldest() *Event {
	if len(id.queue) == 0 {
		return nil
	}
	return id.queue[0]
}

// call does f in one of the states from, with mu held. The id is in state to
// while f runs, and afterwards unless f fails.
func (id *ID) call(op, fix string, from []state, to state, f func() error) error {
	id.mu.Lock()
	defer id.mu.Unlock()
	was := state(id.state.Load())
	if was == stateDestroyed {
		return opError(op, errDestroyed)
	}
	if to == stateSame {
		to = was
	} else if slices.Contains(from, was) && !id.move(was, to) {
		was = state(id.state.Load()) // an event came between
	}
	if !slices.Contains(from, was) {
		return opError(op, &StateError{Call: op, State: was.String(), Fix: fix})
	}
	if err := f(); err != nil {
		id.move(to, was)
		return opError(op, err)
	}
	return nil
}

// stateSame is for calls that don't move the state.
const stateSame state = -1

// set does f in any state but destroyed.
func (id *ID) set(op string, f func() error) error {
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.is(stateDestroyed) {
		return opError(op, errDestroyed)
	}
	return opError(op, f())
}

// Bind gives the id a local address, rdma_bind_addr(3). Port 0 lets the
// provider choose, at the latest when the id listens.
func (id *ID) Bind(addr netip.AddrPort) error {
	return id.call("bind", "only a new id can be bound", []state{stateIdle}, stateBound,
		func() error { return id.v.Bind(addr) })
}

// Listen starts reporting connect requests as EventConnectRequest,
// rdma_listen(3). At most backlog requests wait to be accepted or rejected; more
// are turned away.
func (id *ID) Listen(backlog int) error {
	return id.call("listen", "call Bind first", []state{stateBound}, stateListening, func() error {
		if backlog < 0 {
			return &LimitError{What: "backlog", Value: int64(backlog), Limit: 0, Fix: "give at least 0", Errno: syscall.EINVAL}
		}
		return id.v.Listen(backlog)
	})
}

// ResolveAddr finds the device that reaches dst, from src if that is valid,
// rdma_resolve_addr(3). EventAddrResolved or EventAddrError follows within
// timeout.
func (id *ID) ResolveAddr(src, dst netip.AddrPort, timeout time.Duration) error {
	return id.call("resolve address", "resolve once, on a new or bound id",
		[]state{stateIdle, stateBound}, stateResolvingAddr,
		func() error { return id.v.ResolveAddr(src, dst, timeout) })
}

// ResolveRoute finds the route to the resolved address, rdma_resolve_route(3).
// EventRouteResolved or EventRouteError follows within timeout.
func (id *ID) ResolveRoute(timeout time.Duration) error {
	return id.call("resolve route", "wait for EventAddrResolved first", []state{stateAddrResolved}, stateResolvingRoute,
		func() error { return id.v.ResolveRoute(timeout) })
}

// Device returns the device that the id is bound to. There is one after
// EventAddrResolved, and for an id that came with EventConnectRequest.
func (id *ID) Device() (qp.Device, bool) {
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.is(stateDestroyed) {
		return qp.Device{}, false
	}
	v := id.v.Device()
	if v == nil {
		return qp.Device{}, false
	}
	return qp.NewDevice(v), true
}

// Endpoint says over which device, port and GID the id communicates: from when
// Device has a device until Destroy. It reports false otherwise, and always for a
// provider in software, which has none.
func (id *ID) Endpoint() (Endpoint, bool) {
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.is(stateDestroyed) {
		return Endpoint{}, false
	}
	return id.v.Endpoint()
}

// CreateQP makes the id's queue pair, rdma_create_qp(3), of the id's device,
// before Connect or Accept. Receives may be posted to it at once. The id does
// not own it: Close it before Destroy.
func (id *ID) CreateQP(pd *qp.PD, cq *qp.CQ, want qp.Cap) (*qp.QP, error) {
	const op, fix = "create qp", "create it once, after EventAddrResolved or EventConnectRequest and before Connect or Accept"
	err := id.call(op, fix, []state{stateBound, stateAddrResolved, stateResolvingRoute, stateRouteResolved, stateRequested},
		stateSame, func() error {
			switch gone := id.v.Device() == nil; {
			case id.attached() != nil || gone && id.is(stateBound):
				return &StateError{Call: op, State: id.describe(), Fix: fix}
			case gone: // since the address was resolved or the request came
				return syscall.ENODEV
			}
			q, err := qp.NewQP(id.v, &id.mu, pd, cq, want)
			if err == nil {
				id.qp = q
			}
			return err
		})
	if err != nil {
		return nil, err
	}
	return id.QP(), nil
}

// QP returns the id's queue pair, or nil while it has none.
func (id *ID) QP() *qp.QP {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.attached()
}

// attached returns the QP unless it has been closed. The caller holds mu.
func (id *ID) attached() *qp.QP {
	if id.qp != nil && id.qp.Closed() {
		id.qp = nil
	}
	return id.qp
}

// describe returns the state and whether there is a QP, for an error. The caller
// holds mu.
func (id *ID) describe() string {
	s := state(id.state.Load()).String()
	switch {
	case id.attached() != nil:
		return s + " with a QP"
	case id.v.Device() == nil:
		return s + " without a device"
	}
	return s + " without a QP"
}

// Connect asks the peer for a connection, rdma_connect(3). It needs a QP.
// EventEstablished follows, or EventRejected, EventUnreachable or
// EventConnectError.
func (id *ID) Connect(p ConnParam) error {
	const op, fix = "connect", "wait for EventRouteResolved and call CreateQP first"
	return id.call(op, fix, []state{stateRouteResolved}, stateConnecting, func() error {
		if err := id.ready(op, fix, p); err != nil {
			return err
		}
		return id.v.Connect(p)
	})
}

// Accept takes the connection that a peer asked for, rdma_accept(3). It needs a
// QP. EventEstablished follows, or EventConnectError.
func (id *ID) Accept(p ConnParam) error {
	const op, fix = "accept", "accept an id that came with EventConnectRequest once, after CreateQP"
	return id.call(op, fix, []state{stateRequested}, stateAccepting, func() error {
		if err := id.ready(op, fix, p); err != nil {
			return err
		}
		return id.v.Accept(p)
	})
}

// ready checks what Connect and Accept need. The caller holds mu.
func (id *ID) ready(op, fix string, p ConnParam) error {
	if id.attached() == nil {
		return &StateError{Call: op, State: id.describe(), Fix: fix}
	}
	if err := checkPrivateData(p.PrivateData); err != nil {
		return err
	}
	for _, c := range []struct {
		what         string
		value, limit uint8
		fix          string
	}{
		{"transport retry count", p.RetryCount, 7, "3 bits carry it"},
		{"receiver-not-ready retry count", p.RNRRetryCount, 7, "3 bits carry it, and 7 is for ever"},
		{"MPA revision", p.MPARevision, 2, "use 1, 2, or 0 for the default"},
	} {
		if c.value > c.limit {
			return &LimitError{What: c.what, Value: int64(c.value), Limit: int64(c.limit), Fix: c.fix, Errno: syscall.EINVAL}
		}
	}
	return nil
}

func checkPrivateData(b []byte) error {
	if len(b) > MaxPrivateData {
		return &LimitError{What: "bytes of private data", Value: int64(len(b)), Limit: MaxPrivateData,
			Fix: "send the rest over the connection", Errno: syscall.EINVAL}
	}
	return nil
}

// Reject turns down the connection that a peer asked for, rdma_reject(3), which
// the peer sees as EventRejected with the private data. The id is still to be
// destroyed.
func (id *ID) Reject(privateData []byte) error {
	return id.call("reject", "reject an id that came with EventConnectRequest, instead of accepting it",
		[]state{stateRequested}, stateRejected, func() error {
			if err := checkPrivateData(privateData); err != nil {
				return err
			}
			return id.v.Reject(privateData)
		})
}

// Disconnect ends the connection and moves the QP to the error state,
// rdma_disconnect(3): each posted work request completes, with
// StatusWRFlushErr if it had not yet. Both sides get EventDisconnected, once.
// Both should call Disconnect; to call it again does nothing.
func (id *ID) Disconnect() error {
	return id.call("disconnect", "there is no connection; Destroy ends what is pending",
		[]state{stateAccepting, stateConnected, stateDisconnected}, stateSame, func() error {
			if id.disconnected {
				return nil
			}
			if err := id.v.Disconnect(); err != nil {
				return err
			}
			id.disconnected = true
			if q := id.attached(); q != nil {
				q.Drain()
			}
			return nil
		})
}

// GetEvent returns the oldest event that was reported for this id; connect
// requests are reported for the listener. Ack it. It blocks until there is one,
// ctx ends, or Destroy (net.ErrClosed). It may be mixed with the channel's
// GetEvent: each event goes to one of the callers.
func (id *ID) GetEvent(ctx context.Context) (*Event, error) {
	for {
		ev, err := id.Channel().get(ctx, id)
		if err != errMoved {
			return ev, opError("get event", err)
		}
	}
}

// Wait returns the id's next event if it is the one that is wanted. Ack it. Any
// other is acked, and is an *EventError that says what happened instead; only
// EventAddrChange and EventTimewaitExit are passed over. It blocks and ends as
// GetEvent does.
func (id *ID) Wait(ctx context.Context, want EventType) (*Event, error) {
	for {
		ev, err := id.GetEvent(ctx)
		if err != nil || ev.Type == want {
			return ev, err
		}
		ev.Ack()
		switch ev.Type {
		case EventAddrChange, EventTimewaitExit:
			continue
		case EventConnectRequest: // nobody will ever know of it
			_ = ev.ID.Reject(nil)
			_ = ev.ID.Destroy()
		}
		return nil, opError("wait for "+want.String(), ev.failure())
	}
}

// Migrate moves the id, and its events that were not yet got, to another channel
// of the same provider, rdma_migrate_id(3). With events that were got and not
// acked it returns a *BusyError.
func (id *ID) Migrate(to *EventChannel) error {
	return id.set("migrate", func() error {
		from := id.Channel()
		if from == to {
			return nil
		}
		if from.provider != to.provider {
			return fmt.Errorf("from a channel of %s to one of %s: %w", from.provider, to.provider, syscall.EINVAL)
		}
		first, second := from, to
		if first.serial > second.serial {
			first, second = second, first
		}
		first.mu.Lock()
		defer first.mu.Unlock()
		second.mu.Lock()
		defer second.mu.Unlock()
		if to.closed {
			return errChannelClosed
		}
		if events := from.unackedOf(id); len(events) > 0 {
			return &BusyError{Object: "id", Events: events}
		}
		return id.migrate(from, to)
	})
}

// migrate moves an id whose channels' locks the caller holds.
func (id *ID) migrate(from, to *EventChannel) error {
	if err := id.v.Migrate(to.v); err != nil {
		return err
	}
	delete(from.ids, id.v)
	to.ids[id.v] = id
	id.ch.Store(to)
	from.wakeWaiters(id)
	queue := slices.Clone(id.queue)
	for _, ev := range queue {
		from.dequeue(ev)
	}
	for _, ev := range queue {
		to.enqueue(ev)
		if ev.Type == EventConnectRequest {
			// Who gets the request from the one channel must not find the new
			// id on the other. An id that can't move works where it is.
			_ = ev.ID.migrate(from, to)
		}
	}
	return nil
}

// Destroy ends whatever the id is doing and frees it, rdma_destroy_id(3): a
// resolve or connect in progress is cancelled, a listener closed and its
// requests that nobody has got are rejected. Whoever waits in GetEvent gets
// net.ErrClosed at once.
//
// With a QP that is not closed, or events that were got and not acked, it
// returns a *BusyError at once.
func (id *ID) Destroy() error {
	const op = "destroy id"
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.gone {
		return opError(op, errDestroyed)
	}
	orphans, err := id.retire()
	if err != nil {
		return opError(op, err)
	}
	for _, child := range orphans {
		turnAway(child.v)
	}
	id.local, id.remote = id.v.LocalAddr(), id.v.RemoteAddr()
	if err := id.v.Destroy(); err != nil {
		return opError(op, err) // Destroy may be tried again
	}
	id.gone = true
	ch := id.Channel()
	ch.mu.Lock()
	delete(ch.ids, id.v)
	ch.mu.Unlock()
	return nil
}

// retire makes the id destroyed to everybody else, and returns the ids of
// connect requests that nobody will get. The caller holds mu.
func (id *ID) retire() (orphans []*ID, err error) {
	ch := id.Channel()
	ch.mu.Lock()
	defer ch.mu.Unlock()
	busy := &BusyError{Object: "id", Events: ch.unackedOf(id), QP: id.attached()}
	if len(busy.Events) > 0 || busy.QP != nil {
		return nil, busy
	}
	id.state.Store(int32(stateDestroyed))
	ch.wakeWaiters(id)
	for len(id.queue) > 0 {
		ev := id.queue[0]
		ch.dequeue(ev)
		if ev.Type == EventConnectRequest {
			child := ev.ID
			child.state.Store(int32(stateDestroyed))
			for len(child.queue) > 0 {
				ch.dequeue(child.queue[0])
			}
			delete(ch.ids, child.v)
			orphans = append(orphans, child)
		}
	}
	return orphans, nil
}

// LocalAddr returns the local address, rdma_get_local_addr(3). After Destroy it
// is what it was then.
func (id *ID) LocalAddr() netip.AddrPort {
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.gone {
		return id.local
	}
	return id.v.LocalAddr()
}

// RemoteAddr returns the peer's address, rdma_get_peer_addr(3). After Destroy it
// is what it was then.
func (id *ID) RemoteAddr() netip.AddrPort {
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.gone {
		return id.remote
	}
	return id.v.RemoteAddr()
}

// SetKeepAlive sets how an idle peer is proved alive. A peer that is not ends
// the connection. Before Connect or Accept it is for the connection to come.
func (id *ID) SetKeepAlive(k net.KeepAliveConfig) error {
	return id.set("set keepalive", func() error { return id.v.SetKeepAlive(k) })
}

// SetLogger names where a listening id reports peers that it turned away before
// they became connect requests. Nil means nowhere.
func (id *ID) SetLogger(l *slog.Logger) error {
	if l == nil {
		l = slog.New(slog.DiscardHandler)
	}
	return id.set("set logger", func() error {
		id.v.SetLogger(l)
		return nil
	})
}
