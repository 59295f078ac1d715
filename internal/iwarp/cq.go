package iwarp

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// cq is a ring of completions. Waiting on it waits on its QP's socket.
//
// A Wait is either running, and then sees for itself what happens, or parked in
// the netpoller, and then a deadline in the past ends it. Which of the two it is
// changes only with mu held, as does the deadline.
type cq struct {
	mu     sync.Mutex
	ring   []verbs.WC
	head   int
	armed  armed
	room   bool // the socket had room again while nobody was armed for it
	woken  bool // a Wake that no Wait has seen yet
	parked link // where a Wait is parked
	late   bool // its read deadline is in the past
	awake  sync.Cond

	count atomic.Int32 // completions in the ring
	qp    atomic.Pointer[qp]

	waits   sync.Mutex // held by the Wait that uses the socket
	readyFn func(uintptr) bool
}

type armed uint8

const (
	armedNot armed = iota
	armedSolicited
	armedAll
)

var longAgo = time.Unix(1, 0)

func newCQ(depth int) *cq {
	c := &cq{ring: make([]verbs.WC, depth)}
	c.awake.L = &c.mu
	c.readyFn = c.ready
	return c
}

// push adds a completion. If the CQ is armed for it, a Wait ends.
func (c *cq) push(wc verbs.WC, solicited bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := int(c.count.Load())
	if n == len(c.ring) {
		// newQP and package qp keep what is outstanding within the CQ, so this
		// takes a bug of ours.
		panic("iwarp: completion queue overrun")
	}
	c.ring[(c.head+n)%len(c.ring)] = wc
	c.count.Add(1)
	if c.armed == armedAll || c.armed == armedSolicited && (solicited || wc.Status != verbs.StatusSuccess) {
		c.fire()
	}
}

// fire is the event that the CQ is armed for. c.mu is held.
func (c *cq) fire() {
	c.armed = armedNot
	c.wake()
}

// hasRoom ends the Wait of whoever was refused a send: the socket has room
// again. If nobody waits yet, the next Arm finds out.
func (c *cq) hasRoom() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.room = c.armed == armedNot
	if !c.room {
		c.fire()
	}
}

func (c *cq) pop(wc []verbs.WC) int {
	if c.count.Load() == 0 {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(wc), int(c.count.Load()))
	for i := range n {
		wc[i] = c.ring[c.head]
		if c.head++; c.head == len(c.ring) {
			c.head = 0
		}
	}
	c.count.Add(-int32(n))
	return n
}

// Poll takes completions, and reads the socket when there are none.
func (c *cq) Poll(wc []verbs.WC) (int, error) {
	if n := c.pop(wc); n > 0 || len(wc) == 0 {
		return n, nil
	}
	if q := c.qp.Load(); q != nil {
		q.progress(len(wc), shortIsEmpty)
	}
	return c.pop(wc), nil
}

func (c *cq) Arm(solicitedOnly bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	want := armedAll
	if solicitedOnly {
		want = armedSolicited
	}
	c.armed = max(c.armed, want)
	if c.room {
		c.room = false
		c.fire()
	}
	return nil
}

// Wait parks in the netpoller until a message has come. While there is no
// connection only completions and Wake end it.
func (c *cq) Wait() error {
	if !c.waitForSocket() {
		c.waitForWake()
	}
	return nil
}

// waitForSocket returns false at once if there is no open connection.
func (c *cq) waitForSocket() bool {
	c.waits.Lock()
	defer c.waits.Unlock()
	q := c.qp.Load()
	if q == nil || !q.open.Load() {
		return false
	}
	q.link.awaitRead(c.readyFn) // an error is a wake-up too
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.late {
		q.link.SetReadDeadline(time.Time{})
	}
	c.parked, c.late, c.woken = nil, false, false
	return true
}

// ready is called whenever the socket is readable, and once before the first
// park. It reports whether the Wait is over.
func (c *cq) ready(uintptr) bool {
	q := c.qp.Load()
	if q == nil || c.run() {
		return true
	}
	done, empty := q.progress(waitBatch, shortIsEmptyIfDone)
	return done > 0 || !empty || !c.park(q)
}

// waitBatch is how many messages one wake-up takes from the socket at most.
const waitBatch = 4

// run notes that the Wait is not parked, and reports whether it is over.
func (c *cq) run() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parked = nil
	return c.woken || c.count.Load() > 0
}

// park notes that the Wait is parked, unless there is a reason not to.
func (c *cq) park(q *qp) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.woken || c.count.Load() > 0 || !q.open.Load() {
		return false
	}
	c.parked = q.link
	return true
}

func (c *cq) waitForWake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.woken && c.count.Load() == 0 {
		c.awake.Wait()
	}
	c.woken = false
}

func (c *cq) Wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wake()
}

func (c *cq) wake() {
	if c.woken {
		return
	}
	c.woken = true
	c.awake.Signal()
	if c.parked != nil {
		c.parked.SetReadDeadline(longAgo)
		c.late = true
	}
}

func (c *cq) Destroy() error {
	c.Wake()
	return nil
}
