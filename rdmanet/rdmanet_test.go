package rdmanet

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// TestMain makes sure that every test has given everything back.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if err := leaked(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func leaked() error {
	if err := goleak.Find(); err != nil {
		return err
	}
	loops.Lock()
	defer loops.Unlock()
	arenas.Lock()
	defer arenas.Unlock()
	if len(loops.m) > 0 || len(arenas.m) > 0 {
		return fmt.Errorf("left over: %d event channels, %d arenas", len(loops.m), len(arenas.m))
	}
	return nil
}

// checkLeaks makes the test fail unless, at its end, everything is given back:
// event channels closed, buffers in their pools, goroutines gone.
func checkLeaks(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		var err error // goleak has retries of its own
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); runtime.Gosched() {
			if err = leaked(); err == nil {
				return
			}
		}
		require.NoError(t, err)
	})
}

// pair returns both ends of a connection over a listener of its own.
func pair(t testing.TB, cfg Config) (dialed, accepted *Conn) {
	t.Helper()
	l, err := (&ListenConfig{Config: cfg}).Listen(t.Context(), "rdma", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return pairOn(t, cfg, l)
}

func pairOn(t testing.TB, cfg Config, l net.Listener) (dialed, accepted *Conn) {
	t.Helper()
	type result struct {
		c   net.Conn
		err error
	}
	got := make(chan result, 1)
	go func() {
		c, err := l.Accept()
		got <- result{c, err}
	}()
	d, err := (&Dialer{Config: cfg}).DialContext(t.Context(), "rdma", l.Addr().String())
	require.NoError(t, err)
	r := <-got
	require.NoError(t, r.err)
	return d.(*Conn), r.c.(*Conn)
}
