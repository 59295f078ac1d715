package rdmanet

import (
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
)

// Conn is a stream over one queue pair. It is made by Dial and Accept.
//
// Any number of goroutines may call any method at any time. Reads take turns,
// and so do writes; the bytes of one Write are never mixed with another's.
//
// A Read or Write that blocks is ended by data or room for it, its deadline
// (also one set meanwhile), Close, the peer's reset, and the loss of the peer.
type Conn struct {
	cfg           Config
	id            *cm.ID
	cq            *qp.CQ
	qp            *qp.QP
	arena         *arena
	local, remote *Addr
	endpoint      cm.Endpoint
	onDevice      bool // endpoint says on which
	peer          greeting
	accepted      bool // by a Listener; else dialed
	cmEvents      chan *cm.Event

	// Lock order: readMu → writeMu (by Close only) → pollMu → postMu → tx.mu →
	// mu. No lock but the first two is held while waiting. Of another connection,
	// whose buffer it sent, a connection takes postMu and mu with pollMu held.
	readMu  sync.Mutex // one Read at a time
	writeMu sync.Mutex // one Write at a time
	postMu  sync.Mutex // the order of frames on the send queue
	pollMu  sync.Mutex // the order of completions
	mu      sync.Mutex // the state below

	flow   flow
	rx     rxState
	tx     txState
	wait   waitState
	stats  counters
	linger atomic.Int64 // time.Duration; negative aborts

	closed atomic.Bool
	done   chan struct{} // closed by Close: its first step
}

var _ net.Conn = (*Conn)(nil)

// newConn makes the shell of a connection around an id, which reports to it.
func newConn(cfg Config, id *cm.ID) *Conn {
	c := &Conn{cfg: cfg, id: id, cmEvents: make(chan *cm.Event, 8), done: make(chan struct{})}
	c.linger.Store(int64(cfg.Linger))
	c.tx.flushFn = c.flusher
	c.rx.releaseFn = c.bufferReleased
	c.wait.init(c)
	id.SetContext(c)
	return c
}

// handleEvent is called by the event loop. During set-up somebody waits for the
// events; afterwards only the end matters.
func (c *Conn) handleEvent(ev *cm.Event) {
	if ev.Type == cm.EventDisconnected || ev.Type == cm.EventDeviceRemoval {
		c.disconnected(ev)
	}
	select {
	case c.cmEvents <- ev:
	default: // nobody waits for so many
	}
}

// open makes the queue pair, with all receives posted.
func (c *Conn) open() error {
	dev, ok := c.id.Device()
	if !ok { // it was there when the address was resolved, and has gone
		return syscall.ENODEV
	}
	c.cfg.fit(dev.Attr())
	c.wait.waitPolls = dev.Attr().WaitPolls
	if !c.wait.waitPolls {
		c.wait.onDevice()
	}
	var err error
	if c.arena, err = acquireArena(dev, c.cfg.poolConfig()); err != nil {
		return err
	}
	if c.cq, err = dev.NewCQ(c.cfg.receives() + c.cfg.sends()); err != nil {
		return err
	}
	c.qp, err = c.id.CreateQP(c.arena.pd, c.cq, qp.Cap{
		SendWR: c.cfg.sends(), RecvWR: c.cfg.receives(), SendSGE: min(sendSGE, dev.Attr().MaxSGE), MaxInline: headerLen,
	})
	if err != nil {
		return err
	}
	if err := c.initSends(); err != nil {
		return err
	}
	return c.initReceives()
}

// established notes what the peer announced.
func (c *Conn) established(peer greeting) {
	c.local, c.remote = &Addr{c.id.LocalAddr()}, &Addr{c.id.RemoteAddr()}
	c.endpoint, c.onDevice = c.id.Endpoint()
	c.mu.Lock()
	c.peer = peer
	c.tx.frameMax = min(peer.recvSize-headerLen, c.cfg.BufferSize)
	c.flow.init(peer.dataSlots, c.cfg.RecvDepth)
	c.mu.Unlock()
	_ = c.id.SetKeepAlive(c.cfg.KeepAlive) // a refused option is no reason to refuse a connection
	c.cfg.Logger.Debug("rdma: connected", "provider", c.Provider(), "local", c.local.String(), "remote", c.remote.String(),
		"accepted", c.accepted, "version", peer.version)
}

// LocalAddr returns the local address, an *Addr.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr returns the peer's address, an *Addr.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// Provider returns the provider that carries the connection.
func (c *Conn) Provider() Provider { return Provider(c.id.Channel().Provider()) }

// Endpoint says over which RDMA device, port and GID the connection was made. It
// reports false for a provider in software, which has none. After Close it is what
// it was.
func (c *Conn) Endpoint() (cm.Endpoint, bool) { return c.endpoint, c.onDevice }

// SetDeadline sets the read and the write deadline.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SetReadDeadline limits blocked and future reads: after t they fail with
// os.ErrDeadlineExceeded. The zero time means no limit. The connection stays
// usable, and nothing received is lost.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadline(c.wait.read.deadline, t) }

// SetWriteDeadline limits blocked and future writes likewise. A write that
// fails may have sent a part, which it returns.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(c.wait.write.deadline, t) }

func (c *Conn) setDeadline(d *deadline, t time.Time) error {
	if c.closed.Load() {
		return opError(opSet, c.local, c.remote, net.ErrClosed)
	}
	d.set(t)
	return nil
}

// SetLinger says what Close does about data that is still on its way out: with
// sec < 0 it takes up to Config.Linger to send it; with sec == 0 it discards it
// and resets the connection; with sec > 0 it takes up to sec seconds.
func (c *Conn) SetLinger(sec int) error {
	d := time.Duration(sec) * time.Second
	switch {
	case sec == 0:
		d = -1
	case sec < 0:
		d = c.cfg.Linger
	}
	c.linger.Store(int64(d))
	return c.checkOpen()
}

// SetNoDelay with false lets every small write wait for the next, for a moment;
// with true, the default, only those that follow another closely.
func (c *Conn) SetNoDelay(noDelay bool) error {
	c.tx.delay.Store(!noDelay)
	return c.checkOpen()
}

// SetKeepAlive turns keepalive on, with net's defaults (after 15 s, 9 probes 15 s
// apart), or off. It fails as SetKeepAliveConfig does.
func (c *Conn) SetKeepAlive(on bool) error {
	return c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: on})
}

// SetKeepAlivePeriod sets the idle time and the interval between probes, of which
// there are 9. It fails as SetKeepAliveConfig does.
func (c *Conn) SetKeepAlivePeriod(d time.Duration) error {
	return c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: d, Interval: d})
}

// SetKeepAliveConfig sets how the peer's host is proved alive. One that has been
// silent for Idle is probed; one that has been silent for Idle + Interval × Count
// is given up, which ends the connection with ETIMEDOUT. Zero values are net's
// defaults. It works while nobody reads or writes at this side, and needs nobody
// who does at the other.
//
// In software TCP's own keepalive probes, in whole seconds, and what is on its way
// to the peer is a probe as well. A peer whose application has not read for so long
// that TCP's window is shut is asked for room by TCP at growing intervals, up to two
// minutes: before Linux 6.15 its death may be noticed up to four minutes later.
//
// On InfiniBand and RoCE the probe is an RDMA WRITE of no bytes, which takes no
// receive and touches no memory, sent when this side has not sent either. The
// adapter also gives up a peer that does not acknowledge what was sent, when its
// own retries are over, in 15 s or so: that is not for us to change.
//
// On siw it is an RDMA WRITE of no bytes, too, and what tells is the kernel's TCP
// under it. This fails with errors.ErrUnsupported where the kernel's module tcp_diag
// is missing, or the process isn't in the first network namespace.
//
// On other iWARP devices it is an RDMA READ of no bytes. A peer that allows none,
// which is not one of this package, makes this fail with errors.ErrUnsupported.
func (c *Conn) SetKeepAliveConfig(k net.KeepAliveConfig) error {
	if err := c.checkOpen(); err != nil {
		return err
	}
	return opError(opSet, c.local, c.remote, c.id.SetKeepAlive(k))
}

// SetReadBuffer changes nothing: the receives were posted before the connection
// was made. Their number and size are Config.RecvDepth and Config.BufferSize.
func (c *Conn) SetReadBuffer(bytes int) error { return c.checkOpen() }

// SetWriteBuffer changes nothing: what a Write may leave behind on its way out is
// Config.SendDepth frames of the peer's buffer size.
func (c *Conn) SetWriteBuffer(bytes int) error { return c.checkOpen() }

func (c *Conn) checkOpen() error {
	if c.closed.Load() {
		return opError(opSet, c.local, c.remote, net.ErrClosed)
	}
	return nil
}

func (c *Conn) log() *slog.Logger { return c.cfg.Logger }

// Stats are counts over the life of a connection.
type Stats struct {
	BytesRead, BytesWritten       uint64 // payload that passed Read and Write
	FramesReceived, FramesSent    uint64 // SENDs, control frames included
	CreditsReceived, CreditFrames uint64 // credits the peer returned; CREDIT frames sent
	Parks, SpinHits, Naps         uint64 // times that a wait parked, ended while spinning, or napped
	WriteStalls                   uint64 // writes that waited for the peer or the send queue
}

type counters struct {
	bytesRead, bytesWritten, framesReceived, framesSent       atomic.Uint64
	creditsReceived, creditFrames, parks, spins, naps, stalls atomic.Uint64
}

// Stats returns the connection's counts.
func (c *Conn) Stats() Stats {
	s := &c.stats
	return Stats{
		BytesRead: s.bytesRead.Load(), BytesWritten: s.bytesWritten.Load(),
		FramesReceived: s.framesReceived.Load(), FramesSent: s.framesSent.Load(),
		CreditsReceived: s.creditsReceived.Load(), CreditFrames: s.creditFrames.Load(),
		Parks: s.parks.Load(), SpinHits: s.spins.Load(), Naps: s.naps.Load(), WriteStalls: s.stalls.Load(),
	}
}
