//go:build cgo && linux

package rdmacore

import (
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// A device may go while it is connected and listened on, also the last one. The
// kernel waits until everything that was made of it is gone, and so this test, which
// removes the lab's devices, has to be asked for, and the last.
func TestDeviceRemovalIsReported(t *testing.T) {
	if os.Getenv("RDMANET_LAB") != "1" || os.Getenv("RDMANET_TEST_REMOVAL") != "1" {
		t.Skip("removes rxe0 and siw0 (try: RDMANET_TEST_REMOVAL=1 lab/guest)")
	}
	for _, dev := range []struct{ name, addr, other string }{
		{"rxe0", "RDMANET_LAB_RXE4", "RDMANET_LAB_SIW4"},
		{"siw0", "RDMANET_LAB_SIW4", ""},
	} {
		t.Run(dev.name, func(t *testing.T) {
			addr := netip.MustParseAddr(os.Getenv(dev.addr))
			ch := newTestChannel(t)                 // when there is no device, none can be made
			idle := newTestID(t, newTestChannel(t)) // nothing is made of it, and it stays
			require.NoError(t, idle.Bind(netip.AddrPortFrom(addr, 0)))
			gone := make(chan error, 1)
			t.Run("connected", func(t *testing.T) {
				a, b := pair(t, 1000, addr)
				go func() { gone <- exec.Command("rdma", "link", "del", dev.name).Run() }()
				removed := make(map[verbs.ID]bool)
				for len(removed) < 3 { // both ends and the listener
					var ev *verbs.Event
					require.Eventually(t, func() bool {
						e, err := a.ch.GetEvent()
						ev = e
						return err == nil
					}, patience, time.Millisecond)
					if ev.Type == verbs.EventDeviceRemoval {
						require.False(t, removed[ev.ID])
						removed[ev.ID] = true
					}
				}
				require.True(t, removed[a.id] && removed[b.id])
				require.NoError(t, a.qp.SetError())
				require.NoError(t, b.id.Disconnect())
				a.requireFlushed()
				b.requireFlushed()
			})
			select {
			case err := <-gone:
				require.NoError(t, err)
			case <-time.After(patience):
				t.Fatal("rdma link del waits for something that is not freed")
			}
			i := newTestID(t, ch)
			err := i.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(addr, 9), patience)
			if err == nil {
				err = next(t, ch, verbs.EventAddrError).Err
			}
			require.ErrorIs(t, err, syscall.ENODEV)
			if other := os.Getenv(dev.other); other != "" {
				a, b := pair(t, 100, netip.MustParseAddr(other))
				a.send(1, "the other device lives")
				b.pollUntil(func() bool { return len(b.got) == 1 })
			}
		})
	}
}
