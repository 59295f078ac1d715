package iwarp

import (
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/keepalive"
)

// keepAlive finds a peer's host dead while something is on its way to it: TCP's own
// keepalive asks only a peer that owes no acknowledgement, and TCP goes on
// sending again for a quarter of an hour. Here the time is the same for
// both. TCP_USER_TIMEOUT won't do: it also ends a connection whose peer answers, but
// has had its window shut for that long, since its application doesn't read.
//
// mu is taken with id.mu held at most, and nothing else is taken under it.
type keepAlive struct {
	qp *qp

	mu      sync.Mutex
	timer   *time.Timer // of the next tick; nil if it is off
	limit   time.Duration
	stopped bool // for good
}

// tolerance is how long a peer's host may be silent: as long as TCP's keepalive
// takes. It is 0 if that is off or, by package net's rules, somebody else's.
func tolerance(c net.KeepAliveConfig) time.Duration {
	if !c.Enable || c.Idle < 0 || c.Interval < 0 || c.Count < 0 {
		return 0
	}
	c = keepalive.WithDefaults(c)
	return c.Idle + c.Interval*time.Duration(c.Count)
}

// checks is how often a silent host is looked at, and asked by TCP where the kernel
// has that, before its time is over.
const checks = 4

// set starts it on an established connection, or changes it, or ends it.
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
	if k.limit = tolerance(c); k.limit > 0 {
		k.qp.link.askEvery(k.limit / checks)
		k.timer = time.AfterFunc(k.limit/checks, k.tick)
	}
}

// stop ends it for good.
func (k *keepAlive) stop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopped = true
	if k.timer != nil {
		k.timer.Stop()
		k.timer = nil
	}
}

// tick ends the connection if the peer's host has been silent for too long.
func (k *keepAlive) tick() {
	if k.look() {
		k.qp.lost(fmt.Errorf("no answer from the peer's host: %w", syscall.ETIMEDOUT))
	}
}

// look is tick with the lock held. It reports whether the host is gone.
func (k *keepAlive) look() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.timer == nil || !k.qp.open.Load() {
		return false
	}
	silent := k.qp.link.silence()
	if silent >= k.limit {
		return true
	}
	next := k.limit / checks
	if silent > 0 {
		next = min(next, k.limit-silent)
	}
	k.timer.Reset(max(next, time.Millisecond))
	return false
}

// lost ends a connection whose peer is not there any more.
func (q *qp) lost(err error) {
	if live := q.kill(); live {
		q.reset()
		q.ended(err)
	}
}
