package qp

import (
	"net"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestCQServesOneQP(t *testing.T) {
	p, a, _ := newPair(t)
	var busy *BusyError
	err := a.cq.Close()
	require.ErrorAs(t, err, &busy)
	require.Equal(t, 1, busy.QPs)
	requireErrno(t, err, syscall.EBUSY)
	a.recv(1) // nothing has changed

	c, _ := p.Pair()
	_, err = NewQP(c, new(sync.Mutex), a.pd, a.cq, testCap)
	requireErrno(t, err, syscall.EINVAL)
}

func TestClosedCQ(t *testing.T) {
	p := newProvider(t)
	cq, err := NewDevice(p.Device()).NewCQ(4)
	require.NoError(t, err)
	require.Equal(t, 4, cq.Depth())
	require.NoError(t, cq.Close())
	cq.Wake()
	_, err = cq.Poll(make([]WC, 1))
	for _, err := range []error{err, cq.Arm(false), cq.Wait(), cq.Close()} {
		require.ErrorIs(t, err, net.ErrClosed)
		requireErrno(t, err, syscall.EBADF)
	}
}

func TestCloseEndsWait(t *testing.T) {
	p := newProvider(t)
	for range 200 {
		cq, err := NewDevice(p.Device()).NewCQ(4)
		require.NoError(t, err)
		const waiters = 2
		ended := make(chan error, waiters)
		for range waiters {
			go func() { ended <- cq.Wait() }()
		}
		require.NoError(t, cq.Close())
		for range waiters {
			require.ErrorIs(t, <-ended, net.ErrClosed)
		}
	}
}

func TestWakeEndsTheNextWait(t *testing.T) {
	_, a, _ := newPair(t)
	a.cq.Wake()
	require.NoError(t, a.cq.Wait())
}

func TestArmedCQWakes(t *testing.T) {
	_, a, b := newPair(t)
	b.recv(1, 2)
	require.NoError(t, b.cq.Arm(true))
	ended := make(chan error)
	go func() { ended <- b.cq.Wait() }()
	a.send(false, 1)
	select {
	case <-ended:
		t.Fatal("an unsolicited message woke a CQ armed for solicited ones")
	default:
	}
	_, err := a.qp.PostSend([]SendWR{{WRID: 2, Solicited: true}})
	require.NoError(t, err)
	require.NoError(t, <-ended)
	require.Len(t, b.drain(), 2)
}

func TestCompletionWithoutQP(t *testing.T) {
	p, a, b := newPair(t)
	p.Inject(a.qp.Num(), verbs.WC{WRID: 5, Op: OpRecv, Status: StatusWRFlushErr})
	require.NoError(t, a.qp.Close())
	n, err := a.cq.Poll(make([]WC, 1))
	require.Zero(t, n)
	var bad *AccountingError
	require.ErrorAs(t, err, &bad)
	require.Equal(t, uint64(5), bad.WRID)
	_ = b
}

func TestPollPassesTheProvidersErrorOn(t *testing.T) {
	p, a, _ := newPair(t)
	p.SetFail(func(op string) error {
		if op == "poll cq" || op == "req notify cq" {
			return syscall.ENODEV
		}
		return nil
	})
	_, err := a.cq.Poll(make([]WC, 1))
	requireErrno(t, err, syscall.ENODEV)
	requireErrno(t, a.cq.Arm(false), syscall.ENODEV)
	p.SetFail(nil)
}
