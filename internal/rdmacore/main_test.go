//go:build cgo && linux

package rdmacore

import (
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait; an emulated machine is slow.
const patience = 30 * time.Second

// onEveryDevice runs a test on each address that the lab names.
func onEveryDevice(t *testing.T, f func(t *testing.T, addr netip.Addr)) {
	found := false
	for _, v := range []string{"RXE4", "RXE6", "SIW4", "SIW6"} {
		if a := os.Getenv("RDMANET_LAB_" + v); a != "" {
			found = true
			t.Run(v, func(t *testing.T) { f(t, netip.MustParseAddr(a)) })
		}
	}
	if !found {
		skip(t, "no RDMA device: RDMANET_LAB_RXE4 and the like are not set (try: lab/guest)")
	}
}

// skip fails instead where devices are required.
func skip(t testing.TB, reason string) {
	t.Helper()
	if os.Getenv("RDMANET_REQUIRE_DEVICE") == "1" {
		t.Fatal(reason)
	}
	t.Skip(reason)
}

// end is one end of a connection in a test.
type end struct {
	t     testing.TB
	ch    *eventChannel
	id    verbs.ID
	qp    verbs.QP
	cq    verbs.CQ
	pd    verbs.PD
	mr    verbs.MR
	mem   []byte
	block int
	posts int      // receives outstanding
	got   [][]byte // messages received
	sends int      // sends completed
	bad   []verbs.WC
}

const testDepth = 16

func newTestChannel(t testing.TB) *eventChannel {
	p, err := verbs.Open(Name)
	require.NoError(t, err)
	ch, err := p.NewEventChannel()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ch.Close()) })
	return ch.(*eventChannel)
}

func newTestID(t testing.TB, ch *eventChannel) verbs.ID {
	i, err := ch.NewID()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, i.Destroy()) })
	return i
}

// next takes the channel's next event, which must be the one that is wanted;
// TIMEWAIT_EXIT comes whenever it likes.
func next(t testing.TB, ch *eventChannel, want verbs.EventType) *verbs.Event {
	t.Helper()
	var ev *verbs.Event
	require.Eventually(t, func() bool {
		e, err := ch.GetEvent()
		ev = e
		return err == nil && ev.Type != verbs.EventTimewaitExit
	}, patience, time.Millisecond)
	require.Equal(t, want.String(), ev.Type.String(), "event error: %v", ev.Err)
	return ev
}

func (e *end) createQP(block int) {
	d := e.id.Device()
	require.NotNil(e.t, d)
	var err error
	e.pd, err = d.AllocPD()
	require.NoError(e.t, err)
	e.block = block
	e.mem, err = unix.Mmap(-1, 0, 2*testDepth*block, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(e.t, err)
	e.mr, err = e.pd.RegMR(e.mem, verbs.AccessLocalWrite)
	require.NoError(e.t, err)
	e.cq, err = d.CreateCQ(2 * testDepth)
	require.NoError(e.t, err)
	e.qp, err = e.id.CreateQP(e.pd, e.cq, verbs.QPCap{SendWR: testDepth, RecvWR: testDepth, SendSGE: 4})
	require.NoError(e.t, err)
	for i := range testDepth {
		e.postRecv(uint64(i))
	}
}

func (e *end) free() {
	if e.qp != nil {
		require.NoError(e.t, e.qp.Destroy())
	}
	require.NoError(e.t, e.cq.Destroy())
	require.NoError(e.t, e.mr.Dereg())
	require.NoError(e.t, e.pd.Dealloc())
	require.NoError(e.t, unix.Munmap(e.mem))
}

func (e *end) buf(i uint64) []byte { return e.mem[int(i)*e.block : (int(i)+1)*e.block] }

// sendBuf is registered memory that no receive uses.
func (e *end) sendBuf(i int) []byte { return e.buf(uint64(testDepth + i%testDepth)) }

func (e *end) postRecv(i uint64) {
	n, err := e.qp.PostRecv([]verbs.RecvWR{{WRID: i, SGE: verbs.SGE{Data: e.buf(i), LKey: e.mr.LKey()}}})
	require.NoError(e.t, err)
	require.Equal(e.t, 1, n)
	e.posts++
}

// poll takes completions; received messages are copied and reposted.
func (e *end) poll() int {
	var wc [4]verbs.WC
	n, err := e.cq.Poll(wc[:])
	require.NoError(e.t, err)
	for _, w := range wc[:n] {
		if w.Op == verbs.OpRecv {
			e.posts--
		}
		switch {
		case w.Status != verbs.StatusSuccess:
			e.bad = append(e.bad, w)
		case w.Op == verbs.OpRecv:
			e.got = append(e.got, append([]byte(nil), e.buf(w.WRID)[:w.ByteLen]...))
			e.postRecv(w.WRID)
		default:
			e.sends++
		}
	}
	return n
}

// pollUntil polls until done, waiting for completions in between.
func (e *end) pollUntil(done func() bool) {
	e.t.Helper()
	timer := time.AfterFunc(patience, e.cq.Wake)
	defer timer.Stop()
	for start := time.Now(); !done(); {
		require.Less(e.t, time.Since(start), patience, "completions missing")
		if e.poll() > 0 {
			continue
		}
		require.NoError(e.t, e.cq.Arm(false))
		if e.poll() > 0 {
			continue
		}
		require.NoError(e.t, e.cq.Wait())
	}
}

// send posts one inline message, signaled.
func (e *end) send(wrid uint64, text string) {
	e.t.Helper()
	n, err := e.qp.PostSend([]verbs.SendWR{{WRID: wrid, Inline: true, Signaled: true, Solicited: true, SGL: []verbs.SGE{{Data: []byte(text)}}}})
	require.NoError(e.t, err)
	require.Equal(e.t, 1, n)
}

var testParam = verbs.ConnParam{RetryCount: 7, RNRRetryCount: 7, ResponderResources: 1, InitiatorDepth: 1}

// resolved returns an id that is ready for a QP.
func resolved(t testing.TB, ch *eventChannel, dst netip.AddrPort) verbs.ID {
	i := newTestID(t, ch)
	require.NoError(t, i.ResolveAddr(netip.AddrPort{}, dst, patience))
	next(t, ch, verbs.EventAddrResolved)
	require.NoError(t, i.ResolveRoute(patience))
	next(t, ch, verbs.EventRouteResolved)
	return i
}

func listen(t testing.TB, ch *eventChannel, addr netip.Addr) verbs.ID {
	l := newTestID(t, ch)
	require.NoError(t, l.Bind(netip.AddrPortFrom(addr, 0)))
	require.NoError(t, l.Listen(8))
	require.NotZero(t, l.LocalAddr().Port())
	return l
}

// request asks a new listener for a connection.
func request(t testing.TB, block int, addr netip.Addr) (active *end, passive verbs.ID) {
	ch := newTestChannel(t)
	l := listen(t, ch, addr)
	return requestFrom(t, ch, block, l.LocalAddr())
}

func requestFrom(t testing.TB, ch *eventChannel, block int, dst netip.AddrPort) (active *end, passive verbs.ID) {
	active = &end{t: t, ch: ch, id: resolved(t, ch, dst)}
	active.createQP(block)
	t.Cleanup(active.free)
	p := testParam
	p.PrivateData = []byte("hello")
	require.NoError(t, active.id.Connect(p))
	ev := next(t, ch, verbs.EventConnectRequest)
	require.Equal(t, "hello", string(ev.PrivateData[:5]))
	t.Cleanup(func() { require.NoError(t, ev.ID.Destroy()) })
	return active, ev.ID
}

// pair returns both ends of a connection.
func pair(t testing.TB, block int, addr netip.Addr) (a, b *end) {
	a, passive := request(t, block, addr)
	b = &end{t: t, ch: a.ch, id: passive}
	b.createQP(block)
	t.Cleanup(b.free)
	p := testParam
	p.PrivateData = []byte("welcome")
	require.NoError(t, b.id.Accept(p))
	for range 2 {
		ev := next(t, a.ch, verbs.EventEstablished)
		if ev.ID == a.id {
			require.Equal(t, "welcome", string(ev.PrivateData[:7]))
		}
	}
	return a, b
}
