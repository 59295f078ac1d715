//go:build !cgo || !linux

package rdmacore

import (
	"fmt"
	"runtime"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func init() {
	verbs.Register(Name, func() (verbs.Provider, error) { return nil, errUnavailable() })
	verbs.RegisterDevices(func() ([]verbs.DeviceInfo, error) { return nil, errUnavailable() })
}

func errUnavailable() error {
	if runtime.GOOS != "linux" {
		return fmt.Errorf("RDMA devices are supported on Linux only, not on %s: %w", runtime.GOOS, syscall.ENODEV)
	}
	return fmt.Errorf("this program was built without cgo (CGO_ENABLED=0), which RDMA devices need: build it with CGO_ENABLED=1 and a C compiler: %w", syscall.ENODEV)
}
