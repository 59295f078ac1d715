package qp

import (
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

const mib = 1 << 20

func newPool(t *testing.T, cfg PoolConfig) *Pool {
	p := newProvider(t)
	pd, err := NewDevice(p.Device()).AllocPD()
	require.NoError(t, err)
	pool, err := NewPool(pd, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, pool.Close())
		require.Equal(t, PoolStats{}, pool.Stats())
		require.NoError(t, pd.Close())
	})
	return pool
}

func get(t *testing.T, p *Pool) *Buffer {
	b, err := p.Get()
	require.NoError(t, err)
	return b
}

// getAll empties the pool to its budget.
func getAll(t *testing.T, p *Pool) (all []*Buffer) {
	for {
		b, err := p.Get()
		if err != nil {
			requireErrno(t, err, syscall.ENOBUFS)
			return all
		}
		all = append(all, b)
	}
}

func releaseAll(all []*Buffer) {
	for _, b := range all {
		b.Release()
	}
}

func TestPoolPinsNothingUntilAsked(t *testing.T) {
	p := newPool(t, PoolConfig{BlockSize: 1000, Headroom: 8, MaxBytes: 64 * mib})
	require.Equal(t, PoolStats{}, p.Stats())
	b := get(t, p)
	require.Equal(t, PoolStats{Arenas: 1, Bytes: mib, Blocks: mib / 1024, InUse: 1}, p.Stats())
	b.Release()
	require.Equal(t, 0, p.Stats().InUse)
}

func TestPoolBudget(t *testing.T) {
	page := int64(os.Getpagesize())
	for _, cfg := range []PoolConfig{
		{BlockSize: 1000, Headroom: 24, MaxBytes: mib/2 + 5},
		{BlockSize: 1000, MaxBytes: mib + 100},
		{BlockSize: 64 << 10, Headroom: 8, MaxBytes: 9*mib + 4096},
		{BlockSize: 3 * mib, MaxBytes: 10 * mib},
		{BlockSize: 1, MaxBytes: page},
	} {
		p := newPool(t, cfg)
		all := getAll(t, p)
		s := p.Stats()
		require.LessOrEqual(t, s.Bytes, cfg.MaxBytes)
		require.Greater(t, s.Bytes, cfg.MaxBytes-max(page, int64(p.stride))-page, "the budget is used up")
		require.Equal(t, s.Blocks, s.InUse)
		require.Len(t, all, s.Blocks)

		_, err := p.Get()
		var limit *LimitError
		require.ErrorAs(t, err, &limit)
		require.Equal(t, cfg.MaxBytes, limit.Limit)

		all[0].Release()
		require.Same(t, all[0], get(t, p), "what comes back is used again")
		releaseAll(all)
	}
}

func TestPoolGrowsByAQuarter(t *testing.T) {
	p := newPool(t, PoolConfig{BlockSize: 64 << 10, MaxBytes: 64 * mib})
	var all []*Buffer
	before := p.Stats()
	for len(all) < 800 {
		all = append(all, get(t, p))
		s := p.Stats()
		if s.Arenas > before.Arenas {
			require.Equal(t, before.Arenas+1, s.Arenas)
			require.Equal(t, max(mib, before.Bytes/4/mib*mib), s.Bytes-before.Bytes)
		}
		before = s
	}
	require.Less(t, before.Arenas, 24)
	releaseAll(all)
}

func TestPoolConfigBounds(t *testing.T) {
	for _, cfg := range []PoolConfig{
		{BlockSize: 0, MaxBytes: mib},
		{BlockSize: -1, MaxBytes: mib},
		{BlockSize: 10, Headroom: -1, MaxBytes: mib},
		{BlockSize: 10, MaxBytes: 0},
		{BlockSize: 8192, Headroom: 8, MaxBytes: 8192},
		{BlockSize: 1 << 31, MaxBytes: 1 << 40},
	} {
		_, err := NewPool(nil, cfg)
		var limit *LimitError
		require.ErrorAs(t, err, &limit)
		requireErrno(t, err, syscall.EINVAL)
	}
}

func TestBlocksAreAlignedAndDisjoint(t *testing.T) {
	p := newPool(t, PoolConfig{BlockSize: 100, Headroom: 8, MaxBytes: 2 * mib})
	all := getAll(t, p)
	seen := make(map[uintptr]bool)
	for i, b := range all {
		at := uintptr(unsafe.Pointer(&b.Block()[0]))
		require.Zero(t, at%64)
		require.False(t, seen[at])
		seen[at] = true
		require.Len(t, b.Block(), 108)
		require.Equal(t, 108, cap(b.Block()))
		for j := range b.Block() {
			b.Block()[j] = byte(i)
		}
	}
	for i, b := range all {
		require.Equal(t, byte(i), b.Block()[0])
		require.Equal(t, byte(i), b.Block()[107])
	}
	releaseAll(all)
}

func TestBufferWindow(t *testing.T) {
	p := newPool(t, PoolConfig{BlockSize: 100, Headroom: 8, MaxBytes: mib})
	b := get(t, p)
	require.Equal(t, 100, b.Len())
	require.Equal(t, 100, b.Cap())
	require.Len(t, b.Header(), 8)
	require.Equal(t, 8, cap(b.Header()), "appending to the header can't reach the payload")
	copy(b.Header(), "HHHHHHHH")
	copy(b.Bytes(), "payload")
	b.Resize(7)
	require.Equal(t, "payload", string(b.Bytes()))
	require.Equal(t, 7, cap(b.Bytes()))
	require.Equal(t, "HHHHHHHHpayload", string(b.SGE().Data))
	require.Equal(t, b.LKey(), b.SGE().LKey)
	require.Len(t, b.BlockSGE().Data, 108)

	b.SetWindow(2, 3)
	require.Equal(t, "HHH", string(b.Bytes()))
	b.SetWindow(0, 108)
	b.SetWindow(108, 0)
	b.SetWindow(8, 0)
	b.Resize(100)
	for _, f := range []func(){
		func() { b.Resize(101) },
		func() { b.Resize(-1) },
		func() { b.SetWindow(-1, 1) },
		func() { b.SetWindow(109, 0) },
		func() { b.SetWindow(108, 1) },
		func() { b.SetWindow(1, int(^uint(0)>>1)) },
	} {
		require.Panics(t, f)
	}
	require.Equal(t, 100, b.Len())

	b.SetWindow(1, 1)
	b.Release()
	require.Same(t, b, get(t, p))
	require.Equal(t, 100, b.Len(), "a new holder finds the whole payload")
	b.Release()
}

func TestDoubleReleasePanics(t *testing.T) {
	p := newPool(t, PoolConfig{BlockSize: 100, MaxBytes: mib})
	b := get(t, p)
	b.Release()
	require.PanicsWithValue(t, "qp: Buffer: Release of a buffer that the caller does not hold (released twice?)", b.Release)

	// Of many that release at once, one succeeds.
	b = get(t, p)
	var wg sync.WaitGroup
	var mu sync.Mutex
	released := 0
	for range 4 {
		wg.Go(func() {
			defer func() { recover() }()
			b.Release()
			mu.Lock()
			released++
			mu.Unlock()
		})
	}
	wg.Wait()
	require.Equal(t, 1, released)
	require.Equal(t, 0, p.Stats().InUse)
}

func TestOwnerGetsTheBlockBack(t *testing.T) {
	p := newPool(t, PoolConfig{BlockSize: 100, MaxBytes: mib})
	var back []*Buffer
	hook := func(b *Buffer) { back = append(back, b) }

	b := get(t, p)
	b.SetOwner(hook)
	require.Panics(t, b.Release, "the owner does not release")
	require.Panics(t, func() { b.SetOwner(hook) })
	for i := range 3 {
		b.Lend()
		require.Panics(t, b.Lend)
		require.Panics(t, b.Free, "it is lent")
		b.Release()
		require.Len(t, back, i+1)
		require.Panics(t, b.Release)
		require.Equal(t, 1, p.Stats().InUse, "it is not in the pool")
	}
	b.Free()
	require.Equal(t, 0, p.Stats().InUse)
	require.Panics(t, b.Free)
	require.Panics(t, b.Lend)

	require.Same(t, b, get(t, p))
	require.Panics(t, b.Free, "nobody owns it")
	b.Release()
	require.Len(t, back, 3, "the hook is forgotten")

	// A hook may free, as a closed connection's does.
	b = get(t, p)
	b.SetOwner((*Buffer).Free)
	b.Lend()
	b.Release()
	require.Equal(t, 0, p.Stats().InUse)
}

func TestBusyPoolCannotBeClosed(t *testing.T) {
	p := newPool(t, PoolConfig{BlockSize: 100, MaxBytes: mib})
	b := get(t, p)
	err := p.Close()
	var busy *BusyError
	require.ErrorAs(t, err, &busy)
	require.Equal(t, BusyError{Object: "pool", Buffers: 1}, *busy)
	requireErrno(t, err, syscall.EBUSY)
	get(t, p).Release() // nothing has changed
	b.Release()
}

func TestClosedPool(t *testing.T) {
	prov := newProvider(t)
	pd, err := NewDevice(prov.Device()).AllocPD()
	require.NoError(t, err)
	p, err := NewPool(pd, PoolConfig{BlockSize: 100, MaxBytes: mib})
	require.NoError(t, err)
	get(t, p).Release()

	fail := true
	prov.SetFail(func(op string) error {
		if op == "dereg mr" && fail {
			return syscall.EBUSY
		}
		return nil
	})
	requireErrno(t, p.Close(), syscall.EBUSY)
	require.Equal(t, 1, p.Stats().Arenas, "memory that the device may still use stays mapped")
	fail = false
	require.NoError(t, p.Close())

	_, err = p.Get()
	require.ErrorIs(t, err, net.ErrClosed)
	require.ErrorIs(t, p.Close(), net.ErrClosed)
	require.NoError(t, pd.Close())
}

func TestPoolConcurrency(t *testing.T) {
	p := newPool(t, PoolConfig{BlockSize: 16 << 10, Headroom: 8, MaxBytes: 4 * mib})
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(g)))
			var held []*Buffer
			for range 3000 {
				if rng.IntN(2) == 0 {
					b, err := p.Get()
					if err == nil {
						b.Bytes()[0] = byte(g)
						held = append(held, b)
					}
				} else if n := len(held); n > 0 {
					b := held[n-1]
					held = held[:n-1]
					if b.Bytes()[0] != byte(g) {
						t.Error("a block has two holders")
					}
					b.Release()
				}
			}
			releaseAll(held)
		})
	}
	wg.Wait()
	require.Zero(t, p.Stats().InUse)
	require.LessOrEqual(t, p.Stats().Bytes, int64(4*mib))
}

func TestGetAndReleaseDoNotAllocate(t *testing.T) {
	p := newPool(t, PoolConfig{BlockSize: 1000, Headroom: 8, MaxBytes: mib})
	get(t, p).Release()
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		b, err := p.Get()
		if err != nil {
			t.Fatal(err)
		}
		b.Resize(10)
		_ = b.SGE()
		b.Release()
	}))
	hook := func(b *Buffer) { b.Free() }
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		b, _ := p.Get()
		b.SetOwner(hook)
		b.Lend()
		b.Release()
	}))
}
