package rdmanet

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/qp"
)

// txState is the send side.
//
// A large write goes out in frames that point at the caller's memory, where the
// provider takes so much inline, or else from blocks that it is copied into. A
// small write goes out at once, unless another did a moment ago: then it is
// copied into the open block, and the flusher, a goroutine that lives only while
// there is an open block, sends that as soon as it gets to run. Until then more
// writes join.
type txState struct {
	direct   bool // the provider takes whole frames inline
	inline   int  // bytes of a frame, header included, that it takes inline
	frameMax int  // payload of a frame: what both the peer and our blocks take

	// Sends are numbered; the number is the work request's id. Conn.mu guards
	// these.
	posted, done uint64       // sends posted, sends completed
	reserved     int          // slots and credits promised to a writer
	blocks       []*qp.Buffer // ring by number: what to free when the send completes
	kept         []*qp.Buffer // free blocks to send from
	spent        []*qp.Buffer // to be released; written with pollMu held too
	err          error        // why writes fail
	finSent      bool         // no more is written
	finPosted    bool         // writeMu
	run          int          // bytes since the writer yielded; writeMu

	mu       sync.Mutex // the open block; taken with postMu held, or alone
	open     *qp.Buffer // its credit and slot are reserved
	flushing bool
	flushers sync.WaitGroup
	lastPost time.Time // of a small write

	answers    atomic.Bool // something was read since the last small write
	asked      atomic.Bool // something was sent since the last wait in a read
	creditLate atomic.Bool // a CREDIT frame found the send queue full
	isOpen     atomic.Bool // open != nil
	delay      atomic.Bool // SetNoDelay(false)
	socketFull atomic.Bool // a software provider had no room; cleared when a wait ends

	releaseFn func(*qp.Buffer)
	flushFn   func()

	frames frames    // postMu
	one    [1][]byte // the argument of Write; writeMu
}

// frames is room for the work requests of one PostSend.
type frames struct {
	wrs  [maxFrames]qp.SendWR
	sgl  [maxFrames][sendSGE]qp.SGE
	hdrs [maxFrames][headerLen]byte
	size [maxFrames]int
}

const (
	maxFrames = 8  // posted at a time
	sendSGE   = 16 // gather entries of a frame

	// smallWrite is up to what size a write may be copied to join others.
	smallWrite = 4 << 10
	// closely is how soon after another a small write has to come for that.
	closely = 20 * time.Microsecond
)

func (c *Conn) initSends() error {
	t := &c.tx
	t.releaseFn = c.blockReleased
	t.inline = c.qp.Cap().MaxInline
	t.direct = t.inline >= headerLen+maxBufferSize
	t.blocks = make([]*qp.Buffer, c.cfg.sends())
	for i := range t.frames.wrs {
		t.frames.wrs[i].Solicited = true
	}
	t.kept = make([]*qp.Buffer, 0, c.cfg.SendDepth)
	for !t.direct && len(t.kept) < cap(t.kept) {
		b, err := c.arena.pool.Get()
		if err != nil {
			return err
		}
		b.SetOwner(t.releaseFn)
		t.kept = append(t.kept, b)
	}
	return nil
}

// Write sends p and returns when the last of it is on its way, not when it has
// arrived. It blocks while the peer has no room (it has not read what was sent
// before) or the send queue is full. p is the caller's again on return. After
// the peer's Close, or CloseWrite here, it fails with EPIPE.
func (c *Conn) Write(p []byte) (int, error) {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	c.tx.one[0] = p
	n, err := c.write(c.tx.one[:])
	c.tx.one[0] = nil
	return int(n), err
}

// WriteBuffers writes the contents of v as one Write would, without putting them
// together in memory, and consumes what it has written from v, as
// net.Buffers.WriteTo does.
func (c *Conn) WriteBuffers(v *net.Buffers) (int64, error) {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	bufs := *v
	n, err := c.write(bufs)
	consume(v, n)
	return n, err
}

func consume(v *net.Buffers, n int64) {
	for len(*v) > 0 && n >= int64(len((*v)[0])) {
		n -= int64(len((*v)[0]))
		(*v)[0] = nil
		*v = (*v)[1:]
	}
	if n > 0 {
		(*v)[0] = (*v)[0][n:]
	}
}

// write sends bufs. writeMu is held.
func (c *Conn) write(bufs [][]byte) (int64, error) {
	v := vector{bufs: bufs}
	for _, b := range bufs {
		v.left += len(b)
	}
	total := v.left
	err := c.writeCheck()
	for err == nil && v.left > 0 {
		if total <= min(smallWrite, c.tx.frameMax) {
			err = c.writeSmall(&v)
		} else {
			err = c.writeLarge(&v)
		}
	}
	n := total - v.left
	c.stats.bytesWritten.Add(uint64(n))
	return int64(n), opError(opWrite, c.local, c.remote, err)
}

// writeCheck returns why a write can't begin.
func (c *Conn) writeCheck() error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	if c.wait.write.deadline.expired() {
		return os.ErrDeadlineExceeded
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writeEnd()
}

// writeEnd returns why nothing can be written any more. c.mu is held.
func (c *Conn) writeEnd() error {
	if c.tx.err == nil && c.tx.finSent {
		return syscall.EPIPE
	}
	return c.tx.err
}

// vector is what is left of a gather list.
type vector struct {
	bufs [][]byte
	off  int // in bufs[0]
	left int
}

// next returns up to n bytes, and whether there were any.
func (v *vector) next(n int) []byte {
	for {
		b := v.bufs[0][v.off:]
		if len(b) == 0 {
			v.bufs, v.off = v.bufs[1:], 0
			continue
		}
		b = b[:min(len(b), n)]
		v.off += len(b)
		v.left -= len(b)
		return b
	}
}

// writeSmall sends a write that fits into one frame, or adds it to the open
// block.
func (c *Conn) writeSmall(v *vector) error {
	t := &c.tx
	if t.isOpen.Load() {
		if c.join(v) {
			return nil
		}
		if err := c.flushOpen(); err != nil {
			return err
		}
	}
	if _, err := c.reserve(1); err != nil {
		return err
	}
	lone := c.isLone()
	if t.direct && lone {
		return c.postVector(v, 1)
	}
	b, err := c.takeBlock()
	if err != nil {
		c.unreserve(1)
		return err
	}
	if lone {
		begun := *v
		fill(b, v)
		c.postMu.Lock()
		err := c.postBlock(b, true)
		if err != nil {
			*v = begun
		}
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open = b
	t.isOpen.Store(true)
	fill(b, v)
	c.startFlusher()
	return nil
}

// isLone reports whether a small write has nothing to wait for: none came shortly
// before, or what it answers came in between.
func (c *Conn) isLone() bool {
	t := &c.tx
	if t.delay.Load() {
		return false
	}
	if t.answers.Swap(false) {
		return true
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	lone := now.Sub(t.lastPost) > closely
	if lone {
		t.lastPost = now
	}
	return lone
}

// join adds v to the open block, if there is one with room.
func (c *Conn) join(v *vector) bool {
	t := &c.tx
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil || t.open.Len()+v.left > t.frameMax {
		return false
	}
	fill(t.open, v)
	c.startFlusher()
	return true
}

// fill copies v to the end of a block, which has room for it.
func fill(b *qp.Buffer, v *vector) {
	at := b.Len()
	b.Resize(at + v.left)
	p := b.Bytes()[at:]
	for v.left > 0 {
		p = p[copy(p, v.next(v.left)):]
	}
}

// startFlusher makes sure that the open block will be sent. t.mu is held.
func (c *Conn) startFlusher() {
	if !c.tx.flushing {
		c.tx.flushing = true
		c.tx.flushers.Add(1)
		go c.tx.flushFn()
	}
}

// flusher sends the open block, and goes on while there is a new one each time.
func (c *Conn) flusher() {
	defer c.tx.flushers.Done()
	for {
		_ = c.flushOpen() // the next write finds the error
		c.tx.mu.Lock()
		if c.tx.open == nil {
			c.tx.flushing = false
			c.tx.mu.Unlock()
			return
		}
		c.tx.mu.Unlock()
	}
}

// flushOpen sends the open block, if there is one.
func (c *Conn) flushOpen() error {
	t := &c.tx
	if !t.isOpen.Load() {
		return nil
	}
	c.postMu.Lock()
	t.mu.Lock()
	b := t.open
	t.open = nil
	t.isOpen.Store(false)
	t.lastPost = time.Now()
	t.mu.Unlock()
	if b == nil {
		c.postMu.Unlock()
		return nil
	}
	return c.postBlock(b, true)
}

// writeLarge sends frames straight from v, after what was written before.
func (c *Conn) writeLarge(v *vector) error {
	if err := c.flushOpen(); err != nil {
		return err
	}
	want := min(maxFrames, (v.left+c.tx.frameMax-1)/c.tx.frameMax)
	n, err := c.reserve(want)
	if err != nil {
		return err
	}
	c.tx.yield(min(v.left, n*c.tx.frameMax))
	if !c.tx.direct {
		return c.postCopies(v, n)
	}
	return c.postVector(v, n)
}

// postVector sends up to n frames, whose credits and slots are reserved, from
// the caller's memory.
func (c *Conn) postVector(v *vector, n int) error {
	c.postMu.Lock()
	f := &c.tx.frames
	begun := *v
	frames := 0
	for ; frames < n && v.left > 0; frames++ {
		c.gather(frames, v)
	}
	if frames < n { // a long gather list took fewer
		c.unreserve(n - frames)
	}
	c.tx.socketFull.Store(true) // before it is: the news of room may come at once
	taken, err := c.post(f.wrs[:frames], nil)
	for i := range f.wrs[:frames] {
		clear(f.wrs[i].SGL)
	}
	if taken < frames { // go back to the first frame that was not taken
		*v = begun
		for _, size := range f.size[:taken] {
			for size > 0 {
				size -= len(v.next(size))
			}
		}
	}
	c.postMu.Unlock()
	if errors.Is(err, syscall.EAGAIN) { // wait until a software provider's socket has room again
		return c.waitFor(&c.wait.write)
	}
	c.tx.socketFull.Store(false)
	return err
}

// gather makes frame number i from the front of v. postMu is held.
func (c *Conn) gather(i int, v *vector) {
	f := &c.tx.frames
	sgl := append(f.sgl[i][:0], qp.SGE{Data: f.hdrs[i][:]})
	size := 0
	for v.left > 0 && size < c.tx.frameMax && len(sgl) < sendSGE {
		b := v.next(c.tx.frameMax - size)
		size += len(b)
		sgl = append(sgl, qp.SGE{Data: b})
	}
	f.size[i] = size
	header{typ: frameData, length: size}.put(f.hdrs[i][:])
	f.wrs[i].SGL, f.wrs[i].Inline = sgl, true
}

// postCopies sends n frames, whose credits and slots are reserved, from blocks
// that v is copied into. The last one wakes the peer.
func (c *Conn) postCopies(v *vector, n int) error {
	for i := range n {
		b, err := c.takeBlock()
		if err != nil {
			c.unreserve(n - i)
			return err
		}
		begun := *v
		b.Resize(min(c.tx.frameMax, v.left))
		for p := b.Bytes(); len(p) > 0; {
			p = p[copy(p, v.next(len(p))):]
		}
		c.postMu.Lock()
		if err := c.postBlock(b, i == n-1); err != nil {
			*v = begun
			c.unreserve(n - i - 1)
			return err
		}
	}
	return nil
}

// CloseWrite says that no more will be written: the peer reads what came before,
// and then io.EOF. Reading goes on. It does not wait for the peer; a Write in
// progress fails with EPIPE.
func (c *Conn) CloseWrite() error {
	c.mu.Lock()
	err := c.writeEnd()
	c.tx.finSent = true
	c.mu.Unlock()
	if c.closed.Load() {
		err = net.ErrClosed
	}
	if err == nil {
		c.wakeup(&c.wait.write)
		c.writeMu.Lock()
		defer c.writeMu.Unlock()
		if c.closed.Load() { // Close sends FIN
			err = net.ErrClosed
		} else if err = c.flushOpen(); err == nil {
			err = c.sendFin()
		}
	}
	return opError(opClose, c.local, c.remote, err)
}
