//go:build cgo && linux

package rdmacore

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// often probes a peer that is quiet for a moment, and is patient with it.
var often = net.KeepAliveConfig{Enable: true, Idle: 20 * time.Millisecond, Interval: patience, Count: 1}

func (k *keepAlive) answeredSoFar() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.answers
}

// proofs are what a device's keepalive may rest on. siw can do what other iWARP
// devices do, as long as the peer sends nothing.
func proofs(i verbs.ID) map[string]proof {
	switch d := i.Device().(*device); {
	case d.quirk == quirkSIW:
		return map[string]proof{"TCP": byTCP, "RDMA READ": byRead}
	default:
		return map[string]proof{"its own": d.proof()}
	}
}

// A probe needs no receive, no memory and no program: neither that of the peer nor
// the one that has asked for it.
func TestKeepAliveGoesUnnoticed(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		for name, by := range proofs(resolved(t, newTestChannel(t), netip.AddrPortFrom(addr, 9))) {
			for _, prober := range []string{"dialer", "listener"} {
				t.Run(prober+" by "+name, func(t *testing.T) {
					a, b := pair(t, 1000, addr)
					if prober == "listener" {
						a, b = b, a
					}
					keep := &a.qp.(*qp).keep
					require.NoError(t, a.id.SetKeepAlive(net.KeepAliveConfig{}))
					keep.proof = by
					b.send(1, "nobody polls")
					require.NoError(t, a.id.SetKeepAlive(often))
					was := keep.answeredSoFar()
					require.Eventually(t, func() bool { return keep.answeredSoFar() >= was+5 }, patience, time.Millisecond)
					require.NoError(t, a.id.SetKeepAlive(net.KeepAliveConfig{}))
					was = keep.answeredSoFar()
					time.Sleep(5 * often.Idle)
					require.LessOrEqual(t, keep.answeredSoFar(), was+1, "it was turned off")

					a.pollUntil(func() bool { return len(a.got) == 1 })
					require.Equal(t, "nobody polls", string(a.got[0]))
					b.pollUntil(func() bool { return b.sends == 1 })
					require.Empty(t, b.got)
					a.send(1, "alive")
					b.pollUntil(func() bool { return len(b.got) == 1 })
				})
			}
		}
	})
}

// A peer that takes what comes and says nothing is given up by RDMA READ, also while
// nobody polls. By TCP it is not: its host answers.
func TestKeepAliveOfASilentPeer(t *testing.T) {
	onEveryIWARP(t, func(t *testing.T, addr netip.Addr) {
		k := net.KeepAliveConfig{Enable: true, Idle: 20 * time.Millisecond, Interval: 50 * time.Millisecond, Count: 4}
		t.Run("RDMA READ", func(t *testing.T) {
			e, _ := dialRaw(t, addr, 1)
			e.qp.(*qp).keep.proof = byRead
			start := time.Now()
			require.NoError(t, e.id.SetKeepAlive(k))
			require.ErrorIs(t, next(t, e.ch, verbs.EventDisconnected).Err, syscall.ETIMEDOUT)
			require.GreaterOrEqual(t, time.Since(start), 200*time.Millisecond)
			e.pollUntil(func() bool { return len(e.bad) == testDepth })
			for _, wc := range e.bad {
				require.Equal(t, verbs.StatusWRFlushErr, wc.Status)
			}
		})
		t.Run("TCP", func(t *testing.T) {
			e, _ := dialRaw(t, addr, 1)
			require.NoError(t, e.id.SetKeepAlive(k))
			time.Sleep(time.Second)
			_, err := e.ch.GetEvent()
			require.ErrorIs(t, err, syscall.EAGAIN)
			e.send(1, "goes out")
			e.pollUntil(func() bool { return e.sends == 1 })
			require.Empty(t, e.bad)
		})
	})
}

// A READ that the peer does not allow would end the connection.
func TestKeepAliveWithoutReads(t *testing.T) {
	onEveryIWARP(t, func(t *testing.T, addr netip.Addr) {
		e, _ := dialRaw(t, addr, 0)
		e.qp.(*qp).keep.proof = byRead
		err := e.id.SetKeepAlive(often)
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorIs(t, err, syscall.EOPNOTSUPP)
		time.Sleep(5 * often.Idle)
		e.send(1, "goes out")
		e.pollUntil(func() bool { return e.sends == 1 })
		require.Empty(t, e.bad)
	})
}

// look, of a peer by TCP: the times are exact.
func TestKeepAliveLooks(t *testing.T) {
	for name, c := range map[string]struct {
		silent time.Duration
		gone   bool
	}{
		"not asked":  {0, false},
		"not yet":    {29 * time.Second, false},
		"for longer": {30 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			k := &keepAlive{proof: byTCP, idle: 10 * time.Second, period: 5 * time.Second, patience: 20 * time.Second, outstanding: true}
			k.timer = time.AfterFunc(time.Hour, func() {})
			defer k.stop()
			require.Equal(t, c.gone, k.look(1, c.silent))
		})
	}
}

// A siw dialer nudges its peer though nobody polls here, until the peer sends
// something, and that stops it though nobody polls that either.
func TestNudges(t *testing.T) {
	onEveryIWARP(t, func(t *testing.T, addr netip.Addr) {
		const size = wire.FPDUHeaderLen + wire.TaggedHeaderLen + 4
		all := int64(len(nudges) * size)
		last := nudges[len(nudges)-1]
		t.Run("a silent peer", func(t *testing.T) {
			_, p := dialRaw(t, addr, 0)
			require.Eventually(t, func() bool { return p.took.Load() == all }, patience, time.Millisecond)
			time.Sleep(last / 4)
			require.Equal(t, all, p.took.Load())
		})
		t.Run("one that sends", func(t *testing.T) {
			e, p := dialRaw(t, addr, 0)
			require.Eventually(t, func() bool { return p.took.Load() > 0 }, patience, time.Millisecond)
			_, err := (<-p.conn).Write(rawSend("heard"))
			require.NoError(t, err)
			time.Sleep(last + last/4)
			require.Less(t, p.took.Load(), all)
			e.pollUntil(func() bool { return len(e.got) == 1 })
			require.Equal(t, "heard", string(e.got[0]))
		})
	})
}

// rawSend is a peer's first message, without a CRC.
func rawSend(text string) []byte {
	const headers = wire.FPDUHeaderLen + wire.UntaggedHeaderLen
	ulpdu := wire.UntaggedHeaderLen + len(text)
	b := make([]byte, headers+len(text)+8)
	wire.PutFPDUHeader(b, ulpdu)
	wire.UntaggedHeader{Last: true, Opcode: wire.OpSend, QN: wire.QueueSend, MSN: 1}.Put(b[wire.FPDUHeaderLen:])
	n := headers + copy(b[headers:], text)
	return b[:n+wire.PutTrailer(b[n:], ulpdu, false, 0)]
}

func onEveryIWARP(t *testing.T, f func(t *testing.T, addr netip.Addr)) {
	if os.Getenv("RDMANET_LAB_SIW4") == "" && os.Getenv("RDMANET_LAB_RXE4") != "" {
		t.Skip("for iWARP devices")
	}
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		ch := newTestChannel(t)
		if !resolved(t, ch, netip.AddrPortFrom(addr, 9)).Device().(*device).iwarp {
			t.Skip("for iWARP devices")
		}
		f(t, addr)
	})
}

// rawPeer is the other end of dialRaw's connection.
type rawPeer struct {
	conn chan net.Conn
	took atomic.Int64 // bytes, after the set-up
}

func (p *rawPeer) Write(b []byte) (int, error) {
	p.took.Add(int64(len(b)))
	return len(b), nil
}

// dialRaw connects to a plain TCP socket that accepts, says that it answers so many
// RDMA READs at a time, 0 or 1, and from then on takes what comes and says nothing.
func dialRaw(t *testing.T, addr netip.Addr, ird uint16) (*end, *rawPeer) {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	require.NoError(t, err)
	served, p := make(chan error, 1), &rawPeer{conn: make(chan net.Conn, 1)}
	go func() {
		conn, err := l.Accept()
		if err != nil {
			served <- err
			return
		}
		defer conn.Close()
		_, err = conn.Read(make([]byte, 256))
		reply, _ := wire.AppendSetup(nil, &wire.SetupFrame{Reply: true, Revision: wire.Revision2, Enhanced: true, IRD: ird, ORD: 1 - ird})
		if err == nil {
			_, err = conn.Write(reply)
		}
		if err == nil {
			p.conn <- conn
			_, _ = io.Copy(p, conn)
		}
		served <- err
	}()
	ch := newTestChannel(t)
	e := &end{t: t, ch: ch, id: resolved(t, ch, l.Addr().(*net.TCPAddr).AddrPort())}
	e.createQP(1000)
	t.Cleanup(func() {
		e.free()
		l.Close()
		select {
		case err := <-served:
			require.NoError(t, err)
		case <-time.After(patience):
			t.Error("the raw peer does not end")
		}
	})
	require.NoError(t, e.id.Connect(testParam))
	next(t, ch, verbs.EventEstablished)
	return e, p
}
