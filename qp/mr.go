package qp

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"syscall"
	"unsafe"

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
// the local adapter reading and writing, and no peer anything. b must be memory
// outside the Go heap, such as unix.Mmap returns, and stay mapped until the region
// is closed.
//
// Where the memory may not be pinned (ENOMEM, EPERM) the error is a
// *MemlockError.
func (p *PD) RegMR(b []byte) (*MR, error) { return p.regMR(b, AccessLocalWrite) }

// RegRemoteMR is RegMR for memory that peers may access as well, as far as access
// says: AccessRemoteRead lets them RDMA READ it, AccessRemoteWrite, which needs
// AccessLocalWrite too, RDMA WRITE it. That holds for the peers of all queue pairs
// in the domain, who need nothing more than the region's RKey and Addr; any other
// access is EINVAL. An access is noticed by nobody here,
// and ended by Close alone. Without a device, it is done while somebody polls or
// waits on the queue pair's CQ.
func (p *PD) RegRemoteMR(b []byte, access Access) (*MR, error) {
	const all = AccessLocalWrite | AccessRemoteWrite | AccessRemoteRead
	switch {
	case access&^all != 0:
		return nil, opError("register memory", fmt.Errorf("access flags %#x: %w", access&^all, syscall.EINVAL))
	case access&AccessRemoteWrite != 0 && access&AccessLocalWrite == 0:
		return nil, opError("register memory", fmt.Errorf("remote write access without local write access: %w", syscall.EINVAL))
	}
	return p.regMR(b, access)
}

func (p *PD) regMR(b []byte, access Access) (*MR, error) {
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
	return &MR{v: v, pd: p, mem: b}, nil
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
	v   verbs.MR
	pd  *PD
	mem []byte

	mu     sync.Mutex
	closed bool
}

// LKey is the key that names the region in an SGE.
func (m *MR) LKey() uint32 { return m.v.LKey() }

// RKey is the key that names the region to peers. They can use it as far as
// RegRemoteMR allows, and until Close.
func (m *MR) RKey() uint32 { return m.v.RKey() }

// Addr is the address of the region's first byte, by which peers name it.
func (m *MR) Addr() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.mem)))) }

// Access returns the rights that the region grants: AccessLocalWrite, or what
// RegRemoteMR was told.
func (m *MR) Access() Access { return m.v.Access() }

// Len returns the size of the region in bytes.
func (m *MR) Len() int { return len(m.mem) }

// Close ends the registration, ibv_dereg_mr(3). No outstanding work request may
// use the region. The memory is the caller's again: peers have no access any more
// when it returns, and one that tries loses its connection.
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
