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

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// keepAlive probes an idle peer with an RDMA WRITE of no bytes: its adapter
// acknowledges it, and neither its program nor its memory notices. One probe is
// outstanding at a time; the send queue and the CQ have an entry more for it.
type keepAlive struct {
	qp *qp

	mu          sync.Mutex
	timer       *time.Timer
	stopped     bool // for good
	period      time.Duration
	posts       uint64 // of the queue pair, at the last tick
	outstanding bool
}

// defaultIdle is that of package net.
const defaultIdle = 15 * time.Second

func (k *keepAlive) set(c net.KeepAliveConfig) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stopped || k.qp.dev.iwarp {
		return
	}
	if k.timer != nil {
		k.timer.Stop()
		k.timer = nil
	}
	if !c.Enable || c.Idle < 0 {
		return
	}
	if k.period = c.Idle; k.period == 0 {
		k.period = defaultIdle
	}
	k.posts = k.qp.send.posts.Load()
	k.timer = time.AfterFunc(k.period, k.tick)
}

// stop ends it for good. When it returns, no probe is being posted.
func (k *keepAlive) stop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopped = true
	if k.timer != nil {
		k.timer.Stop()
		k.timer = nil
	}
}

// tick probes if nothing was sent for a period.
func (k *keepAlive) tick() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.timer == nil {
		return
	}
	posts := k.qp.send.posts.Load()
	if posts == k.posts {
		k.probe()
	}
	k.posts = posts
	k.timer.Reset(k.period)
}

// nudges are when, after it has made a connection, a siw dialer sends a probe. Its
// peer answers the request first and hooks up the socket next: messages that come
// in between stay unnoticed until something follows them.
var nudges = [...]time.Duration{2 * time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond, 250 * time.Millisecond, time.Second, 4 * time.Second}

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
	k.timer = time.AfterFunc(after, func() {
		k.mu.Lock()
		if !k.stopped {
			k.probe()
		}
		k.mu.Unlock()
		k.nudge(n + 1)
	})
}

// probe posts one, unless one is outstanding. k.mu is held.
func (k *keepAlive) probe() {
	if !k.outstanding {
		k.outstanding = C.rn_post_probe(k.qp.c, probeNumber) == 0
	}
}

const probeNumber C.uint64_t = probeWRID

// answered takes the completion of a probe. A peer that isn't there any more is
// reported as a disconnect, which rdma_cm does not notice.
func (k *keepAlive) answered(s verbs.Status) {
	k.mu.Lock()
	k.outstanding = false
	k.mu.Unlock()
	if s == verbs.StatusSuccess || s == verbs.StatusWRFlushErr {
		return
	}
	k.stop()
	err := fmt.Errorf("keepalive: %v: %w", s, syscall.ETIMEDOUT)
	i := k.qp.id
	ch := i.lockChannel()
	defer ch.mu.Unlock()
	i.connected = false
	ch.push(&verbs.Event{Type: verbs.EventDisconnected, ID: i, Err: err})
}
