package cm

import (
	"fmt"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// Event is an rdma_cm_event. Who got it must Ack it: until then neither the id
// it was reported for can be destroyed nor its channel closed.
type Event struct {
	Type     EventType
	ID       *ID // for EventConnectRequest the new id
	Listener *ID // for EventConnectRequest the listening id
	// Err says why, for events that report a failure or a connection's
	// unorderly end. It carries a syscall.Errno.
	Err         error
	PrivateData []byte // the event's own copy, valid after Ack too

	ch         *EventChannel // that it was got from
	prev, next *Event        // in the channel's queue; guarded by the channel's mu
}

// owner is the id that the event was reported for: the listener, for a connect
// request.
func (e *Event) owner() *ID {
	if e.Type == EventConnectRequest {
		return e.Listener
	}
	return e.ID
}

// Ack says that the event has been dealt with, rdma_ack_cm_event(3). It may be
// repeated. The event's fields stay valid.
func (e *Event) Ack() {
	e.ch.mu.Lock()
	defer e.ch.mu.Unlock()
	delete(e.ch.unacked, e)
}

// failure returns the event as an error.
func (e *Event) failure() *EventError {
	f := &EventError{Type: e.Type, Remote: e.ID.RemoteAddr(), Err: e.Err, PrivateData: e.PrivateData}
	if f.Err == nil && e.Type == EventDisconnected {
		f.Err = syscall.ECONNRESET
	} else if f.Err == nil {
		f.Err = fmt.Errorf("unexpected event (%w)", syscall.EPROTO)
	}
	return f
}

// String returns the event's type and whose it is.
func (e *Event) String() string { return fmt.Sprintf("%v of %v", e.Type, e.owner()) }

// eventQueue is a list of events that wait to be got, oldest first.
type eventQueue struct{ head, tail *Event }

func (q *eventQueue) push(e *Event) {
	e.prev, e.next = q.tail, nil
	if q.tail != nil {
		q.tail.next = e
	} else {
		q.head = e
	}
	q.tail = e
}

func (q *eventQueue) remove(e *Event) {
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		q.head = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		q.tail = e.prev
	}
	e.prev, e.next = nil, nil
}

// turnAway ends a connection request that nobody will get. The peer notices if
// either call fails, since its connection is not accepted.
func turnAway(child verbs.ID) {
	_ = child.Reject(nil)
	_ = child.Destroy()
}
