package cm

import (
	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/qp"
)

// ConnParam is what rdma_connect(3) and rdma_accept(3) are told.
type ConnParam = verbs.ConnParam

// MaxPrivateData is the most private data, in bytes, that every link layer
// carries in a connect request or its reply.
const MaxPrivateData = verbs.MaxPrivateData

// EventType is an rdma_cm_event_type. Its String is librdmacm's name without
// RDMA_CM_EVENT_.
type EventType = verbs.EventType

// The events of rdma_get_cm_event(3).
const (
	EventAddrResolved    = verbs.EventAddrResolved
	EventAddrError       = verbs.EventAddrError
	EventRouteResolved   = verbs.EventRouteResolved
	EventRouteError      = verbs.EventRouteError
	EventConnectRequest  = verbs.EventConnectRequest
	EventConnectResponse = verbs.EventConnectResponse
	EventConnectError    = verbs.EventConnectError
	EventUnreachable     = verbs.EventUnreachable
	EventRejected        = verbs.EventRejected
	EventEstablished     = verbs.EventEstablished
	EventDisconnected    = verbs.EventDisconnected
	EventDeviceRemoval   = verbs.EventDeviceRemoval
	EventMulticastJoin   = verbs.EventMulticastJoin
	EventMulticastError  = verbs.EventMulticastError
	EventAddrChange      = verbs.EventAddrChange
	EventTimewaitExit    = verbs.EventTimewaitExit
)

// DeviceInfo describes a device, Port one of its ports and GID an entry of a port's
// GID table: what ibv_devinfo(1) and rdma(8) show of them.
type (
	DeviceInfo = verbs.DeviceInfo
	Port       = verbs.Port
	GID        = verbs.GID
)

// Endpoint says over what an id communicates: device, port, transport, link layer
// and, but for iWARP, the local GID.
type Endpoint = verbs.Endpoint

// Devices describes the RDMA devices of this machine. If none can be used, the
// error says what is missing and how to get it; devices that exist come with it.
// Providers in software have no device and need none.
func Devices() ([]DeviceInfo, error) {
	infos, err := verbs.Devices()
	return infos, opError("get devices", err)
}

// LimitError reports a value beyond a limit, and what to do about it. It wraps
// EINVAL.
type LimitError = qp.LimitError

// Providers returns the names that NewEventChannel knows, sorted.
func Providers() []string { return verbs.Names() }
