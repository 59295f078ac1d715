package cm_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/pprof"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
)

// The tests of this file are the table "The contract we take from librdmacm", row
// by row, on every provider.

// rdma_create_event_channel fails with an errno.
func TestContractCreateChannelFailsWithErrno(t *testing.T) {
	_, err := cm.NewEventChannel("no such provider")
	requireErrno(t, err, syscall.ENODEV)

	onEveryProvider(t, func(t *testing.T, on target) {
		var lim unix.Rlimit
		require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &lim))
		none := lim
		none.Cur = 3
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &none))
		_, err := cm.NewEventChannelOn(on)
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &lim))
		requireErrno(t, err, syscall.EMFILE)
	})
}

// A channel has a descriptor that can be polled like any other.
func TestContractDescriptorIsReadableWhileAnEventWaits(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		ln := listen(t, ch, on)
		require.False(t, readable(t, ch, 0))

		id := newID(t, ch)
		require.NoError(t, id.ResolveAddr(netip.AddrPort{}, ln.LocalAddr(), patience))
		require.True(t, readable(t, ch, int(patience.Milliseconds())))
		ev, err := ch.GetEvent(withTimeout(t))
		require.NoError(t, err)
		require.Equal(t, cm.EventAddrResolved, ev.Type)
		require.Same(t, id, ev.ID)
		ev.Ack()
		require.False(t, readable(t, ch, 0))
	})
}

// readable polls the channel's descriptor for some milliseconds.
func readable(t *testing.T, ch *cm.EventChannel, ms int) bool {
	t.Helper()
	n := 0
	control(t, ch, func(fd int) {
		var err error
		n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, ms)
		require.NoError(t, err)
	})
	return n == 1
}

func control(t *testing.T, ch *cm.EventChannel, f func(fd int)) {
	t.Helper()
	raw, err := ch.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) { f(int(fd)) }))
}

// Who waits for events blocks no OS thread.
func TestContractWaitingBlocksNoThread(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		const channels, each = 40, 3
		before := pprof.Lookup("threadcreate").Count()
		var ids []*cm.ID
		var ended []<-chan error
		for range channels {
			id := newID(t, newChannel(t, on))
			ids = append(ids, id)
			for range each {
				ended = append(ended, waiting(id.GetEvent))
			}
		}
		runtime.Gosched()
		require.Less(t, pprof.Lookup("threadcreate").Count()-before, channels/2)
		for _, id := range ids {
			destroy(t, id)
		}
		for _, c := range ended {
			require.ErrorIs(t, receive(t, c), net.ErrClosed)
		}
	})
}

// One channel serves many ids, each of which gets its own events.
func TestContractOneChannelServesManyIDs(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		ln := listen(t, ch, on)
		var wg sync.WaitGroup
		for range 50 {
			id := newID(t, ch)
			require.Same(t, ch, id.Channel())
			wg.Go(func() {
				for _, step := range []struct {
					begin func() error
					want  cm.EventType
				}{
					{func() error { return id.ResolveAddr(netip.AddrPort{}, ln.LocalAddr(), patience) }, cm.EventAddrResolved},
					{func() error { return id.ResolveRoute(patience) }, cm.EventRouteResolved},
				} {
					if err := step.begin(); err != nil {
						t.Error(err)
						return
					}
					ev, err := id.Wait(withTimeout(t), step.want)
					if err != nil {
						t.Error(err)
						return
					}
					if ev.ID != id {
						t.Error("event of another id")
					}
					ev.Ack()
				}
			})
		}
		wg.Wait()
	})
}

// rdma_migrate_id moves an id to another channel.
func TestContractMigrate(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		from, to := newChannel(t, on), newChannel(t, on)
		ln := listen(t, to, on)
		id := newID(t, from)
		moved := waiting(id.GetEvent) // waits on through the move
		require.NoError(t, id.Migrate(to))
		require.NoError(t, id.Migrate(to))
		require.Same(t, to, id.Channel())
		require.NoError(t, from.Close(), "it has no id any more")
		requireBusy(t, to.Close())
		destroy(t, id)
		require.ErrorIs(t, receive(t, moved), net.ErrClosed)

		t.Run("events that nobody has got move too", func(t *testing.T) {
			from := newChannel(t, on)
			id := newID(t, from)
			require.NoError(t, id.ResolveAddr(netip.AddrPort{}, ln.LocalAddr(), patience))
			require.True(t, readable(t, from, int(patience.Milliseconds())))
			require.NoError(t, id.Migrate(to))
			require.NoError(t, from.Close())
			ev, err := to.GetEvent(withTimeout(t))
			require.NoError(t, err)
			require.Same(t, id, ev.ID)

			other := newChannel(t, on)
			busy := requireBusy(t, id.Migrate(other))
			require.Equal(t, []*cm.Event{ev}, busy.Events)
			require.Same(t, to, id.Channel())
			ev.Ack()
			require.NoError(t, id.Migrate(other))
			require.NoError(t, id.Destroy())
		})
		t.Run("a listener moves with its requests", func(t *testing.T) {
			from, to, dialer := newChannel(t, on), newChannel(t, on), newChannel(t, on)
			ln := listen(t, from, on)
			active := newEnd(t, resolved(t, dialer, ln.LocalAddr()))
			require.NoError(t, active.id.Connect(testParam))
			require.True(t, readable(t, from, int(patience.Milliseconds())))
			require.NoError(t, ln.Migrate(to))
			require.NoError(t, from.Close())
			ev, err := ln.Wait(withTimeout(t), cm.EventConnectRequest)
			require.NoError(t, err)
			destroyLater(t, ev.ID)
			ev.Ack()
			require.Same(t, to, ev.ID.Channel())
			passive := newEnd(t, ev.ID)
			require.NoError(t, passive.id.Accept(testParam))
			wait(t, active.id, cm.EventEstablished)
			wait(t, passive.id, cm.EventEstablished)
		})
		t.Run("to a closed channel", func(t *testing.T) {
			id := newID(t, to)
			closed := newChannel(t, on)
			require.NoError(t, closed.Close())
			require.ErrorIs(t, id.Migrate(closed), net.ErrClosed)
			require.Same(t, to, id.Channel())
		})
	})
}

// Destroying a channel closes its descriptor.
func TestContractCloseClosesTheDescriptor(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		if runtime.GOOS == "linux" {
			var link, was string
			control(t, ch, func(fd int) {
				link = fmt.Sprintf("/proc/self/fd/%d", fd)
				was, _ = os.Readlink(link)
			})
			require.NotEmpty(t, was)
			defer func() {
				_, err := os.Readlink(link)
				require.ErrorIs(t, err, os.ErrNotExist)
			}()
		}
		a, b := waiting(ch.GetEvent), waiting(ch.GetEvent)
		require.NoError(t, ch.Close())
		require.ErrorIs(t, receive(t, a), net.ErrClosed)
		require.ErrorIs(t, receive(t, b), net.ErrClosed)

		_, err := ch.NewID()
		require.ErrorIs(t, err, net.ErrClosed)
		requireErrno(t, err, syscall.EBADF)
		_, err = ch.GetEvent(context.Background())
		require.ErrorIs(t, err, net.ErrClosed)
		err = ch.Close()
		require.ErrorIs(t, err, net.ErrClosed)
		requireErrno(t, err, syscall.EBADF)
	})
}

// A channel with live ids or unacked events can't be closed.
func TestContractBusyChannel(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		other := newChannel(t, on)
		ln := listen(t, other, on)
		id := newID(t, ch)
		waiter := newID(t, ch)
		unhurt := waiting(waiter.GetEvent)

		busy := requireBusy(t, ch.Close())
		require.ElementsMatch(t, []*cm.ID{id, waiter}, busy.IDs)
		require.Empty(t, busy.Events)

		require.NoError(t, id.ResolveAddr(netip.AddrPort{}, ln.LocalAddr(), patience), "nothing has changed")
		ev, err := id.Wait(withTimeout(t), cm.EventAddrResolved)
		require.NoError(t, err)
		err = ch.Close()
		busy = requireBusy(t, err)
		require.Equal(t, []*cm.Event{ev}, busy.Events)
		for _, part := range []string{"2 id(s)", "1 event(s)", "ADDR_RESOLVED"} {
			require.Contains(t, err.Error(), part)
		}

		ev.Ack()
		ev.Ack()
		require.NoError(t, id.Destroy())
		require.Len(t, requireBusy(t, ch.Close()).IDs, 1)
		select {
		case err := <-unhurt:
			t.Fatal("a refused Close ended a wait: ", err)
		default:
		}
		require.NoError(t, waiter.Destroy())
		require.ErrorIs(t, receive(t, unhurt), net.ErrClosed)
		require.NoError(t, ch.Close())
	})
}

// rdma_destroy_id cancels what the id is doing.
func TestContractDestroyCancels(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch, dialer := newChannel(t, on), newChannel(t, on)
		t.Run("resolve", func(t *testing.T) {
			// Where software resolves at once, what is cancelled is the wait.
			id := newID(t, ch)
			ended := waiting(id.GetEvent)
			require.NoError(t, id.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(on.addr, 9), patience))
			destroy(t, id)
			require.ErrorIs(t, receive(t, ended), net.ErrClosed)
		})
		t.Run("connect", func(t *testing.T) {
			ln := listen(t, ch, on)
			active, passive := request(t, dialer, ln) // is not answered
			ended := waiting(active.id.GetEvent)
			require.NoError(t, active.qp.SetError())
			active.drain()
			require.NoError(t, active.qp.Close())
			destroy(t, active.id)
			require.ErrorIs(t, receive(t, ended), net.ErrClosed)
			require.NoError(t, passive.Destroy())
		})
		t.Run("listen", func(t *testing.T) {
			ln := listen(t, ch, on)
			addr := ln.LocalAddr()
			ended := waiting(ln.GetEvent)
			destroy(t, ln)
			require.ErrorIs(t, receive(t, ended), net.ErrClosed)
			require.Equal(t, addr, ln.LocalAddr())

			active := newEnd(t, resolved(t, dialer, addr))
			require.NoError(t, active.id.Connect(testParam))
			_, err := active.id.Wait(withTimeout(t), cm.EventEstablished)
			var refused *cm.EventError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, cm.EventRejected, refused.Type)
			requireErrno(t, err, syscall.ECONNREFUSED)
		})
		t.Run("listen, with requests that nobody has got", func(t *testing.T) {
			ln := listen(t, ch, on)
			var dialing []*end
			for range 3 {
				active := newEnd(t, resolved(t, dialer, ln.LocalAddr()))
				require.NoError(t, active.id.Connect(testParam))
				dialing = append(dialing, active)
			}
			require.True(t, readable(t, ch, int(patience.Milliseconds())))
			// Another id's waiter takes the requests off the provider.
			helper := newID(t, ch)
			ended := waiting(helper.GetEvent)
			require.NoError(t, ln.Destroy())
			for _, active := range dialing {
				// Refused; or reset, before it had become a request.
				_, err := active.id.Wait(withTimeout(t), cm.EventEstablished)
				var refused *cm.EventError
				require.ErrorAs(t, err, &refused)
				require.Equal(t, cm.EventRejected, refused.Type)
			}
			destroy(t, helper)
			receive(t, ended)
		})
	})
}

// The QP must be freed and all events acked before rdma_destroy_id.
func TestContractBusyID(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		ln := listen(t, ch, on)
		active, passive := connect(t, ch, ln)
		busy := requireBusy(t, active.id.Destroy())
		require.Same(t, active.qp, busy.QP)
		require.Empty(t, busy.Events)

		// Nothing has changed: the connection works.
		active.send(true, 1)
		active.pollUntil(func(wc []qp.WC) bool { return len(wc) == 1 })
		passive.pollUntil(func(wc []qp.WC) bool { return len(wc) == 1 })

		require.NoError(t, active.id.Disconnect())
		ev, err := active.id.Wait(withTimeout(t), cm.EventDisconnected)
		require.NoError(t, err)
		active.drain()
		require.NoError(t, active.qp.Close())
		require.Nil(t, active.id.QP())
		busy = requireBusy(t, active.id.Destroy())
		require.Nil(t, busy.QP)
		require.Equal(t, []*cm.Event{ev}, busy.Events)
		ev.Ack()
		require.NoError(t, active.id.Destroy())

		// A connect request counts for its listener.
		_, err = ch.GetEvent(withTimeout(t)) // the passive side's DISCONNECTED
		require.NoError(t, err)
		busy = requireBusy(t, passive.id.Destroy())
		for _, ev := range busy.Events {
			ev.Ack()
		}
		active = newEnd(t, resolved(t, ch, ln.LocalAddr()))
		require.NoError(t, active.id.Connect(testParam))
		ev, err = ln.Wait(withTimeout(t), cm.EventConnectRequest)
		require.NoError(t, err)
		require.Equal(t, []*cm.Event{ev}, requireBusy(t, ln.Destroy()).Events)
		require.NoError(t, ev.ID.Destroy())
		ev.Ack()
		require.NoError(t, ln.Destroy())
	})
}

// rdma_disconnect flushes: each posted work request completes exactly once.
func TestContractDisconnectFlushesEveryWorkRequestOnce(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		active, passive := connect(t, ch, listen(t, ch, on))
		active.send(false, 100, 101)
		active.send(true, 102)
		active.send(false, 103) // is never reported, if it succeeds
		passive.send(true, 100, 101, 102)

		require.NoError(t, active.id.Disconnect())
		require.NoError(t, passive.disconnect())
		requireCompleteOnce(t, active.drain(), map[uint64]bool{100: false, 101: false, 102: true, 103: false})
		requireCompleteOnce(t, passive.drain(), map[uint64]bool{100: true, 101: true, 102: true})
		for _, e := range []*end{active, passive} {
			s, r := e.qp.Outstanding()
			require.Zero(t, s+r)
			n, err := e.cq.Poll(make([]qp.WC, 1))
			require.NoError(t, err)
			require.Zero(t, n, "a completion too many")

			// What is posted now is flushed as well.
			e.recv(200)
			e.send(false, 200)
			requireFlushed(t, e.drain(), 2)
			require.NoError(t, e.qp.Close())
		}
	})
}

// disconnect is what a side does that may already have lost the connection.
func (e *end) disconnect() error {
	if err := e.id.Disconnect(); err != nil {
		return e.qp.SetError()
	}
	return nil
}

// requireCompleteOnce asserts that the eight receives and the sends completed,
// each once; sends that are not signaled only if they failed.
func requireCompleteOnce(t *testing.T, wcs []qp.WC, sends map[uint64]bool) {
	t.Helper()
	seen := make(map[qp.Op]map[uint64]int)
	seen[qp.OpSend], seen[qp.OpRecv] = make(map[uint64]int), make(map[uint64]int)
	for _, wc := range wcs {
		require.Contains(t, []qp.Status{qp.StatusSuccess, qp.StatusWRFlushErr}, wc.Status)
		seen[wc.Op][wc.WRID]++
		require.Equal(t, 1, seen[wc.Op][wc.WRID])
		if wc.Op == qp.OpSend {
			require.Contains(t, sends, wc.WRID)
		}
	}
	require.Len(t, seen[qp.OpRecv], 8)
	for wrid, signaled := range sends {
		if signaled {
			require.Equal(t, 1, seen[qp.OpSend][wrid], "send %d", wrid)
		}
	}
}

func requireFlushed(t *testing.T, wcs []qp.WC, n int) {
	t.Helper()
	require.Len(t, wcs, n)
	for _, wc := range wcs {
		require.Equal(t, qp.StatusWRFlushErr, wc.Status)
	}
}

// Both sides get DISCONNECTED exactly once, whoever calls rdma_disconnect.
func TestContractBothSidesAreDisconnectedOnce(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		for _, tc := range []struct {
			name string
			end  func(active, passive *end) error
		}{
			{"active side", func(a, _ *end) error { return a.id.Disconnect() }},
			{"passive side", func(_, p *end) error { return p.id.Disconnect() }},
			{"both, and again", func(a, p *end) error {
				for range 2 {
					if err := a.id.Disconnect(); err != nil {
						return err
					}
					if err := p.disconnect(); err != nil {
						return err
					}
				}
				return nil
			}},
		} {
			t.Run(tc.name, func(t *testing.T) {
				ch := newChannel(t, on)
				active, passive := connect(t, ch, listen(t, ch, on))
				require.NoError(t, tc.end(active, passive))
				for _, e := range []*end{active, passive} {
					ev := wait(t, e.id, cm.EventDisconnected)
					require.Same(t, e.id, ev.ID)
					require.NoError(t, e.disconnect(), "the answer of the side that did not begin")
				}
				requireNoEvent(t, active.id)
				requireNoEvent(t, passive.id)
			})
		}
	})
}

// Every call returns an error that has an errno.
func TestContractErrno(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		ln := listen(t, ch, on)
		id := newID(t, ch)
		anywhere := netip.AddrPortFrom(on.addr, 0)

		taken := newID(t, ch)
		err := taken.Bind(ln.LocalAddr()) // the one or the other reports it
		if err == nil {
			err = taken.Listen(1)
		}
		requireErrno(t, err, syscall.EADDRINUSE)

		calls := map[string]func(*cm.ID) error{
			"Bind":         func(id *cm.ID) error { return id.Bind(anywhere) },
			"Listen":       func(id *cm.ID) error { return id.Listen(1) },
			"ResolveAddr":  func(id *cm.ID) error { return id.ResolveAddr(netip.AddrPort{}, ln.LocalAddr(), patience) },
			"ResolveRoute": func(id *cm.ID) error { return id.ResolveRoute(patience) },
			"CreateQP": func(id *cm.ID) error {
				_, err := id.CreateQP(nil, nil, qp.Cap{})
				return err
			},
			"Connect":    func(id *cm.ID) error { return id.Connect(testParam) },
			"Accept":     func(id *cm.ID) error { return id.Accept(testParam) },
			"Reject":     func(id *cm.ID) error { return id.Reject(nil) },
			"Disconnect": func(id *cm.ID) error { return id.Disconnect() },
		}
		for name, call := range calls {
			if name != "Bind" && name != "ResolveAddr" {
				err := call(id)
				requireErrno(t, err, syscall.EINVAL)
				var state *cm.StateError
				require.ErrorAs(t, err, &state, name)
				require.Equal(t, "idle", state.State[:4])
			}
			if err := call(ln); name != "Listen" {
				requireErrno(t, err, syscall.EINVAL)
			}
		}
		_, ok := id.Device()
		require.False(t, ok)

		calls["Migrate"] = func(id *cm.ID) error { return id.Migrate(newChannel(t, on)) }
		calls["SetKeepAlive"] = func(id *cm.ID) error { return id.SetKeepAlive(net.KeepAliveConfig{}) }
		calls["SetAFOnly"] = func(id *cm.ID) error { return id.SetAFOnly(true) }
		calls["SetReuseAddr"] = func(id *cm.ID) error { return id.SetReuseAddr(true) }
		calls["SetTOS"] = func(id *cm.ID) error { return id.SetTOS(0) }
		calls["SetAckTimeout"] = func(id *cm.ID) error { return id.SetAckTimeout(time.Second) }
		calls["SetLogger"] = func(id *cm.ID) error { return id.SetLogger(nil) }
		calls["Destroy"] = (*cm.ID).Destroy
		calls["GetEvent"] = func(id *cm.ID) error {
			_, err := id.GetEvent(context.Background())
			return err
		}
		require.NoError(t, id.Destroy())
		for name, call := range calls {
			err := call(id)
			require.ErrorIs(t, err, net.ErrClosed, name)
			requireErrno(t, err, syscall.EBADF)
		}

		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, err = ln.GetEvent(ctx)
		require.ErrorIs(t, err, context.Canceled)
		requireErrno(t, err, syscall.ECANCELED)
	})
}

// GetEvent and Destroy may meet at any moment.
func TestContractGetEventRacesDestroy(t *testing.T) {
	rounds := 10000
	if testing.Short() {
		rounds = 2000
	}
	onEveryProvider(t, func(t *testing.T, on target) {
		t.Run("alone", func(t *testing.T) { raceDestroy(t, newChannel(t, on), on, rounds) })
		t.Run("beside the channel's GetEvent", func(t *testing.T) {
			ch := newChannel(t, on)
			anybody := waiting(ch.GetEvent)
			raceDestroy(t, ch, on, rounds)
			require.NoError(t, ch.Close())
			require.ErrorIs(t, receive(t, anybody), net.ErrClosed)
		})
	})
}

func raceDestroy(t *testing.T, ch *cm.EventChannel, on target, rounds int) {
	dst := netip.AddrPortFrom(on.addr, 9)
	for i := range rounds {
		id, err := ch.NewID()
		require.NoError(t, err)
		ended := waiting(id.GetEvent)
		if i%2 == 0 {
			require.NoError(t, id.ResolveAddr(netip.AddrPort{}, dst, patience))
		}
		if i%3 == 0 {
			runtime.Gosched() // let it begin to wait
		}
		for err = id.Destroy(); err != nil; err = id.Destroy() {
			requireBusy(t, err)
			runtime.Gosched()
		}
		require.ErrorIs(t, receive(t, ended), net.ErrClosed)
	}
}
