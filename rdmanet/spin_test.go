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

// setMaxHolding lets n goroutines spin or nap, whatever the machine has.
func setMaxHolding(t *testing.T, n int32) {
	was := maxHolding
	t.Cleanup(func() { maxHolding = was })
	maxHolding = n
}

// TestNotAllSpin: more connections wait for an answer than may spin; and who waits
// for no answer does not.
func TestNotAllSpin(t *testing.T) {
	checkLeaks(t)
	setMaxHolding(t, 1)
	cfg := Config{Spin: time.Hour}
	l := listen(t, ListenConfig{Config: cfg})
	for _, asked := range []bool{true, false} {
		for _, maxHolding = range []int32{1, 0} {
			var waiting, others []*Conn
			for range 3 {
				a, b := pairOn(t, cfg, l)
				closeLater(t, a, b)
				if asked {
					write(t, a, []byte("?"))
				}
				go func() { _, _ = a.Read(make([]byte, 1)) }()
				waiting, others = append(waiting, a), append(others, b)
			}
			want := maxHolding
			if !asked {
				want = 0
			}
			eventually(t, func() bool {
				parked := 0
				for _, c := range waiting {
					if c.Stats().Parks > 0 {
						parked++
					}
				}
				return parked == len(waiting)-int(want)
			}, "all but %d park", want)
			require.Equal(t, want, holding.Load())
			hits := uint64(0)
			for i, c := range waiting {
				write(t, others[i], []byte("!"))
				eventually(t, func() bool { return c.Stats().BytesRead == 1 }, "it arrives")
				hits += c.Stats().SpinHits
			}
			require.EqualValues(t, want, hits)
		}
	}
}

// TestSpinningIsInterrupted by the deadline and Close, however long it may last.
func TestSpinningIsInterrupted(t *testing.T) {
	checkLeaks(t)
	setMaxHolding(t, 1)
	a, _ := open(t, Config{Spin: time.Hour})
	for _, end := range []func(){func() { _ = a.SetReadDeadline(time.Now()) }, func() { _ = a.Close() }} {
		_ = a.SetReadDeadline(time.Time{})
		write(t, a, []byte("?"))
		ended := make(chan error, 1)
		go func() {
			_, err := a.Read(make([]byte, 1))
			ended <- err
		}()
		eventually(t, func() bool { return holding.Load() == 1 }, "it spins")
		within(t, patience, func() {
			end()
			require.Error(t, <-ended)
		})
	}
}

func TestWakeUpTakesTime(t *testing.T) {
	checkLeaks(t)
	require.Positive(t, wakeUp())
	require.GreaterOrEqual(t, deviceSpin(), 100*time.Microsecond)
	require.LessOrEqual(t, deviceSpin(), time.Millisecond)
}
