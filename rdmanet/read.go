package rdmanet

import (
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
)

// rxState is the receive side. Each posted receive is a slot; its number is the
// work request's id. Conn.mu guards it, except that the frame at the head of the
// queue is the reader's, who holds readMu.
type rxState struct {
	slots   []*qp.Buffer
	lent    []bool     // by slot: a caller of ReadBuffer holds it
	queue   []received // ring of DATA frames that were not read
	head, n int
	control []uint64 // slots of control frames, to be posted again; pollMu

	err     error // why there is nothing more to come, once the queue is read
	flushed bool  // the receives were flushed: the queue pair is in error
	ended   bool  // the reason is known, or was waited for
	gone    bool  // Close has taken the slots
	broken  bool  // the peer broke the protocol: nothing more is taken in
	discard bool  // CloseRead

	releaseFn func(*qp.Buffer)
	back      []qp.RecvWR  // receives to be posted again, with room for a few; readMu
	controlWR [1]qp.RecvWR // pollMu
	releaseWR [1]qp.RecvWR // mu
}

// received is a DATA frame, or what is left of it.
type received struct {
	slot   uint64
	off, n int // the payload, in the slot's block
}

// backBatch is how many receives are posted again at a time, while the reader has
// more to read.
const backBatch = 4

// flushGrace is how long a reader waits for the reason why the queue pair went
// into error, which comes by way of the event channel. A variable for tests.
var flushGrace = time.Second

// initReceives posts all receives. Nothing is connected yet.
func (c *Conn) initReceives() error {
	r := &c.rx
	n := c.cfg.receives()
	r.queue = make([]received, n)
	r.lent = make([]bool, n)
	r.back = make([]qp.RecvWR, 0, min(backBatch, c.cfg.RecvDepth))
	wrs := make([]qp.RecvWR, 0, n)
	for i := range n {
		b, err := c.arena.pool.Get()
		if err != nil {
			return err
		}
		b.SetOwner(r.releaseFn)
		r.slots = append(r.slots, b)
		wrs = append(wrs, qp.RecvWR{WRID: uint64(i), SGE: b.BlockSGE()})
	}
	_, err := c.qp.PostRecv(wrs)
	return err
}

// completed acts on one completion. c.mu is held.
func (c *Conn) completed(wc *qp.WC) {
	switch {
	case wc.Op == qp.OpSend:
		c.sent(wc)
	case wc.Status == qp.StatusSuccess:
		c.received(wc)
	case wc.Status == qp.StatusWRFlushErr:
		c.flushedRecv()
	default:
		c.fail(qp.StatusErr(*wc))
		c.flushedRecv()
	}
}

// received takes in a frame. c.mu is held.
func (c *Conn) received(wc *qp.WC) {
	r := &c.rx
	c.stats.framesReceived.Add(1)
	if r.broken {
		return // its receives are not posted again
	}
	h, err := parseHeader(r.slots[wc.WRID].Block()[:wc.ByteLen])
	if err == nil {
		err = c.flow.receive(h, c.accepted)
	}
	if err != nil {
		c.log().Info("rdma: connection aborted", "remote", c.remote.String(), "err", err)
		r.broken = true
		c.fail(err)
		c.abort()
		return
	}
	c.stats.creditsReceived.Add(uint64(h.credits))
	if h.typ == frameData {
		r.queue[(r.head+r.n)%len(r.queue)] = received{wc.WRID, headerLen, h.length}
		r.n++
		return
	}
	if h.typ == frameFin {
		r.err = io.EOF // even if a reset came since
	}
	r.control = append(r.control, wc.WRID)
}

// repostControl posts the receives of control frames again. pollMu is held.
func (c *Conn) repostControl() {
	for _, slot := range c.rx.control {
		// A queue pair in error flushes it; one that is gone needs none.
		c.rx.controlWR[0] = qp.RecvWR{WRID: slot, SGE: c.rx.slots[slot].BlockSGE()}
		_, err := c.qp.PostRecv(c.rx.controlWR[:])
		c.refused(err)
	}
	c.rx.control = c.rx.control[:0]
}

// flushedRecv notes that the queue pair is in error. The reason may still be on
// its way. c.mu is held.
func (c *Conn) flushedRecv() {
	r := &c.rx
	if r.flushed {
		return
	}
	r.flushed = true
	if r.err == nil && !r.ended {
		c.endSoon()
	}
}

// endSoon ends the connection, unless the reason becomes known that is on its way.
func (c *Conn) endSoon() {
	time.AfterFunc(flushGrace, func() {
		c.mu.Lock()
		c.fail(syscall.ECONNRESET)
		c.mu.Unlock()
		c.changed()
	})
}

// endReads sets why reads end, unless that is known. c.mu is held.
func (c *Conn) endReads(err error) {
	c.rx.ended = true
	if c.rx.err == nil {
		c.rx.err = err
	}
}

// disconnected is called for the event that ends the connection.
func (c *Conn) disconnected(ev *cm.Event) {
	c.mu.Lock()
	c.rx.ended = true
	switch {
	case ev.Type == cm.EventDeviceRemoval:
		c.fail(syscall.ENODEV)
	case ev.Err != nil:
		c.fail(ev.Err)
	default: // the peer closed in order: what it sent before can be read
		c.failWrites(syscall.EPIPE)
		if c.rx.err == nil && !c.rx.flushed { // which ends the reader; it may never come
			c.endSoon()
		}
	}
	c.mu.Unlock()
	c.changed()
}

// canRead reports whether a read would not block.
func (c *Conn) canRead() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rx.n > 0 || c.readEnd() != nil
}

// readEnd returns why there is nothing more to read. c.mu is held.
func (c *Conn) readEnd() error {
	r := &c.rx
	switch {
	case r.discard:
		return io.EOF
	case r.n > 0:
		return nil
	case r.err != nil:
		return r.err
	case r.flushed && r.ended: // ended without FIN
		return syscall.ECONNRESET
	}
	return nil
}

// Read reads what has arrived, at least one byte, and blocks while there is
// nothing. It costs one copy. After the peer's CloseWrite or Close, and once
// everything is read, it returns io.EOF; if the peer ended without either,
// ECONNRESET.
func (c *Conn) Read(p []byte) (int, error) {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	if err := c.readCheck(); err != nil || len(p) == 0 {
		return 0, opError(opRead, c.local, c.remote, err)
	}
	for {
		if n := c.take(p); n > 0 {
			c.stats.bytesRead.Add(uint64(n))
			return n, nil
		}
		if err := c.waitRead(); err != nil {
			return 0, opError(opRead, c.local, c.remote, err)
		}
	}
}

// readCheck returns why a read can't begin. readMu is held.
func (c *Conn) readCheck() error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	if c.wait.read.deadline.expired() {
		return os.ErrDeadlineExceeded
	}
	return nil
}

// waitRead waits until there is something to read, or returns why there never
// will be. readMu is held.
func (c *Conn) waitRead() error {
	c.mu.Lock()
	err := c.readEnd()
	c.mu.Unlock()
	if err != nil {
		if c.poll() > 0 {
			return nil // what had arrived before the end comes first
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.readEnd() // somebody else may have polled it meanwhile
	}
	if err := c.flushOpen(); err != nil { // what we wait for may be the answer to it
		return err
	}
	c.repost()
	c.returnCredits(true)
	return c.waitFor(&c.wait.read)
}

// take copies what has arrived. readMu is held.
func (c *Conn) take(p []byte) int {
	done := 0
	f, due := c.first(), false
	for f != nil && done < len(p) {
		n := copy(p[done:], c.rx.slots[f.slot].Block()[f.off:f.off+f.n])
		done += n
		if n < f.n {
			f.off, f.n = f.off+n, f.n-n
			break
		}
		f, due = c.consumed(f.slot)
	}
	if done > 0 {
		c.tx.answers.Store(true)
	}
	if due {
		_ = c.sendControl(frameCredit, false) // a connection in error owes nothing
	}
	return done
}

// first returns the frame at the head of the queue, or nil. readMu is held, so
// that it stays there.
func (c *Conn) first() *received {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rx.first()
}

func (r *rxState) first() *received {
	if r.n == 0 || r.discard {
		return nil
	}
	return &r.queue[r.head]
}

// pop removes the frame at the head of the queue. Conn.mu is held.
func (r *rxState) pop() {
	r.head = (r.head + 1) % len(r.queue)
	r.n--
}

// consumed takes the frame at the head off the queue. Its receive is posted again
// with some others, or when the reader has nothing else to do, or before a credit
// is overdue. It returns the next frame, and whether a CREDIT frame is due. readMu
// is held.
func (c *Conn) consumed(slot uint64) (next *received, due bool) {
	r := &c.rx
	r.back = append(r.back, qp.RecvWR{WRID: slot, SGE: r.slots[slot].BlockSGE()})
	c.mu.Lock()
	r.pop()
	next = r.first()
	enough := len(r.back) == cap(r.back) || c.flow.dueWith(len(r.back))
	c.mu.Unlock()
	return next, enough && c.repost()
}

// repost posts the receives of consumed frames again, each worth a credit, and
// reports whether a CREDIT frame is due. readMu is held.
func (c *Conn) repost() (due bool) {
	r := &c.rx
	if len(r.back) == 0 {
		return false
	}
	n, err := c.qp.PostRecv(r.back) // a queue pair that is gone needs no credits
	r.back = r.back[:0]
	c.refused(err)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flow.posted(n)
	return c.flow.due(false)
}

// returnCredits tells the peer about receives that were posted again, if it is
// time. waiting says that the reader has nothing else to do.
func (c *Conn) returnCredits(waiting bool) {
	c.mu.Lock()
	due := c.flow.due(waiting)
	c.mu.Unlock()
	if due {
		_ = c.sendControl(frameCredit, waiting) // a connection in error owes nothing
	}
}

// CloseRead ends reading: Read returns io.EOF, now and for ever, and what has
// arrived is discarded. The peer isn't told; as with TCP, once the window is full
// its writes block.
func (c *Conn) CloseRead() error {
	if err := c.checkOpen(); err != nil {
		return opError(opClose, c.local, c.remote, net.ErrClosed)
	}
	c.mu.Lock()
	c.rx.discard = true
	c.mu.Unlock()
	c.wakeup(&c.wait.read)
	return nil
}
