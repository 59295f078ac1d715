package verbstest

import (
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// access does an RDMA WRITE or READ, the oldest request. If the peer grants no
// such access, both ends go to the error state, and it reports false. The lock is
// held.
func (q *qp) access(s *send) bool {
	size := 0
	for _, e := range s.sgl {
		size += len(e.Data)
	}
	want := verbs.AccessRemoteWrite
	if s.wr.Op == verbs.WRRDMARead {
		want = verbs.AccessRemoteRead
	}
	mem, ok := q.peer.pd.remote(s.wr.RKey, s.wr.RemoteAddr, size, want)
	wc := verbs.WC{WRID: s.wr.WRID, Op: verbs.OpSend}
	if !ok {
		wc.Status = verbs.StatusRemAccessErr
	}
	for _, e := range s.sgl {
		if s.wr.Op == verbs.WRRDMARead {
			mem = mem[copy(e.Data, mem):]
		} else {
			mem = mem[copy(mem, e.Data):]
		}
	}
	if s.wr.Signaled || !ok {
		q.cq.push(wc, false)
	}
	q.sends.pop()
	if !ok {
		q.abort()
	}
	return ok
}

// remote returns memory that a peer names, if it may have it.
func (d *pd) remote(rkey uint32, addr uint64, size int, want verbs.Access) ([]byte, bool) {
	if size == 0 {
		return nil, true
	}
	m := d.p.regions[rkey]
	if m == nil || m.pd != d || m.access&want == 0 {
		return nil, false
	}
	at := addr - uint64(uintptr(unsafe.Pointer(&m.mem[0])))
	if at > uint64(len(m.mem)) || uint64(size) > uint64(len(m.mem))-at {
		return nil, false
	}
	return m.mem[at:][:size], true
}
