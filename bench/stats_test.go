package main

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestQuantile(t *testing.T) {
	for _, c := range []struct {
		values []float64
		q      float64
		want   float64
	}{
		{[]float64{7}, 0.5, 7},
		{[]float64{3, 1, 2}, 0.5, 2},
		{[]float64{4, 1, 3, 2}, 0.5, 2.5},
		{[]float64{5, 1, 4, 2, 3}, 0.25, 2},
		{[]float64{5, 1, 4, 2, 3}, 1, 5},
		{[]float64{5, 1, 4, 2, 3}, 0, 1},
		{[]float64{0, 10}, 0.25, 2.5},
	} {
		require.InDelta(t, c.want, quantile(c.values, c.q), 1e-9, "%v of %v", c.q, c.values)
	}
	require.True(t, math.IsNaN(median(nil)))
}

func TestQuantileLeavesTheOrder(t *testing.T) {
	values := []float64{3, 1, 2}
	median(values)
	require.Equal(t, []float64{3, 1, 2}, values)
}

func TestRatiosAreOfTheSameSlice(t *testing.T) {
	require.Equal(t, []float64{2, 0.5, 3}, ratios([]float64{20, 10, 3}, []float64{10, 20, 1}))
	// The machine got slower for both: the ratio doesn't see it.
	require.Equal(t, spread{2, 2, 2}, spreadOf(ratios([]float64{20, 2, 10}, []float64{10, 1, 5})))
}

func TestRatiosLeaveOutNegligibleBases(t *testing.T) {
	require.Equal(t, []float64{2}, ratios([]float64{1, 2, 3}, []float64{0, 1, 0.001}))
	require.Nil(t, ratios([]float64{1}, []float64{0}))
}
