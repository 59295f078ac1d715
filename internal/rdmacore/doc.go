// Package rdmacore is the provider "device": RDMA adapters, and the kernel's
// software devices, through rdma-core's librdmacm and libibverbs. The libraries
// are opened with dlopen(3) at first use and declared in abi.h, so building
// needs no RDMA headers, and a binary runs where rdma-core is not installed.
// Without cgo, or on another system than Linux, Open says so.
//
// Lock order: id.mu → eventChannel.mu of the older channel → of the younger;
// cq.mu → eventChannel.mu. The locks of a queue pair's two queues, and of its
// keepalive, are innermost.
package rdmacore

import (
	"net/netip"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// Name is the provider's name.
const Name = "device"

// Info describes one device, for people.
type Info struct {
	Name      string           // such as "mlx5_0"
	Transport string           // "InfiniBand", "RoCE" or "iWARP"
	Attr      verbs.DeviceAttr // the usable limits; zero if Err is set
	Ports     []Port
	Err       error // why the device can't be used
}

// Port is a port of a device.
type Port struct {
	Num       int
	State     string // "ACTIVE", "DOWN", ...
	LinkLayer string // "Ethernet" or "InfiniBand"
	Interface string // network interface, such as "eth0", or ""
	Addrs     []netip.Prefix
	GIDs      []GID
}

// GID is an entry of a port's GID table.
type GID struct {
	Index int
	Type  string     // "RoCE v2", "IB/RoCE v1", ...
	Addr  netip.Addr // IPv4 addresses are in IPv6 form
}

// Endpoint says over what an id communicates.
type Endpoint struct {
	Device    string
	Port      int
	Transport string
	LinkLayer string
	GID       netip.Addr // local; not valid for iWARP
}
