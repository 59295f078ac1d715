package rdmanet

import (
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestModerator gets frames of one size at one interval, between naps or whatever
// else the reader does, and must make of them what a stream is.
func TestModerator(t *testing.T) {
	const limit = time.Millisecond
	for _, c := range []struct {
		size     int
		interval time.Duration
		window   int
		want     time.Duration
	}{
		{32 << 10, 100 * time.Microsecond, 16, 200 * time.Microsecond},
		{32 << 10, 100 * time.Microsecond, 64, 800 * time.Microsecond},
		{32 << 10, 100 * time.Microsecond, 1000, limit},
		{32 << 10, 100 * time.Microsecond, 8, 100 * time.Microsecond},
		{32 << 10, 100 * time.Microsecond, 1, 100 * time.Microsecond},
		{32 << 10, 25 * time.Microsecond, 16, 50 * time.Microsecond},
		{32 << 10, 20 * time.Microsecond, 16, 0}, // too fast for the kernel's timers
		{32 << 10, 20 * time.Microsecond, 64, 160 * time.Microsecond},
		{32 << 10, time.Microsecond, 4096, 512 * time.Microsecond},
		{32 << 10, 0, 4096, 0},
		{32 << 10, 2 * time.Millisecond, 16, limit},
		{32 << 10, 2002 * time.Microsecond, 16, 0}, // too slow
		{smallWrite + 1, 100 * time.Microsecond, 16, 200 * time.Microsecond},
		{smallWrite, 100 * time.Microsecond, 16, 0}, // small messages
		{64, 100 * time.Microsecond, 16, 0},
	} {
		t.Run(fmt.Sprint(c.size, " bytes every ", c.interval, ", window ", c.window), func(t *testing.T) {
			m := moderator{limit: limit}
			now, frames, bytes := time.Now(), uint64(7), uint64(1e6)
			arrive := func(n int) {
				frames, bytes = frames+uint64(n), bytes+uint64(n*c.size)
				now = now.Add(time.Duration(n) * c.interval)
			}
			next := func() time.Duration { return m.next(now, frames, bytes, c.window) }

			require.Zero(t, next(), "nothing is known yet")
			sample := max(2, c.window/probeShare)
			for range sample - 1 {
				arrive(1)
				require.Zero(t, next(), "little is known yet")
			}
			arrive(1)
			for i := range 3 * sample {
				require.Equal(t, c.want, next(), "%d", i)
				arrive(1)
			}
			arrive(10 * sample) // while the reader did something else
			require.Equal(t, c.want, next())

			for range emptyNaps {
				require.Equal(t, c.want, next())
			}
			require.Zero(t, next(), "it has ended")
			arrive(sample - 1)
			require.Zero(t, next(), "begun again, little is known")
			arrive(1)
			require.Equal(t, c.want, next())

			m.stop()
			require.Zero(t, next(), "an answer is due")
			arrive(sample)
			require.Equal(t, c.want, next())
		})
	}
}

// feed sends n pieces at a pace at which the reader has to wait for each, and
// passes what the reader has done about it.
func feed(t *testing.T, from, to *Conn, n, size int) (naps uint64) {
	was := to.Stats().Naps
	p := bytesOf(1, size)
	go func() {
		for range n {
			time.Sleep(300 * time.Microsecond)
			if _, err := from.Write(p); err != nil {
				return
			}
		}
	}()
	for range n {
		require.Equal(t, p, read(t, to, size))
	}
	return to.Stats().Naps - was
}

func TestReaderOfAStreamNaps(t *testing.T) {
	checkLeaks(t)
	setMaxHolding(t, 1)
	a, b := open(t, Config{Moderation: maxModeration, Spin: -1})
	eventually(t, func() bool { return feed(t, a, b, 50, 32<<10) > 0 }, "it naps")
	require.Zero(t, feed(t, b, a, 100, 256), "a reader of messages does not")

	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for range 50 {
			write(t, b, read(t, b, 32<<10))
		}
	}()
	was := a.Stats().Naps
	for range 50 {
		write(t, a, bytesOf(2, 32<<10))
		require.Equal(t, bytesOf(2, 32<<10), read(t, a, 32<<10))
	}
	<-answered
	require.Equal(t, was, a.Stats().Naps, "nor who waits for an answer")
}

// TestNobodyNapsBeforeLooking, nor in a write.
func TestNobodyNapsBeforeLooking(t *testing.T) {
	checkLeaks(t)
	setMaxHolding(t, 1)
	a, b := open(t, Config{Moderation: maxModeration, Spin: -1})
	naps := func() bool { return feed(t, a, b, 50, 32<<10) > 0 && b.wait.moderator.nap > 0 }
	const times = 5
	before := 0
	for range times {
		eventually(t, naps, "it naps")
		was := b.Stats().Naps
		p := bytesOf(3, 320<<10)
		write(t, a, p)
		time.Sleep(20 * time.Millisecond) // it arrives
		require.Equal(t, p, read(t, b, len(p)))
		if b.Stats().Naps > was {
			before++
		}
	}
	require.LessOrEqual(t, before, times/2, "all was there, unless the machine was busy")

	eventually(t, naps, "it naps")
	was := b.Stats().Naps
	go func() { _, _ = b.Write(make([]byte, 8<<20)) }()
	eventually(t, func() bool { return b.Stats().WriteStalls > 0 }, "it is more than the window")
	_, err := io.CopyN(io.Discard, a, 8<<20)
	require.NoError(t, err)
	require.Equal(t, was, b.Stats().Naps)
}

// TestNappingEnds with the deadline and Close.
func TestNappingEnds(t *testing.T) {
	checkLeaks(t)
	setMaxHolding(t, 1)
	_, b := open(t, Config{Moderation: maxModeration, Spin: -1})
	for _, c := range []struct {
		end  func()
		want error
	}{
		{func() { _ = b.SetReadDeadline(time.Now()) }, os.ErrDeadlineExceeded},
		{func() { _ = b.Close() }, net.ErrClosed},
	} {
		_ = b.SetReadDeadline(time.Time{})
		was := b.Stats()
		b.wait.moderator = moderator{limit: maxModeration, nap: maxModeration, begun: time.Now(), seen: was.FramesReceived, frames: was.FramesReceived}
		ended := make(chan error, 1)
		go func() {
			_, err := b.Read(make([]byte, 1))
			ended <- err
		}()
		eventually(t, func() bool { return b.Stats().Naps > was.Naps }, "it naps")
		within(t, patience, func() {
			c.end()
			require.ErrorIs(t, <-ended, c.want)
		})
	}
}

// TestNapsKeepNoMoreThanHalfTheThreads from the other goroutines.
func TestNapsKeepNoMoreThanHalfTheThreads(t *testing.T) {
	checkLeaks(t)
	setMaxHolding(t, 1)
	a, b := open(t, Config{Moderation: maxModeration, Spin: -1})
	eventually(t, func() bool { return feed(t, a, b, 50, 32<<10) > 0 }, "it naps")
	require.True(t, hold())
	require.False(t, hold())
	require.Zero(t, feed(t, a, b, 100, 32<<10))
	unhold()
	require.Zero(t, holding.Load())
	eventually(t, func() bool { return feed(t, a, b, 50, 32<<10) > 0 }, "it naps")
}

func TestModerationByDefault(t *testing.T) {
	checkLeaks(t)
	for configured, limits := range map[time.Duration][2]time.Duration{ // in software, on a device
		0:             {0, deviceNap()},
		-1:            {-1, -1},
		maxModeration: {maxModeration, maxModeration},
	} {
		a, _ := open(t, Config{Moderation: configured})
		want := limits[0]
		if a.Provider() == ProviderDevice {
			want = limits[1]
		}
		require.Equal(t, want, a.wait.moderator.limit)
	}
	require.GreaterOrEqual(t, deviceNap(), deviceSpin())
}
