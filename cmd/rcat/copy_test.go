package main

import (
	"crypto/sha256"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/rdmanet"
)

// receivers are the standard inputs of a side that only receives.
var receivers = map[string]func(*testing.T) *os.File{
	"/dev/null": func(t *testing.T) *os.File { return nil },
	"pipe that has ended": func(t *testing.T) *os.File {
		r, w := openPipe(t)
		w.Close()
		return r
	},
	"pipe that never ends": func(t *testing.T) *os.File {
		r, _ := openPipe(t)
		return r
	},
}

// stdinOf avoids an interface that holds a nil pointer.
func stdinOf(f *os.File) any {
	if f == nil {
		return nil
	}
	return f
}

func TestFileArrivesAndBothSidesEnd(t *testing.T) {
	t.Parallel()
	for name, stdin := range receivers {
		t.Run("dialer sends, listener's stdin is a "+name, func(t *testing.T) {
			t.Parallel()
			file, sum := randomFile(t, 16<<20)
			copied := newCopy(t)
			l := start(t, stdinOf(stdin(t)), to(copied), "-lv", "127.0.0.1", "0")
			d := dialer(t, l, file)
			require.Equal(t, 0, d.status())
			require.Equal(t, 0, l.status())
			require.Equal(t, sum, sumOf(t, copied))
		})
		t.Run("listener sends, dialer's stdin is a "+name, func(t *testing.T) {
			t.Parallel()
			file, sum := randomFile(t, 16<<20)
			copied := newCopy(t)
			l := listener(t, file)
			d := start(t, stdinOf(stdin(t)), to(copied), "127.0.0.1", l.port())
			require.Equal(t, 0, l.status())
			require.Equal(t, 0, d.status())
			require.Equal(t, sum, sumOf(t, copied))
			require.Empty(t, d.err.String())
		})
	}
}

func TestGibibyteBetweenProcesses(t *testing.T) {
	if os.Getenv("RDMANET_LONG") != "1" {
		t.Skip("takes a while: set RDMANET_LONG=1")
	}
	file, sum := randomFile(t, 1<<30)
	copied := newCopy(t)
	l := start(t, nil, to(copied), "-lv", "127.0.0.1", "0")
	d := dialer(t, l, file)
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
	require.Equal(t, sum, sumOf(t, copied))
	t.Log(d.err)
}

func TestEmptyFile(t *testing.T) {
	t.Parallel()
	l := listener(t, nil)
	d := dialer(t, l, "")
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
	require.Empty(t, l.out.String())
}

func TestBothWaysAtOnce(t *testing.T) {
	t.Parallel()
	up, upSum := randomFile(t, 4<<20)
	down, downSum := randomFile(t, 5<<20)
	upCopy, downCopy := newCopy(t), newCopy(t)
	l := start(t, down, to(upCopy), "-lv", "127.0.0.1", "0")
	d := start(t, up, to(downCopy), "127.0.0.1", l.port())
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
	require.Equal(t, upSum, sumOf(t, upCopy))
	require.Equal(t, downSum, sumOf(t, downCopy))
}

func TestReplyAfterHalfClose(t *testing.T) {
	t.Parallel()
	t.Run("listener replies", func(t *testing.T) {
		t.Parallel()
		r, w := openPipe(t)
		l := listener(t, r, "--reply-wait", "1m")
		d := dialer(t, l, "request")
		replies(t, l, d, w)
	})
	t.Run("dialer replies", func(t *testing.T) {
		t.Parallel()
		r, w := openPipe(t)
		l := listener(t, "request")
		d := dialer(t, l, r, "--reply-wait", "1m")
		replies(t, d, l, w)
	})
}

// replies has from send a reply once it has the request, while nobody sends
// anything to it any more.
func replies(t *testing.T, from, to *process, stdin *os.File) {
	t.Helper()
	from.prints("request")
	_, err := io.WriteString(stdin, "reply")
	require.NoError(t, err)
	to.prints("reply")
	_, err = io.WriteString(stdin, ", and more")
	require.NoError(t, err)
	require.NoError(t, stdin.Close())
	require.Equal(t, 0, to.status())
	require.Equal(t, 0, from.status())
	require.Equal(t, "reply, and more", to.out.String())
	require.Equal(t, "request", from.out.String())
}

func TestNoReplyWithinReplyWait(t *testing.T) {
	t.Parallel()
	r, _ := openPipe(t)
	l := listener(t, r, "--reply-wait", "0")
	d := dialer(t, l, "request")
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
	require.Equal(t, "request", l.out.String())
}

// A peer whose stdin is /dev/null sends end-of-file at once. Whoever has something
// to say to it may take its time.
func TestSlowProducerIsNotCutOff(t *testing.T) {
	t.Parallel()
	for _, dialerSends := range []bool{true, false} {
		r, w := openPipe(t)
		stdins := []any{nil, r}
		if !dialerSends {
			stdins = []any{r, nil}
		}
		l := listener(t, stdins[0], "--reply-wait", "10ms")
		d := dialer(t, l, stdins[1], "--reply-wait", "10ms")
		from, to := d, l
		if !dialerSends {
			from, to = l, d
		}
		to.says("connected ")
		from.says("connected ")
		require.Never(t, func() bool { return !from.running() || !to.running() }, 300*time.Millisecond, 20*time.Millisecond)
		_, err := io.WriteString(w, "at last")
		require.NoError(t, err)
		to.prints("at last")
		w.Close()
		require.Equal(t, 0, from.status())
		require.Equal(t, 0, to.status())
	}
}

func TestStreamGoesOnAfterThePeersEndOfFile(t *testing.T) {
	t.Parallel()
	r, w := openPipe(t)
	l := listener(t, r, "--reply-wait", "10ms")
	_, err := io.WriteString(w, "first ")
	require.NoError(t, err)
	d := dialer(t, l, "subscribe")
	d.prints("first")
	l.prints("subscribe")
	require.Never(t, func() bool { return !l.running() }, 300*time.Millisecond, 20*time.Millisecond)
	_, err = io.WriteString(w, "second")
	require.NoError(t, err)
	w.Close()
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
	require.Equal(t, "first second", d.out.String())
}

// peer is a listener in this process that does something with one connection.
func peer(t *testing.T, serve func(*rdmanet.Conn)) (port string) {
	t.Helper()
	l, err := rdmanet.Listen("rdma", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if c, err := l.Accept(); err == nil {
			serve(c.(*rdmanet.Conn))
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	_, port, err = net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	return port
}

func TestEndsWhenThePeerCloses(t *testing.T) {
	t.Parallel()
	r, _ := openPipe(t)
	d := start(t, r, nil, "127.0.0.1", peer(t, func(c *rdmanet.Conn) {}))
	require.Equal(t, 0, d.status())
	require.Empty(t, d.err.String())
}

func TestPeerClosesBeforeItHasEverything(t *testing.T) {
	t.Parallel()
	port := peer(t, func(c *rdmanet.Conn) {
		_, _ = io.ReadFull(c, make([]byte, 10))
		_, _ = io.WriteString(c, "enough")
	})
	d := start(t, endless{}, nil, "127.0.0.1", port)
	require.Equal(t, 1, d.status())
	require.Equal(t, "enough", d.out.String())
	requireOneLine(t, d.err.String())
	require.Contains(t, d.err.String(), "closed the connection before it had everything")
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestPeerResets(t *testing.T) {
	t.Parallel()
	r, _ := openPipe(t)
	d := start(t, r, nil, "127.0.0.1", peer(t, func(c *rdmanet.Conn) { _ = c.SetLinger(0) }))
	require.Equal(t, 1, d.status())
	requireOneLine(t, d.err.String())
	require.Contains(t, d.err.String(), "connection reset by peer")
}

func TestKeepOpenServesOneClientAfterTheOther(t *testing.T) {
	t.Parallel()
	l := listener(t, nil, "-k")
	for _, text := range []string{"one ", "two ", "three "} {
		require.Equal(t, 0, dialer(t, l, text).status())
	}
	l.prints("one two three ")
	require.NoError(t, l.cmd.Process.Signal(os.Interrupt))
	require.Equal(t, 130, l.status())
}

func TestKeepOpenGivesStdinToTheCurrentClient(t *testing.T) {
	t.Parallel()
	r, w := openPipe(t)
	l := listener(t, r, "-k", "--reply-wait", "0")
	for _, name := range []string{"ann", "ben", "eve"} {
		stdin, end := openPipe(t)
		d := dialer(t, l, stdin)
		_, err := io.WriteString(end, "I am "+name)
		require.NoError(t, err)
		l.prints("I am " + name)
		_, err = io.WriteString(w, "hello "+name)
		require.NoError(t, err)
		d.prints("hello " + name)
		// The listener's stdin stays open: the client goes entirely.
		require.NoError(t, d.cmd.Process.Signal(os.Interrupt))
		require.Equal(t, 130, d.status())
		require.Equal(t, "hello "+name, d.out.String())
	}
	l.says("connection reset by peer")
	require.True(t, l.running())
}

func TestKeepOpenMakesOthersWait(t *testing.T) {
	t.Parallel()
	l := listener(t, nil, "-k")
	stdin, end := openPipe(t)
	first := dialer(t, l, stdin)
	_, err := io.WriteString(end, "first ")
	require.NoError(t, err)
	l.prints("first")
	second := dialer(t, l, "second")
	second.says("connected to")
	require.Never(t, func() bool { return strings.Contains(l.out.String(), "second") }, 200*time.Millisecond, 20*time.Millisecond)
	_, err = io.WriteString(end, "done ")
	require.NoError(t, err)
	end.Close()
	require.Equal(t, 0, first.status())
	require.Equal(t, 0, second.status())
	l.prints("first done second")
}

func TestWithoutKeepOpenOthersAreRefused(t *testing.T) {
	t.Parallel()
	stdin, _ := openPipe(t)
	l := listener(t, nil)
	dialer(t, l, stdin)
	l.says("connected from")
	d := dialer(t, l, nil)
	require.Equal(t, 1, d.status())
	require.Contains(t, d.err.String(), "refused")
}

func TestWaitLimitsADial(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	require.NoError(t, err)
	defer silent.Close()
	_, port, _ := net.SplitHostPort(silent.Addr().String())
	begin := time.Now()
	d := start(t, nil, nil, "-w", "0.3", "127.0.0.1", port)
	require.Equal(t, 1, d.status())
	require.GreaterOrEqual(t, time.Since(begin), 300*time.Millisecond)
	requireOneLine(t, d.err.String())
	require.Contains(t, d.err.String(), "no connection within 300ms")
}

func TestWaitEndsAnIdleConnection(t *testing.T) {
	t.Parallel()
	r, w := openPipe(t)
	r2, _ := openPipe(t)
	l := listener(t, r2)
	d := dialer(t, l, r, "-w2")
	for range 12 { // it isn't idle while something moves
		_, err := io.WriteString(w, "x")
		require.NoError(t, err)
		time.Sleep(200 * time.Millisecond)
	}
	require.True(t, d.running())
	require.Equal(t, 1, d.status())
	require.Contains(t, d.err.String(), "nothing was sent or received for 2s")
	require.Equal(t, 1, l.status())
	require.Contains(t, l.err.String(), "connection reset by peer")
	require.Equal(t, "xxxxxxxxxxxx", l.out.String())
}

func TestWaitWhenAllIsDoneIsNoFailure(t *testing.T) {
	t.Parallel()
	r, _ := openPipe(t)
	l := listener(t, r, "-w", "200ms", "--reply-wait", "1h")
	d := dialer(t, l, "all")
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
	require.Equal(t, "all", l.out.String())
}

func TestInterrupt(t *testing.T) {
	t.Parallel()
	for sig, status := range map[syscall.Signal]int{syscall.SIGINT: 130, syscall.SIGTERM: 143} {
		l := listener(t, nil)
		l.port()
		require.NoError(t, l.cmd.Process.Signal(sig))
		require.Equal(t, status, l.status(), "listening")
	}

	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	_, port, _ := net.SplitHostPort(silent.Addr().String())
	d := start(t, nil, nil, "127.0.0.1", port)
	c, err := silent.Accept()
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, d.cmd.Process.Signal(os.Interrupt))
	require.Equal(t, 130, d.status(), "dialing")
	require.Empty(t, d.err.String())

	r, w := openPipe(t)
	l := listener(t, nil)
	d = dialer(t, l, r)
	_, err = io.WriteString(w, "half")
	require.NoError(t, err)
	l.prints("half")
	require.NoError(t, d.cmd.Process.Signal(os.Interrupt))
	require.Equal(t, 130, d.status(), "connected")
	require.Equal(t, 1, l.status())
	require.Contains(t, l.err.String(), "connection reset by peer")
}

func TestInterruptWhileStdoutIsBlocked(t *testing.T) {
	t.Parallel()
	_, full := openPipe(t)
	l := start(t, nil, to(full), "-lkv", "127.0.0.1", "0")
	dialer(t, l, endless{})
	l.says("connected from")
	require.NoError(t, l.cmd.Process.Signal(os.Interrupt))
	require.Equal(t, 130, l.status())
}

func TestReaderOfStdoutGoes(t *testing.T) {
	t.Parallel()
	r, w := openPipe(t)
	l := start(t, nil, to(w), "-l", "-v", "127.0.0.1", "0")
	d := dialer(t, l, endless{})
	_, err := io.ReadFull(r, make([]byte, 10))
	require.NoError(t, err)
	w.Close()
	r.Close()
	require.Equal(t, syscall.SIGPIPE, diedOf(l))
	require.NotContains(t, l.err.String(), "rcat:")
	require.Equal(t, 1, d.status())
}

func TestStdoutFails(t *testing.T) {
	t.Parallel()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("needs /dev/full, which Linux has")
	}
	defer full.Close()
	r, w := openPipe(t)
	l := start(t, nil, to(full), "-lvk", "127.0.0.1", "0")
	d := dialer(t, l, r)
	_, err = io.WriteString(w, "some")
	require.NoError(t, err)
	require.Equal(t, 1, l.status())
	require.Contains(t, l.err.String(), "rcat: stdout: write: no space left on device\n")
	require.Equal(t, 1, d.status())
}

func TestStdinIsADirectory(t *testing.T) {
	t.Parallel()
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	l := listener(t, nil)
	d := dialer(t, l, dir)
	require.Equal(t, 1, d.status())
	require.Contains(t, d.err.String(), "rcat: stdin: read: is a directory\n")
}

// The peer must not take a part for the whole.
func TestStdinFailsInTheMiddle(t *testing.T) {
	t.Parallel()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer tcp.Close()
	producer, err := net.Dial("tcp", tcp.Addr().String())
	require.NoError(t, err)
	defer producer.Close()
	c, err := tcp.Accept()
	require.NoError(t, err)
	defer c.Close()
	stdin, err := c.(*net.TCPConn).File()
	require.NoError(t, err)
	defer stdin.Close()

	l := listener(t, nil)
	d := dialer(t, l, stdin)
	_, err = io.WriteString(producer, "a part")
	require.NoError(t, err)
	l.prints("a part")
	require.NoError(t, producer.(*net.TCPConn).SetLinger(0))
	require.NoError(t, producer.Close())
	require.Equal(t, 1, d.status())
	require.Contains(t, d.err.String(), "rcat: stdin: read: connection reset by peer\n")
	require.Equal(t, 1, l.status())
	require.Contains(t, l.err.String(), "connection reset by peer")
}

func TestAddressesAndPorts(t *testing.T) {
	t.Parallel()
	has6 := true
	if l, err := net.Listen("tcp6", "[::1]:0"); err != nil {
		has6 = false
	} else {
		l.Close()
	}
	for _, c := range []struct {
		listen, dial []string // PORT is appended
		needs6       bool
		want         string // on the dialer's stderr
	}{
		{listen: nil, dial: []string{"localhost"}, want: "connected to "},
		{listen: nil, dial: []string{"-4", "localhost"}, want: "connected to 127.0.0.1:"},
		{listen: nil, dial: []string{"-6", "::1"}, want: "connected to [::1]:", needs6: true},
		{listen: []string{"-4"}, dial: []string{"127.0.0.1"}, want: "connected to 127.0.0.1:"},
		{listen: []string{"-6"}, dial: []string{"[::1]"}, want: "connected to [::1]:", needs6: true},
		{listen: []string{"127.0.0.1"}, dial: []string{"-s", "127.0.0.2", "127.0.0.1"}, want: " from 127.0.0.2:"},
		{listen: []string{"127.0.0.1"}, dial: []string{"-s", "localhost", "127.0.0.1"}, want: " from 127.0.0.1:"},
		{listen: []string{"127.0.0.1"}, dial: []string{"--crc", "--provider", "iwarp", "127.0.0.1"}, want: "(provider iwarp)"},
	} {
		if c.needs6 && !has6 {
			continue
		}
		l := start(t, nil, nil, append(append([]string{"-lv"}, c.listen...), "0")...)
		d := start(t, nil, nil, append(append([]string{"-v"}, c.dial...), l.port())...)
		require.Equal(t, 0, d.status(), c)
		require.Equal(t, 0, l.status(), c)
		require.Contains(t, d.err.String(), c.want)
	}
}

func TestSourcePort(t *testing.T) {
	t.Parallel()
	l := listener(t, nil)
	for range 20 { // another program may be faster
		free, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		_, port, _ := net.SplitHostPort(free.Addr().String())
		free.Close()
		d := dialer(t, l, nil, "-p", port)
		if d.status() == 0 {
			require.Contains(t, d.err.String(), " from 127.0.0.1:"+port+" ")
			require.Equal(t, 0, l.status())
			return
		}
		require.Contains(t, d.err.String(), "address already in use")
	}
	require.Fail(t, "no port was free")
}

func TestFailuresSayWhatToDo(t *testing.T) {
	t.Parallel()
	taken := listener(t, nil)
	port := taken.port()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, nobody, _ := net.SplitHostPort(closed.Addr().String())
	require.NoError(t, closed.Close())
	for _, c := range []struct {
		args  []string
		wants []string
	}{
		{[]string{"127.0.0.1", nobody}, []string{"127.0.0.1:" + nobody, "connection refused", "rcat -l " + nobody}},
		{[]string{"-l", "127.0.0.1", port}, []string{"127.0.0.1:" + port, "address already in use", "another port"}},
		{[]string{"-l", "192.0.2.1", "0"}, []string{"192.0.2.1:0", "cannot assign requested address", "of this machine"}},
		{[]string{"-s", "192.0.2.1", "127.0.0.1", port}, []string{"192.0.2.1", "cannot assign requested address", "-s"}},
		{[]string{"-p", port, "127.0.0.1", port}, []string{"address already in use", "-p"}},
		{[]string{"-s", "::1", "127.0.0.1", port}, []string{"::1", "family"}},
		{[]string{"-6", "127.0.0.1", port}, []string{"127.0.0.1", "family", "leave out -6"}},
		{[]string{"no-such-host.invalid", port}, []string{"no-such-host.invalid"}},
	} {
		p := start(t, nil, nil, c.args...)
		require.Equal(t, 1, p.status(), c.args)
		requireOneLine(t, p.err.String())
		for _, want := range c.wants {
			require.Contains(t, p.err.String(), want)
		}
	}
	require.True(t, taken.running())
}

func TestProviderOfTheEnvironment(t *testing.T) {
	t.Parallel()
	env := func(c *exec.Cmd) { c.Env = append(os.Environ(), "RDMANET_PROVIDER=carrier-pigeon") }
	p := start(t, nil, env, "127.0.0.1", "1")
	require.Equal(t, 1, p.status())
	require.Contains(t, p.err.String(), "RDMANET_PROVIDER")
	require.Contains(t, p.err.String(), "carrier-pigeon")
	p = start(t, nil, env, "--demo=1", "--provider", "iwarp")
	require.Equal(t, 0, p.status())
}

// What was sent and is not yet read when the sender has ended must not be lost.
func TestReceiverIsSlow(t *testing.T) {
	t.Parallel()
	wait := 300 * time.Millisecond
	if os.Getenv("RDMANET_LONG") == "1" {
		wait = rdmanet.DefaultLinger + 3*time.Second
	}
	for _, size := range []int64{100 << 10, 700 << 10, 3 << 20} {
		file, sum := randomFile(t, size)
		r, w := openPipe(t)
		l := start(t, nil, to(w), "-lv", "127.0.0.1", "0")
		d := dialer(t, l, file)
		time.Sleep(wait)
		w.Close()
		h := sha256.New()
		_, err := io.Copy(h, r)
		require.NoError(t, err)
		require.Equal(t, sum, [32]byte(h.Sum(nil)), size)
		require.Equal(t, 0, l.status())
		require.Equal(t, 0, d.status())
	}
}

func TestVerboseReports(t *testing.T) {
	t.Parallel()
	l := listener(t, "12345")
	d := dialer(t, l, "123")
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
	require.Regexp(t, `^connected to 127\.0\.0\.1:\d+ from 127\.0\.0\.1:\d+ \(provider \w+\)
received 5 bytes, sent 3 bytes in \d+\.\d\d s, .*B/s
$`, d.err.String())
	require.Regexp(t, `^listening on 127\.0\.0\.1:\d+
connected from 127\.0\.0\.1:\d+ to 127\.0\.0\.1:\d+ \(provider \w+\)
received 3 bytes, sent 5 bytes in \d+\.\d\d s, .*B/s
$`, l.err.String())
}
