package rdmanet

import (
	"net"
	"runtime"

	"github.com/rdmanet/rdmanet/qp"
)

// What goes to the send queue, and comes back from it.

// takeBlock returns an empty block to send from. Its Release gives it back to the
// connection, which has kept as many since it was set up as the send queue has
// slots for data, if it sends everything from blocks: a writer who has reserved a
// slot then gets one, unless callers of NewBuffer hold them.
func (c *Conn) takeBlock() (*qp.Buffer, error) {
	t := &c.tx
	c.mu.Lock()
	if c.rx.gone {
		c.mu.Unlock()
		return nil, net.ErrClosed
	}
	c.arena.retain()
	var b *qp.Buffer
	if n := len(t.kept); n > 0 {
		b, t.kept = t.kept[n-1], t.kept[:n-1]
	}
	c.mu.Unlock()
	if b == nil {
		var err error
		if b, err = c.arena.pool.Get(); err != nil {
			_ = c.arena.release()
			return nil, err
		}
		b.SetOwner(t.releaseFn)
	}
	b.Lend()
	b.SetWindow(headerLen, 0)
	return b, nil
}

// blockReleased is called when a block of takeBlock is released.
func (c *Conn) blockReleased(b *qp.Buffer) {
	t := &c.tx
	c.mu.Lock()
	if !c.rx.gone && len(t.kept) < cap(t.kept) {
		t.kept = append(t.kept, b)
	} else {
		b.Free()
	}
	c.mu.Unlock()
	_ = c.arena.release()
}

// postBlock sends the payload of b, whose credit and slot are reserved, and
// releases b in the end. Only a solicited one wakes a peer that waits in a read.
// postMu is held, and released: b may be a block that this connection received,
// whose release may send a CREDIT frame.
func (c *Conn) postBlock(b *qp.Buffer, solicited bool) error {
	f := &c.tx.frames
	header{typ: frameData, length: b.Len()}.put(b.Header())
	f.sgl[0][0] = b.SGE()
	f.wrs[0].SGL, f.wrs[0].Inline, f.wrs[0].Solicited = f.sgl[0][:1], headerLen+b.Len() <= c.tx.inline && !c.tx.direct, solicited
	n, err := c.post(f.wrs[:1], b)
	f.wrs[0].Solicited = true // as it is for all others
	c.postMu.Unlock()
	if n == 0 {
		// Its Write may have returned long ago: nothing may follow the gap.
		c.mu.Lock()
		c.failWrites(err)
		c.mu.Unlock()
		b.Release()
	}
	return err
}

// post hands data frames, whose credits and slots are reserved, to the send
// queue, and returns how many it took; the reservations of the others are undone.
// block, if not nil, is the first one's memory. postMu is held.
func (c *Conn) post(wrs []qp.SendWR, block *qp.Buffer) (int, error) {
	t := &c.tx
	c.mu.Lock()
	first, credits := c.number(wrs, block)
	t.reserved -= len(wrs)
	c.mu.Unlock()
	setCredits(wrs[0].SGL[0].Data, credits)
	n, err := c.qp.PostSend(wrs)
	t.asked.Store(true)
	c.stats.framesSent.Add(uint64(n))
	if n < len(wrs) {
		c.mu.Lock()
		c.flow.credits += len(wrs) - n
		c.unnumber(first, n, credits)
		c.mu.Unlock()
	}
	return n, err
}

// number gives frames their numbers, and the first the credits that are owed. A
// completion is asked for often enough that slots come back by half a queue.
// c.mu is held.
func (c *Conn) number(wrs []qp.SendWR, block *qp.Buffer) (first uint64, credits int) {
	t := &c.tx
	first = t.posted
	t.blocks[first%uint64(len(t.blocks))] = block
	every := uint64(max(1, c.cfg.SendDepth/2))
	for i := range wrs {
		wrs[i].WRID = t.posted
		wrs[i].Signaled = (t.posted+1)%every == 0
		t.posted++
	}
	return first, c.flow.take()
}

// unnumber takes back the frames after the first n. c.mu is held.
func (c *Conn) unnumber(first uint64, n, credits int) {
	t := &c.tx
	t.posted = first + uint64(n)
	if n == 0 {
		t.blocks[first%uint64(len(t.blocks))] = nil
		c.flow.untake(credits)
	}
}

// sent acts on the completion of a send: all up to it are done. c.mu is held.
func (c *Conn) sent(wc *qp.WC) {
	t := &c.tx
	for t.done <= wc.WRID {
		i := t.done % uint64(len(t.blocks))
		if b := t.blocks[i]; b != nil {
			t.blocks[i] = nil
			t.spent = append(t.spent, b)
		}
		t.done++
	}
	if wc.Status != qp.StatusSuccess && wc.Status != qp.StatusWRFlushErr {
		c.fail(qp.StatusErr(*wc))
	}
}

// releaseSpent releases the blocks of sends that are done. pollMu is held; c.mu
// is not, since a block may be another connection's.
func (c *Conn) releaseSpent() {
	t := &c.tx
	if len(t.spent) == 0 {
		return
	}
	for _, b := range t.spent {
		b.Release()
	}
	c.mu.Lock()
	clear(t.spent)
	t.spent = t.spent[:0]
	c.mu.Unlock()
}

// free is how many more data frames the send queue takes. A slot is free when its
// block is. c.mu is held.
func (c *Conn) free() int {
	t := &c.tx
	return c.cfg.SendDepth - int(t.posted-t.done) - t.reserved - len(t.spent)
}

// canWrite reports whether a write would not block.
func (c *Conn) canWrite() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writeEnd() != nil || c.flow.credits > 0 && c.free() > 0 && !c.tx.socketFull.Load()
}

// reserve takes up to want credits and slots, at least one, and waits for that.
func (c *Conn) reserve(want int) (int, error) {
	for {
		c.mu.Lock()
		n := min(want, c.flow.credits, c.free())
		err := c.writeEnd()
		if n > 0 && err == nil {
			c.flow.credits -= n
			c.tx.reserved += n
		}
		c.mu.Unlock()
		if err != nil {
			return 0, err
		}
		if n > 0 {
			return n, nil
		}
		c.stats.stalls.Add(1)
		if err := c.waitFor(&c.wait.write); err != nil {
			return 0, err
		}
	}
}

// yieldBytes is after how much a writer yields. One that never parks is like a
// reader that never does: see spinYield.
const yieldBytes = 256 << 10

// yield notes that n bytes are to be sent. writeMu is held.
func (t *txState) yield(n int) {
	if t.run += n; t.run >= yieldBytes {
		t.run = 0
		runtime.Gosched()
	}
}

func (c *Conn) unreserve(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flow.credits += n
	c.tx.reserved -= n
}

// sendControl sends a frame without a payload. CREDIT frames are left out when
// nothing is due any more, and put off when the send queue is full: whoever
// leads tries again.
func (c *Conn) sendControl(typ frameType, waiting bool) error {
	t := &c.tx
	c.postMu.Lock()
	defer c.postMu.Unlock()
	c.mu.Lock()
	// HELLO and FIN find room even so.
	full := t.posted-t.done+uint64(t.reserved) >= uint64(c.cfg.sends()-2)
	if typ == frameCredit && (full || !c.flow.due(waiting) || c.closed.Load()) {
		t.creditLate.Store(full)
		c.mu.Unlock()
		return nil
	}
	wrs := t.frames.wrs[:1]
	first, credits := c.number(wrs, nil)
	c.mu.Unlock()
	hdr := t.frames.hdrs[0][:]
	header{typ: typ, credits: credits}.put(hdr)
	t.frames.sgl[0][0] = qp.SGE{Data: hdr}
	wrs[0].SGL, wrs[0].Inline, wrs[0].Signaled = t.frames.sgl[0][:1], true, true
	n, err := c.qp.PostSend(wrs)
	if n == 0 {
		c.mu.Lock()
		c.unnumber(first, 0, credits)
		c.mu.Unlock()
		c.refused(err)
		return err
	}
	c.stats.framesSent.Add(1)
	if typ == frameCredit {
		c.stats.creditFrames.Add(1)
	}
	return nil
}

// sendFin sends FIN, once. writeMu is held.
func (c *Conn) sendFin() error {
	if c.tx.finPosted {
		return nil
	}
	c.tx.finPosted = true
	return c.sendControl(frameFin, false)
}
