package cm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/internal/verbs/verbsfault"
	"github.com/rdmanet/rdmanet/internal/verbs/verbstest"
	"github.com/rdmanet/rdmanet/qp"
)

// onFake returns a target that fails where the test says.
func onFake(t *testing.T, fail func(op string) error) target {
	p := newFake(t)
	p.SetFail(fail)
	return target{p, netip.MustParseAddr("127.0.0.1"), p}
}

func TestPrivateDataReachesThePeer(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		ln := listen(t, ch, on)
		most := bytes.Repeat([]byte{7}, cm.MaxPrivateData)
		param := func(b []byte) cm.ConnParam {
			p := testParam
			p.PrivateData = b
			return p
		}

		active := newEnd(t, resolved(t, ch, ln.LocalAddr()))
		require.NoError(t, active.id.Connect(param(most)))
		ev, err := ln.Wait(withTimeout(t), cm.EventConnectRequest)
		require.NoError(t, err)
		ev.Ack()
		destroyLater(t, ev.ID)
		require.True(t, bytes.HasPrefix(ev.PrivateData, most))
		passive := newEnd(t, ev.ID)
		require.NoError(t, passive.id.Accept(param([]byte("welcome"))))
		est := wait(t, active.id, cm.EventEstablished)
		require.True(t, bytes.HasPrefix(est.PrivateData, []byte("welcome")))
		wait(t, passive.id, cm.EventEstablished)

		active, id := request(t, ch, ln)
		require.NoError(t, id.Reject([]byte("not today")))
		_, err = active.id.Wait(withTimeout(t), cm.EventEstablished)
		var rejected *cm.EventError
		require.ErrorAs(t, err, &rejected)
		require.Equal(t, cm.EventRejected, rejected.Type)
		require.True(t, bytes.HasPrefix(rejected.PrivateData, []byte("not today")))
		requireErrno(t, err, syscall.ECONNREFUSED)
	})
}

func TestConnectionHasAddresses(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		ln := listen(t, ch, on)
		active, passive := connect(t, ch, ln)
		require.Equal(t, ln.LocalAddr(), active.id.RemoteAddr())
		require.Equal(t, on.addr, active.id.LocalAddr().Addr())
		require.Equal(t, ln.LocalAddr(), passive.id.LocalAddr())
		require.Equal(t, active.id.LocalAddr().Addr(), passive.id.RemoteAddr().Addr())
	})
}

func TestBytesArrive(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		active, passive := connect(t, ch, listen(t, ch, on))
		for i, e := range []*end{active, passive} {
			other := []*end{passive, active}[i]
			b := e.buffer()
			b.Resize(copy(b.Bytes(), "hello"))
			_, err := e.qp.PostSend([]qp.SendWR{{WRID: 50, Signaled: true, SGL: []qp.SGE{b.SGE()}}})
			require.NoError(t, err)
			wc := e.pollUntil(func(wc []qp.WC) bool { return len(wc) == 1 })
			require.Equal(t, qp.WC{WRID: 50, Op: qp.OpSend}, wc[0])
			wc = other.pollUntil(func(wc []qp.WC) bool { return len(wc) == 1 })
			require.Equal(t, qp.WC{WRID: 0, Op: qp.OpRecv, ByteLen: 5}, wc[0])
			require.Equal(t, "hello", string(other.bufs[0].Bytes()[:5]))
		}
	})
}

func TestParametersBeyondTheLimits(t *testing.T) {
	on := onFake(t, nil)
	ch := newChannel(t, on)
	ln := listen(t, ch, on)
	active := newEnd(t, resolved(t, ch, ln.LocalAddr()))
	for _, p := range []cm.ConnParam{
		{PrivateData: make([]byte, cm.MaxPrivateData+1)},
		{RetryCount: 8},
		{RNRRetryCount: 8},
		{MPARevision: 3},
	} {
		err := active.id.Connect(p)
		var limit *cm.LimitError
		require.ErrorAs(t, err, &limit)
		require.Equal(t, limit.Limit+1, limit.Value)
		require.NotEmpty(t, limit.Fix)
		requireErrno(t, err, syscall.EINVAL)
	}
	require.NoError(t, active.id.Connect(testParam), "nothing has changed")
	ev, err := ln.Wait(withTimeout(t), cm.EventConnectRequest)
	require.NoError(t, err)
	ev.Ack()
	destroyLater(t, ev.ID)
	err = ev.ID.Reject(make([]byte, cm.MaxPrivateData+1))
	requireErrno(t, err, syscall.EINVAL)
	require.Contains(t, err.Error(), "57 is more than the limit of 56")

	id := newID(t, ch)
	require.NoError(t, id.Bind(netip.AddrPortFrom(on.addr, 0)))
	requireErrno(t, id.Listen(-1), syscall.EINVAL)
	require.NoError(t, id.Listen(0))
}

func TestFailedCallCanBeRepeated(t *testing.T) {
	var failing string
	on := onFake(t, func(op string) error {
		if op == failing {
			return syscall.ENOBUFS
		}
		return nil
	})
	twice := func(op string, call func() error) {
		t.Helper()
		failing = op
		requireErrno(t, call(), syscall.ENOBUFS)
		failing = ""
		require.NoError(t, call(), op)
	}
	ch := newChannel(t, on)
	ln := newID(t, ch)
	twice("bind", func() error { return ln.Bind(netip.AddrPortFrom(on.addr, 0)) })
	twice("listen", func() error { return ln.Listen(1) })
	id := newID(t, ch)
	twice("resolve address", func() error { return id.ResolveAddr(netip.AddrPort{}, ln.LocalAddr(), patience) })
	wait(t, id, cm.EventAddrResolved)
	twice("resolve route", func() error { return id.ResolveRoute(patience) })
	wait(t, id, cm.EventRouteResolved)

	dev, _ := id.Device()
	pd, err := dev.AllocPD()
	require.NoError(t, err)
	failing = "create qp"
	cq, err := dev.NewCQ(8)
	require.NoError(t, err)
	_, err = id.CreateQP(pd, cq, qp.Cap{SendWR: 4, RecvWR: 4, SendSGE: 1})
	requireErrno(t, err, syscall.ENOBUFS)
	require.Nil(t, id.QP())
	failing = ""
	require.NoError(t, cq.Close())
	require.NoError(t, pd.Close())

	active := newEnd(t, id)
	twice("connect", func() error { return id.Connect(testParam) })
	ev, err := ln.Wait(withTimeout(t), cm.EventConnectRequest)
	require.NoError(t, err)
	ev.Ack()
	destroyLater(t, ev.ID)
	newEnd(t, ev.ID)
	twice("accept", func() error { return ev.ID.Accept(testParam) })
	wait(t, id, cm.EventEstablished)
	twice("disconnect", id.Disconnect)
	active.drain()
	require.NoError(t, active.qp.Close())
	twice("destroy id", id.Destroy)
}

func TestDestroyCancelsWhatNeverEnds(t *testing.T) {
	for _, op := range []string{"resolve address", "resolve route", "connect"} {
		t.Run(op, func(t *testing.T) {
			on := onFake(t, nil)
			ch := newChannel(t, on)
			hang := func() {
				on.fake.SetFail(func(o string) error {
					if o == op {
						return verbstest.ErrHang
					}
					return nil
				})
			}
			id := newID(t, ch)
			dst := netip.AddrPortFrom(on.addr, 9)
			switch op {
			case "resolve address":
				hang()
				require.NoError(t, id.ResolveAddr(netip.AddrPort{}, dst, patience))
			case "resolve route":
				hang()
				require.NoError(t, id.ResolveAddr(netip.AddrPort{}, dst, patience))
				wait(t, id, cm.EventAddrResolved)
				require.NoError(t, id.ResolveRoute(patience))
			case "connect":
				id = resolved(t, ch, dst)
				e := newEnd(t, id)
				hang()
				require.NoError(t, id.Connect(testParam))
				require.NoError(t, e.qp.SetError())
				e.drain()
				require.NoError(t, e.qp.Close())
			}
			ended := waiting(id.GetEvent)
			require.NoError(t, id.Destroy())
			require.ErrorIs(t, receive(t, ended), net.ErrClosed)
		})
	}
}

func TestCreateQPOncePerID(t *testing.T) {
	on := onFake(t, nil)
	ch := newChannel(t, on)
	e := newEnd(t, resolved(t, ch, netip.AddrPortFrom(on.addr, 9)))
	require.Same(t, e.qp, e.id.QP())
	_, err := e.id.CreateQP(e.pd, e.cq, qp.Cap{SendWR: 1, RecvWR: 1, SendSGE: 1})
	var state *cm.StateError
	require.ErrorAs(t, err, &state)
	require.Contains(t, err.Error(), "with a QP")
}

func TestDeviceThatHasGoneSinceItWasResolved(t *testing.T) {
	on := onFake(t, nil)
	faulty := verbsfault.Wrap(on.Provider, "faulty")
	on.Provider = faulty
	e := newEnd(t, resolved(t, newChannel(t, on), netip.AddrPortFrom(on.addr, 9)))
	e.kill()
	require.NoError(t, e.qp.Close())
	faulty.SetFail(func(op string, _ int) error {
		if op == "ID.Device" {
			return syscall.ENODEV
		}
		return nil
	})
	_, err := e.id.CreateQP(e.pd, e.cq, qp.Cap{SendWR: 1, RecvWR: 1, SendSGE: 1})
	requireErrno(t, err, syscall.ENODEV)
}

func TestARequestThatComesTwiceIsOne(t *testing.T) {
	on := onFake(t, nil)
	faulty := verbsfault.Wrap(on.Provider, "faulty")
	on.Provider = faulty
	faulty.SetEvents(func(typ verbs.EventType, _ int) []time.Duration {
		if typ == verbs.EventConnectRequest {
			return []time.Duration{0, 0}
		}
		return []time.Duration{0}
	})
	ch := newChannel(t, on)
	_, asked := request(t, newChannel(t, on), listen(t, ch, on))
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err := ch.GetEvent(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, asked.Reject(nil))
}

// A listener that is destroyed turns away the requests that wait in the channel, and
// those that come meanwhile.
func TestDestroyTurnsAwayWhatNobodyGot(t *testing.T) {
	for _, meanwhile := range []bool{false, true} {
		t.Run(fmt.Sprint("meanwhile ", meanwhile), func(t *testing.T) {
			on := onFake(t, nil)
			faulty := verbsfault.Wrap(on.Provider, "faulty")
			on.Provider = faulty
			ch := newChannel(t, on)
			ln := listen(t, ch, on)
			other := newID(t, ch)
			go other.GetEvent(withTimeout(t)) // leads, and queues what comes
			e := newEnd(t, resolved(t, newChannel(t, on), ln.LocalAddr()))
			ask := func() {
				require.NoError(t, e.id.Connect(testParam))
				require.Eventually(t, func() bool { return faulty.Reported(cm.EventConnectRequest) == 1 }, patience, time.Millisecond)
			}
			if meanwhile {
				faulty.SetFail(func(op string, n int) error {
					if op == "ID.Destroy" && n == 0 {
						ask()
					}
					return nil
				})
			} else {
				ask()
			}
			require.NoError(t, ln.Destroy())
			ev, err := e.id.GetEvent(withTimeout(t))
			require.NoError(t, err)
			ev.Ack()
			require.Equal(t, cm.EventRejected, ev.Type)
		})
	}
}

func TestContextEndsGetEvent(t *testing.T) {
	on := onFake(t, nil)
	ch := newChannel(t, on)
	id := newID(t, ch)
	for range 500 {
		// One of the two leads, and the other must be able to go on without it.
		short, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() {
			_, err := id.GetEvent(short)
			ended <- err
		}()
		long, cancelLong := context.WithCancel(context.Background())
		endedLong := make(chan error, 1)
		go func() {
			_, err := ch.GetEvent(long)
			endedLong <- err
		}()
		cancel()
		require.ErrorIs(t, receive(t, ended), context.Canceled)
		cancelLong()
		require.ErrorIs(t, receive(t, endedLong), context.Canceled)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	_, err := id.GetEvent(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	requireErrno(t, err, syscall.ETIMEDOUT)
}

// A leader that leaves with its event hands over: nobody's event may wait for a
// leader that is not there.
func TestFollowersTakeOver(t *testing.T) {
	on := onFake(t, nil)
	ch := newChannel(t, on)
	const n = 100
	dst := netip.AddrPortFrom(on.addr, 9)
	for range 20 {
		var wg sync.WaitGroup
		for range n {
			id := newID(t, ch)
			ready := make(chan struct{})
			wg.Go(func() {
				close(ready)
				ev, err := id.GetEvent(withTimeout(t))
				if err != nil {
					t.Error(err)
					return
				}
				ev.Ack()
				if err := id.Destroy(); err != nil {
					t.Error(err)
				}
			})
			wg.Go(func() {
				<-ready
				if err := id.ResolveAddr(netip.AddrPort{}, dst, patience); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
}

func TestEveryEventGoesToOneCaller(t *testing.T) {
	on := onFake(t, nil)
	ch := newChannel(t, on)
	const n, callers = 400, 4
	got := make(chan *cm.Event, n+callers)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for {
				ev, err := ch.GetEvent(ctx)
				if err != nil {
					return
				}
				ev.Ack()
				got <- ev
			}
		})
	}
	for range n {
		id := newID(t, ch)
		require.NoError(t, id.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(on.addr, 9), patience))
	}
	seen := make(map[*cm.ID]bool)
	for range n {
		ev := receive(t, got)
		require.False(t, seen[ev.ID])
		seen[ev.ID] = true
	}
	cancel()
	wg.Wait()
	require.Empty(t, got)
}

func TestProvidersErrorsReachEveryWaiter(t *testing.T) {
	on := onFake(t, func(op string) error {
		if op == "get cm event" {
			return errors.New("the device is gone")
		}
		return nil
	})
	ch := newChannel(t, on)
	id := newID(t, ch)
	for _, c := range []<-chan error{waiting(id.GetEvent), waiting(ch.GetEvent), waiting(id.GetEvent)} {
		requireErrno(t, receive(t, c), syscall.EIO)
	}
}

func TestInterruptedCallsAreRepeated(t *testing.T) {
	signals := 3
	on := onFake(t, func(op string) error {
		if op == "get cm event" && signals > 0 {
			signals--
			return syscall.EINTR
		}
		return nil
	})
	ch := newChannel(t, on)
	id := newID(t, ch)
	require.NoError(t, id.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(on.addr, 9), patience))
	wait(t, id, cm.EventAddrResolved)
	require.Zero(t, signals)
}

func TestWaitReportsWhatHappenedInstead(t *testing.T) {
	on := onFake(t, nil)
	ch := newChannel(t, on)
	id := newID(t, ch)
	require.NoError(t, id.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(on.addr, 9), patience))
	_, err := id.Wait(withTimeout(t), cm.EventEstablished)
	var instead *cm.EventError
	require.ErrorAs(t, err, &instead)
	require.Equal(t, cm.EventAddrResolved, instead.Type)
	requireErrno(t, err, syscall.EPROTO)
	require.NoError(t, id.Destroy(), "the event was acked")

	active, passive := connect(t, ch, listen(t, ch, on))
	require.NoError(t, passive.id.Disconnect())
	_, err = active.id.Wait(withTimeout(t), cm.EventEstablished)
	requireErrno(t, err, syscall.ECONNRESET)

	// A connect request that is not wanted is not left to wait for ever.
	ln := listen(t, ch, on)
	active = newEnd(t, resolved(t, ch, ln.LocalAddr()))
	require.NoError(t, active.id.Connect(testParam))
	_, err = ln.Wait(withTimeout(t), cm.EventEstablished)
	require.ErrorAs(t, err, &instead)
	_, err = active.id.Wait(withTimeout(t), cm.EventEstablished)
	requireErrno(t, err, syscall.ECONNREFUSED)
}

func TestBusyErrorDescribesManyIDs(t *testing.T) {
	on := onFake(t, nil)
	ch := newChannel(t, on)
	for range 10 {
		newID(t, ch)
	}
	err := ch.Close()
	require.Len(t, requireBusy(t, err).IDs, 10)
	require.Contains(t, err.Error(), "10 id(s) not destroyed (id ")
	require.Contains(t, err.Error(), "...)")
}

func TestUserContext(t *testing.T) {
	on := onFake(t, nil)
	id := newID(t, newChannel(t, on))
	require.Nil(t, id.Context())
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			id.SetContext(i)
			_ = id.Context()
		})
	}
	wg.Wait()
	id.SetContext("another type")
	require.Equal(t, "another type", id.Context())
}

func TestChannelThatWillNotClose(t *testing.T) {
	on := onFake(t, func(op string) error {
		if op == "destroy event channel" {
			return syscall.EIO
		}
		return nil
	})
	ch := newChannel(t, on)
	requireErrno(t, ch.Close(), syscall.EIO)
	on.fake.SetFail(nil)
	id := newID(t, ch)
	require.NoError(t, id.Destroy())
	require.NoError(t, ch.Close())
}

func TestProviderIsNamed(t *testing.T) {
	on := onFake(t, nil)
	require.Equal(t, verbstest.Name, newChannel(t, on).Provider())
}
