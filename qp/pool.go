package qp

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// PoolConfig says what a Pool's blocks look like, and how much memory they may
// pin. All sizes are in bytes.
type PoolConfig struct {
	BlockSize int   // payload of a block; at least 1
	Headroom  int   // room before the payload, for a header; 0 or more
	MaxBytes  int64 // budget for all arenas; room for one block at least
}

// Bytes returns how much memory one arena of n blocks takes, and so the least
// budget for them.
func (c PoolConfig) Bytes(n int) int64 {
	return int64(roundUp(n*roundUp(c.Headroom+c.BlockSize, blockAlign), os.Getpagesize()))
}

// PoolStats are the figures of a pool at one moment.
type PoolStats struct {
	Arenas int   // registered arenas
	Bytes  int64 // registered bytes
	Blocks int   // blocks in all arenas
	InUse  int   // blocks that are not in the pool
}

const (
	blockAlign = 64      // a cache line
	arenaUnit  = 1 << 20 // arenas grow in units of this
)

// Pool hands out blocks of registered memory. It maps arenas of anonymous
// memory (huge pages where the system has them) as blocks are asked for, by a
// quarter of what there is, registers each once, and keeps them until Close.
//
// Its methods may be called concurrently. Get and Release allocate nothing,
// except for the Get that maps another arena.
type Pool struct {
	pd     *PD
	cfg    PoolConfig
	stride int

	growMu sync.Mutex // one arena at a time; before mu

	mu     sync.Mutex
	closed bool
	free   *Buffer // last in, first out: what was used last is in the cache
	stats  PoolStats
	arenas []arena
}

type arena struct {
	mem []byte
	mr  *MR
}

// NewPool makes a pool in pd. It maps nothing yet.
func NewPool(pd *PD, cfg PoolConfig) (*Pool, error) {
	const op = "new pool"
	const most = math.MaxInt32 // an SGE's length is 32 bits
	if err := checkLimit("block size", cfg.BlockSize, 1, most, "choose smaller blocks"); err != nil {
		return nil, opError(op, err)
	}
	if err := checkLimit("headroom", cfg.Headroom, 0, most-cfg.BlockSize, "choose smaller blocks"); err != nil {
		return nil, opError(op, err)
	}
	p := &Pool{pd: pd, cfg: cfg, stride: roundUp(cfg.Headroom+cfg.BlockSize, blockAlign)}
	if least := int64(roundUp(p.stride, os.Getpagesize())); cfg.MaxBytes < least {
		return nil, opError(op, &LimitError{What: "pool budget in bytes", Value: cfg.MaxBytes, Limit: least,
			Fix: "allow at least one block of whole pages", Errno: syscall.EINVAL})
	}
	return p, nil
}

// Get takes a block out of the pool. The caller holds it, and its bytes, until
// Release. Its payload has length BlockSize, and any content. When the budget
// is used up the error is a *LimitError that wraps ENOBUFS; Get never waits for
// a block.
func (p *Pool) Get() (*Buffer, error) {
	b, err := p.take()
	if b == nil && err == nil {
		b, err = p.grow()
	}
	if err != nil {
		return nil, opError("get buffer", err)
	}
	b.off, b.n = p.cfg.Headroom, p.cfg.BlockSize
	b.state.Store(blockHeld)
	return b, nil
}

// take returns nil if there is no free block.
func (p *Pool) take() (*Buffer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errClosed
	}
	b := p.free
	if b != nil {
		p.free, b.next = b.next, nil
		p.stats.InUse++
	}
	return b, nil
}

// put takes a block back.
func (p *Pool) put(b *Buffer) {
	p.mu.Lock()
	b.next, p.free = p.free, b
	p.stats.InUse--
	p.mu.Unlock()
}

// grow adds an arena and takes one of its blocks, or a block that came back
// meanwhile.
func (p *Pool) grow() (*Buffer, error) {
	p.growMu.Lock()
	defer p.growMu.Unlock()
	if b, err := p.take(); b != nil || err != nil {
		return b, err
	}
	size, err := p.nextArena()
	if err != nil {
		return nil, err
	}
	// Mapping and pinning take long; Release must not wait for them.
	a, err := newArena(p.pd, size)
	if err != nil {
		return nil, err
	}
	first, last := p.cut(a)
	p.mu.Lock()
	defer p.mu.Unlock()
	blocks := size / p.stride
	p.arenas = append(p.arenas, a)
	p.stats.Arenas++
	p.stats.Bytes += int64(size)
	p.stats.Blocks += blocks
	p.stats.InUse++
	rest := first.next
	first.next = nil
	if rest != nil {
		last.next, p.free = p.free, rest
	}
	return first, nil
}

// nextArena returns the size of the next arena.
func (p *Pool) nextArena() (int, error) {
	page := os.Getpagesize()
	stats := p.Stats()
	least := roundUp(p.stride, page)
	size := max(arenaUnit, int(stats.Bytes/4/arenaUnit*arenaUnit), least)
	size = roundUp(size, page)
	if left := p.cfg.MaxBytes - stats.Bytes; int64(size) > left {
		size = int(left) / page * page
	}
	if size < least {
		return 0, &LimitError{What: fmt.Sprintf("bytes of registered memory (%d buffers in use)", stats.InUse),
			Value: stats.Bytes + int64(least), Limit: p.cfg.MaxBytes,
			Fix: "release buffers, or raise the limit", Errno: syscall.ENOBUFS}
	}
	return size, nil
}

// cut makes a list of the arena's blocks, in the order of their addresses.
func (p *Pool) cut(a arena) (first, last *Buffer) {
	blocks := make([]Buffer, len(a.mem)/p.stride)
	size := p.cfg.Headroom + p.cfg.BlockSize
	for i := range blocks {
		b := &blocks[i]
		start := i * p.stride
		b.pool = p
		b.lkey = a.mr.LKey()
		b.block = a.mem[start : start+size : start+size]
		if i+1 < len(blocks) {
			b.next = &blocks[i+1]
		}
	}
	return &blocks[0], &blocks[len(blocks)-1]
}

// Stats returns the pool's figures.
func (p *Pool) Stats() PoolStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stats
}

// Close deregisters and unmaps all memory. While buffers are out it returns a
// *BusyError. Any slice of a buffer's memory is invalid afterwards.
func (p *Pool) Close() error {
	p.growMu.Lock()
	defer p.growMu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed && len(p.arenas) == 0 {
		return opError("close pool", errClosed)
	}
	if p.stats.InUse > 0 {
		return opError("close pool", &BusyError{Object: "pool", Buffers: p.stats.InUse})
	}
	p.closed, p.free = true, nil
	var failed []arena // a Close after this one tries them again
	var errs error
	for _, a := range p.arenas {
		if err := a.close(); err != nil {
			failed, errs = append(failed, a), errors.Join(errs, err)
			continue
		}
		p.stats.Arenas--
		p.stats.Bytes -= int64(len(a.mem))
		p.stats.Blocks -= len(a.mem) / p.stride
	}
	p.arenas = failed
	return opError("close pool", errs)
}

func newArena(pd *PD, size int) (arena, error) {
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return arena{}, fmt.Errorf("map %d bytes: %w", size, err)
	}
	adviseHuge(mem)
	mr, err := pd.RegMR(mem)
	if err != nil {
		return arena{}, errors.Join(err, unix.Munmap(mem))
	}
	return arena{mem: mem, mr: mr}, nil
}

// close keeps the mapping unless the device has let go of it.
func (a arena) close() error {
	if err := a.mr.Close(); err != nil && !errors.Is(err, errClosed) {
		return err
	}
	return unix.Munmap(a.mem)
}

// roundUp rounds n up to a multiple of unit, a power of two.
func roundUp(n, unit int) int { return (n + unit - 1) &^ (unit - 1) }
