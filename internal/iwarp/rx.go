package iwarp

import (
	"errors"
	"fmt"
	"io"
	"sync"

	pool "github.com/libp2p/go-buffer-pool"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// rxState reads FPDUs. Headers, trailers and small payloads come by way of the
// staging buffer, several to a system call; the bulk of a large payload is
// read from the socket straight into the posted receive.
type rxState struct {
	mu    sync.Mutex
	state half

	posted  []recvWR // ring
	head, n int

	// The message under way. It has the receive at head.
	msn   uint32
	off   int  // bytes of it in earlier segments
	begun bool // there were such

	// The FPDU under way.
	phase  phase
	raw    [readRequestLen]byte // the start of its ULPDU: its header, and all of a Read Request
	hdr    wire.Header
	ulpdu  int    // its length
	dst    []byte // where the rest of the payload goes
	sum    uint32 // running CRC
	term   []byte // a Terminate's payload
	staged []byte // a tagged segment's payload, a pool buffer
	fault  error  // what is wrong with it, if its CRC is right
	rest   int    // bytes of its payload that are still to come for that

	readMSN  uint32 // of the next Read Request
	tagBegun bool   // a tagged message is under way
	awaited  bool   // this is the first FPDU, for which our sends wait
	heard    bool   // something was read

	staging []byte // scratch; staging[lo:hi] is read and not yet parsed
	lo, hi  int
	drained bool // the last read returned less than asked for
	reads   int  // that progress may still make
	iov     [2][]byte
}

type recvWR struct {
	wrid uint64
	buf  []byte
}

type phase uint8

const (
	phaseHeader phase = iota
	phasePayload
	phaseSkip
	phaseTrailer
)

const (
	stagingSize = 4096
	bulkSize    = 2048 // payloads from here on are worth a read of their own
	maxReads    = 256  // of one call of progress: a peer can't keep it for ever
)

var (
	errAgain = errors.New("socket is empty")
	errBusy  = errors.New("enough for now")
)

func (q *qp) PostRecv(wrs []verbs.RecvWR) (int, error) {
	r := &q.rx
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range wrs {
		wr := &wrs[i]
		switch {
		case r.state == halfDead:
			q.cq.push(verbs.WC{WRID: wr.WRID, Op: verbs.OpRecv, Status: verbs.StatusWRFlushErr}, false)
			continue
		case r.n == len(r.posted):
			return i, unix.ENOMEM
		case !q.pd.covers(wr.SGE, verbs.AccessLocalWrite):
			return i, unix.EFAULT
		}
		r.posted[(r.head+r.n)%len(r.posted)] = recvWR{wr.WRID, wr.SGE.Data}
		r.n++
	}
	return len(wrs), nil
}

// A short read usually means that the socket is empty, and saves the next read.
// But an end of file may stand behind it, for which the netpoller, being
// edge-triggered, has woken its waiter already.
type shortRead uint8

const (
	shortIsEmpty       shortRead = iota // somebody will poll again
	shortIsEmptyIfDone                  // unless nothing was received: then the caller parks
	shortIsNothing
)

// progress reads the socket until it has completed limit receives, the socket
// is empty, or it has read for long enough. It returns how many it completed,
// and whether there is nothing left to read.
func (q *qp) progress(limit int, short shortRead) (done int, empty bool) {
	r := &q.rx
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drained, r.reads = false, maxReads
	for done < limit && r.state == halfOpen {
		completed, err := q.step()
		if completed {
			done++
		}
		switch {
		case err == nil:
		case err == errBusy:
			return done, false
		case err != errAgain:
			q.rxFailed(err)
		case r.drained && (short == shortIsNothing || short == shortIsEmptyIfDone && done == 0):
			r.drained = false
		default:
			return done, true
		}
	}
	return done, r.state != halfOpen
}

// step does the next thing there is to do, and reports whether it completed a
// receive. r.mu is held.
func (q *qp) step() (completed bool, err error) {
	r := &q.rx
	switch r.phase {
	case phaseHeader:
		return false, q.header()
	case phasePayload:
		return false, q.payload()
	case phaseSkip:
		return false, q.skip()
	default:
		return q.trailer()
	}
}

// need makes n unparsed bytes available in the staging buffer.
func (q *qp) need(n int) error {
	r := &q.rx
	for r.hi-r.lo < n {
		if r.staging == nil {
			r.staging = pool.Get(stagingSize)
		}
		r.hi = copy(r.staging, r.staging[r.lo:r.hi])
		r.lo = 0
		got, err := q.readInto(len(r.staging)-r.hi, func() (int, error) { return q.link.read(r.staging[r.hi:]) })
		if err != nil {
			return err
		}
		r.hi += got
	}
	return nil
}

// readInto calls read, which has room for size bytes, unless a read would be in
// vain or there were too many.
func (q *qp) readInto(size int, read func() (int, error)) (int, error) {
	r := &q.rx
	switch {
	case r.drained:
		return 0, errAgain
	case r.reads == 0:
		return 0, errBusy
	}
	r.reads--
	n, err := read()
	switch {
	case err == unix.EAGAIN:
		return 0, errAgain
	case err != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	r.drained, r.heard = n < size, true
	return n, nil
}

// header parses the FPDU's length and its DDP and RDMAP header, and finds out
// where the payload goes.
func (q *qp) header() error {
	r := &q.rx
	if err := q.need(wire.FPDUHeaderLen); err != nil {
		return err
	}
	r.ulpdu = wire.FPDUHeader(r.staging[r.lo:])
	n := wire.FPDUHeaderLen + min(r.ulpdu, wire.UntaggedHeaderLen)
	if err := q.need(n); err != nil {
		return err
	}
	b := r.staging[r.lo : r.lo+n]
	copy(r.raw[:], b[wire.FPDUHeaderLen:])
	hdr, err := wire.ParseHeader(b[wire.FPDUHeaderLen:])
	if err != nil {
		return q.faulty(err, n)
	}
	n = wire.FPDUHeaderLen + hdr.Len()
	if q.crc {
		r.sum = wire.UpdateCRC(0, b[:n])
	}
	r.hdr = hdr
	r.lo += n
	r.dst, err = q.place(r.ulpdu - hdr.Len())
	if err != nil {
		return q.faulty(err, 0)
	}
	r.phase = phasePayload
	return nil
}

// faulty takes note of a fault in a header, of which n bytes are not in the
// running CRC yet. With CRCs it counts only if the FPDU's is right: what is
// corrupted on the way must not be taken for the peer's doing.
func (q *qp) faulty(fault error, n int) error {
	r := &q.rx
	if !q.crc {
		return fault
	}
	if n > 0 {
		r.sum = wire.UpdateCRC(0, r.staging[r.lo:r.lo+n])
		r.lo += n
		r.rest = wire.FPDUHeaderLen + r.ulpdu - n
	} else {
		r.rest = r.ulpdu - r.hdr.Len()
	}
	r.fault, r.phase = fault, phaseSkip
	return nil
}

// skip takes the rest of a faulty FPDU's payload into the CRC.
func (q *qp) skip() error {
	r := &q.rx
	for r.rest > 0 {
		if err := q.need(1); err != nil {
			return err
		}
		n := min(r.rest, r.hi-r.lo)
		r.sum = wire.UpdateCRC(r.sum, r.staging[r.lo:r.lo+n])
		r.lo += n
		r.rest -= n
	}
	r.phase = phaseTrailer
	return nil
}

// place checks a segment with size bytes of payload against what is expected,
// and returns where the payload goes.
func (q *qp) place(size int) ([]byte, error) {
	r, h := &q.rx, &q.rx.hdr
	switch {
	case h.Opcode.IsSend():
		return q.placeSend(size)
	case h.Opcode == wire.OpTerminate:
		if h.MSN != 1 || h.MO != 0 || !h.Last || size > wire.MaxTerminateLen {
			return nil, &wire.ProtocolError{Code: wire.CodeDDPTooLong, Detail: "Terminate"}
		}
		r.term = make([]byte, size)
		return r.term, nil
	case h.Opcode == wire.OpReadRequest:
		return q.placeReadRequest(size)
	}
	return q.stage(size), nil
}

// placeSend does so for a Send. TCP keeps segments in order, and DDP sends them
// in order (RFC 5041 section 5.1), so there is only one that can be next.
func (q *qp) placeSend(size int) ([]byte, error) {
	r, h := &q.rx, &q.rx.hdr
	switch {
	case h.Opcode.Invalidates():
		return nil, &wire.ProtocolError{Code: wire.CodeRDMAPCannotInvalidate, Detail: h.Opcode.String()}
	case h.MSN != r.msn:
		return nil, mustBe(wire.CodeDDPMSNRange, h.MSN, r.msn)
	case int64(h.MO) != int64(r.off):
		return nil, mustBe(wire.CodeDDPInvalidMO, h.MO, uint32(r.off))
	case r.n == 0:
		return nil, &wire.ProtocolError{Code: wire.CodeDDPNoBuffer}
	}
	buf := r.posted[r.head].buf
	if size > len(buf)-r.off {
		return nil, &wire.ProtocolError{Code: wire.CodeDDPTooLong, Detail: fmt.Sprintf("%d bytes or more, room for %d", r.off+size, len(buf))}
	}
	return buf[r.off : r.off+size], nil
}

func mustBe(code wire.Code, is, must uint32) error {
	return &wire.ProtocolError{Code: code, Detail: fmt.Sprintf("%d, must be %d", is, must)}
}

// payload moves payload bytes to their place, directly when they are many.
func (q *qp) payload() error {
	r := &q.rx
	n := copy(r.dst, r.staging[r.lo:r.hi])
	r.lo += n
	r.dst = r.dst[n:]
	switch {
	case len(r.dst) == 0:
		r.phase = phaseTrailer
		return nil
	case len(r.dst) < bulkSize:
		return q.need(len(r.dst))
	}
	return q.readBulk()
}

// readBulk reads payload into its place. The read goes on for this FPDU's
// trailer and the next one's header, so that the next payload can be read into
// its place too. The staging buffer is empty.
func (q *qp) readBulk() error {
	r := &q.rx
	r.lo, r.hi = 0, 0
	r.iov[0] = r.dst
	r.iov[1] = r.staging[:wire.TrailerLen(r.ulpdu)+wire.FPDUHeaderLen+wire.UntaggedHeaderLen]
	got, err := q.readInto(len(r.iov[0])+len(r.iov[1]), func() (int, error) { return q.link.readv(r.iov[:]) })
	if err != nil {
		return err
	}
	direct := min(got, len(r.dst))
	r.dst = r.dst[direct:]
	r.hi = got - direct
	return nil
}

// trailer checks the CRC, acts on the segment, and completes the message if this
// was its end.
func (q *qp) trailer() (completed bool, err error) {
	r := &q.rx
	n := wire.TrailerLen(r.ulpdu)
	if err := q.need(n); err != nil {
		return false, err
	}
	if q.crc {
		if err := wire.CheckCRC(wire.UpdateCRC(r.sum, q.placed()), r.staging[r.lo:r.lo+n]); err != nil {
			return false, err
		}
	}
	r.lo += n
	if r.fault != nil {
		return false, r.fault
	}
	r.phase = phaseHeader
	if r.awaited {
		q.peerIsReady()
	}
	switch {
	case r.hdr.Tagged:
		return q.tagged()
	case r.hdr.Opcode == wire.OpReadRequest:
		return false, q.answer()
	case r.hdr.Opcode == wire.OpTerminate:
		return false, terminatedBy(r.term)
	}
	r.off += len(q.placed())
	r.begun = !r.hdr.Last
	if r.begun {
		return false, nil
	}
	q.cq.push(verbs.WC{WRID: q.takeRecv(), Op: verbs.OpRecv, ByteLen: r.off}, r.hdr.Opcode.Solicited())
	r.msn++
	r.off = 0
	return true, nil
}

// placed returns the payload of the FPDU under way, once it is all there.
func (q *qp) placed() []byte {
	r := &q.rx
	switch {
	case r.fault != nil:
		return nil
	case r.hdr.Tagged:
		return r.staged
	case r.hdr.Opcode == wire.OpReadRequest:
		return r.raw[wire.UntaggedHeaderLen:]
	case r.hdr.Opcode == wire.OpTerminate:
		return r.term
	}
	return r.posted[r.head].buf[r.off : r.off+r.ulpdu-r.hdr.Len()]
}

// peerIsReady lets the send queue begin, which has waited for the peer's first
// FPDU (RFC 6581 section 9.2).
func (q *qp) peerIsReady() {
	q.rx.awaited = false
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	q.tx.gated = false
	q.send()
}

// takeRecv removes the oldest posted receive and returns its WRID.
func (q *qp) takeRecv() uint64 {
	r := &q.rx
	wr := &r.posted[r.head]
	wr.buf = nil
	r.head = (r.head + 1) % len(r.posted)
	r.n--
	return wr.wrid
}

// flushRecvs ends the receive side: each posted receive completes, in error.
// r.mu is held.
func (q *qp) flushRecvs() {
	r := &q.rx
	r.state = halfDead
	q.open.Store(false)
	for r.n > 0 {
		q.cq.push(verbs.WC{WRID: q.takeRecv(), Op: verbs.OpRecv, Status: verbs.StatusWRFlushErr}, false)
	}
	r.dst, r.iov, r.term = nil, [2][]byte{}, nil
	q.unstage()
	r.lo, r.hi = 0, 0
	if r.staging != nil {
		pool.Put(r.staging)
		r.staging = nil
	}
	q.cq.Wake()
}
