// Package iwarp is the embedded provider: RDMA in software, as iWARP over TCP
// (MPA, RFC 5044 and RFC 6581; DDP, RFC 5041; RDMAP, RFC 5040). It needs no
// device, no privileges and no cgo, and speaks to any iWARP peer.
//
// Nothing runs in the background for an idle connection. Progress is made by
// whoever polls or waits on the completion queue (rx.go) or posts (tx.go); only
// a full socket, connection set-up and connection end use goroutines.
//
// Lock order: id.mu → rx.mu → tx.mu → cq.mu, and id.mu → listener.mu. An id's
// events lock and then its channel's are innermost, and taken with any of them
// held. watcher.mu is taken with id.mu held at most.
package iwarp

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// Name is the provider's name.
const Name = "iwarp"

func init() {
	verbs.Register(Name, func() (verbs.Provider, error) { return provider{}, nil })
}

type provider struct{}

func (provider) Name() string { return Name }

func (provider) NewEventChannel() (verbs.EventChannel, error) { return newEventChannel() }

// device stands in for an adapter; all connections share it.
type device struct{}

// maxMessage keeps message offsets well within their 32 bits.
const maxMessage = 1 << 30

// The other limits are memory's and bookkeeping's, not the protocol's.
var attr = verbs.DeviceAttr{MaxQPWR: 1 << 14, MaxSGE: 32, MaxCQE: 1 << 16, MaxInline: maxMessage, WaitPolls: true}

func (device) Name() string               { return Name }
func (device) Attr() verbs.DeviceAttr     { return attr }
func (device) AllocPD() (verbs.PD, error) { return &pd{}, nil }

func (device) CreateCQ(depth int) (verbs.CQ, error) {
	if depth < 1 || depth > attr.MaxCQE {
		return nil, fmt.Errorf("completion queue of %d entries (1 to %d): %w", depth, attr.MaxCQE, syscall.EINVAL)
	}
	return newCQ(depth), nil
}

// pd is a protection domain: it knows which memory a work request may name.
type pd struct {
	mu  sync.Mutex            // serialises changes
	mrs atomic.Pointer[[]*mr] // index is LKey>>8; nil where deregistered
}

type mr struct {
	pd     *pd
	mem    []byte
	lkey   uint32
	access verbs.Access
}

func (p *pd) RegMR(b []byte, access verbs.Access) (verbs.MR, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("memory region of 0 bytes: %w", syscall.EINVAL)
	}
	if access&(verbs.AccessRemoteRead|verbs.AccessRemoteWrite) != 0 {
		return nil, fmt.Errorf("remote access to memory: %w", syscall.EOPNOTSUPP)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var old []*mr
	if l := p.mrs.Load(); l != nil {
		old = *l
	}
	i := 0
	for i < len(old) && old[i] != nil {
		i++
	}
	mrs := append([]*mr(nil), old...)
	if i == len(mrs) {
		mrs = append(mrs, nil)
	}
	m := &mr{pd: p, mem: b, lkey: uint32(i+1) << 8, access: access}
	mrs[i] = m
	p.mrs.Store(&mrs)
	return m, nil
}

func (p *pd) Dealloc() error { return nil }

// covers reports whether the entry lies within the memory region it names, and
// the region grants access.
func (p *pd) covers(s verbs.SGE, access verbs.Access) bool {
	mrs := p.mrs.Load()
	i := int(s.LKey>>8) - 1
	if mrs == nil || i < 0 || i >= len(*mrs) {
		return false
	}
	m := (*mrs)[i]
	if m == nil || m.lkey != s.LKey || m.access&access != access {
		return false
	}
	if len(s.Data) == 0 {
		return true
	}
	base, at := uintptr(unsafe.Pointer(&m.mem[0])), uintptr(unsafe.Pointer(&s.Data[0]))
	return len(s.Data) <= len(m.mem) && at >= base && at-base <= uintptr(len(m.mem)-len(s.Data))
}

func (m *mr) LKey() uint32         { return m.lkey }
func (m *mr) Access() verbs.Access { return m.access }

func (m *mr) Dereg() error {
	m.pd.mu.Lock()
	defer m.pd.mu.Unlock()
	mrs := append([]*mr(nil), *m.pd.mrs.Load()...)
	i := m.lkey>>8 - 1
	if mrs[i] != m {
		return fmt.Errorf("memory region is deregistered: %w", syscall.EINVAL)
	}
	mrs[i] = nil
	m.pd.mrs.Store(&mrs)
	return nil
}
