package main

import (
	"bytes"
	"context"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

func testDemo(t *testing.T, args ...string) (*demo, *bytes.Buffer) {
	t.Helper()
	o, err := parse(args)
	require.NoError(t, err)
	d := newDemo(o)
	out := new(bytes.Buffer)
	d.out = out
	return d, out
}

func TestDemo(t *testing.T) {
	t.Parallel()
	p := start(t, nil, nil, "--demo=4MiB")
	require.Equal(t, 0, p.status())
	require.Regexp(t, `^4 MiB in \d+\.\d\d s, [\d.]+ .?i?B/s, SHA-256 matches, provider \w+\n$`, p.out.String())
	require.Empty(t, p.err.String(), "no progress bar without a terminal")
}

func TestDemoSizes(t *testing.T) {
	for _, size := range []string{"1", "262143", "262145", "1MB"} {
		d, out := testDemo(t, "--demo="+size, "--crc")
		require.NoError(t, d.run(t.Context()), size)
		require.Contains(t, out.String(), "SHA-256 matches")
	}
}

// faulty passes writes on, changed.
type faulty struct {
	to     io.Writer
	n      int
	change func(n int, p []byte) []byte // n is how much came before
}

func (f *faulty) Write(p []byte) (int, error) {
	q := f.change(f.n, bytes.Clone(p))
	f.n += len(p)
	if _, err := f.to.Write(q); err != nil {
		return 0, err
	}
	return len(p), nil
}

func TestDemoFailsIfAByteDiffers(t *testing.T) {
	for name, c := range map[string]struct {
		change func(n int, p []byte) []byte
		want   string
	}{
		"one bit": {func(n int, p []byte) []byte {
			if at := 700_000 - n; at >= 0 && at < len(p) {
				p[at] ^= 1
			}
			return p
		}, "SHA-256 of the 1048576 bytes sent is "},
		"two bytes swapped": {func(n int, p []byte) []byte {
			if n == 0 {
				p[0], p[1] = 1, 2
			}
			return p
		}, "SHA-256"},
		"a byte lost": {func(n int, p []byte) []byte {
			if n == 0 {
				return p[1:]
			}
			return p
		}, "1048576 bytes were sent and 1048575 arrived"},
	} {
		d, out := testDemo(t, "--demo=1MiB")
		d.wire = func(conn io.Writer) io.Writer { return &faulty{to: conn, change: c.change} }
		err := d.run(t.Context())
		require.ErrorContains(t, err, c.want, name)
		require.Equal(t, statusFailure, statusOf(err))
		require.Empty(t, out.String())
	}
}

func TestDemoThatCantSendFails(t *testing.T) {
	d, _ := testDemo(t, "--demo=1MiB")
	d.wire = func(io.Writer) io.Writer {
		r, w := io.Pipe()
		r.CloseWithError(io.ErrNoProgress)
		return w
	}
	require.ErrorContains(t, d.run(t.Context()), io.ErrNoProgress.Error())
}

func TestDemoIsInterrupted(t *testing.T) {
	d, _ := testDemo(t, "--demo=1TiB")
	ctx, cancel := context.WithCancelCause(t.Context())
	d.wire = func(conn io.Writer) io.Writer {
		return &faulty{to: conn, change: func(n int, p []byte) []byte {
			if n > 1<<20 {
				cancel(signalError(2))
			}
			return p
		}}
	}
	require.Equal(t, 130, statusOf(d.run(ctx)))
}
