package rdmanet

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestEverySizeArrives sends messages of sizes around every bound that there is:
// a buffer, a frame, a small write, a window, a send queue.
func TestEverySizeArrives(t *testing.T) {
	onEveryPath(t, func(t *testing.T, base Config) {
		for _, cfg := range []Config{
			{},
			{BufferSize: minBufferSize, RecvDepth: 1, SendDepth: 1},
			{BufferSize: minBufferSize + 1, RecvDepth: 3, SendDepth: 2},
			{BufferSize: 4096, RecvDepth: 4, SendDepth: 64},
		} {
			cfg.Provider = base.Provider
			t.Run(fmt.Sprintf("%d x %d", cfg.BufferSize, cfg.RecvDepth), func(t *testing.T) {
				checkLeaks(t)
				a, b := open(t, cfg)
				full := a.cfg // with its defaults
				var sizes []int
				for _, around := range []int{0, 1, headerLen, smallWrite, full.BufferSize, 2 * full.BufferSize, maxFrames * full.BufferSize,
					full.SendDepth * full.BufferSize, full.RecvDepth * full.BufferSize, 2 * full.RecvDepth * full.BufferSize} {
					for d := -1; d <= 1; d++ {
						sizes = append(sizes, max(0, around+d))
					}
				}
				for i, n := range sizes {
					roundTrip(t, a, b, bytesOf(uint64(i), n))
				}
			})
		}
	})
}

// roundTrip sends p from a to b, which answers with the same.
func roundTrip(t *testing.T, a, b net.Conn, p []byte) {
	t.Helper()
	echoed := make(chan error, 1)
	go func() {
		got := make([]byte, len(p))
		_ = b.SetDeadline(time.Now().Add(patience))
		_, err := io.ReadFull(b, got)
		if err == nil {
			_, err = b.Write(got)
		}
		echoed <- err
	}()
	write(t, a, p)
	got := read(t, a, len(p))
	require.NoError(t, <-echoed)
	require.True(t, string(p) == string(got), "%d bytes came back different", len(p))
}

// TestRandomSizesBothWays writes and reads pieces of random size in both
// directions at once, with each side's configuration its own.
func TestRandomSizesBothWays(t *testing.T) {
	d := 700 * time.Millisecond
	if testing.Short() {
		d /= 4
	}
	if long {
		d = 60 * time.Second
	}
	onEveryPath(t, func(t *testing.T, base Config) {
		for _, tc := range []struct {
			name string
			a, b Config
		}{
			{"defaults", Config{}, Config{}},
			{"small to large", Config{BufferSize: 1500, RecvDepth: 2, SendDepth: 3}, Config{BufferSize: maxBufferSize, RecvDepth: 8, SendDepth: 2}},
			{"odd", Config{BufferSize: 7777, RecvDepth: 5, SendDepth: 1}, Config{BufferSize: minBufferSize, RecvDepth: 100, SendDepth: 100}},
			{"CRC", Config{CRC: true}, Config{}},
		} {
			tc.a.Provider, tc.b.Provider = base.Provider, base.Provider
			t.Run(tc.name, func(t *testing.T) {
				checkLeaks(t)
				a, b := pairOf(t, tc.a, tc.b, testAddr(t))
				closeLater(t, a, b)
				duplex(t, a, b, d)
			})
		}
	})
}

// duplex sends streams both ways for some time and compares them.
func duplex(t *testing.T, a, b *Conn, d time.Duration) {
	t.Helper()
	var wg sync.WaitGroup
	var sent, got [2]string
	var errs [4]error
	ends := [2]*Conn{a, b}
	limit := time.Now().Add(d + patience)
	for i, c := range ends {
		_ = c.SetDeadline(limit)
		wg.Go(func() { sent[i], errs[i] = sendRandom(c, uint64(100+i), time.Now().Add(d)) })
		wg.Go(func() { got[1-i], errs[2+i] = readSum(c, uint64(200+i), 100_000) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs[:]...))
	require.Equal(t, sent, got)
}

// sendRandom writes a stream in pieces of random size, small ones mostly, until
// some time, and then CloseWrite.
func sendRandom(c *Conn, seed uint64, until time.Time) (string, error) {
	rng := rand.New(stream(seed))
	src := stream(seed + 1)
	buf := make([]byte, 300_000)
	var s sum
	for time.Now().Before(until) {
		n := 1 << rng.IntN(18)
		p := buf[:n+rng.IntN(n)]
		_, _ = io.ReadFull(src, p)
		s.Write(p)
		if n, err := c.Write(p); err != nil || n < len(p) {
			return s.String(), fmt.Errorf("wrote %d of %d: %w", n, len(p), err)
		}
	}
	return s.String(), c.CloseWrite()
}

func TestSmallWritesCoalesceInOrder(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		// On one processor the flusher runs when the writer has to wait, however
		// slow the machine is.
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
		a, b := open(t, cfg)
		require.NoError(t, a.SetNoDelay(false))
		const n = 20_000
		sent := make(chan error, 1)
		go func() {
			var p [4]byte
			for i := range uint32(n) {
				binary.BigEndian.PutUint32(p[:], i)
				if _, err := a.Write(p[:]); err != nil {
					sent <- err
					return
				}
			}
			sent <- a.CloseWrite()
		}()
		for i := range uint32(n) {
			require.Equal(t, i, binary.BigEndian.Uint32(read(t, b, 4)))
		}
		requireEOF(t, b)
		require.NoError(t, <-sent)
		require.Less(t, a.Stats().FramesSent, uint64(n/4))
	})
}

// TestLoneSmallWriteIsDelivered makes sure that nothing has to follow a write,
// not even time in which its caller does anything.
func TestLoneSmallWriteIsDelivered(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for _, noDelay := range []bool{true, false} {
			t.Run(fmt.Sprint("no delay ", noDelay), func(t *testing.T) {
				checkLeaks(t)
				a, b := open(t, cfg)
				require.NoError(t, a.SetNoDelay(noDelay))
				for i := range 200 {
					p := bytesOf(uint64(i), 1+i%100)
					write(t, a, p)
					if i%3 == 0 { // two in a row: the second may join nothing
						write(t, a, p)
						require.Equal(t, p, read(t, b, len(p)))
					}
					require.Equal(t, p, read(t, b, len(p)))
				}
			})
		}
	})
}

func TestConcurrentWritesAreNotMixed(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{BufferSize: 2048})
	const writers, each = 16, 40
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			rng := rand.New(stream(uint64(w)))
			for range each {
				p := make([]byte, 4+rng.IntN(20_000))
				binary.BigEndian.PutUint32(p, uint32(len(p)))
				for i := range p[4:] {
					p[4+i] = byte(w)
				}
				if n, err := a.Write(p); err != nil || n != len(p) {
					t.Errorf("wrote %d of %d: %v", n, len(p), err)
					return
				}
			}
		})
	}
	for range writers * each {
		p := read(t, b, int(binary.BigEndian.Uint32(read(t, b, 4)))-4)
		if len(p) > 0 {
			require.Equal(t, len(p), bytes.Count(p, p[:1]), "bytes of one writer")
		}
	}
	wg.Wait()
}

// buffersOf cuts p into n pieces of random size, some of them empty.
func buffersOf(p []byte, n int) (bufs net.Buffers) {
	rng := rand.New(stream(uint64(len(p))))
	for i := range n {
		k := 0
		switch {
		case i == n-1:
			k = len(p)
		case rng.IntN(4) > 0 && len(p) > 0:
			k = rng.IntN(min(len(p), 3*len(p)/(n-i)+1))
		}
		bufs = append(bufs, p[:k:k])
		p = p[k:]
	}
	return bufs
}

func TestWriteBuffersWritesAndConsumesAll(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for _, tc := range []struct{ bytes, pieces int }{
			{0, 0}, {0, 3}, {1, 1}, {1, 100}, {300, 40}, {4096, 2}, {5000, 500}, {32768, 17}, {100_000, 700}, {1 << 20, 300}, {1 << 20, 2},
		} {
			t.Run(fmt.Sprintf("%d in %d", tc.bytes, tc.pieces), func(t *testing.T) {
				checkLeaks(t)
				a, b := open(t, cfg)
				p := bytesOf(1, tc.bytes)
				bufs := net.Buffers{}
				if tc.pieces > 0 {
					bufs = buffersOf(p, tc.pieces)
				}
				array := bufs
				sent := make(chan error, 1)
				go func() {
					n, err := a.WriteBuffers(&bufs)
					if err == nil && n != int64(tc.bytes) {
						err = fmt.Errorf("wrote %d", n)
					}
					sent <- err
				}()
				got := read(t, b, tc.bytes)
				require.NoError(t, <-sent)
				require.True(t, string(p) == string(got))
				require.Empty(t, bufs)
				for _, piece := range array {
					require.Nil(t, piece, "consumed pieces are let go")
				}
			})
		}
	})
}

// TestWriteBuffersKeepsWhatItHasNotWritten compares what is left after a deadline
// with what has arrived.
func TestWriteBuffersKeepsWhatItHasNotWritten(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		cfg.BufferSize, cfg.RecvDepth = 4096, 4
		a, b := open(t, cfg)
		p := bytesOf(2, 1<<20)
		bufs := buffersOf(p, 300)
		var n int64
		sent := make(chan error, 1)
		go func() {
			var err error
			n, err = a.WriteBuffers(&bufs)
			sent <- err
		}()
		first := read(t, b, 1)
		require.NoError(t, a.SetWriteDeadline(time.Now().Add(20*time.Millisecond)))
		require.ErrorIs(t, <-sent, os.ErrDeadlineExceeded)
		require.Positive(t, n)
		require.Less(t, n, int64(len(p)))
		var rest []byte
		for _, piece := range bufs {
			rest = append(rest, piece...)
		}
		require.True(t, string(p[n:]) == string(rest))
		require.True(t, string(p[:n]) == string(first)+string(read(t, b, int(n)-1)))

		require.NoError(t, a.SetWriteDeadline(time.Time{}))
		go func() {
			_, err := a.WriteBuffers(&bufs)
			sent <- errors.Join(err, a.CloseWrite())
		}()
		require.True(t, string(p[n:]) == string(read(t, b, len(p)-int(n))))
		require.NoError(t, <-sent)
		requireEOF(t, b)
	})
}

// TestWriteOnDeadlineCountsWhatArrives does the same for Write.
func TestWriteOnDeadlineCountsWhatArrives(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		cfg.BufferSize, cfg.RecvDepth = 4096, 4
		a, b := open(t, cfg)
		src := stream(3)
		total := int64(0)
		for range 5 {
			p := make([]byte, 1<<20)
			here := *src // Write says how far the stream goes on
			_, _ = io.ReadFull(&here, p)
			require.NoError(t, a.SetWriteDeadline(time.Now().Add(30*time.Millisecond)))
			n, err := a.Write(p)
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
			_, _ = io.CopyN(io.Discard, src, int64(n))
			total += int64(n)
			_ = b.SetReadDeadline(time.Now().Add(patience))
			got := make([]byte, n)
			_, err = io.ReadFull(b, got)
			require.NoError(t, err)
			require.True(t, string(p[:n]) == string(got))
		}
		require.Positive(t, total)
	})
}

// TestSlowReaderLosesNothing stops reading for longer than the 655 ms that an
// rdma_cm connection waits by default after a receiver-not-ready.
func TestSlowReaderLosesNothing(t *testing.T) {
	pause := time.Second
	if long {
		pause = 3 * time.Second
	}
	if testing.Short() {
		pause = 100 * time.Millisecond
	}
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		cfg.BufferSize = 8192
		a, b := open(t, cfg)
		const n = 16 << 20
		sent := make(chan string, 1)
		go func() {
			var s sum
			_, err := io.CopyN(io.MultiWriter(a, &s), stream(4), n)
			sent <- s.String()
			_ = errors.Join(err, a.CloseWrite())
		}()
		read1 := read(t, b, 1000)
		time.Sleep(pause) // the reader is slow: that is the case
		began := time.Now()
		var s sum
		s.Write(read1)
		require.NoError(t, b.SetReadDeadline(time.Now().Add(patience)))
		_, err := io.Copy(&s, struct{ io.Reader }{b})
		require.NoError(t, err)
		require.Equal(t, <-sent, s.String())
		require.EqualValues(t, n, s.n)
		require.Less(t, time.Since(began), 20*time.Second)
	})
}

// TestReaderAsleepLeavesControlFramesRoom has one side write all it may and then
// sleep, while the other sends what control frames there are.
func TestReaderAsleepLeavesControlFramesRoom(t *testing.T) {
	for _, depth := range []int{1, 2, 3, 4, 5, 16} {
		t.Run(fmt.Sprint(depth), func(t *testing.T) {
			checkLeaks(t)
			a, b := open(t, Config{BufferSize: 1024, RecvDepth: depth, SendDepth: 64})
			for range depth { // a has no credit left, and sleeps
				write(t, a, make([]byte, 1024))
			}
			var held []*Buffer
			for range depth {
				buf, err := b.ReadBuffer()
				require.NoError(t, err)
				held = append(held, buf)
			}
			for _, buf := range held { // each may cause a CREDIT
				buf.Release()
			}
			for range depth { // and b fills a's window
				write(t, b, make([]byte, 1024))
			}
			require.NoError(t, b.CloseWrite())
			require.LessOrEqual(t, b.Stats().CreditFrames, uint64(2))
			eventually(t, func() bool { // all of it has been taken
				b.poll()
				return b.allSent()
			}, "sends of one who has credits are done")
			read(t, a, 1024*depth) // awake
			requireEOF(t, a)
			for range depth {
				write(t, a, make([]byte, 1024))
			}
			read(t, b, 1024*depth)
		})
	}
}

func TestCopyUsesRegisteredBlocks(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		a, b := open(t, cfg)
		c, d := open(t, cfg)
		const n = 8 << 20
		// source → a, b → c, d → sum
		var want, got sum
		errs := make(chan error, 2)
		go func() {
			_, err := io.Copy(a, io.TeeReader(io.LimitReader(stream(5), n), &want)) // ReadFrom
			errs <- errors.Join(err, a.CloseWrite())
		}()
		go func() {
			_, err := io.Copy(c, b) // WriteTo
			errs <- errors.Join(err, c.CloseWrite())
		}()
		require.NoError(t, d.SetReadDeadline(time.Now().Add(patience)))
		k, err := io.Copy(&got, d)
		require.NoError(t, err)
		require.EqualValues(t, n, k)
		require.NoError(t, errors.Join(<-errs, <-errs))
		require.Equal(t, want.String(), got.String())
	})
}

type failingReader struct{ n int }

var errSource = errors.New("the source is broken")

func (r *failingReader) Read(p []byte) (int, error) {
	if r.n == 0 {
		return 0, errSource
	}
	k := min(r.n, len(p))
	r.n -= k
	return k, nil
}

type shortWriter struct{ n int }

func (w *shortWriter) Write(p []byte) (int, error) {
	k := min(w.n, len(p))
	w.n -= k
	return k, nil
}

func TestReadFromAndWriteToReportTheOtherSide(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{})
	n, err := a.ReadFrom(&failingReader{100_000})
	require.Equal(t, errSource, err)
	require.EqualValues(t, 100_000, n)
	n, err = b.WriteTo(&shortWriter{70_000})
	require.Equal(t, io.ErrShortWrite, err)
	require.EqualValues(t, 70_000, n)
}

func TestStatsCountPayload(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{})
	p := bytesOf(6, 1<<20)
	go a.Write(p)
	read(t, b, len(p))
	eventually(t, func() bool { return a.Stats().BytesWritten == uint64(len(p)) }, "BytesWritten is %d", a.Stats().BytesWritten)
	require.EqualValues(t, len(p), b.Stats().BytesRead)
	require.GreaterOrEqual(t, a.Stats().FramesSent, uint64(len(p)/DefaultBufferSize))
	require.NotZero(t, b.Stats().CreditFrames)
	require.NotZero(t, a.Stats().CreditsReceived)
}

func TestConnKnowsItsProviderAndAddresses(t *testing.T) {
	onEveryAddr(t, func(t *testing.T, addr string) {
		checkLeaks(t)
		l, err := (&ListenConfig{}).Listen(context.Background(), "rdma", addr)
		require.NoError(t, err)
		defer l.Close()
		a, b := pairOn(t, Config{}, l)
		closeLater(t, a, b)
		require.Equal(t, l.Addr().String(), a.RemoteAddr().String())
		require.Equal(t, l.Addr().String(), b.LocalAddr().String())
		require.Equal(t, a.LocalAddr().String(), b.RemoteAddr().String())
		for _, at := range []net.Addr{l.Addr(), a.LocalAddr(), a.RemoteAddr(), b.LocalAddr(), b.RemoteAddr()} {
			require.Equal(t, "rdma", at.Network())
			require.NotZero(t, at.(*Addr).AddrPort().Port())
			_, _, err := net.SplitHostPort(at.String())
			require.NoError(t, err)
		}
		require.Equal(t, testProvider(), a.Provider())
		require.Equal(t, testProvider(), b.Provider())
	})
}

// TestFullDuplexBulk has both sides write far more than the windows hold before
// either reads a byte of its own accord.
func TestFullDuplexBulk(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		a, b := open(t, cfg)
		const n = 32 << 20
		var wg sync.WaitGroup
		for i, c := range []*Conn{a, b} {
			_ = c.SetDeadline(time.Now().Add(patience))
			wg.Go(func() {
				p := bytesOf(uint64(i), 1<<20)
				for range n / len(p) {
					if _, err := c.Write(p); err != nil {
						t.Error(err)
						return
					}
				}
			})
			wg.Go(func() {
				want := bytesOf(uint64(1-i), 1<<20)
				got := make([]byte, len(want))
				for range n / len(got) {
					if _, err := io.ReadFull(c, got); err != nil {
						t.Error(err)
						return
					}
					if string(want) != string(got) {
						t.Error("wrong bytes")
						return
					}
				}
			})
		}
		wg.Wait()
	})
}

// TestFullSocketsLoseNoWakeUp has both sides write more than their sockets hold,
// while windows and send queues have room.
func TestFullSocketsLoseNoWakeUp(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{BufferSize: maxBufferSize, RecvDepth: 64, SendDepth: 64})
	n := int64(scaled(128, 1024)) << 20
	var wg sync.WaitGroup
	for _, c := range []*Conn{a, b} {
		_ = c.SetDeadline(time.Now().Add(patience))
		wg.Go(func() {
			p := make([]byte, 8<<20)
			for left := n; left > 0; left -= int64(len(p)) {
				if _, err := c.Write(p[:min(left, int64(len(p)))]); err != nil {
					t.Error(err)
					return
				}
			}
		})
		wg.Go(func() {
			if _, err := io.CopyN(io.Discard, struct{ io.Reader }{c}, n); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}
