package rdmanet

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
)

// What connections share, by reference count: the event channel of a provider,
// and the protection domain and pool of a device. Both are made for the first
// user and gone with the last.

// eventLoop is a provider's event channel and the goroutine that hands its
// events to their ids' contexts.
type eventLoop struct {
	ch   *cm.EventChannel
	refs int
	stop context.CancelFunc
	done chan struct{}
}

// eventHandler is the context of an id. It must not block.
type eventHandler interface{ handleEvent(*cm.Event) }

var loops struct {
	sync.Mutex
	m      map[Provider]*eventLoop
	failed atomic.Pointer[time.Time] // when there was last found to be no device at all
}

// noDevice reports whether there was none a moment ago: then it takes too long to
// look again for each connection in software.
func noDevice() bool {
	t := loops.failed.Load()
	return t != nil && time.Since(*t) < time.Second
}

func acquireLoop(p Provider) (*eventLoop, error) {
	loops.Lock()
	defer loops.Unlock()
	if l := loops.m[p]; l != nil {
		l.refs++
		return l, nil
	}
	ch, err := cm.NewEventChannel(string(p))
	if err != nil {
		if p == automatic[0] {
			now := time.Now()
			loops.failed.Store(&now)
		}
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	l := &eventLoop{ch: ch, refs: 1, stop: stop, done: make(chan struct{})}
	if loops.m == nil {
		loops.m = make(map[Provider]*eventLoop)
	}
	loops.m[p] = l
	go l.run(ctx)
	return l, nil
}

func (l *eventLoop) run(ctx context.Context) {
	defer close(l.done)
	for {
		ev, err := l.ch.GetEvent(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil: // no reason to stop: all connections depend on it
			delay(ctx, retryPause)
			continue
		}
		owner := ev.ID
		if ev.Type == cm.EventConnectRequest {
			owner = ev.Listener
		}
		ev.Ack() // its fields stay, and its id can be destroyed
		if h, ok := owner.Context().(eventHandler); ok {
			h.handleEvent(ev)
		}
	}
}

// retainLoop adds a user, while there is another.
func (p Provider) retainLoop() {
	loops.Lock()
	defer loops.Unlock()
	loops.m[p].refs++
}

// releaseLoop closes the channel with its last user, who has destroyed its ids.
func (p Provider) releaseLoop() error {
	loops.Lock()
	defer loops.Unlock()
	l := loops.m[p]
	if l.refs--; l.refs > 0 {
		return nil
	}
	delete(loops.m, p)
	l.stop()
	<-l.done
	return insist(l.ch.Close)
}

// retryPause is how long to wait before what a provider refused is tried again.
const retryPause = 10 * time.Millisecond

// delay waits, unless ctx ends.
func delay(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// insist frees something that a provider may not let go at once: it tries again
// for a moment.
func insist(free func() error) error {
	for range 2 {
		if err := free(); err == nil || errors.Is(err, net.ErrClosed) {
			return err
		}
		delay(context.Background(), retryPause)
	}
	return free()
}

// arena is the registered memory of a device, for one size of buffer.
type arena struct {
	key  arenaKey
	pd   *qp.PD
	pool *qp.Pool
	refs atomic.Int64 // connections, and buffers that may outlive theirs
}

type arenaKey struct {
	dev qp.Device
	cfg qp.PoolConfig
}

var arenas struct {
	sync.Mutex
	m map[arenaKey]*arena
}

func acquireArena(dev qp.Device, cfg qp.PoolConfig) (*arena, error) {
	arenas.Lock()
	defer arenas.Unlock()
	key := arenaKey{dev, cfg}
	if a := arenas.m[key]; a != nil {
		a.refs.Add(1)
		return a, nil
	}
	pd, err := dev.AllocPD()
	if err != nil {
		return nil, err
	}
	pool, err := qp.NewPool(pd, cfg)
	if err != nil {
		return nil, errors.Join(err, pd.Close())
	}
	a := &arena{key: key, pd: pd, pool: pool}
	a.refs.Store(1)
	if arenas.m == nil {
		arenas.m = make(map[arenaKey]*arena)
	}
	arenas.m[key] = a
	return a, nil
}

// retain adds a user, while there is another.
func (a *arena) retain() { a.refs.Add(1) }

func (a *arena) release() error {
	if a.refs.Add(-1) > 0 {
		return nil
	}
	arenas.Lock()
	defer arenas.Unlock()
	if a.refs.Load() > 0 || arenas.m[a.key] != a { // acquired again, and perhaps released
		return nil
	}
	delete(arenas.m, a.key)
	return errors.Join(insist(a.pool.Close), insist(a.pd.Close))
}
