package qp

import (
	"fmt"
	"sync/atomic"
)

// Who holds a block.
const (
	blockFree  uint32 = iota // the pool
	blockHeld                // whoever must call Release
	blockOwned               // the owner that SetOwner named
	blockGoing               // Release in progress
)

// Buffer is a block of registered memory out of a Pool: headroom for a header,
// and a payload. The payload is a window that its holder may move, because a
// received message may have its header anywhere.
//
// A buffer has one holder at a time, and only the holder may call its methods.
// Who hands it to another goroutine synchronises with it.
type Buffer struct {
	pool  *Pool
	block []byte
	lkey  uint32
	off   int // the payload is block[off:off+n]
	n     int
	owner func(*Buffer)
	next  *Buffer // in the pool's free list
	state atomic.Uint32
}

// Bytes returns the payload. It is the holder's until Release.
func (b *Buffer) Bytes() []byte { return b.block[b.off : b.off+b.n : b.off+b.n] }

// Len returns the length of the payload in bytes.
func (b *Buffer) Len() int { return b.n }

// Cap returns the pool's BlockSize in bytes: the longest payload that leaves
// the headroom free.
func (b *Buffer) Cap() int { return b.pool.cfg.BlockSize }

// Resize sets the length of the payload to n bytes; where it starts stays. It
// panics if n is negative or does not fit into the block.
func (b *Buffer) Resize(n int) { b.SetWindow(b.off, n) }

// SetWindow makes n bytes from offset off of the whole block the payload. It
// panics if they are not inside of the block.
func (b *Buffer) SetWindow(off, n int) {
	if off < 0 || n < 0 || n > len(b.block)-off {
		panic(fmt.Sprintf("qp: Buffer: payload [%d:%d+%d] is outside of the block of %d bytes", off, off, n, len(b.block)))
	}
	b.off, b.n = off, n
}

// Block returns the whole block: headroom and room for the payload.
func (b *Buffer) Block() []byte { return b.block }

// Header returns the headroom.
func (b *Buffer) Header() []byte {
	h := b.pool.cfg.Headroom
	return b.block[:h:h]
}

// LKey is the key that names the block's memory region in an SGE.
func (b *Buffer) LKey() uint32 { return b.lkey }

// SGE returns the scatter/gather entry of what comes before the payload and the
// payload: a header and its data, to be sent.
func (b *Buffer) SGE() SGE { return SGE{Data: b.block[:b.off+b.n], LKey: b.lkey} }

// BlockSGE returns the scatter/gather entry of the whole block, to be received
// into.
func (b *Buffer) BlockSGE() SGE { return SGE{Data: b.block, LKey: b.lkey} }

// Release gives the block back, to its owner if SetOwner named one and else to
// the pool. The holder must not use it or its bytes any more. Releasing twice
// panics.
func (b *Buffer) Release() {
	// The owner is read after this succeeded: a second Release must not look.
	if !b.state.CompareAndSwap(blockHeld, blockGoing) {
		panic("qp: Buffer: Release of a buffer that the caller does not hold (released twice?)")
	}
	if b.owner != nil {
		b.state.Store(blockOwned)
		b.owner(b)
		return
	}
	b.state.Store(blockFree)
	b.pool.put(b)
}

// SetOwner makes the caller, who holds the buffer, its owner: one that keeps
// the block for longer than a holder does, as a connection keeps its receive
// blocks. The owner may Lend it or Free it, and a borrower's Release calls
// released, in the borrower's goroutine. Keep one func value for many buffers:
// making it may allocate.
func (b *Buffer) SetOwner(released func(*Buffer)) {
	if released == nil {
		panic("qp: Buffer: SetOwner(nil): an owner gives a buffer up with Free")
	}
	if !b.state.CompareAndSwap(blockHeld, blockGoing) {
		panic("qp: Buffer: SetOwner of a buffer that the caller does not hold")
	}
	b.owner = released
	b.state.Store(blockOwned)
}

// Lend makes the buffer, which the caller owns, a borrower's to Release.
func (b *Buffer) Lend() {
	if !b.state.CompareAndSwap(blockOwned, blockHeld) {
		panic("qp: Buffer: Lend of a buffer that the caller does not own")
	}
}

// Free ends the ownership and gives the block back to the pool. It panics for a
// buffer that is lent, or that has no owner.
func (b *Buffer) Free() {
	if !b.state.CompareAndSwap(blockOwned, blockGoing) {
		panic("qp: Buffer: Free of a buffer that the caller does not own (lent, or freed twice?)")
	}
	b.owner = nil
	b.state.Store(blockFree)
	b.pool.put(b)
}

// Of reports whether b is a block of pool p.
func (b *Buffer) Of(p *Pool) bool { return b.pool == p }

// AfterHeader reports whether the payload begins where the headroom ends, so
// that SGE is a header and the payload.
func (b *Buffer) AfterHeader() bool { return b.off == b.pool.cfg.Headroom }
