package iwarp

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
)

// A siw listener sends its set-up reply before it hooks the socket up to its queue
// pair. What comes in between stays in the socket, unnoticed, until something
// follows it. So whoever has dialed sends an RDMA WRITE of no bytes now and then
// while the connection is young: a nudge, which touches no memory and uses up no
// receive. No set-up frame says that a peer needs none, so all are nudged.
//
// It ends as soon as anything has come from the peer, who may not send before it
// has received (RFC 5044 section 7.1.2): it has noticed. A nudge after that would do
// harm. siw closes its socket while data is on its way to us, and TCP answers what
// comes for a closed socket with a reset, which destroys that data.

// nudges are when they are due, after the connection is established. A variable
// for tests.
var nudges = []time.Duration{2 * time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond, 250 * time.Millisecond, time.Second, 4 * time.Second}

// nudger is guarded by txState.mu.
type nudger struct {
	due   []time.Duration // those to come
	timer *time.Timer     // for the first of them
}

// begin starts the clock. It calls f, with no lock held, when a nudge is due.
func (n *nudger) begin(f func()) {
	if n.due = nudges; len(n.due) > 0 {
		n.timer = time.AfterFunc(n.due[0], f)
	}
}

// next goes on to the nudge after the one that was due.
func (n *nudger) next() {
	was := n.due[0]
	if n.due = n.due[1:]; len(n.due) > 0 {
		n.timer.Reset(n.due[0] - was)
	}
}

// stop ends it for good. A nudge that is due at this moment finds the send side
// dead, or nothing left to do.
func (n *nudger) stop() {
	n.due = nil
	if n.timer != nil {
		n.timer.Stop()
	}
}

// nudge sends one, unless the peer was heard.
func (q *qp) nudge() {
	heard := q.heard()
	t := &q.tx
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.nudger.due) == 0 {
		return
	}
	if heard {
		t.nudger.stop()
		return
	}
	t.nudger.next()
	if t.flushing {
		return // there is more to come anyway
	}
	b := &t.batch
	b.reset()
	h := b.take(wire.FPDUHeaderLen + wire.TaggedHeaderLen)
	wire.PutFPDUHeader(h, wire.TaggedHeaderLen)
	wire.TaggedHeader{Last: true, Opcode: wire.OpWrite}.Put(h[wire.FPDUHeaderLen:])
	q.trail(wire.TaggedHeaderLen, h, nil)
	b.addFrame()
	all := b.unsent
	switch err := q.write(); {
	case err == nil:
	case err != unix.EAGAIN:
		q.sendFailed(err)
	case b.unsent == all: // the socket is full, and may stay so: nothing is to wait for this
		b.reset()
	default:
		q.send()
	}
}

// heard reports whether anything, if only the end, has come from the peer.
func (q *qp) heard() bool {
	q.rx.mu.Lock()
	defer q.rx.mu.Unlock()
	return q.rx.state != halfOpen || q.rx.heard || q.link.pending()
}
