package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/cm"
)

// Bounds of the steps of Close, besides the linger time. Variables for tests.
var (
	disconnectTimeout = time.Second     // for the peer's side of the disconnect
	flushTimeout      = time.Second     // for a device to flush its queues
	destroyTimeout    = 5 * time.Second // for an event in the event loop's hands
)

// Close ends the connection. What was written before is sent first, and the peer
// reads it and then io.EOF; Close takes the linger time for that at most, and
// then resets the connection and says so. It gives the peer's side up to a second
// to end too, and does not wait for the peer's application to read. Blocked calls of other goroutines return net.ErrClosed, as
// does a second Close.
func (c *Conn) Close() error {
	if !c.beginClose() {
		return opError(opClose, c.local, c.remote, net.ErrClosed)
	}
	// 1. Fail new and blocked calls; wait until they have left. Those that still
	// stand at the locks find the connection closed.
	c.wakeup(&c.wait.read)
	c.wakeup(&c.wait.write)
	for _, mu := range []*sync.Mutex{&c.readMu, &c.writeMu} {
		mu.Lock()
		//lint:ignore SA2001 waiting for whoever holds it is the point
		mu.Unlock()
	}
	c.postMu.Lock() // a CREDIT frame may be on its way to the queue; no other follows
	//lint:ignore SA2001 waiting for whoever holds it is the point
	c.postMu.Unlock()

	linger := time.Duration(c.linger.Load())
	limit := c.limit(linger)
	defer limit.stop()
	// 2. Send what is buffered and FIN.
	err := c.finish(linger, limit)
	// 3. rdma_disconnect.
	c.disconnect(err == nil && linger > 0)
	// 4. Drain the flushed CQ.
	err = errors.Join(err, c.drain())
	// 5. Destroy the QP, return the blocks, destroy the CQ and its channel.
	// 6. rdma_destroy_id; with the channel's last id, rdma_destroy_event_channel.
	err = errors.Join(err, c.destroy())
	return opError(opClose, c.local, c.remote, err)
}

// beginClose reports whether this is the first Close.
func (c *Conn) beginClose() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return false
	}
	c.closed.Store(true)
	close(c.done)
	return true
}

// limit returns a waiter's deadline some time from now.
func (c *Conn) limit(d time.Duration) *deadline {
	limit := makeDeadline(func() {
		if c.cq != nil {
			c.cq.Wake()
		}
	})
	limit.set(time.Now().Add(max(d, 0)))
	return limit
}

// finish sends what was written and FIN, and waits until that has left, unless
// the connection is to be aborted or has failed.
func (c *Conn) finish(linger time.Duration, limit *deadline) error {
	if !c.sendLast(linger) {
		return nil
	}
	err := c.waitFor(&waiter{ready: c.allSent, note: make(chan struct{}, 1), deadline: limit, sends: true})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.mu.Lock()
		left := c.tx.posted - c.tx.done
		c.mu.Unlock()
		return fmt.Errorf("linger time of %v passed with %d frames unsent: %w", linger, left, syscall.ETIMEDOUT)
	}
	return err
}

// sendLast sends what was written and FIN, or reports that there is no use.
func (c *Conn) sendLast(linger time.Duration) bool {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	c.mu.Lock()
	failed := c.tx.err != nil
	c.tx.finSent = true
	c.mu.Unlock()
	if linger < 0 || failed {
		c.dropOpen()
		return false
	}
	err := c.flushOpen()
	c.tx.flushers.Wait()
	if err == nil {
		err = c.sendFin()
	}
	return err == nil // or else the queue pair is in error: the peer was first
}

// allSent reports whether no send is outstanding, or none will get through.
func (c *Conn) allSent() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tx.posted == c.tx.done || c.tx.err != nil
}

// dropOpen discards what was not sent.
func (c *Conn) dropOpen() {
	c.tx.mu.Lock()
	if c.tx.open != nil {
		c.tx.open.Release()
		c.tx.open = nil
		c.tx.isOpen.Store(false)
	}
	c.tx.mu.Unlock()
	c.tx.flushers.Wait()
}

// disconnect ends the connection in order, and waits a moment for the peer's side
// of that; or it aborts it. A peer that takes longer, since its application does
// not read, is the provider's to wait for.
func (c *Conn) disconnect(inOrder bool) {
	if c.qp == nil {
		return
	}
	if !inOrder {
		_ = c.qp.SetError()
		_ = c.id.Disconnect() // not connected any more is as good
		return
	}
	if c.id.Disconnect() != nil {
		return // it was never connected
	}
	limit := time.NewTimer(disconnectTimeout)
	defer limit.Stop()
	for {
		select {
		case ev := <-c.cmEvents:
			if ev.Type == cm.EventDisconnected || ev.Type == cm.EventDeviceRemoval {
				return
			}
		case <-limit.C:
			return
		}
	}
}

// drain waits until every posted work request has completed. A device that does
// not flush by itself is told to; one that even then does not is given up.
func (c *Conn) drain() error {
	if c.qp == nil {
		return nil
	}
	drained := func() bool {
		sends, recvs := c.qp.Outstanding()
		return sends == 0 && recvs == 0
	}
	for range 2 {
		limit := c.limit(flushTimeout)
		err := c.waitFor(&waiter{ready: drained, note: make(chan struct{}, 1), deadline: limit, sends: true})
		limit.stop()
		if err == nil {
			return nil
		}
		_ = c.qp.SetError()
	}
	sends, recvs := c.qp.Abandon()
	return fmt.Errorf("%d sends and %d receives were not flushed: %w", sends, recvs, syscall.EIO)
}

// destroy frees everything. Whatever fails, it goes on.
func (c *Conn) destroy() error {
	var err error
	c.wait.read.deadline.stop()
	c.wait.write.deadline.stop()
	if c.qp != nil {
		err = insist(c.qp.Close)
	}
	freed := err == nil // or else the blocks are the device's for ever, and the arena stays
	if freed {
		c.freeBlocks()
	}
	if c.cq != nil {
		err = errors.Join(err, insist(c.cq.Close))
	}
	if c.arena != nil && freed { // before the id: librdmacm frees its own domain with the last id
		err = errors.Join(err, c.arena.release())
	}
	p := c.Provider()
	err = errors.Join(err, destroyID(c.id))
	return errors.Join(err, p.releaseLoop())
}

// freeBlocks returns the posted blocks to the pool; those that a caller of
// ReadBuffer holds follow when it releases them.
func (c *Conn) freeBlocks() {
	c.mu.Lock()
	c.rx.gone = true
	for i, b := range c.rx.slots {
		if !c.rx.lent[i] {
			b.Free()
		}
	}
	for _, b := range c.tx.kept {
		b.Free()
	}
	left := c.tx.blocks // sent with nothing to say so, or abandoned
	c.tx.blocks, c.tx.kept = nil, nil
	c.mu.Unlock()
	for _, b := range left {
		if b != nil { // it may be a block that we received, or another connection has
			b.Release()
		}
	}
}

// destroyID destroys an id. An event that the event loop is just about to ack
// delays it.
func destroyID(id *cm.ID) error {
	ctx, cancel := context.WithTimeout(context.Background(), destroyTimeout)
	defer cancel()
	return insist(func() error {
		for {
			err := id.Destroy()
			var busy *cm.BusyError
			if !errors.As(err, &busy) || len(busy.Events) == 0 || ctx.Err() != nil {
				return err
			}
			runtime.Gosched()
		}
	})
}

// fail ends both directions. The first reason stays. c.mu is held.
func (c *Conn) fail(err error) {
	c.endReads(err)
	c.failWrites(err)
}

// failWrites sets why writes fail, unless that is known. c.mu is held.
func (c *Conn) failWrites(err error) {
	if c.tx.err == nil {
		c.tx.err = err
	}
}

// refused ends the connection, because its queue pair did not take a control frame
// or a receive: without it either side might wait for ever. A queue pair that is at
// its end anyway (siw says ENOTCONN meanwhile) reports that itself.
func (c *Conn) refused(err error) {
	if err == nil || errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.ENOTCONN) {
		return
	}
	c.mu.Lock()
	c.fail(err)
	c.mu.Unlock()
	c.abort()
	c.changed()
}

// abort resets the connection. What has arrived can still be read.
func (c *Conn) abort() { _ = c.qp.SetError() }
