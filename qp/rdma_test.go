package qp

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// remoteRegion registers memory with remote access.
func (e *end) remoteRegion(access Access) (*MR, []byte) {
	mem := mapped(e.t, 4096)
	mr, err := e.pd.RegRemoteMR(mem, access)
	require.NoError(e.t, err)
	e.t.Cleanup(func() { require.NoError(e.t, mr.Close()) })
	return mr, mem
}

// newRemotePair is newPair on a fake that lets memory be accessed by peers.
func newRemotePair(t *testing.T) (a, b *end) {
	p := newProvider(t)
	p.AllowRemoteAccess()
	x, y := p.Pair()
	return newEnd(t, p, x, testCap), newEnd(t, p, y, testCap)
}

func TestRemoteAccessIsWhatWasAskedFor(t *testing.T) {
	a, _ := newRemotePair(t)
	for _, access := range []Access{0, AccessRemoteRead, AccessLocalWrite | AccessRemoteWrite, AccessLocalWrite | AccessRemoteWrite | AccessRemoteRead} {
		mem := mapped(t, 4096)
		mr, err := a.pd.RegRemoteMR(mem, access)
		require.NoError(t, err)
		require.Equal(t, access, mr.Access())
		require.NotZero(t, mr.RKey())
		require.NotZero(t, mr.Addr())
		require.NoError(t, mr.Close())
	}
	for _, access := range []Access{AccessRemoteWrite, AccessRemoteWrite | AccessRemoteRead, 1 << 3} {
		_, err := a.pd.RegRemoteMR(mapped(t, 4096), access)
		requireErrno(t, err, syscall.EINVAL)
	}
	require.NoError(t, a.qp.SetError())
	a.drain()
	require.NoError(t, a.qp.Close())
	require.NoError(t, a.pd.Close(), "regions that were refused are not counted")
	_, err := a.pd.RegRemoteMR(mapped(t, 4096), 0)
	requireErrno(t, err, syscall.EBADF)
	a.pd, err = a.pd.dev.AllocPD() // to be closed
	require.NoError(t, err)
}

func TestRDMAMovesDataUnnoticed(t *testing.T) {
	a, b := newRemotePair(t)
	theirs, mem := b.remoteRegion(AccessLocalWrite | AccessRemoteWrite | AccessRemoteRead)
	n, err := a.qp.PostSend([]SendWR{
		{WRID: 1, Op: WRRDMAWrite, SGL: []SGE{{Data: []byte("written")}}, RemoteAddr: theirs.Addr() + 10, RKey: theirs.RKey()},
		{WRID: 2, Op: WRRDMAWrite, Signaled: true},
	})
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, []WC{{WRID: 2, Op: OpSend}}, a.drain())
	require.Equal(t, "written", string(mem[10:17]))
	got := make([]byte, 7)
	_, err = a.qp.PostSend([]SendWR{{WRID: 3, Op: WRRDMARead, Signaled: true, SGL: []SGE{{Data: got}}, RemoteAddr: theirs.Addr() + 10, RKey: theirs.RKey()}})
	require.NoError(t, err)
	require.Equal(t, []WC{{WRID: 3, Op: OpSend}}, a.drain())
	require.Equal(t, "written", string(got))
	require.Empty(t, b.drain())
	a.requireOutstanding(0, 0)
}

func TestRDMAWithoutTheRightEndsTheConnection(t *testing.T) {
	for _, op := range []WROp{WRRDMAWrite, WRRDMARead} {
		a, b := newRemotePair(t)
		theirs, mem := b.remoteRegion(AccessLocalWrite)
		b.recv(1)
		_, err := a.qp.PostSend([]SendWR{{WRID: 3, Op: op, SGL: []SGE{{Data: []byte("data")}}, RemoteAddr: theirs.Addr(), RKey: theirs.RKey()}})
		require.NoError(t, err)
		wc := a.drain()
		require.Equal(t, []WC{{WRID: 3, Op: OpSend, Status: StatusRemAccessErr}}, wc)
		require.ErrorIs(t, StatusErr(wc[0]), syscall.EIO)
		require.Equal(t, []WC{{WRID: 1, Op: OpRecv, Status: StatusWRFlushErr}}, b.drain())
		require.Equal(t, make([]byte, 4096), mem)
	}
}

func TestPostSendRefusesWhatNoDeviceDoes(t *testing.T) {
	a, _ := newRemotePair(t)
	var limit *LimitError
	for _, c := range []struct {
		name  string
		wr    SendWR
		limit int64 // or 0
	}{
		{"unknown operation", SendWR{Op: 3}, 0},
		{"inline READ", SendWR{Op: WRRDMARead, Inline: true}, 0},
		{"READ to two places", SendWR{Op: WRRDMARead, SGL: make([]SGE, 2)}, 1},
		{"WRITE from too many places", SendWR{Op: WRRDMAWrite, SGL: make([]SGE, 3)}, 2},
		{"inline WRITE too long", SendWR{Op: WRRDMAWrite, Inline: true, SGL: []SGE{{Data: make([]byte, 257)}}}, 256},
		{"WRITE too long", SendWR{Op: WRRDMAWrite, SGL: []SGE{{Data: make([]byte, MaxRDMA/2+1)}, {Data: make([]byte, MaxRDMA/2)}}}, MaxRDMA},
	} {
		n, err := a.qp.PostSend([]SendWR{c.wr})
		require.Zero(t, n, c.name)
		requireErrno(t, err, syscall.EINVAL)
		if c.limit > 0 {
			require.ErrorAs(t, err, &limit, c.name)
			require.Equal(t, c.limit, limit.Limit, c.name)
		}
	}
	a.requireOutstanding(0, 0)
}
