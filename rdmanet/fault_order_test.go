package rdmanet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/internal/verbs/verbsfault"
)

// TestEventsComeLateTwiceOrNever does that to each event of a connection's life, on
// either side.
func TestEventsComeLateTwiceOrNever(t *testing.T) {
	const soon = 5 * time.Millisecond // another event may come before it
	for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
		for _, typ := range []verbs.EventType{verbs.EventAddrResolved, verbs.EventRouteResolved, verbs.EventConnectRequest,
			verbs.EventEstablished, verbs.EventRejected, verbs.EventDisconnected} {
			for name, fate := range map[string][]time.Duration{
				"late": {soon}, "behind the next": {verbsfault.Behind}, "twice": {0, 0}, "again later": {0, soon}, "never": {},
			} {
				if name == "behind the next" && typ != verbs.EventEstablished && typ != verbs.EventDisconnected {
					continue // the next one depends on it
				}
				t.Run(fmt.Sprintf("%s/%v/%s", p.Name(), typ, name), func(t *testing.T) {
					faulty(t)
					eventsMayNotCome(t)
					p.SetEvents(func(e verbs.EventType, _ int) []time.Duration {
						if e == typ {
							return fate
						}
						return []time.Duration{0}
					})
					if typ == verbs.EventRejected {
						faultyListener.SetFail(once("Device.CreateCQ", syscall.EMFILE))
					}
					x := lifetime{echo: true}
					within(t, patience, x.run)
					x.check(t, nil)
				})
			}
		}
	}
}

// TestRequestsComeInAnotherOrder: each makes the connection that it asked for.
func TestRequestsComeInAnotherOrder(t *testing.T) {
	faulty(t)
	l := listenFaulty(t)
	faultyListener.SetEvents(func(e verbs.EventType, n int) []time.Duration {
		if e == verbs.EventConnectRequest && n == 0 {
			return []time.Duration{verbsfault.Behind}
		}
		return []time.Duration{0}
	})
	var dialed [2]net.Conn
	var errs [2]error
	dial := func(i int) {
		dialed[i], errs[i] = (&Dialer{Config: smallConfig(faultyDialer)}).Dial("rdma", l.Addr().String())
	}
	within(t, patience, func() {
		var wg sync.WaitGroup
		wg.Go(func() { dial(0) })
		eventually(t, func() bool { return faultyListener.Reported(verbs.EventConnectRequest) == 1 }, "it asks")
		wg.Go(func() { dial(1) })
		wg.Wait()
	})
	require.NoError(t, errors.Join(errs[:]...))
	closeLater(t, dialed[0], dialed[1])
	for i, d := range dialed {
		write(t, d, []byte{byte(i)})
	}
	require.NoError(t, l.SetDeadline(time.Now().Add(patience)))
	for range dialed {
		c, err := l.Accept()
		require.NoError(t, err)
		closeLater(t, c)
		said := read(t, c, 1)
		write(t, c, said)
		require.Equal(t, said, read(t, dialed[said[0]], 1))
	}
}

// TestCompletionsComeInAnyOrder: each is late or not, by chance, so that either
// queue is ahead of the other. Within a queue the order stays.
func TestCompletionsComeInAnyOrder(t *testing.T) {
	for seed := range uint64(scaled(4, 200)) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			faulty(t)
			chance := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
			var mu sync.Mutex
			byChance := func(verbs.WC) int {
				mu.Lock()
				defer mu.Unlock()
				return int(chance.Uint64() & 1)
			}
			x := lifetime{echo: true}
			done := make(chan struct{})
			go func() {
				defer close(done)
				x.run()
			}()
			for end := time.Now().Add(patience); ; time.Sleep(200 * time.Microsecond) {
				faultyDialer.SetCompletions(byChance) // and look again
				faultyListener.SetCompletions(byChance)
				select {
				case <-done:
				default:
					require.True(t, time.Now().Before(end), "it still waits")
					continue
				}
				break
			}
			x.requireNoErrors(t)
		})
	}
}

// TestCompletionComesTwice: a device that reports what was not posted is not trusted
// with anything more.
func TestCompletionComesTwice(t *testing.T) {
	for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
		for _, op := range []verbs.Op{verbs.OpSend, verbs.OpRecv} {
			t.Run(fmt.Sprint(p.Name(), "/", op), func(t *testing.T) {
				faulty(t)
				impatient(t)
				var came atomic.Bool
				p.SetCompletions(func(wc verbs.WC) int {
					if wc.Op == op && wc.Status == verbs.StatusSuccess && came.CompareAndSwap(false, true) {
						return 2
					}
					return 1
				})
				x := lifetime{echo: true}
				within(t, patience, x.run)
				require.True(t, came.Load())
				x.check(t, nil)
				x.dialer.mu.Lock()
				defer x.dialer.mu.Unlock()
				require.NotEmpty(t, x.dialer.errs)
			})
		}
	}
}

// TestCreditOvertakesSendCompletion: a credit can come before the completion that
// frees the slot of the send it answers. The writer waits for both.
func TestCreditOvertakesSendCompletion(t *testing.T) {
	for _, held := range []verbs.Op{verbs.OpSend, verbs.OpRecv} {
		t.Run(fmt.Sprint("late are ", held), func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			eventually(t, func() bool { // HELLO
				a.poll()
				a.mu.Lock()
				defer a.mu.Unlock()
				return a.tx.done == a.tx.posted
			}, "all slots are free")
			faultyDialer.SetCompletions(later(func(wc verbs.WC) bool { return wc.Op == held }))
			p := bytesOf(1, 40*minBufferSize)
			wrote := make(chan error, 1)
			go func() {
				_, err := a.Write(p)
				wrote <- err
			}()
			frames := min(a.cfg.SendDepth, b.cfg.RecvDepth)
			got := read(t, b, frames*minBufferSize)
			eventually(t, func() bool {
				a.mu.Lock()
				defer a.mu.Unlock()
				if held == verbs.OpSend {
					return a.flow.credits > 0 && a.free() == 0
				}
				return a.free() > 0 && a.flow.credits == 0
			}, "one of the two windows is open")
			select {
			case err := <-wrote:
				t.Fatal("not blocked: ", err)
			case <-time.After(20 * time.Millisecond):
			}
			faultyDialer.SetCompletions(nil)
			got = append(got, read(t, b, len(p)-len(got))...)
			require.NoError(t, <-wrote)
			require.True(t, bytes.Equal(p, got))
			require.Empty(t, fake.Violations())
		})
	}
}

// TestCompletionBetweenPollAndArm: one that comes when a side has polled and is
// about to arm the queue raises no event. It must be found all the same.
func TestCompletionBetweenPollAndArm(t *testing.T) {
	p := bytesOf(1, minBufferSize)
	writes := func(a, b *Conn) error {
		for range a.cfg.RecvDepth + 1 {
			if _, err := a.Write(p); err != nil {
				return err
			}
		}
		return nil
	}
	noCredits := func(a *Conn) bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.flow.credits == 0
	}
	reads := func(a, b *Conn) error {
		_, err := io.ReadFull(b, make([]byte, a.cfg.RecvDepth*len(p)))
		return err
	}
	for _, tc := range []struct {
		name   string
		beside bool                   // a reader that waits, and leads
		waits  func(a, b *Conn) error // by a
		when   func(a *Conn) bool     // it is for this that a waits
		comes  func(a, b *Conn) error // meanwhile
	}{
		{"data for a reader", false, func(a, b *Conn) error {
			_, err := io.ReadFull(a, make([]byte, len(p)))
			return err
		}, nil, func(a, b *Conn) error {
			_, err := b.Write(p)
			return err
		}},
		{"FIN for a reader", false, func(a, b *Conn) error {
			_, err := io.Copy(io.Discard, a)
			return err
		}, nil, func(a, b *Conn) error { return b.CloseWrite() }},
		{"a credit for a writer", false, writes, noCredits, reads},
		{"a credit for a writer beside a reader", true, writes, noCredits, reads},
	} {
		t.Run(tc.name, func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			if tc.beside {
				go a.Read(make([]byte, 1))
				eventually(t, func() bool { return a.wait.parked.Load() }, "it waits")
			}
			var came atomic.Bool
			errs := make(chan error, 2)
			faultyDialer.SetFail(func(op string, _ int) error {
				if op == "CQ.Arm" && (tc.when == nil || tc.when(a)) && came.CompareAndSwap(false, true) {
					errs <- tc.comes(a, b)
				}
				return nil
			})
			go func() { errs <- tc.waits(a, b) }()
			for range 2 {
				select {
				case err := <-errs:
					require.NoError(t, err)
				case <-time.After(patience):
					t.Fatal("it still waits")
				}
			}
			faultyDialer.SetFail(nil)
		})
	}
}

// TestFlushComesLateOrNever: Close waits for it, and not for ever.
func TestFlushComesLateOrNever(t *testing.T) {
	for name, come := range map[string]func(t *testing.T, flush func()){
		"late": func(_ *testing.T, flush func()) { time.AfterFunc(50*time.Millisecond, flush) },
		"after modify_qp": func(t *testing.T, flush func()) {
			setBounds(t, 30*time.Millisecond, &flushTimeout)
			faultyDialer.SetFail(func(op string, _ int) error {
				if op == "QP.SetError" {
					setBounds(t, patience, &flushTimeout) // by Close itself
					flush()
				}
				return nil
			})
		},
		"never": nil,
	} {
		t.Run(name, func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			write(t, a, []byte("x"))
			write(t, b, []byte("y"))
			faultyDialer.SetCompletions(later(flushed))
			if come == nil {
				impatient(t)
			} else {
				come(t, func() { faultyDialer.SetCompletions(nil) })
			}
			within(t, patience, func() {
				err := a.Close()
				if come != nil {
					require.NoError(t, err)
				} else {
					requireOpError(t, err, "close", syscall.EIO)
					require.ErrorContains(t, err, "not flushed")
				}
			})
			require.Equal(t, []byte("x"), read(t, b, 1))
			requireEOF(t, b)
			require.NoError(t, b.Close())
		})
	}
}

// TestHalfOfTheNewsOfAnEnd: that the peer is gone is said by the event, and by the
// flushed receives. A device may bring one and not the other.
func TestHalfOfTheNewsOfAnEnd(t *testing.T) {
	abort := func(a *Conn) error { return errors.Join(a.SetLinger(0), a.Close()) }
	for _, tc := range []struct {
		name  string
		event bool // it comes; else the flushed receives do
		end   func(a *Conn) error
	}{
		{"the event of an abort", true, abort},
		{"the event of an end in order, without FIN", true, func(a *Conn) error { return a.id.Disconnect() }},
		{"the flushed receives", false, abort},
	} {
		t.Run(tc.name, func(t *testing.T) {
			faulty(t)
			impatient(t)
			a, b := faultyPair(t)
			write(t, a, []byte("x"))
			if tc.event {
				faultyListener.SetCompletions(later(flushed))
			} else {
				faultyListener.SetEvents(func(verbs.EventType, int) []time.Duration { return nil })
			}
			ended := make(chan error, 1)
			go func() {
				_, err := io.ReadFull(b, make([]byte, 2))
				ended <- err
			}()
			eventually(t, func() bool { return b.Stats().Parks > 0 }, "it waits")
			require.NoError(t, tc.end(a))
			select {
			case err := <-ended:
				require.ErrorIs(t, err, syscall.ECONNRESET)
			case <-time.After(patience):
				t.Fatal("it still waits")
			}
			_, err := b.Write([]byte("y"))
			require.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE), "%v", err)
			faultyListener.Reset()
			require.NoError(t, b.Close())
		})
	}
}
