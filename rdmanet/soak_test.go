package rdmanet

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The soak: two processes dial each other for some time. Each connection follows a
// plan that both its ends derive from a seed: how much each end sends, how it reads
// and writes, and how it ends. Every byte that arrives is compared, and so is how
// the other's end looks. When it is over, the process has what it had before.

const (
	envSoak     = "RDMANET_SOAK"      // for how long, such as 10m
	envSoakSeed = "RDMANET_SOAK_SEED" // 1 if not set: the same plans every time
	envSoakPeer = "RDMANET_TEST_PEER"
)

// soakWorkers is how many goroutines of a process dial, one connection after the
// other.
const soakWorkers = 8

// Bounds of what a process has more at the end than after its first connections.
const (
	soakDescriptors = 2
	soakGoroutines  = 4
	soakMemory      = 64 << 20 // bytes resident
)

func TestSoak(t *testing.T) {
	d, err := time.ParseDuration(os.Getenv(envSoak))
	if os.Getenv(envSoak) == "" {
		d, err = time.Duration(scaled(1000, 60_000))*time.Millisecond, nil
	}
	require.NoError(t, err, envSoak)
	seed, err := soakSeed()
	require.NoError(t, err, envSoakSeed)
	t.Logf("%v with %s=%d", d, envSoakSeed, seed)
	checkLeaks(t)
	addrs := testAddrs(t)
	s, err := newSoak(net.JoinHostPort(addrs[0], "0"), seed)
	require.NoError(t, err)
	other := startSoak(t, net.JoinHostPort(addrs[len(addrs)-1], "0"), s.l.Addr().String())
	both := func(d time.Duration) (here, there soakReport) {
		t.Helper()
		err := together(
			func() error { here = s.run(other.addr, d); return nil },
			func() (err error) { there, err = other.run(d); return err })
		require.NoError(t, err)
		require.Empty(t, here.Failure+there.Failure)
		return here, there
	}
	both(max(d/10, 100*time.Millisecond)) // pools and the like have grown
	here0, there0 := both(0)
	// What is in use halfway shows that the looks at the end see something.
	busy := make(chan string, 1)
	time.AfterFunc(d/2, func() { busy <- resourceCounts() })
	both(d)
	t.Log("halfway:", <-busy)
	var here, there soakReport
	eventually(t, func() bool {
		here, there = both(0)
		return here.within(here0) && there.within(there0)
	}, "all is given back: %v, from %v; other process: %v, from %v", &here, &here0, &there, &there0)
	t.Logf("here:  %v, from %v; %v", here, here0, here.Ended)
	t.Logf("there: %v, from %v; %v", there, there0, there.Ended)
	require.NoError(t, s.close())
	require.NoError(t, other.end())
	require.NoError(t, leftOnDevices())
	require.Positive(t, here.Bytes)
	require.Positive(t, there.Bytes)
	cut, all := 0, 0
	for _, ended := range []map[string]int{here.Ended, there.Ended} {
		cut += ended[cutShort]
		for _, n := range ended {
			all += n
		}
	}
	require.LessOrEqual(t, cut, 1+all/2000, "of %d were cut short", all)
}

func soakSeed() (uint64, error) {
	if s := os.Getenv(envSoakSeed); s != "" {
		return strconv.ParseUint(s, 0, 64)
	}
	return 1, nil
}

// resourceCounts says what this process has on RDMA devices.
func resourceCounts() string {
	if testProvider() != ProviderDevice {
		return "no devices"
	}
	lines, err := onDevices()
	if err != nil {
		return err.Error()
	}
	n := make(map[string]int)
	for line := range strings.Lines(lines) {
		kind, _, _ := strings.Cut(line, ":")
		n[kind]++
	}
	return fmt.Sprint(n)
}

// soaking is the other process.
type soaking struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	addr string
}

func startSoak(t *testing.T, addr, peer string) *soaking {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	s := &soaking{cmd: exec.Command(exe)}
	s.cmd.Env = append(os.Environ(), envChild+"=soak", envAddr+"="+addr, envSoakPeer+"="+peer)
	s.cmd.Stderr = os.Stderr
	s.in, err = s.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := s.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.cmd.Start())
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	})
	s.out = bufio.NewReader(out)
	line, err := s.out.ReadString('\n')
	require.NoError(t, err)
	s.addr = strings.TrimSpace(line)
	return s
}

// run is soak.run in the other process.
func (s *soaking) run(d time.Duration) (r soakReport, err error) {
	if _, err := fmt.Fprintln(s.in, d); err != nil {
		return r, err
	}
	line, err := s.out.ReadBytes('\n')
	if err != nil {
		return r, fmt.Errorf("the other process is gone: %w", err)
	}
	return r, json.Unmarshal(line, &r)
}

// end waits for the other process, which has found that nothing is left.
func (s *soaking) end() error {
	if err := s.in.Close(); err != nil {
		return err
	}
	said, err := io.ReadAll(s.out)
	if err = errors.Join(err, s.cmd.Wait()); err != nil {
		return fmt.Errorf("the other process: %w: %s", err, said)
	}
	return nil
}

func init() {
	children["soak"] = func() {
		seed, err := soakSeed()
		var s *soak
		if err == nil {
			s, err = newSoak(os.Getenv(envAddr), ^seed)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(s.l.Addr())
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			d, _ := time.ParseDuration(in.Text())
			_ = json.NewEncoder(os.Stdout).Encode(s.run(os.Getenv(envSoakPeer), d))
		}
		if err := errors.Join(s.close(), leaked(0), leftOnDevices()); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
}

// soak is one process's part.
type soak struct {
	l       net.Listener
	seeds   *rand.Rand
	servers sync.WaitGroup

	mu      sync.Mutex
	failure string // the first one
	ended   map[string]int
	bytes   uint64
}

// soakReport is what came of it, and what the process has.
type soakReport struct {
	Failure     string
	Ended       map[string]int // connections, by how both ends ended them
	Bytes       uint64         // received and found right
	Descriptors int
	Goroutines  int
	Memory      int // bytes resident
}

func (r soakReport) String() string {
	n := 0
	for k := range maps.Values(r.Ended) {
		n += k
	}
	return fmt.Sprintf("%d connections, %d MiB, %d descriptors, %d goroutines, %d KiB resident",
		n, r.Bytes>>20, r.Descriptors, r.Goroutines, r.Memory>>10)
}

func (r soakReport) within(before soakReport) bool {
	return r.Descriptors <= before.Descriptors+soakDescriptors && r.Goroutines <= before.Goroutines+soakGoroutines &&
		r.Memory <= before.Memory+soakMemory
}

func newSoak(addr string, seed uint64) (*soak, error) {
	l, err := (&ListenConfig{Config: Config{Linger: patience}}).Listen(context.Background(), "rdma", addr)
	if err != nil {
		return nil, err
	}
	s := &soak{l: l, seeds: rand.New(rand.NewPCG(seed, 1)), ended: make(map[string]int)}
	s.servers.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.servers.Go(func() { s.serve(c.(*Conn)) })
		}
	})
	return s, nil
}

func (s *soak) close() error {
	err := s.l.Close()
	s.servers.Wait()
	return err
}

// run dials for some time, and reports all since the beginning.
func (s *soak) run(peer string, d time.Duration) soakReport {
	end := time.Now().Add(d)
	var workers sync.WaitGroup
	for range soakWorkers {
		rng := rand.New(rand.NewPCG(s.seeds.Uint64(), 2))
		workers.Go(func() {
			for time.Now().Before(end) && s.dial(peer, rng) {
			}
		})
	}
	workers.Wait()
	debug.FreeOSMemory()
	s.mu.Lock()
	defer s.mu.Unlock()
	return soakReport{s.failure, maps.Clone(s.ended), s.bytes, descriptors(), runtime.NumGoroutine(), resident()}
}

func descriptors() int {
	d, _ := os.ReadDir("/proc/self/fd")
	return len(d)
}

// resident is this process's memory, in bytes.
func resident() int {
	b, _ := os.ReadFile("/proc/self/statm")
	f := bytes.Fields(b)
	if len(f) < 2 {
		return 0
	}
	pages, _ := strconv.Atoi(string(f[1]))
	return pages * os.Getpagesize()
}

// soakConfigs are the dialers'.
var soakConfigs = []Config{
	{},
	{BufferSize: minBufferSize, RecvDepth: 2, SendDepth: 1},
	{BufferSize: 100_000, RecvDepth: 3, SendDepth: 4},
	{BufferSize: 7777, RecvDepth: 64, SendDepth: 16, CRC: true},
}

// dial makes one connection and follows its plan. It reports whether to go on.
func (s *soak) dial(peer string, rng *rand.Rand) bool {
	d := Dialer{Config: soakConfigs[rng.IntN(len(soakConfigs))]}
	d.Linger = patience
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	impatient := rng.IntN(8) == 0
	if impatient {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(1<<rng.IntN(17)))*time.Microsecond)
	}
	defer cancel()
	p := planOf(rng.Uint64())
	c, err := d.DialContext(ctx, "rdma", peer)
	switch {
	case err != nil && impatient && errors.Is(err, context.DeadlineExceeded):
		return s.note("dial given up", 0, nil)
	case err != nil:
		return s.note("", 0, fmt.Errorf("dial: %w", err))
	}
	if _, err := c.Write(binary.BigEndian.AppendUint64([]byte("soak"), p.seed)); err != nil {
		_ = c.Close()
		return s.note("", 0, fmt.Errorf("first write: %w", err))
	}
	return s.follow(c.(*Conn), p, 0)
}

// serve is the other end of dial.
func (s *soak) serve(c *Conn) {
	first := make([]byte, 12)
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(c, first); err != nil || string(first[:4]) != "soak" {
		_ = c.Close()
		if !errors.Is(err, syscall.ECONNRESET) { // an abort may be that quick
			s.note("", 0, fmt.Errorf("first read of %v: %q, %w", c.RemoteAddr(), first, err))
		}
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	s.follow(c, planOf(binary.BigEndian.Uint64(first[4:])), 1)
}

// follow does one end's part of a plan, and closes c.
func (s *soak) follow(c *Conn, p plan, side int) bool {
	watchdog := time.AfterFunc(2*patience, func() {
		buf := make([]byte, 1<<20)
		s.note("", 0, fmt.Errorf("%v, side %d, hangs: %s", p, side, buf[:runtime.Stack(buf, true)]))
		_ = c.SetLinger(0)
		_ = c.Close()
	})
	defer watchdog.Stop()
	o := p.follow(c, side)
	err := p.judge(side, o)
	if e, _ := c.Endpoint(); err != nil && e.Transport == "iWARP" && o.cutShort() {
		return s.note(cutShort, o.received, nil)
	}
	if err != nil {
		err = fmt.Errorf("%v, side %d: %w; %v", p, side, err, o)
	}
	return s.note(fmt.Sprintf("%v, %v", p.ends[side], p.ends[1-side]), o.received, err)
}

// note counts a connection, and reports whether all were as they should be.
func (s *soak) note(how string, received int, err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && s.failure == "" {
		s.failure = err.Error()
	}
	if how != "" {
		s.ended[how]++
	}
	s.bytes += uint64(received)
	return s.failure == ""
}

// ending is how one end ends a connection.
type ending int

const (
	inOrder      ending = iota // writes all, says so, reads all, and closes
	stopsReading               // CloseRead somewhere; writes all and closes
	closes                     // writes all, and closes whatever comes
	cuts                       // closes at some time, whatever is going on
	aborts                     // closes after a part with SetLinger(0)
)

func (e ending) String() string {
	return [...]string{"in order", "stops reading", "closes", "cuts", "aborts"}[e]
}

// plan is what the dialing end (0) and the accepting end (1) do.
type plan struct {
	seed      uint64
	ends      [2]ending
	bytes     [2]int  // to be written
	part      [2]int  // of what one aborts after, or stops to read after
	impatient [2]bool // reads and writes with short deadlines, again and again
	answers   bool    // the accepting end writes when it has read everything
	cut       time.Duration
}

func planOf(seed uint64) plan {
	rng := rand.New(rand.NewPCG(seed, 3))
	p := plan{seed: seed, cut: time.Duration(rng.IntN(20_000)) * time.Microsecond}
	for i := range p.ends {
		if rng.IntN(2) == 0 {
			p.ends[i] = ending(rng.IntN(int(aborts) + 1))
		}
		if rng.IntN(16) > 0 {
			n := 1 << rng.IntN(21)
			p.bytes[i] = n + rng.IntN(n)
		}
		p.impatient[i] = rng.IntN(4) == 0
	}
	if p.ends[0] == stopsReading && p.ends[1] == stopsReading {
		p.ends[1] = closes // or both would wait for room for ever
	}
	for i := range p.ends {
		p.part[i] = rng.IntN(1 + p.bytes[i])
		if p.ends[i] == stopsReading {
			p.part[i] = rng.IntN(1 + p.bytes[1-i])
		}
	}
	p.answers = p.ends == [2]ending{} && rng.IntN(4) == 0
	return p
}

func (p plan) String() string {
	return fmt.Sprintf("plan %#x (%v with %d bytes, %v with %d)", p.seed, p.ends[0], p.bytes[0], p.ends[1], p.bytes[1])
}

// content is what one end writes.
func (p plan) content(side int) io.Reader {
	var seed [32]byte
	binary.BigEndian.PutUint64(seed[:], p.seed)
	seed[8] = byte(side)
	return rand.NewChaCha8(seed)
}

// outcome is what an end has seen.
type outcome struct {
	received          int
	read, write, shut error // what ended reading (nil for io.EOF), and writing; Close's
}

// cutShort reports whether the end came before all that was sent. siw completes a
// send when TCP has taken it, and resets the TCP connection if something arrives
// while it is closed: that discards what is on its way the other way, and the reader
// gets an error instead of it. Where bytes arrived they are right. A siw id waits
// before it disconnects, which made it rare; how often it may be is bounded.
func (o outcome) cutShort() bool {
	return errors.Is(o.read, syscall.ECONNRESET) && permitted(o.write, map[error]bool{syscall.EPIPE: true, syscall.ECONNRESET: true}) && o.shut == nil
}

const cutShort = "cut short by siw"

func (o outcome) String() string {
	return fmt.Sprintf("%d bytes received; read: %v; write: %v; Close: %v", o.received, o.read, o.write, o.shut)
}

func (p plan) follow(c *Conn, side int) (o outcome) {
	if p.ends[side] == cuts {
		var cut sync.WaitGroup
		defer cut.Wait()
		cut.Add(1)
		time.AfterFunc(p.cut, func() {
			defer cut.Done()
			_ = c.Close()
		})
	}
	readAll := make(chan struct{})
	go func() {
		defer close(readAll)
		o.received, o.read = p.receive(c, side)
	}()
	if p.answers && side == 1 {
		<-readAll
	}
	o.write = p.send(c, side)
	switch p.ends[side] {
	case inOrder:
		o.write = errors.Join(o.write, c.CloseWrite())
		<-readAll
	case aborts:
		_ = c.SetLinger(0)
	}
	o.shut = c.Close()
	<-readAll
	return o
}

// send writes what the plan says in pieces of random size, by all methods.
func (p plan) send(c *Conn, side int) error {
	rng := rand.New(rand.NewPCG(p.seed, uint64(4+side)))
	content, left := p.content(side), p.bytes[side]
	if p.ends[side] == aborts {
		left = p.part[side]
	}
	buf := make([]byte, 128<<10)
	for left > 0 {
		b := buf[:min(left, 1+rng.IntN(1<<rng.IntN(18)))]
		_, _ = io.ReadFull(content, b)
		left -= len(b)
		for len(b) > 0 {
			if p.impatient[side] {
				_ = c.SetWriteDeadline(time.Now().Add(time.Duration(rng.IntN(5000)) * time.Microsecond))
			}
			n, err := writeSomehow(c, b, rng)
			b = b[n:]
			if err != nil && !(p.impatient[side] && errors.Is(err, os.ErrDeadlineExceeded)) {
				return err
			}
		}
		pause(rng)
	}
	return nil
}

// pause gives the other end time to catch up, now and then.
func pause(rng *rand.Rand) {
	if rng.IntN(50) == 0 {
		time.Sleep(time.Duration(rng.IntN(3000)) * time.Microsecond)
	}
}

func writeSomehow(c *Conn, p []byte, rng *rand.Rand) (int, error) {
	switch rng.IntN(8) {
	case 0:
		at := rng.IntN(len(p))
		n, err := c.WriteBuffers(&net.Buffers{p[:at], p[at:]})
		return int(n), err
	case 1:
		n, err := c.ReadFrom(bytes.NewReader(p))
		return int(n), err
	case 2:
		b, err := c.NewBuffer()
		if err != nil {
			return 0, err
		}
		b.Resize(min(len(p), b.Cap()))
		copy(b.Bytes(), p)
		return c.WriteBuffer(b)
	}
	return c.Write(p)
}

// receive reads to the end, by all methods, and compares.
func (p plan) receive(c *Conn, side int) (int, error) {
	rng := rand.New(rand.NewPCG(p.seed, uint64(6+side)))
	v := &verifier{want: p.content(1 - side)}
	stopped := p.ends[side] != stopsReading
	buf := make([]byte, 64<<10)
	for {
		if !stopped && v.n >= p.part[side] {
			stopped = true
			if err := c.CloseRead(); err != nil {
				return v.n, err
			}
		}
		if p.impatient[side] {
			_ = c.SetReadDeadline(time.Now().Add(time.Duration(rng.IntN(5000)) * time.Microsecond))
		}
		err := readSomehow(c, v, buf, rng)
		switch {
		case v.err != nil:
			return v.n, v.err
		case err == io.EOF:
			return v.n, nil
		case err != nil && !(p.impatient[side] && errors.Is(err, os.ErrDeadlineExceeded)):
			return v.n, err
		}
		pause(rng)
	}
}

func readSomehow(c *Conn, v *verifier, buf []byte, rng *rand.Rand) error {
	switch rng.IntN(8) {
	case 0:
		_, err := c.WriteTo(v)
		if err == nil {
			err = io.EOF
		}
		return err
	case 1:
		b, err := c.ReadBuffer()
		if err != nil {
			return err
		}
		_, err = v.Write(b.Bytes())
		b.Release()
		return err
	}
	n, err := c.Read(buf[:1+rng.IntN(1<<rng.IntN(17))])
	_, _ = v.Write(buf[:n])
	return err
}

// verifier compares what is written to it.
type verifier struct {
	want io.Reader
	buf  [4096]byte
	n    int   // bytes that were right
	err  error // the first that was not
}

var errWrongByte = errors.New("other bytes arrived than were sent")

func (v *verifier) Write(p []byte) (int, error) {
	for done := 0; done < len(p) && v.err == nil; {
		want := v.buf[:min(len(p)-done, len(v.buf))]
		_, _ = io.ReadFull(v.want, want)
		if got := p[done : done+len(want)]; !bytes.Equal(want, got) {
			v.err = fmt.Errorf("within %d bytes after %d: %w", len(want), v.n, errWrongByte)
			return done, v.err
		}
		done += len(want)
		v.n += len(want)
	}
	return len(p), v.err
}

// judge says what should have come of it and did not.
func (p plan) judge(side int, o outcome) error {
	mine, theirs := p.ends[side], p.ends[1-side]
	ours := mine != inOrder // this end may have been first
	gone := theirs != inOrder
	switch {
	case errors.Is(o.read, errWrongByte):
		return o.read
	case o.received > p.bytes[1-side]:
		return errors.New("received more than was sent")
	case !permitted(o.read, map[error]bool{net.ErrClosed: ours, syscall.ECONNRESET: theirs == aborts || ours && gone}):
		return errors.New("reading ended the wrong way")
	case mine == inOrder && theirs == aborts && o.read == nil:
		return errors.New("an abort was read as the end")
	case mine == inOrder && theirs <= closes && o.received < p.bytes[1-side]:
		return errors.New("received less than was sent")
	case !permitted(o.write, map[error]bool{net.ErrClosed: mine == cuts, syscall.EPIPE: gone, syscall.ECONNRESET: gone}):
		return errors.New("writing failed the wrong way")
	case !permitted(o.shut, map[error]bool{net.ErrClosed: mine == cuts}):
		return errors.New("Close failed")
	}
	return nil
}

// permitted reports whether err is nil or one of those that are.
func permitted(err error, are map[error]bool) bool {
	return err == nil || slices.ContainsFunc(slices.Collect(maps.Keys(are)), func(e error) bool { return are[e] && errors.Is(err, e) })
}
