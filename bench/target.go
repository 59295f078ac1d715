package main

import (
	"bytes"
	"errors"
	"fmt"
)

// target is what a kind should reach: a ratio to the baseline, or a number.
type target struct {
	point  point
	metric string
	ratio  bool
	limit  float64 // the most, if lower is better, and else the least
}

var targets = []target{
	{point{stream, 64 << 10}, "throughput", true, 0.9},
	{point{stream, 64}, "throughput", true, 2},
	{point{roundTrip, 64}, "p50", true, 1.3},
	// None. Once in a while the runtime, and each slice, allocate something.
	{point{stream, 64}, "allocations", false, 0.05},
	{point{stream, 64 << 10}, "allocations", false, 0.05},
	{point{roundTrip, 64}, "allocations", false, 0.05},
	{point{registered, 0}, "memory", false, 1024},
	{point{idle, 0}, "CPU", false, 100}, // about none: 0.01 % of a CPU
}

// verdict is a target, and what a kind reached.
type verdict struct {
	Kind string `json:"kind"`
	Text string `json:"target"`
	Met  bool   `json:"met"`
}

// judge compares all kinds but the baseline with the targets. A target whose
// point was not measured isn't judged.
func (r *report) judge() {
	for _, k := range r.Kinds[1:] {
		for _, t := range targets {
			if v, ok := r.verdict(k.Name, t); ok {
				r.Targets = append(r.Targets, v)
			}
		}
	}
}

func (r *report) verdict(kind string, t target) (verdict, bool) {
	row := r.row(t.point, t.metric)
	if row == nil || row.value(kind) == nil {
		return verdict{}, false
	}
	v := row.value(kind)
	got, of := v.Value.Median, " "+row.Unit
	if t.ratio {
		if v.Ratio == nil {
			return verdict{}, false
		}
		got, of = v.Ratio.Median, " of "+r.Kinds[0].Name+"'s"
	}
	met, bound := got >= t.limit, "at least"
	if row.Lower {
		met, bound = got <= t.limit, "at most"
	}
	text := fmt.Sprintf("%s: %s %s %g%s: %s", t.point, t.metric, bound, t.limit, of, number(got))
	return verdict{Kind: kind, Text: text, Met: met}, true
}

var (
	errMissed   = errors.New("a target is missed")
	errNoTarget = errors.New("what was measured has no target to check")
)

func (r *report) checkTargets() error {
	if len(r.Targets) == 0 {
		return errNoTarget
	}
	for _, v := range r.Targets {
		if !v.Met {
			return errMissed
		}
	}
	return nil
}

func (r *report) writeTargets(b *bytes.Buffer) {
	if len(r.Targets) == 0 {
		return
	}
	b.WriteString("\nTargets:\n")
	for _, v := range r.Targets {
		box := "[ ]"
		if v.Met {
			box = "[x]"
		}
		fmt.Fprintf(b, "- %s %s, %s\n", box, v.Kind, v.Text)
	}
}
