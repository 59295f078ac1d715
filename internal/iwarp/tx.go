package iwarp

import (
	"sync"

	pool "github.com/libp2p/go-buffer-pool"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// txState writes FPDUs. Whoever posts also writes, many FPDUs in one writev
// from where their bytes lie. Only when the socket is full is what remains of
// unregistered memory copied, and a goroutine, the flusher, takes over until
// the queue is empty again.
type txState struct {
	mu    sync.Mutex
	state half
	err   error // why the socket took no more
	msn   uint32

	queue   []sendWR // ring of what is not yet cut into FPDUs
	head, n int
	cut     cursor // how far queue[head] is
	fits    int    // bytes of payload until qp.maxPayload is looked at again
	batch   batch

	reads  reads
	nudger nudger
	gated  bool // nothing of the queue may begin: the peer is not ready yet, or it is over

	flushing  bool // the flusher writes, and nobody else
	refused   bool // a send was, and somebody may wait for room
	flusher   func()
	flushedFn func(uintptr) bool
}

type sendWR struct {
	wrid              uint64
	sgl               []verbs.SGE // room is reused
	size              int
	signaled, solicit bool
	op                verbs.WROp
	fence, waits      bool   // waits: it may have to, for an RDMA READ
	rkey              uint32 // the peer's memory
	remote            uint64
	inline            bool   // sgl is memory we may only use until PostSend returns
	own               []byte // pool buffer behind sgl
}

// cursor is a place in a message.
type cursor struct {
	sge, off int // in the gather list
	sent     int // bytes before it
}

// batch is what the next writev writes. Iovecs alternate between slices of
// frame, which holds headers and trailers, and slices of the message.
type batch struct {
	iov     [maxIovecs][]byte
	at, n   int // iov[at:n] is unsent
	unsent  int
	frame   [maxFPDUs * frameLen]byte
	framed  int            // bytes of frame in use
	from    int            // frame[from:framed] is in no iovec yet
	done    [maxFPDUs]sent // messages that end in this batch
	ndone   int
	inline  bool             // some of it is memory we may only use until PostSend returns
	scratch []byte           // pool buffer behind it
	lent    [maxFPDUs][]byte // pool buffers with what is read by the peer
	nlent   int
}

// sent is a message that is done when no more than unsent bytes are left.
type sent struct {
	unsent   int
	wrid     uint64
	signaled bool
	read     bool // an RDMA READ: its request
	own      []byte
}

const (
	maxIovecs = 8 // what unix.Writev takes without allocating
	maxFPDUs  = 8
	frameLen  = wire.FPDUHeaderLen + wire.UntaggedHeaderLen + smallSGE + wire.MaxTrailerLen
	smallSGE  = 256  // a gather entry up to this size is copied next to the header
	smallSend = 4096 // an inline message up to this size is taken even if the socket is full
)

// fitSegments makes FPDUs as long as fit into one of TCP's segments, whoever the
// peer is: RFC 5044 has the sender do so, for adapters that place a segment when it
// comes. A receiver must cope with others all the same, since TCP may cut its
// stream anew. siw does: it takes an FPDU of any length, however it is cut. Nothing
// in the set-up of a connection says that a peer would like longer ones. t.mu is
// held.
//
// The segment size is the path's, which may change. So it is asked for again now
// and then: a system call for each message would be too much.
func (q *qp) fitSegments() {
	q.maxPayload = max(wire.ULPDUFor(q.link.mss())-wire.UntaggedHeaderLen, minPayload)
	q.tx.fits = fitsFor
}

const (
	// fitsFor is how many bytes of payload go by a segment size.
	fitsFor = 64 << 10
	// minPayload is for sockets that report a senseless segment size: TCP's
	// default of 536 bytes (RFC 9293 section 3.7.1), less our headers.
	minPayload = 504
)

// PostSend takes requests until the queue is full. EAGAIN says that the socket
// is: a large inline request must wait for the CQ's next event.
func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	t := &q.tx
	t.mu.Lock()
	defer t.mu.Unlock()
	n, err := 0, error(nil)
	for n < len(wrs) && err == nil {
		if err = q.enqueue(&wrs[n]); err == nil {
			n++
		}
	}
	q.send()
	if back := q.disown(); back > 0 {
		n, err = n-back, unix.EAGAIN
	}
	t.refused = t.flushing && (t.refused || err != nil)
	return n, err
}

// enqueue adds one request to the queue. t.mu is held, as below.
func (q *qp) enqueue(wr *verbs.SendWR) error {
	t := &q.tx
	switch {
	case t.state == halfIdle:
		return unix.EINVAL
	case t.state == halfDead:
		q.flushSend(wr.WRID, nil)
		return nil
	case t.n == len(t.queue) || t.noRoom():
		return unix.ENOMEM
	case len(wr.SGL) > q.cap.SendSGE:
		return unix.EINVAL
	}
	size := 0
	for i := range wr.SGL {
		if !wr.Inline && !q.pd.covers(wr.SGL[i], 0) {
			return unix.EFAULT
		}
		size += len(wr.SGL[i].Data)
	}
	if size > maxMessage {
		return unix.EINVAL
	}
	if wr.Op != verbs.WRSend {
		if err := q.checkRDMA(wr); err != nil {
			return err
		}
	}
	e := &t.queue[(t.head+t.n)%len(t.queue)]
	e.wrid, e.size, e.signaled, e.solicit, e.inline = wr.WRID, size, wr.Signaled, wr.Solicited, wr.Inline
	e.op, e.fence, e.waits = wr.Op, wr.Fence, wr.Fence
	if wr.Op != verbs.WRSend {
		q.setRDMA(e, wr)
	}
	e.sgl = append(e.sgl[:0], wr.SGL...)
	t.n++
	return nil
}

// send writes until the queue is empty, or waits for the peer, or the socket is
// full.
func (q *qp) send() {
	t := &q.tx
	for !t.flushing && t.state == halfOpen && (t.batch.unsent > 0 || q.fill()) {
		if err := q.write(); err == unix.EAGAIN {
			t.flushing = true
			go t.flusher()
		} else if err != nil {
			q.sendFailed(err)
		}
	}
}

// write hands the batch to the socket, once, and completes what went out.
func (q *qp) write() error {
	b := &q.tx.batch
	n, err := q.link.writev(b.iov[b.at:b.n])
	if err != nil {
		return err
	}
	b.advance(n)
	i := 0
	for ; i < b.ndone && b.unsent <= b.done[i].unsent; i++ {
		d := &b.done[i]
		pool.Put(d.own)
		if d.read || q.tx.reads.held.n > 0 {
			q.tx.reads.hold(d)
		} else if d.signaled {
			q.cq.push(verbs.WC{WRID: d.wrid, Op: verbs.OpSend}, false)
		}
	}
	b.ndone = copy(b.done[:], b.done[i:b.ndone])
	if b.unsent > 0 {
		return unix.EAGAIN
	}
	b.reset()
	return nil
}

// advance notes that n more bytes are written.
func (b *batch) advance(n int) {
	b.unsent -= n
	for n > 0 {
		k := min(n, len(b.iov[b.at]))
		n -= k
		b.iov[b.at] = b.iov[b.at][k:]
		if len(b.iov[b.at]) == 0 {
			b.iov[b.at] = nil
			b.at++
		}
	}
}

func (b *batch) reset() {
	pool.Put(b.scratch)
	for ; b.nlent > 0; b.nlent-- {
		pool.Put(b.lent[b.nlent-1])
	}
	clear(b.iov[:])
	b.at, b.n, b.unsent, b.framed, b.from, b.ndone, b.inline, b.scratch = 0, 0, 0, 0, 0, 0, false, nil
}

// fill cuts as many FPDUs from the queue, and of answers to the peer's RDMA
// READs, as may be sent now and the batch has room for.
func (q *qp) fill() bool {
	t := &q.tx
	b := &t.batch
	b.reset()
	if t.fits <= 0 {
		q.fitSegments()
	}
	for b.ndone < maxFPDUs && b.framed+frameLen <= len(b.frame) {
		if t.reads.answers.n > 0 && q.answerIsNext() {
			if !q.cutAnswer() {
				break
			}
			continue
		}
		if t.n == 0 {
			break
		}
		e := &t.queue[t.head]
		if (t.gated || e.waits) && !q.mayBegin(e) {
			break
		}
		if e.op == verbs.WRRDMARead {
			q.cutRead(e)
		} else {
			size, iovecs := q.segment(e)
			if b.n+iovecs+1 > maxIovecs { // the last is for the frame at the end
				break
			}
			q.cutFPDU(e, size)
		}
		if t.cut.sent == e.size {
			b.done[b.ndone] = sent{unsent: b.unsent + b.framed - b.from, wrid: e.wrid, signaled: e.signaled, read: e.op == verbs.WRRDMARead, own: e.own}
			b.ndone++
			if e.op == verbs.WRSend {
				t.msn++
			}
			q.dequeue()
		}
	}
	b.addFrame()
	for i := range b.ndone { // from bytes before to bytes after the message's end
		b.done[i].unsent = b.unsent - b.done[i].unsent
	}
	return b.unsent > 0
}

// segment returns the size of the next FPDU's payload and how many iovecs it
// takes. Entries at its front that fit into the frame take none; a gather list
// of very many entries makes the FPDU shorter.
func (q *qp) segment(e *sendWR) (size, iovecs int) {
	off := q.tx.cut.off
	for i := q.tx.cut.sge; i < len(e.sgl) && size < q.maxPayload; i++ {
		n := min(len(e.sgl[i].Data)-off, q.maxPayload-size)
		off = 0
		if size+n > smallSGE && n > 0 {
			take := 1
			if iovecs == 0 {
				take = 2 // the frame so far goes first
			}
			if iovecs+take >= maxIovecs {
				break
			}
			iovecs += take
		}
		size += n
	}
	return size, iovecs
}

// cutFPDU adds the next FPDU of e to the batch.
func (q *qp) cutFPDU(e *sendWR, size int) {
	t := &q.tx
	b := &t.batch
	ulpdu := wire.UntaggedHeaderLen + size
	h := b.frame[b.framed : b.framed+wire.FPDUHeaderLen+wire.UntaggedHeaderLen]
	if e.op == verbs.WRRDMAWrite {
		ulpdu = wire.TaggedHeaderLen + size
		h = h[:wire.FPDUHeaderLen+wire.TaggedHeaderLen]
		q.putWriteHeader(h[wire.FPDUHeaderLen:], e, size)
	} else {
		op := wire.OpSend
		if e.solicit {
			op = wire.OpSendSolicited
		}
		wire.UntaggedHeader{
			Last: t.cut.sent+size == e.size, Opcode: op, QN: wire.QueueSend, MSN: t.msn, MO: uint32(t.cut.sent),
		}.Put(h[wire.FPDUHeaderLen:])
	}
	wire.PutFPDUHeader(h, ulpdu)
	b.framed += len(h)
	sum := uint32(0)
	if q.crc {
		sum = wire.UpdateCRC(0, h)
	}
	for done := 0; done < size; {
		data := e.sgl[t.cut.sge].Data[t.cut.off:]
		data = data[:min(len(data), size-done)]
		done += len(data)
		t.cut.off += len(data)
		if t.cut.off == len(e.sgl[t.cut.sge].Data) {
			t.cut.sge, t.cut.off = t.cut.sge+1, 0
		}
		if q.crc {
			sum = wire.UpdateCRC(sum, data)
		}
		if done <= smallSGE {
			b.framed += copy(b.frame[b.framed:], data)
			continue
		}
		b.addFrame()
		b.add(data)
		b.inline = b.inline || e.inline
	}
	t.cut.sent += size
	t.fits -= size
	b.framed += wire.PutTrailer(b.frame[b.framed:], ulpdu, q.crc, sum)
}

// take returns the next n bytes of the frame.
func (b *batch) take(n int) []byte {
	b.framed += n
	return b.frame[b.framed-n : b.framed]
}

// buffer returns memory for a payload, of the frame if it is small. What is not
// must be added.
func (b *batch) buffer(size int) []byte {
	if size <= smallSGE {
		return b.take(size)
	}
	b.lent[b.nlent] = pool.Get(size)
	b.nlent++
	return b.lent[b.nlent-1]
}

// trail adds the trailer of an FPDU with that header and payload.
func (q *qp) trail(ulpdu int, header, payload []byte) {
	b := &q.tx.batch
	sum := uint32(0)
	if q.crc {
		sum = wire.UpdateCRC(wire.UpdateCRC(0, header), payload)
	}
	b.framed += wire.PutTrailer(b.frame[b.framed:], ulpdu, q.crc, sum)
}

func (b *batch) add(p []byte) {
	if len(p) > 0 {
		b.iov[b.n] = p
		b.n++
		b.unsent += len(p)
	}
}

// addFrame adds the frame bytes that no iovec covers yet.
func (b *batch) addFrame() {
	b.add(b.frame[b.from:b.framed])
	b.from = b.framed
}

// dequeue removes the oldest request, which is wholly cut.
func (q *qp) dequeue() {
	t := &q.tx
	e := &t.queue[t.head]
	clear(e.sgl)
	e.own = nil
	t.head = (t.head + 1) % len(t.queue)
	t.n--
	t.cut = cursor{}
	t.reads.turn = true
}

// disown makes sure that nothing unsent is memory of PostSend's caller: it
// copies what has begun to go out and small messages, and gives large messages
// back. It returns how many it gave back, always the last ones. While the queue
// waits for the peer and not for the socket, nobody would say when to come again:
// then it copies all.
func (q *qp) disown() (back int) {
	t := &q.tx
	if !t.flushing && t.n == 0 {
		return 0
	}
	if t.batch.inline {
		t.batch.copyOut()
	}
	for k := range t.n {
		e := &t.queue[(t.head+k)%len(t.queue)]
		if !e.inline {
			continue
		}
		begun := k == 0 && t.cut.sent > 0
		if !begun && e.size > smallSend && t.flushing {
			back = t.n - k
			t.n = k
			return back
		}
		t.own(e, begun)
	}
	return 0
}

// own copies what is still to be cut of e into a buffer of ours.
func (t *txState) own(e *sendWR, begun bool) {
	from := cursor{}
	if begun {
		from = t.cut
		t.cut.sge, t.cut.off = 0, 0
	}
	e.own = pool.Get(e.size - from.sent)
	n := 0
	for i := from.sge; i < len(e.sgl); i++ {
		n += copy(e.own[n:], e.sgl[i].Data[from.off:])
		from.off = 0
	}
	e.sgl = append(e.sgl[:0], verbs.SGE{Data: e.own})
	e.inline = false
}

// copyOut moves the batch's unsent bytes into a buffer of ours.
func (b *batch) copyOut() {
	buf := pool.Get(b.unsent)
	n := 0
	for _, p := range b.iov[b.at:b.n] {
		n += copy(buf[n:], p)
	}
	clear(b.iov[:])
	b.iov[0] = buf
	b.at, b.n, b.scratch, b.inline = 0, 1, buf, false
}

// flush is the flusher: it writes whenever the socket has room, until the queue
// is empty or the connection ends.
func (q *qp) flush() {
	if err := q.link.awaitWrite(q.tx.flushedFn); err != nil {
		q.tx.mu.Lock()
		defer q.tx.mu.Unlock()
		q.sendFailed(err)
		q.stopFlushing()
	}
}

// flushed writes what the socket takes and reports whether that was the end.
func (q *qp) flushed(uintptr) bool {
	t := &q.tx
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.state == halfOpen && (t.batch.unsent > 0 || q.fill()) {
		if err := q.write(); err == unix.EAGAIN {
			return false
		} else if err != nil {
			q.sendFailed(err)
		}
	}
	q.stopFlushing()
	return true
}

// stopFlushing gives the socket back to whoever posts. It happens under the same
// lock as finding the queue empty, so that no send is left behind.
func (q *qp) stopFlushing() {
	t := &q.tx
	t.flushing = false
	if t.refused {
		t.refused = false
		q.cq.hasRoom()
	}
}

// sendFailed ends the send side because of the socket. The receive side finds
// out by itself.
func (q *qp) sendFailed(err error) {
	t := &q.tx
	if t.state != halfOpen {
		return
	}
	if err == unix.EPIPE { // a reset after the peer's FIN
		err = unix.ECONNRESET
	}
	t.err = err
	q.flushSends()
}

// flushSends ends the send side: each request not wholly sent completes, in
// error.
func (q *qp) flushSends() {
	t := &q.tx
	t.state = halfDead
	t.nudger.stop()
	q.flushReads()
	b := &t.batch
	for i := range b.ndone {
		q.flushSend(b.done[i].wrid, b.done[i].own)
	}
	b.reset()
	for t.n > 0 {
		e := &t.queue[t.head]
		q.flushSend(e.wrid, e.own)
		q.dequeue()
	}
}

func (q *qp) flushSend(wrid uint64, own []byte) {
	pool.Put(own)
	q.cq.push(verbs.WC{WRID: wrid, Op: verbs.OpSend, Status: verbs.StatusWRFlushErr}, false)
}
