package rdmanet

import (
	"bytes"
	"context"
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
)

// The tests of this file need two hosts. This is one; the other, called b, does what
// lab/inside-pair finds in a directory that both see, which this names. They leave
// the wire cut and b dead.
const envPair = "RDMANET_TEST_PAIR"

// quick gives a silent host up after 10 s.
var quick = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 8}

// calm is b's: it takes longer than any outage that a survives, and gives a up
// before the test ends.
var calm = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 28}

const (
	whileAsleep = 13 * time.Second // longer than quick takes
	shortOutage = 2 * time.Second  // short enough for every retry
)

// otherHost is b.
type otherHost struct {
	t   testing.TB
	dir string
}

// start has b run a script.
func (b otherHost) start(name, script string) {
	b.t.Helper()
	file := filepath.Join(b.dir, "pair-"+name)
	_ = os.Remove(file + ".status")
	require.NoError(b.t, os.WriteFile(file+".new", []byte(script), 0o666))
	require.NoError(b.t, os.Rename(file+".new", file+".run"))
}

// run has b run a script and waits for it.
func (b otherHost) run(name, script string) {
	b.t.Helper()
	b.start(name, script)
	b.ended(name)
}

// ended waits for a script's end.
func (b otherHost) ended(name string) {
	b.t.Helper()
	file := filepath.Join(b.dir, "pair-"+name)
	status, err := os.ReadFile(file + ".status")
	for end := time.Now().Add(2 * patience); err != nil && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		status, err = os.ReadFile(file + ".status")
	}
	require.NoError(b.t, err, "%s on the other host does not end", name)
	if strings.TrimSpace(string(status)) != "0" {
		out, _ := os.ReadFile(file + ".out")
		msg, _ := os.ReadFile(file + ".err")
		b.t.Fatalf("%s on the other host: status %s%s%s", name, status, out, msg)
	}
}

// both runs a shell command on both hosts at the same time.
func (b otherHost) both(command string) {
	b.t.Helper()
	b.start("both", command)
	defer b.ended("both")
	out, err := exec.Command("bash", "-c", command).CombinedOutput()
	require.NoError(b.t, err, "%s: %s", command, out)
}

// farPeer is a process on b that serves as serveFar does.
type farPeer struct {
	name, addr, pid string
}

// peer starts one that listens on an address with a provider. It ends with the test.
func (b otherHost) peer(name, ip string, p Provider) farPeer {
	b.t.Helper()
	exe, err := os.Executable()
	require.NoError(b.t, err)
	enough := filepath.Join(b.dir, "pair-"+name+".enough")
	_ = os.Remove(enough)
	b.start(name, fmt.Sprintf("until [ -e %s ]; do sleep 0.1; done | %s=far %s=%s %s=%s %s",
		enough, envChild, envProvider, p, envAddr, net.JoinHostPort(ip, "0"), exe))
	far := farPeer{name: name}
	eventually(b.t, func() bool {
		out, _ := os.ReadFile(filepath.Join(b.dir, "pair-"+name+".out"))
		n, _ := fmt.Sscan(string(out), &far.addr, &far.pid)
		return n == 2
	}, name+" listens on the other host")
	return far
}

// dismiss ends peers, which must have given everything back.
func (b otherHost) dismiss(peers ...farPeer) {
	b.t.Helper()
	for _, p := range peers {
		require.NoError(b.t, os.WriteFile(filepath.Join(b.dir, "pair-"+p.name+".enough"), nil, 0o666))
	}
	for _, p := range peers {
		b.ended(p.name)
	}
}

func init() {
	children["far"] = func() {
		lc := ListenConfig{Config: Config{KeepAlive: calm}}
		l, err := lc.Listen(context.Background(), "rdma", os.Getenv(envAddr))
		if err == nil {
			fmt.Println(l.Addr(), os.Getpid())
			done := make(chan struct{})
			go func() {
				_, _ = io.Copy(io.Discard, os.Stdin)
				close(done)
				l.Close()
			}()
			serveFar(l, done)
			err = leaked(0)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

// serveFar serves until the listener is closed. The first line of a connection is
// how long to sleep. Then everything is sent back.
func serveFar(l net.Listener, done <-chan struct{}) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		wg.Go(func() {
			defer c.Close()
			text, err := line(c)
			if err != nil {
				return
			}
			d, _ := time.ParseDuration(text)
			select {
			case <-time.After(d):
				_, _ = io.Copy(c, c)
			case <-done:
			}
		})
	}
}

// way is one to a peer.
type way struct {
	name     string
	provider Provider
	peer     farPeer
}

// dial makes a connection whose peer sleeps first.
func (w way) dial(sleep time.Duration) (*Conn, error) { return w.dialWith(quick, sleep) }

func (w way) dialWith(k net.KeepAliveConfig, sleep time.Duration) (*Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d := Dialer{Config: Config{Provider: w.provider, KeepAlive: k}}
	c, err := d.DialContext(ctx, "rdma", w.peer.addr)
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintln(c, sleep); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c.(*Conn), nil
}

// exchange writes and reads what comes back.
func exchange(c *Conn, seed uint64, n int) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	p := bytesOf(seed, n)
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(p)
		written <- err
	}()
	got := make([]byte, n)
	_, err := io.ReadFull(c, got)
	if err != nil {
		_ = c.SetWriteDeadline(longAgo)
		return errors.Join(<-written, err)
	}
	if !bytes.Equal(p, got) {
		return errors.New("other bytes come back")
	}
	return <-written
}

// onEachWay begins something on every way, and returns what waits for it.
func onEachWay(t *testing.T, ways []way, f func(w way) error) (wait func()) {
	errs := make([]error, len(ways))
	var wg sync.WaitGroup
	for i, w := range ways {
		wg.Go(func() { errs[i] = f(w) })
	}
	return func() {
		t.Helper()
		wg.Wait()
		for i, err := range errs {
			if err != nil {
				t.Errorf("%s: %v", ways[i].name, err)
			}
		}
	}
}

// typed returns nil if err is of this package and one of the errnos.
func typed(err error, want ...syscall.Errno) error {
	oe, ok := err.(*net.OpError)
	for _, errno := range want {
		if ok && oe.Net == "rdma" && errors.Is(err, errno) {
			return nil
		}
	}
	return fmt.Errorf("%T %w is none of %v", err, err, want)
}

// atMost bounds what has no deadline of its own.
func atMost(what string, d time.Duration, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(d):
		return fmt.Errorf("%s: not within %v", what, d)
	}
}

func readByte(c *Conn) error {
	_, err := c.Read(make([]byte, 1))
	return err
}

// streamOn writes, and reads what comes back, until that fails.
func streamOn(c *Conn) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(io.Discard, c)
	}()
	err := writeOn(c)
	<-done
	return err
}

// writeOn writes until that fails.
func writeOn(c *Conn) error {
	for p := bytesOf(1, 16<<10); ; {
		if _, err := c.Write(p); err != nil {
			return err
		}
	}
}

func TestTwoHosts(t *testing.T) {
	dir := os.Getenv(envPair)
	if dir == "" {
		t.Skip("needs two hosts; try: lab/test ./rdmanet")
	}
	checkLeaks(t)
	b := otherHost{t, dir}
	ip, ip6 := os.Getenv("RDMANET_LAB_PEER4"), os.Getenv("RDMANET_LAB_PEER6")
	device, software, awake := b.peer("device", ip, ProviderDevice), b.peer("software", ip, ProviderIWARP), b.peer("awake", ip, ProviderIWARP)
	device6 := b.peer("device6", ip6, ProviderDevice)
	peers := []farPeer{device, software, awake, device6}
	ways := []way{{"device", ProviderDevice, device}, {"software", ProviderIWARP, software}}
	mixed := ways
	if strings.HasPrefix(os.Getenv("RDMANET_LAB_DEVICE"), "siw") {
		// A process in software has to answer for itself: it must not be stopped.
		mixed = append(mixed, way{"siw to software", ProviderDevice, awake}, way{"software to siw", ProviderIWARP, device})
	}
	ok := t.Run("a peer that sleeps", func(t *testing.T) { testSleep(t, b, mixed, device, software) }) &&
		t.Run("loss and delay", func(t *testing.T) { testLoss(t, b, append(mixed, way{"device, IPv6", ProviderDevice, device6})) }) &&
		t.Run("a short outage", func(t *testing.T) { testShortOutage(t, b, mixed) }) &&
		t.Run("a link that is down", func(t *testing.T) { testLinkDown(t, b, mixed) })
	b.dismiss(peers...)
	if !ok {
		return
	}
	device, software = b.peer("device", ip, ProviderDevice), b.peer("software", ip, ProviderIWARP)
	for i := range mixed {
		mixed[i].peer = map[string]farPeer{"device": device, "software": software, "awake": software}[mixed[i].peer.name]
	}
	t.Run("a host that dies", func(t *testing.T) { testDeath(t, b, mixed) })
}

// Its host is alive. Some processes are stopped, the others just sleep.
func testSleep(t *testing.T, b otherHost, ways []way, stop ...farPeer) {
	var ready sync.WaitGroup
	ready.Add(len(ways))
	wait := onEachWay(t, ways, func(w way) error {
		quiet, err := w.dial(whileAsleep)
		full, err2 := w.dial(whileAsleep)
		ready.Done()
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		defer quiet.Close()
		defer full.Close()
		filled := make(chan error, 1)
		go func() { filled <- exchange(full, 1, 2<<20) }() // more than the window
		_ = quiet.SetReadDeadline(time.Now().Add(whileAsleep))
		if err := readByte(quiet); !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("quiet: %w", err)
		}
		if err := exchange(quiet, 2, 1000); err != nil {
			return fmt.Errorf("quiet, afterwards: %w", err)
		}
		if err := <-filled; err != nil {
			return fmt.Errorf("full: %w", err)
		}
		return nil
	})
	ready.Wait()
	var pids []string
	for _, p := range stop {
		pids = append(pids, p.pid)
	}
	list := strings.Join(pids, " ")
	b.run("stop", fmt.Sprintf("kill -STOP %s; sleep %v; kill -CONT %s", list, whileAsleep.Seconds(), list))
	wait()
}

const netem = "tc qdisc replace dev $RDMANET_LAB_INTERFACE root netem "

// Packets are lost and late, in both directions: what arrives is right, and what
// doesn't is a time-out.
func testLoss(t *testing.T, b otherHost, ways []way) {
	b.both(netem + "delay 20ms loss 2%")
	defer b.both("tc qdisc del dev $RDMANET_LAB_INTERFACE root")
	d := 6 * time.Second
	if long {
		d = 30 * time.Second
	}
	onEachWay(t, ways, func(w way) error {
		c, err := w.dialWith(net.KeepAliveConfig{}, 0)
		if err != nil {
			t.Logf("%s: %v", w.name, err)
			return typed(err, syscall.ETIMEDOUT, syscall.EHOSTUNREACH)
		}
		defer c.Close()
		n := 0
		for end := time.Now().Add(d); time.Now().Before(end); n++ {
			if err := exchange(c, uint64(n), 50_000); err != nil {
				t.Logf("%s, exchange %d: %v", w.name, n, err)
				var typedErr *net.OpError
				if !errors.As(err, &typedErr) {
					return err
				}
				return typed(typedErr, syscall.ETIMEDOUT)
			}
		}
		t.Logf("%s: %d exchanges", w.name, n)
		return nil
	})()
}

// The wire is cut for a moment, while data is on its way and while none is. The
// connections go on.
func testShortOutage(t *testing.T, b otherHost, ways []way) {
	var ready sync.WaitGroup
	ready.Add(len(ways))
	cut := make(chan struct{})
	release := sync.OnceFunc(func() { close(cut) })
	defer release()
	wait := onEachWay(t, ways, func(w way) error {
		busy, err := w.dialWith(net.KeepAliveConfig{}, 0)
		quiet, err2 := w.dialWith(net.KeepAliveConfig{}, 0)
		ready.Done()
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		defer busy.Close()
		defer quiet.Close()
		<-cut
		if err := exchange(busy, 1, 1<<20); err != nil {
			return fmt.Errorf("busy: %w", err)
		}
		if err := exchange(quiet, 2, 1000); err != nil {
			return fmt.Errorf("quiet: %w", err)
		}
		return nil
	})
	ready.Wait()
	b.both(netem + "loss 100%")
	release()
	time.Sleep(shortOutage)
	b.both("tc qdisc del dev $RDMANET_LAB_INTERFACE root")
	wait()
}

// The link of b is down until everybody has noticed, and then up again.
func testLinkDown(t *testing.T, b otherHost, ways []way) {
	var ready sync.WaitGroup
	ready.Add(len(ways))
	down := make(chan struct{})
	release := sync.OnceFunc(func() { close(down) })
	defer release()
	wait := onEachWay(t, ways, func(w way) error {
		busy, err := w.dial(0)
		quiet, err2 := w.dial(0)
		ready.Done()
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		defer busy.Close()
		defer quiet.Close()
		<-down
		errs := make(chan error, 2)
		go func() {
			errs <- atMost("busy", patience, func() error { return typed(streamOn(busy), syscall.ETIMEDOUT) })
		}()
		go func() {
			errs <- atMost("quiet", patience, func() error { return typed(readByte(quiet), syscall.ETIMEDOUT) })
		}()
		return errors.Join(<-errs, <-errs)
	})
	ready.Wait()
	b.run("down", "ip link set $RDMANET_LAB_INTERFACE down")
	release()
	wait()
	b.run("up", "ip link set $RDMANET_LAB_INTERFACE up")
	onEachWay(t, ways, func(w way) (err error) {
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			var c *Conn
			if c, err = w.dial(0); err == nil {
				return errors.Join(exchange(c, 1, 1000), c.Close())
			}
		}
		return fmt.Errorf("the link is up again: %w", err)
	})()
}

// b dies: nothing says so. Its connections are quiet, busy with a peer that reads
// and with one that doesn't, and being closed.
func testDeath(t *testing.T, b otherHost, ways []way) {
	const linger = 3 // s
	var ready sync.WaitGroup
	ready.Add(len(ways))
	dead := make(chan struct{})
	wait := onEachWay(t, ways, func(w way) error {
		quiet, err1 := w.dial(0)
		busy, err2 := w.dial(0)
		stuck, err3 := w.dial(time.Hour)
		closing, err4 := w.dial(time.Hour)
		late, err5 := w.dialWith(net.KeepAliveConfig{Idle: -1}, 0)
		if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
			ready.Done()
			return err
		}
		defer quiet.Close()
		defer busy.Close()
		defer stuck.Close()
		_ = closing.SetLinger(linger)
		_ = late.SetLinger(linger)
		bound := linger*time.Second + 20*time.Second
		var wg sync.WaitGroup
		errs := make([]error, 6)
		// of does something whose time begins when b is dead.
		of := func(i int, what string, d time.Duration, f func() error) {
			result := make(chan error, 1)
			go func() { result <- f() }()
			wg.Go(func() {
				<-dead
				start := time.Now()
				errs[i] = atMost(what, d, func() error { return <-result })
				t.Logf("%s, %s: %.1f s after the death: %v", w.name, what, time.Since(start).Seconds(), errs[i])
			})
		}
		timedOut := func(f func() error) func() error {
			return func() error { return typed(f(), syscall.ETIMEDOUT) }
		}
		of(0, "Read", patience, timedOut(func() error { return readByte(quiet) }))
		of(1, "Write to a peer that reads", patience, timedOut(func() error { return streamOn(busy) }))
		of(2, "Write to a peer that doesn't", patience, timedOut(func() error { return writeOn(stuck) }))
		of(3, "Write to what is closed", bound, func() error {
			if err := writeOn(closing); !errors.Is(err, net.ErrClosed) {
				return err
			}
			return nil
		})
		time.Sleep(time.Second) // the window is full by now
		of(4, "Close that had begun", bound, func() error { return closed(closing.Close()) })
		of(5, "Close", bound, func() error {
			<-dead
			_, err := late.Write(bytesOf(1, 100_000))
			return errors.Join(err, closed(late.Close()))
		})
		ready.Done()
		wg.Wait()
		return errors.Join(errs...)
	})
	ready.Wait()
	b.start("death", "echo o >/proc/sysrq-trigger")
	eventually(t, func() bool { // lab/pair says so
		_, err := os.Stat(filepath.Join(b.dir, ".done-b"))
		return err == nil
	}, "the other host's death")
	close(dead)
	wait()
}

// closed returns nil for what Close may say when the peer is gone.
func closed(err error) error {
	if err == nil {
		return nil
	}
	return typed(err, syscall.ETIMEDOUT)
}
