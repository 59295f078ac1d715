package rdmanet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/internal/verbs/verbstest"
)

// Every method of Conn and Listener beside every other, for -race and for what
// hangs. The tables are compared with the methods that there are.

// soon is a deadline that a blocked call runs into.
func soon(rng *rand.Rand) time.Time {
	return time.Now().Add(time.Duration(rng.IntN(1000)) * time.Microsecond)
}

// connMethods call a method once. None blocks for longer than to a deadline that is
// soon, whatever the others do.
var connMethods = map[string]func(c *Conn, rng *rand.Rand) error{
	"Read": func(c *Conn, rng *rand.Rand) error {
		set := c.SetReadDeadline(soon(rng))
		_, err := c.Read(make([]byte, 1+rng.IntN(5000)))
		return errors.Join(set, err)
	},
	"ReadBuffer": func(c *Conn, rng *rand.Rand) error {
		set := c.SetReadDeadline(soon(rng))
		b, err := c.ReadBuffer()
		if err == nil {
			b.Release()
		}
		return errors.Join(set, err)
	},
	"WriteTo": func(c *Conn, rng *rand.Rand) error {
		set := c.SetReadDeadline(soon(rng))
		_, err := c.WriteTo(io.Discard)
		return errors.Join(set, err)
	},
	"Write": func(c *Conn, rng *rand.Rand) error {
		set := c.SetWriteDeadline(soon(rng))
		_, err := c.Write(make([]byte, 1<<rng.IntN(17)))
		return errors.Join(set, err)
	},
	"WriteBuffers": func(c *Conn, rng *rand.Rand) error {
		set := c.SetWriteDeadline(soon(rng))
		_, err := c.WriteBuffers(&net.Buffers{make([]byte, 1<<rng.IntN(16)), nil, make([]byte, 10)})
		return errors.Join(set, err)
	},
	"WriteBuffer": func(c *Conn, rng *rand.Rand) error {
		set := c.SetWriteDeadline(soon(rng))
		b, err := c.NewBuffer()
		if err != nil {
			return err
		}
		b.Resize(rng.IntN(b.Cap() + 1))
		_, err = c.WriteBuffer(b)
		return errors.Join(set, err)
	},
	"ReadFrom": func(c *Conn, rng *rand.Rand) error {
		set := c.SetWriteDeadline(soon(rng))
		_, err := c.ReadFrom(bytes.NewReader(make([]byte, 1<<rng.IntN(17))))
		return errors.Join(set, err)
	},
	"NewBuffer": func(c *Conn, rng *rand.Rand) error {
		b, err := c.NewBuffer()
		if err == nil {
			b.Release()
		}
		return err
	},
	"SetDeadline":        func(c *Conn, rng *rand.Rand) error { return c.SetDeadline(soon(rng)) },
	"SetReadDeadline":    func(c *Conn, rng *rand.Rand) error { return c.SetReadDeadline(soon(rng)) },
	"SetWriteDeadline":   func(c *Conn, rng *rand.Rand) error { return c.SetWriteDeadline(soon(rng)) },
	"SetLinger":          func(c *Conn, rng *rand.Rand) error { return c.SetLinger(1 + rng.IntN(100)) },
	"SetNoDelay":         func(c *Conn, rng *rand.Rand) error { return c.SetNoDelay(rng.IntN(2) == 0) },
	"SetKeepAlive":       func(c *Conn, rng *rand.Rand) error { return c.SetKeepAlive(rng.IntN(2) == 0) },
	"SetKeepAlivePeriod": func(c *Conn, rng *rand.Rand) error { return c.SetKeepAlivePeriod(time.Second) },
	"SetKeepAliveConfig": func(c *Conn, rng *rand.Rand) error {
		return c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Count: 3})
	},
	"SetReadBuffer":  func(c *Conn, rng *rand.Rand) error { return c.SetReadBuffer(1) },
	"SetWriteBuffer": func(c *Conn, rng *rand.Rand) error { return c.SetWriteBuffer(1) },
	"LocalAddr":      func(c *Conn, rng *rand.Rand) error { return nonEmpty(c.LocalAddr().String()) },
	"RemoteAddr":     func(c *Conn, rng *rand.Rand) error { return nonEmpty(c.RemoteAddr().String()) },
	"Provider":       func(c *Conn, rng *rand.Rand) error { return nonEmpty(string(c.Provider())) },
	"Endpoint":       func(c *Conn, rng *rand.Rand) error { c.Endpoint(); return nil },
	"Stats":          func(c *Conn, rng *rand.Rand) error { c.Stats(); return nil },
	"CloseRead":      func(c *Conn, rng *rand.Rand) error { return c.CloseRead() },
	"CloseWrite":     func(c *Conn, rng *rand.Rand) error { return c.CloseWrite() },
	"Close":          func(c *Conn, rng *rand.Rand) error { return c.Close() },
}

func nonEmpty(s string) error {
	if s == "" {
		return errors.New("nothing returned")
	}
	return nil
}

// lasting is what changes a connection for good, and how other calls may fail then.
// The other end closes when it has read everything.
var lasting = map[string][]error{"CloseRead": {io.EOF}, "CloseWrite": {syscall.EPIPE, io.EOF}, "Close": {net.ErrClosed}}

func TestEveryMethodIsRaced(t *testing.T) {
	for _, tc := range []struct {
		typ   reflect.Type
		names []string
	}{
		{reflect.TypeFor[*Conn](), slices.Collect(maps.Keys(connMethods))},
		{reflect.TypeFor[*Listener](), slices.Collect(maps.Keys(listenerMethods))},
	} {
		var want []string
		for i := range tc.typ.NumMethod() {
			want = append(want, tc.typ.Method(i).Name)
		}
		require.ElementsMatch(t, want, tc.names, tc.typ)
	}
}

// TestEveryMethodOfConnBesideEveryOther has two goroutines call two methods, again
// and again, while data passes both ways. A call fails for the reasons that these
// two methods give, and for no other.
func TestEveryMethodOfConnBesideEveryOther(t *testing.T) {
	names := slices.Sorted(maps.Keys(connMethods))
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		cfg.BufferSize, cfg.RecvDepth = 4096, 4
		always := []error{os.ErrDeadlineExceeded, errors.ErrUnsupported}
		l := listen(t, ListenConfig{Config: cfg})
		go echo(l)
		dial := func() *Conn {
			c, err := (&Dialer{Config: cfg}).Dial("rdma", l.Addr().String())
			require.NoError(t, err)
			closeLater(t, c)
			return c.(*Conn)
		}
		abort := func(c *Conn) { // what was written may be more than an echo takes that nobody reads
			_ = c.SetLinger(0)
			_ = c.Close()
		}
		for i, one := range names {
			shared := dial()
			for _, other := range names[i:] {
				c, lasts := shared, lasting[one] != nil || lasting[other] != nil
				if lasts {
					c = dial()
				}
				race2(t, scaled(20, 200), one+" and "+other, func(name string) error {
					err := connMethods[name](c, rand.New(rand.NewPCG(rand.Uint64(), 1)))
					return unexpected(err, slices.Concat(lasting[one], lasting[other], always)...)
				}, one, other)
				if lasts {
					abort(c)
				}
			}
			abort(shared)
		}
	})
}

// race2 calls two methods at the same time, each as often as said, and a lasting
// one once.
func race2(t *testing.T, times int, what string, call func(name string) error, names ...string) {
	t.Helper()
	start := make(chan struct{})
	errs := make(chan error, len(names))
	for _, name := range names {
		go func() {
			<-start
			n := times
			if lasting[name] != nil {
				n = 1
				for range rand.IntN(20) {
					runtime.Gosched()
				}
			}
			var err error
			for range n {
				if err = call(name); err != nil {
					err = fmt.Errorf("%s: %w", name, err)
					break
				}
			}
			errs <- err
		}()
	}
	close(start)
	for range names {
		select {
		case err := <-errs:
			require.NoError(t, err, what)
		case <-time.After(patience):
			buf := make([]byte, 1<<20)
			t.Fatalf("%s: hangs\n%s", what, buf[:runtime.Stack(buf, true)])
		}
	}
}

// unexpected returns err unless all of it is expected.
func unexpected(err error, expected ...error) error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range joined.Unwrap() {
			if e := unexpected(e, expected...); e != nil {
				return e
			}
		}
		return nil
	}
	for _, e := range expected {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}

// listenerMethods are the same for a Listener.
var listenerMethods = map[string]func(l *Listener, rng *rand.Rand) error{
	"Accept": func(l *Listener, rng *rand.Rand) error {
		set := l.SetDeadline(soon(rng))
		c, err := l.Accept()
		if err == nil {
			err = c.Close()
		}
		return errors.Join(set, err)
	},
	"SetDeadline": func(l *Listener, rng *rand.Rand) error { return l.SetDeadline(soon(rng)) },
	"Addr":        func(l *Listener, rng *rand.Rand) error { return nonEmpty(l.Addr().String()) },
	"Providers": func(l *Listener, rng *rand.Rand) error {
		if len(l.Providers()) == 0 {
			return errors.New("no providers")
		}
		return nil
	},
	"Close": func(l *Listener, rng *rand.Rand) error { return l.Close() },
}

// TestEveryMethodOfListenerBesideEveryOther is that while dialers come and go, so
// that connections are in their set-up and wait in the backlog when it is closed.
func TestEveryMethodOfListenerBesideEveryOther(t *testing.T) {
	names := slices.Sorted(maps.Keys(listenerMethods))
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for i, one := range names {
			for _, other := range names[i:] {
				checkLeaks(t)
				l := listen(t, ListenConfig{Config: cfg})
				ctx, cancel := context.WithCancel(context.Background())
				var dialers sync.WaitGroup
				for range 2 {
					dialers.Go(func() {
						for ctx.Err() == nil {
							if c, err := (&Dialer{Config: cfg}).DialContext(ctx, "rdma", l.Addr().String()); err == nil {
								_ = c.SetDeadline(time.Now().Add(patience))
								_, _ = c.Read(make([]byte, 1)) // until it is closed there
								_ = c.Close()
							}
						}
					})
				}
				race2(t, scaled(20, 200), one+" and "+other, func(name string) error {
					err := listenerMethods[name](l, rand.New(rand.NewPCG(rand.Uint64(), 1)))
					return unexpected(err, slices.Concat(lasting[one], lasting[other], []error{os.ErrDeadlineExceeded})...)
				}, one, other)
				cancel()
				_ = l.Close() // ends the dialers' reads
				within(t, patience, dialers.Wait)
			}
		}
	})
}

// TestBothEndsEndAtOnce has every way to end a connection meet every other at the
// other end, with data on its way both ways. Neither hangs, and what is left of
// either is nothing.
func TestBothEndsEndAtOnce(t *testing.T) {
	ends := map[string]func(c *Conn) error{
		"Close":                func(c *Conn) error { return c.Close() },
		"abort":                func(c *Conn) error { return errors.Join(c.SetLinger(0), c.Close()) },
		"CloseWrite and Close": func(c *Conn) error { return errors.Join(c.CloseWrite(), c.Close()) },
		"CloseRead and Close":  func(c *Conn) error { return errors.Join(c.CloseRead(), c.Close()) },
		"Close twice": func(c *Conn) error {
			return together(c.Close, func() error { return unexpected(c.Close(), net.ErrClosed) })
		},
	}
	names := slices.Sorted(maps.Keys(ends))
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		for i, one := range names {
			for _, other := range names[i:] {
				for round := range scaled(10, 100) {
					a, b := pair(t, cfg)
					if round%2 == 0 {
						write(t, a, make([]byte, 50_000))
						write(t, b, make([]byte, 50_000))
					}
					within(t, patience, func() {
						err := together(func() error { return ends[one](a) }, func() error { return ends[other](b) })
						// The other end may have been first, or have closed what was not sent yet.
						require.NoError(t, unexpected(err, syscall.EPIPE, syscall.ECONNRESET, net.ErrClosed), "%s and %s", one, other)
					})
				}
			}
		}
	})
}

// TestAnotherPollsTheLastFrame while a reader that knows of a reset is about to look
// for it: it is what the reader returns.
func TestAnotherPollsTheLastFrame(t *testing.T) {
	for _, last := range []string{"DATA", "FIN"} {
		t.Run(last, func(t *testing.T) {
			checkLeaks(t)
			a, b := open(t, Config{Provider: verbstest.Name})
			want := error(nil)
			if last == "FIN" {
				want = io.EOF
				require.NoError(t, b.CloseWrite())
			} else {
				write(t, b, []byte("x"))
			}
			a.handleEvent(failure(cm.EventDisconnected, a.id))
			a.pollMu.Lock() // as the one who polls
			got := make(chan error, 1)
			go func() {
				_, err := a.Read(make([]byte, 1))
				got <- err
			}()
			time.Sleep(20 * time.Millisecond) // it stands at the lock; if not, it has nothing to miss
			n, err := a.cq.Poll(a.wait.wcs[:])
			a.mu.Lock()
			for i := range n {
				a.completed(&a.wait.wcs[i])
			}
			a.mu.Unlock()
			a.pollMu.Unlock()
			require.NoError(t, err)
			require.Positive(t, n)
			require.Equal(t, want, <-got)
		})
	}
}
