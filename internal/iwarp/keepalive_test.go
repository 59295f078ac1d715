package iwarp

import (
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// quietTape is a tape whose peer has been silent for so long.
type quietTape struct {
	*tape
	silent atomic.Int64
	asked  atomic.Int64 // the last askEvery
	looks  atomic.Int64
}

func (l *tape) askEvery(time.Duration)        {}
func (l *tape) silence() time.Duration        { return 0 }
func (l *quietTape) askEvery(d time.Duration) { l.asked.Store(int64(d)) }
func (l *quietTape) silence() time.Duration {
	l.looks.Add(1)
	return time.Duration(l.silent.Load())
}

func TestKeepAliveTolerance(t *testing.T) {
	for name, c := range map[string]struct {
		net.KeepAliveConfig
		want time.Duration
	}{
		"off":              {net.KeepAliveConfig{Idle: time.Second}, 0},
		"defaults":         {net.KeepAliveConfig{Enable: true}, 150 * time.Second},
		"all":              {net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3}, 11 * time.Second},
		"the system's":     {net.KeepAliveConfig{Enable: true, Idle: -1}, 0},
		"interval left":    {net.KeepAliveConfig{Enable: true, Interval: -1}, 0},
		"count left":       {net.KeepAliveConfig{Enable: true, Count: -1}, 0},
		"only the idle":    {net.KeepAliveConfig{Enable: true, Idle: time.Second}, 136 * time.Second},
		"only the count":   {net.KeepAliveConfig{Enable: true, Count: 1}, 30 * time.Second},
		"off and the rest": {net.KeepAliveConfig{}, 0},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, tolerance(c.KeepAliveConfig)) })
	}
}

func TestKeepAliveEndsASilentConnection(t *testing.T) {
	ch := newChannel(t)
	l := &quietTape{tape: newTape()}
	q, c := onLink(t, ch, l, agreed{}, verbs.QPCap{SendWR: 4, RecvWR: 4, SendSGE: 1})
	newArena(t, q, 100, 100)
	l.give(-l.room)
	n, err := q.PostSend([]verbs.SendWR{{WRID: 9, Inline: true, SGL: []verbs.SGE{{Data: []byte("stuck")}}}})
	require.NoError(t, err)
	require.Equal(t, 1, n)

	q.keep.set(net.KeepAliveConfig{Enable: true, Idle: 10 * time.Millisecond, Interval: 10 * time.Millisecond, Count: 3})
	require.Equal(t, int64(10*time.Millisecond), l.asked.Load())
	l.silent.Store(int64(40*time.Millisecond - 1))
	eventually(t, "some looks", func() bool { return l.looks.Load() > 5 })
	nothingMore(t, ch)

	l.silent.Store(int64(40 * time.Millisecond))
	require.ErrorIs(t, next(t, ch, verbs.EventDisconnected).Err, syscall.ETIMEDOUT)
	require.True(t, l.closed)
	var wc [4]verbs.WC
	n, err = c.Poll(wc[:])
	require.NoError(t, err)
	require.Equal(t, 3, n)
	for _, w := range wc[:n] {
		require.Equal(t, verbs.StatusWRFlushErr, w.Status)
	}
	require.Nil(t, q.keep.timer)
	nothingMore(t, ch)
}

func TestKeepAliveIsTurnedOff(t *testing.T) {
	ch := newChannel(t)
	l := &quietTape{tape: newTape()}
	l.silent.Store(int64(time.Hour))
	q, _ := onLink(t, ch, l, agreed{}, verbs.QPCap{SendWR: 4, RecvWR: 4, SendSGE: 1})
	long := net.KeepAliveConfig{Enable: true, Idle: time.Minute}
	q.keep.set(long)
	q.keep.set(net.KeepAliveConfig{})
	require.Nil(t, q.keep.timer)
	q.keep.tick() // late
	require.Zero(t, l.looks.Load())
	q.keep.set(long)
	require.NotNil(t, q.keep.timer)
	q.Destroy()
	require.Nil(t, q.keep.timer)
	q.keep.set(long) // later still
	require.Nil(t, q.keep.timer)
}

// A peer that doesn't read shuts its window, but its host answers. So the
// connection stays, long after a host that is silent would have been given up.
func TestKeepAliveOfAPeerThatDoesNotRead(t *testing.T) {
	for role, weDial := range roles {
		t.Run(role, func(t *testing.T) {
			e, p := connectPeer(t, weDial, 500_000, false)
			stuff(e)
			require.Positive(t, e.outstanding()-testDepth)
			k := net.KeepAliveConfig{Enable: true, Idle: 100 * time.Millisecond, Interval: 100 * time.Millisecond, Count: 1}
			require.NoError(t, e.id.SetKeepAlive(k))
			time.Sleep(1500 * time.Millisecond) // TCP has asked for room three times
			nothingMore(t, e.ch)
			sent := make(chan []fpdu)
			go func() { sent <- p.rest() }()
			eventually(t, "everything sent", func() bool { e.poll(); return e.sends == testDepth })
			require.NoError(t, e.id.Disconnect())
			require.NotEmpty(t, <-sent)
		})
	}
}
