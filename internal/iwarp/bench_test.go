package iwarp

import (
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// The benchmarks compare with plain TCP in the same run; only their ratio means
// anything.

// tcpPair is what a pair is measured against.
func tcpPair(b *testing.B) (*net.TCPConn, *net.TCPConn) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer ln.Close()
	x, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(b, err)
	y, err := ln.Accept()
	require.NoError(b, err)
	b.Cleanup(func() { x.Close(); y.Close() })
	return x.(*net.TCPConn), y.(*net.TCPConn)
}

// runner is an end without a test's bookkeeping.
type runner struct {
	*end
	wc   [testDepth]verbs.WC
	n    int
	wr   [1]verbs.SendWR
	sgl  [1]verbs.SGE
	recv [1]verbs.RecvWR
}

// next returns the next message; it is reposted by release.
func (r *runner) next(spin bool) ([]byte, uint64) {
	for {
		if r.n > 0 {
			r.n--
			w := r.wc[0]
			copy(r.wc[:], r.wc[1:1+r.n])
			return r.buf(w.WRID)[:w.ByteLen], w.WRID
		}
		if !spin { // Wait looks before it parks
			r.cq.Arm(true)
			r.cq.Wait()
		}
		r.n, _ = r.cq.Poll(r.wc[:])
	}
}

func (r *runner) release(id uint64) {
	r.recv[0] = verbs.RecvWR{WRID: id, SGE: verbs.SGE{Data: r.buf(id), LKey: r.mr.LKey()}}
	r.qp.PostRecv(r.recv[:])
}

func (r *runner) put(p []byte) error {
	r.sgl[0].Data = p
	r.wr[0] = verbs.SendWR{SGL: r.sgl[:], Inline: true, Solicited: true}
	_, err := r.qp.PostSend(r.wr[:])
	return err
}

func BenchmarkRoundTrip(b *testing.B) {
	msg := make([]byte, 64)
	b.Run("tcp", func(b *testing.B) {
		x, y := tcpPair(b)
		go io.Copy(struct{ io.Writer }{y}, struct{ io.Reader }{y})
		in := make([]byte, len(msg))
		for b.Loop() {
			x.Write(msg)
			io.ReadFull(x, in)
		}
	})
	for name, spin := range map[string]bool{"iwarp": false, "iwarp spinning": true} {
		b.Run(name, func(b *testing.B) {
			e, f := pair(b, 4096, verbs.ConnParam{}, "127.0.0.1:0")
			x, y := &runner{end: e}, &runner{end: f}
			done := make(chan struct{})
			go func() {
				defer close(done)
				for {
					m, id := y.next(spin)
					if len(m) == 0 {
						return
					}
					y.put(m)
					y.release(id)
				}
			}()
			for b.Loop() {
				x.put(msg)
				_, id := x.next(spin)
				x.release(id)
			}
			x.put(nil)
			<-done
		})
	}
}

func BenchmarkStream(b *testing.B) {
	const size, window = 64 << 10, testDepth
	msg := make([]byte, size)
	b.Run("tcp", func(b *testing.B) {
		x, y := tcpPair(b)
		done := make(chan struct{})
		go func() {
			defer close(done)
			in := make([]byte, size)
			for {
				if _, err := io.ReadFull(y, in); err != nil {
					return
				}
			}
		}()
		b.SetBytes(size)
		for b.Loop() {
			x.Write(msg)
		}
		x.CloseWrite()
		<-done
	})
	for name, p := range map[string]verbs.ConnParam{"iwarp": {}, "iwarp with CRC": {CRC: true}} {
		b.Run(name, func(b *testing.B) {
			e, f := pair(b, size, p, "127.0.0.1:0")
			x, y := &runner{end: e}, &runner{end: f}
			credit := make([]byte, 1)
			done := make(chan struct{})
			go func() { // half a window's credit at a time, as a stream has it
				defer close(done)
				for got := 1; ; got++ {
					m, id := y.next(false)
					y.release(id)
					if len(m) == 0 {
						return
					}
					if got%(window/2) == 0 {
						y.put(credit)
					}
				}
			}()
			b.SetBytes(size)
			room := window - 1
			put := func(p []byte) {
				for room == 0 {
					_, id := x.next(false)
					x.release(id)
					room += window / 2
				}
				for x.put(p) != nil { // the socket is full
					x.cq.Arm(false)
					if x.put(p) == nil {
						break
					}
					x.cq.Wait()
					if x.n, _ = x.cq.Poll(x.wc[:]); x.n > 0 {
						_, id := x.next(false)
						x.release(id)
						room += window / 2
					}
				}
				room--
			}
			for b.Loop() {
				put(msg)
			}
			put(nil)
			<-done
		})
	}
}
