package iwarp_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
)

// rping is one side of what rdma-core's program of that name does. Of each round,
// the client sends where its text is, and the server READs it; the client sends
// where there is room, and the server WRITEs the text there. What the server sends
// just says that it is done. All messages have infoLen bytes.
type rping struct {
	t     *testing.T
	id    *cm.ID
	cq    *qp.CQ
	qp    *qp.QP
	ctl   *qp.MR // a receive, and a message to send
	text  *qp.MR
	mem   []byte // of both
	sent  uint64
	recvd uint64
}

const (
	rpingText    = 64 << 10
	infoLen      = 16
	rpingTimeout = 30 * time.Second
)

// rpingParam is what rping asks for.
var rpingParam = cm.ConnParam{ResponderResources: 1, InitiatorDepth: 1, RetryCount: 7}

func (r *rping) text0() []byte { return r.mem[:rpingText] }
func (r *rping) recvBuf() []byte {
	return r.mem[rpingText : rpingText+infoLen]
}
func (r *rping) sendBuf() []byte {
	return r.mem[rpingText+infoLen : rpingText+2*infoLen]
}

// newRping makes the queue pair of an id, with a receive posted.
func newRping(t *testing.T, id *cm.ID) *rping {
	r := &rping{t: t, id: id}
	dev, ok := id.Device()
	require.True(t, ok)
	pd, err := dev.AllocPD()
	require.NoError(t, err)
	r.mem, err = unix.Mmap(-1, 0, rpingText+4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	r.text, err = pd.RegRemoteMR(r.text0(), qp.AccessLocalWrite|qp.AccessRemoteWrite|qp.AccessRemoteRead)
	require.NoError(t, err)
	r.ctl, err = pd.RegMR(r.mem[rpingText:])
	require.NoError(t, err)
	r.cq, err = dev.NewCQ(8)
	require.NoError(t, err)
	r.qp, err = id.CreateQP(pd, r.cq, qp.Cap{SendWR: 4, RecvWR: 2, SendSGE: 1})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, r.qp.SetError())
		for sends, recvs := r.qp.Outstanding(); sends+recvs > 0; sends, recvs = r.qp.Outstanding() {
			_, err := r.cq.Poll(make([]qp.WC, 8))
			require.NoError(t, err)
		}
		require.NoError(t, r.qp.Close())
		require.NoError(t, r.cq.Close())
		require.NoError(t, r.text.Close())
		require.NoError(t, r.ctl.Close())
		require.NoError(t, pd.Close())
		require.NoError(t, unix.Munmap(r.mem))
	})
	r.recv()
	return r
}

func (r *rping) recv() {
	_, err := r.qp.PostRecv([]qp.RecvWR{{WRID: 1 << 32, SGE: qp.SGE{Data: r.recvBuf(), LKey: r.ctl.LKey()}}})
	require.NoError(r.t, err)
}

// do posts a request and waits for it.
func (r *rping) do(wr qp.SendWR) {
	r.sent++
	wr.WRID, wr.Signaled = r.sent, true
	_, err := r.qp.PostSend([]qp.SendWR{wr})
	require.NoError(r.t, err)
	r.await(wr.WRID)
}

// await polls, and waits in between, until a request completes. A message that
// comes before it is kept.
func (r *rping) await(wrid uint64) {
	r.t.Helper()
	timer := time.AfterFunc(rpingTimeout, r.cq.Wake)
	defer timer.Stop()
	wc := make([]qp.WC, 1)
	for start := time.Now(); ; {
		if wrid == 1<<32 && r.recvd > 0 {
			r.recvd--
			return
		}
		n, err := r.cq.Poll(wc)
		require.NoError(r.t, err)
		if n == 0 {
			require.Less(r.t, time.Since(start), rpingTimeout)
			require.NoError(r.t, r.cq.Arm(false))
			if n, err = r.cq.Poll(wc); n == 0 {
				require.NoError(r.t, err)
				require.NoError(r.t, r.cq.Wait())
				continue
			}
		}
		require.NoError(r.t, qp.StatusErr(wc[0]))
		if wc[0].Op == qp.OpRecv {
			require.Equal(r.t, infoLen, wc[0].ByteLen)
			r.recvd++
		} else if wc[0].WRID == wrid {
			return
		}
	}
}

// send sends where the text is.
func (r *rping) send() {
	b := r.sendBuf()
	binary.BigEndian.PutUint64(b, r.text.Addr())
	binary.BigEndian.PutUint32(b[8:], r.text.RKey())
	binary.BigEndian.PutUint32(b[12:], rpingText)
	r.do(qp.SendWR{SGL: []qp.SGE{{Data: b, LKey: r.ctl.LKey()}}})
}

// info waits for such a message, and returns a request to read or write there.
func (r *rping) info(op qp.WROp) qp.SendWR {
	r.await(1 << 32)
	b := r.recvBuf()
	wr := qp.SendWR{Op: op, RemoteAddr: binary.BigEndian.Uint64(b), RKey: binary.BigEndian.Uint32(b[8:])}
	wr.SGL = []qp.SGE{{Data: r.mem[:binary.BigEndian.Uint32(b[12:])], LKey: r.text.LKey()}}
	r.recv()
	return wr
}

// serve is the server's side of some rounds.
func (r *rping) serve(rounds int) {
	for range rounds {
		r.do(r.info(qp.WRRDMARead))
		r.send()
		r.do(r.info(qp.WRRDMAWrite))
		r.send()
	}
}

// ping is the client's.
func (r *rping) ping(rounds int) {
	for round := range rounds {
		want := fmt.Appendf(nil, "rdma-ping-%d: ", round)
		for len(want) < rpingText {
			want = append(want, byte('A'+(round+len(want))%58))
		}
		copy(r.text0(), want)
		r.send()
		r.info(0)
		clear(r.text0())
		r.send()
		r.info(0)
		require.Equal(r.t, string(want), string(r.text0()), "round %d", round)
	}
}

// Both sides run here, on two connections that differ in who dials.
func TestRping(t *testing.T) {
	for name, serverDials := range map[string]bool{"the client dials": false, "the server dials": true} {
		for _, crc := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/CRC %v", name, crc), func(t *testing.T) {
				active, passive := rpingPair(t, crc)
				done := make(chan struct{})
				server, client := passive, active
				if serverDials {
					server, client = active, passive
				}
				go func() { defer close(done); server.serve(50) }()
				client.ping(50)
				<-done
			})
		}
	}
}

func rpingPair(t *testing.T, crc bool) (active, passive *rping) {
	param := rpingParam
	param.CRC = crc
	ctx, cancel := context.WithTimeout(context.Background(), rpingTimeout)
	t.Cleanup(cancel)
	ch, err := cm.NewEventChannel("iwarp")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ch.Close()) })
	newID := func() *cm.ID {
		id, err := ch.NewID()
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, id.Destroy()) })
		return id
	}
	wait := func(id *cm.ID, want cm.EventType) *cm.Event {
		ev, err := id.Wait(ctx, want)
		require.NoError(t, err)
		ev.Ack()
		return ev
	}
	l, id := newID(), newID()
	require.NoError(t, l.Bind(netip.MustParseAddrPort("127.0.0.1:0")))
	require.NoError(t, l.Listen(1))
	require.NoError(t, id.ResolveAddr(netip.AddrPort{}, l.LocalAddr(), rpingTimeout))
	wait(id, cm.EventAddrResolved)
	require.NoError(t, id.ResolveRoute(rpingTimeout))
	wait(id, cm.EventRouteResolved)
	active = newRping(t, id)
	require.NoError(t, id.Connect(param))
	child := wait(l, cm.EventConnectRequest).ID
	t.Cleanup(func() { require.NoError(t, child.Destroy()) })
	passive = newRping(t, child)
	require.NoError(t, child.Accept(param))
	wait(child, cm.EventEstablished)
	wait(id, cm.EventEstablished)
	return active, passive
}
