package rdmanet

import (
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/internal/fair"
	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
)

// setUpRequest is what a dialer in software says first.
func setUpRequest(t testing.TB) []byte {
	b, err := wire.AppendSetup(nil, &wire.SetupFrame{Revision: wire.Revision2, Enhanced: true, PrivateData: honest()})
	require.NoError(t, err)
	return b
}

// hostileFrom dials TCP from an address of another host than the tests', as far
// as a listener can tell.
var hostileFrom = net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}

// hostileHalfOpen is how many connections one client begins and leaves open.
func hostileHalfOpen() int { return max(600, scaled(2000, 2000)) }

// TestHalfOpenConnectionsLeaveRoom: 2,000 of one client, each at the same point,
// take a bounded number of places, goroutines and bytes, and others get in: at once
// from another host, and from the same one as soon as the oldest has had its time.
func TestHalfOpenConnectionsLeaveRoom(t *testing.T) {
	needsSoftware(t)
	request := setUpRequest(t)
	for _, tc := range []struct {
		name string
		says []byte
	}{
		{"connected and silent", nil},
		{"half a set-up", request[:len(request)/2]},
		{"a set-up and no frame", request},
	} {
		for from, dialer := range map[string]net.Dialer{"another host": hostileFrom, "the same host": {}} {
			t.Run(tc.name+"/"+from, func(t *testing.T) {
				checkLeaks(t)
				l := listen(t, ListenConfig{})
				goroutines := runtime.NumGoroutine()
				for n := range hostileHalfOpen() {
					c, err := dialer.Dial("tcp", l.Addr().String())
					if err != nil { // out of descriptors
						t.Logf("%d connections: %v", n, err)
						break
					}
					closeLater(t, c)
					_, _ = c.Write(tc.says) // it may be pushed out already
				}
				requireBounded(t, l, goroutines)
				refused := 0
				for i := range 10 {
					refused += dialAmong(t, l, fmt.Sprint("honest ", i))
				}
				if from == "another host" {
					require.Zero(t, refused)
				}
				requireBounded(t, l, goroutines)
			})
		}
	}
}

// requireBounded asserts what the connections that l has not handed out may take.
func requireBounded(t *testing.T, l *Listener, goroutines int) {
	t.Helper()
	l.mu.Lock()
	waiting := len(l.setups) + len(l.queue)
	l.mu.Unlock()
	require.LessOrEqual(t, waiting, l.backlog)
	const inTCP = 256 // the provider's own limit
	eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+l.backlog+inTCP+50 },
		"goroutines: %d, were %d", runtime.NumGoroutine(), goroutines)
	// Some that were dropped may be in Close yet.
	limit := l.cfg.poolConfig().Bytes(2 * l.backlog * l.cfg.receives())
	require.LessOrEqual(t, registered(), limit)
}

// registered is the memory of all pools, in bytes.
func registered() (n int64) {
	arenas.Lock()
	defer arenas.Unlock()
	for _, a := range arenas.m {
		n += a.pool.Stats().Bytes
	}
	return n
}

// dialAmong makes a connection, uses it and closes it. While it is refused it tries
// again, and counts.
func dialAmong(t *testing.T, l *Listener, says string) (refused int) {
	t.Helper()
	var c net.Conn
	for end := time.Now().Add(patience); ; refused++ {
		var err error
		c, err = Dial("rdma", l.Addr().String())
		if err == nil {
			break
		}
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.True(t, time.Now().Before(end), "it never gets in: %v", err)
	}
	require.NoError(t, l.SetDeadline(time.Now().Add(patience)))
	b, err := l.Accept()
	require.NoError(t, err)
	require.NoError(t, l.SetDeadline(time.Time{}))
	roundTrip(t, c, b, []byte(says))
	require.NoError(t, c.Close())
	require.NoError(t, b.Close())
	return refused
}

// TestAFloodKeepsNobodyOut: one host makes connections that it never uses as fast
// as it can, and dials from another succeed nevertheless, all but a few that find
// the event loop behind.
func TestAFloodKeepsNobodyOut(t *testing.T) {
	needsSoftware(t)
	checkLeaks(t)
	l := listen(t, ListenConfig{Backlog: 32})
	goroutines := runtime.NumGoroutine()
	request := setUpRequest(t)
	stop := make(chan struct{})
	var flood sync.WaitGroup
	defer flood.Wait()
	defer close(stop)
	var begun [2]atomic.Int64
	for i := range begun {
		flood.Go(func() {
			var conns []net.Conn // that it keeps open
			defer func() {
				for _, c := range conns {
					c.Close()
				}
			}()
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := hostileFrom.Dial("tcp", l.Addr().String())
				if err != nil { // out of ports
					time.Sleep(time.Millisecond)
					continue
				}
				_ = c.(*net.TCPConn).SetLinger(0)
				_, _ = c.Write(request)
				begun[i].Add(1)
				if conns = append(conns, c); len(conns) > 100 {
					conns[0].Close()
					conns = slices.Delete(conns, 0, 1)
				}
			}
		})
	}
	eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.setups) == l.backlog
	}, "the backlog is full")
	n, refused := scaled(100, 1000), 0
	for i := range n {
		refused += dialAmong(t, l, fmt.Sprint("honest ", i))
	}
	require.LessOrEqual(t, refused, n/5)
	requireBounded(t, l, goroutines+len(begun))
	t.Logf("%d connections in the flood, %d of %d refused", begun[0].Load()+begun[1].Load(), refused, n)
}

// TestSilentPeersLeaveRoom is the same on every provider: the peers complete their
// set-up, if they are let, and never send a frame.
func TestSilentPeersLeaveRoom(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{Backlog: 3})
	rounds := 2
	if long {
		rounds = 60
	}
	for i := range rounds {
		for range 5 {
			// Some are refused, which is what the backlog is for.
			r := rawConnect(t, "", l.addr.ap, honest(), 20)
			if ev, err := r.id.Wait(r.ctx(), cm.EventEstablished); err == nil {
				ev.Ack()
			} else {
				require.ErrorIs(t, err, syscall.ECONNREFUSED)
			}
		}
		l.mu.Lock()
		require.LessOrEqual(t, len(l.setups)+len(l.queue), l.backlog)
		l.mu.Unlock()
		dialAmong(t, l, fmt.Sprint("honest ", i))
	}
}

// TestRefusedConnectionsTakeNothing: those that a full backlog turns away cost no
// registered memory, and are over when their dialer knows.
func TestRefusedConnectionsTakeNothing(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		l := listen(t, ListenConfig{Config: cfg, Backlog: 1})
		c, err := (&Dialer{Config: cfg}).Dial("rdma", l.Addr().String())
		require.NoError(t, err)
		closeLater(t, c)
		eventually(t, func() bool { return len(l.queue) == 1 }, "it waits for Accept")
		goroutines := runtime.NumGoroutine()
		for range scaled(200, 2000) {
			_, err := (&Dialer{Config: cfg}).Dial("rdma", l.Addr().String())
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
			require.ErrorContains(t, err, "backlog")
		}
		eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines }, "no goroutine is left")
		b, err := l.Accept()
		require.NoError(t, err)
		closeLater(t, b)
		blocks := func() (n int) {
			arenas.Lock()
			defer arenas.Unlock()
			for _, a := range arenas.m {
				n += a.pool.Stats().InUse
			}
			return n
		}
		require.Equal(t, blocksOf(c.(*Conn))+blocksOf(b.(*Conn)), blocks())
	})
}

// blocksOf counts the blocks of a connection that nobody has used.
func blocksOf(c *Conn) int { return len(c.rx.slots) + len(c.tx.kept) }

// TestWhoIsPushedOut is makeRoom's choice.
func TestWhoIsPushedOut(t *testing.T) {
	const old, young, younger = 2 * stale, stale / 10, stale / 20
	now := time.Now()
	type waiting struct {
		host byte
		age  time.Duration
	}
	for _, tc := range []struct {
		name    string
		setups  []waiting
		from    byte
		dropped int // of setups; -1: the newcomer is refused
	}{
		{"nobody is there to go", nil, 1, -1},
		{"all are young, and of one host", []waiting{{1, younger}, {1, young}}, 1, -1},
		{"the oldest has had its time", []waiting{{1, young}, {1, 2 * old}, {1, old}}, 1, 1},
		{"another host has all", []waiting{{1, younger}, {1, young}, {1, younger}}, 2, 1},
		{"another host has most, and the newcomer's has one", []waiting{{2, old}, {1, younger}, {1, young}, {1, younger}}, 2, 2},
		{"it has one more than the newcomer's", []waiting{{2, young}, {1, young}, {1, young}}, 2, -1},
		{"each has one", []waiting{{1, young}, {2, young}, {3, young}}, 4, -1},
		{"each has one, and the oldest has had its time", []waiting{{1, young}, {2, old}, {3, young}}, 4, 1},
		{"the newcomer's host has most", []waiting{{1, young}, {1, young}, {1, young}, {2, young}}, 1, -1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			host := func(h byte) netip.Prefix { return fair.Host(netip.AddrFrom4([4]byte{192, 0, 2, h})) }
			l := &Listener{setups: make(map[*setup]struct{})}
			cancelled := -1
			for i, w := range tc.setups {
				l.setups[&setup{host: host(w.host), began: now.Add(-w.age), cancel: func() { cancelled = i }}] = struct{}{}
			}
			require.Equal(t, tc.dropped >= 0, l.makeRoom(host(tc.from)))
			require.Equal(t, tc.dropped, cancelled)
			require.Len(t, l.setups, len(tc.setups)-map[bool]int{true: 1}[tc.dropped >= 0])
		})
	}
}
