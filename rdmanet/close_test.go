package rdmanet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// scaled returns n, a tenth of it with -short, and more with RDMANET_LONG=1.
func scaled(n, longer int) int {
	switch {
	case long:
		return longer
	case testing.Short():
		return max(1, n/10)
	}
	return n
}

func TestCloseDeliversEverythingWritten(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for _, n := range []int{0, 1, 100, smallWrite, DefaultBufferSize + 1, DefaultBufferSize * DefaultRecvDepth} {
			t.Run(fmt.Sprint(n), func(t *testing.T) {
				checkLeaks(t)
				a, b := pair(t, cfg)
				p := bytesOf(1, n)
				write(t, a, p)
				closed := make(chan error, 1)
				go func() { closed <- a.Close() }()
				if n <= 100_000 { // Close doesn't wait for b's application
					require.NoError(t, <-closed)
					closed <- nil
				}
				for at := 0; at < n; at += 10_000 { // which is slow
					piece := read(t, b, min(10_000, n-at))
					require.True(t, bytes.Equal(p[at:at+len(piece)], piece))
					time.Sleep(time.Millisecond)
				}
				require.NoError(t, <-closed)
				requireEOF(t, b)
				require.NoError(t, b.Close())
			})
		}
	})
}

// TestCloseDeliversManySmallWrites has the open block in every state.
func TestCloseDeliversManySmallWrites(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		for i := range scaled(200, 2000) {
			a, b := pair(t, cfg)
			n := i % DefaultRecvDepth // as many frames, if none join
			for k := range n {
				write(t, a, bytes.Repeat([]byte{byte(k)}, 10))
			}
			require.NoError(t, a.Close())
			_ = b.SetReadDeadline(time.Now().Add(patience))
			got, err := io.ReadAll(b)
			require.NoError(t, err)
			require.Len(t, got, 10*n)
			require.NoError(t, b.Close())
		}
	})
}

// TestCloseWithUnreadDataLeavesThePeersAlone: a TCP socket that is closed with
// unread bytes in it would reset the connection, and with it what the peer has
// not read yet.
func TestCloseWithUnreadDataLeavesThePeersAlone(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for range 10 {
			checkLeaks(t)
			a, b := pair(t, cfg)
			write(t, b, bytesOf(1, 100_000)) // a never reads it
			p := bytesOf(2, 100_000)
			write(t, a, p)
			require.NoError(t, a.Close())
			require.True(t, bytes.Equal(p, read(t, b, len(p))))
			requireEOF(t, b)
			require.NoError(t, b.Close())
		}
	})
}

// TestCloseWhileThePeerIsWriting is the same with data on its way.
func TestCloseWhileThePeerIsWriting(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for range scaled(20, 200) {
			checkLeaks(t)
			a, b := pair(t, cfg)
			wrote := make(chan error, 1)
			_ = b.SetDeadline(time.Now().Add(patience))
			go func() {
				for {
					if _, err := b.Write(make([]byte, 100_000)); err != nil {
						wrote <- err
						return
					}
				}
			}()
			read(t, a, 100_000)
			p := bytesOf(2, 200_000)
			write(t, a, p)
			require.NoError(t, a.Close())
			require.True(t, bytes.Equal(p, read(t, b, len(p))))
			requireEOF(t, b)
			require.ErrorIs(t, <-wrote, syscall.EPIPE)
			require.NoError(t, b.Close())
		}
	})
}

// TestCloseReturnsWhileThePeerSleeps, whatever has not been read, and all is
// delivered when the peer wakes up.
func TestCloseReturnsWhileThePeerSleeps(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for _, unread := range []bool{false, true} {
			t.Run(fmt.Sprint("unread data ", unread), func(t *testing.T) {
				checkLeaks(t)
				a, b := open(t, cfg)
				n := fillUp(t, a)
				if unread {
					fillUp(t, b)
				}
				began := time.Now()
				require.NoError(t, a.Close())
				require.Less(t, time.Since(began), 3*time.Second)
				read(t, b, n)
				requireEOF(t, b)
			})
		}
	})
}

// TestSleeperReadsAllAfterTheEnd: whoever looks long after the end, when the reason for
// it would have had its time, reads all and then io.EOF.
func TestSleeperReadsAllAfterTheEnd(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		setBounds(t, time.Millisecond, &flushGrace)
		a, b := open(t, cfg)
		p := bytesOf(1, 50_000)
		write(t, a, p)
		require.NoError(t, a.Close())
		time.Sleep(50 * time.Millisecond)
		require.Equal(t, p, read(t, b, len(p)))
		requireEOF(t, b)
	})
}

// TestAbortIsAReset: what had been received is read, then ECONNRESET.
func TestAbortIsAReset(t *testing.T) {
	for _, how := range []string{"SetLinger(0)", "Config.Linger"} {
		onEveryPath(t, func(t *testing.T, cfg Config) {
			t.Run(how, func(t *testing.T) {
				checkLeaks(t)
				acfg := cfg
				if how == "Config.Linger" {
					acfg.Linger = -1
				}
				a, b := pairOf(t, acfg, cfg, testAddr(t))
				closeLater(t, a, b)
				p := bytesOf(1, 300_000)
				write(t, a, p)
				require.Equal(t, p[:1000], read(t, b, 1000))
				eventually(t, func() bool { // b's queue pair has all of it
					a.poll()
					b.poll()
					return b.Stats().FramesReceived > uint64(len(p)/DefaultBufferSize)
				}, "all is received")
				if how == "SetLinger(0)" {
					require.NoError(t, a.SetLinger(0))
				}
				require.NoError(t, a.Close())
				_ = b.SetReadDeadline(time.Now().Add(patience))
				eventually(t, func() bool { // the news has come
					b.mu.Lock()
					defer b.mu.Unlock()
					return b.rx.ended
				}, "b knows")
				require.True(t, bytes.Equal(p[1000:], read(t, b, len(p)-1000)))
				for range 3 {
					n, err := b.Read(make([]byte, 1))
					require.Zero(t, n)
					require.ErrorIs(t, err, syscall.ECONNRESET)
				}
				_, err := b.Write([]byte("x"))
				require.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE), "%v", err)
			})
		})
	}
}

// TestAbortLosesNothingInTheQueue is the same when what was received is still in
// the completion queue, because b's application does not poll.
func TestAbortLosesNothingInTheQueue(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for _, fin := range []bool{false, true} {
			t.Run(fmt.Sprint("FIN ", fin), func(t *testing.T) {
				checkLeaks(t)
				a, b := open(t, cfg)
				p := bytesOf(1, 10_000) // goes out at once
				write(t, a, p)
				if fin {
					require.NoError(t, a.CloseWrite())
				}
				require.NoError(t, a.SetLinger(0))
				require.NoError(t, a.Close())
				eventually(t, func() bool { // the news has come
					b.mu.Lock()
					defer b.mu.Unlock()
					return b.rx.ended
				}, "b knows")
				require.True(t, bytes.Equal(p, read(t, b, len(p))))
				_, err := b.Read(make([]byte, 1))
				if fin {
					require.Equal(t, io.EOF, err)
				} else {
					require.ErrorIs(t, err, syscall.ECONNRESET)
				}
			})
		}
	})
}

func TestCloseEndsAllBlockedCalls(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for range scaled(10, 100) {
			checkLeaks(t)
			cfg.Linger = 200 * time.Millisecond
			a, b := open(t, cfg)
			fillUp(t, a)
			errs := make(chan error, 64)
			for range 32 {
				go func() {
					_, err := a.Write(make([]byte, 100_000))
					errs <- err
				}()
				go func() {
					_, err := a.Read(make([]byte, 1))
					errs <- err
				}()
			}
			eventually(t, func() bool { return a.Stats().Parks > 0 }, "they block")
			closed := make(chan error, 1)
			began := time.Now()
			go func() { closed <- a.Close() }()
			for range 64 {
				err := <-errs
				require.ErrorIs(t, err, net.ErrClosed)
				require.Less(t, time.Since(began), time.Second)
			}
			if err := <-closed; err != nil { // b's socket is full
				require.ErrorIs(t, err, syscall.ETIMEDOUT)
			}
			require.NoError(t, b.Close())
		}
	})
}

func TestBothEndsCloseAtOnce(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		for i := range scaled(100, 1000) {
			a, b := pair(t, cfg)
			if i%2 == 1 {
				write(t, a, make([]byte, 50_000))
				write(t, b, make([]byte, 50_000))
			}
			var wg sync.WaitGroup
			for _, c := range []*Conn{a, b} {
				wg.Go(func() {
					if err := c.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
		}
	})
}

func TestCloseTwice(t *testing.T) {
	checkLeaks(t)
	a, b := pair(t, Config{})
	require.NoError(t, a.Close())
	require.ErrorIs(t, a.Close(), net.ErrClosed)
	var ok atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			switch err := b.Close(); {
			case err == nil:
				ok.Add(1)
			case !errors.Is(err, net.ErrClosed):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, ok.Load())
}

func TestEveryMethodFailsAfterClose(t *testing.T) {
	checkLeaks(t)
	a, b := pair(t, Config{})
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
	var bufs net.Buffers
	for name, call := range map[string]func() error{
		"Read":               func() error { _, err := a.Read(make([]byte, 1)); return err },
		"Read of nothing":    func() error { _, err := a.Read(nil); return err },
		"Write":              func() error { _, err := a.Write([]byte("x")); return err },
		"Write of nothing":   func() error { _, err := a.Write(nil); return err },
		"WriteBuffers":       func() error { _, err := a.WriteBuffers(&bufs); return err },
		"ReadFrom":           func() error { _, err := a.ReadFrom(bytes.NewReader([]byte("x"))); return err },
		"WriteTo":            func() error { _, err := a.WriteTo(io.Discard); return err },
		"ReadBuffer":         func() error { _, err := a.ReadBuffer(); return err },
		"NewBuffer":          func() error { _, err := a.NewBuffer(); return err },
		"CloseRead":          a.CloseRead,
		"CloseWrite":         a.CloseWrite,
		"Close":              a.Close,
		"SetDeadline":        func() error { return a.SetDeadline(time.Now()) },
		"SetReadDeadline":    func() error { return a.SetReadDeadline(time.Time{}) },
		"SetWriteDeadline":   func() error { return a.SetWriteDeadline(time.Time{}) },
		"SetLinger":          func() error { return a.SetLinger(1) },
		"SetNoDelay":         func() error { return a.SetNoDelay(true) },
		"SetKeepAlive":       func() error { return a.SetKeepAlive(true) },
		"SetKeepAlivePeriod": func() error { return a.SetKeepAlivePeriod(time.Minute) },
		"SetReadBuffer":      func() error { return a.SetReadBuffer(1) },
		"SetWriteBuffer":     func() error { return a.SetWriteBuffer(1) },
	} {
		err := call()
		require.ErrorIs(t, err, net.ErrClosed, name)
		var oe *net.OpError
		require.ErrorAs(t, err, &oe, name)
		require.Equal(t, "rdma", oe.Net, name)
		require.NotNil(t, oe.Source, name)
		require.NotNil(t, oe.Addr, name)
	}
	require.NotNil(t, a.LocalAddr())
	require.NotNil(t, a.RemoteAddr())
	require.NotEmpty(t, a.Provider())
	a.Stats()
}

func TestSettersTakeValues(t *testing.T) {
	checkLeaks(t)
	a, _ := open(t, Config{})
	require.NoError(t, errors.Join(a.SetLinger(-1), a.SetLinger(0), a.SetLinger(3), a.SetNoDelay(false), a.SetNoDelay(true),
		a.SetReadBuffer(1), a.SetWriteBuffer(1)))
	require.NoError(t, errors.Join(a.SetKeepAlive(false), a.SetKeepAlive(true), a.SetKeepAlivePeriod(time.Minute),
		a.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 3})))
}

// storm calls methods at random.
func storm(c *Conn, seed uint64, n int, closes bool) {
	rng := rand.New(stream(seed))
	buf := make([]byte, 70_000)
	soon := func() time.Time { return time.Now().Add(time.Duration(rng.IntN(3000)) * time.Microsecond) }
	for range n {
		switch rng.IntN(20) {
		case 0, 1, 2:
			_ = c.SetReadDeadline(soon())
			_, _ = c.Read(buf[:rng.IntN(len(buf))])
		case 3, 4, 5:
			_ = c.SetWriteDeadline(soon())
			_, _ = c.Write(buf[:rng.IntN(len(buf))])
		case 6, 7:
			_ = c.SetWriteDeadline(soon())
			_, _ = c.Write(buf[:rng.IntN(100)])
		case 8:
			bufs := net.Buffers{buf[:10], nil, buf[:rng.IntN(len(buf))]}
			_ = c.SetDeadline(soon())
			_, _ = c.WriteBuffers(&bufs)
		case 9, 10:
			_ = c.SetReadDeadline(soon())
			if b, err := c.ReadBuffer(); err == nil {
				if rng.IntN(2) == 0 {
					_ = c.SetWriteDeadline(soon())
					_, _ = c.WriteBuffer(b)
				} else {
					b.Release()
				}
			}
		case 11, 12:
			if b, err := c.NewBuffer(); err == nil {
				b.Resize(rng.IntN(b.Cap()))
				_ = c.SetWriteDeadline(soon())
				_, _ = c.WriteBuffer(b)
			}
		case 13:
			_ = c.SetNoDelay(rng.IntN(2) == 0)
			_ = c.SetLinger(rng.IntN(3) - 1)
		case 14:
			_ = c.Stats()
			_ = c.LocalAddr().String() + c.RemoteAddr().String() + string(c.Provider())
		case 15:
			_ = c.SetKeepAlivePeriod(time.Duration(1+rng.IntN(10)) * time.Second)
		case 16:
			_ = c.SetDeadline(soon())
			_, _ = c.ReadFrom(bytes.NewReader(buf[:rng.IntN(len(buf))]))
		case 17:
			_ = c.SetReadDeadline(soon())
			_, _ = c.WriteTo(io.Discard)
		case 18:
			if closes && rng.IntN(8) == 0 {
				if rng.IntN(2) == 0 {
					_ = c.CloseRead()
				} else {
					_ = c.CloseWrite()
				}
			}
		case 19:
			if closes && rng.IntN(10) == 0 {
				_ = c.Close()
			}
		}
	}
}

// TestAnyMethodMayRaceAnyOther is for -race, and for what hangs.
func TestAnyMethodMayRaceAnyOther(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for round := range scaled(6, 100) {
			checkLeaks(t)
			if round%2 == 1 {
				cfg.BufferSize, cfg.RecvDepth, cfg.SendDepth = 1024, 2, 1
			}
			a, b := pair(t, cfg)
			var wg sync.WaitGroup
			for i := range 16 {
				c := []*Conn{a, b}[i%2]
				wg.Go(func() { storm(c, uint64(1000*round+i), 60, round > 1) })
			}
			within(t, patience, wg.Wait)
			for _, c := range []*Conn{a, b} {
				wg.Go(func() { _ = c.Close() })
			}
			within(t, patience, wg.Wait)
		}
	})
}

func TestConnectTransferCloseLeavesNothing(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		n := scaled(1000, 3000)
		if cfg.Provider == "fake" {
			n /= 4
		}
		l := listen(t, ListenConfig{Config: cfg})
		go func() { // echo
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					_, _ = io.Copy(c, c)
					_ = c.Close()
				}()
			}
		}()
		p := bytesOf(1, 10_000)
		var fdsAt, goroutinesAt int
		for i := range n {
			c, err := (&Dialer{Config: cfg}).Dial("rdma", l.Addr().String())
			require.NoError(t, err, "after %d", i)
			write(t, c, p)
			require.True(t, bytes.Equal(p, read(t, c, len(p))))
			require.NoError(t, c.Close())
			if i == n/10 {
				fdsAt, goroutinesAt = fds(t), runtime.NumGoroutine()
			}
		}
		eventually(t, func() bool { return fds(t) <= fdsAt+5 && runtime.NumGoroutine() <= goroutinesAt+10 },
			"descriptors and goroutines stay flat: %d and %d, were %d and %d", fds(t), runtime.NumGoroutine(), fdsAt, goroutinesAt)
	})
}

// TestLingerBoundsClose: a peer whose host does not take the data. Its place is
// taken by a fake that never completes sends.
func TestLingerBoundsClose(t *testing.T) {
	checkLeaks(t)
	cfg := Config{Provider: "fake", BufferSize: 1024, RecvDepth: 4, Linger: 300 * time.Millisecond}
	r := rawDial(t, cfg, greeting{version: 1, oldest: 1, recvSize: 4096, dataSlots: 100}.append(nil), 1)
	r.sendHello()
	c := r.accepted()
	for range 5 { // the raw peer has posted one receive, and lies about it
		write(t, c, make([]byte, 500))
	}
	began := time.Now()
	err := c.Close()
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
	require.ErrorContains(t, err, "linger")
	require.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond)
	require.Less(t, time.Since(began), 300*time.Millisecond+time.Second)
}

// TestCloseWithDevicesThatDoNotFlush gives up after a bound.
func TestCloseWithDevicesThatDoNotFlush(t *testing.T) {
	checkLeaks(t)
	a, b := pair(t, Config{Provider: "fake"})
	write(t, a, []byte("x"))
	fake.SetFail(func(op string) error {
		if op == "flush" {
			return errors.New("never")
		}
		return nil
	})
	defer fake.SetFail(nil)
	within(t, patience, func() {
		require.ErrorIs(t, a.Close(), syscall.EIO)
		require.ErrorIs(t, b.Close(), syscall.EIO)
	})
}

// TestCloseGoesOnAfterFailures frees what it can, whatever fails meanwhile.
func TestCloseGoesOnAfterFailures(t *testing.T) {
	for _, op := range []string{"disconnect", "modify qp", "req notify cq"} {
		t.Run(op, func(t *testing.T) {
			checkLeaks(t)
			a, b := pair(t, Config{Provider: "fake"})
			write(t, a, []byte("x"))
			fake.SetFail(func(o string) error {
				if o == op {
					return syscall.EIO
				}
				return nil
			})
			defer fake.SetFail(nil)
			within(t, patience, func() {
				_ = a.Close()
				_ = b.Close()
			})
		})
	}
}

// TestSetUpFailuresLeaveNothing fails each step of a dial and of an accept.
func TestSetUpFailuresLeaveNothing(t *testing.T) {
	for _, op := range []string{"create id", "resolve address", "resolve route", "alloc pd", "create cq", "create qp", "reg mr",
		"post recv", "connect", "accept", "post send", "bind", "listen", "create event channel"} {
		t.Run(op, func(t *testing.T) {
			checkLeaks(t)
			cfg := Config{Provider: "fake"}
			var at atomic.Int32
			for skip := range int32(3) { // the dialer's, the acceptor's
				l, err := (&ListenConfig{Config: cfg}).Listen(context.Background(), "rdma", "127.0.0.1:0")
				require.NoError(t, err)
				go func() {
					for {
						c, err := l.Accept()
						if err != nil {
							return
						}
						_ = c.Close()
					}
				}()
				at.Store(0)
				fake.SetFail(func(o string) error {
					if o == op && at.Add(1) == skip+1 {
						return syscall.ENOBUFS
					}
					return nil
				})
				c, err := (&Dialer{Config: cfg, Timeout: 5 * time.Second}).Dial("rdma", l.Addr().String())
				if err == nil {
					_ = c.Close()
				}
				fake.SetFail(nil)
				require.NoError(t, l.Close())
			}
		})
	}
}
