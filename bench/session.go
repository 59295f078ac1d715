package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/rdmanet/rdmanet/rdmanet"
)

// stallTime is how much longer than it should a slice may take. Then its
// connection's deadline ends it, and the whole run.
const stallTime = 30 * time.Second

func (p *netPeer) open(ctx context.Context, pt point) (session, error) {
	switch pt.what {
	case stream:
		return p.openStream(ctx, modeRead, pt.size)
	case zeroCopy:
		return p.openZeroCopy(ctx, pt.size)
	case ioCopy:
		return p.openStream(ctx, modeCopy, 0)
	case roundTrip:
		return p.openEcho(ctx, pt.size)
	case connection:
		return connectSession{p}, nil
	case idle:
		return p.openIdle(ctx)
	case registered:
		if p.t.dialWithin == nil {
			return nil, errors.ErrUnsupported
		}
		return registeredSession{p}, nil
	}
	return nil, errors.ErrUnsupported
}

// openMode dials and says what the server should do.
func (p *netPeer) openMode(ctx context.Context, mode byte, size int) (net.Conn, error) {
	c, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	head := binary.BigEndian.AppendUint32([]byte{mode}, uint32(size))
	if _, err := c.Write(head); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// measure runs one slice, and adds what it took to what it returns.
func (p *netPeer) measure(run func() (sample, error)) (sample, error) {
	before, err := p.resources()
	if err != nil {
		return sample{}, err
	}
	start := time.Now()
	s, err := run()
	s.elapsed = time.Since(start)
	if err != nil {
		return s, err
	}
	after, err := p.resources()
	s.used = after.minus(before)
	return s, err
}

// streamSession sends messages in one direction.
type streamSession struct {
	p    *netPeer
	c    net.Conn
	send func(until time.Time) (sample, error) // the last byte is mark
}

func (p *netPeer) openStream(ctx context.Context, mode byte, size int) (session, error) {
	c, err := p.openMode(ctx, mode, size)
	if err != nil {
		return nil, err
	}
	s := &streamSession{p: p, c: c}
	if mode == modeCopy {
		s.send = func(until time.Time) (sample, error) { return sendCopy(c, until) }
		return s, nil
	}
	msg := make([]byte, size)
	s.send = func(until time.Time) (sample, error) { return sendWrites(c, msg, until) }
	return s, nil
}

func (p *netPeer) openZeroCopy(ctx context.Context, size int) (session, error) {
	c, err := p.openMode(ctx, modeBuffer, size)
	if err != nil {
		return nil, err
	}
	bc, ok := c.(bufferConn)
	if !ok {
		c.Close()
		return p.openStream(ctx, modeRead, size)
	}
	send := func(until time.Time) (sample, error) { return sendBuffers(bc, size, until) }
	return &streamSession{p: p, c: c, send: send}, nil
}

func (s *streamSession) close() error { return s.c.Close() }

func (s *streamSession) slice(_ context.Context, length time.Duration) (sample, error) {
	var ack [1]byte
	if err := s.c.SetDeadline(time.Now().Add(length + stallTime)); err != nil {
		return sample{}, err
	}
	return s.p.measure(func() (sample, error) {
		r, err := s.send(time.Now().Add(length))
		if err == nil {
			_, err = io.ReadFull(s.c, ack[:])
		}
		return r, err
	})
}

// clockBytes is about how much is sent between two looks at the clock, and
// clockMessages how many messages at most.
const (
	clockBytes    = 16 << 10
	clockMessages = 64
)

func clockInterval(size int) int64 { return int64(min(max(clockBytes/size, 1), clockMessages)) }

func sendWrites(c net.Conn, msg []byte, until time.Time) (r sample, err error) {
	last := &msg[len(msg)-1]
	*last = 0
	every := clockInterval(len(msg))
	for *last != mark {
		if r.ops%every == 0 && !time.Now().Before(until) {
			*last = mark
		}
		if _, err := c.Write(msg); err != nil {
			return r, err
		}
		r.ops++
		r.bytes += int64(len(msg))
	}
	return r, nil
}

func sendBuffers(c bufferConn, size int, until time.Time) (r sample, err error) {
	every := clockInterval(size)
	for done := false; !done; {
		if r.ops%every == 0 && !time.Now().Before(until) {
			done = true
		}
		b, err := c.NewBuffer()
		if err != nil {
			return r, err
		}
		b.Resize(min(size, b.Cap()))
		p := b.Bytes()
		p[len(p)-1] = 0
		if done {
			p[len(p)-1] = mark
		}
		r.ops++
		r.bytes += int64(len(p))
		if _, err := c.WriteBuffer(b); err != nil {
			return r, err
		}
	}
	return r, nil
}

func sendCopy(c net.Conn, until time.Time) (r sample, err error) {
	src := &source{until: until}
	r.bytes, err = io.Copy(c, src)
	r.ops = src.reads
	return r, err
}

// source is zeros until a time, and then one mark.
type source struct {
	until time.Time
	reads int64
	done  bool
}

func (s *source) Read(p []byte) (int, error) {
	if s.done {
		return 0, io.EOF
	}
	clear(p)
	if !time.Now().Before(s.until) {
		p[len(p)-1] = mark
		s.done = true
	}
	s.reads++
	return len(p), nil
}

// echoSession sends a message and waits for its return.
type echoSession struct {
	p       *netPeer
	c       net.Conn
	msg     []byte
	latency *hdrhistogram.Histogram
}

// newLatencies counts ns up to a minute, within 0.1 %.
func newLatencies() *hdrhistogram.Histogram { return hdrhistogram.New(1, time.Minute.Nanoseconds(), 3) }

func (p *netPeer) openEcho(ctx context.Context, size int) (*echoSession, error) {
	c, err := p.openMode(ctx, modeEcho, size)
	if err != nil {
		return nil, err
	}
	return &echoSession{p: p, c: c, msg: make([]byte, size), latency: newLatencies()}, nil
}

func (s *echoSession) close() error { return s.c.Close() }

func (s *echoSession) slice(_ context.Context, length time.Duration) (sample, error) {
	if err := s.c.SetDeadline(time.Now().Add(length + stallTime)); err != nil {
		return sample{}, err
	}
	s.latency.Reset()
	return s.p.measure(func() (sample, error) { return s.roundTrips(time.Now().Add(length)) })
}

func (s *echoSession) roundTrips(until time.Time) (r sample, err error) {
	r.latency = s.latency
	for start := time.Now(); start.Before(until) || r.ops == 0; r.ops++ {
		if _, err := s.c.Write(s.msg); err != nil {
			return r, err
		}
		if _, err := io.ReadFull(s.c, s.msg); err != nil {
			return r, err
		}
		now := time.Now()
		if err := s.latency.RecordValue(int64(now.Sub(start))); err != nil {
			return r, err
		}
		start = now
	}
	return r, nil
}

// connectSession makes one connection after the other.
type connectSession struct{ p *netPeer }

func (s connectSession) close() error { return nil }

func (s connectSession) slice(ctx context.Context, length time.Duration) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, length+stallTime)
	defer cancel()
	return s.p.measure(func() (r sample, err error) {
		b := []byte{modeConnect}
		for until := time.Now().Add(length); time.Now().Before(until) || r.ops == 0; r.ops++ {
			if err := s.connect(ctx, b); err != nil {
				return r, err
			}
		}
		return r, nil
	})
}

func (s connectSession) connect(ctx context.Context, b []byte) error {
	c, err := s.p.dial(ctx)
	if err != nil {
		return err
	}
	_, err = c.Write(b)
	if err == nil {
		_, err = io.ReadFull(c, b)
	}
	if closeErr := c.Close(); err == nil {
		err = closeErr
	}
	return err
}

// idleSession watches connections that have been used and are silent.
type idleSession struct {
	p     *netPeer
	conns []*echoSession
}

const idleConns = 16

func (p *netPeer) openIdle(ctx context.Context) (session, error) {
	s := &idleSession{p: p}
	for range idleConns {
		c, err := p.openEcho(ctx, 64)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.conns = append(s.conns, c)
	}
	return s, nil
}

func (s *idleSession) close() (err error) {
	for _, c := range s.conns {
		err = errors.Join(err, c.close())
	}
	return err
}

// A look at the CPU time costs some itself, and a connection takes a moment to
// notice that it is idle. So what a short time costs is taken from what a long
// one does.
const shortIdle = 20 * time.Millisecond

func (s *idleSession) slice(ctx context.Context, length time.Duration) (sample, error) {
	for _, c := range s.conns {
		if _, err := c.roundTrips(time.Now()); err != nil {
			return sample{}, err
		}
	}
	runtime.GC()
	watch := func(length time.Duration) (sample, error) {
		return s.p.measure(func() (sample, error) {
			return sample{ops: int64(len(s.conns))}, sleep(ctx, length)
		})
	}
	var short sample
	for range 3 { // the first is the moment
		var err error
		if short, err = watch(shortIdle); err != nil {
			return short, err
		}
	}
	long, err := watch(shortIdle + length)
	long.elapsed -= short.elapsed
	long.used.CPU = max(long.used.CPU-short.used.CPU, 0)
	return long, err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// registeredSession finds the smallest budget of registered memory under which
// connections can be made and fill their send queues. It is what they need; a
// pool may register more in advance.
type registeredSession struct{ p *netPeer }

const (
	registeredConns = 8
	registeredStep  = 4 << 10 // of each connection
)

func (s registeredSession) close() error { return nil }

func (s registeredSession) slice(ctx context.Context, _ time.Duration) (sample, error) {
	low, high := 0, registeredStep // of each connection; low is too little
	for {
		ok, err := s.enough(ctx, high)
		if err != nil {
			return sample{}, err
		}
		if ok {
			break
		}
		low, high = high, 2*high
	}
	for high-low > registeredStep {
		mid := (low + high) / 2
		ok, err := s.enough(ctx, mid)
		if err != nil {
			return sample{}, err
		}
		if ok {
			high = mid
		} else {
			low = mid
		}
	}
	return sample{ops: registeredConns, bytes: int64(high) * registeredConns}, nil
}

// enough reports whether so many bytes are enough for each connection.
func (s registeredSession) enough(ctx context.Context, bytes int) (bool, error) {
	err := s.fill(ctx, int64(bytes)*registeredConns)
	if errors.Is(err, syscall.ENOBUFS) || errors.Is(err, syscall.EINVAL) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("with %d registered bytes for each connection: %w", bytes, err)
	}
	return true, nil
}

// fill makes the connections, and takes as many buffers as their send queues hold.
func (s registeredSession) fill(ctx context.Context, budget int64) error {
	for range registeredConns {
		c, err := s.p.t.dialWithin(ctx, s.p.addr, budget)
		if err != nil {
			return err
		}
		defer c.Close()
		bc, ok := c.(bufferConn)
		for i := 0; ok && i < rdmanet.DefaultSendDepth; i++ {
			b, err := bc.NewBuffer()
			if err != nil {
				return err
			}
			defer b.Release()
		}
	}
	return nil
}
