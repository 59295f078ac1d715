package qp

import (
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestWorkRequestsAreOutstandingUntilPolled(t *testing.T) {
	_, a, b := newPair(t)
	b.recv(1, 2)
	b.requireOutstanding(0, 2)
	a.send(true, 10, 11)
	a.requireOutstanding(2, 0)

	require.Equal(t, []WC{{WRID: 10, Op: OpSend}, {WRID: 11, Op: OpSend}}, a.drain())
	a.requireOutstanding(0, 0)
	require.Equal(t, []WC{{WRID: 1, Op: OpRecv, ByteLen: 4}, {WRID: 2, Op: OpRecv, ByteLen: 4}}, b.drain())
	b.requireOutstanding(0, 0)
}

func TestSignaledSendCompletesOlderUnsignaledOnes(t *testing.T) {
	_, a, b := newPair(t)
	b.recv(1, 2, 3, 4)
	a.send(false, 10, 11)
	a.send(true, 12)
	a.send(false, 13)
	a.requireOutstanding(4, 0)
	require.Equal(t, []WC{{WRID: 12, Op: OpSend}}, a.drain())
	a.requireOutstanding(1, 0)
}

func TestFlushReportsEveryWorkRequestOnce(t *testing.T) {
	_, a, _ := newPair(t)
	a.recv(1, 2)
	a.send(false, 10, 11) // the peer has posted no receive
	a.send(true, 12)
	require.NoError(t, a.qp.SetError())
	require.NoError(t, a.qp.SetError())

	seen := make(map[uint64]int)
	for _, wc := range a.drain() {
		require.Equal(t, StatusWRFlushErr, wc.Status)
		seen[wc.WRID]++
	}
	require.Equal(t, map[uint64]int{1: 1, 2: 1, 10: 1, 11: 1, 12: 1}, seen)
	a.requireOutstanding(0, 0)
}

func TestUnsignaledSendsThatSucceededCompleteAfterSetError(t *testing.T) {
	_, a, b := newPair(t)
	b.recv(1, 2, 3, 4, 5, 6, 7, 8)
	for i := range testCap.SendWR { // the queue is full: the marker has a place of its own
		a.send(false, uint64(i))
	}
	require.Empty(t, a.drain())
	a.requireOutstanding(8, 0)
	require.NoError(t, a.qp.SetError())
	require.Empty(t, a.drain(), "the marker is kept back")
	a.requireOutstanding(0, 0)
	require.Len(t, b.drain(), 8)
}

func TestMarkerDoesNotHideWhatFollows(t *testing.T) {
	_, a, b := newPair(t)
	b.recv(1)
	a.send(false, 1)
	require.NoError(t, a.qp.SetError())
	a.recv(7)
	wc := make([]WC, 1)
	n, err := a.cq.Poll(wc)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, uint64(7), wc[0].WRID)
}

func TestDrainWRIDIsReserved(t *testing.T) {
	_, a, _ := newPair(t)
	requireErrno(t, second(a.qp.PostSend([]SendWR{{WRID: DrainWRID}})), syscall.EINVAL)
	a.requireOutstanding(0, 0)
}

func TestPostOnQPInErrorIsFlushed(t *testing.T) {
	_, a, _ := newPair(t)
	require.NoError(t, a.qp.SetError())
	a.send(false, 1)
	a.recv(2)
	require.Len(t, a.drain(), 2)
	a.requireOutstanding(0, 0)
}

func TestCompletionThatMatchesNothing(t *testing.T) {
	for _, tc := range []struct {
		name string
		wc   verbs.WC
	}{
		{"duplicate send", verbs.WC{WRID: 10, Op: OpSend}},
		{"unknown send", verbs.WC{WRID: 99, Op: OpSend}},
		{"duplicate receive", verbs.WC{WRID: 1, Op: OpRecv}},
		{"unknown receive", verbs.WC{WRID: 99, Op: OpRecv}},
		{"receive out of order", verbs.WC{WRID: 3, Op: OpRecv}},
		{"send of a receive's WRID", verbs.WC{WRID: 2, Op: OpSend}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, a, b := newPair(t)
			a.recv(1, 2, 3)
			b.recv(1)
			a.send(true, 10)
			b.send(true, 10)
			a.drain()
			b.drain()
			a.requireOutstanding(0, 2)

			p.Inject(a.qp.Num(), tc.wc)
			b.send(true, 11)
			wc := make([]WC, 8)
			n, err := a.cq.Poll(wc)
			require.Equal(t, []WC{{WRID: 2, Op: OpRecv, ByteLen: 4}}, wc[:n], "good completions are delivered all the same")
			var bad *AccountingError
			require.ErrorAs(t, err, &bad)
			require.Equal(t, AccountingError{QP: a.qp.Num(), Op: tc.wc.Op, WRID: tc.wc.WRID}, *bad)
			requireErrno(t, err, syscall.EPROTO)
			a.requireOutstanding(0, 1)
		})
	}
}

func TestFullQueueRefusesBeforeTheProviderIsAsked(t *testing.T) {
	p, a, b := newPair(t)
	wrs := make([]SendWR, testCap.SendWR+3)
	recvs := make([]RecvWR, testCap.RecvWR+3)
	for i := range wrs {
		wrs[i] = SendWR{WRID: uint64(i), Signaled: true}
		recvs[i].WRID = uint64(i)
	}
	n, err := a.qp.PostSend(wrs)
	require.Equal(t, testCap.SendWR, n)
	var full *FullError
	require.ErrorAs(t, err, &full)
	require.Equal(t, FullError{Op: OpSend, Depth: testCap.SendWR}, *full)
	requireErrno(t, err, syscall.ENOMEM)

	n, err = b.qp.PostRecv(recvs)
	require.Equal(t, testCap.RecvWR, n)
	require.ErrorAs(t, err, &full)
	require.Equal(t, FullError{Op: OpRecv, Depth: testCap.RecvWR}, *full)
	requireErrno(t, err, syscall.ENOMEM)

	p.SetFail(func(op string) error {
		require.NotContains(t, op, "post")
		return nil
	})
	n, err = b.qp.PostRecv(recvs[n:])
	require.Zero(t, n)
	requireErrno(t, err, syscall.ENOMEM)
	p.SetFail(nil)

	// A delivered send still holds its slot until its completion is polled:
	// the peer's answer can overtake it.
	n, err = a.qp.PostSend(wrs[:1])
	require.Zero(t, n)
	requireErrno(t, err, syscall.ENOMEM)
	a.drain()
	a.send(true, 100)
}

func TestProviderThatTakesAPart(t *testing.T) {
	p, a, b := newPair(t)
	b.recv(1, 2, 3)
	left := 2
	p.SetFail(func(op string) error {
		if op == "post send" || op == "post recv" {
			if left--; left < 0 {
				return errTest
			}
		}
		return nil
	})
	n, err := a.qp.PostSend([]SendWR{{WRID: 1}, {WRID: 2, Signaled: true}, {WRID: 3}, {WRID: 4}})
	require.Equal(t, 2, n)
	require.ErrorIs(t, err, errTest)
	requireErrno(t, err, syscall.EIO)
	a.requireOutstanding(2, 0)
	require.Equal(t, []WC{{WRID: 2, Op: OpSend}}, a.drain())
	a.requireOutstanding(0, 0)

	left = 1
	n, err = a.qp.PostRecv([]RecvWR{{WRID: 1}, {WRID: 2}})
	require.Equal(t, 1, n)
	require.ErrorIs(t, err, errTest)
	a.requireOutstanding(0, 1)
	p.SetFail(nil)
}

func TestRequestThatTheQPCannotHold(t *testing.T) {
	_, a, b := newPair(t)
	b.recv(1)
	for _, bad := range []SendWR{
		{SGL: make([]SGE, 3)},
		{Inline: true, SGL: []SGE{{Data: make([]byte, 200)}, {Data: make([]byte, 57)}}},
	} {
		n, err := a.qp.PostSend([]SendWR{{WRID: 7, Signaled: true}, bad, {WRID: 9}})
		require.Equal(t, 1, n, "requests before the bad one are posted")
		var limit *LimitError
		require.ErrorAs(t, err, &limit)
		requireErrno(t, err, syscall.EINVAL)
		a.requireOutstanding(1, 0)
		b.recv(1)
		a.drain()
		b.drain()
	}
}

func TestCapIsWhatWasAskedFor(t *testing.T) {
	_, a, _ := newPair(t)
	require.Equal(t, testCap.SendWR, a.qp.Cap().SendWR, "though the provider rounds up")
	require.Equal(t, 256, a.qp.Cap().MaxInline)
}

func TestQPBeyondTheLimits(t *testing.T) {
	p := newProvider(t)
	dev := NewDevice(p.Device())
	attr := dev.Attr()
	pd, err := dev.AllocPD()
	require.NoError(t, err)
	defer pd.Close()
	cq, err := dev.NewCQ(64)
	require.NoError(t, err)
	defer cq.Close()
	c, _ := p.Pair()
	for _, want := range []Cap{
		{SendWR: 0, RecvWR: 1, SendSGE: 1},
		{SendWR: 1, RecvWR: 0, SendSGE: 1},
		{SendWR: 1, RecvWR: 1, SendSGE: 0},
		{SendWR: attr.MaxQPWR + 1, RecvWR: 1, SendSGE: 1},
		{SendWR: 1, RecvWR: attr.MaxQPWR + 1, SendSGE: 1},
		{SendWR: 1, RecvWR: 1, SendSGE: attr.MaxSGE + 1},
		{SendWR: 33, RecvWR: 32, SendSGE: 1}, // deeper than the CQ
	} {
		_, err := NewQP(c, new(sync.Mutex), pd, cq, want)
		var limit *LimitError
		require.ErrorAs(t, err, &limit)
		requireErrno(t, err, syscall.EINVAL)
	}
	_, err = dev.NewCQ(attr.MaxCQE + 1)
	requireErrno(t, err, syscall.EINVAL)
	_, err = dev.NewCQ(0)
	requireErrno(t, err, syscall.EINVAL)
}

func TestFailedQPLeavesNothingBehind(t *testing.T) {
	p := newProvider(t)
	dev := NewDevice(p.Device())
	pd, err := dev.AllocPD()
	require.NoError(t, err)
	cq, err := dev.NewCQ(16)
	require.NoError(t, err)
	c, _ := p.Pair()
	p.SetFail(func(op string) error {
		if op == "create qp" {
			return syscall.ENOMEM
		}
		return nil
	})
	_, err = NewQP(c, new(sync.Mutex), pd, cq, testCap)
	requireErrno(t, err, syscall.ENOMEM)
	require.NoError(t, cq.Close())
	require.NoError(t, pd.Close())
}

func TestBusyQPCannotBeClosed(t *testing.T) {
	_, a, _ := newPair(t)
	a.send(false, 1)
	a.recv(2, 3)
	err := a.qp.Close()
	var busy *BusyError
	require.ErrorAs(t, err, &busy)
	require.Equal(t, BusyError{Object: "queue pair", Sends: 1, Recvs: 2}, *busy)
	requireErrno(t, err, syscall.EBUSY)
	require.Contains(t, err.Error(), "2 receive(s) not completed")

	require.False(t, a.qp.Closed(), "nothing has changed")
	a.recv(4)
	a.requireOutstanding(1, 3)

	require.NoError(t, a.qp.SetError())
	a.drain()
	require.NoError(t, a.qp.Close())
	require.True(t, a.qp.Closed())
	for _, err := range []error{
		a.qp.Close(),
		a.qp.SetError(),
		second(a.qp.PostSend([]SendWR{{}})),
		second(a.qp.PostRecv([]RecvWR{{}})),
	} {
		require.ErrorIs(t, err, net.ErrClosed)
		requireErrno(t, err, syscall.EBADF)
	}
}

func second(_ int, err error) error { return err }

func TestAbandonedQPCanBeClosed(t *testing.T) {
	p, a, _ := newPair(t)
	p.SetFail(func(op string) error {
		if op == "flush" {
			return errTest // a device that never flushes
		}
		return nil
	})
	a.send(false, 1)
	a.recv(2, 3)
	require.NoError(t, a.qp.SetError())
	require.Empty(t, a.drain())
	require.Error(t, a.qp.Close())

	sends, recvs := a.qp.Abandon()
	require.Equal(t, []int{2, 2}, []int{sends, recvs}, "one is the marker")
	a.requireOutstanding(0, 0)
	require.ErrorIs(t, second(a.qp.PostSend([]SendWR{{WRID: 9}})), net.ErrClosed)
	p.Inject(a.qp.Num(), verbs.WC{WRID: 1, Op: OpSend, Status: StatusWRFlushErr})
	require.Empty(t, a.drain(), "what comes late is dropped")
	require.NoError(t, a.qp.Close())
	p.SetFail(nil)
}

func TestProviderThatWillNotDestroy(t *testing.T) {
	p, a, b := newPair(t)
	require.NoError(t, b.qp.Close())
	p.SetFail(func(op string) error {
		switch op {
		case "destroy qp", "destroy cq", "dealloc pd":
			return syscall.EIO
		}
		return nil
	})
	requireErrno(t, a.qp.Close(), syscall.EIO)
	require.False(t, a.qp.Closed())
	requireErrno(t, b.cq.Close(), syscall.EIO)
	requireErrno(t, b.pd.Close(), syscall.EIO)
	p.SetFail(nil) // the test's end closes them
}

// A poller must see completions of requests whose PostSend has not returned.
func TestConcurrentPostersAndPoller(t *testing.T) {
	_, a, b := newPair(t)
	const total = 5000
	var failed atomic.Bool
	var wg sync.WaitGroup
	poll := func(e *end) {
		wc := make([]WC, 8)
		for done := 0; done < total && !failed.Load(); {
			n, err := e.cq.Poll(wc)
			if err != nil {
				failed.Store(true)
				t.Error(err)
			}
			done += n
			if n == 0 {
				runtime.Gosched()
			}
		}
	}
	// Posters find the queue full much of the time, which is part of the test.
	post := func(ids *atomic.Uint64, do func(id uint64) int) {
		for !failed.Load() {
			id := ids.Add(1)
			if id > total {
				return
			}
			for do(id) == 0 && !failed.Load() {
				runtime.Gosched()
			}
		}
	}
	var sends, recvs atomic.Uint64
	for range 2 {
		wg.Go(func() {
			wr := []SendWR{{Signaled: true}}
			post(&sends, func(id uint64) int {
				wr[0].WRID = id
				n, _ := a.qp.PostSend(wr)
				return n
			})
		})
		wg.Go(func() {
			wr := []RecvWR{{}}
			post(&recvs, func(id uint64) int {
				wr[0].WRID = id
				n, _ := b.qp.PostRecv(wr)
				return n
			})
		})
	}
	wg.Go(func() { poll(a) })
	wg.Go(func() { poll(b) })
	wg.Wait()
	a.requireOutstanding(0, 0)
	b.requireOutstanding(0, 0)
}

func TestPostAndPollDoNotAllocate(t *testing.T) {
	_, a, b := newPair(t)
	send := []SendWR{{Signaled: true, SGL: []SGE{{Data: make([]byte, 8)}, {Data: make([]byte, 8)}}}}
	recv := []RecvWR{{SGE: SGE{Data: make([]byte, 64)}}}
	wc := make([]WC, 4)
	id := uint64(0)
	allocs := testing.AllocsPerRun(1000, func() {
		id++
		send[0].WRID, recv[0].WRID = id, id
		n1, err1 := b.qp.PostRecv(recv)
		n2, err2 := a.qp.PostSend(send)
		n3, err3 := a.cq.Poll(wc)
		n4, err4 := b.cq.Poll(wc)
		if n1+n2+n3+n4 != 4 || err1 != nil || err2 != nil || err3 != nil || err4 != nil {
			t.Fatal("lost a completion")
		}
	})
	require.Zero(t, allocs)
}

func TestFullQueueDoesNotAllocate(t *testing.T) {
	_, a, _ := newPair(t)
	wr := []SendWR{{}}
	for i := range testCap.SendWR {
		a.send(false, uint64(i))
	}
	require.Zero(t, testing.AllocsPerRun(100, func() { a.qp.PostSend(wr) }))
}
