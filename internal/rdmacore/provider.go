//go:build cgo && linux

package rdmacore

/*
#cgo CFLAGS: -O2 -Wall
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func init() {
	verbs.Register(Name, open)
	verbs.RegisterDevices(Devices)
}

var started struct {
	sync.Mutex
	library, manager bool
}

// open makes sure that there is something to use. Until it has succeeded once, it
// looks anew each time: a module may be loaded meanwhile.
func open() (verbs.Provider, error) {
	if err := load(); err != nil {
		return nil, err
	}
	if err := diagnose(); err != nil {
		return nil, err
	}
	started.Lock()
	defer started.Unlock()
	if started.manager {
		return provider{}, nil
	}
	// librdmacm looks for devices when it is first used. Let it do so while
	// descriptors and permissions are as they should be.
	var ch *C.struct_rdma_event_channel
	if err := errnoOf(int(C.rn_create_event_channel(&ch))); err != nil {
		if errors.Is(err, syscall.ENODEV) {
			return nil, noDriver()
		}
		return nil, opError("rdma_create_event_channel", err)
	}
	syscall.Close(int(ch.fd))
	C.rn_destroy_event_channel(ch)
	started.manager = true
	return provider{}, nil
}

// load opens the libraries, once.
func load() error {
	started.Lock()
	defer started.Unlock()
	if started.library {
		return nil
	}
	if msg := C.rn_load(); msg != nil {
		return missingLibrary(C.GoString(msg))
	}
	started.library = true
	return nil
}

type provider struct{}

func (provider) Name() string { return Name }

func (provider) NewEventChannel() (verbs.EventChannel, error) { return newEventChannel() }

// device is an ibv_context that librdmacm has opened.
type device struct {
	ctx   *C.struct_ibv_context
	name  string
	guid  uint64
	attr  verbs.DeviceAttr
	iwarp bool
	quirk quirk

	mu      sync.Mutex // guards what follows; devices' lock → mu
	uses    int        // PDs and CQs
	removed bool
	pin     **C.struct_ibv_context
	filler  *C.struct_ibv_cq // or nil: takes up a place where siw fails
}

// quirk is what a driver does differently.
type quirk uint8

const (
	quirkNone quirk = iota
	// rxe flushes, when told to go to the error state, what is posted then. What
	// is posted later waits until it is told again.
	quirkRXE
	// siw flushes what is posted when the connection ends, before the call that
	// ends it returns, and nothing that is posted later. It never reports a
	// solicited message to a CQ that is armed for one. Its passive side answers
	// the dialer first and looks for messages next: one that has come in between
	// stays unnoticed until another follows. A send that the end of the connection
	// cuts short it calls a local error. And its library takes the place 0x90000 of
	// what the kernel lets it map for an error of the kernel's: with some 47 connections
	// each further queue fails that the kernel puts there.
	quirkSIW
)

// What the two software drivers call themselves: RXE_VENDOR_ID, SIW_VENDOR_ID.
const (
	vendorRXE = 0xffffff
	vendorSIW = 0x626d74
)

// siwEntry is how many bytes siw has for a completion.
const siwEntry = 32

var devices struct {
	sync.Mutex
	m       map[*C.struct_ibv_context]*device
	removed *C.struct_ibv_context // the last
}

// deviceOf returns the device of a context, the same for each id.
func deviceOf(ctx *C.struct_ibv_context) *device {
	devices.Lock()
	defer devices.Unlock()
	var a C.struct_ibv_device_attr
	if d := devices.m[ctx]; d != nil {
		return d
	}
	C.rn_query_device(ctx, &a) // on failure the limits are 0, and say so
	d := &device{
		ctx:   ctx,
		name:  C.GoString(&ctx.device.name[0]),
		guid:  uint64(a.node_guid),
		iwarp: ctx.device.transport_type == C.IBV_TRANSPORT_IWARP,
	}
	switch a.vendor_id {
	case vendorRXE:
		d.quirk = quirkRXE
	case vendorSIW:
		d.quirk = quirkSIW
	}
	inline := int(C.rn_probe_inline(ctx))
	d.attr = limits(&a, max(inline, 0))
	if inline < 0 {
		return d // nothing can be made of it now: look again next time
	}
	if devices.m == nil {
		devices.m = make(map[*C.struct_ibv_context]*device)
	}
	devices.m[ctx] = d
	devices.removed = nil // or it was at the same address
	return d
}

// limits leaves room for our own: probes in the send queue and in the CQ.
func limits(a *C.struct_ibv_device_attr, inline int) verbs.DeviceAttr {
	return verbs.DeviceAttr{
		MaxQPWR:   int(a.max_qp_wr) - probeRoom,
		MaxSGE:    int(a.max_sge),
		MaxCQE:    int(a.max_cqe) - probeRoom,
		MaxInline: inline,
	}
}

// removed is called when the device is being removed, which waits until it is
// closed. librdmacm closes it with the last use, once it has noticed, which it
// doesn't when no other device is left: so we let go of it ourselves. What comes at
// the same address is another device.
func removed(ctx *C.struct_ibv_context) {
	devices.Lock()
	defer devices.Unlock()
	d := devices.m[ctx]
	delete(devices.m, ctx)
	if devices.removed != ctx { // each id is told
		devices.removed = ctx
		C.rn_unpin_devices(C.rn_pin_devices()) // looks for devices
		if d == nil {
			C.rn_let_go(ctx)
		}
	}
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.removed = true
	if d.uses == 0 {
		C.rn_let_go(ctx)
	}
}

// use keeps librdmacm from closing a removed device while we hold objects of it.
func (d *device) use() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.removed {
		return fmt.Errorf("device %s is removed: %w", d.name, syscall.ENODEV)
	}
	if d.uses++; d.uses == 1 {
		d.pin = C.rn_pin_devices()
		if d.quirk == quirkSIW { // the first object: from place 0 to beyond 0x90000
			d.filler = C.rn_create_cq_alone(d.ctx, 0x90000/siwEntry+1)
		}
	}
	return nil
}

func (d *device) unuse() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.uses--; d.uses == 0 {
		if d.filler != nil {
			C.rn_destroy_cq(d.filler)
			d.filler = nil
		}
		if d.removed && d.pin != nil {
			C.rn_let_go(d.ctx)
		}
		C.rn_unpin_devices(d.pin)
		d.pin = nil
	}
}

func (d *device) Name() string           { return d.name }
func (d *device) Attr() verbs.DeviceAttr { return d.attr }

func (d *device) AllocPD() (verbs.PD, error) {
	if err := d.use(); err != nil {
		return nil, err
	}
	p := &pd{dev: d}
	if err := errnoOf(int(C.rn_alloc_pd(d.ctx, &p.c))); err != nil {
		d.unuse()
		return nil, opError("ibv_alloc_pd", err)
	}
	return p, nil
}

func (d *device) CreateCQ(depth int) (verbs.CQ, error) {
	if depth < 1 || depth > d.attr.MaxCQE {
		return nil, fmt.Errorf("completion queue of %d entries (1 to %d): %w", depth, d.attr.MaxCQE, syscall.EINVAL)
	}
	return newCQ(d, depth)
}

type pd struct {
	dev *device
	c   *C.struct_ibv_pd
}

// RegMR is ibv_reg_mr(3). b must not be memory of the Go heap.
func (p *pd) RegMR(b []byte, access verbs.Access) (verbs.MR, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("memory region of 0 bytes: %w", syscall.EINVAL)
	}
	m := &mr{access: access}
	ret := C.rn_reg_mr(p.c, unsafe.Pointer(&b[0]), C.size_t(len(b)), C.int(access), &m.c)
	if err := errnoOf(int(ret)); err != nil {
		return nil, opError("ibv_reg_mr", err)
	}
	m.lkey, m.rkey = uint32(m.c.lkey), uint32(m.c.rkey)
	return m, nil
}

func (p *pd) Dealloc() error {
	if err := errnoOf(int(C.rn_dealloc_pd(p.c))); err != nil {
		return opError("ibv_dealloc_pd", err)
	}
	p.dev.unuse()
	return nil
}

type mr struct {
	c      *C.struct_ibv_mr
	lkey   uint32
	rkey   uint32
	access verbs.Access
}

func (m *mr) LKey() uint32         { return m.lkey }
func (m *mr) RKey() uint32         { return m.rkey }
func (m *mr) Access() verbs.Access { return m.access }

func (m *mr) Dereg() error {
	return opError("ibv_dereg_mr", errnoOf(int(C.rn_dereg_mr(m.c))))
}

// pollable puts a descriptor of the library's into the netpoller. The caller
// closes the file before the library's object, which then has no descriptor.
func pollable(fd C.int, name string) (*os.File, syscall.RawConn, error) {
	if err := syscall.SetNonblock(int(fd), true); err != nil {
		return nil, nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, raw, nil
}
