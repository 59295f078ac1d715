package cm_test

import (
	"errors"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
)

// rdma_set_option says no when an option comes too late to have an effect.
func TestContractOptionsComeInTime(t *testing.T) {
	const tos, reuse, ack = "SetTOS", "SetReuseAddr", "SetAckTimeout"
	options := map[string]func(*cm.ID) error{
		tos:   func(id *cm.ID) error { return id.SetTOS(expedited) },
		reuse: func(id *cm.ID) error { return id.SetReuseAddr(true) },
		ack: func(id *cm.ID) error {
			if err := id.SetAckTimeout(time.Minute); !errors.Is(err, errors.ErrUnsupported) {
				return err
			}
			return nil
		},
	}
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		requireTaken := func(id *cm.ID, want ...string) {
			t.Helper()
			for name, set := range options {
				err := set(id)
				if slices.Contains(want, name) {
					require.NoError(t, err, name)
					continue
				}
				requireErrno(t, err, syscall.EINVAL)
				require.ErrorAs(t, err, new(*cm.StateError), name)
			}
		}
		ln, id := newID(t, ch), newID(t, ch)
		requireTaken(ln, tos, reuse, ack)
		require.NoError(t, ln.Bind(netip.AddrPortFrom(on.addr, 0)))
		requireTaken(ln, tos, ack)
		require.NoError(t, ln.Listen(1))
		requireTaken(ln)

		requireTaken(id, tos, reuse, ack)
		require.NoError(t, id.ResolveAddr(netip.AddrPort{}, ln.LocalAddr(), patience))
		wait(t, id, cm.EventAddrResolved)
		requireTaken(id, tos, ack)
		require.NoError(t, id.ResolveRoute(patience))
		wait(t, id, cm.EventRouteResolved)
		requireTaken(id, ack)
		active := newEnd(t, id)
		require.NoError(t, id.Connect(testParam))
		requireTaken(id)

		passive := newEnd(t, requested(t, ln))
		requireTaken(passive.id, ack)
		require.NoError(t, passive.id.Accept(testParam))
		for _, e := range []*end{active, passive} {
			wait(t, e.id, cm.EventEstablished)
			requireTaken(e.id)
		}
		active.send(true, 1) // none of it does harm
		passive.pollUntil(func(wc []qp.WC) bool { return len(wc) == 1 })
	})
}

const expedited = 46 << 2 // of RFC 3246, as a TOS byte

// requested returns the id of a connect request.
func requested(t *testing.T, ln *cm.ID) *cm.ID {
	t.Helper()
	ev, err := ln.Wait(withTimeout(t), cm.EventConnectRequest)
	require.NoError(t, err)
	ev.Ack()
	destroyLater(t, ev.ID)
	return ev.ID
}

// RDMA_OPTION_ID_REUSEADDR: ids that are bound to one address connect to different
// peers, if all ask for it.
func TestContractReuseAddr(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		free := listen(t, ch, on)
		from := free.LocalAddr()
		require.NoError(t, free.Destroy())
		dial := func(reuse bool, ln *cm.ID) (*cm.ID, error) {
			id := newID(t, ch)
			require.NoError(t, id.SetReuseAddr(reuse))
			if err := id.Bind(from); err != nil {
				return nil, err
			}
			require.NoError(t, id.ResolveAddr(netip.AddrPort{}, ln.LocalAddr(), patience))
			wait(t, id, cm.EventAddrResolved)
			require.NoError(t, id.ResolveRoute(patience))
			wait(t, id, cm.EventRouteResolved)
			newEnd(t, id)
			require.NoError(t, id.Connect(testParam))
			return id, nil
		}
		for range 2 {
			ln := listen(t, ch, on)
			_, err := dial(true, ln)
			require.NoError(t, err)
			require.Equal(t, from, requested(t, ln).RemoteAddr())
		}
		id, err := dial(false, listen(t, ch, on))
		if err == nil { // then the connect reports it
			_, err = id.Wait(withTimeout(t), cm.EventEstablished)
		}
		requireErrno(t, err, syscall.EADDRINUSE)
	})
}

func TestContractOnlyOneListensOnAReusedAddress(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		first, second := newID(t, ch), newID(t, ch)
		require.NoError(t, first.SetReuseAddr(true))
		require.NoError(t, second.SetReuseAddr(true))
		require.NoError(t, first.Bind(netip.AddrPortFrom(on.addr, 0)))
		require.NoError(t, first.Listen(1))
		err := second.Bind(first.LocalAddr())
		if err == nil {
			err = second.Listen(1)
		}
		requireErrno(t, err, syscall.EADDRINUSE)
	})
}

// RDMA_OPTION_ID_ACK_TIMEOUT is a queue pair's, not TCP's.
func TestContractAckTimeout(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		id := resolved(t, ch, listen(t, ch, on).LocalAddr())
		for _, d := range []time.Duration{-1, 4096<<31 + 1} {
			err := id.SetAckTimeout(d)
			requireErrno(t, err, syscall.EINVAL)
			require.ErrorAs(t, err, new(*cm.LimitError))
		}
		e, hasDevice := id.Endpoint()
		for _, d := range []time.Duration{0, 1, time.Second, 4096 << 31} {
			err := id.SetAckTimeout(d)
			if !hasDevice || e.Transport == "iWARP" {
				require.ErrorIs(t, err, errors.ErrUnsupported)
				requireErrno(t, err, syscall.EOPNOTSUPP)
				continue
			}
			require.NoError(t, err, d)
		}
	})
}

func TestAckTimeoutIsRoundedUp(t *testing.T) {
	on := onFake(t, nil)
	id := newID(t, newChannel(t, on))
	for _, tc := range []struct {
		d time.Duration
		n uint8
	}{
		{0, 0}, {1, 1}, {4096, 1}, {8192, 1}, {8193, 2}, {16384, 2}, {16385, 3},
		{4096 << 14, 14}, {4096<<14 + 1, 15}, {time.Second, 18}, {4096<<31 - 1, 31}, {4096 << 31, 31},
	} {
		require.NoError(t, id.SetAckTimeout(tc.d))
		require.Equal(t, tc.n, on.fake.Option("set ack timeout"), tc.d)
		if tc.d > 0 {
			require.GreaterOrEqual(t, 4096*time.Nanosecond<<tc.n, tc.d)
		}
	}
	require.Error(t, id.SetAckTimeout(-1))
	require.Equal(t, uint8(31), on.fake.Option("set ack timeout"), "a value that is refused changes nothing")
}

func TestOptionsReachTheProvider(t *testing.T) {
	on := onFake(t, nil)
	id := newID(t, newChannel(t, on))
	require.NoError(t, id.SetTOS(expedited))
	require.Equal(t, uint8(expedited), on.fake.Option("set TOS"))
	for _, v := range []bool{true, false} {
		require.NoError(t, id.SetReuseAddr(v))
		require.Equal(t, v, on.fake.Option("set reuse address"))
		require.NoError(t, id.SetAFOnly(v))
		require.Equal(t, v, on.fake.Option("set AF only"))
	}
	on.fake.SetFail(func(string) error { return syscall.ENOBUFS })
	defer on.fake.SetFail(nil)
	requireErrno(t, id.SetTOS(0), syscall.ENOBUFS)
	requireErrno(t, id.SetReuseAddr(true), syscall.ENOBUFS)
	requireErrno(t, id.SetAckTimeout(0), syscall.ENOBUFS)
}
