package iwarp

import (
	"syscall"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// RDMA READ, both ends of it. The initiator sends a Read Request and completes
// when the last of the Read Response is placed. The responder keeps requests, at
// most IRD of them, in a queue beside the send queue, from which the responses are
// cut. txState.mu guards all of it.

// reads is the state of a queue pair's RDMA READs.
type reads struct {
	ird, ord int

	// Ours.
	msn     uint32       // of the next request, on queue 1
	posted  int          // not completed
	sinks   fifo[sink]   // whose request is cut; at most ord
	waiting int          // those of sinks whose request has gone out
	held    fifo[heldWC] // completions that wait for an RDMA READ before them

	// The peer's.
	answers  fifo[answer]
	answered int  // bytes of the oldest that are cut
	turn     bool // an answer is next, if both queues have something
}

// sink is where the data of an RDMA READ goes.
type sink struct {
	stag uint32
	to   uint64
	mem  []byte
	done int // bytes received
}

// heldWC is a request that is sent. Only an RDMA READ is not complete then.
type heldWC struct {
	wrid           uint64
	signaled, read bool
}

// answer is a Read Response to be sent.
type answer struct {
	wire.ReadRequest
	raw [readRequestLen]byte // as it was received, for a Terminate
}

const readRequestLen = wire.UntaggedHeaderLen + wire.ReadRequestLen

// start gives the queues their size. A queue pair without RDMA READs has none.
func (r *reads) start(ird, ord int) {
	r.ird, r.ord, r.msn = ird, ord, 1
	r.answers.buf = make([]answer, ird)
}

// checkRDMA says what is wrong with a request that is no SEND. Its gather list
// has been checked.
func (q *qp) checkRDMA(wr *verbs.SendWR) error {
	t := &q.tx
	switch wr.Op {
	case verbs.WRRDMAWrite:
		return nil
	case verbs.WRRDMARead:
	default:
		return syscall.EINVAL
	}
	switch {
	case wr.Inline, len(wr.SGL) > 1, t.reads.ord == 0:
		return syscall.EINVAL
	case len(wr.SGL) == 1 && !q.pd.covers(wr.SGL[0], verbs.AccessLocalWrite):
		return syscall.EFAULT
	}
	return nil
}

// noRoom reports whether the send queue is full of requests that wait for an RDMA
// READ. Without one, a request leaves the queue when it is cut.
func (t *txState) noRoom() bool {
	return t.reads.posted > 0 && t.n+t.batch.ndone+t.reads.held.n >= len(t.queue)
}

// setRDMA sets what only an RDMA WRITE or READ has. t.mu is held.
func (q *qp) setRDMA(e *sendWR, wr *verbs.SendWR) {
	e.rkey, e.remote = wr.RKey, wr.RemoteAddr
	if wr.Op != verbs.WRRDMARead {
		return
	}
	e.waits = true
	r := &q.tx.reads
	if r.sinks.buf == nil {
		r.sinks.buf = make([]sink, r.ord)
		r.held.buf = make([]heldWC, len(q.tx.queue))
	}
	r.posted++
}

// putWriteHeader writes the header of the next segment of e, an RDMA WRITE.
func (q *qp) putWriteHeader(b []byte, e *sendWR, size int) {
	at := q.tx.cut.sent
	wire.TaggedHeader{Last: at+size == e.size, Opcode: wire.OpWrite, STag: e.rkey, TO: e.remote + uint64(at)}.Put(b)
}

// mayBegin reports whether the oldest request of the send queue may be cut now.
func (q *qp) mayBegin(e *sendWR) bool {
	t := &q.tx
	switch {
	case t.gated:
		return false
	case t.cut.sent > 0:
		return true
	case e.fence && t.reads.sinks.n > 0:
		return false
	}
	return e.op != verbs.WRRDMARead || !t.reads.sinks.full()
}

// cutRead adds the Read Request of e to the batch.
func (q *qp) cutRead(e *sendWR) {
	t := &q.tx
	r := &t.reads
	s := r.sinks.push()
	if e.size > 0 {
		s.mem = e.sgl[0].Data
		s.stag = e.sgl[0].LKey
		s.to = offsetOf(s.stag, s.mem)
	}
	b := t.batch.take(wire.FPDUHeaderLen + readRequestLen)
	wire.PutFPDUHeader(b, readRequestLen)
	wire.UntaggedHeader{Last: true, Opcode: wire.OpReadRequest, QN: wire.QueueReadRequest, MSN: r.msn}.Put(b[wire.FPDUHeaderLen:])
	wire.ReadRequest{SinkSTag: s.stag, SinkTO: s.to, Size: uint32(e.size), SourceSTag: e.rkey, SourceTO: e.remote}.
		Put(b[wire.FPDUHeaderLen+wire.UntaggedHeaderLen:])
	q.trail(readRequestLen, b, nil)
	r.msn++
	t.cut.sent = e.size
}

// offsetOf returns the tagged offset of memory in a region.
func offsetOf(stag uint32, mem []byte) uint64 {
	m := regions.get(stag)
	if m == nil { // against the rules, it was deregistered
		return 0
	}
	return m.base + addressOf(mem) - addressOf(m.mem)
}

// hold keeps the completion of a request that went out until the RDMA READs
// before it are complete: a queue's requests complete in order.
func (r *reads) hold(d *sent) {
	*r.held.push() = heldWC{d.wrid, d.signaled, d.read}
	if d.read {
		r.waiting++
	}
}

// placeResponse places a segment of a Read Response, which belongs to the oldest
// RDMA READ, and reports whether it completed anything.
func (q *qp) placeResponse(data []byte) (completed bool, err error) {
	h := &q.rx.hdr
	t := &q.tx
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.state != halfOpen:
		return false, nil // it was flushed
	case t.reads.waiting == 0 && len(data) == 0:
		return false, &wire.ProtocolError{Code: wire.CodeRDMAPOpcode, Detail: "Read Response without a request"}
	case t.reads.waiting == 0: // which would have made an STag known to the peer
		return false, refuse(wire.CodeDDPInvalidSTag, h.STag, h.TO, len(data))
	}
	s := t.reads.sinks.front()
	if code := s.check(h, len(data)); code != 0 {
		return false, refuse(code, h.STag, h.TO, len(data))
	}
	s.done += copy(s.mem[s.done:], data)
	return h.Last && q.readDone(), nil
}

// check returns the code for what is wrong with a segment that is to be the
// sink's next, or 0. The RFCs have no code for a length that doesn't match the
// request's; like siw, we take DDP's for a place outside the buffer.
func (s *sink) check(h *wire.Header, size int) wire.Code {
	switch {
	case size > 0 && h.STag != s.stag:
		return wire.CodeDDPInvalidSTag
	case size > 0 && h.TO != s.to+uint64(s.done), size > len(s.mem)-s.done, h.Last && s.done+size < len(s.mem):
		return wire.CodeDDPBaseBounds
	}
	return 0
}

// readDone completes the oldest RDMA READ and what has waited for it, and
// reports whether anybody is told.
func (q *qp) readDone() (told bool) {
	r := &q.tx.reads
	r.sinks.pop()
	r.waiting--
	r.posted--
	for first := true; first || r.held.n > 0 && !r.held.front().read; first = false {
		if d := r.held.front(); d.signaled {
			q.cq.push(verbs.WC{WRID: d.wrid, Op: verbs.OpSend}, false)
			told = true
		}
		r.held.pop()
	}
	q.send() // what has waited for it in the send queue
	return told
}

// placeReadRequest checks the header of a Read Request (RFC 5040 section 4.4) and
// returns where its payload goes. Queue 1 has a buffer for each of IRD requests.
func (q *qp) placeReadRequest(size int) ([]byte, error) {
	r, h := &q.rx, &q.rx.hdr
	switch {
	case h.MSN != r.readMSN:
		return nil, mustBe(wire.CodeDDPMSNRange, h.MSN, r.readMSN)
	case h.MO != 0:
		return nil, mustBe(wire.CodeDDPInvalidMO, h.MO, 0)
	case q.answersFull():
		return nil, &wire.ProtocolError{Code: wire.CodeDDPNoBuffer, Detail: "more Read Requests than IRD"}
	case size > wire.ReadRequestLen || !h.Last:
		return nil, &wire.ProtocolError{Code: wire.CodeDDPTooLong, Detail: "Read Request"}
	case size < wire.ReadRequestLen:
		return nil, &wire.ProtocolError{Code: wire.CodeRDMAPUnspecified, Detail: "Read Request cut short"}
	}
	return r.raw[wire.UntaggedHeaderLen:], nil
}

func (q *qp) answersFull() bool {
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	return q.tx.reads.answers.full()
}

// answer queues the response to a Read Request that has been received, if the
// peer may read what it asks for (RFC 5040 section 7.2). A request of no bytes
// names nothing.
func (q *qp) answer() error {
	r := &q.rx
	req, err := wire.ParseReadRequest(r.raw[wire.UntaggedHeaderLen:])
	if err != nil {
		return err
	}
	if req.Size > 0 {
		if refusal := q.readable(&req); refusal != noRefusal {
			return refuse(readCodes[refusal], req.SourceSTag, req.SourceTO, int(req.Size))
		}
	}
	r.readMSN++
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	if q.tx.state != halfOpen {
		return nil
	}
	*q.tx.reads.answers.push() = answer{req, r.raw}
	q.send()
	return nil
}

func (q *qp) readable(req *wire.ReadRequest) refusal {
	return q.pd.remote(req.SourceSTag, req.SourceTO, int(req.Size), verbs.AccessRemoteRead, func([]byte) {})
}

// answerIsNext says which of the two queues the next FPDU is cut from, when there
// are answers. They take turns, a message each.
func (q *qp) answerIsNext() bool {
	t := &q.tx
	switch {
	case t.cut.sent > 0:
		return false
	case t.reads.answered > 0 || t.n == 0 || !q.mayBegin(&t.queue[t.head]):
		return true
	}
	return t.reads.turn
}

// cutAnswer adds the next FPDU of the oldest answer to the batch. It reports
// false if there is no room.
func (q *qp) cutAnswer() bool {
	t := &q.tx
	b, r := &t.batch, &t.reads
	a := r.answers.front()
	left := int(a.Size) - r.answered
	size := min(left, q.maxPayload)
	q.tx.fits -= size
	if size > smallSGE && b.n+3 > maxIovecs {
		return false
	}
	framed := b.framed
	h := b.take(wire.FPDUHeaderLen + wire.TaggedHeaderLen)
	ulpdu := wire.TaggedHeaderLen + size
	wire.PutFPDUHeader(h, ulpdu)
	at := uint64(r.answered)
	wire.TaggedHeader{Last: size == left, Opcode: wire.OpReadResponse, STag: a.SinkSTag, TO: a.SinkTO + at}.Put(h[wire.FPDUHeaderLen:])
	data := b.buffer(size)
	if size > 0 {
		refusal := q.pd.remote(a.SourceSTag, a.SourceTO+at, size, verbs.AccessRemoteRead, func(mem []byte) { copy(data, mem) })
		if refusal != noRefusal {
			b.framed = framed
			q.sourceLost(refusal)
			return false
		}
	}
	if size > smallSGE {
		b.addFrame()
		b.add(data)
	}
	q.trail(ulpdu, h, data)
	if r.answered += size; size == left {
		r.answers.pop()
		r.answered, r.turn = 0, false
	}
	return true
}

// sourceLost ends the connection because memory that is being read by the peer
// was deregistered meanwhile. The receive side's lock comes before ours, so
// somebody else does it.
func (q *qp) sourceLost(refusal refusal) {
	t := &q.tx
	a := *t.reads.answers.front()
	t.reads.answers.clear()
	t.gated = true // nothing more begins
	fault := &wire.ProtocolError{Code: readCodes[refusal], Detail: "deregistered while it was read"}
	q.end.drain.Go(func() {
		q.rx.mu.Lock()
		defer q.rx.mu.Unlock()
		if q.rx.state == halfOpen {
			q.terminate(fault, a.raw[:], readRequestLen)
		}
	})
}

// flushReads completes what is sent and not complete, in error, and forgets the rest.
// These are older than what the send queue holds.
func (q *qp) flushReads() {
	r := &q.tx.reads
	for r.held.n > 0 {
		q.flushSend(r.held.front().wrid, nil)
		r.held.pop()
	}
	r.sinks.clear()
	r.answers.clear()
	r.posted, r.waiting, r.answered = 0, 0, 0
}
