//go:build cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// eventChannel is an rdma_event_channel. librdmacm connects queue pairs while
// it gets events, so the lock is held around that, and a queue pair is detached
// with it before it is freed.
type eventChannel struct {
	serial uint64 // age, for the lock order
	file   *os.File

	mu     sync.Mutex
	c      *C.struct_rdma_event_channel
	event  *C.struct_rn_event
	queue  []*verbs.Event // of our own making, or taken off the kernel by Migrate
	closed bool
}

var channelSerial atomic.Uint64

func newEventChannel() (*eventChannel, error) {
	c := &eventChannel{serial: channelSerial.Add(1)}
	if err := errnoOf(int(C.rn_create_event_channel(&c.c))); err != nil {
		return nil, opError("rdma_create_event_channel", err)
	}
	var err error
	fd := c.c.fd
	if c.file, _, err = pollable(fd, "rdma_cm"); err != nil {
		syscall.Close(int(fd))
		C.rn_destroy_event_channel(c.c)
		return nil, err
	}
	c.event = (*C.struct_rn_event)(calloc(1, C.sizeof_struct_rn_event))
	return c, nil
}

func (c *eventChannel) File() *os.File { return c.file }

// AckEvent does nothing: an event is acked as soon as it is copied, so that
// rdma_destroy_id(3) never waits for our callers.
func (c *eventChannel) AckEvent(*verbs.Event) error { return nil }

func (c *eventChannel) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return os.ErrClosed
	}
	c.closed = true
	err := c.file.Close()
	C.rn_destroy_event_channel(c.c)
	free(unsafe.Pointer(c.event))
	return err
}

func (c *eventChannel) NewID() (verbs.ID, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, os.ErrClosed
	}
	i := newID(c)
	if err := errnoOf(int(C.rn_create_id(c.c, C.uint64_t(i.handle), &i.c))); err != nil {
		i.unregister()
		return nil, opError("rdma_create_id", err)
	}
	return i, nil
}

func (c *eventChannel) GetEvent() (*verbs.Event, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, os.ErrClosed
	}
	if len(c.queue) > 0 {
		ev := c.queue[0]
		c.queue = c.queue[1:]
		return ev, nil
	}
	return c.fetch()
}

// fetch takes an event from the kernel. c.mu is held.
func (c *eventChannel) fetch() (*verbs.Event, error) {
	if err := errnoOf(int(C.rn_get_event(c.c, c.event))); err != nil {
		if err == syscall.EAGAIN {
			return nil, err
		}
		return nil, opError("rdma_get_cm_event", err)
	}
	e := c.event
	ev := &verbs.Event{Type: verbs.EventType(e._type)}
	ev.Err = eventError(ev.Type, int(e.status))
	if n := int(e.private_data_len); n > 0 {
		ev.PrivateData = C.GoBytes(unsafe.Pointer(&e.private_data[0]), C.int(n))
	}
	subject := lookup(uint64(e.context))
	if ev.Type == verbs.EventConnectRequest {
		child := newID(c)
		child.c = e.id
		C.rn_set_context(child.c, C.uint64_t(child.handle))
		ev.ID = child
		if subject != nil {
			ev.Listener = subject
		}
		return ev, nil
	}
	if subject != nil { // nil: it is being destroyed
		ev.ID = subject
		if ev.Type == verbs.EventEstablished && subject.qp != nil {
			subject.qp.reads = e.reads > 0
		}
		subject.advance(ev)
	}
	return ev, nil
}

// push queues an event of our own making. c.mu is held.
func (c *eventChannel) push(ev *verbs.Event) {
	if !c.closed {
		c.queue = append(c.queue, ev)
		c.poke()
	}
}

// poke ends the netpoller's wait for the descriptor, which knows nothing of the
// queue: whoever waits then looks for an event.
func (c *eventChannel) poke() { _ = c.file.SetReadDeadline(longAgo) }

var longAgo = time.Unix(1, 0)

// take removes and returns the queued events that concern the id. c.mu is held.
func (c *eventChannel) take(i *id) []*verbs.Event {
	var taken, left []*verbs.Event
	for _, ev := range c.queue {
		if ev.ID == i || ev.Listener == i {
			taken = append(taken, ev)
		} else {
			left = append(left, ev)
		}
	}
	c.queue = left
	return taken
}

// Migrate is rdma_migrate_id(3). The kernel moves the id's events and wakes
// nobody, and it leaves behind the ids of a listener's connect requests that
// nobody has got: those are got first and moved one by one.
func (i *id) Migrate(ch verbs.EventChannel) error {
	to, ok := ch.(*eventChannel)
	if !ok {
		return fmt.Errorf("migrate: event channel of another provider: %w", syscall.EINVAL)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	from := i.ch.Load()
	if from == to {
		return nil
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
		return os.ErrClosed
	}
	if i.listening {
		for {
			ev, err := from.fetch()
			if err != nil {
				break
			}
			from.queue = append(from.queue, ev)
		}
		defer from.poke()
	}
	if err := i.move(to); err != nil {
		return err
	}
	for _, ev := range from.take(i) {
		if child, ok := ev.ID.(*id); ok && child != i {
			_ = child.move(to) // else it works where it is
		}
		to.queue = append(to.queue, ev)
	}
	to.poke()
	return nil
}

// move moves an id whose channels' locks are held.
func (i *id) move(to *eventChannel) error {
	if err := errnoOf(int(C.rn_migrate_id(i.c, to.c))); err != nil {
		return opError("rdma_migrate_id", err)
	}
	i.ch.Store(to)
	return nil
}
