package iwarp

import (
	"errors"
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
	err   error // what a Terminate from the peer said

	posted     []recvWR // ring
	head, n    int
	staging    []byte // scratch, staging[lo:hi] is unparsed
	lo, hi     int
	msn        uint32 // of the message under way
	off        int    // bytes placed of it
	placing    bool   // it has taken the receive at head
	term       []byte // of a Terminate under way
	phase      phase
	hdr        wire.Header
	ulpdu      int    // length of the FPDU's payload and headers
	left       int    // payload bytes still to come
	dst        []byte // where they go
	bulk       bool   // the last FPDU was large: the next probably is
	sum        uint32 // running CRC
	first      [wire.UntaggedHeaderLen]byte
	drained    bool // the last read returned less than asked for
	iov        [2][]byte
	directRead int // bytes read past the staging buffer, for tests
}

type recvWR struct {
	wrid uint64
	buf  []byte
}

type phase uint8

const (
	phaseHeader phase = iota
	phasePayload
	phaseTrailer
)

const (
	stagingSize = 4096
	bulkSize    = 2048 // payloads from here on are worth a read of their own
)

var errAgain = errors.New("socket is empty")

func (q *qp) PostRecv(wrs []verbs.RecvWR) (int, error) {
	r := &q.rx
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, wr := range wrs {
		switch {
		case r.state == halfDead:
			q.cq.push(verbs.WC{WRID: wr.WRID, Op: verbs.OpRecv, Status: verbs.StatusWRFlushErr}, false)
			continue
		case r.n == len(r.posted):
			return i, unix.ENOMEM
		case !q.pd.covers(wr.SGE):
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

// progress reads the socket until it has completed limit receives or the socket
// is empty.
func (q *qp) progress(limit int, short shortRead) {
	r := &q.rx
	r.mu.Lock()
	defer r.mu.Unlock()
	for done := 0; done < limit && r.state == halfOpen; {
		completed, err := q.step()
		if completed {
			done++
		}
		switch {
		case err == nil:
		case err != errAgain:
			q.rxFailed(err)
			return
		case r.drained && (short == shortIsNothing || short == shortIsEmptyIfDone && done == 0):
			r.drained = false
		default:
			r.drained = false
			return
		}
	}
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
	default:
		return q.trailer()
	}
}

// need makes n unparsed bytes available in the staging buffer.
func (q *qp) need(n int) error {
	r := &q.rx
	for r.hi-r.lo < n {
		if r.drained {
			return errAgain
		}
		if r.staging == nil {
			r.staging = pool.Get(stagingSize)
		}
		copy(r.staging, r.staging[r.lo:r.hi])
		r.lo, r.hi = 0, r.hi-r.lo
		got, err := retry(func() (int, error) { return unix.Read(q.fd, r.staging[r.hi:]) })
		if err := readResult(got, err); err != nil {
			return err
		}
		r.hi += got
		r.drained = r.hi < len(r.staging)
	}
	return nil
}

func readResult(n int, err error) error {
	switch {
	case err == unix.EAGAIN:
		return errAgain
	case err != nil:
		return err
	case n == 0:
		return io.EOF
	}
	return nil
}

// header parses the FPDU's length and its DDP and RDMAP header, and finds out
// where the payload goes.
func (q *qp) header() error {
	r := &q.rx
	if err := q.need(wire.FPDUHeaderLen); err != nil {
		return err
	}
	ulpdu := wire.FPDUHeader(r.staging[r.lo:])
	n := min(ulpdu, wire.UntaggedHeaderLen)
	if err := q.need(wire.FPDUHeaderLen + n); err != nil {
		return err
	}
	b := r.staging[r.lo : r.lo+wire.FPDUHeaderLen+n]
	r.ulpdu = ulpdu
	copy(r.first[:], b[wire.FPDUHeaderLen:])
	hdr, err := wire.ParseHeader(b[wire.FPDUHeaderLen:])
	if err != nil {
		return err
	}
	r.hdr, r.left = hdr, ulpdu-hdr.Len()
	r.bulk = r.left >= bulkSize
	if q.crc {
		r.sum = wire.UpdateCRC(0, b[:wire.FPDUHeaderLen+hdr.Len()])
	}
	r.lo += wire.FPDUHeaderLen + hdr.Len()
	r.phase = phasePayload
	return q.place()
}

// place checks the segment against what is expected and sets where it goes.
func (q *qp) place() error {
	r, h := &q.rx, &q.rx.hdr
	switch {
	case h.Tagged:
		// No STag is ever advertised to a peer.
		return &wire.ProtocolError{Code: wire.CodeDDPInvalidSTag}
	case h.Opcode == wire.OpReadRequest:
		return &wire.ProtocolError{Code: wire.CodeRDMAPInvalidSTag}
	case h.Opcode == wire.OpTerminate:
		if h.MSN != 1 || h.MO != 0 || !h.Last || r.left > wire.MaxTerminateLen {
			return &wire.ProtocolError{Code: wire.CodeDDPTooLong, Detail: "Terminate"}
		}
		r.term = make([]byte, r.left)
		r.dst = r.term
		return nil
	case h.Opcode.Invalidates():
		return &wire.ProtocolError{Code: wire.CodeRDMAPCannotInvalidate}
	case h.MSN != r.msn:
		return &wire.ProtocolError{Code: wire.CodeDDPMSNRange}
	case int64(h.MO) != int64(r.off):
		return &wire.ProtocolError{Code: wire.CodeDDPInvalidMO}
	case r.n == 0:
		return &wire.ProtocolError{Code: wire.CodeDDPNoBuffer}
	}
	buf := r.posted[r.head].buf
	if r.left > len(buf)-r.off {
		return &wire.ProtocolError{Code: wire.CodeDDPTooLong}
	}
	r.placing = true
	r.dst = buf[r.off : r.off+r.left]
	return nil
}

// payload moves payload bytes to their place, directly when they are many.
func (q *qp) payload() error {
	r := &q.rx
	if n := copy(r.dst, r.staging[r.lo:r.hi]); n > 0 {
		r.lo += n
		r.placed(n)
	}
	if r.left == 0 {
		r.phase = phaseTrailer
		return nil
	}
	if r.drained {
		return errAgain
	}
	if r.left < bulkSize {
		return q.need(min(r.left, stagingSize))
	}
	// The read ends with this FPDU's trailer and the next one's header, so that
	// the next payload can be read into its place too.
	r.iov[0] = r.dst
	r.lo, r.hi = 0, 0
	r.iov[1] = r.staging[:wire.TrailerLen(r.ulpdu)+wire.FPDUHeaderLen+wire.UntaggedHeaderLen]
	got, err := retry(func() (int, error) { return unix.Readv(q.fd, r.iov[:]) })
	if err := readResult(got, err); err != nil {
		return err
	}
	r.drained = got < r.left+len(r.iov[1])
	direct := min(got, r.left)
	r.directRead += direct
	r.hi = got - direct
	r.placed(direct)
	return nil
}

// placed notes that the next n payload bytes are in their place.
func (r *rxState) placed(n int) {
	r.dst = r.dst[n:]
	r.left -= n
}

// trailer checks the CRC and completes the message if this was its end.
func (q *qp) trailer() (completed bool, err error) {
	r := &q.rx
	n := wire.TrailerLen(r.ulpdu)
	if err := q.need(n); err != nil {
		return false, err
	}
	size := r.ulpdu - r.hdr.Len()
	if q.crc {
		body := r.term
		if r.hdr.Opcode != wire.OpTerminate {
			body = r.posted[r.head].buf[r.off : r.off+size]
		}
		if err := wire.CheckCRC(wire.UpdateCRC(r.sum, body), r.staging[r.lo:r.lo+n]); err != nil {
			return false, err
		}
	}
	r.lo += n
	r.phase = phaseHeader
	if r.hdr.Opcode == wire.OpTerminate {
		t, _ := wire.ParseTerminate(r.term)
		return false, &wire.TerminateError{Remote: true, Terminate: t}
	}
	r.off += size
	if !r.hdr.Last {
		return false, nil
	}
	wr := r.posted[r.head]
	q.takeRecv()
	q.cq.push(verbs.WC{WRID: wr.wrid, Op: verbs.OpRecv, ByteLen: r.off}, true)
	r.msn++
	r.off, r.placing = 0, false
	return true, nil
}

// takeRecv removes the oldest posted receive.
func (q *qp) takeRecv() {
	r := &q.rx
	r.posted[r.head].buf = nil
	r.head = (r.head + 1) % len(r.posted)
	r.n--
}

// flushRecvs ends the receive side: each posted receive completes, in error.
// r.mu is held.
func (q *qp) flushRecvs() {
	r := &q.rx
	r.state = halfDead
	q.open.Store(false)
	for r.n > 0 {
		wrid := r.posted[r.head].wrid
		q.takeRecv()
		q.cq.push(verbs.WC{WRID: wrid, Op: verbs.OpRecv, Status: verbs.StatusWRFlushErr}, false)
	}
	r.dst, r.lo, r.hi = nil, 0, 0
	if r.staging != nil {
		pool.Put(r.staging)
		r.staging = nil
	}
	if q.conn != nil {
		q.conn.SetReadDeadline(longAgo) // a Wait in the netpoller ends
	}
	q.cq.Wake()
}
