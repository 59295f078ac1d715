//go:build cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/keepalive"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// keepAlive probes a quiet peer with a request of no bytes, which its adapter
// answers, and neither its program nor its memory notices. One probe is outstanding
// at a time, which the transport sends again as often as it takes. The send queue
// and the CQ have probeRoom entries more, for that one and for nudges.
//
// Lock order: the CQ's lock or the channel's → mu.
type keepAlive struct {
	qp    *qp
	proof proof

	mu          sync.Mutex
	timer       *time.Timer // of the next tick; nil while there is none
	nudger      *time.Timer // of the next nudge
	stopped     bool        // for good
	period      time.Duration
	patience    time.Duration // for the answer to a probe
	idle        time.Duration
	outstanding bool      // a probe is
	since       time.Time // of the post of what is outstanding, or of a later sign of life
	answers     uint64    // probes answered
	last        signs     // at the last tick
}

// proof is what a peer's answer is.
type proof uint8

const (
	// On InfiniBand and RoCE an RDMA WRITE completes when the peer's adapter has
	// acknowledged it. One that isn't there is given up after some retries.
	byAck proof = iota
	// siw completes an RDMA WRITE when TCP has taken it. What TCP makes of it we
	// ask TCP.
	byTCP
	// On other iWARP devices an RDMA READ completes with the peer's response. siw
	// doesn't bear those: to one of no bytes that comes while it is sending (until
	// Linux 6.12 at least) it responds with bytes of what it has sent.
	byRead
)

func (d *device) proof() proof {
	switch {
	case d.quirk == quirkSIW:
		return byTCP
	case d.iwarp:
		return byRead
	}
	return byAck
}

// signs of life, counted.
type signs struct {
	received uint64 // receives that the device has completed
	answers  uint64
	posts    uint64 // of sends, where the device finds out what becomes of them
}

// set starts it, or changes it, or ends it. A peer that was quiet for Idle at most
// is probed; one that has not answered Interval times Count later is gone.
func (k *keepAlive) set(c net.KeepAliveConfig) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stopped {
		return
	}
	if k.timer != nil {
		k.timer.Stop()
		k.timer = nil
	}
	if !c.Enable || c.Idle < 0 || !k.qp.canProbe() {
		return
	}
	// Who was quiet from one tick to the next is probed.
	c.Interval, c.Count = max(c.Interval, 0), max(c.Count, 0) // package net leaves what is negative as it is
	c = keepalive.WithDefaults(c)
	k.idle = c.Idle
	k.period = max(k.idle/2, time.Millisecond)
	k.patience = c.Interval * time.Duration(c.Count)
	k.since = time.Now()
	k.timer = time.AfterFunc(k.period, k.tick)
}

// canProbe reports whether the peer has said that it answers RDMA READs, where that
// matters. The channel's lock is held.
func (q *qp) canProbe() bool { return q.keep.proof != byRead || q.reads }

// depth is how many RDMA READs to ask for: a probe may be one. q may be nil.
func (q *qp) depth(p verbs.ConnParam) C.uint8_t {
	depth := p.InitiatorDepth
	if q != nil && q.keep.proof == byRead {
		depth = max(depth, 1)
	}
	return C.uint8_t(depth)
}

// stop ends it for good. When it returns, no probe is being posted.
func (k *keepAlive) stop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopped = true
	for _, t := range []*time.Timer{k.timer, k.nudger} {
		if t != nil {
			t.Stop()
		}
	}
	k.timer, k.nudger = nil, nil
}

// tick probes a quiet peer, and gives up one that does not answer.
func (k *keepAlive) tick() {
	received := k.qp.received()
	var silent time.Duration
	if k.proof == byTCP {
		if info, err := tcpInfo(k.qp.id.LocalAddr(), k.qp.id.RemoteAddr()); err == nil {
			silent = keepalive.Silence(&info)
		}
	}
	if k.look(received, silent) {
		k.qp.lost(fmt.Errorf("keepalive: no answer: %w", syscall.ETIMEDOUT))
	}
}

// look is tick with the lock held. It reports whether the peer is gone.
func (k *keepAlive) look(received uint64, silent time.Duration) (gone bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.timer == nil {
		return false
	}
	now := signs{received: received, answers: k.answers}
	if k.proof == byAck {
		now.posts = k.qp.send.posts.Load()
	}
	if now.received != k.last.received || now.answers != k.last.answers {
		k.since = time.Now()
	}
	if !k.outstanding && now == k.last {
		k.probe()
	}
	k.last = now
	left := k.patience // of it
	switch {
	case k.proof == byTCP && silent > 0:
		left = k.idle + k.patience - silent
	case k.proof != byTCP && k.outstanding:
		left = time.Until(k.since.Add(k.patience))
	}
	if left <= 0 {
		k.timer = nil
		return true
	}
	k.timer.Reset(max(min(k.period, left), time.Millisecond))
	return false
}

// nudges are when, after it has made a connection, a siw dialer sends a message of
// no bytes. Its peer answers the request first and hooks up the socket next:
// messages that come in between stay unnoticed until something follows them. A peer
// from which a message has come, polled or not, has noticed, and may have closed its
// socket since: TCP would answer one more with a reset.
var nudges = [...]time.Duration{2 * time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond, 250 * time.Millisecond, time.Second, 4 * time.Second}

// probeRoom is how many nudges and probes may be outstanding. A nudge does not wait
// for the one before it.
const probeRoom = len(nudges) + 1

// nudge arranges for number n of them and those after it.
func (k *keepAlive) nudge(n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stopped || n == len(nudges) {
		return
	}
	after := nudges[n]
	if n > 0 {
		after -= nudges[n-1]
	}
	k.nudger = time.AfterFunc(after, func() {
		if k.qp.received() > 0 {
			return
		}
		k.mu.Lock()
		if !k.stopped {
			C.rn_post_probe(k.qp.c, C.IBV_WR_RDMA_WRITE, nudgeNumber) // one that has ended needs none
		}
		k.mu.Unlock()
		k.nudge(n + 1)
	})
}

const (
	probeNumber C.uint64_t = probeWRID
	nudgeNumber C.uint64_t = nudgeWRID
)

// probe posts one. k.mu is held.
func (k *keepAlive) probe() {
	op := C.int(C.IBV_WR_RDMA_WRITE)
	if k.proof == byRead {
		op = C.IBV_WR_RDMA_READ
	}
	k.outstanding = C.rn_post_probe(k.qp.c, op, probeNumber) == 0
	k.since = time.Now()
}

// answered takes the completion of a probe or a nudge. The CQ's lock is held. A
// peer that isn't there any more is reported as a disconnect, which rdma_cm does
// not notice.
func (k *keepAlive) answered(s verbs.Status, probe bool) {
	k.mu.Lock()
	if probe {
		k.outstanding = false
		if s == verbs.StatusSuccess {
			k.answers++
		}
	}
	k.mu.Unlock()
	if s == verbs.StatusSuccess || s == verbs.StatusWRFlushErr {
		return
	}
	k.stop()
	i := k.qp.id
	ch := i.lockChannel()
	defer ch.mu.Unlock()
	i.timedOut(fmt.Errorf("keepalive: %v: %w", s, syscall.ETIMEDOUT))
}

// timedOut reports the connection's end. The channel's lock is held.
func (i *id) timedOut(err error) {
	i.connected = false
	i.ch.Load().push(&verbs.Event{Type: verbs.EventDisconnected, ID: i, Err: err})
}

// lost ends a connection whose peer does not answer, while the device still hopes.
func (q *qp) lost(err error) {
	i := q.id
	ch := i.lockChannel()
	defer ch.mu.Unlock()
	if i.qp != q || !i.connected {
		return // it has ended meanwhile
	}
	i.timedOut(err)
	q.beginEnd()
	_ = q.finishEnd(true)
	C.rn_disconnect(i.c) // so that the kernel forgets the connection
}
