package main

import (
	"bytes"
	"io"
	"net"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
)

// Everything that is sent must have arrived when a slice ends, or its throughput
// would be that of the buffers in between.
func TestASliceEndsWhenAllHasArrived(t *testing.T) {
	client, srv := net.Pipe() // holds nothing
	defer client.Close()
	done := make(chan error, 1)
	go func() { done <- serveRead(srv, make([]byte, 100)) }()

	for range 3 {
		r, err := sendWrites(client, make([]byte, 250), time.Now())
		require.NoError(t, err)
		require.Equal(t, sample{ops: 1, bytes: 250}, r)
		_, err = io.ReadFull(client, make([]byte, 1))
		require.NoError(t, err)
	}
	require.NoError(t, client.Close())
	require.ErrorIs(t, <-done, io.EOF)
}

func TestSourceEndsWithOneMark(t *testing.T) {
	p, err := io.ReadAll(iotest.OneByteReader(&source{until: time.Now().Add(time.Millisecond)}))
	require.NoError(t, err)
	require.Equal(t, 1, bytes.Count(p, []byte{mark}))
	require.Equal(t, byte(mark), p[len(p)-1])
}

func TestClockInterval(t *testing.T) {
	for size, want := range map[int]int64{1: 64, 64: 64, 1 << 10: 16, 16 << 10: 1, 1 << 20: 1} {
		require.Equal(t, want, clockInterval(size), size)
	}
}

func TestServeRefusesAnUnknownMode(t *testing.T) {
	client, srv := net.Pipe()
	defer client.Close()
	go client.Write([]byte("?\x00\x00\x00\x01"))
	require.ErrorContains(t, serve(srv), "unknown mode")
}

func TestZeroCopyNeedsTheMethods(t *testing.T) {
	client, srv := net.Pipe()
	defer client.Close()
	require.Error(t, serveBuffer(srv))
}

func TestHistogramKeepsWhatItMerges(t *testing.T) {
	pt := point{roundTrip, 64}
	s := newSeries("tcp", pt)
	slice := newLatencies()
	for _, us := range []int64{10, 20} {
		slice.Reset()
		require.NoError(t, slice.RecordValue(us*1e3))
		s.add(pt, sample{ops: 1, elapsed: time.Second, latency: slice})
	}
	require.EqualValues(t, 2, s.latency.TotalCount())
	require.InDelta(t, 10, s.values[0][0], 0.02)
	require.InDelta(t, 20, s.values[0][1], 0.02)
	l := newLatency(pt, s)
	require.InDelta(t, 20, l.Percentiles[len(l.Percentiles)-1].Microseconds, 0.02)
}
