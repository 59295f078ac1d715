package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The benchmarks are for benchstat: "go test -bench . -count 10 | benchstat -col
// /kind -". RDMANET_PROVIDER chooses the provider.

func benchmarkKinds(b *testing.B, sizes []int, run func(*testing.B, *netPeer, int)) {
	for _, size := range sizes {
		for _, k := range kinds(options{providers: []string{""}}) {
			name := "kind=" + k.name
			if size > 0 {
				name = fmt.Sprintf("size=%s/%s", strings.ReplaceAll(sizeString(size), " ", ""), name)
			}
			b.Run(name, func(b *testing.B) {
				p, err := k.start(b.Context(), options{address: "127.0.0.1"})
				require.NoError(b, err)
				b.Cleanup(func() { require.NoError(b, p.close()) })
				b.ReportAllocs()
				run(b, p.(*netPeer), size)
			})
		}
	}
}

// timed runs n operations, and reports their CPU time.
func timed(b *testing.B, run func(n int) error) {
	before := ownResources()
	b.ResetTimer()
	err := run(b.N)
	b.StopTimer()
	require.NoError(b, err)
	b.ReportMetric(float64(ownResources().minus(before).CPU)/float64(b.N), "cpu-ns/op")
}

func dialMode(b *testing.B, p *netPeer, mode byte, size int) net.Conn {
	c, err := p.openMode(b.Context(), mode, size)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, c.Close()) })
	return c
}

func BenchmarkStream(b *testing.B) {
	sizes := []int{64, 1 << 10, 4 << 10, 32 << 10, 64 << 10, 1 << 20}
	benchmarkKinds(b, sizes, func(b *testing.B, p *netPeer, size int) {
		c := dialMode(b, p, modeRead, size)
		msg := make([]byte, size)
		b.SetBytes(int64(size))
		timed(b, func(n int) error {
			for range n - 1 {
				if _, err := c.Write(msg); err != nil {
					return err
				}
			}
			if _, err := sendWrites(c, msg, time.Time{}); err != nil { // one, with a mark
				return err
			}
			_, err := io.ReadFull(c, msg[:1])
			return err
		})
	})
}

func BenchmarkRoundTrip(b *testing.B) {
	benchmarkKinds(b, []int{64, 4 << 10}, func(b *testing.B, p *netPeer, size int) {
		c := dialMode(b, p, modeEcho, size)
		msg := make([]byte, size)
		timed(b, func(n int) error {
			for range n {
				if _, err := c.Write(msg); err != nil {
					return err
				}
				if _, err := io.ReadFull(c, msg); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

func BenchmarkConnect(b *testing.B) {
	benchmarkKinds(b, []int{0}, func(b *testing.B, p *netPeer, _ int) {
		s := connectSession{p}
		msg := []byte{modeConnect}
		timed(b, func(n int) error {
			for range n {
				if err := s.connect(context.Background(), msg); err != nil {
					return err
				}
			}
			return nil
		})
	})
}
