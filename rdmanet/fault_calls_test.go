package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/internal/verbs/verbsfault"
	"github.com/rdmanet/rdmanet/internal/verbs/verbstest"
)

// plausible is what a call may fail with, if not with EIO.
var plausible = map[string]error{
	"Provider.NewEventChannel": syscall.ENODEV,
	"EventChannel.NewID":       syscall.ENOMEM,
	"EventChannel.AckEvent":    &verbsfault.Done{Err: syscall.EINVAL}, // it fails without an event, and not otherwise
	"ID.Bind":                  syscall.EADDRNOTAVAIL,
	"ID.Listen":                syscall.EADDRINUSE,
	"ID.ResolveAddr":           syscall.ENODEV,
	"ID.ResolveRoute":          syscall.ENETUNREACH,
	"ID.CreateQP":              syscall.ENOMEM,
	"ID.Connect":               syscall.ENOMEM,
	"ID.Accept":                syscall.ECONNRESET,
	"ID.Disconnect":            syscall.EINVAL,
	"ID.Device":                syscall.ENODEV,
	"ID.SetAFOnly":             syscall.ENOSYS,
	"Device.AllocPD":           syscall.ENOMEM,
	"Device.CreateCQ":          syscall.EMFILE,
	"PD.RegMR":                 syscall.ENOMEM,
	"PD.Dealloc":               syscall.EBUSY,
	"MR.Dereg":                 syscall.EBUSY,
	"CQ.Destroy":               syscall.EBUSY,
	"QP.Destroy":               syscall.EBUSY,
	"QP.PostSend":              syscall.ENOMEM,
	"QP.PostRecv":              syscall.ENOMEM,
}

// interruptible are calls that a signal may interrupt when they have done it.
var interruptible = []string{"ID.ResolveAddr", "ID.ResolveRoute", "ID.Connect", "ID.Accept", "ID.Disconnect", "ID.Reject", "ID.Listen"}

// everywhere are calls that may fail for ever, once they do.
var everywhere = []string{"EventChannel.GetEvent", "CQ.Poll", "CQ.Arm", "CQ.Wait", "QP.PostSend", "QP.PostRecv", "QP.SetError", "ID.Disconnect"}

// TestEveryCallFailsInTurn: a lifetime is run with each call failing that it makes
// of a provider, one at a time, on either side. Whichever it is, errors are typed,
// nobody hangs, no byte is wrong or missing before an end of file, and everything is
// given back.
func TestEveryCallFailsInTurn(t *testing.T) {
	faulty(t)
	for _, echo := range []bool{true, false} {
		x := lifetime{echo: echo}
		within(t, patience, x.run)
		x.requireNoErrors(t)
		made := map[*verbsfault.Provider]map[string]int{faultyDialer: faultyDialer.Calls(), faultyListener: faultyListener.Calls()}
		for p, calls := range made {
			for _, op := range slices.Sorted(maps.Keys(calls)) {
				t.Run(fmt.Sprintf("echo %v/%s/%s", echo, p.Name(), op), func(t *testing.T) {
					err := plausible[op]
					if err == nil {
						err = syscall.EIO
					}
					for n := range min(calls[op], scaled(30, 1000)) {
						failNth(t, echo, p, op, n, n, err)
						if t.Failed() {
							return // many would hang
						}
					}
					if slices.Contains(interruptible, op) {
						failNth(t, echo, p, op, 0, 0, &verbsfault.Done{Err: syscall.EINTR})
					}
					if slices.Contains(everywhere, op) {
						for n := 0; n < calls[op]; n = 4*n + 3 {
							failNth(t, echo, p, op, n, math.MaxInt, err)
						}
					}
				})
			}
		}
	}
}

// failNth runs a lifetime in which a provider's calls from first to last fail.
func failNth(t *testing.T, echo bool, p *verbsfault.Provider, op string, first, last int, err error) {
	name := fmt.Sprint("call ", first)
	if last > first {
		name = fmt.Sprint("from call ", first)
	}
	t.Run(name, func(t *testing.T) {
		faulty(t)
		eventsMayNotCome(t)
		p.SetFail(from(op, first, last, err))
		lost[p] = op == "CQ.Poll" && last > first
		x := lifetime{echo: echo}
		within(t, patience, x.run)
		cause := err
		var done *verbsfault.Done
		if errors.As(err, &done) {
			cause = done.Err
		}
		causes := map[*verbsfault.Provider]error{p: cause}
		x.check(t, causes)
	})
}

// TestDialReturnsWhateverItsProviderDoes: when its context ends it does not wait for
// a call that takes longer, and neither does another dial. The context ends in that
// call, or while the connect waits for its answer.
func TestDialReturnsWhateverItsProviderDoes(t *testing.T) {
	for _, op := range []string{"ID.ResolveAddr", "ID.ResolveRoute", "ID.CreateQP", "ID.Connect", "QP.SetError", "QP.Destroy", "ID.Destroy"} {
		t.Run(op, func(t *testing.T) {
			faulty(t)
			l := listenFaulty(t)
			serve(l)
			silent := silentOn(t, verbstest.Name)
			called, free := make(chan struct{}), make(chan struct{})
			defer close(free)
			ctx, cancel := context.WithCancel(t.Context())
			faultyDialer.SetFail(func(name string, n int) error {
				if name == op || name == "ID.Connect" {
					cancel()
				}
				if name == op && n == 0 {
					close(called)
					<-free
				}
				return nil
			})
			d := Dialer{Config: smallConfig(faultyDialer)}
			within(t, patience, func() {
				_, err := d.DialContext(ctx, "rdma", silent)
				requireOpError(t, err, "dial", context.Canceled)
				<-called
				c, err := d.Dial("rdma", l.Addr().String())
				require.NoError(t, err)
				require.NoError(t, c.Close())
			})
		})
	}
}

// TestFailuresThatNobodyNotices: to get an event, and to free something, is tried
// again.
func TestFailuresThatNobodyNotices(t *testing.T) {
	for op, err := range map[string]error{
		"EventChannel.GetEvent": syscall.EIO,
		"QP.Destroy":            syscall.EBUSY,
		"CQ.Destroy":            syscall.EBUSY,
		"MR.Dereg":              syscall.EBUSY,
		"PD.Dealloc":            syscall.EBUSY,
		"ID.Destroy":            syscall.EBUSY,
		"EventChannel.Close":    syscall.EBUSY,
	} {
		for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
			t.Run(p.Name()+"/"+op, func(t *testing.T) {
				faulty(t)
				p.SetFail(from(op, 0, 1, err))
				x := lifetime{echo: true}
				within(t, patience, x.run)
				require.Greater(t, p.Calls()[op], 2, "tried again")
				x.requireNoErrors(t)
			})
		}
	}
}

// TestFailedCompletionQueueEndsTheConnection, whoever has met with the failure.
func TestFailedCompletionQueueEndsTheConnection(t *testing.T) {
	for _, op := range []string{"CQ.Poll", "CQ.Arm", "CQ.Wait"} {
		t.Run(op, func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			n := faultyDialer.Calls()[op]
			faultyDialer.SetFail(from(op, n, n, syscall.EIO))
			_ = a.SetReadDeadline(time.Now().Add(patience))
			for range 2 {
				_, err := a.Read(make([]byte, 1))
				requireOpError(t, err, "read", syscall.EIO)
				_, err = a.Write([]byte("x"))
				requireOpError(t, err, "write", syscall.EIO)
			}
			require.NoError(t, a.Close())
			_, err := b.Read(make([]byte, 1))
			requireOpError(t, err, "read", syscall.ECONNRESET)
		})
	}
}

// TestRefusedAcceptIsToldAtOnce: the dialer need not wait until a set-up's time is
// over.
func TestRefusedAcceptIsToldAtOnce(t *testing.T) {
	for _, op := range []string{"Device.AllocPD", "Device.CreateCQ", "ID.CreateQP", "PD.RegMR", "QP.PostRecv", "ID.Accept"} {
		t.Run(op, func(t *testing.T) {
			faulty(t)
			setBounds(t, time.Hour, &setupTimeout)
			l := listenFaulty(t)
			faultyListener.SetFail(once(op, syscall.ENOMEM))
			within(t, patience, func() {
				_, err := (&Dialer{Config: smallConfig(faultyDialer)}).Dial("rdma", l.Addr().String())
				requireOpError(t, err, "dial", syscall.ECONNREFUSED)
			})
		})
	}
}

// TestRefusedBlockIsAGapThatNothingFollows: a small write may return before it is
// sent. If the send queue then refuses it, nothing that is written later goes out.
func TestRefusedBlockIsAGapThatNothingFollows(t *testing.T) {
	for _, tc := range []struct {
		name string
		next func(a *Conn) error
	}{
		{"small write", func(a *Conn) error { _, err := a.Write([]byte("later")); return err }},
		{"large write", func(a *Conn) error { _, err := a.Write(make([]byte, 5*minBufferSize)); return err }},
		{"gather list", func(a *Conn) error { _, err := a.WriteBuffers(&net.Buffers{[]byte("la"), []byte("ter")}); return err }},
		{"buffer", func(a *Conn) error {
			b, err := a.NewBuffer()
			require.NoError(t, err)
			b.Resize(5)
			_, err = a.WriteBuffer(b)
			return err
		}},
		{"CloseWrite", (*Conn).CloseWrite},
	} {
		t.Run(tc.name, func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			require.NoError(t, a.SetNoDelay(false)) // each small write waits in a block
			write(t, a, []byte("before"))
			require.Equal(t, []byte("before"), read(t, b, 6))
			n := faultyDialer.Calls()["QP.PostSend"]
			faultyDialer.SetFail(from("QP.PostSend", n, n, syscall.ENOMEM)) // the next one, and no more
			write(t, a, []byte("gap"))
			a.tx.flushers.Wait()
			_ = a.SetWriteDeadline(time.Now().Add(patience))
			require.Greater(t, faultyDialer.Calls()["QP.PostSend"], n, "it is refused")
			for range 2 {
				err := tc.next(a)
				require.ErrorIs(t, err, syscall.ENOMEM)
				var oe *net.OpError
				require.ErrorAs(t, err, &oe)
			}
			require.NoError(t, a.Close())
			_ = b.SetReadDeadline(time.Now().Add(patience))
			got, err := io.ReadAll(b)
			require.ErrorIs(t, err, syscall.ECONNRESET, "no end of file")
			require.Empty(t, got)
		})
	}
}

// TestRefusedWriteSaysHowMuchWasSent: what it returns is what arrives.
func TestRefusedWriteSaysHowMuchWasSent(t *testing.T) {
	for size, frames := range map[int]int{100: 1, 10 * minBufferSize: 10} {
		for after := range frames {
			t.Run(fmt.Sprintf("%d bytes, frame %d", size, after), func(t *testing.T) {
				faulty(t)
				a, b := faultyPair(t)
				n := faultyDialer.Calls()["QP.PostSend"] + after
				faultyDialer.SetFail(from("QP.PostSend", n, n, syscall.ENOMEM))
				p := bytesOf(1, size)
				arrived := make(chan []byte, 1)
				go func() {
					got, _ := io.ReadAll(b)
					arrived <- got
				}()
				sent, err := a.Write(p)
				requireOpError(t, err, "write", syscall.ENOMEM)
				require.NoError(t, a.Close())
				require.Equal(t, sent, len(<-arrived))
			})
		}
	}
}

// TestNeverLetGo: what a device does not let go, however often it is asked, is lost
// with what hangs on it. Close says so, and later connections work.
func TestNeverLetGo(t *testing.T) {
	for i, tc := range []struct {
		op   string
		left []string // in the provider, of each side
	}{
		{"QP.Destroy", []string{"channel", "cq", "id", "mr", "pd", "qp"}},
		{"CQ.Destroy", []string{"cq"}},
		{"MR.Dereg", []string{"mr", "pd"}},
		{"PD.Dealloc", []string{"pd"}},
		{"ID.Destroy", []string{"channel", "id"}},
		{"EventChannel.Close", []string{"channel"}},
	} {
		t.Run(tc.op, func(t *testing.T) {
			faulty(t)
			inner := verbstest.New()
			p := verbsfault.Wrap(inner, fmt.Sprint("stubborn ", i))
			verbs.Register(p.Name(), func() (verbs.Provider, error) { return p, nil })
			t.Cleanup(func() { // it is only the book that is left
				arenas.Lock()
				defer arenas.Unlock()
				maps.DeleteFunc(arenas.m, func(k arenaKey, _ *arena) bool { return k.cfg.MaxBytes == int64(1<<30+i) })
			})
			cfg := smallConfig(p)
			cfg.MaxRegistered = int64(1<<30 + i)
			a, b := pairOf(t, cfg, cfg, "127.0.0.1:0")
			write(t, a, []byte("x"))
			p.SetFail(from(tc.op, 0, math.MaxInt, syscall.EBUSY))
			within(t, patience, func() {
				err := errors.Join(a.Close(), b.Close())
				var oe *net.OpError
				require.ErrorAs(t, err, &oe)
				require.ErrorIs(t, err, syscall.EBUSY)
			})
			require.Equal(t, tc.left, slices.Sorted(maps.Keys(inner.Live())))
			require.Empty(t, inner.Violations())
			p.SetFail(nil)
			a, b = pairOf(t, cfg, cfg, "127.0.0.1:0")
			roundTrip(t, a, b, bytesOf(1, 50_000))
			require.NoError(t, a.Close())
			require.NoError(t, b.Close())
			require.Equal(t, tc.left, slices.Sorted(maps.Keys(inner.Live())), "no more than that")
		})
	}
}
