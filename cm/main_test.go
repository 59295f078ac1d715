package cm_test

import (
	"context"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/internal/verbs/verbstest"
	"github.com/rdmanet/rdmanet/qp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait; an emulated machine is slow.
const patience = 30 * time.Second

// long asks for what takes too long to be done always.
var long = os.Getenv("RDMANET_LONG") == "1"

// target is a provider and an address to test it on.
type target struct {
	verbs.Provider
	addr netip.Addr
	fake *verbstest.Provider // or nil
}

// onEveryProvider runs a test on the fake and on every registered provider, on
// every address that it has.
func onEveryProvider(t *testing.T, f func(t *testing.T, on target)) {
	t.Run(verbstest.Name, func(t *testing.T) {
		p := newFake(t)
		f(t, target{p, netip.MustParseAddr("127.0.0.1"), p})
	})
	for _, name := range verbs.Names() {
		addrs := addresses(t, name)
		p, err := verbs.Open(name)
		if len(addrs) == 0 {
			continue // no device here, and no address of one
		}
		require.NoError(t, err)
		for _, addr := range addrs {
			t.Run(name+"/"+addr.String(), func(t *testing.T) { f(t, target{p, addr, nil}) })
		}
	}
}

// newFake returns a fake of which nothing may be left at the test's end.
func newFake(t *testing.T) *verbstest.Provider {
	p := verbstest.New()
	t.Cleanup(func() {
		require.Empty(t, p.Live())
		require.Empty(t, p.Violations())
	})
	return p
}

// addresses returns where a provider can be tested: on loopback in software,
// and on a device where the lab says.
func addresses(t *testing.T, provider string) (addrs []netip.Addr) {
	if provider != "device" {
		for _, a := range []string{"127.0.0.1", "::1"} {
			ln, err := net.Listen("tcp", net.JoinHostPort(a, "0"))
			if err == nil {
				ln.Close()
				addrs = append(addrs, netip.MustParseAddr(a))
			}
		}
		return addrs
	}
	addrs = labAddresses("RXE4", "RXE6", "SIW4", "SIW6")
	if len(addrs) == 0 && os.Getenv("RDMANET_REQUIRE_DEVICE") == "1" {
		t.Fatal("no device: RDMANET_LAB_RXE4 and the like are not set")
	}
	return addrs
}

// skip fails instead where devices are required.
func skip(t *testing.T, reason string) {
	t.Helper()
	if os.Getenv("RDMANET_REQUIRE_DEVICE") == "1" {
		t.Fatal(reason)
	}
	t.Skip(reason)
}

// labAddresses returns those of some names that the lab has given one to.
func labAddresses(names ...string) (addrs []netip.Addr) {
	for _, v := range names {
		if a := os.Getenv("RDMANET_LAB_" + v); a != "" {
			addrs = append(addrs, netip.MustParseAddr(a))
		}
	}
	return addrs
}

// withTimeout returns a context for one wait.
func withTimeout(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// newChannel returns a channel that is closed at the test's end, unless the test
// closed it.
func newChannel(t *testing.T, on target) *cm.EventChannel {
	ch, err := cm.NewEventChannelOn(on)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := ch.Close(); err != nil {
			require.ErrorIs(t, err, net.ErrClosed)
		}
	})
	return ch
}

// newID returns an id that is destroyed at the test's end, unless the test
// destroyed it.
func newID(t *testing.T, ch *cm.EventChannel) *cm.ID {
	id, err := ch.NewID()
	require.NoError(t, err)
	destroyLater(t, id)
	return id
}

func destroyLater(t *testing.T, id *cm.ID) {
	t.Cleanup(func() {
		if err := id.Destroy(); err != nil {
			require.ErrorIs(t, err, net.ErrClosed)
		}
	})
}

// wait takes and acks the event that is wanted.
func wait(t *testing.T, id *cm.ID, want cm.EventType) *cm.Event {
	t.Helper()
	ev, err := id.Wait(withTimeout(t), want)
	require.NoError(t, err)
	ev.Ack()
	return ev
}

func listen(t *testing.T, ch *cm.EventChannel, on target) *cm.ID { return listenWith(t, ch, on, 8) }

func listenWith(t *testing.T, ch *cm.EventChannel, on target, backlog int) *cm.ID {
	id := newID(t, ch)
	require.NoError(t, id.Bind(netip.AddrPortFrom(on.addr, 0)))
	require.NoError(t, id.Listen(backlog))
	require.NotZero(t, id.LocalAddr().Port())
	return id
}

// resolved returns an id that is ready for a QP.
func resolved(t *testing.T, ch *cm.EventChannel, dst netip.AddrPort) *cm.ID {
	id := newID(t, ch)
	require.NoError(t, id.ResolveAddr(netip.AddrPort{}, dst, patience))
	wait(t, id, cm.EventAddrResolved)
	require.NoError(t, id.ResolveRoute(patience))
	wait(t, id, cm.EventRouteResolved)
	return id
}

// end is one side of a connection, with eight receives posted.
type end struct {
	t    *testing.T
	id   *cm.ID
	pd   *qp.PD
	cq   *qp.CQ
	qp   *qp.QP
	pool *qp.Pool
	bufs []*qp.Buffer
}

const depth = 16

func newEnd(t *testing.T, id *cm.ID) *end {
	e := makeEnd(t, id, 256)
	t.Cleanup(e.close)
	return e
}

// makeEnd is newEnd with blocks of a given size, and without the close at the
// test's end.
func makeEnd(t *testing.T, id *cm.ID, block int) *end {
	dev, ok := id.Device()
	require.True(t, ok)
	pd, err := dev.AllocPD()
	require.NoError(t, err)
	cq, err := dev.NewCQ(2 * depth)
	require.NoError(t, err)
	pool, err := qp.NewPool(pd, qp.PoolConfig{BlockSize: block, MaxBytes: 1 << 20})
	require.NoError(t, err)
	q, err := id.CreateQP(pd, cq, qp.Cap{SendWR: depth, RecvWR: depth, SendSGE: 2})
	require.NoError(t, err)
	e := &end{t: t, id: id, pd: pd, cq: cq, qp: q, pool: pool}
	e.recv(0, 1, 2, 3, 4, 5, 6, 7)
	return e
}

func (e *end) buffer() *qp.Buffer {
	b, err := e.pool.Get()
	require.NoError(e.t, err)
	e.bufs = append(e.bufs, b)
	return b
}

func (e *end) recv(wrids ...uint64) {
	for _, wrid := range wrids {
		e.postRecv(wrid, e.buffer())
	}
}

func (e *end) postRecv(wrid uint64, b *qp.Buffer) {
	n, err := e.qp.PostRecv([]qp.RecvWR{{WRID: wrid, SGE: b.BlockSGE()}})
	require.NoError(e.t, err)
	require.Equal(e.t, 1, n)
}

func (e *end) send(signaled bool, wrids ...uint64) {
	for _, wrid := range wrids {
		n, err := e.qp.PostSend([]qp.SendWR{{WRID: wrid, Signaled: signaled, SGL: []qp.SGE{e.buffer().SGE()}}})
		require.NoError(e.t, err)
		require.Equal(e.t, 1, n)
	}
}

// pollUntil polls until done, waiting for completions in between.
func (e *end) pollUntil(done func([]qp.WC) bool) (all []qp.WC) {
	e.t.Helper()
	timer := time.AfterFunc(patience, e.cq.Wake)
	defer timer.Stop()
	wc := make([]qp.WC, 4)
	poll := func() bool {
		n, err := e.cq.Poll(wc)
		require.NoError(e.t, err)
		all = append(all, wc[:n]...)
		return n > 0
	}
	for start := time.Now(); !done(all); {
		require.Less(e.t, time.Since(start), patience, "completions missing")
		if poll() || done(all) {
			continue
		}
		require.NoError(e.t, e.cq.Arm(false))
		if poll() || done(all) {
			continue
		}
		require.NoError(e.t, e.cq.Wait())
	}
	return all
}

// drain polls until all that was posted has completed.
func (e *end) drain() []qp.WC {
	e.t.Helper()
	return e.pollUntil(func([]qp.WC) bool {
		s, r := e.qp.Outstanding()
		return s+r == 0
	})
}

// kill ends the connection, so that nothing is outstanding.
func (e *end) kill() {
	require.NoError(e.t, e.qp.SetError())
	e.drain()
}

// close frees everything but the id.
func (e *end) close() {
	if !e.qp.Closed() {
		e.kill()
		require.NoError(e.t, e.qp.Close())
	}
	for _, b := range e.bufs {
		b.Release()
	}
	require.NoError(e.t, e.pool.Close())
	require.NoError(e.t, e.cq.Close())
	require.NoError(e.t, e.pd.Close())
}

var testParam = cm.ConnParam{RetryCount: 7, RNRRetryCount: 7}

// request starts a connection and returns what both sides have of it.
func request(t *testing.T, dialer *cm.EventChannel, ln *cm.ID) (active *end, passive *cm.ID) {
	active = newEnd(t, resolved(t, dialer, ln.LocalAddr()))
	require.NoError(t, active.id.Connect(testParam))
	ev, err := ln.Wait(withTimeout(t), cm.EventConnectRequest)
	require.NoError(t, err)
	defer ev.Ack()
	require.Same(t, ln, ev.Listener)
	destroyLater(t, ev.ID)
	return active, ev.ID
}

// connect makes a connection.
func connect(t *testing.T, dialer *cm.EventChannel, ln *cm.ID) (active, passive *end) {
	active, id := request(t, dialer, ln)
	passive = newEnd(t, id)
	require.NoError(t, id.Accept(testParam))
	wait(t, active.id, cm.EventEstablished)
	wait(t, passive.id, cm.EventEstablished)
	return active, passive
}

// requireErrno asserts the errno, and that errors.As finds one.
func requireErrno(t *testing.T, err error, want syscall.Errno) {
	t.Helper()
	require.Error(t, err)
	require.ErrorIs(t, err, want)
	var errno syscall.Errno
	require.ErrorAs(t, err, &errno)
}

// requireBusy asserts a BusyError and returns it.
func requireBusy(t *testing.T, err error) *cm.BusyError {
	t.Helper()
	requireErrno(t, err, syscall.EBUSY)
	var busy *cm.BusyError
	require.ErrorAs(t, err, &busy)
	return busy
}

// requireNoEvent asserts that the id has nothing more to report.
func requireNoEvent(t *testing.T, id *cm.ID) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	for {
		ev, err := id.GetEvent(ctx)
		if err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			return
		}
		ev.Ack()
		require.Equal(t, cm.EventTimewaitExit, ev.Type)
	}
}

// waiting calls GetEvent in the background, and returns where its error comes.
// Events are acked.
func waiting(get func(context.Context) (*cm.Event, error)) <-chan error {
	failed := make(chan error, 1)
	go func() {
		for {
			ev, err := get(context.Background())
			if err != nil {
				failed <- err
				return
			}
			ev.Ack()
		}
	}()
	return failed
}

// receive takes from a channel, for a bounded time.
func receive[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		require.Fail(t, "nothing came in time")
	}
	return v
}

// destroy destroys an id whose events others may be about to ack.
func destroy(t *testing.T, id *cm.ID) {
	t.Helper()
	require.Eventually(t, func() bool {
		err := id.Destroy()
		if err != nil {
			requireBusy(t, err)
		}
		return err == nil
	}, patience, time.Millisecond)
}
