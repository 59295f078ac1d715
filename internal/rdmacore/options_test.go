//go:build cgo && linux

package rdmacore

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// A queue pair whose peer is gone fails after its retries, each of which waits for
// the ack time-out.
func TestAckTimeoutIsWhatEachRetryWaits(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		fails := func(n uint8) time.Duration {
			ch := newTestChannel(t)
			l := listen(t, ch, addr)
			a := &end{t: t, ch: ch, id: resolved(t, ch, l.LocalAddr())}
			err := a.id.SetAckTimeout(n)
			if a.id.Device().(*device).iwarp {
				require.ErrorIs(t, err, errors.ErrUnsupported)
				require.ErrorIs(t, err, syscall.EOPNOTSUPP)
				return 0
			}
			require.NoError(t, err)
			a.createQP(64)
			t.Cleanup(a.free)
			p := testParam
			p.RetryCount = 3 // rxe takes 7 to be for ever
			require.NoError(t, a.id.Connect(p))
			b := &end{t: t, ch: ch, id: next(t, ch, verbs.EventConnectRequest).ID}
			t.Cleanup(func() { require.NoError(t, b.id.Destroy()) })
			b.createQP(64)
			t.Cleanup(b.free)
			require.NoError(t, b.id.Accept(testParam))
			next(t, ch, verbs.EventEstablished)
			next(t, ch, verbs.EventEstablished)

			require.NoError(t, b.qp.Destroy())
			b.qp = nil
			start := time.Now()
			a.send(1, "to nobody")
			a.pollUntil(func() bool { return len(a.bad) > 0 })
			require.Equal(t, verbs.WC{WRID: 1, Op: verbs.OpSend, Status: verbs.StatusRetryExcErr}, a.bad[0])
			return time.Since(start)
		}
		short, long := fails(8), fails(17)
		if long > 0 {
			require.Greater(t, long, 3*4096<<17*time.Nanosecond)
			require.Less(t, short, long/2)
		}
	})
}

func TestOptionsOfAnID(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		ch := newTestChannel(t)
		i := newTestID(t, ch)
		for _, on := range []bool{true, false} {
			require.NoError(t, i.SetReuseAddr(on))
			require.NoError(t, i.SetAFOnly(on))
		}
		require.NoError(t, i.SetTOS(46<<2))
		require.NoError(t, i.SetAckTimeout(14), "the device is not known yet")
		require.NoError(t, i.Bind(netip.AddrPortFrom(addr, 0)))
		require.ErrorIs(t, i.SetReuseAddr(false), syscall.EINVAL)

		gone, err := ch.NewID()
		require.NoError(t, err)
		require.NoError(t, gone.Destroy())
		for _, err := range []error{gone.SetTOS(0), gone.SetReuseAddr(true), gone.SetAFOnly(true), gone.SetAckTimeout(0)} {
			require.ErrorIs(t, err, net.ErrClosed)
		}
	})
}
