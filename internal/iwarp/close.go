package iwarp

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	pool "github.com/libp2p/go-buffer-pool"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// A connection ends in one of these ways. Each flushes what is posted and
// reports DISCONNECTED; whichever is first wins.
//
//	disconnect  we end it in order, and wait for the peer's end
//	rxFailed    the peer ended it, in order or not, or broke the protocol
//	abort       we reset it
//	lost        we reset it, since the peer's host is gone
//
// The socket stays open until the id is destroyed, except after a reset; and
// beyond, for a bounded time, while the peer has not ended what we ended in
// order. A net.Conn's Close waits for whoever is in the socket, who may wait for a lock
// of the QP: so nothing closes it with such a lock held.

// ending is what remains to be done for a connection that is over.
type ending struct {
	once  sync.Once // DISCONNECTED is reported once
	drain sync.WaitGroup

	mu      sync.Mutex // guards the read deadline while draining
	inOrder bool       // draining after disconnect: the peer may not have taken everything yet
	stopped bool
	orphan  bool // the id is gone: the drain closes the socket
}

// drainTimeout bounds how long a connection that is over waits for the peer's
// end, and so for how long it may outlive its id: as long as TCP's FIN-WAIT-2.
// It is a variable for tests.
var drainTimeout = time.Minute

// ended reports DISCONNECTED.
func (q *qp) ended(err error) {
	q.end.once.Do(func() {
		q.id.post(&verbs.Event{Type: verbs.EventDisconnected, Err: withErrno(err, syscall.ECONNRESET)})
	})
}

// disconnect ends an open connection in order: work is flushed, the write side
// shut, and what arrives is discarded until the peer's end. Closing the socket
// at once would answer late data with a reset, which can destroy what the peer
// has not read yet. Sends that are cut off in the middle leave no order to keep:
// the connection is aborted.
func (q *qp) disconnect() {
	if cutOff := q.shut(); cutOff {
		q.reset()
		q.ended(nil)
	}
}

// shut does what disconnect needs the locks for.
func (q *qp) shut() (cutOff bool) {
	q.rx.mu.Lock()
	defer q.rx.mu.Unlock()
	if q.rx.state != halfOpen {
		return false // the peer was first
	}
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	cutOff = q.tx.n > 0 || q.tx.batch.unsent > 0
	failed := q.tx.err
	q.flushRecvs()
	q.flushSends()
	if cutOff {
		return true
	}
	q.link.CloseWrite()
	q.end.keep()
	q.discard(func(err error) { q.ended(errors.Join(failed, err)) })
	return false
}

// discard reads until the peer's end, for a bounded time, then says whether it
// was in order. Both halves are dead.
func (q *qp) discard(done func(error)) {
	q.end.drain.Go(func() {
		// The Wait in progress ends by a deadline, which it then resets. No other
		// comes after it.
		q.cq.waits.Lock()
		//lint:ignore SA2001 waiting for whoever holds it is the point
		q.cq.waits.Unlock()
		if !q.end.begin(q.link) {
			return
		}
		done(drain(q.link))
		q.end.over(q.link)
	})
}

// drain reads until the end, and returns nil if that was in order.
func drain(l link) error {
	buf := pool.Get(stagingSize)
	defer pool.Put(buf)
	for {
		if _, err := l.Read(buf); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// begin sets the deadline of a drain, unless it has been stopped.
func (e *ending) begin(l link) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped {
		return false
	}
	l.SetReadDeadline(time.Now().Add(drainTimeout))
	return true
}

// stop ends a drain and waits for it.
func (e *ending) stop(l link) {
	e.mu.Lock()
	e.stopped = true
	l.SetReadDeadline(longAgo)
	e.mu.Unlock()
	e.drain.Wait()
}

// keep notes that a drain is to go on without the id.
func (e *ending) keep() {
	e.mu.Lock()
	e.inOrder = true
	e.mu.Unlock()
}

// leave lets a drain go on without the id, if it keeps data from being lost. It
// reports whether there is one.
func (e *ending) leave() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.orphan = e.inOrder && !e.stopped
	return e.orphan
}

// over ends a drain.
func (e *ending) over(l link) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopped = true
	if e.orphan {
		l.Close()
	}
}

// rxFailed ends the connection because of what was, or was not, received.
// q.rx.mu is held.
func (q *qp) rxFailed(err error) {
	r := &q.rx
	if fault, ok := errors.AsType[*wire.ProtocolError](err); ok {
		q.terminate(fault, r.raw[:min(len(r.raw), r.ulpdu)], r.ulpdu)
		return
	}
	if err == io.EOF {
		err = nil
		if r.phase != phaseHeader || r.hi > r.lo || r.begun || r.tagBegun {
			err = fmt.Errorf("the peer's stream ended inside a message: %w", syscall.ECONNRESET)
		}
	}
	q.flushRecvs()
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	if err == nil {
		err = q.tx.err // a reset is seen once, here or by a send
	}
	q.flushSends()
	q.link.CloseWrite()
	q.link.SetWriteDeadline(longAgo) // the flusher ends
	q.ended(err)
}

// terminatedBy is the error of a Terminate message with that payload.
func terminatedBy(payload []byte) error {
	t, err := wire.ParseTerminate(payload)
	terminated := &wire.TerminateError{Remote: true, Terminate: t}
	if err != nil {
		return &errnoError{fmt.Errorf("%w (%w)", terminated, err), syscall.ECONNRESET}
	}
	return &errnoError{terminated, syscall.ECONNRESET}
}

// terminate answers a peer's fault, a ULPDU of that length and start, with a
// Terminate message, the last thing that is sent (RFC 5040 section 4.8), if what
// is before it went out whole. q.rx.mu is held.
func (q *qp) terminate(fault *wire.ProtocolError, start []byte, ulpdu int) {
	t := wire.NewTerminate(fault.Code, start, ulpdu)
	q.flushRecvs()
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	whole := q.tx.state == halfOpen && q.tx.batch.unsent == 0
	q.flushSends()
	if whole {
		q.link.writev([][]byte{terminateFPDU(&t, q.crc)}) // best effort
	}
	q.link.CloseWrite()
	q.link.SetWriteDeadline(longAgo) // the flusher ends
	q.ended(&errnoError{fmt.Errorf("%w: %w", &wire.TerminateError{Terminate: t}, fault), syscall.EPROTO})
	q.discard(func(error) {})
}

func terminateFPDU(t *wire.Terminate, crc bool) []byte {
	b := make([]byte, wire.FPDUHeaderLen+wire.UntaggedHeaderLen)
	wire.TerminateHeader.Put(b[wire.FPDUHeaderLen:])
	b, err := wire.AppendTerminate(b, t)
	if err != nil {
		panic(err) // NewTerminate's are well-formed
	}
	ulpdu := len(b) - wire.FPDUHeaderLen
	wire.PutFPDUHeader(b, ulpdu)
	var trailer [wire.MaxTrailerLen]byte
	n := wire.PutTrailer(trailer[:], ulpdu, crc, wire.UpdateCRC(0, b))
	return append(b, trailer[:n]...)
}

// abort flushes all work. The peer of a live connection sees a reset.
func (q *qp) abort() {
	if live := q.kill(); live {
		q.reset()
		q.ended(syscall.ECONNABORTED)
	}
}

// kill flushes all work, and reports whether there was a live connection.
func (q *qp) kill() (live bool) {
	q.rx.mu.Lock()
	defer q.rx.mu.Unlock()
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	live = q.rx.state == halfOpen
	q.flushRecvs()
	q.flushSends()
	return live
}

// reset closes the socket so that the peer sees a reset. Both halves are dead,
// by the caller's doing.
func (q *qp) reset() {
	unwatch(q)
	q.keep.stop()
	q.link.SetLinger(0)
	q.link.Close()
}

// release ends what still runs for the connection, before its socket is closed.
// It reports whether the socket is to be left to a drain.
func (q *qp) release() (left bool) {
	q.abort()
	unwatch(q)
	q.keep.stop()
	l := q.connection()
	if l == nil || q.end.leave() {
		return l != nil
	}
	q.end.stop(l)
	return false
}

// hangup is called when the peer has ended its stream: what came before is
// received, then the end.
func (q *qp) hangup() {
	for empty := false; !empty; {
		_, empty = q.progress(len(q.cq.ring), shortIsNothing)
	}
}
