package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// runner is a kind with its server running.
type runner struct {
	kind
	peer peer
}

// measureAll measures every point for every kind.
func measureAll(ctx context.Context, o options, progress io.Writer) (r *report, err error) {
	var runners []*runner
	defer func() {
		for _, u := range runners {
			err = errors.Join(err, u.peer.close())
		}
	}()
	for _, k := range kinds(o) {
		p, err := k.start(ctx, o)
		if err != nil {
			return nil, err
		}
		runners = append(runners, &runner{kind: k, peer: p})
	}
	r = newReport(o)
	for _, pt := range points {
		if !o.only.MatchString(pt.String()) {
			continue
		}
		fmt.Fprintf(progress, "%s\n", pt)
		series, err := measurePoint(ctx, o, pt, runners)
		if err != nil {
			return nil, err
		}
		r.add(pt, series)
	}
	for _, u := range runners {
		r.Kinds = append(r.Kinds, kindInfo{u.name, u.peer.describe()})
	}
	r.judge()
	return r, nil
}

// series is what the slices of a point and kind found.
type series struct {
	kind    string
	values  [][]float64 // of each metric, in each slice
	latency *hdrhistogram.Histogram
}

// measurePoint gives the kinds their slices in turn, so that whatever else the
// machine does hits all alike.
func measurePoint(ctx context.Context, o options, pt point, runners []*runner) ([]*series, error) {
	if !pt.alone() {
		return alternate(ctx, o, pt, runners)
	}
	var all []*series
	for _, u := range runners {
		s, err := alternate(ctx, o, pt, []*runner{u})
		if err != nil {
			return nil, err
		}
		all = append(all, s...)
	}
	return all, nil
}

// turn is a kind's session, and what it found.
type turn struct {
	session session
	series  *series
}

func alternate(ctx context.Context, o options, pt point, runners []*runner) (all []*series, err error) {
	var turns []turn
	defer func() {
		for _, t := range turns {
			err = errors.Join(err, t.session.close())
		}
	}()
	fail := func(kind string, err error) ([]*series, error) {
		return nil, fmt.Errorf("%s, %s: %w", kind, pt, err)
	}
	for _, u := range runners {
		s, err := u.peer.open(ctx, pt)
		if errors.Is(err, errors.ErrUnsupported) {
			continue
		}
		if err != nil {
			return fail(u.name, err)
		}
		turns = append(turns, turn{s, newSeries(u.name, pt)})
	}
	rounds, length := pt.schedule(o)
	if !pt.alone() {
		if err := warmUp(ctx, turns, length); err != nil {
			return fail("warm-up", err)
		}
	}
	for range rounds {
		for _, t := range turns {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			s, err := t.session.slice(ctx, length)
			if err != nil {
				return fail(t.series.kind, err)
			}
			t.series.add(pt, s)
		}
		slices.Reverse(turns) // whoever goes first has no advantage
	}
	for _, u := range runners {
		for _, t := range turns {
			if t.series.kind == u.name {
				all = append(all, t.series)
			}
		}
	}
	return all, nil
}

// warmUp has every session work for a moment: caches, windows, the runtime.
func warmUp(ctx context.Context, turns []turn, length time.Duration) error {
	for _, t := range turns {
		if _, err := t.session.slice(ctx, length/2); err != nil {
			return fmt.Errorf("%s: %w", t.series.kind, err)
		}
	}
	return nil
}

func newSeries(kind string, pt point) *series {
	s := &series{kind: kind, values: make([][]float64, len(pt.metrics()))}
	if pt.what == roundTrip {
		s.latency = newLatencies()
	}
	return s
}

func (s *series) add(pt point, found sample) {
	for i, m := range pt.metrics() {
		s.values[i] = append(s.values[i], m.of(found))
	}
	if s.latency != nil {
		s.latency.Merge(found.latency)
	}
}
