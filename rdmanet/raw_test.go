package rdmanet

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
)

// rawPeer is the other end of a connection, made of cm and qp alone: it says what
// a test wants it to say.
type rawPeer struct {
	t    testing.TB
	ch   *cm.EventChannel
	id   *cm.ID
	pd   *qp.PD
	pool *qp.Pool
	cq   *qp.CQ
	qp   *qp.QP

	l     *Listener // that it dialed, or nil
	recvs map[uint64]*qp.Buffer
	sends map[uint64]*qp.Buffer
	wrid  uint64
	got   [][]byte
	bad   []qp.WC
}

const rawBlock = 64 << 10

func newRaw(t testing.TB, p Provider) *rawPeer {
	t.Helper()
	if p == "" {
		p = testProvider()
	}
	ch, err := cm.NewEventChannel(string(p))
	require.NoError(t, err)
	r := &rawPeer{t: t, ch: ch, recvs: map[uint64]*qp.Buffer{}, sends: map[uint64]*qp.Buffer{}}
	t.Cleanup(r.close)
	return r
}

func (r *rawPeer) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	r.t.Cleanup(cancel)
	return ctx
}

func (r *rawPeer) wait(want cm.EventType) *cm.Event {
	r.t.Helper()
	ev, err := r.id.Wait(r.ctx(), want)
	require.NoError(r.t, err)
	ev.Ack()
	return ev
}

// open makes the queue pair, with n receives posted.
func (r *rawPeer) open(n int) {
	r.t.Helper()
	dev, ok := r.id.Device()
	require.True(r.t, ok)
	var err error
	r.pd, err = dev.AllocPD()
	require.NoError(r.t, err)
	r.pool, err = qp.NewPool(r.pd, qp.PoolConfig{BlockSize: rawBlock, MaxBytes: 64 << 20})
	require.NoError(r.t, err)
	r.cq, err = dev.NewCQ(512)
	require.NoError(r.t, err)
	r.qp, err = r.id.CreateQP(r.pd, r.cq, qp.Cap{SendWR: 200, RecvWR: 200, SendSGE: 1})
	require.NoError(r.t, err)
	r.post(n)
}

func (r *rawPeer) post(n int) {
	r.t.Helper()
	for range n {
		b, err := r.pool.Get()
		require.NoError(r.t, err)
		r.wrid++
		r.recvs[r.wrid] = b
		_, err = r.qp.PostRecv([]qp.RecvWR{{WRID: r.wrid, SGE: b.BlockSGE()}})
		require.NoError(r.t, err)
	}
}

// rawConnect asks for a connection. What comes of it is the next event.
func rawConnect(t testing.TB, p Provider, to netip.AddrPort, private []byte, receives int) *rawPeer {
	t.Helper()
	return rawConnectWith(t, p, to, cm.ConnParam{PrivateData: private, RetryCount: 7, RNRRetryCount: 7}, receives)
}

func rawConnectWith(t testing.TB, p Provider, to netip.AddrPort, param cm.ConnParam, receives int) *rawPeer {
	t.Helper()
	r := newRaw(t, p)
	var err error
	r.id, err = r.ch.NewID()
	require.NoError(t, err)
	require.NoError(t, r.id.ResolveAddr(netip.AddrPort{}, to, patience))
	r.wait(cm.EventAddrResolved)
	require.NoError(t, r.id.ResolveRoute(patience))
	r.wait(cm.EventRouteResolved)
	r.open(receives)
	require.NoError(t, r.id.Connect(param))
	return r
}

// rawDial is a raw peer that is connected to a listener of its own.
func rawDial(t testing.TB, cfg Config, private []byte, receives int) *rawPeer {
	t.Helper()
	l := listen(t, ListenConfig{Config: cfg})
	r := rawConnect(t, l.cfg.Provider, l.addr.ap, private, receives)
	r.l = l
	r.wait(cm.EventEstablished)
	return r
}

// rawListen is a raw peer that c was dialed to.
func rawListen(t testing.TB, cfg Config, reply []byte, receives int) (r *rawPeer, dialed func() (*Conn, error)) {
	t.Helper()
	r = newRaw(t, cfg.Provider)
	lid, err := r.ch.NewID()
	require.NoError(t, err)
	defer func() { require.NoError(t, lid.Destroy()) }()
	addr := netip.AddrPortFrom(netip.MustParseAddr(testAddrs(t)[0]), 0)
	require.NoError(t, lid.Bind(addr))
	require.NoError(t, lid.Listen(8))
	type result struct {
		c   *Conn
		err error
	}
	got := make(chan result, 1)
	go func() {
		c, err := (&Dialer{Config: cfg, Timeout: patience}).Dial("rdma", lid.LocalAddr().String())
		rc, _ := c.(*Conn)
		got <- result{rc, err}
	}()
	ev, err := lid.Wait(r.ctx(), cm.EventConnectRequest)
	require.NoError(t, err)
	ev.Ack()
	r.id = ev.ID
	r.open(receives)
	require.NoError(t, r.id.Accept(cm.ConnParam{PrivateData: reply, RetryCount: 7, RNRRetryCount: 7}))
	r.wait(cm.EventEstablished)
	return r, func() (*Conn, error) {
		x := <-got
		if x.c != nil {
			closeLater(t, x.c)
		}
		return x.c, x.err
	}
}

// honest is the greeting of a peer like us.
func honest() []byte {
	cfg, err := Config{}.resolve()
	if err != nil {
		panic(err)
	}
	return cfg.greeting().append(nil)
}

// accepted is our end of the connection.
func (r *rawPeer) accepted() *Conn {
	r.t.Helper()
	require.NoError(r.t, r.l.SetDeadline(time.Now().Add(patience)))
	c, err := r.l.Accept()
	require.NoError(r.t, err)
	closeLater(r.t, c)
	return c.(*Conn)
}

func frame(h header, payload ...byte) []byte {
	b := make([]byte, headerLen, headerLen+len(payload))
	h.put(b)
	return append(b, payload...)
}

func data(n int) []byte {
	return frame(header{typ: frameData, length: n}, make([]byte, n)...)
}

func (r *rawPeer) sendHello() { r.send(frame(header{typ: frameHello})) }

// send posts messages.
func (r *rawPeer) send(msgs ...[]byte) {
	r.t.Helper()
	for _, m := range msgs {
		b, err := r.pool.Get()
		require.NoError(r.t, err)
		n := copy(b.Block(), m)
		r.wrid++
		r.sends[r.wrid] = b
		_, err = r.qp.PostSend([]qp.SendWR{{WRID: r.wrid, SGL: []qp.SGE{{Data: b.Block()[:n], LKey: b.LKey()}}, Signaled: true, Solicited: true}})
		require.NoError(r.t, err)
	}
	r.poll()
}

// poll takes what there is.
func (r *rawPeer) poll() {
	var wcs [32]qp.WC
	for {
		n, err := r.cq.Poll(wcs[:])
		require.NoError(r.t, err)
		for _, wc := range wcs[:n] {
			bufs := r.sends
			if wc.Op == qp.OpRecv {
				bufs = r.recvs
			}
			b := bufs[wc.WRID]
			delete(bufs, wc.WRID)
			switch {
			case wc.Status != qp.StatusSuccess:
				r.bad = append(r.bad, wc)
			case wc.Op == qp.OpRecv:
				r.got = append(r.got, append([]byte(nil), b.Block()[:wc.ByteLen]...))
			}
			b.Release()
		}
		if n == 0 {
			return
		}
	}
}

// ended waits for the end of the connection.
func (r *rawPeer) ended() {
	r.t.Helper()
	eventually(r.t, func() bool {
		r.poll()
		// On InfiniBand a side that looks for events is moved to the error state.
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		if ev, err := r.ch.GetEvent(ctx); err == nil {
			ev.Ack()
		}
		sends, recvs := r.qp.Outstanding()
		return sends+recvs == 0 || len(r.bad) > 0
	}, "the connection ends")
}

func (r *rawPeer) close() {
	if r.id != nil {
		if r.qp != nil {
			_ = r.qp.SetError()
			eventually(r.t, func() bool {
				r.poll()
				sends, recvs := r.qp.Outstanding()
				return sends+recvs == 0
			}, "the raw peer is flushed")
			require.NoError(r.t, r.qp.Close())
			require.NoError(r.t, r.cq.Close())
			require.NoError(r.t, r.pool.Close())
			require.NoError(r.t, r.pd.Close())
		}
		require.NoError(r.t, r.id.Destroy())
		r.id = nil
	}
	if r.ch != nil {
		require.NoError(r.t, r.ch.Close())
		r.ch = nil
	}
}

func mustAddr(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// listenRaw returns where a listener listens until the test ends.
func listenRaw(t testing.TB) netip.AddrPort { return listen(t, ListenConfig{}).addr.ap }
