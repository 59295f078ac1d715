package cm_test

import (
	"bytes"
	"errors"
	"net/netip"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/qp"
)

// The tests of this file, and some of rping_test.go, talk to rdma-core's own example
// programs, from Debian's package rdmacm-utils. A program always runs on a kernel's
// device.

// counterpart is where a program runs, and what is at our end: the same device, or
// iWARP in software if it speaks that.
type counterpart struct {
	target
	crc bool
}

func onEveryCounterpart(t *testing.T, f func(t *testing.T, c counterpart)) {
	devices := addresses(t, "device")
	if len(devices) == 0 {
		skip(t, "no RDMA device: RDMANET_LAB_RXE4 and the like are not set (try: lab/guest)")
	}
	run := func(provider string, addr netip.Addr, crc bool) {
		p, err := verbs.Open(provider)
		require.NoError(t, err)
		name := provider + "/" + addr.String()
		if crc {
			name += ", CRC"
		}
		t.Run(name, func(t *testing.T) { f(t, counterpart{target{Provider: p, addr: addr}, crc}) })
	}
	for _, addr := range devices {
		run("device", addr, false)
	}
	for _, addr := range labAddresses("SIW4", "SIW6") {
		for _, crc := range []bool{false, true} {
			if long || crc == addr.Is6() {
				run("iwarp", addr, crc)
			}
		}
	}
}

// with returns parameters with the counterpart's CRC.
func (c counterpart) with(p cm.ConnParam) cm.ConnParam {
	p.CRC = c.crc
	return p
}

// talker is an end that keeps what it receives.
type talker struct {
	*end
	got    [][]byte
	posted uint64 // requests of the send queue
	done   uint64 // those that have completed
}

// until polls until done.
func (k *talker) until(done func() bool) {
	k.t.Helper()
	seen := 0
	k.pollUntil(func(all []qp.WC) bool {
		for _, wc := range all[seen:] {
			switch {
			case wc.Op == qp.OpRecv && wc.Status == qp.StatusWRFlushErr: // the program has what it wanted
			case wc.Op == qp.OpSend:
				require.NoError(k.t, qp.StatusErr(wc))
				k.done++
			default:
				require.NoError(k.t, qp.StatusErr(wc))
				b := k.bufs[wc.WRID]
				k.got = append(k.got, bytes.Clone(b.Block()[:wc.ByteLen]))
				k.postRecv(wc.WRID, b)
			}
		}
		seen = len(all)
		return done()
	})
}

// post posts a request and waits for its completion.
func (k *talker) post(wr qp.SendWR) {
	k.t.Helper()
	wr.WRID, wr.Signaled = k.posted, true
	k.posted++
	_, err := k.qp.PostSend([]qp.SendWR{wr})
	require.NoError(k.t, err)
	k.until(func() bool { return k.done == k.posted })
}

// send1 sends a message and waits for its completion.
func (k *talker) send1(message []byte) {
	k.t.Helper()
	b, err := k.pool.Get()
	require.NoError(k.t, err)
	defer b.Release()
	b.Resize(copy(b.Block(), message))
	require.Equal(k.t, len(message), b.Len())
	k.post(qp.SendWR{SGL: []qp.SGE{b.SGE()}})
}

// disconnected takes the event, and calls rdma_disconnect, as both sides should.
// Everything posted completes.
func (k *talker) disconnected() {
	k.t.Helper()
	wait(k.t, k.id, cm.EventDisconnected)
	require.NoError(k.t, k.id.Disconnect())
	for _, wc := range k.drain() {
		if wc.Op == qp.OpRecv {
			require.Equal(k.t, qp.StatusWRFlushErr, wc.Status)
		}
	}
}

// moreRecvs are receives beyond those that an end posts.
var moreRecvs = []uint64{8, 9, 10, 11, 12, 13, 14, 15}

// dial connects to a program that is about to listen.
func (c counterpart) dial(t *testing.T, block int, dst netip.AddrPort, param cm.ConnParam) *talker {
	t.Helper()
	k, err := c.tryDial(t, block, dst, param)
	require.NoError(t, err)
	return k
}

// tryDial returns what becomes of the connection, once somebody listens.
func (c counterpart) tryDial(t *testing.T, block int, dst netip.AddrPort, param cm.ConnParam) (*talker, error) {
	t.Helper()
	ch := newChannel(t, c.target)
	for start := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		e := makeEnd(t, resolved(t, ch, dst), block)
		e.recv(moreRecvs...)
		require.NoError(t, e.id.Connect(param))
		ev, err := e.id.Wait(withTimeout(t), cm.EventEstablished)
		if err == nil {
			ev.Ack()
			t.Cleanup(e.close)
			return &talker{end: e}, nil
		}
		e.close()
		require.NoError(t, e.id.Destroy())
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, err
		}
		require.Less(t, time.Since(start), patience, "nobody listens")
	}
}

// accept takes the connection that a program asks for.
func (c counterpart) accept(t *testing.T, block int, param cm.ConnParam, began func(listener netip.AddrPort) (ended func())) (k *talker, ended func()) {
	t.Helper()
	l := listen(t, newChannel(t, c.target), c.target)
	ended = began(l.LocalAddr())
	id := wait(t, l, cm.EventConnectRequest).ID
	destroyLater(t, id)
	e := makeEnd(t, id, block)
	e.recv(moreRecvs...)
	t.Cleanup(e.close)
	require.NoError(t, id.Accept(param))
	wait(t, id, cm.EventEstablished)
	return &talker{end: e}, ended
}

// free returns an address that nobody listens on, where a program is going to.
func (c counterpart) free(t *testing.T) netip.AddrPort {
	p, err := verbs.Open("device")
	require.NoError(t, err)
	on := target{Provider: p, addr: c.addr}
	l := listen(t, newChannel(t, on), on)
	defer l.Destroy()
	return l.LocalAddr()
}

func port(a netip.AddrPort) string { return strconv.Itoa(int(a.Port())) }

// find returns where a program is, which a package of Debian has.
func find(t *testing.T, program, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		skip(t, program+" is not installed (try: apt install "+pkg+")")
	}
	return path
}

// start runs a program of rdmacm-utils until the test ends; ended returns when it
// has.
func start(t *testing.T, name string, args ...string) (ended func()) {
	t.Helper()
	return run(t, exec.Command(find(t, name, "rdmacm-utils"), args...))
}

func run(t *testing.T, cmd *exec.Cmd) (ended func()) {
	t.Helper()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	done := make(chan struct{})
	var err error
	go func() { defer close(done); err = cmd.Wait() }()
	t.Cleanup(func() {
		cmd.Process.Kill() // if it has not ended
		<-done
		if t.Failed() {
			t.Logf("%s: %s", cmd, out.String())
		}
	})
	return func() {
		t.Helper()
		receive(t, done)
		require.NoError(t, err, "%s", cmd)
	}
}

// ucmatose sends its memory, and as a client sends back what it received last. Its
// server sends first, which RFC 5044 forbids: a siw that dials finds the connection
// invalid when a message comes together with the reply.
const (
	cmatoseCount = 10
	cmatoseSize  = 3000
)

func cmatoseArgs(listener netip.AddrPort, more ...string) []string {
	family := "ip"
	if listener.Addr().Is6() {
		family = "ipv6"
	}
	return append(more, "-p", port(listener), "-C", strconv.Itoa(cmatoseCount), "-S", strconv.Itoa(cmatoseSize), "-f", family)
}

func TestInteropDialCmatose(t *testing.T) {
	onEveryCounterpart(t, func(t *testing.T, c counterpart) {
		var k *talker
		var ended func()
		for attempt := 0; k == nil; attempt++ {
			addr := c.free(t)
			ended = start(t, "ucmatose", cmatoseArgs(addr, "-b", c.addr.String())...)
			var err error
			k, err = c.tryDial(t, cmatoseSize, addr, c.with(testParam))
			if err != nil && (c.Name() == "iwarp" || attempt == 10) {
				require.NoError(t, err)
			}
		}
		k.until(func() bool { return len(k.got) == cmatoseCount })
		for _, m := range k.got {
			require.Len(t, m, cmatoseSize)
		}
		for range cmatoseCount {
			k.send1(make([]byte, cmatoseSize))
		}
		k.disconnected()
		ended()
	})
}

func TestInteropAcceptCmatose(t *testing.T) {
	onEveryCounterpart(t, func(t *testing.T, c counterpart) {
		k, ended := c.accept(t, cmatoseSize, c.with(testParam), func(listener netip.AddrPort) func() {
			return start(t, "ucmatose", cmatoseArgs(listener, "-s", c.addr.String())...)
		})
		time.Sleep(500 * time.Millisecond) // siw, if it is that, has the reply then
		message := bytes.Repeat([]byte("rdmanet"), cmatoseSize)[:cmatoseSize]
		for range cmatoseCount {
			k.send1(message)
		}
		k.until(func() bool { return len(k.got) == cmatoseCount })
		for _, m := range k.got {
			require.Equal(t, message, m)
		}
		require.NoError(t, k.id.Disconnect())
		k.disconnected()
		ended()
	})
}

// rdma_client and rdma_server exchange one message of 16 zeros.
var rdmaMessage = make([]byte, 16)

func TestInteropDialRDMAServer(t *testing.T) {
	onEveryCounterpart(t, func(t *testing.T, c counterpart) {
		addr := c.free(t)
		ended := start(t, "rdma_server", "-s", c.addr.String(), "-p", port(addr))
		k := c.dial(t, 64, addr, c.with(testParam))
		k.send1(rdmaMessage)
		k.until(func() bool { return len(k.got) == 1 })
		require.Equal(t, rdmaMessage, k.got[0])
		k.disconnected()
		ended()
	})
}

func TestInteropAcceptRDMAClient(t *testing.T) {
	onEveryCounterpart(t, func(t *testing.T, c counterpart) {
		k, ended := c.accept(t, 64, c.with(testParam), func(listener netip.AddrPort) func() {
			return start(t, "rdma_client", "-s", c.addr.String(), "-p", port(listener))
		})
		k.until(func() bool { return len(k.got) == 1 })
		require.Equal(t, rdmaMessage, k.got[0])
		k.send1(rdmaMessage)
		k.disconnected()
		ended()
	})
}
