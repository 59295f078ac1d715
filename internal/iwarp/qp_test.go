package iwarp

import (
	"crypto/sha256"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestMessagesArriveWholeAndInOrder(t *testing.T) {
	for _, c := range []struct {
		name string
		p    verbs.ConnParam
		addr string
	}{
		{"IPv4", verbs.ConnParam{}, "127.0.0.1:0"},
		{"IPv6", verbs.ConnParam{}, "[::1]:0"},
		{"CRC", verbs.ConnParam{CRC: true}, "127.0.0.1:0"},
		{"revision 1", verbs.ConnParam{MPARevision: 1}, "127.0.0.1:0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			const block = 200_000
			a, b := pair(t, block, c.p, c.addr)
			rnd := rand.New(rand.NewPCG(1, 2))
			payload := make([]byte, block)
			for i := range payload {
				payload[i] = byte(rnd.Uint32())
			}
			sizes := []int{0, 1, 3, 4, 63, 64, 65, 2047, 2048, 2049, 4095, 4096, 4097, 65463, 65464, 65465, 65517, 65518, block - 1, block}
			for range 300 {
				sizes = append(sizes, rnd.IntN(1<<(1+rnd.IntN(17))))
			}
			var want [][32]byte
			sent := 0
			for sent < len(sizes) || len(b.got) < len(sizes) {
				if sent < len(sizes) && sent-len(b.got) < testDepth {
					n := sizes[sent]
					m := payload[:n]
					want = append(want, sha256.Sum256(m))
					wr := verbs.SendWR{WRID: uint64(sent), Inline: true, Signaled: true, Solicited: sent%2 == 0}
					for len(m) > 0 && len(wr.SGL) < 7 {
						k := min(len(m), 1+rnd.IntN(2*len(m)))
						wr.SGL = append(wr.SGL, verbs.SGE{Data: m[:k]})
						m = m[k:]
					}
					wr.SGL = append(wr.SGL, verbs.SGE{Data: m})
					if k, err := a.qp.PostSend([]verbs.SendWR{wr}); err == nil {
						require.Equal(t, 1, k)
						sent++
					} else {
						want = want[:sent]
						require.NoError(t, a.cq.Arm(false))
					}
				}
				a.poll()
				for sent-len(b.got) > rnd.IntN(testDepth) {
					b.poll()
				}
			}
			for i, m := range b.got {
				require.Equal(t, sizes[i], len(m))
				require.Equal(t, want[i], sha256.Sum256(m))
			}
			require.Eventually(t, func() bool { a.poll(); return a.sends == sent }, 5*time.Second, time.Millisecond)
			require.Empty(t, a.bad)
			require.Empty(t, b.bad)
		})
	}
}

func TestAFullSocketLosesNothing(t *testing.T) {
	const block = 300_000
	a, b := pair(t, block, verbs.ConnParam{}, "127.0.0.1:0")
	tcp(a).SetWriteBuffer(8192)
	for i := range testDepth {
		for j := range a.buf(testDepth) {
			a.buf(uint64(testDepth + i))[j] = byte(i + j)
		}
	}
	// Registered and inline ones, more than the socket takes; nobody reads yet.
	scratch := make([]byte, block)
	given := 0
	for i := range testDepth {
		wr := verbs.SendWR{WRID: uint64(i), Signaled: true, SGL: []verbs.SGE{{Data: a.buf(uint64(testDepth + i)), LKey: a.mr.LKey()}}}
		if i == 0 || i == 7 {
			copy(scratch, a.buf(uint64(testDepth+i)))
			wr.Inline = true
			wr.SGL[0] = verbs.SGE{Data: scratch}
		}
		n, err := a.qp.PostSend([]verbs.SendWR{wr})
		clear(scratch) // ours again
		if i == 7 {
			require.ErrorIs(t, err, syscall.EAGAIN)
			require.Zero(t, n)
			continue
		}
		require.NoError(t, err)
		given++
	}
	require.Eventually(t, func() bool { a.poll(); b.poll(); return len(b.got) == given }, 20*time.Second, time.Microsecond)
	for k, m := range b.got {
		i := k
		if i >= 7 {
			i++
		}
		require.Equal(t, a.buf(uint64(testDepth+i)), m, "message %d", i)
	}
	require.Eventually(t, func() bool { a.poll(); return a.sends == given }, 5*time.Second, time.Millisecond)
}

func TestDisconnectEndsBothSidesInOrder(t *testing.T) {
	a, b := pair(t, 1000, verbs.ConnParam{}, "127.0.0.1:0")
	_, err := a.qp.PostSend([]verbs.SendWR{{WRID: 9, Inline: true, SGL: []verbs.SGE{{Data: []byte("last words")}}}})
	require.NoError(t, err)
	require.NoError(t, a.id.Disconnect())
	for range 2 {
		require.NoError(t, next(t, a.ch, verbs.EventDisconnected).Err)
	}
	for a.poll() > 0 {
	}
	for b.poll() > 0 {
	}
	require.Len(t, a.bad, testDepth)
	require.Equal(t, [][]byte{[]byte("last words")}, b.got)
	require.Len(t, b.bad, testDepth) // the reposted one too
	require.NoError(t, b.id.Disconnect())
}

func TestSetErrorResetsThePeer(t *testing.T) {
	a, b := pair(t, 1000, verbs.ConnParam{}, "127.0.0.1:0")
	require.NoError(t, a.qp.SetError())
	next(t, a.ch, verbs.EventDisconnected)
	require.Error(t, next(t, a.ch, verbs.EventDisconnected).Err)
	for b.poll() > 0 {
	}
	require.Len(t, b.bad, testDepth)
}

func TestASendWithoutAReceiveTerminates(t *testing.T) {
	a, b := pair(t, 1000, verbs.ConnParam{CRC: true}, "127.0.0.1:0")
	for i := range testDepth + 1 {
		_, err := a.qp.PostSend([]verbs.SendWR{{WRID: uint64(i), Inline: true, SGL: []verbs.SGE{{Data: []byte("x")}}}})
		require.NoError(t, err)
	}
	var wc [testDepth]verbs.WC
	for i := 0; i < testDepth; {
		n, err := b.cq.Poll(wc[:])
		require.NoError(t, err)
		i += n
	}
	b.cq.Poll(wc[:])
	for range 2 {
		ev := next(t, a.ch, verbs.EventDisconnected)
		require.ErrorContains(t, ev.Err, "no buffer available")
	}
}

func TestWaitEnds(t *testing.T) {
	a, b := pair(t, 1000, verbs.ConnParam{}, "127.0.0.1:0")
	waited := func(f func()) {
		t.Helper()
		done := make(chan error, 1)
		go func() { done <- a.cq.Wait() }()
		f()
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(10 * time.Second):
			t.Fatal("Wait did not end")
		}
	}
	waited(func() {
		_, err := b.qp.PostSend([]verbs.SendWR{{WRID: 1, Inline: true, Solicited: true, SGL: []verbs.SGE{{Data: []byte("x")}}}})
		require.NoError(t, err)
	})
	require.Equal(t, 1, a.poll())
	for range 100 {
		waited(a.cq.Wake)
	}
	waited(func() { require.NoError(t, a.qp.SetError()) })
}

func TestPostingAllocatesNothing(t *testing.T) {
	a, b := pair(t, 40_000, verbs.ConnParam{}, "127.0.0.1:0")
	data := make([]byte, 32<<10)
	hdr := make([]byte, 8)
	wr := []verbs.SendWR{{Inline: true, SGL: []verbs.SGE{{Data: hdr}, {Data: data}}}}
	recv := []verbs.RecvWR{{}}
	var wc [4]verbs.WC
	allocs := testing.AllocsPerRun(200, func() {
		if _, err := a.qp.PostSend(wr); err != nil {
			t.Fatal(err)
		}
		for {
			if n, _ := b.cq.Poll(wc[:]); n > 0 {
				recv[0] = verbs.RecvWR{WRID: wc[0].WRID, SGE: verbs.SGE{Data: b.buf(wc[0].WRID), LKey: b.mr.LKey()}}
				b.qp.PostRecv(recv)
				return
			}
		}
	})
	require.Zero(t, allocs)
}
