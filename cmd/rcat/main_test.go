package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
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
	"go.uber.org/goleak"
)

// executable is rcat, built by TestMain, or by somebody else before.
var executable = os.Getenv("RDMANET_TEST_RCAT")

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "rcat")
	if err == nil && executable == "" {
		executable = filepath.Join(dir, "rcat")
		err = build(executable)
	}
	code := 1
	if err == nil {
		code = m.Run()
	}
	if code == 0 {
		err = goleak.Find()
	}
	os.RemoveAll(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func build(to string) error {
	args := []string{"build", "-o", to}
	if raceEnabled {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, ".")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// bound is how long anything may take that should end by itself.
const bound = time.Minute

// process is a running rcat.
type process struct {
	t        *testing.T
	cmd      *exec.Cmd
	out, err *captured
	done     chan struct{} // closed when it has ended
}

// start runs rcat. stdin is nil (/dev/null), a string or an *os.File, or anything
// else to read from. change may be nil.
func start(t *testing.T, stdin any, change func(*exec.Cmd), args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(executable, args...), out: new(captured), err: new(captured), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.err
	p.cmd.WaitDelay = bound
	switch stdin := stdin.(type) {
	case nil:
	case string:
		p.cmd.Stdin = strings.NewReader(stdin)
	case io.Reader:
		p.cmd.Stdin = stdin
	}
	if change != nil {
		change(p.cmd)
	}
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
		if t.Failed() {
			t.Logf("stderr of rcat %q:\n%s", args, p.err)
		}
	})
	return p
}

// status waits for the end and returns the exit status.
func (p *process) status() int {
	p.t.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(bound):
		require.FailNow(p.t, "rcat has not ended", "%v\n%s", p.cmd.Args, p.err)
		return -1
	}
}

// says waits until stderr contains text.
func (p *process) says(text string) { p.t.Helper(); p.has(p.err, text) }

// prints waits until stdout contains text.
func (p *process) prints(text string) { p.t.Helper(); p.has(p.out, text) }

func (p *process) has(o *captured, text string) {
	p.t.Helper()
	require.Eventually(p.t, func() bool { return strings.Contains(o.String(), text) }, bound, 5*time.Millisecond,
		"no %q from rcat %q", text, p.cmd.Args)
}

func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// port returns where rcat -lv listens.
func (p *process) port() string {
	p.t.Helper()
	p.says("listening on ")
	p.says("\n")
	_, line, _ := strings.Cut(p.err.String(), "listening on ")
	line, _, _ = strings.Cut(line, "\n")
	_, port, err := net.SplitHostPort(line)
	require.NoError(p.t, err)
	return port
}

// captured is what a process has written so far.
type captured struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *captured) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *captured) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// openPipe is a standard input that stays open, and how to write to it.
func openPipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// listener starts rcat -lv on a free port of 127.0.0.1.
func listener(t *testing.T, stdin any, args ...string) *process {
	t.Helper()
	return start(t, stdin, nil, append(args, "-lv", "127.0.0.1", "0")...)
}

// dialer starts rcat -v to the listener.
func dialer(t *testing.T, l *process, stdin any, args ...string) *process {
	t.Helper()
	return start(t, stdin, nil, append(args, "-v", "127.0.0.1", l.port())...)
}

// randomFile returns a file of random bytes, open for reading, and their SHA-256.
func randomFile(t *testing.T, size int64) (*os.File, [32]byte) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	h := sha256.New()
	_, err = io.CopyN(io.MultiWriter(f, h), rand.NewChaCha8([32]byte([]byte(fmt.Sprintf("%32d", size)))), size)
	require.NoError(t, err)
	_, err = f.Seek(0, io.SeekStart)
	require.NoError(t, err)
	return f, [32]byte(h.Sum(nil))
}

// newCopy returns an empty file to be a standard output.
func newCopy(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "copy"))
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func sumOf(t *testing.T, f *os.File) [32]byte {
	t.Helper()
	h := sha256.New()
	_, err := io.Copy(h, io.NewSectionReader(f, 0, 1<<40))
	require.NoError(t, err)
	return [32]byte(h.Sum(nil))
}

func to(f *os.File) func(*exec.Cmd) { return func(c *exec.Cmd) { c.Stdout = f } }

// requireOneLine checks the form of an error message.
func requireOneLine(t *testing.T, stderr string) {
	t.Helper()
	require.True(t, strings.HasPrefix(stderr, "rcat: "), stderr)
	require.Equal(t, 1, strings.Count(stderr, "\n"), stderr)
}

func diedOf(p *process) syscall.Signal {
	p.status()
	return p.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal()
}
