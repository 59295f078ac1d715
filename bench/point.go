package main

import (
	"strconv"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/rdmanet/rdmanet/rdmanet"
)

// point is one thing that is measured for every kind.
type point struct {
	what what
	size int // of a message in bytes, or 0
}

type what string

const (
	stream     what = "stream"     // Write to Read
	zeroCopy   what = "zero-copy"  // WriteBuffer to ReadBuffer; for TCP Write to Read
	ioCopy     what = "io.Copy"    // io.Copy to io.Copy
	roundTrip  what = "round trip" // a message there and back
	connection what = "connection" // connect, a byte there and back, close
	idle       what = "idle"       // connections that do nothing
	registered what = "registered" // memory registered for a connection
)

var points = []point{
	{stream, 64}, {stream, 1 << 10}, {stream, 4 << 10}, {stream, 32 << 10}, {stream, 64 << 10}, {stream, 1 << 20},
	{zeroCopy, rdmanet.DefaultBufferSize}, {ioCopy, 0},
	{roundTrip, 64}, {roundTrip, 4 << 10},
	{connection, 0}, {idle, 0}, {registered, 0},
}

func (p point) String() string {
	if p.size == 0 {
		return string(p.what)
	}
	return sizeString(p.size) + " " + string(p.what)
}

// alone reports whether other kinds' connections could disturb what is watched.
func (p point) alone() bool { return p.what == idle || p.what == registered }

// schedule returns how many slices of a point there are, and how long they take.
func (p point) schedule(o options) (rounds int, length time.Duration) {
	switch p.what {
	case idle:
		return 1, o.idle
	case registered:
		return 1, 0
	}
	return o.rounds(), o.sliceLength
}

// sample is what one slice of one kind found.
type sample struct {
	ops     int64 // messages, round trips or connections
	bytes   int64 // moved, or registered
	elapsed time.Duration
	used    resources               // by client and server together
	latency *hdrhistogram.Histogram // of round trips, in ns; until the session's next slice
}

// metric is a number made of a sample.
type metric struct {
	name  string
	unit  string
	lower bool // is better
	of    func(sample) float64
}

// The metrics of a point.
func (p point) metrics() []metric {
	switch p.what {
	case stream, zeroCopy, ioCopy:
		ms := []metric{{"throughput", "MB/s", false, perSecond(func(s sample) float64 { return float64(s.bytes) / 1e6 })}}
		if p.what == stream && p.size < 4<<10 {
			ms = append(ms, cpuMetric("ns/message", 1, ops))
		} else {
			ms = append(ms, cpuMetric("ns/KiB", 1, kibibytes))
		}
		if p.what != ioCopy {
			ms = append(ms, allocsMetric("per message"))
		}
		return ms
	case roundTrip:
		return []metric{
			latencyMetric("p50", 50), latencyMetric("p99", 99), latencyMetric("p99.9", 99.9),
			cpuMetric("µs/round trip", 1e3, ops), allocsMetric("per round trip"),
		}
	case connection:
		return []metric{
			{"rate", "1/s", false, perSecond(ops)},
			cpuMetric("µs/connection", 1e3, ops), allocsMetric("per connection"),
		}
	case idle:
		return []metric{{"CPU", "µs/s each", true, func(s sample) float64 {
			return float64(s.used.CPU.Microseconds()) / s.elapsed.Seconds() / float64(s.ops)
		}}}
	case registered:
		return []metric{{"memory", "KiB each", true, func(s sample) float64 { return kibibytes(s) / float64(s.ops) }}}
	}
	panic("no metrics of " + p.what)
}

func ops(s sample) float64       { return float64(s.ops) }
func kibibytes(s sample) float64 { return float64(s.bytes) / (1 << 10) }

func perSecond(count func(sample) float64) func(sample) float64 {
	return func(s sample) float64 { return count(s) / s.elapsed.Seconds() }
}

func cpuMetric(unit string, nanoseconds float64, per func(sample) float64) metric {
	return metric{"CPU", unit, true, func(s sample) float64 { return float64(s.used.CPU) / nanoseconds / per(s) }}
}

func allocsMetric(unit string) metric {
	return metric{"allocations", unit, true, func(s sample) float64 { return float64(s.used.Allocs) / float64(s.ops) }}
}

func latencyMetric(name string, percentile float64) metric {
	return metric{name, "µs", true, func(s sample) float64 { return float64(s.latency.ValueAtPercentile(percentile)) / 1e3 }}
}

// sizeString writes a size as in "64 KiB".
func sizeString(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return strconv.Itoa(n>>20) + " MiB"
	case n >= 1<<10 && n%(1<<10) == 0:
		return strconv.Itoa(n>>10) + " KiB"
	}
	return strconv.Itoa(n) + " B"
}
