package iwarp

import (
	"fmt"

	pool "github.com/libp2p/go-buffer-pool"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// What a peer does with our memory: RDMA WRITE, and the data of RDMA READ in both
// directions. A segment's payload is first received into scratch memory. When it
// is whole and its CRC right, the STag is looked up and the data copied, with the
// region locked against deregistration. So an STag is judged by what holds at
// that moment, nothing is written for a segment that is refused, and no peer can
// keep a region from being deregistered.
//
// RFC 5041 gives each tagged segment a place of its own, and no error to segments
// that overlap: they are placed as they come.

// refusal is why a peer may not access memory, and noRefusal.
type refusal uint8

const (
	noRefusal refusal = iota
	refusedSTag
	refusedPD
	refusedAccess
	refusedWrap
	refusedBounds
)

// The codes of a refusal, to a tagged segment (RFC 5041 sections 7.1 and 7.2) and
// to an RDMA Read Request (RFC 5040 sections 4.8 and 7.2). DDP knows no access
// rights: RDMAP's error is the only one that names them.
var (
	segmentCodes = [...]wire.Code{
		refusedSTag:   wire.CodeDDPInvalidSTag,
		refusedPD:     wire.CodeDDPSTagNotAssociated,
		refusedAccess: wire.CodeRDMAPAccess,
		refusedWrap:   wire.CodeDDPTOWrap,
		refusedBounds: wire.CodeDDPBaseBounds,
	}
	readCodes = [...]wire.Code{
		refusedSTag:   wire.CodeRDMAPInvalidSTag,
		refusedPD:     wire.CodeRDMAPSTagNotAssociated,
		refusedAccess: wire.CodeRDMAPAccess,
		refusedWrap:   wire.CodeRDMAPTOWrap,
		refusedBounds: wire.CodeRDMAPBaseBounds,
	}
)

// refuse is the fault of a peer that named size bytes at to.
func refuse(code wire.Code, stag uint32, to uint64, size int) error {
	return &wire.ProtocolError{Code: code, Detail: fmt.Sprintf("STag %#x, %d bytes at %#x", stag, size, to)}
}

// remote calls use with the memory that a peer names, if the region grants the
// peer that access. Use must not keep it.
func (p *pd) remote(stag uint32, to uint64, size int, access verbs.Access, use func(mem []byte)) refusal {
	m := regions.get(stag)
	switch {
	case m == nil:
		return refusedSTag
	case m.pd != p:
		return refusedPD
	case m.access&access == 0:
		return refusedAccess
	case to+uint64(size) < to:
		return refusedWrap
	case to < m.base || to-m.base > uint64(len(m.mem)) || uint64(size) > uint64(len(m.mem))-(to-m.base):
		return refusedBounds
	}
	m.remote.RLock()
	defer m.remote.RUnlock()
	if m.gone {
		return refusedSTag
	}
	use(m.mem[to-m.base:][:size])
	return noRefusal
}

// stage returns where the payload of a tagged segment is received. One of no
// bytes touches no memory, and what it names is not looked at: adapters send it
// to see whether the peer is alive, or as the first message of a connection (RFC
// 6581 section 9.2).
func (q *qp) stage(size int) []byte {
	if size == 0 {
		return nil
	}
	q.rx.staged = pool.Get(size)
	return q.rx.staged
}

// tagged acts on a tagged segment that has been received, and reports whether it
// completed an RDMA READ.
func (q *qp) tagged() (completed bool, err error) {
	r := &q.rx
	r.tagBegun = !r.hdr.Last
	if r.hdr.Opcode == wire.OpReadResponse {
		completed, err = q.placeResponse(r.staged)
	} else {
		err = q.placeWrite(r.staged)
	}
	q.unstage()
	return completed, err
}

func (q *qp) unstage() {
	pool.Put(q.rx.staged)
	q.rx.staged = nil
}

func (q *qp) placeWrite(data []byte) error {
	if len(data) == 0 {
		return nil
	}
	h := &q.rx.hdr
	refusal := q.pd.remote(h.STag, h.TO, len(data), verbs.AccessRemoteWrite, func(mem []byte) { copy(mem, data) })
	if refusal != noRefusal {
		return refuse(segmentCodes[refusal], h.STag, h.TO, len(data))
	}
	return nil
}
