package rdmanet

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/internal/verbs/verbsfault"
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
