package iwarp

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// However many connections one host begins and leaves, another host's set-up is
// not pushed out.
func TestAFloodFromOneHostLeavesAnothersSetUpAlone(t *testing.T) {
	leaksNoDescriptor(t)
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 8)
	slow := dialPeer(t, l.LocalAddr())
	request := setupBytes(t, wire.SetupFrame{Revision: 1})
	slow.write(request[:5])
	flood := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	for range 2*maxHalfOpen + 10 {
		c, err := flood.Dial("tcp", l.LocalAddr().String())
		require.NoError(t, err)
		newPeer(t, c.(*net.TCPConn))
	}
	ln := l.(*id).listener
	eventually(t, "as many in their set-up as may be", func() bool {
		ln.mu.Lock()
		defer ln.mu.Unlock()
		require.LessOrEqual(t, len(ln.halfOpen), maxHalfOpen)
		return len(ln.halfOpen) == maxHalfOpen
	})
	slow.write(request[5:])
	ev := next(t, ch, verbs.EventConnectRequest)
	require.NoError(t, ev.ID.Reject(nil))
	require.True(t, slow.readSetup(true).Reject)
	require.NoError(t, ev.ID.Destroy())
}

// A set-up has its time as a whole: a byte now and then does not prolong it.
func TestASetUpThatDribblesTimesOut(t *testing.T) {
	const limit = 200 * time.Millisecond
	setSetupTimeout(t, limit)
	leaksNoDescriptor(t)
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 8)
	request := setupBytes(t, wire.SetupFrame{Revision: 1, PrivateData: randomBytes(wire.MaxPrivateData)})
	began := time.Now()
	p := dialPeer(t, l.LocalAddr())
	ended := make(chan error, 1)
	go func() {
		_, err := p.Read(make([]byte, 1))
		ended <- err
	}()
	for i := range request {
		select {
		case err := <-ended:
			require.Error(t, err)
			require.False(t, isTimeout(err))
			require.GreaterOrEqual(t, time.Since(began), limit)
			nothingMore(t, ch)
			return
		case <-time.After(limit / 20):
		}
		_, _ = p.Write(request[i : i+1]) // fails when it is over
	}
	require.Fail(t, "it took as long as it liked")
}
