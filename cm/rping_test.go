package cm_test

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
)

// rping is one side of what rdma-core's program of that name does. Of each round,
// the client sends where its text is, and the server READs it; the client sends
// where there is room, and the server WRITEs the text there. What the server sends
// just says that it is done. All messages have infoLen bytes.
type rping struct {
	*talker
	text  *qp.MR
	mem   []byte // of text
	taken int    // messages received and acted upon
}

const (
	rpingText   = 60_000 // the program takes less than 64 KiB
	rpingRounds = 20
	infoLen     = 16
)

// rpingParam is what rping asks for.
var rpingParam = cm.ConnParam{ResponderResources: 1, InitiatorDepth: 1, RetryCount: 7}

// newRping makes the queue pair of an id, with receives posted, and frees all of
// it at the test's end.
func newRping(t *testing.T, id *cm.ID) *rping {
	return rpingOn(t, &talker{end: newEnd(t, id)})
}

// rpingOn makes one of an end that there is.
func rpingOn(t *testing.T, k *talker) *rping {
	r := &rping{talker: k}
	var err error
	r.mem, err = unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	r.text, err = k.pd.RegRemoteMR(r.mem[:rpingText], qp.AccessLocalWrite|qp.AccessRemoteWrite|qp.AccessRemoteRead)
	require.NoError(t, err)
	t.Cleanup(func() {
		k.kill()
		require.NoError(t, r.text.Close())
		require.NoError(t, unix.Munmap(r.mem))
	})
	return r
}

// info sends where the text is.
func (r *rping) info() {
	b := binary.BigEndian.AppendUint64(nil, r.text.Addr())
	b = binary.BigEndian.AppendUint32(b, r.text.RKey())
	r.send1(binary.BigEndian.AppendUint32(b, rpingText))
}

// await waits for such a message, and returns a request to read or write there.
func (r *rping) await(op qp.WROp) qp.SendWR {
	r.t.Helper()
	r.until(func() bool { return len(r.got) > r.taken })
	b := r.got[r.taken]
	r.taken++
	require.Len(r.t, b, infoLen)
	n := binary.BigEndian.Uint32(b[12:])
	require.LessOrEqual(r.t, n, uint32(rpingText))
	return qp.SendWR{Op: op, RemoteAddr: binary.BigEndian.Uint64(b), RKey: binary.BigEndian.Uint32(b[8:]),
		SGL: []qp.SGE{{Data: r.mem[:n], LKey: r.text.LKey()}}}
}

// serve is the server's side of some rounds.
func (r *rping) serve(rounds int) {
	for range rounds {
		r.post(r.await(qp.WRRDMARead))
		r.info()
		r.post(r.await(qp.WRRDMAWrite))
		r.info()
	}
}

// ping is the client's. The text ends with a zero: the program writes no more than
// what is before one.
func (r *rping) ping(rounds int) {
	text := r.mem[:rpingText]
	for round := range rounds {
		want := fmt.Appendf(nil, "rdma-ping-%d: ", round)
		for len(want) < rpingText-1 {
			want = append(want, byte('A'+(round+len(want))%58))
		}
		want = append(want, 0)
		copy(text, want)
		r.info()
		r.await(0)
		clear(text)
		r.info()
		r.await(0)
		require.Equal(r.t, string(want), string(text), "round %d", round)
	}
}

// Both sides run here, on two connections that differ in who dials.
func TestRping(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		if on.fake != nil {
			return // it moves messages only
		}
		for name, serverDials := range map[string]bool{"the client dials": false, "the server dials": true} {
			for _, crc := range []bool{false, true} {
				if crc && on.Name() == "device" {
					continue // there it is the device's choice
				}
				t.Run(fmt.Sprintf("%s/CRC %v", name, crc), func(t *testing.T) {
					param := rpingParam
					param.CRC = crc
					client, server := rpingPair(t, on, param, nil)
					if serverDials {
						client, server = server, client
					}
					playRping(client, server, rpingRounds)
				})
			}
		}
	})
}

// playRping plays both sides.
func playRping(client, server *rping, rounds int) {
	done := make(chan struct{})
	go func() { defer close(done); server.serve(rounds) }()
	client.ping(rounds)
	<-done
}

// rpingPair makes a connection, by way of what via returns for the listener's
// address if there is one.
func rpingPair(t *testing.T, on target, param cm.ConnParam, via func(netip.AddrPort) netip.AddrPort) (active, passive *rping) {
	ch := newChannel(t, on)
	l := listen(t, ch, on)
	to := l.LocalAddr()
	if via != nil {
		to = via(to)
	}
	active = newRping(t, resolved(t, ch, to))
	require.NoError(t, active.id.Connect(param))
	child := wait(t, l, cm.EventConnectRequest).ID
	destroyLater(t, child)
	passive = newRping(t, child)
	require.NoError(t, child.Accept(param))
	wait(t, child, cm.EventEstablished)
	wait(t, active.id, cm.EventEstablished)
	return active, passive
}

func rpingArgs(listener netip.AddrPort, more ...string) []string {
	return append(more, "-a", listener.Addr().String(), "-p", port(listener), "-C", strconv.Itoa(rpingRounds), "-S", strconv.Itoa(rpingText), "-V")
}

func TestInteropDialRping(t *testing.T) {
	onEveryCounterpart(t, func(t *testing.T, c counterpart) {
		if c.Name() == "device" && !long {
			t.Skip("TestRping has the device at both ends already: set RDMANET_LONG=1")
		}
		addr := c.free(t)
		wait := start(t, "rping", rpingArgs(addr, "-s")...)
		r := rpingOn(t, c.dial(t, 256, addr, c.with(rpingParam)))
		r.ping(rpingRounds)
		require.NoError(t, r.id.Disconnect())
		r.disconnected()
		wait()
	})
}

func TestInteropAcceptRping(t *testing.T) {
	onEveryCounterpart(t, func(t *testing.T, c counterpart) {
		if c.Name() == "device" && !long {
			t.Skip("TestRping has the device at both ends already: set RDMANET_LONG=1")
		}
		k, wait := c.accept(t, 256, c.with(rpingParam), func(listener netip.AddrPort) func() {
			return start(t, "rping", rpingArgs(listener, "-c")...)
		})
		rpingOn(t, k).serve(rpingRounds)
		k.disconnected()
		wait()
	})
}
