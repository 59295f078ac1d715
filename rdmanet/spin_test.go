package rdmanet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSpinnerGivesUpAndTriesAgain(t *testing.T) {
	s := spinner{limit: time.Millisecond}
	waits := func(n int, hit bool) (spins int) {
		for range n {
			if s.worthwhile() {
				s.tried(hit)
				spins++
			}
		}
		return spins
	}
	require.Equal(t, 100, waits(100, true))
	require.Equal(t, spinMisses, waits(spinMisses+spinMinPause-1, false))
	require.Less(t, waits(100_000, false), 100_000/spinMaxPause+10)
	require.Positive(t, waits(spinMaxPause, true), "one hit, and it spins again")
	require.Equal(t, 10, waits(10, true))
	require.Zero(t, (&spinner{}).limit)
	require.False(t, (&spinner{}).worthwhile())
	require.False(t, (&spinner{limit: -1}).worthwhile())
}

// TestNotAllSpin: more connections wait than may spin.
func TestNotAllSpin(t *testing.T) {
	checkLeaks(t)
	was := maxSpinning
	defer func() { maxSpinning = was }()
	for _, maxSpinning = range []int32{0, 1} {
		cfg := Config{Spin: time.Hour}
		l := listen(t, ListenConfig{Config: cfg})
		for range 3 {
			a, b := pairOn(t, cfg, l)
			closeLater(t, a, b)
			go func() { _, _ = a.Read(make([]byte, 1)) }()
			time.AfterFunc(20*time.Millisecond, func() { _, _ = b.Write([]byte("x")) })
			eventually(t, func() bool { return a.Stats().BytesRead == 1 }, "it arrives")
			if maxSpinning == 0 {
				require.Zero(t, a.Stats().SpinHits+b.Stats().SpinHits)
			}
		}
		require.Zero(t, spinning.Load())
	}
}

func TestWakeUpTakesTime(t *testing.T) {
	checkLeaks(t)
	require.Positive(t, wakeUp())
	require.GreaterOrEqual(t, deviceSpin(), 100*time.Microsecond)
	require.LessOrEqual(t, deviceSpin(), time.Millisecond)
}
