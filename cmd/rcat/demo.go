package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/rdmanet/rdmanet/rdmanet"
)

// demo sends random bytes from a dialer to a listener in this process, and
// compares.
type demo struct {
	o    *options
	out  io.Writer                      // for the result
	wire func(conn io.Writer) io.Writer // what the bytes pass on their way; tests put a fault there
}

func newDemo(o *options) *demo {
	return &demo{o: o, out: os.Stdout, wire: func(conn io.Writer) io.Writer { return conn }}
}

// chunk is how much is made, hashed and written at a time: what stays in a cache.
const chunk = 256 << 10

// run returns nil if every byte arrived as it was sent.
func (d *demo) run(ctx context.Context) error {
	sender, receiver, err := d.connect(ctx)
	if err != nil {
		return interrupted(ctx, err)
	}
	stop := context.AfterFunc(ctx, func() { // ends both directions
		abort(sender)
		abort(receiver)
	})
	defer stop()
	defer sender.Close()
	defer receiver.Close()
	d.o.logf("connected to %v from %v (%s)", sender.RemoteAddr(), sender.LocalAddr(), carrier(sender))
	var got sum
	got.Hash = sha256.New()
	hide := d.progress(&got.n)
	start := time.Now()
	sent, err := d.transfer(sender, receiver, &got)
	took := time.Since(start)
	hide()
	if err != nil {
		return interrupted(ctx, err)
	}
	if err := d.compare(sent, &got); err != nil {
		return err
	}
	_, err = fmt.Fprintf(d.out, "%s in %s, %s, SHA-256 matches, provider %s\n",
		human(float64(d.o.demo)), inSeconds(took), rate(uint64(d.o.demo), took), sender.Provider())
	return err
}

// transfer returns the SHA-256 of what was sent when everything has arrived.
func (d *demo) transfer(sender, receiver *rdmanet.Conn, got *sum) ([]byte, error) {
	var sent []byte
	done := make(chan error, 1)
	go func() {
		var err error
		sent, err = d.send(d.wire(sender))
		if err == nil {
			err = sender.CloseWrite()
		}
		if err != nil {
			abort(sender) // so that the receiver does not wait
		}
		done <- err
	}()
	_, err := receiver.WriteTo(got)
	if err != nil {
		abort(receiver)
	}
	return sent, errors.Join(<-done, err)
}

// send writes random bytes and returns their SHA-256.
func (d *demo) send(w io.Writer) ([]byte, error) {
	random := rand.NewPCG(rand.Uint64(), rand.Uint64())
	h := sha256.New()
	p := make([]byte, chunk)
	for left := int64(d.o.demo); left > 0; {
		for i := 0; i < len(p); i += 8 {
			binary.LittleEndian.PutUint64(p[i:], random.Uint64())
		}
		b := p[:min(left, chunk)]
		h.Write(b)
		if _, err := w.Write(b); err != nil {
			return nil, err
		}
		left -= int64(len(b))
	}
	return h.Sum(nil), nil
}

func (d *demo) compare(sent []byte, got *sum) error {
	if n := got.n.Load(); n != int64(d.o.demo) {
		return fmt.Errorf("demo failed: %d bytes were sent and %d arrived", d.o.demo, n)
	}
	if s := got.Sum(nil); string(s) != string(sent) {
		return fmt.Errorf("demo failed: SHA-256 of the %d bytes sent is %x, of those received %x", d.o.demo, sent, s)
	}
	return nil
}

// sum hashes and counts what arrives.
type sum struct {
	hash.Hash
	n atomic.Int64
}

func (s *sum) Write(p []byte) (int, error) {
	s.n.Add(int64(len(p)))
	return s.Hash.Write(p)
}

// connect returns both ends of a connection.
func (d *demo) connect(ctx context.Context) (sender, receiver *rdmanet.Conn, err error) {
	host := "127.0.0.1"
	if d.o.only6 {
		host = "::1"
	}
	lc := &rdmanet.ListenConfig{Config: d.o.config()}
	l, err := lc.Listen(ctx, d.o.network(), net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	dialer := &rdmanet.Dialer{Config: d.o.config()}
	s, err := dialer.DialContext(ctx, d.o.network(), l.Addr().String())
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	r, err := l.Accept()
	if err != nil {
		abort(s.(*rdmanet.Conn))
		return nil, nil, err
	}
	return s.(*rdmanet.Conn), r.(*rdmanet.Conn), nil
}

// abort resets a connection, whatever is on its way.
func abort(c *rdmanet.Conn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// progress shows a bar on a terminal until the returned function is called.
func (d *demo) progress(n *atomic.Int64) (hide func()) {
	if !term.IsTerminal(int(os.Stderr.Fd())) {
		return func() {}
	}
	bar := progressbar.NewOptions64(int64(d.o.demo), progressbar.OptionSetWriter(os.Stderr), progressbar.OptionShowBytes(true),
		progressbar.OptionUseIECUnits(true), progressbar.OptionFullWidth(), progressbar.OptionSetRenderBlankState(true),
		progressbar.OptionSetDescription("rcat --demo"))
	tick := time.NewTicker(time.Second / 15)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-tick.C:
				_ = bar.Set64(n.Load())
			case <-stop:
				return
			}
		}
	}()
	return func() {
		tick.Stop()
		close(stop)
		<-stopped
		_ = bar.Clear()
	}
}
