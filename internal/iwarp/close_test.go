package iwarp

import (
	"net/netip"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// stuff posts sends until more is posted than the socket takes.
func stuff(e *end) {
	tcp(e).SetWriteBuffer(4096)
	for i := range uint64(testDepth) {
		wr := verbs.SendWR{WRID: 100 + i, SGL: []verbs.SGE{{Data: e.buf(testDepth), LKey: e.mr.LKey()}}}
		if i%2 == 1 {
			wr = verbs.SendWR{WRID: 100 + i, Inline: true, SGL: []verbs.SGE{{Data: make([]byte, smallSend)}}}
		}
		require.NoError(e.t, e.send(wr))
	}
}

func TestEveryEndingCompletesAllWorkOnce(t *testing.T) {
	endings := []struct {
		name  string
		end   func(e *end, p *peer)
		errno syscall.Errno // of DISCONNECTED; 0 if in order
		stuck syscall.Errno // the same when sends are cut off
	}{
		{"Disconnect", func(e *end, p *peer) { require.NoError(e.t, e.id.Disconnect()) }, 0, 0},
		{"SetError", func(e *end, p *peer) { require.NoError(e.t, e.qp.SetError()) }, syscall.ECONNABORTED, syscall.ECONNABORTED},
		{"destruction of the QP", func(e *end, p *peer) { require.NoError(e.t, e.qp.Destroy()) }, syscall.ECONNABORTED, syscall.ECONNABORTED},
		{"the peer's FIN", func(e *end, p *peer) { p.CloseWrite() }, 0, 0},
		{"the peer's FIN inside a message", func(e *end, p *peer) { p.write([]byte{0}); p.CloseWrite() }, syscall.ECONNRESET, syscall.ECONNRESET},
		{"the peer's reset", func(e *end, p *peer) { p.SetLinger(0); p.Close() }, syscall.ECONNRESET, syscall.ECONNRESET},
		{"the peer's Terminate", func(e *end, p *peer) { p.write(terminate(false, nil)) }, syscall.ECONNRESET, syscall.ECONNRESET},
		{"a fault of the peer", func(e *end, p *peer) { p.write(make([]byte, 64)) }, syscall.EPROTO, syscall.EPROTO},
	}
	for role, weDial := range roles {
		for _, stuck := range []bool{false, true} {
			for _, c := range endings {
				name, errno := role+"/"+c.name, c.errno
				if stuck {
					name, errno = name+" while sends are stuck", c.stuck
				}
				t.Run(name, func(t *testing.T) {
					leaksNoDescriptor(t)
					e, p := connectPeer(t, weDial, 500_000, false)
					if stuck {
						stuff(e)
						require.Positive(t, e.outstanding()-testDepth)
					} else {
						require.NoError(t, e.send(verbs.SendWR{Inline: true, SGL: []verbs.SGE{{Data: []byte("x")}}}))
					}
					c.end(e, p)
					if c.name != "destruction of the QP" {
						eventually(t, "the end", func() bool { e.poll(); return !e.qp.(*qp).open.Load() })
					}
					if c.name == "Disconnect" && !stuck {
						require.Len(t, p.rest(), 1)
						p.Close()
					}
					e.settles()
					ev := next(t, e.ch, verbs.EventDisconnected)
					if errno == 0 {
						require.NoError(t, ev.Err)
					} else {
						require.ErrorIs(t, ev.Err, errno)
					}

					// The QP stays in the error state, and other endings are no news.
					e.postRecv(0)
					require.NoError(t, e.send(verbs.SendWR{WRID: 9, Inline: true}))
					require.Equal(t, 2, e.outstanding())
					e.settles()
					require.NoError(t, e.id.Disconnect())
					require.NoError(t, e.qp.SetError())
					require.NoError(t, e.qp.Destroy())
					nothingMore(t, e.ch)
				})
			}
		}
	}
}

func TestWorkOfAnUnconnectedQPIsFlushed(t *testing.T) {
	ch := newChannel(t)
	for name, end := range map[string]func(*end){
		"SetError":              func(e *end) { require.NoError(t, e.qp.SetError()) },
		"destruction of the QP": func(e *end) { require.NoError(t, e.qp.Destroy()) },
		"destruction of the id": func(e *end) { require.NoError(t, e.id.Destroy()) },
	} {
		t.Run(name, func(t *testing.T) {
			e := resolved(t, ch, netip.MustParseAddrPort("127.0.0.1:1"))
			e.createQP(100)
			require.ErrorIs(t, e.send(verbs.SendWR{Inline: true}), syscall.EINVAL)
			end(e)
			e.settles()
			require.Len(t, e.bad, testDepth)
			nothingMore(t, ch)
		})
	}
}

func TestAQPInTheErrorStateDoesNotConnect(t *testing.T) {
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 1)
	e := resolved(t, newChannel(t), l.LocalAddr())
	e.createQP(100)
	require.NoError(t, e.qp.SetError())
	require.NoError(t, e.id.Connect(verbs.ConnParam{}))
	b := &end{t: t, ch: ch, id: next(t, ch, verbs.EventConnectRequest).ID}
	t.Cleanup(func() { b.id.Destroy() })
	b.createQP(100)
	require.NoError(t, b.id.Accept(verbs.ConnParam{}))
	require.ErrorIs(t, next(t, e.ch, verbs.EventConnectError).Err, syscall.EINVAL)
	next(t, ch, verbs.EventEstablished)
	require.NoError(t, next(t, ch, verbs.EventDisconnected).Err)

	p := dialPeer(t, l.LocalAddr())
	p.writeSetup(wire.SetupFrame{Revision: 1})
	c := &end{t: t, ch: ch, id: next(t, ch, verbs.EventConnectRequest).ID}
	t.Cleanup(func() { c.id.Destroy() })
	c.createQP(100)
	require.NoError(t, c.qp.SetError())
	require.ErrorIs(t, c.id.Accept(verbs.ConnParam{}), syscall.EINVAL)
	c.settles()
	nothingMore(t, ch)
}

// Each end sees EVENT_ESTABLISHED before anything else, even if the peer's end
// comes together with its set-up frame.
func TestEstablishedComesBeforeDisconnected(t *testing.T) {
	for role, weDial := range roles {
		t.Run(role, func(t *testing.T) {
			for range 50 {
				ch := newChannel(t)
				var e *end
				if weDial {
					var p *peer
					e, p = connectPeer(t, true, 10, false) // waits for EVENT_ESTABLISHED
					p.Close()
					ch = e.ch
				} else {
					p := dialPeer(t, listenOn(t, ch, "127.0.0.1:0", 1).LocalAddr())
					p.writeSetup(wire.SetupFrame{Revision: 1})
					require.NoError(t, p.CloseWrite())
					accept(t, ch, next(t, ch, verbs.EventConnectRequest), 10, verbs.ConnParam{})
					next(t, ch, verbs.EventEstablished)
				}
				require.NoError(t, next(t, ch, verbs.EventDisconnected).Err)
				nothingMore(t, ch)
			}
		})
	}
}

func TestDisconnectGivesUpOnAPeerThatStays(t *testing.T) {
	defer func(old time.Duration) { drainTimeout = old }(drainTimeout)
	drainTimeout = 50 * time.Millisecond
	e, p := connectPeer(t, true, 100, false)
	require.NoError(t, e.id.Disconnect())
	require.ErrorIs(t, next(t, e.ch, verbs.EventDisconnected).Err, syscall.ETIMEDOUT)
	require.Empty(t, p.rest())
}

func TestDestroyEndsADrainAtOnce(t *testing.T) {
	for i := range 100 {
		e, p := connectPeer(t, i%2 == 0, 100, false)
		waiting := make(chan struct{})
		go func() {
			defer close(waiting)
			e.cq.Wait()
		}()
		require.NoError(t, e.id.Disconnect())
		within(t, 5*time.Second, "Destroy", func() {
			require.NoError(t, e.qp.Destroy())
			require.NoError(t, e.id.Destroy())
		})
		<-waiting
		nothingMore(t, e.ch)
		require.Empty(t, p.rest())
	}
}

func TestLateDataDoesNotSpoilADisconnect(t *testing.T) {
	e, p := connectPeer(t, true, 100, false)
	last := make([]byte, 100_000)
	require.NoError(t, e.send(verbs.SendWR{Inline: true, SGL: []verbs.SGE{{Data: last}}}))
	require.NoError(t, e.id.Disconnect())
	for i := range 100 { // of which we read nothing any more
		p.write(makeFPDU(false, sendHeader(uint32(i+1), 0, true), make([]byte, 60_000)))
	}
	n := 0
	for _, f := range p.rest() {
		n += len(f.payload)
	}
	require.Equal(t, len(last), n)
	p.Close()
	require.NoError(t, next(t, e.ch, verbs.EventDisconnected).Err)
}

// Nobody may hold a lock that somebody in the socket waits for while it closes
// the socket.
func TestAbortWhileEverybodyIsBusyDoesNotHang(t *testing.T) {
	leaksNoDescriptor(t)
	for i := range 150 {
		a, b := pair(t, 100_000, verbs.ConnParam{}, "127.0.0.1:0")
		tcp(a).SetWriteBuffer(4096)
		var wg sync.WaitGroup
		over := make(chan struct{})
		for _, e := range []*end{a, b} {
			tokens := make(chan struct{}, testDepth) // sends in flight
			wg.Go(func() { pollAndWait(e, tokens, over) })
			wg.Go(func() { sendOn(e, tokens, over) })
		}
		for range i * 20 {
			a.id.LocalAddr()
		}
		within(t, patience, "the abort", func() {
			switch i % 4 {
			case 0:
				require.NoError(t, a.qp.SetError())
			case 1:
				require.NoError(t, a.qp.Destroy())
			case 2:
				require.NoError(t, a.id.Disconnect())
			case 3:
				require.NoError(t, a.id.Destroy())
			}
			require.NoError(t, b.qp.SetError())
			close(over)
			a.cq.Wake()
			b.cq.Wake()
			wg.Wait()
		})
	}
}

// The same, made likely: the abort gets the lock that a Wait in the socket wants.
func TestAbortDoesNotWaitForAWaitThatWaitsForIt(t *testing.T) {
	for range 20 {
		e, _ := connectPeer(t, true, 100, false)
		q, c := e.qp.(*qp), e.cq.(*cq)
		require.NoError(t, e.cq.Wait()) // the connection's begin ends one
		var wg sync.WaitGroup
		q.rx.mu.Lock()
		wg.Go(func() { e.qp.SetError() })
		for range 1000 {
			runtime.Gosched()
		}
		wg.Go(func() { e.cq.Wait() })
		eventually(t, "the Wait in the socket", func() bool {
			in := !c.waits.TryLock()
			if !in {
				c.waits.Unlock()
			}
			return in
		})
		for range 1000 {
			runtime.Gosched()
		}
		q.rx.mu.Unlock()
		within(t, patience, "SetError and Wait", wg.Wait)
	}
}

func pollAndWait(e *end, tokens, over chan struct{}) {
	var wc [4]verbs.WC
	for {
		select {
		case <-over:
			return
		default:
		}
		n, _ := e.cq.Poll(wc[:])
		for _, w := range wc[:n] {
			if w.Op == verbs.OpSend {
				<-tokens
			} else if w.Status == verbs.StatusSuccess {
				e.qp.PostRecv([]verbs.RecvWR{{WRID: w.WRID, SGE: verbs.SGE{Data: e.buf(w.WRID), LKey: e.mr.LKey()}}})
			}
		}
		if n == 0 {
			e.cq.Arm(false)
			e.cq.Wait()
		}
	}
}

func sendOn(e *end, tokens, over chan struct{}) {
	data := make([]byte, 50_000)
	for i := 0; ; i++ {
		select {
		case <-over:
			return
		case tokens <- struct{}{}:
		}
		wr := []verbs.SendWR{{Signaled: true, Inline: i%2 == 0, SGL: []verbs.SGE{{Data: e.buf(testDepth)[:50_000], LKey: e.mr.LKey()}}}}
		if wr[0].Inline {
			wr[0].SGL[0].Data = data
		}
		if n, _ := e.qp.PostSend(wr); n == 0 {
			<-tokens
		}
	}
}

func TestDestroyOfAnIDInEachState(t *testing.T) {
	leaksNoDescriptor(t)
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 100)
	for range 3 {
		for _, steps := range []int{0, 1, 2, 3, 4, 5} {
			i, err := ch.NewID()
			require.NoError(t, err)
			e := &end{t: t, ch: ch, id: i}
			for s := range steps {
				switch s {
				case 0:
					require.NoError(t, i.Bind(netip.MustParseAddrPort("127.0.0.1:0")))
				case 1:
					require.NoError(t, i.ResolveAddr(netip.AddrPort{}, l.LocalAddr(), time.Second))
				case 2:
					require.NoError(t, i.ResolveRoute(time.Second))
				case 3:
					e.createQP(100)
				case 4:
					require.NoError(t, i.Connect(verbs.ConnParam{}))
				}
			}
			within(t, 5*time.Second, "Destroy", func() { require.NoError(t, i.Destroy()) })
			require.NoError(t, i.Destroy())
			for {
				ev, err := ch.GetEvent()
				if err != nil {
					break
				}
				require.NotSame(t, i, ev.ID, "an event of a destroyed id")
				require.NoError(t, ev.ID.Destroy())
			}
		}
	}
}

func TestAnEventOfAMigratedIDComesOnItsNewChannel(t *testing.T) {
	from, to := newChannel(t), newChannel(t)
	l := listenOn(t, from, "127.0.0.1:0", 8)
	e := resolved(t, newChannel(t), l.LocalAddr())
	e.createQP(100)
	require.NoError(t, e.id.Connect(verbs.ConnParam{}))
	ln := l.(*id).listener
	eventually(t, "a connect request", func() bool {
		ln.mu.Lock()
		defer ln.mu.Unlock()
		return ln.waiting == 1
	})
	require.NoError(t, l.Migrate(to))
	nothingMore(t, from)
	accept(t, to, next(t, to, verbs.EventConnectRequest), 100, verbs.ConnParam{})
	next(t, to, verbs.EventEstablished)
	next(t, e.ch, verbs.EventEstablished)
}
