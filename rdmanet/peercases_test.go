package rdmanet

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/internal/verbs/verbstest"
)

// Cases from the field: what users of similar software reported. Most have their
// tests beside the others of their subject; here are those that have no such place.

// failures are the events by which the connection manager says that something
// failed.
var failures = map[cm.EventType]syscall.Errno{
	cm.EventAddrError:     syscall.EHOSTUNREACH,
	cm.EventRouteError:    syscall.ENETUNREACH,
	cm.EventUnreachable:   syscall.ETIMEDOUT,
	cm.EventRejected:      syscall.ECONNREFUSED,
	cm.EventConnectError:  syscall.ECONNABORTED,
	cm.EventDeviceRemoval: syscall.ENODEV,
	cm.EventDisconnected:  syscall.ECONNRESET,
}

func failure(typ cm.EventType, id *cm.ID) *cm.Event {
	return &cm.Event{Type: typ, ID: id, Err: fmt.Errorf("%v: %w", typ, failures[typ])}
}

// TestEveryFailureInEveryStateOfADial: whatever the connection manager reports
// while a dial waits for something else, the dial fails with that and leaves nothing.
func TestEveryFailureInEveryStateOfADial(t *testing.T) {
	cfg, err := Config{Provider: verbstest.Name}.resolve()
	require.NoError(t, err)
	for _, waits := range []string{"resolve address", "resolve route", "connect"} {
		for typ, errno := range failures {
			t.Run(waits+"/"+typ.String(), func(t *testing.T) {
				checkLeaks(t)
				l := listen(t, ListenConfig{Config: cfg})
				begun := make(chan struct{}, 1)
				fake.SetFail(func(op string) error {
					if op == waits {
						begun <- struct{}{}
						return verbstest.ErrHang
					}
					return nil
				})
				defer fake.SetFail(nil)
				loop, err := acquireLoop(cfg.Provider)
				require.NoError(t, err)
				id, err := loop.ch.NewID()
				require.NoError(t, err)
				c := newConn(cfg, id)
				ended := make(chan error, 1)
				go func() { ended <- c.connect(context.Background(), l.addr.ap, l.addr.ap) }()
				<-begun
				c.handleEvent(failure(typ, id))
				within(t, patience, func() {
					require.ErrorIs(t, <-ended, errno)
					c.linger.Store(-1)
					require.NoError(t, c.Close())
				})
			})
		}
	}
}

// TestEveryFailureInEveryStateOfAConnection: a reader and a writer that block, and a
// Close that lingers, end when the connection does, and go on when the event is one
// of a dial that came late.
func TestEveryFailureInEveryStateOfAConnection(t *testing.T) {
	for typ, errno := range failures {
		t.Run(typ.String(), func(t *testing.T) {
			checkLeaks(t)
			cfg := Config{Provider: verbstest.Name, Linger: 200 * time.Millisecond}
			a, b := open(t, cfg)
			n := fillUp(t, a)
			_ = a.SetDeadline(time.Now().Add(patience))
			read1, wrote := make(chan error, 1), make(chan error, 1)
			go func() { _, err := a.Read(make([]byte, 1)); read1 <- err }()
			go func() { _, err := a.Write(make([]byte, 100_000)); wrote <- err }()
			eventually(t, func() bool { return a.Stats().Parks > 0 }, "they block")
			a.handleEvent(failure(typ, a.id))
			ends := typ == cm.EventDeviceRemoval || typ == cm.EventDisconnected
			if ends {
				requireOpError(t, <-read1, "read", errno)
				requireOpError(t, <-wrote, "write", errno)
			} else {
				read(t, b, n+100_000)
				require.NoError(t, <-wrote)
				write(t, b, []byte("x"))
				require.NoError(t, <-read1)
			}
			closed := make(chan error, 1)
			go func() { closed <- a.Close() }()
			a.handleEvent(failure(typ, a.id))
			within(t, patience, func() {
				if err := <-closed; !ends {
					require.NoError(t, err)
				}
			})
			a.handleEvent(failure(typ, a.id)) // and late for everything
		})
	}
}

// TestUnreachableDialsLeaveNothing: TestFailedDialsLeaveNothing has those that are
// refused and cancelled.
func TestUnreachableDialsLeaveNothing(t *testing.T) {
	checkLeaks(t)
	hold := listen(t, ListenConfig{}) // keeps the event loop
	_ = hold
	before, goroutines := fds(t), runtime.NumGoroutine()
	for i := range scaled(1000, 1000) {
		// A multicast group takes no connections; nobody has that address.
		_, err := DialTimeout("rdma", "224.0.0.1:9", patience)
		require.Error(t, err)
		var errno syscall.Errno
		require.ErrorAs(t, err, &errno, "%d: %v", i, err)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
	}
	eventually(t, func() bool { return fds(t) <= before+2 && runtime.NumGoroutine() <= goroutines+4 },
		"nothing is left: %d descriptors, were %d", fds(t), before)
}

// TestSlowReaderCostsNothing stops reading for 3 s with the window full and the
// peer writing: no message finds the receiver not ready, which would cost 655 ms,
// and the rest comes at the pace at which it came before.
func TestSlowReaderCostsNothing(t *testing.T) {
	checkLeaks(t)
	pause := 3 * time.Second
	if testing.Short() {
		pause = time.Second
	}
	counters := rnrCounters(t)
	before := total(t, counters)
	a, b := open(t, Config{})
	const n = 4 << 20
	sent := make(chan error, 1)
	_ = a.SetDeadline(time.Now().Add(2 * patience))
	go func() { sent <- sendN(a, 1, 2*n) }()
	v := &verifier{want: stream(1)}
	pass := func() time.Duration {
		began := time.Now()
		_ = b.SetReadDeadline(began.Add(patience))
		_, err := io.CopyN(v, b, n)
		require.NoError(t, err)
		return time.Since(began)
	}
	unbroken := pass()
	time.Sleep(pause) // that is the case
	after := pass()
	require.NoError(t, <-sent)
	require.Equal(t, before, total(t, counters), "receiver not ready")
	t.Logf("%v for %d bytes, and %v after the pause; %d counters", unbroken, n, after, len(counters))
	require.Less(t, after, 10*unbroken+time.Second)
}

// TestManyProcessors runs tests that move data again with more threads than there
// are processors, as TestOneProcessor does with one.
func TestManyProcessors(t *testing.T) {
	const procs = "GOMAXPROCS=16"
	if os.Getenv("GOMAXPROCS") != "" {
		t.Skip("set already")
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	const tests = "^(TestEverySizeArrives|TestConcurrentWritesAreNotMixed|TestFullDuplexBulk|TestCloseEndsAllBlockedCalls|TestBothEndsCloseAtOnce)$"
	cmd := exec.Command(exe, "-test.run="+tests, "-test.short", "-test.timeout=100s")
	cmd.Env = append(os.Environ(), procs)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "PASS")
}

func init() {
	children["echo many"] = func() {
		l, err := Listen("rdma", os.Getenv(envAddr))
		if err == nil {
			fmt.Println(l.Addr())
			go echo(l)
			_, _ = io.Copy(io.Discard, os.Stdin) // until the parent is gone
		}
	}
}

// TestProcessesShareADevice: three processes on one device at a time, each with
// connections to the others', and every byte comes back to where it came from.
func TestProcessesShareADevice(t *testing.T) {
	checkLeaks(t)
	var wg sync.WaitGroup
	errs := make(chan error, 16)
	for range 2 {
		_, out := child(t, "echo many", envAddr+"="+testAddr(t))
		addr, err := bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err)
		for i := range 4 {
			wg.Go(func() {
				errs <- func() error {
					c, err := DialTimeout("rdma", strings.TrimSpace(addr), patience)
					if err != nil {
						return err
					}
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(patience))
					n := int64(scaled(8<<20, 64<<20))
					return together(
						func() error {
							return inTurn(func() error { return sendN(c.(*Conn), uint64(i), n) }, c.(*Conn).CloseWrite)
						},
						func() error {
							return inTurn(func() error { return receiveN(c.(*Conn), uint64(i), n) }, func() error { return expectEnd(c.(*Conn), io.EOF) })
						})
				}()
			})
		}
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
}

// TestManyWritersAndOneClose: 32 goroutines write, and each comes back with
// net.ErrClosed, whether the peer reads or sleeps.
func TestManyWritersAndOneClose(t *testing.T) {
	for _, reads := range []bool{true, false} {
		onEveryPath(t, func(t *testing.T, cfg Config) {
			t.Run(fmt.Sprint("the peer reads ", reads), func(t *testing.T) {
				checkLeaks(t)
				cfg.Linger = time.Second
				a, b := open(t, cfg)
				if reads {
					go func() { _, _ = io.Copy(io.Discard, b) }()
				}
				errs := make(chan error, 32)
				for i := range cap(errs) {
					go func() {
						for {
							if _, err := a.Write(make([]byte, 1+i*10_000)); err != nil {
								errs <- err
								return
							}
						}
					}()
				}
				eventually(t, func() bool { return a.Stats().BytesWritten > 0 }, "they write")
				within(t, patience, func() {
					// A peer that sleeps may keep Close from sending FIN.
					if err := a.Close(); err != nil {
						require.ErrorIs(t, err, syscall.ETIMEDOUT)
					}
					for range cap(errs) {
						require.ErrorIs(t, <-errs, net.ErrClosed)
					}
				})
			})
		})
	}
}
