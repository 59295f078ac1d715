package rdmanet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
)

// What a child that is recorded gets from its test.
const (
	envRecord = "RDMANET_TEST_RECORD" // the file; the recorder reads it too
	envEnding = "RDMANET_TEST_ENDING" // which of endings
	envAddr   = "RDMANET_TEST_ADDR"
)

// recorded is how many connections are open at a time in that child, recordedBytes
// what each of their directions carries at least, and unread what one may write
// while the peer doesn't read: it can owe almost half a window.
const (
	recorded      = 2
	recordedBytes = 3 << 20
	unread        = DefaultBufferSize * DefaultRecvDepth / 2
)

// endings are ways to end a connection that has carried data in both directions.
var endings = map[string]func(dialed, accepted *Conn) error{
	"half-close, then both close": func(a, b *Conn) error {
		return inTurn(
			a.CloseWrite,
			func() error { return expectEnd(b, io.EOF) },
			func() error { return carry(b, a, 2, 1<<20) },
			b.CloseWrite,
			func() error { return expectEnd(a, io.EOF) },
			a.Close, b.Close)
	},
	"close with data on its way": func(a, b *Conn) error {
		return inTurn(
			func() error { return sendN(a, 3, unread) },
			a.Close,
			func() error { return receiveN(b, 3, unread) },
			func() error { return expectEnd(b, io.EOF) },
			b.Close)
	},
	"the peer closes first": func(a, b *Conn) error {
		return inTurn(
			func() error { return together(b.Close, func() error { return expectEnd(a, io.EOF) }) },
			a.Close)
	},
	"both close at once": func(a, b *Conn) error { return together(a.Close, b.Close) },
	"abort with data on its way": func(a, b *Conn) error {
		return inTurn(
			func() error { return sendN(a, 3, unread) },
			func() error { return sendN(b, 4, unread) },
			func() error { return a.SetLinger(0) },
			a.Close,
			func() error { return expectEnd(b, syscall.ECONNRESET) },
			b.Close)
	},
	"the peer aborts": func(a, b *Conn) error {
		return inTurn(
			func() error { return b.SetLinger(0) },
			func() error { return together(b.Close, func() error { return expectEnd(a, syscall.ECONNRESET) }) },
			a.Close)
	},
	"both abort at once": func(a, b *Conn) error {
		return inTurn(
			func() error { return errors.Join(a.SetLinger(0), b.SetLinger(0)) },
			func() error { return together(a.Close, b.Close) })
	},
}

// TestCloseOrder proves from a record of all calls of rdma-core that Close does
// what section 6 of the design says, whatever ends a connection.
func TestCloseOrder(t *testing.T) {
	onEachDevice(t, func(t *testing.T, d labDevice) {
		libraries := buildRecorder(t)
		for name := range endings {
			t.Run(name, func(t *testing.T) {
				calls := recordChild(t, libraries, d.addr, name)
				a, err := auditRecord(calls, d.siw)
				t.Logf("%d calls: %+v", len(calls), a)
				if err != nil {
					t.Errorf("%v\nthe record's end:\n%s", err, tail(calls, 300))
				}
				require.Equal(t, 2*recorded, a.connections)
				require.Greater(t, a.posted, recorded*2*2*recordedBytes/(DefaultBufferSize+headerLen), "sends and receives of either direction")
				require.NotZero(t, a.events)
				require.NotZero(t, a.flushed, "receives are posted until the end")
				if !d.siw {
					require.Zero(t, a.left)
				}
			})
		}
	})
}

func tail(calls []call, n int) string {
	var b strings.Builder
	for _, c := range calls[max(0, len(calls)-n):] {
		fmt.Fprintf(&b, "%d %s\n", c.line, c.text)
	}
	return b.String()
}

// buildRecorder returns a directory with the recorder under rdma-core's names.
func buildRecorder(t *testing.T) (dir string) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		skipWithoutDevices(t, "no C compiler; try: apt install gcc libc6-dev")
	}
	dir = t.TempDir()
	library := filepath.Join(dir, "librdmacm.so.1")
	out, err := exec.Command(cc, "-shared", "-fPIC", "-Wall", "-Werror", "-I", filepath.Join("..", "internal", "rdmacore"),
		fmt.Sprintf("-DREAL_CM=%q", loadedLibrary(t, "librdmacm.so")),
		fmt.Sprintf("-DREAL_VERBS=%q", loadedLibrary(t, "libibverbs.so")),
		"-o", library, filepath.Join("testdata", "recorder", "recorder.c"), "-ldl").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, os.Symlink(library, filepath.Join(dir, "libibverbs.so.1")))
	return dir
}

// loadedLibrary returns the path of a library that the provider has loaded.
func loadedLibrary(t *testing.T, name string) string {
	ch, err := cm.NewEventChannel(string(ProviderDevice))
	require.NoError(t, err)
	require.NoError(t, ch.Close())
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	for line := range bytes.Lines(maps) {
		if f := strings.Fields(string(line)); strings.HasPrefix(filepath.Base(f[len(f)-1]), name) {
			return f[len(f)-1]
		}
	}
	t.Fatalf("%s is not loaded", name)
	return ""
}

// recordChild has a child end connections, and returns the record of that.
func recordChild(t *testing.T, libraries, addr, ending string) []call {
	file := filepath.Join(t.TempDir(), "record")
	cmd, out := child(t, "recorded", "LD_LIBRARY_PATH="+libraries, envRecord+"="+file, envEnding+"="+ending, envAddr+"="+addr)
	var said []byte
	within(t, 2*patience, func() { said, _ = io.ReadAll(out) })
	require.NoError(t, cmd.Wait(), "%s", said)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	calls, err := parseRecord(string(text))
	require.NoError(t, err)
	return calls
}

func init() {
	children["recorded"] = func() {
		err := endThem(net.JoinHostPort(os.Getenv(envAddr), "0"), endings[os.Getenv(envEnding)])
		if err = errors.Join(err, leaked(0), leftOnDevices()); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
}

// endThem makes connections, has each carry data in both directions, and ends it,
// all of them at the same time.
func endThem(addr string, end func(dialed, accepted *Conn) error) error {
	l, err := Listen("rdma", addr)
	if err != nil {
		return err
	}
	var all []func() error
	for range recorded {
		a, b, err := connectTo(l)
		if err != nil {
			return err
		}
		all = append(all, func() error {
			return inTurn(
				func() error {
					return together(
						func() error { return carry(a, b, 0, recordedBytes) },
						func() error { return carry(b, a, 1, recordedBytes) })
				},
				func() error { return end(a, b) })
		})
	}
	return errors.Join(together(all...), l.Close())
}

func connectTo(l net.Listener) (dialed, accepted *Conn, err error) {
	limit := time.Now().Add(patience)
	_ = l.(*Listener).SetDeadline(limit)
	var a, b net.Conn
	err = together(
		func() (err error) { a, err = DialTimeout("rdma", l.Addr().String(), patience); return err },
		func() (err error) { b, err = l.Accept(); return err })
	if err != nil {
		return nil, nil, err
	}
	_, _ = a.SetDeadline(limit), b.SetDeadline(limit)
	return a.(*Conn), b.(*Conn), nil
}

// inTurn calls functions up to the first that fails.
func inTurn(steps ...func() error) error {
	for i, f := range steps {
		if err := f(); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return nil
}

// together calls functions at the same time.
func together(fs ...func() error) error {
	errs := make([]error, len(fs))
	var wg sync.WaitGroup
	for i, f := range fs {
		wg.Go(func() { errs[i] = f() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// carry sends from one end to the other, and checks what arrives.
func carry(from, to *Conn, seed uint64, n int64) error {
	return together(
		func() error { return sendN(from, seed, n) },
		func() error { return receiveN(to, seed, n) })
}

func sendN(c *Conn, seed uint64, n int64) error {
	_, err := io.CopyN(c, stream(seed), n)
	return err
}

func receiveN(c *Conn, seed uint64, n int64) error {
	var got, want sum
	if _, err := io.CopyN(&got, c, n); err != nil {
		return err
	}
	_, _ = io.CopyN(&want, stream(seed), n)
	if got.String() != want.String() {
		return fmt.Errorf("got %v, not %v", &got, &want)
	}
	return nil
}

// expectEnd reads to the end, which must be of this kind.
func expectEnd(c *Conn, want error) error {
	_, err := io.Copy(io.Discard, c)
	if err == nil {
		err = io.EOF
	}
	if !errors.Is(err, want) {
		return fmt.Errorf("the end is %w, not %w", err, want)
	}
	return nil
}
