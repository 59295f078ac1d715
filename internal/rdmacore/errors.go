//go:build cgo && linux

package rdmacore

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// errnoOf turns the result of a shim call into an error.
func errnoOf(ret int) error {
	if ret >= 0 {
		return nil
	}
	return syscall.Errno(-ret)
}

// opError names the call, as its manual page does.
func opError(call string, err error) error {
	switch err {
	case nil:
		return nil
	case syscall.EACCES:
		// ib_safe_file_access in the kernel.
		return fmt.Errorf("%s: %w (the kernel takes calls only with the credentials that the device was opened with: change user or capabilities before)", call, err)
	case syscall.EAGAIN:
		// rdmacg_try_charge in the kernel. Go takes EAGAIN for a timeout.
		return fmt.Errorf("%s: %w (this process's cgroup allows no more objects on the device: raise hca_object in its rdma.max)", call, syscall.ENOBUFS)
	}
	return fmt.Errorf("%s: %w", call, err)
}

// setupError says what is missing on this machine, and how to get it.
type setupError struct {
	what, fix string
	errno     syscall.Errno
}

func (e *setupError) Error() string { return fmt.Sprintf("%s (%s): %v", e.what, e.fix, e.errno) }
func (e *setupError) Unwrap() error { return e.errno }

// Where the kernel shows its devices. Tests put others in their place.
var (
	sysClass = "/sys/class"
	devDir   = "/dev/infiniband"
)

const (
	fixLibrary = "install rdma-core: apt install librdmacm1 ibverbs-providers, or dnf install librdmacm libibverbs"
	fixDevice  = "load the adapter's driver; without an adapter, Soft-RoCE: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"
)

// missingLibrary reports what dlopen(3) could not find.
func missingLibrary(dlerror string) error {
	return &setupError{"rdma-core cannot be loaded: " + dlerror, fixLibrary, syscall.ENODEV}
}

// diagnose looks for what a program needs to use RDMA devices: modules, device
// nodes and the right to open them. It returns nil if it finds nothing amiss.
func diagnose() error {
	devices, err := os.ReadDir(filepath.Join(sysClass, "infiniband"))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return &setupError{"no RDMA device: the kernel has no RDMA subsystem loaded", fixDevice, syscall.ENODEV}
	case err == nil && len(devices) == 0:
		return &setupError{"no RDMA device", fixDevice, syscall.ENODEV}
	}
	if err := canOpen("rdma_cm", "rdma_ucm"); err != nil {
		return err
	}
	nodes, _ := filepath.Glob(filepath.Join(sysClass, "infiniband_verbs", "uverbs*"))
	if len(nodes) == 0 {
		return &setupError{"the kernel module ib_uverbs is not loaded", "modprobe ib_uverbs", syscall.ENODEV}
	}
	var first error
	for _, n := range nodes {
		err := canOpen(filepath.Base(n), "ib_uverbs")
		if err == nil {
			return nil // one usable device is enough
		}
		if first == nil {
			first = err
		}
	}
	return first
}

// canOpen opens a node of /dev/infiniband, which changes nothing.
func canOpen(node, module string) error {
	path := filepath.Join(devDir, node)
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	switch err {
	case nil:
		syscall.Close(fd)
		return nil
	case syscall.ENOENT, syscall.ENXIO, syscall.ENODEV:
		fix := "modprobe " + module
		if _, err := os.Stat(filepath.Join(sysClass, "misc", node)); err == nil || strings.HasPrefix(node, "uverbs") {
			fix = "the kernel has it, but the node is missing: start udev; in a container, pass --device=" + devDir
		}
		return &setupError{path + " does not exist", fix, syscall.ENODEV}
	case syscall.EACCES, syscall.EPERM:
		fix := "rdma-core's udev rules make it mode 0666; else chmod 0666 " + path + ", or run as its owner; in a container, pass --device=" + devDir
		return &setupError{"no permission to open " + path, fix, err.(syscall.Errno)}
	}
	return opError("open "+path, err)
}

// noDriver is for devices that the kernel has and libibverbs does not see.
func noDriver() error {
	return &setupError{"the kernel has RDMA devices, but libibverbs has no driver for them", fixLibrary, syscall.ENODEV}
}

// rejectReasons names the reasons of the InfiniBand specification, volume 1,
// table 108, that a connection manager gives for a refusal.
var rejectReasons = map[int]string{
	1: "no queue pair available", 2: "no end-to-end context available", 3: "no resources available", 4: "timeout",
	5: "unsupported request", 6: "invalid communication id", 8: "nobody listens", 9: "invalid transport service type",
	10: "stale connection", 12: "invalid GID", 14: "invalid primary path", 16: "invalid hop limit or MTU",
	28: "rejected by the peer's program", 33: "vendor id not supported",
}

// rejectError is the status of a REJECTED event on InfiniBand and RoCE.
type rejectError struct{ reason int }

func (e *rejectError) Error() string {
	if text := rejectReasons[e.reason]; text != "" {
		return text
	}
	return fmt.Sprintf("rejected for reason %d", e.reason)
}

// Unwrap returns ECONNREFUSED.
func (e *rejectError) Unwrap() error { return syscall.ECONNREFUSED }

// eventError gives the reason that an event reports: an errno, or for REJECTED
// on InfiniBand and RoCE a reason of its own.
func eventError(t verbs.EventType, status int) error {
	switch {
	case status == 0:
		return nil
	case status > 0 && t == verbs.EventRejected:
		return &rejectError{status}
	}
	if status < 0 {
		status = -status
	}
	errno := syscall.Errno(status)
	switch {
	case t == verbs.EventRejected && errno == syscall.ECONNRESET:
		// What siw says when the peer's program rejects.
		return fmt.Errorf("the peer ended the connection's set-up: %w", syscall.ECONNREFUSED)
	case t == verbs.EventAddrError && errno == syscall.ETIMEDOUT:
		return fmt.Errorf("nobody answered ARP or neighbour discovery: %w", syscall.EHOSTUNREACH)
	case t == verbs.EventAddrError && errno == syscall.ENODEV:
		return fmt.Errorf("the route to the address leads over no RDMA device: %w", errno)
	}
	return errno
}

// connectFailure says with which event a connect failed that failed at once, as
// rdma_cm does for one that fails later. It returns false for an error of the
// caller's.
func connectFailure(err error) (verbs.EventType, bool) {
	var errno syscall.Errno
	errors.As(err, &errno)
	switch errno {
	case syscall.ECONNREFUSED, syscall.ECONNRESET:
		return verbs.EventRejected, true
	case syscall.ETIMEDOUT, syscall.EHOSTUNREACH, syscall.ENETUNREACH:
		return verbs.EventUnreachable, true
	case syscall.ECONNABORTED, syscall.EPROTO:
		return verbs.EventConnectError, true
	}
	return 0, false
}
