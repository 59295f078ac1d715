package rdmanet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/internal/verbs/verbstest"
)

// patience bounds every wait; an emulated machine is slow, and a shared one too.
const patience = 60 * time.Second

// Environment variables of the tests, besides those of the package.
const (
	envProvider = "RDMANET_TEST_PROVIDER" // what the tests run on; iwarp by default
	envLong     = "RDMANET_LONG"          // 1: longer and more
	envRequire  = "RDMANET_REQUIRE_DEVICE"
	envChild    = "RDMANET_TEST_CHILD" // this process is a child of a test, and which
)

var long = os.Getenv(envLong) == "1"

// fake is a provider whose devices take nothing inline, so that the tests which
// run on it too cover what hardware does.
var fake = verbstest.New()

// TestMain makes sure that every test has given everything back.
func TestMain(m *testing.M) {
	if os.Getenv("RDMANET_PROVIDER") == "" || os.Getenv(envProvider) != "" {
		os.Setenv("RDMANET_PROVIDER", string(testProvider())) // the zero Config's
	}
	verbs.Register(verbstest.Name, func() (verbs.Provider, error) { return fake, nil })
	if name := os.Getenv(envChild); name != "" {
		children[name]()
		os.Exit(0)
	}
	code := m.Run()
	if code == 0 {
		if err := errors.Join(leaked(0), leftOnDevices()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func testProvider() Provider {
	if p := os.Getenv(envProvider); p != "" {
		return Provider(p)
	}
	return ProviderIWARP
}

// testAddrs returns the addresses of this machine that the provider can be tested
// on: loopback in software, and on a device what the lab says.
func testAddrs(t testing.TB) (addrs []string) {
	t.Helper()
	if testProvider() != "device" {
		for _, a := range []string{"127.0.0.1", "::1"} {
			if ln, err := net.Listen("tcp", net.JoinHostPort(a, "0")); err == nil {
				ln.Close()
				addrs = append(addrs, a)
			}
		}
		return addrs
	}
	for _, v := range []string{"RXE4", "RXE6", "SIW4", "SIW6"} {
		if a := os.Getenv("RDMANET_LAB_" + v); a != "" {
			addrs = append(addrs, a)
		}
	}
	if len(addrs) == 0 {
		const why = "no device: RDMANET_LAB_RXE4 and the like are not set; try: lab/guest go test ./rdmanet"
		if os.Getenv(envRequire) == "1" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	return addrs
}

// testAddr is the first of testAddrs, with a free port.
func testAddr(t testing.TB) string { return net.JoinHostPort(testAddrs(t)[0], "0") }

// onEveryAddr runs a test on every address, IPv4 and IPv6.
func onEveryAddr(t *testing.T, f func(t *testing.T, addr string)) {
	for _, a := range testAddrs(t) {
		t.Run(a, func(t *testing.T) { f(t, net.JoinHostPort(a, "0")) })
	}
}

// onEveryPath runs a test where sends go out from the caller's memory, if the
// provider under test does that, and where they are copied into registered
// blocks.
func onEveryPath(t *testing.T, f func(t *testing.T, cfg Config)) {
	for _, p := range []Provider{testProvider(), verbstest.Name} {
		t.Run(string(p), func(t *testing.T) { f(t, Config{Provider: p}) })
	}
}

func needsSoftware(t testing.TB) {
	t.Helper()
	if testProvider() != ProviderIWARP {
		t.Skip("about iWARP in software")
	}
}

// leaked reports what is there beyond what was.
func leaked(was int, opts ...goleak.Option) error {
	if err := goleak.Find(opts...); err != nil {
		return err
	}
	if is := held(); is > was {
		return fmt.Errorf("event channels, arenas and objects of the fake: %d, were %d (%v)", is, was, fake.Live())
	}
	if v := fake.Violations(); len(v) > 0 {
		return fmt.Errorf("the fake complains: %v", v)
	}
	return nil
}

// held counts what connections hold.
func held() (n int) {
	loops.Lock()
	defer loops.Unlock()
	arenas.Lock()
	defer arenas.Unlock()
	for _, k := range fake.Live() {
		n += k
	}
	return n + len(loops.m) + len(arenas.m)
}

// checkLeaks makes the test fail unless, at its end, everything is given back
// that it took: event channels closed, buffers in their pools, goroutines gone.
func checkLeaks(t testing.TB) {
	t.Helper()
	was, ignore := held(), goleak.IgnoreCurrent()
	t.Cleanup(func() {
		// Looking at all stacks stops the world: not before it can be good.
		end := time.Now().Add(15 * time.Second)
		for held() > was && time.Now().Before(end) {
			time.Sleep(time.Millisecond)
		}
		err := leaked(was, ignore) // goleak tries again for half a second
		for err != nil && time.Now().Before(end) {
			err = leaked(was, ignore)
		}
		require.NoError(t, err)
	})
}

// pair returns both ends of a connection over a listener of its own.
func pair(t testing.TB, cfg Config) (dialed, accepted *Conn) {
	t.Helper()
	return pairOf(t, cfg, cfg, testAddr(t))
}

// pairOf is pair with a configuration for each side.
func pairOf(t testing.TB, dialer, listener Config, addr string) (dialed, accepted *Conn) {
	t.Helper()
	l, err := (&ListenConfig{Config: listener}).Listen(context.Background(), "rdma", addr)
	require.NoError(t, err)
	defer l.Close()
	return pairOn(t, dialer, l)
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
	d, err := (&Dialer{Config: cfg}).DialContext(context.Background(), "rdma", l.Addr().String())
	require.NoError(t, err)
	select {
	case r := <-got:
		require.NoError(t, r.err)
		return d.(*Conn), r.c.(*Conn)
	case <-time.After(patience):
		t.Fatal("dialed, and never accepted")
		return nil, nil
	}
}

// open is pair with both ends closed when the test ends.
func open(t testing.TB, cfg Config) (dialed, accepted *Conn) {
	t.Helper()
	a, b := pair(t, cfg)
	closeLater(t, a, b)
	return a, b
}

func closeLater(t testing.TB, cs ...io.Closer) {
	t.Cleanup(func() {
		var wg sync.WaitGroup
		for _, c := range cs {
			wg.Go(func() { c.Close() })
		}
		wg.Wait()
	})
}

// listen listens until the test ends.
func listen(t testing.TB, lc ListenConfig) *Listener {
	t.Helper()
	l, err := lc.Listen(context.Background(), "rdma", testAddr(t))
	require.NoError(t, err)
	closeLater(t, l)
	return l.(*Listener)
}

// within runs f, which must end in time.
func within(t testing.TB, d time.Duration, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(d):
		buf := make([]byte, 1<<20)
		t.Fatalf("not done after %v:\n%s", d, buf[:runtime.Stack(buf, true)])
	}
}

// eventually waits until cond holds.
func eventually(t testing.TB, cond func() bool, what string, args ...any) {
	t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never happened: "+what, args...)
		}
	}
}

// read and write fail the test unless they take or give everything.
func read(t testing.TB, c net.Conn, n int) []byte {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	b := make([]byte, n)
	_, err := io.ReadFull(c, b)
	require.NoError(t, err)
	require.NoError(t, c.SetReadDeadline(time.Time{}))
	return b
}

func write(t testing.TB, c net.Conn, b []byte) {
	t.Helper()
	require.NoError(t, c.SetWriteDeadline(time.Now().Add(patience)))
	n, err := c.Write(b)
	require.NoError(t, err)
	require.Equal(t, len(b), n)
	require.NoError(t, c.SetWriteDeadline(time.Time{}))
}

func requireEOF(t testing.TB, c net.Conn) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	for range 3 { // once and for ever
		n, err := c.Read(make([]byte, 16))
		require.Zero(t, n)
		require.Equal(t, io.EOF, err) // bare
	}
}

// bytesOf returns n bytes that look random and depend on the seed alone.
func bytesOf(seed uint64, n int) []byte {
	b := make([]byte, n)
	_, _ = io.ReadFull(stream(seed), b)
	return b
}

// stream is an endless one of such bytes.
func stream(seed uint64) *rand.ChaCha8 {
	return rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), 1})
}

var hashSeed = maphash.MakeSeed()

// sum is a hash of a stream, and its length.
type sum struct {
	h maphash.Hash
	n int64
}

func (s *sum) Write(p []byte) (int, error) {
	if s.n == 0 {
		s.h.SetSeed(hashSeed)
	}
	s.n += int64(len(p))
	return s.h.Write(p)
}

func (s *sum) String() string {
	if s.n == 0 {
		return "nothing"
	}
	return fmt.Sprintf("%d bytes, %x", s.n, s.h.Sum64())
}

// readSum reads to the end, in pieces of random size.
func readSum(c net.Conn, seed uint64, maxPiece int) (string, error) {
	rng := rand.New(stream(seed))
	buf := make([]byte, maxPiece)
	var s sum
	for {
		n, err := c.Read(buf[:1+rng.IntN(maxPiece)])
		s.Write(buf[:n])
		if err == io.EOF {
			return s.String(), nil
		}
		if err != nil {
			return s.String(), err
		}
	}
}

// logBuffer collects what a Logger is told.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (l *logBuffer) has(words ...string) bool {
	for line := range strings.Lines(l.String()) {
		found := true
		for _, w := range words {
			found = found && strings.Contains(line, w)
		}
		if found {
			return true
		}
	}
	return false
}

// fds counts this process's descriptors.
func fds(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("needs /proc:", err)
	}
	return len(d)
}

// children are what a child process of a test does, by name.
var children = map[string]func(){}

// child starts this test binary again, to do what children says. The test reads
// its standard output; closing its standard input ends it.
func child(t testing.TB, name string, env ...string) (cmd *exec.Cmd, out io.Reader) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd = exec.Command(exe)
	cmd.Env = append(os.Environ(), append(env, envChild+"="+name)...)
	cmd.Stderr = os.Stderr
	out, err = cmd.StdoutPipe()
	require.NoError(t, err)
	_, err = cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, out
}
