package cm_test

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
)

// The backlog of rdma_listen is of incoming connection requests. More than that,
// which nobody has taken, are refused; but on InfiniBand and RoCE the kernel lets
// them try again after some seconds, until there is room. Each that is dealt with
// makes room for one.
func TestContractFullBacklogRefuses(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		dialers := newChannel(t, on)
		ln := listenWith(t, newChannel(t, on), on, 2)
		dial := func() *cm.ID {
			id := newEnd(t, resolved(t, dialers, ln.LocalAddr())).id
			require.NoError(t, id.Connect(testParam))
			return id
		}
		refused := func() {
			t.Helper()
			ev, err := dialers.GetEvent(withTimeout(t))
			require.NoError(t, err)
			ev.Ack()
			require.Equal(t, cm.EventRejected, ev.Type)
			requireErrno(t, ev.Err, syscall.ECONNREFUSED)
		}
		reject := func() {
			t.Helper()
			ev, err := ln.Wait(withTimeout(t), cm.EventConnectRequest)
			require.NoError(t, err)
			ev.Ack()
			require.NoError(t, ev.ID.Reject(nil))
			require.NoError(t, ev.ID.Destroy())
			refused()
		}
		e, onDevice := dial().Endpoint()
		for range 2 {
			dial()
		}
		retries := on.fake == nil && onDevice && e.Transport != "iWARP"
		if !retries {
			refused()
			for range 4 {
				dial()
				refused()
			}
			reject()
			dial()
		}
		reject()
		reject()
		if retries {
			reject()
		}
		require.NoError(t, ln.Destroy())
	})
}
