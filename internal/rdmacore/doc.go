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

// Name is the provider's name.
const Name = "device"
