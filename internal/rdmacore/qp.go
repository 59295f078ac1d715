//go:build cgo && linux

package rdmacore

/*
#cgo noescape post_send
#cgo nocallback post_send
#cgo noescape post_recv
#cgo nocallback post_recv
#include "shim.h"

// Arguments that are no pointers save cgo checks.
static struct rn_posted post_send(uintptr_t qp, uintptr_t wr, int n)
{
	return rn_post_send((struct ibv_qp *)qp, (struct ibv_send_wr *)wr, n);
}

static struct rn_posted post_recv(uintptr_t qp, uintptr_t wr, int n)
{
	return rn_post_recv((struct ibv_qp *)qp, (struct ibv_recv_wr *)wr, n);
}
*/
import "C"

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// qp is a queue pair. Its work requests carry numbers of ours instead of the
// caller's WRIDs: a completion that failed says nothing else than its number, so
// the number has to say which queue it is of.
type qp struct {
	id  *id
	dev *device
	cq  *cq
	c   *C.struct_ibv_qp
	num uint32
	cap verbs.QPCap

	send sendQueue
	recv recvQueue
	keep keepAlive

	reads bool // the peer answers RDMA READs; guarded by the channel's lock

	dead    atomic.Bool // in the error state, or about to be; written with the queues' locks held
	flushed atomic.Bool // the device flushes no more: what is left is ours to flush
}

// workQueue remembers the WRIDs of what is outstanding. tail is moved by posts,
// head by completions.
type workQueue struct {
	mu    sync.Mutex
	wrid  []uint64
	mask  uint64
	tail  atomic.Uint64 // the next to post
	head  uint64        // the oldest outstanding; guarded by the CQ's lock
	batch int           // requests in one crossing
}

func (w *workQueue) init(depth int) {
	size := uint64(1)
	for size < uint64(depth) {
		size <<= 1
	}
	w.wrid, w.mask, w.batch = make([]uint64, size), size-1, min(postBatch, depth)
}

// numbers of work requests: bit 0 is the queue, the rest counts. No count gets
// to nudgeWRID.
const (
	sendBit   = 0
	recvBit   = 1
	probeWRID = math.MaxUint64
	nudgeWRID = probeWRID - 1
)

// sendQueue and recvQueue have requests in C memory, which the next batch uses
// again.
type sendQueue struct {
	workQueue
	wr     []C.struct_ibv_send_wr
	sge    []C.struct_ibv_sge
	inline []byte // copies of inline data
	posts  atomic.Uint64
}

type recvQueue struct {
	workQueue
	wr  []C.struct_ibv_recv_wr
	sge []C.struct_ibv_sge
}

// postBatch is how many work requests one crossing into C posts.
const postBatch = 16

// wantInline is how much inline data a queue pair is made for if its user does
// not ask for more: enough for a small message, little enough that the send
// queue stays small.
const wantInline = 256

// newQP makes the id's queue pair. i.mu is held.
func newQP(i *id, p *pd, c *cq, want verbs.QPCap) (*qp, error) {
	d := p.dev
	switch {
	case want.SendWR < 1 || want.SendWR > d.attr.MaxQPWR:
		return nil, fmt.Errorf("%d send work requests (1 to %d): %w", want.SendWR, d.attr.MaxQPWR, syscall.EINVAL)
	case want.RecvWR < 1 || want.RecvWR > d.attr.MaxQPWR:
		return nil, fmt.Errorf("%d receive work requests (1 to %d): %w", want.RecvWR, d.attr.MaxQPWR, syscall.EINVAL)
	case want.SendSGE < 1 || want.SendSGE > d.attr.MaxSGE:
		return nil, fmt.Errorf("%d scatter/gather entries (1 to %d): %w", want.SendSGE, d.attr.MaxSGE, syscall.EINVAL)
	}
	q := &qp{id: i, dev: d, cq: c}
	granted, err := q.create(p, c, want)
	if err != nil {
		return nil, err
	}
	q.c = i.c.qp
	q.num = uint32(q.c.qp_num)
	q.cap = verbs.QPCap{
		SendWR:    int(granted.max_send_wr) - probeRoom,
		RecvWR:    int(granted.max_recv_wr),
		SendSGE:   int(granted.max_send_sge),
		MaxInline: int(granted.max_inline_data),
	}
	q.send.init(q.cap.SendWR)
	q.recv.init(q.cap.RecvWR)
	q.allocate()
	q.keep.qp, q.keep.proof = q, q.dev.proof()
	c.mu.Lock()
	c.qp = q
	c.mu.Unlock()
	ch := i.lockChannel()
	i.qp = q
	ch.mu.Unlock()
	return q, nil
}

// create asks for ever less inline data, which is the one thing that a device
// may refuse within its limits.
func (q *qp) create(p *pd, c *cq, want verbs.QPCap) (granted C.struct_ibv_qp_cap, err error) {
	for inline := min(max(want.MaxInline, wantInline), q.dev.attr.MaxInline); ; inline /= 2 {
		granted = C.struct_ibv_qp_cap{
			max_send_wr:     C.uint32_t(want.SendWR + probeRoom),
			max_recv_wr:     C.uint32_t(want.RecvWR),
			max_send_sge:    C.uint32_t(want.SendSGE),
			max_recv_sge:    1,
			max_inline_data: C.uint32_t(inline),
		}
		err = errnoOf(int(C.rn_create_qp(q.id.c, p.c, c.c, &granted)))
		if err == nil || inline == 0 {
			return granted, err
		}
	}
}

func (q *qp) allocate() {
	s, r := &q.send, &q.recv
	s.wr = unsafe.Slice((*C.struct_ibv_send_wr)(calloc(C.size_t(s.batch), C.sizeof_struct_ibv_send_wr)), s.batch)
	sges := s.batch * q.cap.SendSGE
	s.sge = unsafe.Slice((*C.struct_ibv_sge)(calloc(C.size_t(sges), C.sizeof_struct_ibv_sge)), sges)
	if n := s.batch * q.cap.MaxInline; n > 0 {
		s.inline = unsafe.Slice((*byte)(calloc(C.size_t(n), 1)), n)
	}
	r.wr = unsafe.Slice((*C.struct_ibv_recv_wr)(calloc(C.size_t(r.batch), C.sizeof_struct_ibv_recv_wr)), r.batch)
	r.sge = unsafe.Slice((*C.struct_ibv_sge)(calloc(C.size_t(r.batch), C.sizeof_struct_ibv_sge)), r.batch)
}

func (q *qp) release() {
	free(unsafe.Pointer(&q.send.wr[0]))
	free(unsafe.Pointer(&q.send.sge[0]))
	if len(q.send.inline) > 0 {
		free(unsafe.Pointer(&q.send.inline[0]))
	}
	free(unsafe.Pointer(&q.recv.wr[0]))
	free(unsafe.Pointer(&q.recv.sge[0]))
}

func (q *qp) Num() uint32      { return q.num }
func (q *qp) Cap() verbs.QPCap { return q.cap }

func (q *qp) PostSend(wr []verbs.SendWR) (int, error) {
	s := &q.send
	s.mu.Lock()
	defer s.mu.Unlock()
	done := 0
	for done < len(wr) {
		batch := wr[done:min(len(wr), done+s.batch)]
		n, err := q.postSends(batch)
		done += n
		if err != nil {
			return done, opError("ibv_post_send", err)
		}
	}
	s.posts.Add(1)
	return done, nil
}

// postSends posts one batch. The queue's lock is held.
func (q *qp) postSends(wr []verbs.SendWR) (int, error) {
	s := &q.send
	seq := s.tail.Load()
	sges, inlined := 0, 0
	for i := range wr {
		w := &wr[i]
		s.wrid[(seq+uint64(i))&s.mask] = w.WRID
		c := &s.wr[i]
		c.wr_id = C.uint64_t((seq+uint64(i))<<1 | sendBit)
		c.opcode = C.IBV_WR_SEND
		if w.Op != verbs.WRSend {
			setRemote(c, w)
		}
		c.send_flags = sendFlags(w)
		c.sg_list = &s.sge[sges]
		if w.Inline {
			size := copyInline(s.inline[inlined:], w.SGL)
			if c.num_sge = 0; size > 0 { // siw takes no entry of no bytes
				setSGE(&s.sge[sges], s.inline[inlined:inlined+size], 0)
				c.num_sge = 1
			}
			sges, inlined = sges+1, inlined+size
			continue
		}
		for k := range w.SGL {
			setSGE(&s.sge[sges+k], w.SGL[k].Data, w.SGL[k].LKey)
		}
		c.num_sge = C.int(len(w.SGL))
		sges += len(w.SGL)
	}
	if q.dead.Load() && q.dev.quirk == quirkSIW {
		s.tail.Store(seq + uint64(len(wr)))
		q.cq.Wake()
		return len(wr), nil
	}
	got := C.post_send(handle(unsafe.Pointer(q.c)), handle(unsafe.Pointer(&s.wr[0])), C.int(len(wr)))
	n := q.taken(int(got.n), int(got.err), len(wr))
	s.tail.Store(seq + uint64(n))
	if n == len(wr) {
		return n, q.posted()
	}
	return n, syscall.Errno(got.err)
}

// dialed is called when the connection that the id asked for is established.
func (q *qp) dialed() {
	if q.dev.quirk == quirkSIW {
		q.keep.nudge(0)
	}
}

// taken returns how many requests a post has queued. siw queues them and then
// says that nobody sends them: they are flushed later.
func (q *qp) taken(n, errno, posted int) int {
	if errno != 0 && n == posted && q.dev.quirk != quirkSIW {
		return 0
	}
	return n
}

// posted makes a device flush what was posted after the end.
func (q *qp) posted() error {
	if q.dead.Load() && q.dev.quirk == quirkRXE {
		return errnoOf(int(C.rn_qp_to_error(q.c)))
	}
	return nil
}

func sendFlags(w *verbs.SendWR) C.uint {
	var f C.uint
	if w.Signaled {
		f |= C.IBV_SEND_SIGNALED
	}
	if w.Solicited {
		f |= C.IBV_SEND_SOLICITED
	}
	if w.Inline {
		f |= C.IBV_SEND_INLINE
	}
	if w.Fence {
		f |= C.IBV_SEND_FENCE
	}
	return f
}

// setRemote makes a request an RDMA WRITE or READ of the peer's memory.
func setRemote(c *C.struct_ibv_send_wr, w *verbs.SendWR) {
	c.opcode = C.IBV_WR_RDMA_WRITE
	if w.Op == verbs.WRRDMARead {
		c.opcode = C.IBV_WR_RDMA_READ
	}
	rdma := (*C.struct_rn_rdma)(unsafe.Pointer(&c.wr))
	rdma.remote_addr, rdma.rkey = C.uint64_t(w.RemoteAddr), C.uint32_t(w.RKey)
}

func copyInline(dst []byte, sgl []verbs.SGE) int {
	n := 0
	for i := range sgl {
		n += copy(dst[n:], sgl[i].Data)
	}
	return n
}

func setSGE(s *C.struct_ibv_sge, b []byte, lkey uint32) {
	s.addr = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	s.length = C.uint32_t(len(b))
	s.lkey = C.uint32_t(lkey)
}

func (q *qp) PostRecv(wr []verbs.RecvWR) (int, error) {
	r := &q.recv
	r.mu.Lock()
	defer r.mu.Unlock()
	done := 0
	for done < len(wr) {
		batch := wr[done:min(len(wr), done+r.batch)]
		n, err := q.postRecvs(batch)
		done += n
		if err != nil {
			return done, opError("ibv_post_recv", err)
		}
	}
	return done, nil
}

// postRecvs posts one batch. The queue's lock is held.
func (q *qp) postRecvs(wr []verbs.RecvWR) (int, error) {
	r := &q.recv
	seq := r.tail.Load()
	for i := range wr {
		r.wrid[(seq+uint64(i))&r.mask] = wr[i].WRID
		setSGE(&r.sge[i], wr[i].SGE.Data, wr[i].SGE.LKey)
		r.wr[i].wr_id = C.uint64_t((seq+uint64(i))<<1 | recvBit)
		r.wr[i].sg_list = &r.sge[i]
		r.wr[i].num_sge = 1
	}
	if q.dead.Load() && q.dev.quirk == quirkSIW {
		r.tail.Store(seq + uint64(len(wr)))
		q.cq.Wake()
		return len(wr), nil
	}
	got := C.post_recv(handle(unsafe.Pointer(q.c)), handle(unsafe.Pointer(&r.wr[0])), C.int(len(wr)))
	n := q.taken(int(got.n), int(got.err), len(wr))
	r.tail.Store(seq + uint64(n))
	if n == len(wr) {
		return n, q.posted()
	}
	return n, syscall.Errno(got.err)
}

// complete turns a completion into the caller's, and reports whether it is one.
// The CQ's lock is held.
func (q *qp) complete(c *C.struct_ibv_wc, wc *verbs.WC) bool {
	number := uint64(c.wr_id)
	status := verbs.Status(c.status)
	if q.dev.quirk == quirkSIW && status == verbs.StatusLocQPOpErr {
		status = verbs.StatusWRFlushErr
	}
	if number >= nudgeWRID {
		q.keep.answered(status, number == probeWRID)
		return false
	}
	*wc = verbs.WC{Status: status}
	w := &q.send.workQueue
	if number&1 == recvBit {
		wc.Op = verbs.OpRecv
		w = &q.recv.workQueue
	}
	seq := number >> 1
	wc.WRID = w.wrid[seq&w.mask]
	w.head = seq + 1
	switch {
	case c.status != C.IBV_WC_SUCCESS:
		wc.VendorErr = uint32(c.vendor_err)
	case wc.Op == verbs.OpRecv:
		wc.ByteLen = int(c.byte_len)
	}
	return true
}

// received returns how many receives the device has completed, whether or not
// anybody has polled.
func (q *qp) received() uint64 {
	q.cq.mu.Lock()
	defer q.cq.mu.Unlock()
	if q.cq.qp != q {
		return 0
	}
	q.cq.gather()
	return q.recv.head
}

// flush completes what the device never will. The CQ's lock is held.
func (q *qp) flush(wc []verbs.WC) int {
	n := q.recv.flush(wc, verbs.OpRecv)
	return n + q.send.flush(wc[n:], verbs.OpSend)
}

func (w *workQueue) flush(wc []verbs.WC, op verbs.Op) int {
	n := 0
	for tail := w.tail.Load(); n < len(wc) && w.head != tail; n++ {
		wc[n] = verbs.WC{WRID: w.wrid[w.head&w.mask], Op: op, Status: verbs.StatusWRFlushErr}
		w.head++
	}
	return n
}

// beginEnd is called before the queue pair goes to the error state: what is
// posted from now on may need help to be flushed.
func (q *qp) beginEnd() {
	q.keep.stop()
	q.send.mu.Lock()
	q.recv.mu.Lock()
	q.dead.Store(true)
	q.recv.mu.Unlock()
	q.send.mu.Unlock()
}

// finishEnd makes sure that the queue pair is in the error state and that its
// work is flushed.
func (q *qp) finishEnd(force bool) error {
	var err error
	if force || q.dev.quirk != quirkNone {
		err = errnoOf(int(C.rn_qp_to_error(q.c)))
	}
	if q.dev.quirk == quirkSIW {
		q.flushed.Store(true)
		q.cq.Wake()
	}
	return err
}

// SetError is ibv_modify_qp(3) to IBV_QPS_ERR. The peer of a live connection is
// told, by rdma_disconnect(3).
func (q *qp) SetError() error {
	q.id.mu.Lock()
	defer q.id.mu.Unlock()
	ch := q.id.lockChannel()
	live := q.id.connected
	ch.mu.Unlock()
	q.beginEnd()
	if err := q.finishEnd(true); err != nil {
		return opError("ibv_modify_qp", err)
	}
	if live && !q.id.destroyed {
		C.rn_disconnect(q.id.c) // the peer may have been first
	}
	return nil
}

// Destroy is rdma_destroy_qp(3). While a connect is in progress, siw makes it wait
// until the peer has answered, or for 10 s: meanwhile the channel's lock is not held,
// which all ids need, and events don't find the queue pair.
func (q *qp) Destroy() error {
	q.keep.stop()
	q.cq.mu.Lock()
	q.cq.qp = nil
	q.cq.mu.Unlock()
	ch := q.id.lockChannel()
	C.rn_detach_qp(q.id.c)
	q.id.qp = nil
	ch.mu.Unlock()
	if err := errnoOf(int(C.rn_destroy_qp(q.c))); err != nil {
		return opError("ibv_destroy_qp", err)
	}
	q.release()
	return nil
}
