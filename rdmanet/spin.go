package rdmanet

import (
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Spinning: on a device a wake-up takes longer than a message, so whoever waits
// polls for a moment before it parks. That is worth it for whoever has sent
// something and waits for the answer, while the peer answers within that moment.
// It costs a core when it does not; so a connection stops after some misses, and
// tries again ever more rarely.

// spinner decides whether to spin. Only the leader uses it.
type spinner struct {
	limit  time.Duration // for how long; 0 or less: never
	misses int           // in a row, up to spinMisses
	parks  int           // waits that parked since the last try
	pause  int           // waits between two tries
	spins  int
}

const (
	spinMisses   = 16
	spinMinPause = 4
	spinMaxPause = 256
	spinPolls    = 16 // between two looks at the clock, which may take longer than they do

	// spinYield is after how many spins the goroutine yields. One that never parks
	// looks to the runtime, after 10 ms, as if it computed: it is preempted by
	// signals, and its thread loses the right to run Go in the midst of cgo calls.
	spinYield = 32
)

// worthwhile reports whether to spin in this wait.
func (s *spinner) worthwhile() bool {
	if s.limit <= 0 {
		return false
	}
	if s.misses < spinMisses {
		return true
	}
	s.parks++
	return s.parks >= s.pause
}

// tried notes what came of it.
func (s *spinner) tried(hit bool) {
	s.parks = 0
	switch {
	case hit:
		s.misses = 0
	case s.misses < spinMisses:
		s.misses++
		s.pause = spinMinPause
	default:
		s.pause = min(2*s.pause, spinMaxPause)
	}
}

// Who spins or naps keeps its thread from the other goroutines: no more than half
// of the threads at a time.
var (
	holding    atomic.Int32
	maxHolding = int32(runtime.GOMAXPROCS(0) / 2)
)

// hold reports whether one more may; if so, it calls unhold afterwards.
func hold() bool {
	if holding.Add(1) <= maxHolding {
		return true
	}
	unhold()
	return false
}

func unhold() { holding.Add(-1) }

// spin polls until w is ready, or for as long as it is worth it. It reports
// whether w is ready.
func (c *Conn) spin(w *waiter) bool {
	s := &c.wait.spin
	if !s.worthwhile() || !hold() {
		return false
	}
	defer unhold()
	if s.spins++; s.spins%spinYield == 0 {
		runtime.Gosched()
	}
	hit := c.pollFor(w, s.limit)
	s.tried(hit)
	if hit {
		c.stats.spins.Add(1)
	}
	return hit
}

func (c *Conn) pollFor(w *waiter, limit time.Duration) bool {
	var start time.Time
	for {
		for range spinPolls {
			if c.poll() > 0 && w.ready() {
				return true
			}
		}
		switch {
		case w.ready(): // somebody else polled
			return true
		case c.interrupted(w) != nil:
			return false
		case start.IsZero():
			start = time.Now()
		case time.Since(start) >= limit:
			return false
		}
	}
}

// deviceSpin and deviceNap are the limits of spins and naps on devices if Config
// leaves them open: several times what a wake-up takes here, within bounds. Were
// spins shorter, two sides that have parked once would never meet again: each would
// park before the other has woken up, found its message and answered. Were naps, to
// wake up from them would take a notable part of the time.
func deviceSpin() time.Duration { return wakeUps(8) }
func deviceNap() time.Duration  { return wakeUps(20) }

func wakeUps(n time.Duration) time.Duration {
	return min(max(n*oneWakeUp(), 100*time.Microsecond), time.Millisecond)
}

var oneWakeUp = sync.OnceValue(wakeUp)

// wakeUp measures how long it takes until a goroutine that the netpoller has
// parked runs again.
func wakeUp() time.Duration {
	r, w, err := os.Pipe()
	if err != nil {
		return 0
	}
	defer r.Close()
	defer w.Close()
	woken := make(chan time.Time)
	go func() {
		defer close(woken)
		for b := make([]byte, 1); ; {
			if _, err := r.Read(b); err != nil {
				return
			}
			woken <- time.Now()
		}
	}()
	took := make([]time.Duration, 5)
	for i := range took {
		time.Sleep(200 * time.Microsecond) // it parks
		start := time.Now()
		if _, err := w.Write([]byte{0}); err != nil {
			return 0
		}
		took[i] = (<-woken).Sub(start)
	}
	w.Close()
	<-woken
	slices.Sort(took)
	return took[len(took)/2]
}
