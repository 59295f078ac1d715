package iwarp

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// await waits as a user does: poll, arm, poll again, and only then wait.
func (e *end) await() {
	if e.poll() > 0 {
		return
	}
	require.NoError(e.t, e.cq.Arm(false))
	if e.poll() == 0 {
		require.NoError(e.t, e.cq.Wait())
	}
}

// duplex sends count messages of random sizes and gather lists, and receives as
// many. It keeps within the peer's receives, of which each message received
// proves that half are there again.
func (e *end) duplex(seed uint64, count int) (sent []string) {
	rnd := rand.New(rand.NewPCG(seed, 5))
	scratch := make([]byte, e.block)
	for len(sent) < count || len(e.got) < count || e.outstanding() > testDepth {
		for len(sent) < count && len(sent) < len(e.got)+testDepth {
			msg := scratch[:rnd.IntN(1+min(len(scratch), 1<<rnd.IntN(18)))]
			for i := range msg {
				msg[i] = byte(len(sent) + i*7)
			}
			if seed%2 == 0 && len(msg) > 0 {
				msg[0] = byte(rnd.Uint32())
			}
			wr := verbs.SendWR{WRID: uint64(testDepth + len(sent)%testDepth), Inline: true, Solicited: true}
			if e.sent[wr.WRID] {
				break
			}
			want := digest(msg)
			for rest := msg; ; {
				n := len(rest)
				if len(wr.SGL) < 7 {
					n = rnd.IntN(len(rest) + 1)
				}
				wr.SGL = append(wr.SGL, verbs.SGE{Data: rest[:n]})
				if rest = rest[n:]; len(rest) == 0 {
					break
				}
			}
			if err := e.send(wr); err != nil {
				require.ErrorIs(e.t, err, unix.EAGAIN)
				// It is tried again with the same message.
				for err != nil {
					e.await()
					err = e.send(wr)
				}
			}
			sent = append(sent, want)
			clear(scratch) // ours again
		}
		if rnd.IntN(4) == 0 {
			runtime.Gosched() // a slow reader
		}
		if len(sent) < count || len(e.got) < count || e.outstanding() > testDepth {
			e.await()
		}
	}
	return sent
}

func TestBothWaysAtOnceThroughTinySockets(t *testing.T) {
	for _, crc := range []bool{false, true} {
		for _, buffers := range []int{0, 16 << 10} {
			count := 300
			if buffers > 0 {
				count = 30 // TCP's persist timer is all that is left then
			}
			a, b := pair(t, 1<<17, verbs.ConnParam{CRC: crc}, "127.0.0.1:0")
			for _, e := range []*end{a, b} {
				if buffers > 0 {
					require.NoError(t, tcp(e).SetReadBuffer(buffers))
					require.NoError(t, tcp(e).SetWriteBuffer(buffers))
				}
			}
			var sentA, sentB []string
			within(t, 4*patience, "the transfer", func() {
				var wg sync.WaitGroup
				wg.Go(func() { sentA = a.duplex(1, count) })
				wg.Go(func() { sentB = b.duplex(2, count) })
				wg.Wait()
			})
			for i := range count {
				require.Equal(t, sentA[i], digest(b.got[i]))
				require.Equal(t, sentB[i], digest(a.got[i]))
			}
			require.Empty(t, a.bad)
			require.Empty(t, b.bad)
		}
	}
}

func TestAWaiterGetsWhatAPeerDribbles(t *testing.T) {
	for _, crc := range []bool{false, true} {
		e, p := connectPeer(t, false, 1<<13, crc)
		rnd := rand.New(rand.NewPCG(9, 9))
		sizes := make([]int, 12)
		for i := range sizes {
			sizes[i] = rnd.IntN(1 << rnd.IntN(13))
		}
		stream := randomStream(rnd, crc, sizes, []fpdu{tagged(wire.OpWrite, 1, 2, true, nil), tagged(wire.OpWrite, 3, 4, false, nil)})
		want := expect(stream, crc, sizes)
		go func() {
			for i := 0; len(stream) > 0; i++ {
				n := min(len(stream), 1)
				if i > 300 {
					n = min(len(stream), 1+rnd.IntN(3000))
				}
				if _, err := p.Write(stream[:n]); err != nil {
					return
				}
				stream = stream[n:]
			}
		}()
		within(t, 2*patience, "all messages", func() {
			for len(e.got) < len(sizes) {
				e.await()
			}
		})
		for i, m := range e.got {
			require.Equal(t, want.got[i], digest(m))
		}
	}
}

// Each message takes one return of Wait, and a Wait that nothing ends does not
// return.
func TestOneWakeUpPerMessage(t *testing.T) {
	a, b := pair(t, 100, verbs.ConnParam{}, "127.0.0.1:0")
	const count = 200
	waits := 0
	done := make(chan struct{})
	turn := make(chan struct{})
	go func() {
		defer close(done)
		for len(b.got) < count {
			if b.poll() == 0 {
				require.NoError(t, b.cq.Arm(true))
				if b.poll() == 0 {
					waits++
					require.NoError(t, b.cq.Wait())
				}
				continue
			}
			turn <- struct{}{}
		}
	}()
	for i := range uint64(count) {
		eventually(t, "the waiter to park", func() bool {
			c := b.cq.(*cq)
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.parked != nil
		})
		require.NoError(t, a.send(verbs.SendWR{WRID: i, Inline: true, Solicited: true, SGL: []verbs.SGE{{Data: []byte("x")}}}))
		<-turn
		a.poll()
	}
	<-done
	require.LessOrEqual(t, waits, count+1, "the connection's begin ends one, too")
}
