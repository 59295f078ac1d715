package rdmanet

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestReceiversAreAlwaysReady: flow control never lets a message find no receive,
// by what the device itself counts.
func TestReceiversAreAlwaysReady(t *testing.T) {
	if testProvider() != ProviderDevice {
		t.Skip("about devices")
	}
	counters := rnrCounters(t)
	if len(counters) == 0 {
		t.Skip("no device here counts RNR NAKs")
	}
	before := total(t, counters)
	for _, cfg := range []Config{{}, tiny, {BufferSize: 4 << 10, RecvDepth: 3, SendDepth: 32}} {
		a, b := open(t, cfg)
		ends := make(chan error, 4)
		for _, c := range []*Conn{a, b} {
			_ = c.SetDeadline(time.Now().Add(patience))
			go func() {
				_, err := io.CopyN(onlyWriter{c}, stream(1), int64(scaled(2, 64))<<20)
				ends <- errors.Join(err, c.CloseWrite())
			}()
			go func() { ends <- readSlowly(c) }()
		}
		for range cap(ends) {
			require.NoError(t, <-ends)
		}
	}
	require.Equal(t, before, total(t, counters))
}

// readSlowly reads to the end, and lets the peer run into the end of the window
// now and then.
func readSlowly(c *Conn) error {
	buf := make([]byte, 100_000)
	for i := 0; ; i++ {
		_, err := c.Read(buf[:1+(i*7919)%len(buf)])
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if i%50 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
}

// onlyWriter hides ReadFrom.
type onlyWriter struct{ io.Writer }

func rnrCounters(t testing.TB) []string {
	files, err := filepath.Glob("/sys/class/infiniband/*/ports/*/hw_counters/*rnr*")
	require.NoError(t, err)
	return files
}

func total(t testing.TB, files []string) (sum uint64) {
	for _, f := range files {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		require.NoError(t, err, f)
		sum += n
	}
	return sum
}
