package iwarp

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// eventChannel queues events. A pipe holds one byte while the queue is not
// empty, so that its read end is pollable exactly like rdma_cm's descriptor.
type eventChannel struct {
	mu     sync.Mutex
	queue  []*verbs.Event
	r, w   *os.File
	rfd    int // r's descriptor, read without r's lock, which a waiter holds
	closed bool
}

func newEventChannel() (*eventChannel, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	c := &eventChannel{r: r, w: w}
	raw, err := r.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { c.rfd = int(fd) })
	}
	if err != nil {
		r.Close()
		w.Close()
		return nil, err
	}
	return c, nil
}

func (c *eventChannel) File() *os.File { return c.r }

func (c *eventChannel) NewID() (verbs.ID, error) { return newID(c), nil }

func (c *eventChannel) AckEvent(*verbs.Event) error { return nil }

func (c *eventChannel) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return os.ErrClosed
	}
	c.closed, c.queue = true, nil
	c.w.Close()
	return c.r.Close()
}

// push queues an event. On a closed channel it is dropped.
func (c *eventChannel) push(ev *verbs.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.queue = append(c.queue, ev)
	if len(c.queue) == 1 {
		c.w.Write([]byte{0}) // an empty pipe takes a byte without blocking
	}
}

func (c *eventChannel) GetEvent() (*verbs.Event, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, os.ErrClosed
	}
	if len(c.queue) == 0 {
		return nil, syscall.EAGAIN
	}
	ev := c.queue[0]
	c.queue = c.queue[1:]
	c.settle()
	return ev, nil
}

// take removes and returns the queued events that match.
func (c *eventChannel) take(match func(*verbs.Event) bool) []*verbs.Event {
	c.mu.Lock()
	defer c.mu.Unlock()
	var taken, left []*verbs.Event
	for _, ev := range c.queue {
		if match(ev) {
			taken = append(taken, ev)
		} else {
			left = append(left, ev)
		}
	}
	if len(taken) > 0 {
		c.queue = left
		c.settle()
	}
	return taken
}

// settle empties the pipe once the queue is empty. c.mu is held.
func (c *eventChannel) settle() {
	if len(c.queue) > 0 || c.closed {
		return
	}
	c.queue = nil
	var b [1]byte
	for {
		if _, err := unix.Read(c.rfd, b[:]); err != unix.EINTR {
			return
		}
	}
}
