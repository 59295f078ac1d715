package iwarp

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestAskEvery(t *testing.T) {
	e, _ := connectPeer(t, true, 1000, false)
	l := e.qp.(*qp).link.(*tcpLink)
	for asked, want := range map[time.Duration]int{
		time.Millisecond:        1000,
		1500 * time.Millisecond: 1500,
		time.Hour:               120_000,
	} {
		l.askEvery(asked)
		got, err := unix.GetsockoptInt(l.fd, unix.IPPROTO_TCP, tcpRTOMax)
		if err != nil {
			t.Skipf("this kernel has no TCP_RTO_MAX_MS: %v", err)
		}
		require.Equal(t, want, got)
	}
}

// An iWARP device asks with an RDMA READ of no bytes whether its peer is there. The
// answer does not wait for a program that sleeps.
func TestReadIsAnsweredWhileNobodyPolls(t *testing.T) {
	for role, weDial := range roles {
		t.Run(role, func(t *testing.T) {
			leaksNoDescriptor(t)
			f := wire.SetupFrame{Revision: 2, Enhanced: true, ORD: 1}
			e, p := connectPeerWith(t, weDial, 1000, f, verbs.ConnParam{ResponderResources: 1})
			if weDial { // RFC 5044: the dialer is the first to send
				require.NoError(t, e.send(verbs.SendWR{Inline: true}))
				require.Equal(t, wire.OpSend, p.next().Opcode)
			}
			for msn := range uint32(3) {
				p.write(makeFPDU(false, sendHeader(msn+1, 0, true), []byte("before")))
				r := readRequest(msn+1, wire.ReadRequest{SinkSTag: 7, SinkTO: uint64(msn)})
				p.write(makeFPDU(false, r.Header, r.payload))
				got := p.next()
				for got.Opcode == wire.OpWrite { // a nudge
					got = p.next()
				}
				require.Equal(t, wire.Header{Tagged: true, Last: true, Opcode: wire.OpReadResponse, STag: 7, TO: uint64(msn)}, got.Header)
				require.Empty(t, got.payload)
			}
			eventually(t, "what came before", func() bool { e.poll(); return len(e.got) == 3 })
			p.CloseWrite()
			require.NoError(t, next(t, e.ch, verbs.EventDisconnected).Err)
		})
	}
}
