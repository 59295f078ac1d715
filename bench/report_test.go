package main

import (
	"bytes"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// testReport has two slices of one point: TCP moved 1 and 2 MB/s, RDMA 3 and 2.
func testReport() *report {
	pt := point{stream, 64 << 10}
	r := &report{Kinds: []kindInfo{{"tcp", "package net"}, {"rdma", "rdmanet"}}}
	tcp, rdma := newSeries("tcp", pt), newSeries("rdma", pt)
	for _, mb := range []int64{1, 2} {
		tcp.add(pt, sample{ops: 1000, bytes: mb * 1e6, elapsed: time.Second, used: resources{CPU: time.Second}})
	}
	for _, mb := range []int64{3, 2} {
		rdma.add(pt, sample{ops: 1000, bytes: mb * 1e6, elapsed: time.Second, used: resources{CPU: time.Second, Allocs: 500}})
	}
	r.add(pt, []*series{tcp, rdma})
	r.judge()
	return r
}

func TestTable(t *testing.T) {
	var b bytes.Buffer
	writeTable(&b, testReport().table()[:2])
	require.Equal(t, ""+
		"|                           | unit | better |  tcp | rdma | rdma/tcp |    quartiles |\n"+
		"| ------------------------- | ---- | ------ | ---: | ---: | -------: | -----------: |\n"+
		"| 64 KiB stream: throughput | MB/s | higher | 1.50 | 2.50 |     2.00 | 1.50 to 2.50 |\n", b.String())
}

func TestTableOfAKindWithoutAPoint(t *testing.T) {
	r := testReport()
	r.Kinds = append(r.Kinds, kindInfo{"other", ""})
	require.Equal(t, []string{"64 KiB stream: throughput", "MB/s", "higher", "1.50", "2.50", "–", "2.00", "1.50 to 2.50", "–", ""}, r.table()[1])
}

func TestARatioNeedsTheBaseline(t *testing.T) {
	pt := point{registered, 0}
	r := &report{Kinds: []kindInfo{{"tcp", ""}, {"rdma", ""}, {"other", ""}}}
	rdma, other := newSeries("rdma", pt), newSeries("other", pt)
	for _, s := range []*series{rdma, other} {
		s.add(pt, sample{ops: 2, bytes: 4096})
	}
	r.add(pt, []*series{rdma, other})
	require.Equal(t, []string{"registered: memory", "KiB each", "lower", "–", "2.00", "2.00", "–", "", "–", ""}, r.table()[1])
}

func TestTargets(t *testing.T) {
	r := testReport()
	require.Equal(t, []verdict{
		{"rdma", "64 KiB stream: throughput at least 0.9 of tcp's: 2.00", true},
		{"rdma", "64 KiB stream: allocations at most 0.05 per message: 0.500", false},
	}, r.Targets)
	require.ErrorIs(t, r.checkTargets(), errMissed)
	r.Targets = r.Targets[:1]
	require.NoError(t, r.checkTargets())

	var b bytes.Buffer
	r.writeTargets(&b)
	require.Equal(t, "\nTargets:\n- [x] rdma, 64 KiB stream: throughput at least 0.9 of tcp's: 2.00\n", b.String())
}

func TestEveryTargetIsOfAMetricThatExists(t *testing.T) {
	for _, target := range targets {
		require.Contains(t, points, target.point)
		var names []string
		for _, m := range target.point.metrics() {
			names = append(names, m.name)
		}
		require.Contains(t, names, target.metric)
	}
}

func TestNumber(t *testing.T) {
	for x, want := range map[float64]string{
		0: "0", 0.0001: "0", 0.5: "0.500", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 12345: "12345", -2: "-2.00",
	} {
		require.Equal(t, want, number(x))
	}
	require.Equal(t, "–", number(math.NaN()))
}

func TestSizeString(t *testing.T) {
	for n, want := range map[int]string{64: "64 B", 1 << 10: "1 KiB", 1500: "1500 B", 64 << 10: "64 KiB", 1 << 20: "1 MiB"} {
		require.Equal(t, want, sizeString(n))
	}
	require.Equal(t, "64", shortSize(64))
	require.Equal(t, "32K", shortSize(32<<10))
	require.Equal(t, "1M", shortSize(1<<20))
}

func TestDecadesLabelOneTwoAndFive(t *testing.T) {
	var labels []string
	for _, tick := range (decades{}).Ticks(3, 60) {
		if tick.Label != "" {
			labels = append(labels, tick.Label)
		}
	}
	require.Equal(t, []string{"5", "10", "20", "50"}, labels)
}
