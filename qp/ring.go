package qp

import "sync/atomic"

// ring is the account of one work queue: the WRIDs outstanding, oldest first.
// One goroutine at a time posts (under the queue's lock) and one at a time
// completes (under the CQ's lock), and neither waits for the other: a poster
// may be inside the provider for as long as it likes.
//
// Entries are atomic because a completion that matches nothing is looked for
// among entries that the poster may be taking back.
type ring struct {
	wrid  []atomic.Uint64
	mask  uint64
	depth uint64

	_    [64]byte      // head and tail are written by different goroutines
	head atomic.Uint64 // the oldest outstanding; moved by completions
	_    [56]byte
	tail atomic.Uint64 // the next to post; moved by posts
}

func (r *ring) init(depth int) {
	size := uint64(1)
	for size <= uint64(depth) { // there is one more than room shows, for a marker
		size <<= 1
	}
	r.wrid = make([]atomic.Uint64, size)
	r.mask = size - 1
	r.depth = uint64(depth)
}

// len returns how many requests are outstanding.
func (r *ring) len() int {
	return max(0, int(int64(r.tail.Load()-r.head.Load())))
}

// room returns how many more requests may be posted. For the poster.
func (r *ring) room() int {
	return max(0, int(r.depth)-r.len())
}

// put writes the i-th WRID of a batch that publish will make visible. The
// batch must fit in room.
func (r *ring) put(i int, wrid uint64) {
	r.wrid[(r.tail.Load()+uint64(i))&r.mask].Store(wrid)
}

// publish makes a batch of n outstanding.
func (r *ring) publish(n int) { r.tail.Add(uint64(n)) }

// takeBack makes the newest n not outstanding: the provider refused them.
func (r *ring) takeBack(n int) {
	tail := r.tail.Load() - uint64(n)
	// A false completion may already have retired what was refused.
	if head := r.head.Load(); int64(tail-head) < 0 {
		tail = head
	}
	r.tail.Store(tail)
}

// retireThrough completes wrid and all that is older. It reports whether wrid
// was outstanding.
func (r *ring) retireThrough(wrid uint64) bool {
	tail := r.tail.Load()
	for i := r.head.Load(); int64(tail-i) > 0; i++ {
		if r.wrid[i&r.mask].Load() == wrid {
			r.head.Store(i + 1)
			return true
		}
	}
	return false
}

// retireOldest completes wrid if it is the oldest outstanding.
func (r *ring) retireOldest(wrid uint64) bool {
	head := r.head.Load()
	if int64(r.tail.Load()-head) <= 0 || r.wrid[head&r.mask].Load() != wrid {
		return false
	}
	r.head.Store(head + 1)
	return true
}
