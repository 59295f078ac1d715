//go:build cgo && linux

package rdmacore

import (
	"net/netip"
	"os"
	"testing"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func benchmarkOnDevices(b *testing.B, f func(b *testing.B, x, y *end)) {
	for _, v := range []string{"RXE4", "SIW4"} {
		if a := os.Getenv("RDMANET_LAB_" + v); a != "" {
			b.Run(v, func(b *testing.B) {
				x, y := pair(b, 65536, netip.MustParseAddr(a))
				b.ResetTimer()
				f(b, x, y)
			})
		}
	}
}

// BenchmarkThroughput sends 64 KiB messages from registered memory, one post for
// each, every 8th signaled.
func BenchmarkThroughput(b *testing.B) {
	benchmarkOnDevices(b, func(b *testing.B, x, y *end) {
		b.SetBytes(65536)
		var wc [testDepth]verbs.WC
		recv := make([]verbs.RecvWR, testDepth)
		wr := []verbs.SendWR{{SGL: []verbs.SGE{{Data: x.sendBuf(0), LKey: x.mr.LKey()}}}}
		sent, done, received := 0, 0, 0
		for received < b.N {
			for sent < b.N && sent-done < testDepth && sent-received < testDepth {
				wr[0].Signaled = sent%8 == 7
				if _, err := x.qp.PostSend(wr); err != nil {
					b.Fatal(err)
				}
				sent++
			}
			n, _ := x.cq.Poll(wc[:])
			done += 8 * n
			n, _ = y.cq.Poll(wc[:])
			for i := range n {
				recv[i] = verbs.RecvWR{WRID: wc[i].WRID, SGE: verbs.SGE{Data: y.buf(wc[i].WRID), LKey: y.mr.LKey()}}
			}
			if n > 0 {
				if _, err := y.qp.PostRecv(recv[:n]); err != nil {
					b.Fatal(err)
				}
				received += n
			}
		}
	})
}

// BenchmarkPingPong is a round trip of 64 bytes, inline, with both sides polling
// or both parked.
func BenchmarkPingPong(b *testing.B) {
	for _, parked := range []bool{false, true} {
		b.Run(map[bool]string{false: "polling", true: "parked"}[parked], func(b *testing.B) {
			benchmarkOnDevices(b, func(b *testing.B, x, y *end) {
				data := make([]byte, 64)
				one := func(e *end, send bool) {
					if send {
						if _, err := e.qp.PostSend([]verbs.SendWR{{WRID: 1, Inline: true, Signaled: true, SGL: []verbs.SGE{{Data: data}}}}); err != nil {
							b.Error(err)
						}
						return
					}
					var wc [4]verbs.WC
					for armed := false; ; {
						n, err := e.cq.Poll(wc[:])
						if err != nil {
							b.Error(err)
							return
						}
						got := false
						for _, w := range wc[:n] {
							if w.Op == verbs.OpRecv {
								e.qp.PostRecv([]verbs.RecvWR{{WRID: w.WRID, SGE: verbs.SGE{Data: e.buf(w.WRID), LKey: e.mr.LKey()}}})
								got = true
							}
						}
						if got {
							return
						}
						switch {
						case n > 0 || !parked:
						case !armed:
							e.cq.Arm(false)
							armed = true
						default:
							e.cq.Wait()
							armed = false
						}
					}
				}
				done := make(chan struct{})
				go func() {
					defer close(done)
					for range b.N {
						one(y, false)
						one(y, true)
					}
				}()
				for range b.N {
					one(x, true)
					one(x, false)
				}
				<-done
			})
		})
	}
}

// BenchmarkEmptyPoll is the price of a poll that finds nothing.
func BenchmarkEmptyPoll(b *testing.B) {
	benchmarkOnDevices(b, func(b *testing.B, x, _ *end) {
		var wc [4]verbs.WC
		b.ReportAllocs()
		for range b.N {
			x.cq.Poll(wc[:])
		}
	})
}
