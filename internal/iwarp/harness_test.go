package iwarp

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestMain(m *testing.M) {
	nudges = nil // most tests count what is sent
	goleak.VerifyTestMain(m)
}

// patience bounds everything that a test waits for.
const patience = 30 * time.Second

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !f(); time.Sleep(50 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// within fails the test if f takes longer than d.
func within(t testing.TB, d time.Duration, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(d):
		t.Fatalf("%s: not within %v", what, d)
	}
}

// leaksNoDescriptor fails the test if it ends with other open descriptors than
// it began with.
func leaksNoDescriptor(t *testing.T) {
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("no /proc/self/fd")
		}
		return len(entries)
	}
	newChannel(t) // so that the netpoller's own are there
	before := count()
	t.Cleanup(func() {
		eventually(t, "as many open descriptors as before", func() bool { return count() <= before })
	})
}

func setNudges(t *testing.T, due ...time.Duration) {
	old := nudges
	nudges = due
	t.Cleanup(func() { nudges = old })
}

func setSetupTimeout(t *testing.T, d time.Duration) {
	old := setupTimeout
	setupTimeout = d
	t.Cleanup(func() { setupTimeout = old })
}

// end is one end of a connection in a test. It keeps the accounts.
type end struct {
	t      testing.TB
	ch     *eventChannel
	id     verbs.ID
	qp     verbs.QP
	cq     verbs.CQ
	pd     verbs.PD
	mr     verbs.MR
	mem    []byte
	block  int
	repost bool
	got    [][]byte // messages received
	sends  int      // sends completed
	bad    []verbs.WC
	recvs  map[uint64]bool // outstanding
	sent   map[uint64]bool // outstanding and signaled
}

const testDepth = 16

// regMR registers memory until the test's end.
func regMR(t testing.TB, p verbs.PD, b []byte, access verbs.Access) verbs.MR {
	m, err := p.RegMR(b, access)
	require.NoError(t, err)
	t.Cleanup(func() { m.Dereg() }) // if the test hasn't
	return m
}

func newChannel(t testing.TB) *eventChannel {
	ch, err := newEventChannel()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ch.Close()) })
	return ch
}

func newTestID(t testing.TB, ch *eventChannel) verbs.ID {
	i, err := ch.NewID()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, i.Destroy()) })
	return i
}

func next(t testing.TB, ch *eventChannel, want verbs.EventType) *verbs.Event {
	t.Helper()
	var ev *verbs.Event
	eventually(t, want.String(), func() (ok bool) {
		var err error
		ev, err = ch.GetEvent()
		return err == nil
	})
	require.Equal(t, want, ev.Type, "event error: %v", ev.Err)
	return ev
}

// nothingMore fails the test if an event waits.
func nothingMore(t testing.TB, ch *eventChannel) {
	t.Helper()
	if ev, err := ch.GetEvent(); err == nil {
		t.Fatalf("unexpected %v: %v", ev.Type, ev.Err)
	}
}

func listenOn(t testing.TB, ch *eventChannel, addr string, backlog int) verbs.ID {
	l := newTestID(t, ch)
	require.NoError(t, l.Bind(netip.MustParseAddrPort(addr)))
	require.NoError(t, l.Listen(backlog))
	return l
}

// resolved returns an id that is about to connect.
func resolved(t testing.TB, ch *eventChannel, to netip.AddrPort) *end {
	e := &end{t: t, ch: ch, id: newTestID(t, ch)}
	require.NoError(t, e.id.ResolveAddr(netip.AddrPort{}, to, time.Second))
	next(t, ch, verbs.EventAddrResolved)
	require.NoError(t, e.id.ResolveRoute(time.Second))
	next(t, ch, verbs.EventRouteResolved)
	return e
}

func (e *end) createQP(block int) {
	d := e.id.Device()
	require.NotNil(e.t, d)
	var err error
	e.pd, err = d.AllocPD()
	require.NoError(e.t, err)
	e.block, e.repost = block, true
	e.mem = make([]byte, 2*testDepth*block)
	e.mr, err = e.pd.RegMR(e.mem, verbs.AccessLocalWrite)
	require.NoError(e.t, err)
	e.cq, err = d.CreateCQ(2 * testDepth)
	require.NoError(e.t, err)
	e.qp, err = e.id.CreateQP(e.pd, e.cq, verbs.QPCap{SendWR: testDepth, RecvWR: testDepth, SendSGE: 8})
	require.NoError(e.t, err)
	e.t.Cleanup(func() {
		require.NoError(e.t, e.qp.Destroy())
		require.NoError(e.t, e.cq.Destroy())
		require.NoError(e.t, e.mr.Dereg())
	})
	e.recvs, e.sent = map[uint64]bool{}, map[uint64]bool{}
	for i := range testDepth {
		e.postRecv(uint64(i))
	}
}

func (e *end) buf(i uint64) []byte { return e.mem[int(i)*e.block : (int(i)+1)*e.block] }

func (e *end) postRecv(i uint64) {
	require.False(e.t, e.recvs[i])
	e.recvs[i] = true
	n, err := e.qp.PostRecv([]verbs.RecvWR{{WRID: i, SGE: verbs.SGE{Data: e.buf(i), LKey: e.mr.LKey()}}})
	require.NoError(e.t, err)
	require.Equal(e.t, 1, n)
}

// send posts one signaled send.
func (e *end) send(wr verbs.SendWR) error {
	require.False(e.t, e.sent[wr.WRID])
	wr.Signaled = true
	n, err := e.qp.PostSend([]verbs.SendWR{wr})
	require.Equal(e.t, err == nil, n == 1)
	e.sent[wr.WRID] = n == 1
	return err
}

// poll takes completions; received messages are copied and reposted.
func (e *end) poll() int {
	var wc [4]verbs.WC
	n, err := e.cq.Poll(wc[:])
	require.NoError(e.t, err)
	for _, w := range wc[:n] {
		if w.Op == verbs.OpRecv {
			require.True(e.t, e.recvs[w.WRID], "receive %d completes twice", w.WRID)
			e.recvs[w.WRID] = false
		} else if w.Status == verbs.StatusSuccess {
			e.sends++
			e.sent[w.WRID] = false
		}
		switch {
		case w.Status != verbs.StatusSuccess:
			require.Equal(e.t, verbs.StatusWRFlushErr, w.Status)
			e.bad = append(e.bad, w)
			if w.Op == verbs.OpSend {
				require.True(e.t, e.sent[w.WRID], "send %d completes twice", w.WRID)
				e.sent[w.WRID] = false
			}
		case w.Op == verbs.OpRecv:
			e.got = append(e.got, append([]byte(nil), e.buf(w.WRID)[:w.ByteLen]...))
			if e.repost {
				e.postRecv(w.WRID)
			}
		}
	}
	return n
}

// outstanding is how many posted requests have not completed.
func (e *end) outstanding() (n int) {
	for _, m := range []map[uint64]bool{e.recvs, e.sent} {
		for _, out := range m {
			if out {
				n++
			}
		}
	}
	return n
}

// settles polls until everything posted has completed.
func (e *end) settles() {
	e.t.Helper()
	e.repost = false
	eventually(e.t, "all posted work completed", func() bool { e.poll(); return e.outstanding() == 0 })
	require.Zero(e.t, e.poll())
}

// tcp returns the connection under an end.
func tcp(e *end) *net.TCPConn {
	i := e.id.(*id)
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.conn
}

// pair makes a connection between two ends.
func pair(t testing.TB, block int, p verbs.ConnParam, addr string) (a, b *end) {
	ch := newChannel(t)
	l := listenOn(t, ch, addr, 8)
	a = resolved(t, ch, l.LocalAddr())
	a.createQP(block)
	p.PrivateData = []byte("hello")
	require.NoError(t, a.id.Connect(p))
	ev := next(t, ch, verbs.EventConnectRequest)
	require.Equal(t, "hello", string(ev.PrivateData))
	b = accept(t, ch, ev, block, verbs.ConnParam{PrivateData: []byte("welcome")})
	for range 2 {
		ev = next(t, ch, verbs.EventEstablished)
		if ev.ID == a.id {
			require.Equal(t, "welcome", string(ev.PrivateData))
		}
	}
	return a, b
}

// accept accepts a connect request.
func accept(t testing.TB, ch *eventChannel, ev *verbs.Event, block int, p verbs.ConnParam) *end {
	e := &end{t: t, ch: ch, id: ev.ID}
	t.Cleanup(func() { require.NoError(t, ev.ID.Destroy()) })
	e.createQP(block)
	require.NoError(t, e.id.Accept(p))
	return e
}

// peer is a bare TCP connection that speaks as much iWARP as a test wants.
type peer struct {
	*net.TCPConn
	t     testing.TB
	crc   bool
	setup wire.SetupFrame // what the other side sent
}

func dialPeer(t testing.TB, to netip.AddrPort) *peer {
	c, err := net.Dial("tcp", to.String())
	require.NoError(t, err)
	return newPeer(t, c.(*net.TCPConn))
}

func newPeer(t testing.TB, c *net.TCPConn) *peer {
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	t.Cleanup(func() { c.Close() })
	return &peer{TCPConn: c, t: t}
}

func (p *peer) write(b []byte) {
	_, err := p.Write(b)
	require.NoError(p.t, err)
}

func (p *peer) writeSetup(f wire.SetupFrame) {
	b, err := wire.AppendSetup(nil, &f)
	require.NoError(p.t, err)
	p.write(b)
}

func (p *peer) readSetup(reply bool) wire.SetupFrame {
	f, err := readSetup(p, reply)
	require.NoError(p.t, err)
	return f
}

// rest reads to the end of the stream and returns its FPDUs.
func (p *peer) rest() []fpdu {
	b, err := io.ReadAll(p)
	require.NoError(p.t, err)
	return parseFPDUs(p.t, b, p.crc)
}

// roles is who dials: our side or the peer.
var roles = map[string]bool{"we dial": true, "the peer dials": false}

// connectPeer connects an end of ours with a peer.
func connectPeer(t testing.TB, weDial bool, block int, crc bool) (*end, *peer) {
	return connectPeerWith(t, weDial, block, wire.SetupFrame{Revision: 2, Enhanced: true, CRC: crc}, verbs.ConnParam{})
}

func connectPeerWith(t testing.TB, weDial bool, block int, f wire.SetupFrame, param verbs.ConnParam) (*end, *peer) {
	ch := newChannel(t)
	if weDial {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer ln.Close()
		e := resolved(t, ch, ln.Addr().(*net.TCPAddr).AddrPort())
		e.createQP(block)
		require.NoError(t, e.id.Connect(param))
		c, err := ln.Accept()
		require.NoError(t, err)
		p := newPeer(t, c.(*net.TCPConn))
		p.setup = p.readSetup(false)
		f.Reply, f.Revision, f.Enhanced = true, p.setup.Revision, p.setup.Enhanced
		p.crc = f.CRC || param.CRC
		p.writeSetup(f)
		next(t, ch, verbs.EventEstablished)
		return e, p
	}
	l := listenOn(t, ch, "127.0.0.1:0", 8)
	p := dialPeer(t, l.LocalAddr())
	p.crc = f.CRC || param.CRC
	p.writeSetup(f)
	e := accept(t, ch, next(t, ch, verbs.EventConnectRequest), block, param)
	next(t, ch, verbs.EventEstablished)
	p.setup = p.readSetup(true)
	return e, p
}

// fpdu is one FPDU, parsed.
type fpdu struct {
	wire.Header
	payload []byte
}

func sendHeader(msn, mo uint32, last bool) wire.Header {
	return wire.Header{Last: last, Opcode: wire.OpSend, MSN: msn, MO: mo}
}

// appendFPDU appends an FPDU to b.
func appendFPDU(b []byte, crc bool, h wire.Header, payload []byte) []byte {
	start, ulpdu := len(b), h.Len()+len(payload)
	b = append(b, make([]byte, wire.FPDUHeaderLen+h.Len())...)
	wire.PutFPDUHeader(b[start:], ulpdu)
	h.Put(b[start+wire.FPDUHeaderLen:])
	b = append(b, payload...)
	var trailer [wire.MaxTrailerLen]byte
	n := wire.PutTrailer(trailer[:], ulpdu, crc, wire.UpdateCRC(0, b[start:]))
	return append(b, trailer[:n]...)
}

func makeFPDU(crc bool, h wire.Header, payload []byte) []byte {
	return appendFPDU(nil, crc, h, payload)
}

// parseFPDUs parses a stream to its last byte.
func parseFPDUs(t testing.TB, b []byte, crc bool) (all []fpdu) {
	t.Helper()
	for len(b) > 0 {
		n := wire.FPDUHeader(b)
		end := wire.FPDUHeaderLen + n
		require.LessOrEqual(t, end+wire.TrailerLen(n), len(b))
		h, err := wire.ParseHeader(b[wire.FPDUHeaderLen:end])
		require.NoError(t, err)
		trailer := b[end : end+wire.TrailerLen(n)]
		if crc {
			require.NoError(t, wire.CheckCRC(wire.UpdateCRC(0, b[:end]), trailer))
		} else {
			require.Equal(t, make([]byte, len(trailer)), trailer)
		}
		all = append(all, fpdu{h, bytes.Clone(b[wire.FPDUHeaderLen+h.Len() : end])})
		b = b[end+len(trailer):]
	}
	return all
}
