//go:build cgo && linux

package rdmacore

import (
	"crypto/sha256"
	"math/rand/v2"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestMessagesArriveWholeAndInOrder(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		const block = 66_000
		a, b := pair(t, block, addr)
		rnd := rand.New(rand.NewPCG(1, 2))
		inline := a.qp.Cap().MaxInline
		sizes := []int{0, 1, 3, 63, 64, 65, inline, inline + 1, 1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, block}
		for range 100 {
			sizes = append(sizes, rnd.IntN(1<<(1+rnd.IntN(15))))
		}
		var want [][32]byte
		for sent := 0; len(b.got) < len(sizes); {
			for sent < len(sizes) && sent-a.sends < testDepth && sent-len(b.got) < testDepth {
				m := a.sendBuf(sent)[:sizes[sent]]
				for i := range m {
					m[i] = byte(rnd.Uint32())
				}
				want = append(want, sha256.Sum256(m))
				wr := verbs.SendWR{WRID: uint64(sent), Inline: len(m) <= inline, Signaled: true, Solicited: sent%2 == 0}
				for len(m) > 0 && len(wr.SGL) < 3 {
					k := 1 + rnd.IntN(len(m))
					wr.SGL = append(wr.SGL, verbs.SGE{Data: m[:k], LKey: a.mr.LKey()})
					m = m[k:]
				}
				if len(m) > 0 {
					wr.SGL = append(wr.SGL, verbs.SGE{Data: m, LKey: a.mr.LKey()})
				}
				n, err := a.qp.PostSend([]verbs.SendWR{wr})
				require.NoError(t, err)
				require.Equal(t, 1, n)
				sent++
			}
			before := len(b.got)
			b.pollUntil(func() bool { return len(b.got) > before })
			for a.poll() > 0 {
			}
		}
		a.pollUntil(func() bool { return a.sends == len(sizes) })
		for i, m := range b.got {
			require.Equal(t, sizes[i], len(m))
			require.Equal(t, want[i], sha256.Sum256(m))
		}
		require.Empty(t, a.bad)
		require.Empty(t, b.bad)
	})
}

func TestABatchIsPostedInOrder(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		a, b := pair(t, 64, addr)
		wr := make([]verbs.SendWR, testDepth)
		for i := range wr {
			wr[i] = verbs.SendWR{WRID: uint64(100 + i), Inline: i%2 == 0, Signaled: i == testDepth-1,
				SGL: []verbs.SGE{{Data: a.sendBuf(i)[:8], LKey: a.mr.LKey()}}}
			wr[i].SGL[0].Data[0] = byte(i)
		}
		n, err := a.qp.PostSend(wr)
		require.NoError(t, err)
		require.Equal(t, testDepth, n)
		b.pollUntil(func() bool { return len(b.got) == testDepth })
		a.pollUntil(func() bool { return a.sends == 1 })
		for i, m := range b.got {
			require.Equal(t, byte(i), m[0])
		}
	})
}

func TestInlineMemoryIsTheCallersAgain(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		a, b := pair(t, 4096, addr)
		limit := a.qp.Cap().MaxInline
		require.GreaterOrEqual(t, limit, 32)
		data := make([]byte, limit) // of the Go heap
		for i := range testDepth {
			for k := range data {
				data[k] = byte(i)
			}
			_, err := a.qp.PostSend([]verbs.SendWR{{Inline: true, Signaled: true, SGL: []verbs.SGE{{Data: data[:10]}, {Data: data[10:]}}}})
			require.NoError(t, err)
			clear(data)
		}
		b.pollUntil(func() bool { return len(b.got) == testDepth })
		for i, m := range b.got {
			require.Len(t, m, limit)
			require.Equal(t, byte(i), m[0])
			require.Equal(t, byte(i), m[limit-1])
		}
	})
}

// requireFlushed asserts that each of the end's receives was flushed, once.
func (e *end) requireFlushed() {
	e.t.Helper()
	e.pollUntil(func() bool { return e.posts == 0 })
	seen := make(map[uint64]int)
	for _, wc := range e.bad {
		if wc.Op == verbs.OpRecv {
			require.Equal(e.t, verbs.StatusWRFlushErr, wc.Status)
			seen[wc.WRID]++
			require.Equal(e.t, 1, seen[wc.WRID])
		}
	}
	require.Len(e.t, seen, testDepth)
	require.Zero(e.t, e.poll())
}

func TestDisconnectEndsBothSidesInOrder(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		a, b := pair(t, 1000, addr)
		a.send(9, "last words")
		a.pollUntil(func() bool { return a.sends == 1 })
		b.pollUntil(func() bool { return len(b.got) == 1 })
		require.NoError(t, a.id.Disconnect())
		for range 2 {
			require.NoError(t, next(t, a.ch, verbs.EventDisconnected).Err)
		}
		require.NoError(t, b.id.Disconnect())
		require.Equal(t, "last words", string(b.got[0]))
		a.requireFlushed()
		b.requireFlushed()
		require.NoError(t, a.id.Disconnect())
	})
}

func TestWhatIsPostedAfterTheEndIsFlushed(t *testing.T) {
	for name, end := range map[string]func(*end) error{
		"Disconnect": func(e *end) error { return e.id.Disconnect() },
		"SetError":   func(e *end) error { return e.qp.SetError() },
	} {
		t.Run(name, func(t *testing.T) {
			onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
				a, _ := pair(t, 1000, addr)
				require.NoError(t, end(a))
				a.requireFlushed()
				a.bad = nil
				a.postRecv(3)
				a.send(100, "nobody listens")
				n, err := a.qp.PostSend([]verbs.SendWR{{WRID: 101, SGL: []verbs.SGE{{Data: a.sendBuf(0), LKey: a.mr.LKey()}}}})
				require.NoError(t, err)
				require.Equal(t, 1, n)
				a.pollUntil(func() bool { return len(a.bad) == 3 })
				for _, wc := range a.bad {
					require.Equal(t, verbs.StatusWRFlushErr, wc.Status)
				}
				require.Zero(t, a.poll())
			})
		})
	}
}

func TestSetErrorIsNoticedByThePeer(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		a, b := pair(t, 1000, addr)
		require.NoError(t, a.qp.SetError())
		a.requireFlushed()
		for range 2 {
			next(t, a.ch, verbs.EventDisconnected)
		}
		require.NoError(t, b.id.Disconnect())
		b.requireFlushed()
	})
}

func TestRejectCarriesPrivateData(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		a, passive := request(t, 1000, addr)
		require.NoError(t, passive.Reject([]byte("not today")))
		ev := next(t, a.ch, verbs.EventRejected)
		require.Equal(t, "not today", string(ev.PrivateData[:9]))
		require.ErrorIs(t, ev.Err, syscall.ECONNREFUSED)
		require.NoError(t, a.qp.SetError())
		a.requireFlushed()
	})
}

func TestNobodyListens(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		ch := newTestChannel(t)
		a := &end{t: t, ch: ch, id: resolved(t, ch, netip.AddrPortFrom(addr, 9))}
		a.createQP(100)
		t.Cleanup(a.free)
		require.NoError(t, a.id.Connect(testParam))
		ev := next(t, ch, verbs.EventRejected)
		require.ErrorIs(t, ev.Err, syscall.ECONNREFUSED)
	})
}

func TestNobodyAnswersTheAddress(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		ch := newTestChannel(t)
		i := newTestID(t, ch)
		b := addr.AsSlice()
		b[len(b)-1] = 77
		nobody, _ := netip.AddrFromSlice(b)
		require.NoError(t, i.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(nobody, 9), 200*time.Millisecond))
		ev := next(t, ch, verbs.EventAddrError)
		require.ErrorIs(t, ev.Err, syscall.EHOSTUNREACH)
		require.ErrorContains(t, ev.Err, "ARP")
	})
}

func TestWaitEnds(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		a, b := pair(t, 1000, addr)
		waited := func(f func()) {
			t.Helper()
			done := make(chan error, 1)
			go func() { done <- a.cq.Wait() }()
			f()
			select {
			case err := <-done:
				require.NoError(t, err)
			case <-time.After(patience):
				t.Fatal("Wait did not end")
			}
		}
		for _, solicited := range []bool{false, true} {
			require.NoError(t, a.cq.Arm(solicited))
			waited(func() { b.send(1, "x") })
			require.Equal(t, 1, a.poll())
		}
		for range 100 {
			waited(a.cq.Wake)
		}
		a.cq.Wake()
		waited(func() {})
		require.NoError(t, a.cq.Arm(false))
		waited(func() { require.NoError(t, a.qp.SetError()) })
		a.requireFlushed()
	})
}

func TestPostingAllocatesNothing(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		a, b := pair(t, 4096, addr)
		hdr := make([]byte, 8)
		inline := verbs.SendWR{WRID: 1, Inline: true, Signaled: true, SGL: []verbs.SGE{{Data: hdr}}}
		registered := verbs.SendWR{WRID: 2, Signaled: true, SGL: []verbs.SGE{{Data: a.sendBuf(0), LKey: a.mr.LKey()}}}
		wr := []verbs.SendWR{inline, registered}
		recv := []verbs.RecvWR{{}, {}}
		var wc [4]verbs.WC
		takeTwo := func(e *end) {
			for got := 0; got < 2; {
				n, err := e.cq.Poll(wc[got:])
				if err != nil {
					t.Fatal(err)
				}
				if got += n; n > 0 {
					continue
				}
				if err := e.cq.Arm(false); err != nil {
					t.Fatal(err)
				}
				if n, _ = e.cq.Poll(wc[got:]); n == 0 {
					if err := e.cq.Wait(); err != nil {
						t.Fatal(err)
					}
				}
				got += n
			}
		}
		allocs := testing.AllocsPerRun(100, func() {
			if _, err := a.qp.PostSend(wr); err != nil {
				t.Fatal(err)
			}
			takeTwo(b)
			for i := range recv {
				recv[i] = verbs.RecvWR{WRID: wc[i].WRID, SGE: verbs.SGE{Data: b.buf(wc[i].WRID), LKey: b.mr.LKey()}}
			}
			if _, err := b.qp.PostRecv(recv); err != nil {
				t.Fatal(err)
			}
			takeTwo(a)
		})
		require.Zero(t, allocs)
	})
}

func TestMigrateWakesWhoeverWaits(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		from, to := newTestChannel(t), newTestChannel(t)
		i := newTestID(t, from)
		require.NoError(t, i.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(addr, 9), patience))
		raw, err := from.File().SyscallConn()
		require.NoError(t, err)
		require.Eventually(t, func() bool { return readable(raw) }, patience, time.Millisecond)
		raw, err = to.File().SyscallConn()
		require.NoError(t, err)
		woken := make(chan error, 1)
		go func() { woken <- raw.Read(func(uintptr) bool { return false }) }()
		require.NoError(t, i.Migrate(to))
		select {
		case <-woken:
		case <-time.After(patience):
			t.Fatal("nobody was woken")
		}
		require.Equal(t, i, next(t, to, verbs.EventAddrResolved).ID)
	})
}

func readable(raw syscall.RawConn) (yes bool) {
	raw.Control(func(fd uintptr) {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		yes = err == nil && n == 1
	})
	return yes
}

// TestManyQueues: siw's library fails for the queue that its kernel puts at a
// certain place, which is the 145th page.
func TestManyQueues(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		a, _ := pair(t, 64, addr)
		for i := range 300 {
			c, err := newCQ(a.cq.(*cq).dev, 16)
			require.NoError(t, err, i)
			defer func() { require.NoError(t, c.Destroy()) }()
		}
	})
}
