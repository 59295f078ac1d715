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
// b dead.
const envPair = "RDMANET_TEST_PAIR"

// envNarrow gives a peer on b a small window. A host that sends more than a little
// to one whose link is down is stopped as a whole by QEMU, until the link is up.
const envNarrow = "RDMANET_TEST_NARROW"

// quick gives a silent host up after 6 s.
var quick = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 4}

// calm is b's: it takes longer than the outage that a survives, and gives a up
// before the test ends.
var calm = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 10}

const (
	whileAsleep = 8 * time.Second // longer than quick takes
	shortOutage = 2 * time.Second // short enough for every retry
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
	for _, of := range []string{".status", ".out", ".err"} { // of an earlier one of that name
		_ = os.Remove(file + of)
	}
	require.NoError(b.t, os.WriteFile(file+".new", []byte(script), 0o666))
	require.NoError(b.t, os.Rename(file+".new", file+".run"))
}

// run has b run a script and waits for it.
func (b otherHost) run(name, script string) {
	b.t.Helper()
	b.start(name, script)
	b.ended(name)
}

// of returns what there is of a script's out, err or status.
func (b otherHost) of(name, what string) string {
	text, _ := os.ReadFile(filepath.Join(b.dir, "pair-"+name+"."+what))
	return string(text)
}

// until waits for what b does.
func (b otherHost) until(what string, cond func() bool) {
	b.t.Helper()
	for end := time.Now().Add(2 * patience); !cond(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			b.t.Fatal("the other host: never happened: ", what)
		}
	}
}

// ended waits for a script's end.
func (b otherHost) ended(name string) {
	b.t.Helper()
	b.until(name+" ends", func() bool { return b.of(name, "status") != "" })
	if status := b.of(name, "status"); strings.TrimSpace(status) != "0" {
		b.t.Fatalf("%s on the other host: status %s%s%s", name, status, b.of(name, "out"), b.of(name, "err"))
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

// farPeer is a process on b that serves as serveFar does. What it says is its
// address, its number, and how each connection ended.
type farPeer struct {
	name, addr, pid string
	provider        Provider
}

// startPeer starts one that listens on an address with a provider, until it is
// dismissed.
func (b otherHost) startPeer(name, ip string, p Provider, env string) farPeer {
	b.t.Helper()
	exe, err := os.Executable()
	require.NoError(b.t, err)
	enough := filepath.Join(b.dir, "pair-"+name+".enough")
	_ = os.Remove(enough)
	b.start(name, fmt.Sprintf("until [ -e %s ]; do sleep 0.1; done | %s=far %s=%s %s=%s %s %s",
		enough, envChild, envProvider, p, envAddr, net.JoinHostPort(ip, "0"), env, exe))
	return farPeer{name: name, provider: p}
}

// listens waits until a peer does.
func (b otherHost) listens(p *farPeer) {
	b.t.Helper()
	b.until(p.name+" listens", func() bool {
		n, _ := fmt.Sscan(b.of(p.name, "out"), &p.addr, &p.pid)
		return n == 2
	})
}

// ways starts peers and returns the ways to them: with the device, in software, and
// across where the device is siw. There the peer of the third is not that of the
// second: a process in software has to answer for itself, and must not be stopped.
func (b otherHost) ways(env string) []way {
	b.t.Helper()
	ip := os.Getenv("RDMANET_LAB_PEER4")
	peers := []farPeer{b.startPeer("device", ip, ProviderDevice, env), b.startPeer("software", ip, ProviderIWARP, env)}
	if onSIW() {
		peers = append(peers, b.startPeer("awake", ip, ProviderIWARP, env))
	}
	for i := range peers {
		b.listens(&peers[i])
	}
	ways := []way{{"device", ProviderDevice, peers[0]}, {"software", ProviderIWARP, peers[1]}}
	if onSIW() {
		ways = append(ways, way{"siw to software", ProviderDevice, peers[2]}, way{"software to siw", ProviderIWARP, peers[0]})
	}
	return ways
}

func onSIW() bool { return strings.HasPrefix(os.Getenv("RDMANET_LAB_DEVICE"), "siw") }

// dismiss ends the peers of some ways, which must have given everything back.
func (b otherHost) dismiss(ways []way) {
	b.t.Helper()
	for _, w := range ways {
		require.NoError(b.t, os.WriteFile(filepath.Join(b.dir, "pair-"+w.peer.name+".enough"), nil, 0o666))
	}
	for _, w := range ways {
		b.ended(w.peer.name)
	}
}

func init() {
	children["far"] = func() {
		lc := ListenConfig{Config: Config{KeepAlive: calm}}
		if os.Getenv(envNarrow) != "" {
			lc.BufferSize, lc.RecvDepth = minBufferSize, 4
		}
		l, err := lc.Listen(context.Background(), "rdma", os.Getenv(envAddr))
		if err == nil {
			fmt.Println(l.Addr(), os.Getpid())
			done, closed := make(chan struct{}), make(chan error)
			go func() {
				_, _ = io.Copy(io.Discard, os.Stdin)
				close(done)
				closed <- l.Close()
			}()
			serveFar(l, done)
			err = errors.Join(<-closed, leaked(0))
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

// serveFar serves until the listener is closed, or its device is gone. The first
// line of a connection is how long to sleep. Then everything is sent back.
func serveFar(l net.Listener, done <-chan struct{}) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			fmt.Println(err)
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
				_, err := io.Copy(c, c)
				fmt.Println(err)
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
func (w way) dial(sleep time.Duration) (*Conn, error) {
	return w.dialWith(Config{KeepAlive: quick}, sleep)
}

func (w way) dialWith(cfg Config, sleep time.Duration) (*Conn, error) {
	cfg.Provider = w.provider
	d := Dialer{Config: cfg, Timeout: patience}
	c, err := d.Dial("rdma", w.peer.addr)
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
	for _, part := range []struct {
		name string
		test func(t *testing.T, b otherHost)
	}{
		{"a peer that sleeps", testSleep},
		{"loss and delay", testLoss},
		{"a short outage", testShortOutage},
		{"a link that is down", testLinkDown},
		{"a device that is removed", testRemoval},
		{"a host that dies", testDeath},
	} {
		ok := t.Run(part.name, func(t *testing.T) {
			checkLeaks(t)
			part.test(t, otherHost{t, dir})
		})
		if !ok { // b is in no state for the next one
			break
		}
	}
}

// Its host is alive. Some processes are stopped, the others just sleep.
func testSleep(t *testing.T, b otherHost) {
	ways := b.ways("")
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
		go func() { filled <- exchange(full, 1, 1<<20) }() // more than the window
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
	stopped := ways[0].peer.pid + " " + ways[1].peer.pid
	b.run("stop", fmt.Sprintf("kill -STOP %s; sleep %v; kill -CONT %s", stopped, whileAsleep.Seconds(), stopped))
	wait()
	b.dismiss(ways)
}

const (
	netem   = "tc qdisc replace dev $RDMANET_LAB_INTERFACE root netem "
	noNetem = "tc qdisc del dev $RDMANET_LAB_INTERFACE root"
)

// Packets are lost and late, in both directions: what arrives is right, and what
// doesn't is a time-out.
func testLoss(t *testing.T, b otherHost) {
	device6 := b.startPeer("device6", os.Getenv("RDMANET_LAB_PEER6"), ProviderDevice, "")
	ways := b.ways("")
	b.listens(&device6)
	ways = append(ways, way{"device, IPv6", ProviderDevice, device6})
	b.both(netem + "delay 20ms loss 2%")
	d := 4 * time.Second
	if long {
		d = 30 * time.Second
	}
	onEachWay(t, ways, func(w way) error {
		c, err := w.dialWith(Config{}, 0)
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
	b.both(noNetem)
	b.dismiss(ways)
}

// The wire is cut for a moment, while data is on its way and while none is. The
// connections go on.
func testShortOutage(t *testing.T, b otherHost) {
	ways := b.ways("")
	var ready sync.WaitGroup
	ready.Add(len(ways))
	cut := make(chan struct{})
	release := sync.OnceFunc(func() { close(cut) })
	defer release()
	wait := onEachWay(t, ways, func(w way) error {
		busy, err := w.dialWith(Config{}, 0)
		quiet, err2 := w.dialWith(Config{}, 0)
		ready.Done()
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		defer busy.Close()
		defer quiet.Close()
		<-cut
		if err := exchange(busy, 1, 1<<19); err != nil {
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
	b.both(noNetem)
	wait()
	b.dismiss(ways)
}

// bothEnd uses one connection all the time and only reads from the other, until each
// has ended with one of the errors.
func bothEnd(busy, quiet *Conn, want ...syscall.Errno) error {
	errs := make(chan error, 2)
	go func() {
		errs <- atMost("busy", patience, func() error { return typed(streamOn(busy), want...) })
	}()
	go func() {
		errs <- atMost("quiet", patience, func() error { return typed(readByte(quiet), want...) })
	}()
	return errors.Join(<-errs, <-errs)
}

// The link of b is down until everybody has noticed, and then up again.
func testLinkDown(t *testing.T, b otherHost) {
	ways := b.ways(envNarrow + "=1")
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
		return bothEnd(busy, quiet, syscall.ETIMEDOUT)
	})
	ready.Wait()
	b.run("down", "ip link set $RDMANET_LAB_INTERFACE down")
	release()
	wait()
	b.run("up", "ip link set $RDMANET_LAB_INTERFACE up")
	if !onSIW() {
		// Linux 6.1's rxe, having had to end a connection while its link was down,
		// does not hear rdma_cm any more: lab/README.md.
		b.dismiss(ways)
		b.run("remake", removeDevice+" && "+addDevice)
		ways = b.ways("")
	}
	onEachWay(t, ways, func(w way) error {
		c, err := w.dial(0)
		if err != nil {
			return fmt.Errorf("the link is up again: %w", err)
		}
		return errors.Join(exchange(c, 1, 1000), c.Close())
	})()
	b.dismiss(ways)
}

const (
	removeDevice = "rdma link del $RDMANET_LAB_DEVICE"
	addDevice    = "rdma link add $RDMANET_LAB_DEVICE type ${RDMANET_LAB_DEVICE%0} netdev $RDMANET_LAB_INTERFACE && " +
		"until grep -q ACTIVE /sys/class/infiniband/$RDMANET_LAB_DEVICE/ports/1/state; do sleep 0.1; done"
)

// Our device is removed, and then b's, while connections are quiet and busy. Who has
// the device is told, the peer sees an end, and what is in software goes on. When
// that has let go, the device is gone, and a new one of the same name works.
func testRemoval(t *testing.T, b otherHost) {
	ways := b.ways("")
	removal := func(has func(w way) bool, want []syscall.Errno, remove func()) {
		t.Helper()
		var ready sync.WaitGroup
		ready.Add(len(ways))
		removed := make(chan struct{})
		wait := onEachWay(t, ways, func(w way) error {
			busy, err := w.dial(0)
			quiet, err2 := w.dial(0)
			ready.Done()
			if err := errors.Join(err, err2); err != nil {
				return err
			}
			defer busy.Close()
			defer quiet.Close()
			if has(w) {
				return bothEnd(busy, quiet, want...)
			}
			for n := uint64(0); ; n++ {
				select {
				case <-removed:
					return exchange(quiet, n, 1000)
				default:
					if err := exchange(busy, n, 100_000); err != nil {
						return err
					}
				}
			}
		})
		ready.Wait()
		time.Sleep(300 * time.Millisecond) // the busy ones are
		remove()
		close(removed)
		wait()
	}
	gone := []syscall.Errno{syscall.ECONNRESET, syscall.EPIPE, syscall.ETIMEDOUT}
	removal(func(w way) bool { return w.provider == ProviderDevice }, []syscall.Errno{syscall.ENODEV}, func() {
		require.NoError(t, atMost("rdma link del", patience, func() error { return exec.Command("bash", "-c", removeDevice).Run() }))
	})
	require.NoError(t, exec.Command("bash", "-c", addDevice).Run())
	removal(func(w way) bool { return w.peer.provider == ProviderDevice }, gone, func() { b.run("remove", removeDevice) })
	b.until("Accept and two connections end with ENODEV", func() bool {
		return strings.Count(b.of(ways[0].peer.name, "out"), syscall.ENODEV.Error()) >= 3
	})
	b.dismiss(ways)
	b.run("add", addDevice)
}

// b dies: nothing says so. Its connections are quiet, busy with a peer that reads
// and with one that doesn't, and being closed.
func testDeath(t *testing.T, b otherHost) {
	ways := b.ways("")
	const linger = 3 // s
	var ready sync.WaitGroup
	ready.Add(len(ways))
	dead := make(chan struct{})
	wait := onEachWay(t, ways, func(w way) error {
		quiet, err1 := w.dial(0)
		busy, err2 := w.dial(0)
		stuck, err3 := w.dial(time.Hour)
		closing, err4 := w.dial(time.Hour)
		late, err5 := w.dialWith(Config{KeepAlive: net.KeepAliveConfig{Idle: -1}}, 0)
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
	b.start("death", "echo b >/proc/sysrq-trigger")
	b.until("its death", func() bool { // lab/pair says so
		_, err := os.Stat(filepath.Join(b.dir, ".done-b"))
		return err == nil
	})
	close(dead)
	wait()
	if long {
		time.Sleep(time.Minute)
		return
	}
	// What software has closed in order outlives Close by a minute, for a peer that
	// may yet read.
	out, err := exec.Command("bash", "-c", "ss -K dst $RDMANET_LAB_PEER4").CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// closed returns nil for what Close may say when the peer is gone.
func closed(err error) error {
	if err == nil {
		return nil
	}
	return typed(err, syscall.ETIMEDOUT)
}
