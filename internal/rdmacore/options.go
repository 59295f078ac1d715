//go:build cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"syscall"
)

func (i *id) SetAFOnly(on bool) error    { return i.setInt(C.RDMA_OPTION_ID_AFONLY, on) }
func (i *id) SetReuseAddr(on bool) error { return i.setInt(C.RDMA_OPTION_ID_REUSEADDR, on) }

// SetTOS is for the packets of RoCE and the service level of InfiniBand. siw takes
// it and sends TCP's default.
func (i *id) SetTOS(tos uint8) error { return i.setByte(C.RDMA_OPTION_ID_TOS, tos) }

// SetAckTimeout fails on an iWARP device, where the kernel would take it for
// nothing. Before the device is known it can't tell.
func (i *id) SetAckTimeout(n uint8) error {
	if d, ok := i.Device().(*device); ok && d.iwarp {
		return fmt.Errorf("ack time-out on an iWARP device: %w", syscall.EOPNOTSUPP)
	}
	return i.setByte(C.RDMA_OPTION_ID_ACK_TIMEOUT, n)
}

func (i *id) setByte(option C.int, value uint8) error {
	return i.call("rdma_set_option", func() C.int { return C.rn_set_byte(i.c, option, C.uint8_t(value)) })
}

func (i *id) setInt(option C.int, on bool) error {
	var value C.int
	if on {
		value = 1
	}
	return i.call("rdma_set_option", func() C.int { return C.rn_set_int(i.c, option, value) })
}
