package qp

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// QP is a reliable-connected queue pair, with the accounts of its two queues:
// what was posted is outstanding until its completion was polled from the CQ.
//
// All methods may be called concurrently. PostSend waits for another PostSend,
// and PostRecv for another PostRecv; neither waits for Poll, nor Poll for them.
type QP struct {
	v   verbs.QP
	num uint32
	cap Cap
	pd  *PD
	cq  *CQ

	// guard keeps the rdma_cm_id, whose calls use its QP, from doing so while
	// the QP is being destroyed.
	guard sync.Locker

	sendMu   sync.Mutex
	send     ring
	sendFull error
	drained  bool // the drain marker was posted; guarded by sendMu

	recvMu   sync.Mutex
	recv     ring
	recvFull error

	errMu sync.Mutex // keeps SetError from a QP that is gone

	closed    atomic.Bool // written with sendMu, recvMu, errMu and cq.mu held
	abandoned atomic.Bool // written with sendMu, recvMu and cq.mu held
}

// DrainWRID is the one WRID that a send may not have: see SetError.
const DrainWRID = math.MaxUint64

// Creator makes a provider's queue pairs: an rdma_cm_id.
type Creator interface {
	CreateQP(pd verbs.PD, cq verbs.CQ, want verbs.QPCap) (verbs.QP, error)
}

// NewQP makes a queue pair whose completions go to cq. It is for package cm;
// everybody else calls cm.ID.CreateQP. Guard is locked around the QP's
// destruction, and must not be nil.
func NewQP(c Creator, guard sync.Locker, pd *PD, cq *CQ, want Cap) (*QP, error) {
	const op = "create qp"
	if err := checkCap(pd.dev.Attr(), cq.depth, want); err != nil {
		return nil, opError(op, err)
	}
	q := &QP{pd: pd, cq: cq, guard: guard}
	if err := pd.holdQP(); err != nil {
		return nil, opError(op, err)
	}
	if err := cq.attach(q); err != nil {
		pd.release(&pd.qps)
		return nil, opError(op, err)
	}
	// One more send: the drain marker always has a place.
	v, err := c.CreateQP(pd.v, cq.v, Cap{SendWR: want.SendWR + 1, RecvWR: want.RecvWR, SendSGE: want.SendSGE, MaxInline: want.MaxInline})
	if err != nil {
		cq.unattach()
		pd.release(&pd.qps)
		return nil, opError(op, err)
	}
	got := v.Cap()
	// A device may round a depth up, but the CQ was sized for what was asked.
	got.SendWR = min(got.SendWR-1, want.SendWR)
	got.RecvWR = min(got.RecvWR, want.RecvWR)
	q.v, q.num, q.cap = v, v.Num(), got
	q.send.init(got.SendWR)
	q.recv.init(got.RecvWR)
	q.sendFull = opError("post send", &FullError{Op: OpSend, Depth: got.SendWR})
	q.recvFull = opError("post recv", &FullError{Op: OpRecv, Depth: got.RecvWR})
	return q, nil
}

func checkCap(attr DeviceAttr, cqDepth int, want Cap) error {
	if err := checkLimit("send queue depth", want.SendWR, 1, attr.MaxQPWR-1, "ask for less"); err != nil {
		return err
	}
	if err := checkLimit("receive queue depth", want.RecvWR, 1, attr.MaxQPWR, "ask for less"); err != nil {
		return err
	}
	if err := checkLimit("gather entries of a send", want.SendSGE, 1, attr.MaxSGE, "ask for less"); err != nil {
		return err
	}
	return checkLimit("send and receive queue depth together", want.SendWR+want.RecvWR, 2, cqDepth,
		"make the completion queue as deep as both queues together")
}

// Num is the QP's number, which the operator's tools show.
func (q *QP) Num() uint32 { return q.num }

// Cap returns what the QP can hold: the depths that were asked for, and the
// device's own limit for inline data.
func (q *QP) Cap() Cap { return q.cap }

// Outstanding returns how many work requests of each queue were posted and not
// completed. A send that is not signaled completes when a later one does. After
// SetError, one send more may be counted for a moment.
func (q *QP) Outstanding() (sends, recvs int) { return q.send.len(), q.recv.len() }

// PostSend posts sends in order, ibv_post_send(3), and returns how many were
// taken; err says why the next was not. WRIDs must be unique among the sends
// outstanding. At least the last request that fits into the queue has to be
// signaled, or nothing ever makes room. A full queue is a *FullError, a request that the QP can't hold a
// *LimitError.
//
// The slices wr and SGL are the caller's again on return; the memory that they
// name is the device's until the completion, unless the request is Inline.
// PostSend does not wait for the peer. In software it may take as long as the
// copy of the data into the socket, and SetError cuts it short.
//
// A request with Op WRRDMAWrite or WRRDMARead moves at most MaxRDMA bytes to or
// from memory of the peer's, which RemoteAddr and RKey name and a region of the
// peer's must grant (RegRemoteMR): if none does, the connection ends. An RDMA READ
// has at most one gather entry, in a region with AccessLocalWrite (on iWARP devices
// AccessRemoteWrite too), and is complete when its data is there. As many are under
// way at a time as the peer lets (ConnParam.InitiatorDepth and ResponderResources);
// more wait in the queue, and where none was agreed posting one fails. A SEND or
// RDMA WRITE may reach the peer before an RDMA READ posted earlier is done, unless
// it has Fence; completions are in order all the same.
func (q *QP) PostSend(wr []SendWR) (int, error) {
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	if err := q.usable(); err != nil {
		return 0, opError("post send", err)
	}
	var refused error
	if room := q.send.room(); len(wr) > room {
		wr, refused = wr[:room], q.sendFull
	}
	for i := range wr {
		if err := q.checkSend(&wr[i]); err != nil {
			wr, refused = wr[:i], opError("post send", err)
			break
		}
		q.send.put(i, wr[i].WRID)
	}
	if len(wr) == 0 {
		return 0, refused
	}
	// First: the completion may be polled before the provider returns.
	q.send.publish(len(wr))
	n, err := q.v.PostSend(wr)
	if n < len(wr) {
		q.send.takeBack(len(wr) - n)
		return n, opError("post send", orErrno(err, syscall.EIO))
	}
	return n, refused
}

// PostRecv posts receives in order, ibv_post_recv(3), and returns how many were
// taken; err says why the next was not. WRIDs must be unique among the receives
// outstanding. The slice wr is the caller's again on return; the memory that it
// names is the device's until the completion.
func (q *QP) PostRecv(wr []RecvWR) (int, error) {
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	if err := q.usable(); err != nil {
		return 0, opError("post recv", err)
	}
	var refused error
	if room := q.recv.room(); len(wr) > room {
		wr, refused = wr[:room], q.recvFull
	}
	if len(wr) == 0 {
		return 0, refused
	}
	for i := range wr {
		q.recv.put(i, wr[i].WRID)
	}
	q.recv.publish(len(wr))
	n, err := q.v.PostRecv(wr)
	if n < len(wr) {
		q.recv.takeBack(len(wr) - n)
		return n, opError("post recv", orErrno(err, syscall.EIO))
	}
	return n, refused
}

// complete enters a completion into the books, and reports whether it is the
// caller's to see. The caller holds cq.mu.
func (q *QP) complete(wc *WC) (deliver bool, err error) {
	if q.abandoned.Load() {
		return false, nil
	}
	var ok bool
	if wc.Op == OpSend {
		// Sends complete in order. Older ones that were not reported were not
		// signaled, and succeeded.
		ok = q.send.retireThrough(wc.WRID)
		deliver = wc.WRID != DrainWRID
	} else {
		ok = q.recv.retireOldest(wc.WRID)
		deliver = true
	}
	if !ok {
		return false, &AccountingError{QP: q.num, Op: wc.Op, WRID: wc.WRID, Status: wc.Status}
	}
	return deliver, nil
}

// SetError moves the QP to the error state, ibv_modify_qp(3): what is posted
// completes, with StatusWRFlushErr if it had not yet, and Outstanding comes to
// 0 as completions are polled. On a live connection it is an abort. It ends a
// PostSend in progress, waits for that, and may be repeated.
//
// Sends that were not signaled and succeeded are reported by nobody. So SetError
// posts a signaled marker behind them, whose completion Poll keeps to itself.
func (q *QP) SetError() error {
	if err := q.setError(); err != nil {
		return opError("set error", err)
	}
	q.Drain()
	return nil
}

func (q *QP) setError() error {
	q.errMu.Lock()
	defer q.errMu.Unlock()
	if q.closed.Load() {
		return errClosed
	}
	return q.v.SetError()
}

// Drain posts the marker that SetError tells of, once. It is for package cm,
// which calls it when rdma_disconnect has moved the QP to the error state.
func (q *QP) Drain() {
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	if q.drained || q.usable() != nil || q.send.len() == 0 {
		return
	}
	q.send.put(0, DrainWRID)
	q.send.publish(1)
	q.drained = true
	if n, _ := q.v.PostSend([]SendWR{{WRID: DrainWRID, Signaled: true}}); n == 0 {
		// A device that takes nothing more flushes what it has, or is one for
		// Abandon.
		q.send.takeBack(1)
		q.drained = false
	}
}

// Abandon gives up the completions of everything outstanding, and returns how
// much that is. It is for devices that never flush, after SetError and a
// bounded wait: Close then succeeds, nothing more may be posted, and
// completions that come late are dropped. The memory of what was abandoned is
// the device's until Close has returned.
func (q *QP) Abandon() (sends, recvs int) {
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	q.cq.mu.Lock()
	defer q.cq.mu.Unlock()
	if q.closed.Load() || q.abandoned.Load() {
		return 0, 0
	}
	q.abandoned.Store(true)
	sends, recvs = q.Outstanding()
	q.send.head.Store(q.send.tail.Load())
	q.recv.head.Store(q.recv.tail.Load())
	return sends, recvs
}

// Close destroys the QP, ibv_destroy_qp(3). While work requests are outstanding
// it returns a *BusyError: call SetError, and poll until Outstanding is 0.
// It waits for a post in progress and, on siw, until a connect in progress has
// succeeded or failed, which takes up to 10 s.
func (q *QP) Close() error {
	q.guard.Lock()
	defer q.guard.Unlock()
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	q.errMu.Lock()
	defer q.errMu.Unlock()
	q.cq.mu.Lock()
	defer q.cq.mu.Unlock()
	if q.closed.Load() {
		return opError("destroy qp", errClosed)
	}
	if s, r := q.Outstanding(); s > 0 || r > 0 {
		return opError("destroy qp", &BusyError{Object: "queue pair", Sends: s, Recvs: r})
	}
	if err := q.v.Destroy(); err != nil {
		return opError("destroy qp", err)
	}
	q.closed.Store(true)
	q.cq.qp = nil
	q.pd.release(&q.pd.qps)
	return nil
}

// Closed reports whether Close succeeded.
func (q *QP) Closed() bool { return q.closed.Load() }

func (q *QP) usable() error {
	if q.closed.Load() || q.abandoned.Load() {
		return errClosed
	}
	return nil
}

func (q *QP) checkSend(wr *SendWR) error {
	if wr.WRID == DrainWRID {
		return fmt.Errorf("WRID %#x is reserved: %w", wr.WRID, syscall.EINVAL)
	}
	if len(wr.SGL) > q.cap.SendSGE {
		return &LimitError{What: "gather entries of a send", Value: int64(len(wr.SGL)), Limit: int64(q.cap.SendSGE),
			Fix: "gather the data into fewer pieces", Errno: syscall.EINVAL}
	}
	if wr.Op != WRSend {
		if err := checkRDMA(wr); err != nil {
			return err
		}
	}
	if !wr.Inline {
		return nil
	}
	n := 0
	for i := range wr.SGL {
		n += len(wr.SGL[i].Data)
	}
	if n > q.cap.MaxInline {
		return &LimitError{What: "bytes of an inline send", Value: int64(n), Limit: int64(q.cap.MaxInline),
			Fix: "send it from registered memory", Errno: syscall.EINVAL}
	}
	return nil
}

// checkRDMA says what is wrong with an RDMA WRITE or READ.
func checkRDMA(wr *SendWR) error {
	size := int64(0)
	for i := range wr.SGL {
		size += int64(len(wr.SGL[i].Data))
	}
	switch {
	case wr.Op != WRRDMAWrite && wr.Op != WRRDMARead:
		return fmt.Errorf("%v: %w", wr.Op, syscall.EINVAL)
	case size > MaxRDMA:
		return &LimitError{What: "bytes of an " + wr.Op.String(), Value: size, Limit: MaxRDMA, Fix: "make several of it", Errno: syscall.EINVAL}
	case wr.Op == WRRDMAWrite:
		return nil
	case len(wr.SGL) > 1:
		return &LimitError{What: "scatter entries of an RDMA READ", Value: int64(len(wr.SGL)), Limit: 1,
			Fix: "read into one piece of memory", Errno: syscall.EINVAL}
	case wr.Inline:
		return fmt.Errorf("inline RDMA READ: %w", syscall.EINVAL)
	}
	return nil
}

// orErrno returns err, or errno if the provider gave no reason.
func orErrno(err error, errno syscall.Errno) error {
	if err == nil {
		return errno
	}
	return err
}
