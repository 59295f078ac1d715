package main

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

// shortSize writes a size as in "64K".
func shortSize(n int) string {
	number, unit, _ := strings.Cut(sizeString(n), " ")
	return number + strings.Trim(unit, "iB")
}

const plotWidth, plotHeight = 16 * vg.Centimeter, 10 * vg.Centimeter

// plot writes throughput.png and a latency-SIZE.png for each size of round trip.
func (r *report) plot(dir string) error {
	if err := r.plotThroughput(filepath.Join(dir, "throughput.png")); err != nil {
		return err
	}
	for _, pt := range points {
		if pt.what != roundTrip {
			continue
		}
		name := "latency-" + shortSize(pt.size) + ".png"
		if err := r.plotLatency(pt, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// curve is a kind's line, with quartiles if there are any.
type curve struct {
	plotter.XYs
	plotter.YErrors
}

func (r *report) plotThroughput(file string) error {
	p := plot.New()
	p.Title.Text = "Throughput, one direction, one connection\n(median and quartiles of the slices)"
	p.X.Label.Text = "message size in bytes"
	p.Y.Label.Text = "MB/s"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.Y.Tick.Marker = decades{}
	var ticks plot.ConstantTicks
	curves := make(map[string]*curve)
	for _, row := range r.Rows {
		if row.What != stream || row.Metric != "throughput" {
			continue
		}
		ticks = append(ticks, plot.Tick{Value: float64(row.Size), Label: shortSize(row.Size)})
		for _, v := range row.Values {
			c := curves[v.Kind]
			if c == nil {
				c = new(curve)
				curves[v.Kind] = c
			}
			c.XYs = append(c.XYs, plotter.XY{X: float64(row.Size), Y: v.Value.Median})
			c.YErrors = append(c.YErrors, struct{ Low, High float64 }{v.Value.Median - v.Value.Low, v.Value.High - v.Value.Median})
		}
	}
	p.X.Tick.Marker = ticks
	return r.draw(p, curves, true, file)
}

func (r *report) plotLatency(pt point, file string) error {
	p := plot.New()
	p.Title.Text = pt.String() + " latency by percentile"
	p.X.Label.Text = "percentile"
	p.Y.Label.Text = "µs"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.Y.Tick.Marker = decades{}
	p.X.Tick.Marker = plot.ConstantTicks{
		{Value: 1, Label: "0"}, {Value: 2, Label: "50"}, {Value: 10, Label: "90"}, {Value: 100, Label: "99"},
		{Value: 1e3, Label: "99.9"}, {Value: 1e4, Label: "99.99"}, {Value: 1e5, Label: "99.999"}, {Value: 1e6, Label: "99.9999"},
	}
	curves := make(map[string]*curve)
	for _, l := range r.Latencies {
		if l.Size != pt.size {
			continue
		}
		c := new(curve)
		for _, q := range l.Percentiles {
			// Beyond that one round trip decides.
			if x := 100 / (100 - q.Percentile); q.Microseconds > 0 && x <= float64(l.Count) {
				c.XYs = append(c.XYs, plotter.XY{X: x, Y: q.Microseconds})
			}
		}
		curves[l.Kind] = c
	}
	return r.draw(p, curves, false, file)
}

// draw saves a plot of the curves, in the order of the kinds; without any it
// saves none.
func (r *report) draw(p *plot.Plot, curves map[string]*curve, points bool, file string) error {
	if len(curves) == 0 {
		return nil
	}
	p.Add(plotter.NewGrid())
	p.Legend.Top, p.Legend.Left = true, true
	p.Legend.XOffs, p.Legend.YOffs, p.Legend.Padding = vg.Millimeter*2, -vg.Millimeter*2, vg.Millimeter
	p.Title.Padding = vg.Millimeter * 2
	for i, k := range r.Kinds {
		c := curves[k.Name]
		if c == nil {
			continue
		}
		line, dots, err := plotter.NewLinePoints(c.XYs)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		line.Color, line.Width = plotutil.Color(i), vg.Points(1.5)
		dots.Color, dots.Shape = plotutil.Color(i), plotutil.Shape(i)
		p.Add(line)
		p.Legend.Add(k.Name, line)
		if !points {
			continue
		}
		bars, err := plotter.NewYErrorBars(c)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		bars.Color = plotutil.Color(i)
		p.Add(dots, bars)
	}
	return p.Save(plotWidth, plotHeight, file)
}

// decades marks 1, 2 and 5 of each power of ten, and the others without a label.
type decades struct{}

func (decades) Ticks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for unit := math.Pow(10, math.Floor(math.Log10(low))); unit <= high; unit *= 10 {
		for i := 1.0; i < 10; i++ {
			v := i * unit
			if v < low || v > high {
				continue
			}
			t := plot.Tick{Value: v}
			if i == 1 || i == 2 || i == 5 {
				t.Label = number(v)
				if v >= 1 {
					t.Label = fmt.Sprintf("%.0f", v)
				}
			}
			ticks = append(ticks, t)
		}
	}
	return ticks
}
