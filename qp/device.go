package qp

import (
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// Device is one adapter, or a software stand-in: an ibv_context. Devices are
// comparable with ==, and equal if they are the same adapter, so a Device can
// be a map key. Its methods may be called concurrently.
type Device struct{ v verbs.Device }

// NewDevice wraps a provider's device. It is for package cm; everybody else
// gets devices from cm.ID.Device.
func NewDevice(v verbs.Device) Device { return Device{v} }

// Name is the device's name, such as "rxe0".
func (d Device) Name() string { return d.v.Name() }

// Attr returns the device's limits.
func (d Device) Attr() DeviceAttr { return d.v.Attr() }

// AllocPD makes a protection domain, ibv_alloc_pd(3).
func (d Device) AllocPD() (*PD, error) {
	v, err := d.v.AllocPD()
	if err != nil {
		return nil, opError("alloc pd", err)
	}
	return &PD{v: v, dev: d}, nil
}

// NewCQ makes a completion queue of depth entries, ibv_create_cq(3), with a
// completion channel of its own.
func (d Device) NewCQ(depth int) (*CQ, error) {
	if err := checkLimit("completion queue entries", depth, 1, d.Attr().MaxCQE-1, "ask for less, or split the work over several QPs"); err != nil {
		return nil, opError("create cq", err)
	}
	v, err := d.v.CreateCQ(depth + 1) // one for the drain marker
	if err != nil {
		return nil, opError("create cq", err)
	}
	return &CQ{v: v, depth: depth}, nil
}

// checkLimit returns a *LimitError unless min <= value <= max.
func checkLimit(what string, value, min, max int, fix string) error {
	switch {
	case value < min:
		return &LimitError{What: what, Value: int64(value), Limit: int64(min), Fix: "ask for more", Errno: syscall.EINVAL}
	case value > max:
		return &LimitError{What: what, Value: int64(value), Limit: int64(max), Fix: fix, Errno: syscall.EINVAL}
	}
	return nil
}
