package cm

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// EventChannel reports the events of its ids: an rdma_event_channel. One channel
// can serve many ids; where they are very many, spread them over several.
//
// Of the goroutines that wait for events one leads: it waits for the descriptor
// (in the runtime's netpoller, with no OS thread), takes events from the
// provider and queues them for whom they concern. When it leaves, it wakes
// another to lead. Nothing runs while nobody waits.
type EventChannel struct {
	provider string
	v        verbs.EventChannel
	file     *os.File
	raw      syscall.RawConn
	serial   uint64 // age, for the lock order

	mu      sync.Mutex
	closed  bool
	leading bool
	left    sync.Cond // leading became false
	ids     map[verbs.ID]*ID
	queue   eventQueue          // of all ids, in the order of arrival
	unacked map[*Event]struct{} // got and not acked
	waiters map[*ID][]*waiter   // followers, by whose events they want; nil is anybody's
}

// waiter is a goroutine that waits while another leads.
type waiter struct{ wake chan struct{} } // of capacity 1

var channelSerial atomic.Uint64

// NewEventChannel opens a channel of the provider of that name,
// rdma_create_event_channel(3). Close it.
func NewEventChannel(provider string) (*EventChannel, error) {
	p, err := verbs.Open(provider)
	if err != nil {
		return nil, opError("create event channel", err)
	}
	return NewEventChannelOn(p)
}

// NewEventChannelOn opens a channel of a provider that is not registered. It is
// for tests.
func NewEventChannelOn(p verbs.Provider) (*EventChannel, error) {
	const op = "create event channel"
	v, err := p.NewEventChannel()
	if err != nil {
		return nil, opError(op, err)
	}
	ch := &EventChannel{
		provider: p.Name(),
		v:        v,
		file:     v.File(),
		serial:   channelSerial.Add(1),
		ids:      make(map[verbs.ID]*ID),
		unacked:  make(map[*Event]struct{}),
		waiters:  make(map[*ID][]*waiter),
	}
	ch.left.L = &ch.mu
	ch.raw, err = ch.file.SyscallConn()
	if err == nil {
		err = ch.file.SetReadDeadline(time.Time{}) // fails unless in the netpoller
	}
	if err != nil {
		return nil, opError(op, errors.Join(err, v.Close()))
	}
	return ch, nil
}

// Provider returns the name of the channel's provider.
func (ch *EventChannel) Provider() string { return ch.provider }

// SyscallConn gives access to the channel's descriptor, which is readable while
// an event waits to be got; call its Control to poll or select. Its Read
// competes with GetEvent. A goroutine in GetEvent, of the channel or one of its
// ids, takes events as they come, so poll only while none is.
func (ch *EventChannel) SyscallConn() (syscall.RawConn, error) {
	raw, err := ch.file.SyscallConn()
	return raw, opError("syscall conn", err)
}

// NewID makes an id whose events come to this channel, rdma_create_id(3).
// Destroy it.
func (ch *EventChannel) NewID() (*ID, error) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if ch.closed {
		return nil, opError("create id", errChannelClosed)
	}
	v, err := ch.v.NewID()
	if err != nil {
		return nil, opError("create id", err)
	}
	return ch.add(v, stateIdle), nil
}

// add makes an id. The caller holds ch.mu.
func (ch *EventChannel) add(v verbs.ID, s state) *ID {
	id := &ID{v: v}
	id.ch.Store(ch)
	id.state.Store(int32(s))
	ch.ids[v] = id
	return id
}

// GetEvent returns the oldest event of any of the channel's ids,
// rdma_get_cm_event(3). Ack it. It blocks until there is one, ctx ends, or Close
// (net.ErrClosed).
func (ch *EventChannel) GetEvent(ctx context.Context) (*Event, error) {
	ev, err := ch.get(ctx, nil)
	return ev, opError("get event", err)
}

// errMoved says that the id has migrated to another channel meanwhile.
var errMoved = errors.New("id has migrated")

// get waits for an event of id, or of any id if it is nil.
func (ch *EventChannel) get(ctx context.Context, id *ID) (*Event, error) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	defer ch.passLead()
	for ch.leading {
		if ev, err := ch.take(ctx, id); ev != nil || err != nil {
			return ev, err
		}
		ch.follow(ctx, id)
	}
	return ch.lead(ctx, id)
}

// take returns what get should return, or nothing if it should wait. The caller
// holds ch.mu.
func (ch *EventChannel) take(ctx context.Context, id *ID) (*Event, error) {
	switch {
	case id != nil && id.ch.Load() != ch:
		return nil, errMoved
	case id != nil && id.is(stateDestroyed):
		return nil, errDestroyed
	case ch.closed:
		return nil, errChannelClosed
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	ev := ch.queue.head
	if id != nil {
		ev = id.oldest()
	}
	if ev != nil {
		ch.dequeue(ev)
		ev.ch = ch
		ch.unacked[ev] = struct{}{}
	}
	return ev, nil
}

// lead drives the channel until take returns something. The caller holds ch.mu,
// and leads no more when this returns.
func (ch *EventChannel) lead(ctx context.Context, id *ID) (*Event, error) {
	ch.leading = true
	defer func() {
		ch.leading = false
		ch.left.Broadcast()
	}()
	stop := context.AfterFunc(ctx, ch.interrupt)
	defer stop()
	for {
		// First: whatever interrupts after this ends waitReadable, and whatever
		// interrupted before it is seen by take.
		_ = ch.file.SetReadDeadline(time.Time{})
		if ev, err := ch.take(ctx, id); ev != nil || err != nil {
			return ev, err
		}
		err := ch.fetch()
		if errors.Is(err, syscall.EAGAIN) {
			ch.mu.Unlock()
			err = ch.waitReadable()
			ch.mu.Lock()
		}
		if err != nil {
			return nil, err
		}
	}
}

// interrupt makes the leader look at its conditions again.
func (ch *EventChannel) interrupt() { _ = ch.file.SetReadDeadline(time.Unix(1, 0)) }

// waitReadable returns when the descriptor is readable, or after interrupt.
func (ch *EventChannel) waitReadable() error {
	err := ch.raw.Read(func(fd uintptr) bool {
		// The netpoller reports edges, and forgets those before Read.
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n > 0 || err != nil && err != unix.EINTR
	})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// follow waits until something may have changed. The caller holds ch.mu.
func (ch *EventChannel) follow(ctx context.Context, id *ID) {
	w := &waiter{wake: make(chan struct{}, 1)}
	ch.waiters[id] = append(ch.waiters[id], w)
	ch.mu.Unlock()
	select {
	case <-w.wake:
	case <-ctx.Done():
	}
	ch.mu.Lock()
	rest := slices.DeleteFunc(ch.waiters[id], func(x *waiter) bool { return x == w })
	if ch.waiters[id] = rest; len(rest) == 0 {
		delete(ch.waiters, id)
	}
}

// passLead wakes a follower to lead if nobody does. The caller holds ch.mu.
func (ch *EventChannel) passLead() {
	if ch.leading {
		return
	}
	for _, ws := range ch.waiters {
		ws[0].signal()
		return
	}
}

// wakeWaiters wakes everybody who waits for events of id, or of any id. The
// caller holds ch.mu.
func (ch *EventChannel) wakeWaiters(id *ID) {
	for _, w := range ch.waiters[id] {
		w.signal()
	}
	if ch.leading {
		ch.interrupt()
	}
}

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// fetch takes an event from the provider and queues it. It returns EAGAIN if
// there is none. The caller holds ch.mu, which it may release for a moment.
func (ch *EventChannel) fetch() error {
	v, err := ch.v.GetEvent()
	if errors.Is(err, syscall.EINTR) {
		return nil
	}
	if err != nil {
		return err
	}
	ev := &Event{Type: v.Type, Err: eventErr(v.Type, v.Err), PrivateData: v.PrivateData}
	subject, reportedFor := v.ID, v.ID
	if v.Type == EventConnectRequest {
		reportedFor = v.Listener
	}
	// The provider's event is acked as soon as it is copied, so that no provider
	// ever waits for our caller. The count that Event.Ack lowers is kept here.
	err = ch.v.AckEvent(v)

	owner := ch.ids[reportedFor]
	switch {
	case ev.Type == EventConnectRequest && ch.ids[subject] != nil:
		// A second time. There is one id, and it may be in use.
	case owner == nil || owner.is(stateDestroyed):
		// The id is being destroyed, and its events with it.
		if ev.Type == EventConnectRequest {
			ch.mu.Unlock()
			turnAway(subject)
			ch.mu.Lock()
		}
	case ev.Type == EventConnectRequest:
		ev.ID, ev.Listener = ch.add(subject, stateRequested), owner
		ch.enqueue(ev)
	case owner.advance(ev.Type):
		ev.ID = owner
		ch.enqueue(ev)
	}
	return err
}

// enqueue gives an event to whoever waits for it first. The caller holds ch.mu.
func (ch *EventChannel) enqueue(ev *Event) {
	id := ev.owner()
	id.queue = append(id.queue, ev)
	ch.queue.push(ev)
	for _, w := range ch.waiters[id] {
		w.signal()
	}
	for _, w := range ch.waiters[nil] {
		w.signal()
	}
}

// dequeue removes an event that waits. The caller holds ch.mu.
func (ch *EventChannel) dequeue(ev *Event) {
	id := ev.owner()
	id.queue = slices.DeleteFunc(id.queue, func(e *Event) bool { return e == ev })
	ch.queue.remove(ev)
}

// unackedOf returns the events of id that were got and not acked, or all if id
// is nil. The caller holds ch.mu.
func (ch *EventChannel) unackedOf(id *ID) []*Event {
	var events []*Event
	for ev := range ch.unacked {
		if id == nil || ev.owner() == id {
			events = append(events, ev)
		}
	}
	return events
}

// Close destroys the channel and closes its descriptor,
// rdma_destroy_event_channel(3). While ids of the channel live, or events got
// from it are not acked, it returns a *BusyError. It ends every GetEvent with
// net.ErrClosed.
func (ch *EventChannel) Close() error {
	const op = "destroy event channel"
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if ch.closed {
		return opError(op, errChannelClosed)
	}
	if len(ch.ids) > 0 || len(ch.unacked) > 0 {
		busy := &BusyError{Object: "event channel", Events: ch.unackedOf(nil)}
		for _, id := range ch.ids {
			busy.IDs = append(busy.IDs, id)
		}
		return opError(op, busy)
	}
	ch.closed = true
	ch.wakeWaiters(nil)
	for ch.leading {
		ch.left.Wait()
	}
	if err := ch.v.Close(); err != nil {
		ch.closed = false // it may be tried again
		return opError(op, err)
	}
	return nil
}
