package rdmanet

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestReadAndWriteAllocateNothing in steady state, whoever has to wait.
func TestReadAndWriteAllocateNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, size := range []int{64, 64 << 10} {
		onEveryPath(t, func(t *testing.T, cfg Config) {
			if cfg.Provider == "fake" {
				t.Skip("the fake is made of simple things, which allocate")
			}
			for _, deadline := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d bytes, deadline %v", size, deadline), func(t *testing.T) {
					checkLeaks(t)
					a, b := open(t, cfg)
					if deadline {
						_ = a.SetDeadline(time.Now().Add(time.Hour))
						_ = b.SetDeadline(time.Now().Add(time.Hour))
					}
					p, q := make([]byte, size), make([]byte, size)
					pass := func(from, to *Conn) {
						if _, err := from.Write(p); err != nil {
							panic(err)
						}
						for n := 0; n < size; {
							k, err := to.Read(q)
							if err != nil {
								panic(err)
							}
							n += k
						}
					}
					for range 200 { // to steady state
						pass(a, b)
						pass(b, a)
					}
					defer debug.SetGCPercent(debug.SetGCPercent(-1))
					n := testing.AllocsPerRun(500, func() {
						pass(a, b)
						pass(b, a)
					})
					require.Zero(t, n, "allocations")
				})
			}
		})
	}
}

// TestBlockedReadsAllocateNothing has the reader park for each message.
func TestBlockedReadsAllocateNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	needsSoftware(t)
	checkLeaks(t)
	a, b := open(t, Config{})
	go func() { // echo
		buf := make([]byte, 64)
		for {
			if _, err := io.ReadFull(b, buf); err != nil {
				return
			}
			if _, err := b.Write(buf); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, 64)
	ping := func() {
		if _, err := a.Write(buf); err != nil {
			panic(err)
		}
		if _, err := io.ReadFull(a, buf); err != nil {
			panic(err)
		}
	}
	for range 500 {
		ping()
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	require.Less(t, testing.AllocsPerRun(2000, ping), 0.5)
}

// TestIdleConnectionHasNoGoroutine of its own.
func TestIdleConnectionHasNoGoroutine(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{})
	a, b := pairOn(t, Config{}, l)
	closeLater(t, a, b)
	roundTrip(t, a, b, bytesOf(1, 1000))
	before := runtime.NumGoroutine()
	for range 10 {
		c, d := pairOn(t, Config{}, l)
		closeLater(t, c, d)
		roundTrip(t, c, d, bytesOf(1, 1000))
	}
	eventually(t, func() bool { return runtime.NumGoroutine() <= before }, "no more goroutines: %d, were %d", runtime.NumGoroutine(), before)
}

// TestOneProcessor runs the tests that move data again with GOMAXPROCS=1.
func TestOneProcessor(t *testing.T) {
	if os.Getenv("GOMAXPROCS") == "1" {
		t.Skip("this is it")
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	const tests = "^(TestEverySizeArrives|TestSmallWritesCoalesceInOrder|TestLoneSmallWriteIsDelivered|TestFullDuplexBulk|" +
		"TestDeadlineSetWhileBlockedEndsTheCall|TestCloseDeliversManySmallWrites|TestHeldBuffersStallThePeerAndReleaseResumesIt|TestRPC)$"
	cmd := exec.Command(exe, "-test.run="+tests, "-test.short", "-test.timeout=100s")
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.True(t, strings.Contains(string(out), "PASS"))
}
