package qp

import (
	"errors"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/verbs/verbstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testCap is small, so that tests reach its limits.
var testCap = Cap{SendWR: 8, RecvWR: 8, SendSGE: 2}

var errTest = errors.New("fault of the test")

// newProvider returns a fake provider. At the test's end nothing of it may be
// left, and nobody may have broken the rules.
func newProvider(t *testing.T) *verbstest.Provider {
	p := verbstest.New()
	t.Cleanup(func() {
		require.Empty(t, p.Live())
		require.Empty(t, p.Violations())
	})
	return p
}

// end is a queue pair and what it needs.
type end struct {
	t  *testing.T
	pd *PD
	cq *CQ
	qp *QP
}

func newEnd(t *testing.T, p *verbstest.Provider, c Creator, want Cap) *end {
	dev := NewDevice(p.Device())
	pd, err := dev.AllocPD()
	require.NoError(t, err)
	cq, err := dev.NewCQ(want.SendWR + want.RecvWR)
	require.NoError(t, err)
	q, err := NewQP(c, new(sync.Mutex), pd, cq, want)
	require.NoError(t, err)
	e := &end{t, pd, cq, q}
	t.Cleanup(e.close)
	return e
}

// newPair returns two connected ends.
func newPair(t *testing.T) (p *verbstest.Provider, a, b *end) {
	p = newProvider(t)
	x, y := p.Pair()
	return p, newEnd(t, p, x, testCap), newEnd(t, p, y, testCap)
}

func (e *end) close() {
	if !e.qp.Closed() {
		require.NoError(e.t, e.qp.SetError())
		e.drain()
		require.NoError(e.t, e.qp.Close())
	}
	require.NoError(e.t, e.cq.Close())
	require.NoError(e.t, e.pd.Close())
}

// drain polls until there is nothing more.
func (e *end) drain() (all []WC) {
	wc := make([]WC, 4)
	for {
		n, err := e.cq.Poll(wc)
		require.NoError(e.t, err)
		if n == 0 {
			return all
		}
		all = append(all, wc[:n]...)
	}
}

func (e *end) recv(wrids ...uint64) {
	for _, id := range wrids {
		n, err := e.qp.PostRecv([]RecvWR{{WRID: id, SGE: SGE{Data: make([]byte, 64)}}})
		require.NoError(e.t, err)
		require.Equal(e.t, 1, n)
	}
}

func (e *end) send(signaled bool, wrids ...uint64) {
	for _, id := range wrids {
		n, err := e.qp.PostSend([]SendWR{{WRID: id, Signaled: signaled, SGL: []SGE{{Data: []byte("data")}}}})
		require.NoError(e.t, err)
		require.Equal(e.t, 1, n)
	}
}

func (e *end) requireOutstanding(sends, recvs int) {
	e.t.Helper()
	s, r := e.qp.Outstanding()
	require.Equal(e.t, []int{sends, recvs}, []int{s, r}, "outstanding sends, receives")
}

// mapped returns memory outside the Go heap.
func mapped(t *testing.T, size int) []byte {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(b)) })
	return b
}

func requireErrno(t *testing.T, err error, want syscall.Errno) {
	t.Helper()
	require.Error(t, err)
	require.ErrorIs(t, err, want)
	var errno syscall.Errno
	require.ErrorAs(t, err, &errno)
}
