//go:build cgo && linux

package rdmacore

/*
#cgo noescape poll_cq
#cgo nocallback poll_cq
#cgo noescape rn_req_notify_cq
#cgo nocallback rn_req_notify_cq
#cgo noescape rn_get_cq_event
#cgo nocallback rn_get_cq_event
#include <stdlib.h>
#include "shim.h"

// poll_cq tries a few times. Arguments that are no pointers save cgo checks.
static int poll_cq(uintptr_t cq, int n, uintptr_t wc, int tries)
{
	int got = 0;

	while (got == 0 && tries-- > 0)
		got = rn_poll_cq((struct ibv_cq *)cq, n, (struct ibv_wc *)wc);
	return got;
}
*/
import "C"

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// cq is an ibv_cq with a completion channel of its own, whose descriptor is in
// the netpoller.
type cq struct {
	dev *device
	c   *C.struct_ibv_cq
	ch  *C.struct_ibv_comp_channel

	mu    sync.Mutex // one Poll at a time; guards what follows
	batch []C.struct_ibv_wc
	tries C.int      // of the next Poll
	early []verbs.WC // taken from the device before anybody polled
	qp    *qp        // or nil

	file   *os.File
	raw    syscall.RawConn
	wake   atomic.Bool // a Wake that nobody has seen yet
	waitFn func(uintptr) bool
	failed error // of the Wait in progress
}

// pollBatch is how many completions one crossing into C takes.
const pollBatch = 32

// spinTries is how often a Poll that follows one in vain looks at the queue.
const spinTries = 8

// handle passes a pointer to C memory as a number.
func handle(p unsafe.Pointer) C.uintptr_t { return C.uintptr_t(uintptr(p)) }

func newCQ(d *device, depth int) (*cq, error) {
	c := &cq{dev: d, tries: 1}
	if err := d.use(); err != nil {
		return nil, err
	}
	ret := C.rn_create_cq(d.ctx, C.int(depth+probeRoom), &c.ch, &c.c)
	if err := errnoOf(int(ret)); err != nil {
		d.unuse()
		return nil, opError("ibv_create_cq", err)
	}
	var err error
	fd := c.ch.fd
	if c.file, c.raw, err = pollable(fd, "rdma completion channel"); err != nil {
		C.rn_destroy_cq(c.c)
		syscall.Close(int(fd))
		C.rn_destroy_comp_channel(c.ch)
		d.unuse()
		return nil, err
	}
	c.batch = unsafe.Slice((*C.struct_ibv_wc)(calloc(pollBatch, C.sizeof_struct_ibv_wc)), pollBatch)
	c.waitFn = c.ready
	return c, nil
}

func (c *cq) Poll(wc []verbs.WC) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := copy(wc, c.early); n > 0 {
		c.early = c.early[n:]
		return n, nil
	}
	return c.poll(wc)
}

// gather takes from the device what is there, for the next Poll. c.mu is held.
func (c *cq) gather() {
	var wc [pollBatch]verbs.WC
	for n := len(wc); n == len(wc); {
		n, _ = c.poll(wc[:]) // whoever polls will see the error
		c.early = append(c.early, wc[:n]...)
	}
}

// poll is Poll of the device. c.mu is held.
func (c *cq) poll(wc []verbs.WC) (int, error) {
	if c.qp == nil {
		return 0, nil
	}
	n := 0
	for n < len(wc) {
		flushed := c.qp.flushed.Load() // before the device is found to be empty
		want := min(len(wc)-n, len(c.batch))
		got := int(C.poll_cq(handle(unsafe.Pointer(c.c)), C.int(want), handle(unsafe.Pointer(&c.batch[0])), c.tries))
		if got < 0 {
			return n, opError("ibv_poll_cq", syscall.EIO)
		}
		// Who finds nothing and comes again, spins.
		c.tries = 1
		if n+got == 0 {
			c.tries = spinTries
		}
		for k := range c.batch[:got] {
			if c.qp.complete(&c.batch[k], &wc[n]) {
				n++
			}
		}
		if got < want {
			if flushed && n < len(wc) {
				n += c.qp.flush(wc[n:])
			}
			break
		}
	}
	return n, nil
}

func (c *cq) Arm(solicitedOnly bool) error {
	var only C.int
	if solicitedOnly && c.dev.quirk != quirkSIW {
		only = 1
	}
	return opError("ibv_req_notify_cq", errnoOf(int(C.rn_req_notify_cq(c.c, only))))
}

// Wait parks in the netpoller. It looks for an event first: the netpoller
// reports edges, and forgets those from before.
func (c *cq) Wait() error {
	c.failed = nil
	err := c.raw.Read(c.waitFn)
	if c.failed != nil {
		return opError("ibv_get_cq_event", c.failed)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// The mark goes first: a Wake that comes between the two leaves its own
		// for the next Wait.
		c.wake.Store(false)
		return c.file.SetReadDeadline(time.Time{})
	}
	return err
}

// ready runs in the netpoller's read loop: it reports whether to stop waiting.
func (c *cq) ready(uintptr) bool {
	if c.wake.Swap(false) {
		return true
	}
	ret := int(C.rn_get_cq_event(c.ch))
	c.failed = errnoOf(ret)
	return ret != 0
}

func (c *cq) Wake() {
	c.wake.Store(true)
	_ = c.file.SetReadDeadline(longAgo)
}

func (c *cq) Destroy() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := errnoOf(int(C.rn_destroy_cq(c.c))); err != nil {
		return opError("ibv_destroy_cq", err)
	}
	err := c.file.Close()
	C.rn_destroy_comp_channel(c.ch)
	free(unsafe.Pointer(&c.batch[0]))
	c.batch = nil
	c.dev.unuse()
	return err
}

// calloc returns zeroed C memory. Like Go's own, it does not fail.
func calloc(n, size C.size_t) unsafe.Pointer {
	p := C.calloc(n, size)
	if p == nil {
		panic("rdmacore: out of memory")
	}
	return p
}

func free(p unsafe.Pointer) { C.free(p) }
