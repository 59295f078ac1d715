package rdmanet

import (
	"io"
	"net"

	"github.com/rdmanet/rdmanet/qp"
)

// Reading and writing without a copy.

// Buffer is a block of registered memory, for reading and writing without a
// copy. See Conn.ReadBuffer and Conn.NewBuffer.
type Buffer = qp.Buffer

// ReadBuffer returns the next received frame's payload, or what is left of it, in
// the registered block in which it arrived: no copy is made. It blocks and fails
// as Read does.
//
// The caller owns the buffer until it calls Release, which it must. Until then the
// block is missing from the window: a caller that holds Config.RecvDepth buffers
// stalls the peer. A buffer may be released after Close.
func (c *Conn) ReadBuffer() (*Buffer, error) {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	err := c.readCheck()
	for err == nil {
		if f := c.first(); f != nil {
			return c.lend(*f), nil
		}
		err = c.waitRead()
	}
	return nil, opError(opRead, c.local, c.remote, err)
}

// lend hands out the block of the frame at the head. readMu is held.
func (c *Conn) lend(f received) *qp.Buffer {
	b := c.rx.slots[f.slot]
	b.SetWindow(f.off, f.n)
	c.mu.Lock()
	c.rx.pop()
	c.rx.lent[f.slot] = true
	c.mu.Unlock()
	c.arena.retain()
	c.stats.bytesRead.Add(uint64(f.n))
	b.Lend()
	return b
}

// bufferReleased is called when the caller of ReadBuffer releases it. Its receive
// is posted again, unless Close has begun.
func (c *Conn) bufferReleased(b *qp.Buffer) {
	var err error
	c.mu.Lock()
	slot := c.slotOf(b)
	c.rx.lent[slot] = false
	switch {
	case c.rx.gone:
		b.Free()
	case !c.closed.Load():
		c.rx.releaseWR[0] = qp.RecvWR{WRID: slot, SGE: b.BlockSGE()}
		if _, err = c.qp.PostRecv(c.rx.releaseWR[:]); err == nil {
			c.flow.posted(1)
		}
	}
	c.mu.Unlock()
	c.refused(err)
	c.returnCredits(true)
	_ = c.arena.release()
}

func (c *Conn) slotOf(b *qp.Buffer) uint64 {
	for i, s := range c.rx.slots {
		if s == b {
			return uint64(i)
		}
	}
	panic("rdmanet: a buffer of another connection")
}

// WriteTo writes what is read to w, from the received blocks themselves, until
// io.EOF, which is success.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	var done int64
	for {
		b, err := c.ReadBuffer()
		if err == io.EOF {
			return done, nil
		}
		if err != nil {
			return done, err
		}
		n, err := w.Write(b.Bytes())
		short := n < b.Len()
		b.Release()
		done += int64(n)
		if err != nil {
			return done, err
		}
		if short {
			return done, io.ErrShortWrite
		}
	}
}

// NewBuffer returns an empty registered buffer with room for one frame, to be
// filled (Resize, Bytes) and given to WriteBuffer, or released.
func (c *Conn) NewBuffer() (*Buffer, error) {
	if c.closed.Load() {
		return nil, opError(opWrite, c.local, c.remote, net.ErrClosed)
	}
	b, err := c.takeBlock()
	return b, opError(opWrite, c.local, c.remote, err)
}

// WriteBuffer sends the payload of a buffer that NewBuffer, or ReadBuffer of this
// or another connection, has returned. It blocks and fails as Write does. It
// takes the buffer over, also when it fails, and releases it when the payload is
// sent. No copy is made, unless the buffer is another device's or larger than the
// peer's.
func (c *Conn) WriteBuffer(b *Buffer) (int, error) {
	if b.Len() > c.tx.frameMax || !b.Of(c.arena.pool) || !b.AfterHeader() {
		defer b.Release()
		return c.Write(b.Bytes())
	}
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	n := b.Len()
	err := c.writeCheck()
	if err == nil && n > 0 {
		if err = c.flushOpen(); err == nil {
			_, err = c.reserve(1)
		}
	}
	if err != nil || n == 0 {
		b.Release()
		return 0, opError(opWrite, c.local, c.remote, err)
	}
	c.tx.yield(n)
	c.postMu.Lock()
	if err := c.postBlock(b, true); err != nil {
		return 0, opError(opWrite, c.local, c.remote, err)
	}
	c.stats.bytesWritten.Add(uint64(n))
	return n, nil
}

// ReadFrom writes what it reads from r until io.EOF, which is success. It reads
// into registered buffers and sends those, so io.Copy makes no further copy.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	var done int64
	for {
		b, err := c.NewBuffer()
		if err != nil {
			return done, err
		}
		b.Resize(c.tx.frameMax)
		n, rerr := r.Read(b.Bytes())
		b.Resize(max(n, 0))
		if n > 0 {
			n, err = c.writeOwned(b)
			done += int64(n)
		} else {
			b.Release()
		}
		switch {
		case err != nil:
			return done, err
		case rerr == io.EOF:
			return done, nil
		case rerr != nil:
			return done, rerr
		}
	}
}

// writeOwned is WriteBuffer, except that a small buffer joins others.
func (c *Conn) writeOwned(b *Buffer) (int, error) {
	if b.Len() > smallWrite {
		return c.WriteBuffer(b)
	}
	defer b.Release()
	return c.Write(b.Bytes())
}
