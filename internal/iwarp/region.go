package iwarp

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// pd is a protection domain. It has an identity and nothing else, not even the
// list of its regions: an STag of another domain must be told from one of none
// (RFC 5041 section 7.1).
type pd struct{ _ byte }

// mr is a memory region. Its STag is the key for local and for remote use.
type mr struct {
	pd     *pd
	mem    []byte
	base   uint64 // the tagged offset of its first byte: the address
	stag   uint32
	access verbs.Access

	remote sync.RWMutex // read-locked while data is copied for a peer
	gone   bool         // deregistered; guarded by remote
}

// regions has the memory regions of all protection domains. The upper 24 bits of
// an STag are a region's place in it. The lower 8 are the key, which is another
// each time the place is used, so that an STag from before is found out.
// Lookups take no lock.
var regions regionTable

type regionTable struct {
	chunks [maxPlaces / chunkSize]atomic.Pointer[chunk]

	mu    sync.Mutex // serialises changes
	used  uint32     // places that were ever used, from first on
	first uint32     // at random: STags are not to be guessed (RFC 5042)
	free  []uint32   // of these; the longest free is used first
}

type chunk struct {
	mr  [chunkSize]atomic.Pointer[mr]
	key [chunkSize]uint8 // the last
}

const (
	maxPlaces = 1 << 24
	chunkSize = 1 << 12
)

// get returns the region of an STag, or nil if there is none.
func (t *regionTable) get(stag uint32) *mr {
	place := stag >> 8
	c := t.chunks[place/chunkSize].Load()
	if c == nil {
		return nil
	}
	m := c.mr[place%chunkSize].Load()
	if m == nil || m.stag != stag {
		return nil
	}
	return m
}

// add gives a region its STag.
func (t *regionTable) add(m *mr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	place, err := t.take()
	if err != nil {
		return err
	}
	c := t.chunks[place/chunkSize].Load()
	if c == nil {
		c = newChunk()
		t.chunks[place/chunkSize].Store(c)
	}
	key := &c.key[place%chunkSize]
	*key++
	m.stag = place<<8 | uint32(*key)
	c.mr[place%chunkSize].Store(m)
	return nil
}

func newChunk() *chunk {
	c := new(chunk)
	for i := range c.key {
		c.key[i] = uint8(rand.Uint32())
	}
	return c
}

// take returns a place that is free. Place 0 is left out: no STag is 0.
func (t *regionTable) take() (uint32, error) {
	if len(t.free) > 0 {
		place := t.free[0]
		t.free = t.free[1:]
		return place, nil
	}
	if t.used == 0 {
		t.first = rand.Uint32N(maxPlaces - 1)
	}
	if t.used == maxPlaces-1 {
		return 0, fmt.Errorf("%d memory regions: %w", t.used, syscall.ENOMEM)
	}
	t.used++
	return (t.first+t.used)%(maxPlaces-1) + 1, nil
}

// remove makes an STag invalid, and reports whether it was the region's.
func (t *regionTable) remove(m *mr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	place := m.stag >> 8
	c := t.chunks[place/chunkSize].Load()
	if c == nil || !c.mr[place%chunkSize].CompareAndSwap(m, nil) {
		return false
	}
	t.free = append(t.free, place)
	return true
}

func (p *pd) RegMR(b []byte, access verbs.Access) (verbs.MR, error) {
	const all = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead
	switch {
	case len(b) == 0:
		return nil, fmt.Errorf("memory region of 0 bytes: %w", syscall.EINVAL)
	case access&^all != 0:
		return nil, fmt.Errorf("access flags %#x: %w", access, syscall.EINVAL)
	case access&verbs.AccessRemoteWrite != 0 && access&verbs.AccessLocalWrite == 0:
		return nil, fmt.Errorf("remote without local write access: %w", syscall.EINVAL)
	}
	m := &mr{pd: p, mem: b, base: addressOf(b), access: access}
	if err := regions.add(m); err != nil {
		return nil, err
	}
	return m, nil
}

func (p *pd) Dealloc() error { return nil }

// addressOf returns the address of b's first byte.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// covers reports whether the entry lies within the memory region it names, and
// the region grants access.
func (p *pd) covers(s verbs.SGE, access verbs.Access) bool {
	m := regions.get(s.LKey)
	if m == nil || m.pd != p || m.access&access != access {
		return false
	}
	if len(s.Data) == 0 {
		return true
	}
	base, at := addressOf(m.mem), addressOf(s.Data)
	return len(s.Data) <= len(m.mem) && at >= base && at-base <= uint64(len(m.mem)-len(s.Data))
}

func (m *mr) LKey() uint32         { return m.stag }
func (m *mr) RKey() uint32         { return m.stag }
func (m *mr) Access() verbs.Access { return m.access }

// Dereg makes the STag invalid. When it returns, nothing is copied from or to the
// region for a peer any more.
func (m *mr) Dereg() error {
	if !regions.remove(m) {
		return fmt.Errorf("memory region is deregistered: %w", syscall.EINVAL)
	}
	m.remote.Lock()
	defer m.remote.Unlock()
	m.gone = true
	return nil
}
