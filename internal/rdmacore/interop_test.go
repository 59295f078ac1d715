//go:build cgo && linux

package rdmacore

import (
	"bytes"
	"net/netip"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// The tests of this file talk to rdma-core's own example programs, from Debian's
// package rdmacm-utils.

// start runs a program until the test ends; wait returns when it has.
func start(t *testing.T, name string, args ...string) (wait func()) {
	path, err := exec.LookPath(name)
	if err != nil {
		skip(t, name+" is not installed (try: apt install rdmacm-utils)")
	}
	var out bytes.Buffer
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	ended := false
	t.Cleanup(func() {
		if !ended {
			cmd.Process.Kill()
			<-done
			t.Logf("%s: %s", name, out.String())
		}
	})
	return func() {
		t.Helper()
		select {
		case err := <-done:
			ended = true
			require.NoError(t, err, "%s: %s", name, out.String())
		case <-time.After(patience):
			t.Fatalf("%s does not end", name)
		}
	}
}

// port returns one that nobody listens on.
func port(t *testing.T, addr netip.Addr) uint16 {
	p, err := verbs.Open(Name)
	require.NoError(t, err)
	ch, err := p.NewEventChannel()
	require.NoError(t, err)
	defer ch.Close()
	l, err := ch.NewID()
	require.NoError(t, err)
	defer l.Destroy()
	require.NoError(t, l.Bind(netip.AddrPortFrom(addr, 0)))
	require.NoError(t, l.Listen(1))
	return l.LocalAddr().Port()
}

// dial connects to a program that is about to listen.
func dial(t *testing.T, block int, dst netip.AddrPort) *end {
	ch := newTestChannel(t)
	for start := time.Now(); ; {
		i, err := ch.NewID()
		require.NoError(t, err)
		require.NoError(t, i.ResolveAddr(netip.AddrPort{}, dst, patience))
		next(t, ch, verbs.EventAddrResolved)
		require.NoError(t, i.ResolveRoute(patience))
		next(t, ch, verbs.EventRouteResolved)
		e := &end{t: t, ch: ch, id: i}
		e.createQP(block)
		require.NoError(t, i.Connect(testParam))
		var ev *verbs.Event
		require.Eventually(t, func() bool {
			ev, err = ch.GetEvent()
			return err == nil
		}, patience, time.Millisecond)
		if ev.Type == verbs.EventEstablished {
			t.Cleanup(func() {
				e.free()
				require.NoError(t, i.Destroy())
			})
			return e
		}
		require.Equal(t, verbs.EventRejected.String(), ev.Type.String(), "%v", ev.Err)
		e.free()
		require.NoError(t, i.Destroy())
		require.Less(t, time.Since(start), patience, "nobody listens")
		time.Sleep(20 * time.Millisecond)
	}
}

// accept takes the connection that a program asks for.
func accept(t *testing.T, block int, addr netip.Addr, began func(port string) (wait func())) (e *end, wait func()) {
	ch := newTestChannel(t)
	l := listen(t, ch, addr)
	wait = began(strconv.Itoa(int(l.LocalAddr().Port())))
	ev := next(t, ch, verbs.EventConnectRequest)
	e = &end{t: t, ch: ch, id: ev.ID}
	e.createQP(block)
	t.Cleanup(func() {
		e.free()
		require.NoError(t, ev.ID.Destroy())
	})
	require.NoError(t, e.id.Accept(testParam))
	next(t, ch, verbs.EventEstablished)
	return e, wait
}

// sendAll posts registered messages and waits for their completions.
func (e *end) sendAll(message []byte, count int) {
	e.t.Helper()
	done := e.sends
	for i := range count {
		b := e.sendBuf(i)[:copy(e.sendBuf(i), message)]
		n, err := e.qp.PostSend([]verbs.SendWR{{WRID: uint64(i), Signaled: true, SGL: []verbs.SGE{{Data: b, LKey: e.mr.LKey()}}}})
		require.NoError(e.t, err)
		require.Equal(e.t, 1, n)
	}
	e.pollUntil(func() bool { return e.sends == done+count })
}

// disconnected takes the event, and calls rdma_disconnect, as both sides should.
func (e *end) disconnected() {
	e.t.Helper()
	next(e.t, e.ch, verbs.EventDisconnected)
	require.NoError(e.t, e.id.Disconnect())
	e.requireFlushed()
}

// cmatose sends its memory, and as a client sends back what it received last.
const (
	cmatoseCount = 10
	cmatoseSize  = 3000
)

func cmatoseArgs(addr netip.Addr, port string, more ...string) []string {
	return append(more, "-p", port, "-C", strconv.Itoa(cmatoseCount), "-S", strconv.Itoa(cmatoseSize),
		"-f", map[bool]string{true: "ipv6", false: "ip"}[addr.Is6()])
}

func TestInteropDialCmatose(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		p := port(t, addr)
		wait := start(t, "ucmatose", cmatoseArgs(addr, strconv.Itoa(int(p)), "-b", addr.String())...)
		e := dial(t, cmatoseSize, netip.AddrPortFrom(addr, p))
		e.pollUntil(func() bool { return len(e.got) == cmatoseCount })
		for _, m := range e.got {
			require.Len(t, m, cmatoseSize)
		}
		e.sendAll(make([]byte, cmatoseSize), cmatoseCount)
		e.disconnected()
		wait()
	})
}

func TestInteropAcceptCmatose(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		e, wait := accept(t, cmatoseSize, addr, func(port string) func() {
			return start(t, "ucmatose", cmatoseArgs(addr, port, "-s", addr.String())...)
		})
		message := bytes.Repeat([]byte("rdmanet"), cmatoseSize)[:cmatoseSize]
		e.sendAll(message, cmatoseCount)
		e.pollUntil(func() bool { return len(e.got) == cmatoseCount })
		for _, m := range e.got {
			require.Equal(t, message, m)
		}
		require.NoError(t, e.id.Disconnect())
		e.disconnected()
		wait()
	})
}

// rdma_client and rdma_server exchange one message of 16 zeros.
var rdmaMessage = make([]byte, 16)

func TestInteropDialRDMAServer(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		p := port(t, addr)
		wait := start(t, "rdma_server", "-s", addr.String(), "-p", strconv.Itoa(int(p)))
		e := dial(t, 64, netip.AddrPortFrom(addr, p))
		e.sendAll(rdmaMessage, 1)
		e.pollUntil(func() bool { return len(e.got) == 1 })
		require.Equal(t, rdmaMessage, e.got[0])
		e.disconnected()
		wait()
	})
}

func TestInteropAcceptRDMAClient(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		e, wait := accept(t, 64, addr, func(port string) func() {
			return start(t, "rdma_client", "-s", addr.String(), "-p", port)
		})
		e.pollUntil(func() bool { return len(e.got) == 1 })
		require.Equal(t, rdmaMessage, e.got[0])
		e.sendAll(rdmaMessage, 1)
		e.disconnected()
		wait()
	})
}
