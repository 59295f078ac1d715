package iwarp

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// cq is a ring of completions. Waiting on it waits on its QP's socket.
type cq struct {
	mu    sync.Mutex
	ring  []verbs.WC
	head  int
	armed armed
	count atomic.Int32 // completions in the ring

	qp     atomic.Pointer[qp]
	waits  sync.Mutex    // held by the Wait that is in the netpoller
	wake   chan struct{} // one token: a Wake that nobody has seen yet
	waitFn func(uintptr) bool
}

type armed uint8

const (
	armedNot armed = iota
	armedSolicited
	armedAll
)

var longAgo = time.Unix(1, 0)

func newCQ(depth int) *cq {
	c := &cq{ring: make([]verbs.WC, depth), wake: make(chan struct{}, 1)}
	c.waitFn = c.ready
	return c
}

// push adds a completion. If the CQ is armed for it, a Wait ends.
func (c *cq) push(wc verbs.WC, solicited bool) {
	c.mu.Lock()
	n := int(c.count.Load())
	if n == len(c.ring) {
		// qp sizes its queues within the CQ, so this takes a bug of ours.
		panic("iwarp: completion queue overrun")
	}
	c.ring[(c.head+n)%len(c.ring)] = wc
	c.count.Add(1)
	fire := c.armed == armedAll || c.armed == armedSolicited && (solicited || wc.Status != verbs.StatusSuccess)
	if fire {
		c.armed = armedNot
	}
	c.mu.Unlock()
	if fire {
		c.Wake()
	}
}

// kick ends a Wait that waits for sends: the socket has room again.
func (c *cq) kick() {
	c.mu.Lock()
	fire := c.armed == armedAll
	if fire {
		c.armed = armedNot
	}
	c.mu.Unlock()
	if fire {
		c.Wake()
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
		c.head = (c.head + 1) % len(c.ring)
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
	if solicitedOnly {
		c.armed = max(c.armed, armedSolicited)
	} else {
		c.armed = armedAll
	}
	return nil
}

// Wait parks in the netpoller until the socket is readable. Before there is a
// connection and after it has ended, only completions and Wake end it.
func (c *cq) Wait() error {
	q := c.qp.Load()
	if q == nil || !q.open.Load() {
		if c.count.Load() == 0 {
			<-c.wake
		}
		return nil
	}
	c.waits.Lock()
	err := q.raw.Read(c.waitFn)
	c.waits.Unlock()
	if err != nil {
		// Woken. The token goes first: a Wake that comes between the two
		// leaves it for the next Wait.
		select {
		case <-c.wake:
		default:
		}
		if q.open.Load() {
			q.conn.SetReadDeadline(time.Time{})
		}
	}
	return nil
}

// ready runs in the netpoller's read loop: it reports whether to stop waiting.
func (c *cq) ready(uintptr) bool {
	select {
	case <-c.wake:
		return true
	default:
	}
	if c.count.Load() > 0 {
		return true
	}
	q := c.qp.Load()
	q.progress(waitBatch, shortIsEmptyIfDone)
	return c.count.Load() > 0 || !q.open.Load()
}

// waitBatch is how many messages one wake-up takes from the socket at most.
const waitBatch = 8

func (c *cq) Wake() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
	if q := c.qp.Load(); q != nil && q.open.Load() {
		q.conn.SetReadDeadline(longAgo)
	}
}

func (c *cq) Destroy() error {
	c.Wake()
	return nil
}
