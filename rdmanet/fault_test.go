package rdmanet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/internal/verbs/verbsfault"
	"github.com/rdmanet/rdmanet/internal/verbs/verbstest"
	"github.com/rdmanet/rdmanet/qp"
)

// What hardware rarely does is done here by faulty providers, one for each side of
// a connection. Both are around the fake, which is where they meet.
var (
	faultyDialer   = verbsfault.Wrap(fake, "faulty dialer")
	faultyListener = verbsfault.Wrap(fake, "faulty listener")
)

func init() {
	for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
		verbs.Register(p.Name(), func() (verbs.Provider, error) { return p, nil })
	}
}

// lost are the providers that will not complete everything in this test.
var lost = make(map[*verbsfault.Provider]bool)

// faulty takes all faults away. At the test's end everything is given back, and the
// books of both sides are even.
func faulty(t testing.TB) {
	t.Helper()
	if testProvider() == ProviderDevice {
		t.Skip("about the fake, and done when the tests run in software")
	}
	for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
		p.Reset()
		delete(lost, p)
		t.Cleanup(func() {
			require.Zero(t, p.Books().Events, "events got and not acked by the %s", p.Name())
			if !lost[p] {
				require.Zero(t, p.Books().Unfinished, "posted to the %s and not completed", p.Name())
			}
			p.Reset()
		})
	}
	checkLeaks(t) // which comes before the books
}

// impatient shortens the bounds of what a fault delays. On a slow machine it may
// cut off what is only slow: then there is an error, and no more.
func impatient(t testing.TB) {
	setBounds(t, 30*time.Millisecond, &disconnectTimeout, &flushTimeout, &flushGrace)
}

// eventsMayNotCome is impatient about those of a dial, too.
func eventsMayNotCome(t testing.TB) {
	impatient(t)
	setBounds(t, 150*time.Millisecond, &eventTimeout)
}

// setBounds does so until the test ends.
func setBounds(t testing.TB, to time.Duration, bounds ...*time.Duration) {
	for _, b := range bounds {
		was := *b
		*b = to
		t.Cleanup(func() { *b = was })
	}
}

// smallConfig makes a few kilobytes use up windows and queues.
func smallConfig(p *verbsfault.Provider) Config {
	return Config{Provider: Provider(p.Name()), BufferSize: minBufferSize, RecvDepth: 4, SendDepth: 3}
}

// faultyPair is a connection whose both ends may be made to fail.
func faultyPair(t testing.TB) (dialed, accepted *Conn) {
	t.Helper()
	a, b := pairOf(t, smallConfig(faultyDialer), smallConfig(faultyListener), "127.0.0.1:0")
	closeLater(t, a, b)
	return a, b
}

// sideOf is what one side of a connection has seen.
type sideOf struct {
	mu    sync.Mutex
	errs  map[string]error // by call, of those that failed first
	sent  []byte           // that writes said they have written
	got   []byte
	eof   bool // the peer's stream has ended in order
	ended bool // and so has ours: CloseWrite and Close succeeded

	closing atomic.Bool // net.ErrClosed is no failure from now on
}

func (s *sideOf) failed(call string, err error) bool {
	if err == nil || errors.Is(err, net.ErrClosed) && s.closing.Load() {
		return err != nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.errs == nil {
		s.errs = make(map[string]error)
	}
	if s.errs[call] == nil {
		s.errs[call] = err
	}
	return true
}

// close reports what Close does.
func (s *sideOf) close(call string, c io.Closer) error {
	s.closing.Store(true)
	err := c.Close()
	s.failed(call, err)
	return err
}

func (s *sideOf) note(sent, got []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent, s.got = append(s.sent, sent...), append(s.got, got...)
}

// lifetime is that of a connection in which every call of the interface is made:
// the dialer sends pieces of all kinds, the other side sends back what it gets, or
// only that it got it, and both close when they have read to the end, or at the
// first error.
type lifetime struct {
	echo             bool
	dialer, listener sideOf
}

func (x *lifetime) run() {
	there, here := smallConfig(faultyListener), smallConfig(faultyDialer)
	if !x.echo { // each frame waits for a credit
		there.RecvDepth = 1
	}
	lc := ListenConfig{Config: there}
	l, err := lc.Listen(context.Background(), "rdma6", "[::1]:0") // rdma6: it sets an option, too
	if x.listener.failed("Listen", err) {
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if x.listener.failed("Accept", err) {
				return
			}
			wg.Go(func() { x.listener.serve(c.(*Conn), x.echo) })
		}
	})
	c, err := (&Dialer{Config: here}).Dial("rdma", l.Addr().String())
	if !x.dialer.failed("Dial", err) {
		x.dialer.use(c.(*Conn))
	}
	_ = x.listener.close("Listener.Close", l)
	wg.Wait()
}

// use sends and reads at the same time, and closes.
func (s *sideOf) use(c *Conn) {
	var wg sync.WaitGroup
	var ended error
	wg.Go(func() {
		if ended = s.send(c); ended != nil {
			_ = s.close("Close", c)
		}
	})
	wg.Go(func() {
		if !s.receive(c, func([]byte) error { return nil }) {
			_ = s.close("Close", c)
		}
	})
	wg.Wait()
	err := s.close("Close", c)
	s.ended = ended == nil && err == nil
}

// serve sends back what it reads, and closes.
func (s *sideOf) serve(c *Conn, echo bool) {
	ok := s.receive(c, func(p []byte) error {
		if !echo {
			return nil
		}
		n, err := c.Write(p)
		s.note(p[:n], nil)
		s.failed("Write", err)
		return err
	})
	if ok {
		err := c.CloseWrite()
		ok = !s.failed("CloseWrite", err)
	}
	err := s.close("Close", c)
	s.ended = ok && err == nil
}

// send writes in all ways that there are, and then CloseWrite.
func (s *sideOf) send(c *Conn) error {
	p := bytesOf(1, 40*minBufferSize)
	next := func(n int) []byte {
		piece := p[:n]
		p = p[n:]
		return piece
	}
	for _, n := range []int{1, 1, 1, 5 * minBufferSize, 100, 200, 10 * minBufferSize, 1} { // alone, joined, and in frames
		piece := next(n)
		n, err := c.Write(piece)
		s.note(piece[:n], nil)
		if s.failed("Write", err) {
			return err
		}
	}
	piece := next(3000)
	bufs := buffersOf(piece, 20)
	n, err := c.WriteBuffers(&bufs)
	s.note(piece[:n], nil)
	if s.failed("WriteBuffers", err) {
		return err
	}
	b, err := c.NewBuffer()
	if s.failed("NewBuffer", err) {
		return err
	}
	piece = next(500)
	b.Resize(len(piece))
	copy(b.Bytes(), piece)
	m, err := c.WriteBuffer(b)
	s.note(piece[:m], nil)
	if s.failed("WriteBuffer", err) {
		return err
	}
	err = c.CloseWrite()
	s.failed("CloseWrite", err)
	return err
}

// receive reads to the end, with a copy and without in turn, and reports whether
// it came there.
func (s *sideOf) receive(c *Conn, got func([]byte) error) bool {
	var buf [700]byte
	for i := 0; ; i++ {
		if i%2 == 0 {
			n, err := c.Read(buf[:])
			s.note(nil, buf[:n])
			if err == io.EOF {
				s.eof = true
				return true
			}
			if s.failed("Read", err) || got(buf[:n]) != nil {
				return false
			}
			continue
		}
		b, err := c.ReadBuffer()
		if err == io.EOF {
			s.eof = true
			return true
		}
		if s.failed("ReadBuffer", err) {
			return false
		}
		s.note(nil, b.Bytes())
		err = got(b.Bytes())
		b.Release()
		if err != nil {
			return false
		}
	}
}

// promised are the errors of the design's section 9.
var promised = []error{syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EADDRINUSE, syscall.EADDRNOTAVAIL,
	syscall.ETIMEDOUT, syscall.ECONNRESET, syscall.EPIPE, syscall.ENODEV, os.ErrDeadlineExceeded}

// check wants of a side what holds whatever has failed. cause is what this side's
// provider said, if it is the faulty one.
func (s *sideOf) check(t *testing.T, peer *sideOf, cause error) {
	t.Helper()
	for call, err := range s.errs {
		oe, ok := err.(*net.OpError)
		require.True(t, ok, "%s: %T: %v", call, err, err)
		require.Equal(t, "rdma", oe.Net, "%s: %v", call, err)
		require.NotNil(t, oe.Addr, "%s: %v", call, err)
		var status *qp.StatusError
		var twice *qp.AccountingError
		typed := errors.As(err, &status) || errors.As(err, &twice) || cause != nil && errors.Is(err, cause) ||
			call == "Close" && errors.Is(err, syscall.EIO) // what a device did not flush
		for _, p := range promised {
			typed = typed || errors.Is(err, p)
		}
		require.True(t, typed, "%s: %v", call, err)
	}
	require.True(t, bytes.HasPrefix(peer.sent, s.got), "%d bytes arrived that are not those %d written", len(s.got), len(peer.sent))
	if s.eof {
		require.Equal(t, len(peer.sent), len(s.got), "the stream ended in order before all was read that the peer says it has written")
	}
	if peer.ended && cause == nil {
		require.True(t, s.eof, "the peer has closed in order, and here is %v", s.errs)
	}
}

// check checks both sides. causes is what their providers said.
func (x *lifetime) check(t *testing.T, causes map[*verbsfault.Provider]error) {
	t.Helper()
	x.dialer.check(t, &x.listener, causes[faultyDialer])
	x.listener.check(t, &x.dialer, causes[faultyListener])
	if testing.Verbose() {
		t.Log("dialer:", x.dialer.errs, "listener:", x.listener.errs)
	}
}

// requireNoErrors wants a life as without faults.
func (x *lifetime) requireNoErrors(t *testing.T) {
	t.Helper()
	x.check(t, nil)
	require.Empty(t, x.dialer.errs)
	require.Empty(t, x.listener.errs)
	require.True(t, x.dialer.eof && x.listener.eof && x.dialer.ended && x.listener.ended)
}

// plausible is what a call may fail with, if not with EIO.
var plausible = map[string]error{
	"Provider.NewEventChannel": syscall.ENODEV,
	"EventChannel.NewID":       syscall.ENOMEM,
	"EventChannel.AckEvent":    &verbsfault.Done{Err: syscall.EINVAL}, // it fails without an event, and not otherwise
	"ID.Bind":                  syscall.EADDRNOTAVAIL,
	"ID.Listen":                syscall.EADDRINUSE,
	"ID.ResolveAddr":           syscall.ENODEV,
	"ID.ResolveRoute":          syscall.ENETUNREACH,
	"ID.CreateQP":              syscall.ENOMEM,
	"ID.Connect":               syscall.ENOMEM,
	"ID.Accept":                syscall.ECONNRESET,
	"ID.Disconnect":            syscall.EINVAL,
	"ID.Device":                syscall.ENODEV,
	"ID.SetAFOnly":             syscall.ENOSYS,
	"Device.AllocPD":           syscall.ENOMEM,
	"Device.CreateCQ":          syscall.EMFILE,
	"PD.RegMR":                 syscall.ENOMEM,
	"PD.Dealloc":               syscall.EBUSY,
	"MR.Dereg":                 syscall.EBUSY,
	"CQ.Destroy":               syscall.EBUSY,
	"QP.Destroy":               syscall.EBUSY,
	"QP.PostSend":              syscall.ENOMEM,
	"QP.PostRecv":              syscall.ENOMEM,
}

// interruptible are calls that a signal may interrupt when they have done it.
var interruptible = []string{"ID.ResolveAddr", "ID.ResolveRoute", "ID.Connect", "ID.Accept", "ID.Disconnect", "ID.Reject", "ID.Listen"}

// everywhere are calls that may fail for ever, once they do.
var everywhere = []string{"EventChannel.GetEvent", "CQ.Poll", "CQ.Arm", "CQ.Wait", "QP.PostSend", "QP.PostRecv", "QP.SetError", "ID.Disconnect"}

// TestEveryCallFailsInTurn: a lifetime is run with each call failing that it makes
// of a provider, one at a time, on either side. Whichever it is, errors are typed,
// nobody hangs, no byte is wrong or missing before an end of file, and everything is
// given back.
func TestEveryCallFailsInTurn(t *testing.T) {
	faulty(t)
	for _, echo := range []bool{true, false} {
		x := lifetime{echo: echo}
		within(t, patience, x.run)
		x.requireNoErrors(t)
		made := map[*verbsfault.Provider]map[string]int{faultyDialer: faultyDialer.Calls(), faultyListener: faultyListener.Calls()}
		for p, calls := range made {
			for _, op := range slices.Sorted(maps.Keys(calls)) {
				t.Run(fmt.Sprintf("echo %v/%s/%s", echo, p.Name(), op), func(t *testing.T) {
					err := plausible[op]
					if err == nil {
						err = syscall.EIO
					}
					for n := range min(calls[op], scaled(30, 1000)) {
						failNth(t, echo, p, op, n, n, err)
						if t.Failed() {
							return // many would hang
						}
					}
					if slices.Contains(interruptible, op) {
						failNth(t, echo, p, op, 0, 0, &verbsfault.Done{Err: syscall.EINTR})
					}
					if slices.Contains(everywhere, op) {
						for n := 0; n < calls[op]; n = 4*n + 3 {
							failNth(t, echo, p, op, n, math.MaxInt, err)
						}
					}
				})
			}
		}
	}
}

// failNth runs a lifetime in which a provider's calls from first to last fail.
func failNth(t *testing.T, echo bool, p *verbsfault.Provider, op string, first, last int, err error) {
	name := fmt.Sprint("call ", first)
	if last > first {
		name = fmt.Sprint("from call ", first)
	}
	t.Run(name, func(t *testing.T) {
		faulty(t)
		eventsMayNotCome(t)
		p.SetFail(from(op, first, last, err))
		lost[p] = op == "CQ.Poll" && last > first
		x := lifetime{echo: echo}
		within(t, patience, x.run)
		cause := err
		var done *verbsfault.Done
		if errors.As(err, &done) {
			cause = done.Err
		}
		causes := map[*verbsfault.Provider]error{p: cause}
		x.check(t, causes)
	})
}

// TestFailuresThatNobodyNotices: to get an event, and to free something, is tried
// again.
func TestFailuresThatNobodyNotices(t *testing.T) {
	for op, err := range map[string]error{
		"EventChannel.GetEvent": syscall.EIO,
		"QP.Destroy":            syscall.EBUSY,
		"CQ.Destroy":            syscall.EBUSY,
		"MR.Dereg":              syscall.EBUSY,
		"PD.Dealloc":            syscall.EBUSY,
		"ID.Destroy":            syscall.EBUSY,
		"EventChannel.Close":    syscall.EBUSY,
	} {
		for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
			t.Run(p.Name()+"/"+op, func(t *testing.T) {
				faulty(t)
				p.SetFail(from(op, 0, 1, err))
				x := lifetime{echo: true}
				within(t, patience, x.run)
				require.Greater(t, p.Calls()[op], 2, "tried again")
				x.requireNoErrors(t)
			})
		}
	}
}

// TestEventsComeLateTwiceOrNever does that to each event of a connection's life, on
// either side.
func TestEventsComeLateTwiceOrNever(t *testing.T) {
	const soon = 5 * time.Millisecond // another event may come before it
	for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
		for _, typ := range []verbs.EventType{verbs.EventAddrResolved, verbs.EventRouteResolved, verbs.EventConnectRequest,
			verbs.EventEstablished, verbs.EventRejected, verbs.EventDisconnected} {
			for name, fate := range map[string][]time.Duration{
				"late": {soon}, "behind the next": {verbsfault.Behind}, "twice": {0, 0}, "again later": {0, soon}, "never": {},
			} {
				if name == "behind the next" && typ != verbs.EventEstablished && typ != verbs.EventDisconnected {
					continue // the next one depends on it
				}
				t.Run(fmt.Sprintf("%s/%v/%s", p.Name(), typ, name), func(t *testing.T) {
					faulty(t)
					eventsMayNotCome(t)
					p.SetEvents(func(e verbs.EventType, _ int) []time.Duration {
						if e == typ {
							return fate
						}
						return []time.Duration{0}
					})
					if typ == verbs.EventRejected {
						faultyListener.SetFail(once("Device.CreateCQ", syscall.EMFILE))
					}
					x := lifetime{echo: true}
					within(t, patience, x.run)
					x.check(t, nil)
				})
			}
		}
	}
}

// TestRequestsComeInAnotherOrder: each makes the connection that it asked for.
func TestRequestsComeInAnotherOrder(t *testing.T) {
	faulty(t)
	l := listenFaulty(t)
	faultyListener.SetEvents(func(e verbs.EventType, n int) []time.Duration {
		if e == verbs.EventConnectRequest && n == 0 {
			return []time.Duration{verbsfault.Behind}
		}
		return []time.Duration{0}
	})
	var dialed [2]net.Conn
	var errs [2]error
	dial := func(i int) {
		dialed[i], errs[i] = (&Dialer{Config: smallConfig(faultyDialer)}).Dial("rdma", l.Addr().String())
	}
	within(t, patience, func() {
		var wg sync.WaitGroup
		wg.Go(func() { dial(0) })
		eventually(t, func() bool { return faultyListener.Reported(verbs.EventConnectRequest) == 1 }, "it asks")
		wg.Go(func() { dial(1) })
		wg.Wait()
	})
	require.NoError(t, errors.Join(errs[:]...))
	closeLater(t, dialed[0], dialed[1])
	for i, d := range dialed {
		write(t, d, []byte{byte(i)})
	}
	require.NoError(t, l.SetDeadline(time.Now().Add(patience)))
	for range dialed {
		c, err := l.Accept()
		require.NoError(t, err)
		closeLater(t, c)
		said := read(t, c, 1)
		write(t, c, said)
		require.Equal(t, said, read(t, dialed[said[0]], 1))
	}
}

// TestCompletionsComeInAnyOrder: each is late or not, by chance, so that either
// queue is ahead of the other. Within a queue the order stays.
func TestCompletionsComeInAnyOrder(t *testing.T) {
	for seed := range uint64(scaled(4, 200)) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			faulty(t)
			chance := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
			var mu sync.Mutex
			byChance := func(verbs.WC) int {
				mu.Lock()
				defer mu.Unlock()
				return int(chance.Uint64() & 1)
			}
			x := lifetime{echo: true}
			done := make(chan struct{})
			go func() {
				defer close(done)
				x.run()
			}()
			for end := time.Now().Add(patience); ; time.Sleep(200 * time.Microsecond) {
				faultyDialer.SetCompletions(byChance) // and look again
				faultyListener.SetCompletions(byChance)
				select {
				case <-done:
				default:
					require.True(t, time.Now().Before(end), "it still waits")
					continue
				}
				break
			}
			x.requireNoErrors(t)
		})
	}
}

// TestCompletionComesTwice: a device that reports what was not posted is not trusted
// with anything more.
func TestCompletionComesTwice(t *testing.T) {
	for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
		for _, op := range []verbs.Op{verbs.OpSend, verbs.OpRecv} {
			t.Run(fmt.Sprint(p.Name(), "/", op), func(t *testing.T) {
				faulty(t)
				impatient(t)
				var came atomic.Bool
				p.SetCompletions(func(wc verbs.WC) int {
					if wc.Op == op && wc.Status == verbs.StatusSuccess && came.CompareAndSwap(false, true) {
						return 2
					}
					return 1
				})
				x := lifetime{echo: true}
				within(t, patience, x.run)
				require.True(t, came.Load())
				x.check(t, nil)
				x.dialer.mu.Lock()
				defer x.dialer.mu.Unlock()
				require.NotEmpty(t, x.dialer.errs)
			})
		}
	}
}

// TestFaultyProvidersWithoutFaults: they work around any provider.
func TestFaultyProvidersWithoutFaults(t *testing.T) {
	checkLeaks(t)
	inner, err := verbs.Open(string(ProviderIWARP))
	require.NoError(t, err)
	p := verbsfault.Wrap(inner, "faulty iwarp")
	verbs.Register(p.Name(), func() (verbs.Provider, error) { return p, nil })
	cfg := smallConfig(p)
	a, b := pairOf(t, cfg, cfg, "127.0.0.1:0")
	roundTrip(t, a, b, bytesOf(1, 100_000))
	require.NoError(t, a.Close())
	requireEOF(t, b)
	require.NoError(t, b.Close())
	books := p.Books()
	require.Positive(t, books.Posted)
	require.Zero(t, books.Events)
	require.Zero(t, books.Unfinished)
}

// once makes the first call of an operation fail.
func once(op string, err error) func(string, int) error { return from(op, 0, 0, err) }

// from makes a range of calls of an operation fail.
func from(op string, first, last int, err error) func(string, int) error {
	return func(o string, i int) error {
		if o == op && first <= i && i <= last {
			return err
		}
		return nil
	}
}

// later holds back completions.
func later(held func(verbs.WC) bool) func(verbs.WC) int {
	return func(wc verbs.WC) int {
		if held(wc) {
			return 0
		}
		return 1
	}
}

func flushed(wc verbs.WC) bool { return wc.Status == verbs.StatusWRFlushErr }

// TestCreditOvertakesSendCompletion: a credit can come before the completion that
// frees the slot of the send it answers. The writer waits for both.
func TestCreditOvertakesSendCompletion(t *testing.T) {
	for _, held := range []verbs.Op{verbs.OpSend, verbs.OpRecv} {
		t.Run(fmt.Sprint("late are ", held), func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			eventually(t, func() bool { // HELLO
				a.poll()
				a.mu.Lock()
				defer a.mu.Unlock()
				return a.tx.done == a.tx.posted
			}, "all slots are free")
			faultyDialer.SetCompletions(later(func(wc verbs.WC) bool { return wc.Op == held }))
			p := bytesOf(1, 40*minBufferSize)
			wrote := make(chan error, 1)
			go func() {
				_, err := a.Write(p)
				wrote <- err
			}()
			frames := min(a.cfg.SendDepth, b.cfg.RecvDepth)
			got := read(t, b, frames*minBufferSize)
			eventually(t, func() bool {
				a.mu.Lock()
				defer a.mu.Unlock()
				if held == verbs.OpSend {
					return a.flow.credits > 0 && a.free() == 0
				}
				return a.free() > 0 && a.flow.credits == 0
			}, "one of the two windows is open")
			select {
			case err := <-wrote:
				t.Fatal("not blocked: ", err)
			case <-time.After(20 * time.Millisecond):
			}
			faultyDialer.SetCompletions(nil)
			got = append(got, read(t, b, len(p)-len(got))...)
			require.NoError(t, <-wrote)
			require.True(t, bytes.Equal(p, got))
			require.Empty(t, fake.Violations())
		})
	}
}

// TestCompletionBetweenPollAndArm: one that comes when a side has polled and is
// about to arm the queue raises no event. It must be found all the same.
func TestCompletionBetweenPollAndArm(t *testing.T) {
	p := bytesOf(1, minBufferSize)
	writes := func(a, b *Conn) error {
		for range a.cfg.RecvDepth + 1 {
			if _, err := a.Write(p); err != nil {
				return err
			}
		}
		return nil
	}
	noCredits := func(a *Conn) bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.flow.credits == 0
	}
	reads := func(a, b *Conn) error {
		_, err := io.ReadFull(b, make([]byte, a.cfg.RecvDepth*len(p)))
		return err
	}
	for _, tc := range []struct {
		name   string
		beside bool                   // a reader that waits, and leads
		waits  func(a, b *Conn) error // by a
		when   func(a *Conn) bool     // it is for this that a waits
		comes  func(a, b *Conn) error // meanwhile
	}{
		{"data for a reader", false, func(a, b *Conn) error {
			_, err := io.ReadFull(a, make([]byte, len(p)))
			return err
		}, nil, func(a, b *Conn) error {
			_, err := b.Write(p)
			return err
		}},
		{"FIN for a reader", false, func(a, b *Conn) error {
			_, err := io.Copy(io.Discard, a)
			return err
		}, nil, func(a, b *Conn) error { return b.CloseWrite() }},
		{"a credit for a writer", false, writes, noCredits, reads},
		{"a credit for a writer beside a reader", true, writes, noCredits, reads},
	} {
		t.Run(tc.name, func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			if tc.beside {
				go a.Read(make([]byte, 1))
				eventually(t, func() bool { return a.wait.parked.Load() }, "it waits")
			}
			var came atomic.Bool
			errs := make(chan error, 2)
			faultyDialer.SetFail(func(op string, _ int) error {
				if op == "CQ.Arm" && (tc.when == nil || tc.when(a)) && came.CompareAndSwap(false, true) {
					errs <- tc.comes(a, b)
				}
				return nil
			})
			go func() { errs <- tc.waits(a, b) }()
			for range 2 {
				select {
				case err := <-errs:
					require.NoError(t, err)
				case <-time.After(patience):
					t.Fatal("it still waits")
				}
			}
			faultyDialer.SetFail(nil)
		})
	}
}

// TestFailedCompletionQueueEndsTheConnection, whoever has met with the failure.
func TestFailedCompletionQueueEndsTheConnection(t *testing.T) {
	for _, op := range []string{"CQ.Poll", "CQ.Arm", "CQ.Wait"} {
		t.Run(op, func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			n := faultyDialer.Calls()[op]
			faultyDialer.SetFail(from(op, n, n, syscall.EIO))
			_ = a.SetReadDeadline(time.Now().Add(patience))
			for range 2 {
				_, err := a.Read(make([]byte, 1))
				requireOpError(t, err, "read", syscall.EIO)
				_, err = a.Write([]byte("x"))
				requireOpError(t, err, "write", syscall.EIO)
			}
			require.NoError(t, a.Close())
			_, err := b.Read(make([]byte, 1))
			requireOpError(t, err, "read", syscall.ECONNRESET)
		})
	}
}

// TestFlushComesLateOrNever: Close waits for it, and not for ever.
func TestFlushComesLateOrNever(t *testing.T) {
	for name, come := range map[string]func(t *testing.T, flush func()){
		"late": func(_ *testing.T, flush func()) { time.AfterFunc(50*time.Millisecond, flush) },
		"after modify_qp": func(t *testing.T, flush func()) {
			setBounds(t, 30*time.Millisecond, &flushTimeout)
			faultyDialer.SetFail(func(op string, _ int) error {
				if op == "QP.SetError" {
					setBounds(t, patience, &flushTimeout) // by Close itself
					flush()
				}
				return nil
			})
		},
		"never": nil,
	} {
		t.Run(name, func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			write(t, a, []byte("x"))
			write(t, b, []byte("y"))
			faultyDialer.SetCompletions(later(flushed))
			if come == nil {
				impatient(t)
			} else {
				come(t, func() { faultyDialer.SetCompletions(nil) })
			}
			within(t, patience, func() {
				err := a.Close()
				if come != nil {
					require.NoError(t, err)
				} else {
					requireOpError(t, err, "close", syscall.EIO)
					require.ErrorContains(t, err, "not flushed")
				}
			})
			require.Equal(t, []byte("x"), read(t, b, 1))
			requireEOF(t, b)
			require.NoError(t, b.Close())
		})
	}
}

// TestRefusedAcceptIsToldAtOnce: the dialer need not wait until a set-up's time is
// over.
func TestRefusedAcceptIsToldAtOnce(t *testing.T) {
	for _, op := range []string{"Device.AllocPD", "Device.CreateCQ", "ID.CreateQP", "PD.RegMR", "QP.PostRecv", "ID.Accept"} {
		t.Run(op, func(t *testing.T) {
			faulty(t)
			setBounds(t, time.Hour, &setupTimeout)
			l := listenFaulty(t)
			faultyListener.SetFail(once(op, syscall.ENOMEM))
			within(t, patience, func() {
				_, err := (&Dialer{Config: smallConfig(faultyDialer)}).Dial("rdma", l.Addr().String())
				requireOpError(t, err, "dial", syscall.ECONNREFUSED)
			})
		})
	}
}

// TestHalfOfTheNewsOfAnEnd: that the peer is gone is said by the event, and by the
// flushed receives. A device may bring one and not the other.
func TestHalfOfTheNewsOfAnEnd(t *testing.T) {
	abort := func(a *Conn) error { return errors.Join(a.SetLinger(0), a.Close()) }
	for _, tc := range []struct {
		name  string
		event bool // it comes; else the flushed receives do
		end   func(a *Conn) error
	}{
		{"the event of an abort", true, abort},
		{"the event of an end in order, without FIN", true, func(a *Conn) error { return a.id.Disconnect() }},
		{"the flushed receives", false, abort},
	} {
		t.Run(tc.name, func(t *testing.T) {
			faulty(t)
			impatient(t)
			a, b := faultyPair(t)
			write(t, a, []byte("x"))
			if tc.event {
				faultyListener.SetCompletions(later(flushed))
			} else {
				faultyListener.SetEvents(func(verbs.EventType, int) []time.Duration { return nil })
			}
			ended := make(chan error, 1)
			go func() {
				_, err := io.ReadFull(b, make([]byte, 2))
				ended <- err
			}()
			eventually(t, func() bool { return b.Stats().Parks > 0 }, "it waits")
			require.NoError(t, tc.end(a))
			select {
			case err := <-ended:
				require.ErrorIs(t, err, syscall.ECONNRESET)
			case <-time.After(patience):
				t.Fatal("it still waits")
			}
			_, err := b.Write([]byte("y"))
			require.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE), "%v", err)
			faultyListener.Reset()
			require.NoError(t, b.Close())
		})
	}
}

// dead makes a provider behave as when its device was removed: nothing completes any
// more, and no call works but those that free something.
func dead(p *verbsfault.Provider) {
	lost[p] = true
	p.SetCompletions(func(verbs.WC) int { return 0 })
	p.SetFail(func(op string, _ int) error {
		switch op[strings.Index(op, ".")+1:] {
		case "Destroy", "Dereg", "Dealloc", "Close", "AckEvent", "GetEvent", "Poll", "Wait", "Arm", "Device":
			return nil
		}
		return syscall.EIO
	})
	p.Report(verbs.EventDeviceRemoval, nil)
}

// TestDeviceIsRemovedBeforeTheConnection is there, in each state of a dial.
func TestDeviceIsRemovedBeforeTheConnection(t *testing.T) {
	for _, tc := range []struct {
		state  string
		at     *verbsfault.Provider // where the event is that does not come
		event  verbs.EventType
		begun  string // the dialer's call that waits for it
		remove *verbsfault.Provider
		is     error // of the dial
	}{
		{"resolving the address", faultyDialer, verbs.EventAddrResolved, "ID.ResolveAddr", faultyDialer, syscall.ENODEV},
		{"resolving the route", faultyDialer, verbs.EventRouteResolved, "ID.ResolveRoute", faultyDialer, syscall.ENODEV},
		{"connecting", faultyListener, verbs.EventConnectRequest, "ID.Connect", faultyDialer, syscall.ENODEV},
		{"connecting, at the other end", faultyListener, verbs.EventConnectRequest, "ID.Connect", faultyListener, syscall.ECONNREFUSED},
		{"established, at the other end", faultyDialer, verbs.EventEstablished, "ID.Connect", faultyDialer, syscall.ENODEV},
	} {
		t.Run(tc.state, func(t *testing.T) {
			faulty(t)
			impatient(t)
			l := listenFaulty(t)
			tc.at.SetEvents(func(e verbs.EventType, _ int) []time.Duration {
				if e == tc.event {
					return nil
				}
				return []time.Duration{0}
			})
			dialed := make(chan error, 1)
			go func() {
				_, err := (&Dialer{Config: smallConfig(faultyDialer)}).Dial("rdma", l.Addr().String())
				dialed <- err
			}()
			eventually(t, func() bool { return faultyDialer.Calls()[tc.begun] > 0 && tc.at.Reported(tc.event) > 0 }, "it is under way")
			dead(tc.remove)
			select {
			case err := <-dialed:
				requireOpError(t, err, "dial", tc.is)
			case <-time.After(patience):
				t.Fatal("it still waits")
			}
		})
	}
}

func listenFaulty(t testing.TB) *Listener {
	t.Helper()
	l, err := (&ListenConfig{Config: smallConfig(faultyListener)}).Listen(context.Background(), "rdma", "127.0.0.1:0")
	require.NoError(t, err)
	closeLater(t, l)
	return l.(*Listener)
}

// TestDeviceIsRemovedUnderAListener: Accept says so, whether it waits already or not.
// A listener that has another provider goes on.
func TestDeviceIsRemovedUnderAListener(t *testing.T) {
	t.Run("its only one", func(t *testing.T) {
		faulty(t)
		l := listenFaulty(t)
		accepted := make(chan error, 1)
		go func() {
			_, err := l.Accept()
			accepted <- err
		}()
		dead(faultyListener)
		select {
		case err := <-accepted:
			requireOpError(t, err, "accept", syscall.ENODEV)
		case <-time.After(patience):
			t.Fatal("it still waits")
		}
		_, err := l.Accept()
		requireOpError(t, err, "accept", syscall.ENODEV)
		eventually(t, func() bool { return faultyListener.Calls()["ID.Destroy"] == 1 }, "the device is let go")
		require.NoError(t, l.Close())
		requireOpError(t, l.Close(), "close", net.ErrClosed)
	})
	t.Run("one of two", func(t *testing.T) {
		faulty(t)
		was := automatic
		automatic = []Provider{Provider(faultyListener.Name()), ProviderIWARP}
		t.Cleanup(func() { automatic = was })
		l := listenAuto(t, Config{Provider: ProviderAuto}, "127.0.0.1:0")
		dead(faultyListener)
		eventually(t, func() bool { return faultyListener.Calls()["ID.Destroy"] == 1 }, "the device is let go")
		requireConnects(t, Config{Provider: ProviderIWARP}, l, l.Addr().String(), ProviderIWARP)
	})
}

// TestDeviceIsRemovedUnderAConnection, in each state: calls that wait end with
// ENODEV, later ones fail with it, Close is bounded.
func TestDeviceIsRemovedUnderAConnection(t *testing.T) {
	closed := func(c *Conn) error { // what was not flushed is an error to report
		if err := c.Close(); err != nil && !errors.Is(err, syscall.EIO) {
			return err
		}
		return syscall.ENODEV
	}
	reads := func(c *Conn) error {
		_, err := c.Read(make([]byte, 1))
		return err
	}
	writes := func(c *Conn) error {
		_, err := c.Write(make([]byte, 100*minBufferSize))
		return err
	}
	for _, tc := range []struct {
		state   string
		prepare func(t *testing.T, p *verbsfault.Provider, a, b *Conn)
		waits   func(c *Conn) error // for something that does not come
	}{
		{"idle", nil, nil},
		{"reading", nil, reads},
		{"writing", nil, writes},
		{"half-closed here", func(t *testing.T, _ *verbsfault.Provider, a, b *Conn) { require.NoError(t, a.CloseWrite()) }, reads},
		{"half-closed there", func(t *testing.T, _ *verbsfault.Provider, a, b *Conn) {
			require.NoError(t, b.CloseWrite())
			requireEOF(t, a)
		}, writes},
		{"closing, with data on its way", func(t *testing.T, p *verbsfault.Provider, a, b *Conn) {
			p.SetCompletions(later(func(wc verbs.WC) bool { return wc.Op == verbs.OpSend }))
			write(t, a, []byte("x"))
			require.NoError(t, a.SetLinger(3600))
		}, closed},
		{"closing, the peer's side under way", func(t *testing.T, p *verbsfault.Provider, a, b *Conn) {
			p.SetEvents(func(verbs.EventType, int) []time.Duration { return nil })
			setBounds(t, time.Hour, &disconnectTimeout)
		}, closed},
		{"closing, not flushed", func(t *testing.T, p *verbsfault.Provider, a, b *Conn) { p.SetCompletions(later(flushed)) }, closed},
	} {
		for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
			t.Run(p.Name()+"/"+tc.state, func(t *testing.T) {
				faulty(t)
				impatient(t)
				a, b := faultyPair(t)
				if p == faultyListener {
					a, b = b, a
				}
				if tc.prepare != nil {
					tc.prepare(t, p, a, b)
				}
				ended := make(chan error, 1)
				if tc.waits != nil {
					go func() { ended <- tc.waits(a) }()
					time.Sleep(10 * time.Millisecond) // it waits by now, most likely
				} else {
					ended <- syscall.ENODEV
				}
				dead(p)
				select {
				case err := <-ended:
					require.ErrorIs(t, err, syscall.ENODEV)
				case <-time.After(patience):
					t.Fatal("it still waits")
				}
				if !a.closed.Load() {
					eventually(t, func() bool { // the news has come
						a.mu.Lock()
						defer a.mu.Unlock()
						return a.rx.ended
					}, "it knows")
					_, err := a.Write([]byte("x"))
					if !errors.Is(err, syscall.EPIPE) { // CloseWrite was called
						requireOpError(t, err, "write", syscall.ENODEV)
					}
					if _, err := a.Read(make([]byte, 1)); err != io.EOF {
						requireOpError(t, err, "read", syscall.ENODEV)
					}
					within(t, patience, func() { require.ErrorIs(t, closed(a), syscall.ENODEV) })
				}
				require.NoError(t, b.Close())
			})
		}
	}
}

// TestDeviceIsRemovedUnderASetUp, at the listener's end, in each state of one: the
// dialer does not wait for ever, and Accept tells that there is nothing to come.
func TestDeviceIsRemovedUnderASetUp(t *testing.T) {
	for _, tc := range []struct {
		state string
		stop  func(goOn <-chan struct{}) // the set-up in this state
		there func(l *Listener) bool
	}{
		{"opening", func(goOn <-chan struct{}) {
			faultyListener.SetFail(func(op string, _ int) error {
				if op == "Device.CreateCQ" {
					<-goOn
				}
				return nil
			})
		}, func(*Listener) bool { return faultyListener.Calls()["Device.CreateCQ"] > 0 }},
		{"accepting", func(<-chan struct{}) {
			faultyListener.SetEvents(func(e verbs.EventType, _ int) []time.Duration {
				if e == verbs.EventEstablished {
					return nil
				}
				return []time.Duration{0}
			})
		}, func(*Listener) bool { return faultyListener.Reported(verbs.EventEstablished) > 0 }},
		{"waiting for the first frame", func(<-chan struct{}) {
			faultyListener.SetCompletions(later(func(wc verbs.WC) bool { return wc.Op == verbs.OpRecv }))
		}, func(*Listener) bool { return faultyListener.Calls()["CQ.Wait"] > 0 }},
		{"waiting for Accept", func(<-chan struct{}) {}, func(l *Listener) bool { return len(l.queue) > 0 }},
	} {
		t.Run(tc.state, func(t *testing.T) {
			faulty(t)
			impatient(t)
			setBounds(t, time.Hour, &setupTimeout)
			l := listenFaulty(t)
			goOn := make(chan struct{})
			tc.stop(goOn)
			ended := make(chan error, 1)
			go func() {
				c, err := (&Dialer{Config: smallConfig(faultyDialer)}).Dial("rdma", l.Addr().String())
				if err == nil {
					closeLater(t, c)
					_, err = c.Read(make([]byte, 1))
				}
				ended <- err
			}()
			eventually(t, func() bool { return tc.there(l) }, "it is under way")
			dead(faultyListener)
			close(goOn)
			within(t, patience, func() {
				for {
					c, err := l.Accept()
					if err != nil { // or else it was ready before
						requireOpError(t, err, "accept", syscall.ENODEV)
						return
					}
					_, err = c.Read(make([]byte, 1))
					requireOpError(t, err, "read", syscall.ENODEV)
					_ = c.Close()
				}
			})
			eventually(t, func() bool { return len(ended) == 1 || len(l.queue) == 1 }, "the set-up has ended")
			require.NoError(t, l.Close())
			select {
			case err := <-ended:
				var oe *net.OpError
				require.ErrorAs(t, err, &oe)
				require.True(t, errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET), "%v", err)
			case <-time.After(patience):
				t.Fatal("the dialer still waits")
			}
		})
	}
}

// TestRefusedBlockIsAGapThatNothingFollows: a small write may return before it is
// sent. If the send queue then refuses it, nothing that is written later goes out.
func TestRefusedBlockIsAGapThatNothingFollows(t *testing.T) {
	for _, tc := range []struct {
		name string
		next func(a *Conn) error
	}{
		{"small write", func(a *Conn) error { _, err := a.Write([]byte("later")); return err }},
		{"large write", func(a *Conn) error { _, err := a.Write(make([]byte, 5*minBufferSize)); return err }},
		{"gather list", func(a *Conn) error { _, err := a.WriteBuffers(&net.Buffers{[]byte("la"), []byte("ter")}); return err }},
		{"buffer", func(a *Conn) error {
			b, err := a.NewBuffer()
			require.NoError(t, err)
			b.Resize(5)
			_, err = a.WriteBuffer(b)
			return err
		}},
		{"CloseWrite", (*Conn).CloseWrite},
	} {
		t.Run(tc.name, func(t *testing.T) {
			faulty(t)
			a, b := faultyPair(t)
			require.NoError(t, a.SetNoDelay(false)) // each small write waits in a block
			write(t, a, []byte("before"))
			require.Equal(t, []byte("before"), read(t, b, 6))
			n := faultyDialer.Calls()["QP.PostSend"]
			faultyDialer.SetFail(from("QP.PostSend", n, n, syscall.ENOMEM)) // the next one, and no more
			write(t, a, []byte("gap"))
			a.tx.flushers.Wait()
			_ = a.SetWriteDeadline(time.Now().Add(patience))
			require.Greater(t, faultyDialer.Calls()["QP.PostSend"], n, "it is refused")
			for range 2 {
				err := tc.next(a)
				require.ErrorIs(t, err, syscall.ENOMEM)
				var oe *net.OpError
				require.ErrorAs(t, err, &oe)
			}
			require.NoError(t, a.Close())
			_ = b.SetReadDeadline(time.Now().Add(patience))
			got, err := io.ReadAll(b)
			require.ErrorIs(t, err, syscall.ECONNRESET, "no end of file")
			require.Empty(t, got)
		})
	}
}

// TestRefusedWriteSaysHowMuchWasSent: what it returns is what arrives.
func TestRefusedWriteSaysHowMuchWasSent(t *testing.T) {
	for size, frames := range map[int]int{100: 1, 10 * minBufferSize: 10} {
		for after := range frames {
			t.Run(fmt.Sprintf("%d bytes, frame %d", size, after), func(t *testing.T) {
				faulty(t)
				a, b := faultyPair(t)
				n := faultyDialer.Calls()["QP.PostSend"] + after
				faultyDialer.SetFail(from("QP.PostSend", n, n, syscall.ENOMEM))
				p := bytesOf(1, size)
				arrived := make(chan []byte, 1)
				go func() {
					got, _ := io.ReadAll(b)
					arrived <- got
				}()
				sent, err := a.Write(p)
				requireOpError(t, err, "write", syscall.ENOMEM)
				require.NoError(t, a.Close())
				require.Equal(t, sent, len(<-arrived))
			})
		}
	}
}

// TestNeverLetGo: what a device does not let go, however often it is asked, is lost
// with what hangs on it. Close says so, and later connections work.
func TestNeverLetGo(t *testing.T) {
	for i, tc := range []struct {
		op   string
		left []string // in the provider, of each side
	}{
		{"QP.Destroy", []string{"channel", "cq", "id", "mr", "pd", "qp"}},
		{"CQ.Destroy", []string{"cq"}},
		{"MR.Dereg", []string{"mr", "pd"}},
		{"PD.Dealloc", []string{"pd"}},
		{"ID.Destroy", []string{"channel", "id"}},
		{"EventChannel.Close", []string{"channel"}},
	} {
		t.Run(tc.op, func(t *testing.T) {
			faulty(t)
			inner := verbstest.New()
			p := verbsfault.Wrap(inner, fmt.Sprint("stubborn ", i))
			verbs.Register(p.Name(), func() (verbs.Provider, error) { return p, nil })
			t.Cleanup(func() { // it is only the book that is left
				arenas.Lock()
				defer arenas.Unlock()
				maps.DeleteFunc(arenas.m, func(k arenaKey, _ *arena) bool { return k.cfg.MaxBytes == int64(1<<30+i) })
			})
			cfg := smallConfig(p)
			cfg.MaxRegistered = int64(1<<30 + i)
			a, b := pairOf(t, cfg, cfg, "127.0.0.1:0")
			write(t, a, []byte("x"))
			p.SetFail(from(tc.op, 0, math.MaxInt, syscall.EBUSY))
			within(t, patience, func() {
				err := errors.Join(a.Close(), b.Close())
				var oe *net.OpError
				require.ErrorAs(t, err, &oe)
				require.ErrorIs(t, err, syscall.EBUSY)
			})
			require.Equal(t, tc.left, slices.Sorted(maps.Keys(inner.Live())))
			require.Empty(t, inner.Violations())
			p.SetFail(nil)
			a, b = pairOf(t, cfg, cfg, "127.0.0.1:0")
			roundTrip(t, a, b, bytesOf(1, 50_000))
			require.NoError(t, a.Close())
			require.NoError(t, b.Close())
			require.Equal(t, tc.left, slices.Sorted(maps.Keys(inner.Live())), "no more than that")
		})
	}
}
