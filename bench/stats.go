package main

import (
	"math"
	"slices"
)

// quantile returns the value below which the share q of the values lies, between
// neighbours in proportion. Of no values it is NaN.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	below := int(at)
	above := min(below+1, len(sorted)-1)
	part := at - float64(below)
	return sorted[below]*(1-part) + sorted[above]*part
}

func median(values []float64) float64 { return quantile(values, 0.5) }

// spread is a median with the quartiles: half of the values lie between them.
type spread struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

func spreadOf(values []float64) spread {
	return spread{Median: median(values), Low: quantile(values, 0.25), High: quantile(values, 0.75)}
}

// negligible is a base to which a ratio says nothing: an allocation in a hundred
// operations. Times and rates are far above it, in the units of the metrics.
const negligible = 0.01

// ratios divides slice by slice. It leaves out those with a negligible base, and
// returns nil if none are left.
func ratios(values, base []float64) []float64 {
	var r []float64
	for i := range min(len(values), len(base)) {
		if base[i] >= negligible {
			r = append(r, values[i]/base[i])
		}
	}
	return r
}
