package iwarp

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	pool "github.com/libp2p/go-buffer-pool"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// ending is what remains to be done for a connection that is over.
type ending struct {
	once    sync.Once // DISCONNECTED is reported once
	drain   sync.WaitGroup
	mu      sync.Mutex
	stopped bool
}

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
	q.rx.mu.Lock()
	defer q.rx.mu.Unlock()
	if q.rx.state != halfOpen {
		return // the peer was first
	}
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	cutOff := q.tx.state == halfOpen && (q.tx.n > 0 || q.tx.batch.unsent > 0)
	q.flushRecvs()
	q.flushSends()
	if cutOff {
		q.reset()
		q.ended(nil)
		return
	}
	q.conn.CloseWrite()
	q.discard(func() { q.ended(nil) })
}

// discard reads until the peer's end, for a bounded time, then calls done.
func (q *qp) discard(done func()) {
	q.end.drain.Go(func() {
		defer done()
		deadline := time.Now().Add(drainTimeout)
		buf := pool.Get(stagingSize)
		defer pool.Put(buf)
		// Whoever waits must see the deadline that ends its wait before it is
		// moved again. The end of the receive side lets nobody wait any more.
		q.cq.waits.Lock()
		q.cq.waits.Unlock() //nolint:staticcheck // an empty critical section is the point
		q.conn.SetReadDeadline(deadline)
		for {
			_, err := q.conn.Read(buf)
			q.end.mu.Lock()
			over := err != nil && (q.end.stopped || !isTimeout(err) || time.Now().After(deadline))
			if err != nil && !over { // a late Wake changed the deadline
				q.conn.SetReadDeadline(deadline)
			}
			q.end.mu.Unlock()
			if over {
				return
			}
		}
	})
}

func isTimeout(err error) bool {
	t, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return ok && t.Timeout()
}

// rxFailed ends the connection because of what was, or was not, received.
// q.rx.mu is held.
func (q *qp) rxFailed(err error) {
	r := &q.rx
	var fault *wire.ProtocolError
	switch {
	case errors.As(err, &fault):
		q.terminate(fault)
		return
	case err == io.EOF && r.phase == phaseHeader && r.hi == r.lo && r.off == 0:
		err = nil // in order
	case err == io.EOF:
		err = fmt.Errorf("the peer's stream ended inside a message: %w", syscall.ECONNRESET)
	}
	q.flushRecvs()
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	q.flushSends()
	q.conn.CloseWrite()
	q.conn.SetWriteDeadline(longAgo) // a flusher ends
	q.ended(err)
}

// terminate answers a peer's fault with a Terminate message, the last thing
// that is sent (RFC 5040 section 4.8). q.rx.mu is held.
func (q *qp) terminate(fault *wire.ProtocolError) {
	r := &q.rx
	t := wire.NewTerminate(fault.Code, r.first[:min(len(r.first), r.ulpdu)], r.ulpdu)
	q.flushRecvs()
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	whole := q.tx.state == halfOpen && q.tx.batch.unsent == 0 && q.tx.cut.sent == 0
	q.flushSends()
	if whole {
		frame := terminateFPDU(&t, q.crc)
		retry(func() (int, error) { return unix.Write(q.fd, frame) }) // best effort
	}
	q.conn.CloseWrite()
	q.conn.SetWriteDeadline(longAgo)
	q.ended(&errnoError{fmt.Errorf("%w: %w", &wire.TerminateError{Terminate: t}, fault), syscall.EPROTO})
	q.discard(func() {})
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
	q.rx.mu.Lock()
	defer q.rx.mu.Unlock()
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	live := q.rx.state == halfOpen || q.tx.state == halfOpen
	q.flushRecvs()
	q.flushSends()
	if live {
		q.reset()
		q.ended(syscall.ECONNABORTED)
	}
}

// reset closes the socket so that the peer sees a reset. Both halves are dead
// and their locks held, so that nobody uses the descriptor.
func (q *qp) reset() {
	unwatch(q)
	q.conn.SetLinger(0)
	q.conn.Close()
}

// release ends what still runs for the connection, before its socket is closed.
func (q *qp) release() {
	q.abort()
	if q.conn == nil {
		return
	}
	unwatch(q)
	q.end.mu.Lock()
	q.end.stopped = true
	q.conn.SetReadDeadline(longAgo)
	q.end.mu.Unlock()
	q.end.drain.Wait()
}

// hangup is called when the peer has ended its stream: what came before is
// received, then the end.
func (q *qp) hangup() { q.progress(len(q.cq.ring), shortIsNothing) }
