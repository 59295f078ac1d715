package rdmanet

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Bounds of what an idle connection takes, in bytes and goroutines.
const (
	idleHeap       = 64 << 10  // of Go's heap
	idleBeyond     = 128 << 10 // resident, beyond what is registered: pages
	idleOnce       = 16 << 20  // resident, for all of them together: the heap's reserve, threads
	idleGoroutines = 0
)

// idleConns is how many connections idle: 5,000 in software and 200 on a device
// with RDMANET_LONG=1, and otherwise few enough that it takes a moment.
func idleConns() int {
	if testProvider() == ProviderDevice {
		return max(20, scaled(100, 200))
	}
	return max(100, scaled(300, 5000))
}

// idle is a server in another process, and connections to it that do nothing.
type idle struct {
	addr  string
	cfg   Config
	conns []*Conn
}

func startIdle(tb testing.TB) *idle {
	tb.Helper()
	_, out := child(tb, "echo many", envAddr+"="+testAddr(tb))
	addr, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(tb, err)
	s := &idle{addr: strings.TrimSpace(addr)}
	tb.Cleanup(s.close)
	return s
}

func (s *idle) dial(tb testing.TB) *Conn {
	tb.Helper()
	c, err := (&Dialer{Config: s.cfg, Timeout: patience}).Dial("rdma", s.addr)
	require.NoError(tb, err, "after %d", len(s.conns))
	return c.(*Conn)
}

// grow makes n connections, each of which has been used once. Fewer, if the process
// may not have as many descriptors.
func (s *idle) grow(tb testing.TB, n int) int {
	tb.Helper()
	var limit syscall.Rlimit
	require.NoError(tb, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	const perConn, others = 2, 200 // a queue pair of a device has a completion channel
	if most := int(limit.Cur-others) / perConn; n > most {
		tb.Logf("RLIMIT_NOFILE is %d: %d connections instead of %d", limit.Cur, most, n)
		n = most
	}
	for range n {
		c := s.dial(tb)
		s.conns = append(s.conns, c)
		require.NoError(tb, echoed(c, []byte("used once")))
		require.NoError(tb, c.SetDeadline(time.Time{}))
	}
	return n
}

func (s *idle) close() {
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for k := i; k < len(s.conns); k += 16 {
				_ = s.conns[k].Close()
			}
		})
	}
	wg.Wait()
	s.conns = nil
}

// TestIdleConnectionsAreCheap says what idle connections take, and that one that is
// busy among them works.
func TestIdleConnectionsAreCheap(t *testing.T) {
	for _, cfg := range []Config{{}, {BufferSize: 4096, RecvDepth: 4, SendDepth: 2}} {
		resolved, err := cfg.resolve()
		require.NoError(t, err)
		t.Run(fmt.Sprintf("%d x %d", resolved.RecvDepth, resolved.BufferSize), func(t *testing.T) { idleAre(t, cfg) })
	}
}

func idleAre(t *testing.T, cfg Config) {
	checkLeaks(t)
	s := startIdle(t)
	s.cfg = cfg
	busy := s.dial(t)
	closeLater(t, busy)
	require.NoError(t, echoed(busy, bytesOf(1, paceLarge)))
	require.NoError(t, busy.SetDeadline(time.Time{}))
	alone := pace(t, busy)
	goroutines, descriptors := runtime.NumGoroutine(), fds(t)
	memory, heap, pinned := resident(), heapInUse(), int(registered())
	n := s.grow(t, idleConns())
	memory, heap, pinned = resident()-memory, heapInUse()-heap, int(registered())-pinned
	among := pace(t, busy)
	t.Logf("%d idle connections: each %d bytes registered, %d of the heap, %d resident in all; %.2f descriptors; %d goroutines in all",
		n, pinned/n, heap/n, memory/n, float64(fds(t)-descriptors)/float64(n), runtime.NumGoroutine()-goroutines)
	t.Logf("the busy one: %v; alone %v; ratio %.2f and %.2f", among, alone, among.trips/alone.trips, among.bytes/alone.bytes)
	limit := busy.cfg.poolConfig().Bytes(busy.cfg.receives()+busy.cfg.SendDepth)*5/4 + 1<<20/int64(n) // a pool grows by a quarter
	require.LessOrEqual(t, int64(pinned/n), limit)
	if !raceEnabled {
		require.Less(t, heap/n, idleHeap)
		require.Less(t, memory, pinned+n*idleBeyond+idleOnce)
	}
	eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+idleGoroutines }, "an idle connection has no goroutine")
	for _, c := range s.conns { // and they are alive
		require.NoError(t, echoed(c, []byte("used again")))
	}
	began := time.Now()
	s.close()
	t.Logf("all closed in %v", time.Since(began))
}

// heapInUse is the live part of Go's heap, in bytes.
func heapInUse() int {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// paceLarge fits into the window of a Config: nobody reads while it is written.
const paceLarge = 8 << 10

// paces are how fast a connection is, by a second.
type paces struct{ trips, bytes float64 }

func (p paces) String() string {
	return fmt.Sprintf("%.0f round trips/s, %.0f MB/s", p.trips, p.bytes/1e6)
}

// pace measures an echo: the best of a few tries, since others have the machine too.
func pace(tb testing.TB, c *Conn) (best paces) {
	tb.Helper()
	d := time.Duration(scaled(100, 1000)) * time.Millisecond
	small, large := make([]byte, 64), make([]byte, paceLarge)
	for range 3 {
		best.trips = max(best.trips, rate(tb, d, func() error { return pingPong(c, small) }))
		best.bytes = max(best.bytes, rate(tb, d, func() error { return pingPong(c, large) })*float64(len(large)))
	}
	return best
}

// rate is how often f can be called in a second.
func rate(tb testing.TB, d time.Duration, f func() error) float64 {
	tb.Helper()
	n, began := 0, time.Now()
	for time.Since(began) < d {
		require.NoError(tb, f())
		n++
	}
	return float64(n) / time.Since(began).Seconds()
}

func pingPong(c net.Conn, p []byte) error {
	if _, err := c.Write(p); err != nil {
		return err
	}
	_, err := io.ReadFull(c, p)
	return err
}

// BenchmarkBusyAmongIdle is a round trip of one connection, alone and among others
// that do nothing: to be compared with each other.
func BenchmarkBusyAmongIdle(b *testing.B) {
	for _, n := range []int{0, idleConns()} {
		for _, size := range []int{64, paceLarge} {
			b.Run(fmt.Sprintf("idle=%d/size=%d", n, size), func(b *testing.B) {
				s := startIdle(b)
				busy := s.dial(b)
				closeLater(b, busy)
				s.grow(b, n)
				p := make([]byte, size)
				require.NoError(b, pingPong(busy, p))
				b.SetBytes(2 * int64(size))
				b.ResetTimer()
				for b.Loop() {
					if err := pingPong(busy, p); err != nil {
						b.Fatal(err)
					}
				}
				b.StopTimer()
				s.close()
			})
		}
	}
}
