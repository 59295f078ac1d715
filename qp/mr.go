package qp

import (
	"errors"
	"strconv"
	"sync"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
	"golang.org/x/sys/unix"
)

// PD is a protection domain: what memory regions and queue pairs must share to
// be used together. Its methods may be called concurrently.
type PD struct {
	v   verbs.PD
	dev Device

	mu       sync.Mutex
	closed   bool
	mrs, qps int // alive
}

// Device returns the device that the domain is on.
func (p *PD) Device() Device { return p.dev }

// RegMR registers b for use in work requests, ibv_reg_mr(3). The region grants
// the local adapter reading and writing, and no peer anything: there is no way
// to ask for more. b must be memory outside the Go heap, such as unix.Mmap
// returns, and stay mapped until the region is closed.
//
// Where the memory may not be pinned (ENOMEM, EPERM) the error is a
// *MemlockError.
func (p *PD) RegMR(b []byte) (*MR, error) {
	const access = AccessLocalWrite
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, opError("register memory", errClosed)
	}
	p.mrs++ // before the unlock, so that Close sees it
	p.mu.Unlock()

	// Pinning takes long, and not under the lock.
	v, err := p.v.RegMR(b, access)
	if err != nil {
		p.release(&p.mrs)
		if errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EPERM) {
			err = &MemlockError{Bytes: len(b), Limit: memlockLimit(), Err: err}
		}
		return nil, opError("register memory", err)
	}
	return &MR{v: v, pd: p, size: len(b)}, nil
}

// Close frees the domain, ibv_dealloc_pd(3). While regions or queue pairs live
// in it, it returns a *BusyError.
func (p *PD) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return opError("dealloc pd", errClosed)
	}
	if p.mrs > 0 || p.qps > 0 {
		return opError("dealloc pd", &BusyError{Object: "protection domain", MRs: p.mrs, QPs: p.qps})
	}
	if err := p.v.Dealloc(); err != nil {
		return opError("dealloc pd", err)
	}
	p.closed = true
	return nil
}

// holdQP counts a queue pair that is about to be created.
func (p *PD) holdQP() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosed
	}
	p.qps++
	return nil
}

// release takes one off a count.
func (p *PD) release(count *int) {
	p.mu.Lock()
	*count--
	p.mu.Unlock()
}

// MR is a memory region, ibv_mr. Its methods may be called concurrently.
type MR struct {
	v    verbs.MR
	pd   *PD
	size int

	mu     sync.Mutex
	closed bool
}

// LKey is the key that names the region in an SGE.
func (m *MR) LKey() uint32 { return m.v.LKey() }

// Access returns the rights that the region grants: AccessLocalWrite.
func (m *MR) Access() Access { return m.v.Access() }

// Len returns the size of the region in bytes.
func (m *MR) Len() int { return m.size }

// Close ends the registration, ibv_dereg_mr(3). No outstanding work request may
// use the region. The memory is the caller's again.
func (m *MR) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return opError("deregister memory", errClosed)
	}
	if err := m.v.Dereg(); err != nil {
		return opError("deregister memory", err)
	}
	m.closed = true
	m.pd.release(&m.pd.mrs)
	return nil
}

// memlockLimit returns RLIMIT_MEMLOCK in words.
func memlockLimit() string {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil {
		return "unknown (" + err.Error() + ")"
	}
	if lim.Cur == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return strconv.FormatUint(lim.Cur, 10) + " bytes"
}
