package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// report is everything a run found. Its JSON is what --json writes.
type report struct {
	Machine   machine    `json:"machine"`
	Processes int        `json:"processes"`
	Duration  string     `json:"duration"` // of a point and kind
	Slice     string     `json:"slice"`
	Kinds     []kindInfo `json:"kinds"` // the first is the baseline
	Rows      []row      `json:"rows"`
	Latencies []latency  `json:"latencies"`
	Targets   []verdict  `json:"targets"`
}

type kindInfo struct {
	Name        string `json:"name"`
	Description string `json:"description"`
}

// row is one metric of one point.
type row struct {
	What   what    `json:"what"`
	Size   int     `json:"size,omitempty"` // of a message in bytes
	Metric string  `json:"metric"`
	Unit   string  `json:"unit"`
	Lower  bool    `json:"lowerIsBetter"`
	Values []value `json:"values"`
}

// value is a row's number for one kind.
type value struct {
	Kind   string    `json:"kind"`
	Value  spread    `json:"value"`
	Ratio  *spread   `json:"ratio,omitempty"` // to the baseline, of the slices' ratios
	Slices []float64 `json:"slices"`
}

// latency is a distribution of round trips over all slices.
type latency struct {
	Size        int        `json:"size"`
	Kind        string     `json:"kind"`
	Count       int64      `json:"count"`
	Percentiles []quantity `json:"percentiles"`
}

type quantity struct {
	Percentile   float64 `json:"percentile"`
	Microseconds float64 `json:"microseconds"`
}

func newReport(o options) *report {
	r := &report{Machine: thisMachine(), Processes: 1, Duration: o.duration.String(), Slice: o.sliceLength.String()}
	if o.processes {
		r.Processes = 2
	}
	return r
}

// add takes the series of a point, of which the first is the baseline's if the
// baseline has that point.
func (r *report) add(pt point, all []*series) {
	baseline := kinds(options{})[0].name
	for i, m := range pt.metrics() {
		row := row{What: pt.what, Size: pt.size, Metric: m.name, Unit: m.unit, Lower: m.lower}
		for _, s := range all {
			v := value{Kind: s.kind, Slices: s.values[i], Value: spreadOf(s.values[i])}
			if all[0].kind == baseline && s != all[0] && !pt.alone() { // a ratio of two numbers about 0 says nothing
				if rs := ratios(s.values[i], all[0].values[i]); rs != nil {
					ratio := spreadOf(rs)
					v.Ratio = &ratio
				}
			}
			row.Values = append(row.Values, v)
		}
		r.Rows = append(r.Rows, row)
	}
	for _, s := range all {
		if s.latency != nil {
			r.Latencies = append(r.Latencies, newLatency(pt, s))
		}
	}
}

func newLatency(pt point, s *series) latency {
	const ticksPerHalfDistance = 5
	l := latency{Size: pt.size, Kind: s.kind, Count: s.latency.TotalCount()}
	for _, b := range s.latency.CumulativeDistributionWithTicks(ticksPerHalfDistance) {
		l.Percentiles = append(l.Percentiles, quantity{b.Quantile, float64(b.ValueAt) / 1e3})
	}
	return l
}

func (r *report) row(pt point, metric string) *row {
	for i, row := range r.Rows {
		if row.What == pt.what && row.Size == pt.size && row.Metric == metric {
			return &r.Rows[i]
		}
	}
	return nil
}

// value returns nil if the kind doesn't have that row.
func (r *row) value(kind string) *value {
	for i, v := range r.Values {
		if v.Kind == kind {
			return &r.Values[i]
		}
	}
	return nil
}

func (r *report) writeJSON(name string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(b, '\n'), 0o666)
}

func (r *report) writeMarkdown(w io.Writer) error {
	var b bytes.Buffer
	m := r.Machine
	fmt.Fprintf(&b, "%s, %d CPUs (GOMAXPROCS %d), %s, %s, load %s, %s\n\n", m.CPU, m.CPUs, m.MaxProcs, m.Kernel, m.Go, m.Load, m.Date)
	fmt.Fprintf(&b, "Client and server in %d process(es); %s for each point and kind, in slices of %s.\n", r.Processes, r.Duration, r.Slice)
	for _, k := range r.Kinds {
		fmt.Fprintf(&b, "`%s` is %s.\n", k.Name, k.Description)
	}
	b.WriteByte('\n')
	writeTable(&b, r.table())
	r.writeTargets(&b)
	_, err := w.Write(b.Bytes())
	return err
}

// table returns the cells, with a header.
func (r *report) table() [][]string {
	header := []string{"", "unit", "better"}
	for _, k := range r.Kinds {
		header = append(header, k.Name)
	}
	for _, k := range r.Kinds[1:] {
		header = append(header, k.Name+"/"+r.Kinds[0].Name, "quartiles")
	}
	cells := [][]string{header}
	for _, row := range r.Rows {
		cells = append(cells, row.cells(r.Kinds))
	}
	return cells
}

func (r *row) cells(kinds []kindInfo) []string {
	better := "higher"
	if r.Lower {
		better = "lower"
	}
	cells := []string{point{r.What, r.Size}.String() + ": " + r.Metric, r.Unit, better}
	for _, k := range kinds {
		cell := "–"
		if v := r.value(k.Name); v != nil {
			cell = number(v.Value.Median)
		}
		cells = append(cells, cell)
	}
	for _, k := range kinds[1:] {
		ratio, span := "–", ""
		if v := r.value(k.Name); v != nil && v.Ratio != nil {
			ratio = fmt.Sprintf("%.2f", v.Ratio.Median)
			span = fmt.Sprintf("%.2f to %.2f", v.Ratio.Low, v.Ratio.High)
		}
		cells = append(cells, ratio, span)
	}
	return cells
}

// number writes three significant digits, without an exponent.
func number(x float64) string {
	switch a := math.Abs(x); {
	case math.IsNaN(x):
		return "–"
	case a < 0.0005:
		return "0"
	case a >= 100:
		return strconv.FormatFloat(x, 'f', 0, 64)
	case a >= 10:
		return strconv.FormatFloat(x, 'f', 1, 64)
	case a >= 1:
		return strconv.FormatFloat(x, 'f', 2, 64)
	}
	return strconv.FormatFloat(x, 'f', 3, 64)
}

// leftColumns are aligned to the left: the name, its unit and which is better.
const leftColumns = 3

// writeTable writes a Markdown table that can be read as it is, too.
func writeTable(b *bytes.Buffer, cells [][]string) {
	widths := make([]int, len(cells[0]))
	for _, line := range cells {
		for i, c := range line {
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	rule := make([]string, len(widths))
	for i, w := range widths {
		rule[i] = strings.Repeat("-", w)
		if i >= leftColumns {
			rule[i] = strings.Repeat("-", w-1) + ":"
		}
	}
	for _, line := range slices.Insert(slices.Clone(cells), 1, rule) {
		for i, c := range line {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c))
			if i < leftColumns {
				b.WriteString("| " + c + pad + " ")
			} else {
				b.WriteString("| " + pad + c + " ")
			}
		}
		b.WriteString("|\n")
	}
}
