package rdmanet

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestReadBufferReturnsWhatIsLeftOfAFrame(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		a, b := open(t, cfg)
		p := bytesOf(1, 5000)
		write(t, a, p)
		require.Equal(t, p[:1000], read(t, b, 1000))
		buf, err := b.ReadBuffer()
		require.NoError(t, err)
		require.Equal(t, p[1000:], buf.Bytes())
		require.Equal(t, 4000, buf.Len())
		buf.Release()
		require.Panics(t, buf.Release)
		require.NoError(t, a.CloseWrite())
		_, err = b.ReadBuffer()
		require.Equal(t, io.EOF, err)
		_, err = b.ReadBuffer()
		require.Equal(t, io.EOF, err)
	})
}

func TestReadBufferIsEndedByDeadlineAndClose(t *testing.T) {
	checkLeaks(t)
	_, b := open(t, Config{})
	require.NoError(t, b.SetReadDeadline(time.Now().Add(time.Millisecond)))
	_, err := b.ReadBuffer()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, b.SetReadDeadline(time.Time{}))
	got := make(chan error, 1)
	go func() {
		_, err := b.ReadBuffer()
		got <- err
	}()
	require.NoError(t, b.Close())
	require.ErrorIs(t, <-got, net.ErrClosed)
	_, err = b.ReadBuffer()
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = b.NewBuffer()
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestWriteBufferSendsABlockOfOurs(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		a, b := open(t, cfg)
		for _, n := range []int{0, 1, 100, 4096, DefaultBufferSize} {
			buf, err := a.NewBuffer()
			require.NoError(t, err)
			require.Zero(t, buf.Len())
			require.Equal(t, DefaultBufferSize, buf.Cap())
			buf.Resize(n)
			p := bytesOf(uint64(n), n)
			copy(buf.Bytes(), p)
			k, err := a.WriteBuffer(buf)
			require.NoError(t, err)
			require.Equal(t, n, k)
			require.Equal(t, p, read(t, b, n))
		}
	})
}

func TestWriteBufferKeepsTheOrderOfWrites(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		a, b := open(t, cfg)
		var want []byte
		sent := make(chan error, 1)
		pieces := make([][]byte, 600)
		for i := range pieces {
			pieces[i] = bytesOf(uint64(i), 1+i%50*i%5000)
			want = append(want, pieces[i]...)
		}
		go func() {
			for i, p := range pieces {
				var err error
				switch i % 3 {
				case 0, 1: // small ones that may be waiting for each other
					_, err = a.Write(p)
				default:
					var buf *Buffer
					if buf, err = a.NewBuffer(); err == nil {
						buf.Resize(len(p))
						copy(buf.Bytes(), p)
						_, err = a.WriteBuffer(buf)
					}
				}
				if err != nil {
					sent <- err
					return
				}
			}
			sent <- a.CloseWrite()
		}()
		require.True(t, string(want) == string(read(t, b, len(want))))
		require.NoError(t, <-sent)
		requireEOF(t, b)
	})
}

func TestWriteBufferIsReleasedWhenItFails(t *testing.T) {
	checkLeaks(t)
	a, _ := open(t, Config{})
	fail := func(want error) {
		t.Helper()
		buf, err := a.NewBuffer()
		require.NoError(t, err)
		buf.Resize(10)
		n, err := a.WriteBuffer(buf)
		require.ErrorIs(t, err, want)
		require.Zero(t, n)
		require.Panics(t, buf.Release, "it is taken over even so")
	}
	require.NoError(t, a.SetWriteDeadline(longAgo))
	fail(os.ErrDeadlineExceeded)
	require.NoError(t, a.SetWriteDeadline(time.Time{}))
	require.NoError(t, a.CloseWrite())
	fail(errEPIPE)
}

func TestHeldBuffersStallThePeerAndReleaseResumesIt(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		cfg.BufferSize, cfg.RecvDepth = 2048, 4
		a, b := open(t, cfg)
		p := bytesOf(1, 2048)
		var held []*Buffer
		for range 4 {
			write(t, a, p)
			buf, err := b.ReadBuffer()
			require.NoError(t, err)
			held = append(held, buf)
		}
		require.NoError(t, a.SetWriteDeadline(time.Now().Add(20*time.Millisecond)))
		_, err := a.Write(p)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.NoError(t, a.SetWriteDeadline(time.Time{}))

		sent := make(chan error, 1)
		go func() {
			_, err := a.Write(p)
			sent <- err
		}()
		held[2].Release() // in any order, and nobody reads
		select {
		case err := <-sent:
			require.NoError(t, err)
		case <-time.After(patience):
			t.Fatal("the peer never learned of the release")
		}
		buf, err := b.ReadBuffer()
		require.NoError(t, err)
		require.Equal(t, p, buf.Bytes())
		buf.Release()
		for _, i := range []int{3, 0, 1} {
			require.Equal(t, p, held[i].Bytes(), "held buffers keep their bytes")
			held[i].Release()
		}
		for range 20 {
			write(t, a, p)
			require.Equal(t, p, read(t, b, len(p)))
		}
	})
}

func TestBufferOutlivesItsConnection(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		a, b := open(t, cfg)
		p := bytesOf(1, 3000)
		write(t, a, p)
		received, err := b.ReadBuffer()
		require.NoError(t, err)
		made, err := a.NewBuffer()
		require.NoError(t, err)
		made.Resize(10)
		require.NoError(t, a.Close())
		require.NoError(t, b.Close())
		require.Equal(t, p, received.Bytes())
		received.Release()
		require.Panics(t, received.Release)
		n, err := a.WriteBuffer(made)
		require.ErrorIs(t, err, net.ErrClosed)
		require.Zero(t, n)
		require.Panics(t, made.Release)
	})
}

// TestReceivedBufferIsForwarded echoes, and relays to another connection, without
// a copy, and to one whose frames are smaller with one.
func TestReceivedBufferIsForwarded(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		small := cfg
		small.BufferSize = 3000
		for _, tc := range []struct {
			name string
			next Config
		}{{"same", cfg}, {"smaller", small}} {
			t.Run(tc.name, func(t *testing.T) {
				checkLeaks(t)
				a, b := open(t, cfg)
				c, d := open(t, tc.next)
				const n = 4 << 20
				errs := make(chan error, 3)
				forward := func(from, to *Conn) {
					for {
						buf, err := from.ReadBuffer()
						if err == nil {
							_, err = to.WriteBuffer(buf)
						}
						if err == io.EOF {
							errs <- to.CloseWrite()
							return
						}
						if err != nil {
							errs <- err
							return
						}
					}
				}
				var want, got sum
				go func() {
					_, err := io.CopyN(io.MultiWriter(a, &want), stream(1), n)
					errs <- errors.Join(err, a.CloseWrite())
				}()
				go forward(b, c) // relay
				go forward(d, d) // echo
				back := make(chan error, 1)
				go func() { // and back
					for {
						buf, err := c.ReadBuffer()
						if err == nil {
							_, err = b.WriteBuffer(buf)
						}
						if err == io.EOF {
							err = b.CloseWrite()
							back <- err
							return
						}
						if err != nil {
							back <- err
							return
						}
					}
				}()
				require.NoError(t, a.SetReadDeadline(time.Now().Add(patience)))
				_, err := io.Copy(&got, struct{ io.Reader }{a})
				require.NoError(t, err)
				require.NoError(t, errors.Join(<-errs, <-errs, <-errs, <-back))
				require.Equal(t, want.String(), got.String())
			})
		}
	})
}

// TestForwardedBufferReturnsWhenTheNextConnectionEnds has blocks of one
// connection on their way out of another when that is aborted.
func TestForwardedBufferReturnsWhenTheNextConnectionEnds(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		a, b := open(t, cfg)
		for range 10 {
			c, d := pair(t, cfg)
			for range DefaultRecvDepth / 2 {
				write(t, a, make([]byte, DefaultBufferSize))
				buf, err := b.ReadBuffer()
				require.NoError(t, err)
				_, err = c.WriteBuffer(buf)
				require.NoError(t, err)
			}
			require.NoError(t, c.SetLinger(0))
			_ = c.Close()
			require.NoError(t, d.Close())
		}
	})
}

func TestReleaseRacesClose(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		cfg.BufferSize, cfg.RecvDepth = 1024, 8
		n := 200
		if testing.Short() {
			n = 20
		}
		for range n {
			a, b := pair(t, cfg)
			var held []*Buffer
			for range 8 {
				write(t, a, []byte("x"))
				buf, err := b.ReadBuffer()
				require.NoError(t, err)
				held = append(held, buf)
			}
			if testing.Short() {
				runtime.Gosched()
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := b.Close(); err != nil {
					t.Error(err)
				}
			})
			for _, buf := range held {
				wg.Go(func() {
					runtime.Gosched()
					buf.Release()
				})
			}
			wg.Go(func() { a.Close() })
			wg.Wait()
		}
	})
}

func TestRegisteredMemoryOfOneConnectionIsSmall(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		cfg2 := cfg
		cfg2.MaxRegistered = 64 << 20 // so that each side has an arena of its own
		a, b := pairOf(t, cfg, cfg2, testAddr(t))
		closeLater(t, a, b)
		go func() {
			_, _ = io.CopyN(a, stream(1), 8<<20)
			_ = a.CloseWrite()
		}()
		_, err := io.Copy(io.Discard, b)
		require.NoError(t, err)
		for _, c := range []*Conn{a, b} {
			require.LessOrEqual(t, c.arena.pool.Stats().Bytes, int64(1<<20))
		}
	})
}

func TestMaxRegisteredBoundsMemory(t *testing.T) {
	checkLeaks(t)
	cfg := Config{BufferSize: 4096, RecvDepth: 4, SendDepth: 4}
	cfg.MaxRegistered = cfg.poolConfig().Bytes(12)
	l := listen(t, ListenConfig{})
	a, b := pairOn(t, cfg, l)
	closeLater(t, a, b)
	var bufs []*Buffer
	var err error
	for range 12 {
		var buf *Buffer
		if buf, err = a.NewBuffer(); err != nil {
			break
		}
		bufs = append(bufs, buf)
	}
	require.ErrorIs(t, err, errENOBUFS)
	var oe *net.OpError
	require.ErrorAs(t, err, &oe)
	require.Equal(t, "rdma", oe.Net)
	_, err = (&Dialer{Config: cfg}).Dial("rdma", l.Addr().String())
	require.ErrorIs(t, err, errENOBUFS) // not even the receives
	for _, buf := range bufs {
		buf.Release()
	}
	roundTrip(t, a, b, bytesOf(1, 100_000))
}

// TestEchoedBuffersReturnOnAbort: blocks of a connection are on their way out of
// the same when it is aborted, some of them with nothing to say that they left.
func TestEchoedBuffersReturnOnAbort(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for n := 1; n <= DefaultRecvDepth; n++ {
			checkLeaks(t)
			a, b := pair(t, cfg)
			for range n {
				write(t, a, make([]byte, 5000))
				buf, err := b.ReadBuffer()
				require.NoError(t, err)
				_, err = b.WriteBuffer(buf)
				require.NoError(t, err)
				read(t, a, 5000)
			}
			require.NoError(t, b.SetLinger(0))
			within(t, patience, func() { require.NoError(t, b.Close()) })
			require.NoError(t, a.Close())
		}
	})
}
