package iwarp

import (
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// aNudge is how a peer sees one.
var aNudge = tagged(wire.OpWrite, 0, 0, true, []byte{})

// soon is n times at which a test's connection is nudged.
func soon(n int) (due []time.Duration) {
	for i := range n {
		due = append(due, time.Duration(i+1)*time.Millisecond)
	}
	return due
}

// over reports whether no nudge is to come.
func (n *nudger) over(q *qp) bool {
	q.tx.mu.Lock()
	defer q.tx.mu.Unlock()
	return len(n.due) == 0
}

func nudgerOf(e *end) *nudger { return &e.qp.(*qp).tx.nudger }

func TestOnlyADialerNudges(t *testing.T) {
	for role, weDial := range roles {
		for _, crc := range []bool{false, true} {
			t.Run(role, func(t *testing.T) {
				setNudges(t, soon(3)...)
				e, p := connectPeer(t, weDial, 100, crc)
				want := []fpdu{aNudge, aNudge, aNudge}
				if !weDial {
					want = nil
				}
				for range want {
					require.Equal(t, aNudge, p.next())
				}
				eventually(t, "no more nudges", func() bool { return nudgerOf(e).over(e.qp.(*qp)) })
				require.NoError(t, e.id.Disconnect())
				require.Empty(t, p.rest())
				p.Close()
				e.settles()
			})
		}
	}
}

// A peer that sends has noticed. What it has sent need not have been read here.
func TestAPeerThatWasHeardIsNotNudged(t *testing.T) {
	for _, weRead := range []bool{true, false} {
		setNudges(t, time.Hour, 2*time.Hour, 3*time.Hour)
		e, p := connectPeer(t, true, 100, false)
		q := e.qp.(*qp)
		q.nudge()
		require.False(t, nudgerOf(e).over(q))
		if weRead {
			alive(e, p)
		} else {
			p.write([]byte{0}) // not even a message
			eventually(t, "it is here", q.heard)
		}
		q.nudge()
		require.True(t, nudgerOf(e).over(q))
		q.nudge() // one whose timer was too late to be stopped
		require.NoError(t, e.id.Disconnect())
		require.Equal(t, []fpdu{aNudge}, p.rest())
		p.Close()
		e.settles()
	}
}

// However a connection ends, nothing of its nudges is left, and a late one does
// nothing.
func TestNudgesEndWithTheConnection(t *testing.T) {
	for name, end := range map[string]func(e *end, p *peer){
		"Disconnect":    func(e *end, p *peer) { require.NoError(e.t, e.id.Disconnect()); p.Close() },
		"SetError":      func(e *end, p *peer) { require.NoError(e.t, e.qp.SetError()) },
		"Destroy":       func(e *end, p *peer) { require.NoError(e.t, e.qp.Destroy()) },
		"the peer's":    func(e *end, p *peer) { p.Close() },
		"a reset":       func(e *end, p *peer) { p.SetLinger(0); p.Close() },
		"a fault there": func(e *end, p *peer) { p.write(make([]byte, 64)); p.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			leaksNoDescriptor(t)
			setNudges(t, time.Hour)
			e, p := connectPeer(t, true, 100, false)
			end(e, p)
			e.settles()
			q := e.qp.(*qp)
			require.True(t, nudgerOf(e).over(q))
			require.False(t, nudgerOf(e).timer.Stop(), "the timer runs")
			q.nudge()
			q.nudge()
			next(t, e.ch, verbs.EventDisconnected)
			nothingMore(t, e.ch)
		})
	}
}

// A connection that is being nudged may end at any moment.
func TestClosingRacesWithNudges(t *testing.T) {
	setNudges(t, slices.Repeat([]time.Duration{0}, 1000)...)
	for i := range 50 {
		e, p := connectPeer(t, true, 100, false)
		go func() { _, _ = io.Copy(io.Discard, p) }()
		for range i % 7 {
			runtime.Gosched()
		}
		require.NoError(t, e.id.Disconnect())
		e.settles()
		require.NoError(t, e.id.Destroy())
	}
	eventually(t, "nothing runs", func() bool {
		buf := make([]byte, 1<<20)
		return !strings.Contains(string(buf[:runtime.Stack(buf, true)]), "iwarp.(*qp).nudge")
	})
}

// A full socket takes no nudge, and none waits for room: an end in order would be
// cut off. One that has begun goes on.
func TestANudgeDoesNotWaitForRoom(t *testing.T) {
	setNudges(t, time.Hour, 2*time.Hour)
	for _, room := range []int{0, 7, math.MaxInt32} {
		ch := newChannel(t)
		l := newTape()
		l.room = room
		q, c := onTapeWith(t, ch, l, 1460, agreed{dialed: true}, verbs.QPCap{SendWR: 2, RecvWR: 1, SendSGE: 1})
		q.nudge()
		q.tx.mu.Lock()
		require.Equal(t, room == 7, q.tx.flushing)
		q.tx.mu.Unlock()
		l.give(1000)
		n, err := q.PostSend([]verbs.SendWR{{Signaled: true, Inline: true, SGL: []verbs.SGE{{Data: []byte("message")}}}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		eventually(t, "sent", func() bool {
			var wc [1]verbs.WC
			n, err := c.Poll(wc[:])
			require.NoError(t, err)
			return n == 1
		})
		q.tx.mu.Lock()
		want := appendFPDU(nil, false, sendHeader(1, 0, true), []byte("message"))
		if room > 0 {
			want = append(makeFPDU(false, aNudge.Header, nil), want...)
		}
		require.Equal(t, want, l.out)
		q.tx.mu.Unlock()
	}
}

// Nudges go between messages, never into one, and disturb nothing.
func TestNudgesAmongMessages(t *testing.T) {
	due := make([]time.Duration, 500)
	for i := range due {
		due[i] = time.Duration(i) * 100 * time.Microsecond
	}
	setNudges(t, due...)
	for _, crc := range []bool{false, true} {
		p := depths(4)
		p.CRC = crc
		a, b := pairWith(t, 5000, p)
		const count = 300
		memory := b.register(make([]byte, 5000), remoteBoth)
		sink := a.register(make([]byte, 5000), localOnly)
		for i := range uint64(count) {
			wr := verbs.SendWR{WRID: i, Inline: true, SGL: []verbs.SGE{{Data: randomBytes(int(i * 16))}}}
			if i%10 == 9 {
				wr = memory.wr(i, verbs.WRRDMARead, sink.sge(0, int(i*16)), 0)
			}
			for a.send(wr) != nil {
				a.poll()
				b.poll()
			}
			a.poll()
			b.poll()
		}
		eventually(t, "all messages", func() bool { a.poll(); b.poll(); return len(b.got) == count*9/10 && a.sends == count })
		require.Empty(t, a.bad)
		require.Empty(t, b.bad)
	}
}

func TestANudgeAllocatesNothing(t *testing.T) {
	ch := newChannel(t)
	setNudges(t, slices.Repeat([]time.Duration{time.Hour}, 1000)...)
	l := newTape()
	l.out = make([]byte, 0, 1<<20)
	q, _ := onTapeWith(t, ch, l, 1460, agreed{dialed: true, crc: true}, verbs.QPCap{SendWR: 1, RecvWR: 1, SendSGE: 1})
	require.Zero(t, testing.AllocsPerRun(100, q.nudge))
}
