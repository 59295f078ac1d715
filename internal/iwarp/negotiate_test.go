package iwarp

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestReadDepthsAreNegotiated(t *testing.T) {
	const open = wire.DepthUnspecified
	for _, c := range []struct {
		name             string
		ours             verbs.ConnParam
		ird, ord         uint16 // the peer's
		weReply          [2]uint16
		dialORD, replied int // our ORD as dialer, as acceptor
	}{
		{"streams", verbs.ConnParam{}, 0, 0, [2]uint16{0, 0}, 0, 0},
		{"alike", depths(4), 4, 4, [2]uint16{4, 4}, 4, 4},
		{"a peer that takes fewer", depths(4), 1, 1, [2]uint16{4, 1}, 1, 1},
		{"a peer that takes more", depths(4), 16, 4, [2]uint16{4, 4}, 4, 4},
		{"a peer that takes none", depths(4), 0, 0, [2]uint16{4, 0}, 0, 0},
		{"a peer that leaves it to others", depths(4), open, open, [2]uint16{4, 4}, 4, 4},
		{"a peer that wants more than it gets", verbs.ConnParam{ResponderResources: 2}, 16, 16, [2]uint16{2, 0}, -1, 0},
	} {
		f := wire.SetupFrame{Revision: 2, Enhanced: true, IRD: c.ird, ORD: c.ord}
		t.Run(c.name+"/the peer dials", func(t *testing.T) {
			e, p := connectPeerWith(t, false, 100, f, c.ours)
			require.Equal(t, c.weReply, [2]uint16{p.setup.IRD, p.setup.ORD})
			reads := &e.qp.(*qp).tx.reads
			require.Equal(t, [2]int{int(c.ours.ResponderResources), c.replied}, [2]int{reads.ird, reads.ord})
		})
		if c.dialORD < 0 {
			continue
		}
		t.Run(c.name+"/we dial", func(t *testing.T) {
			e, p := connectPeerWith(t, true, 100, f, c.ours)
			require.Equal(t, [2]uint16{uint16(c.ours.ResponderResources), uint16(c.ours.InitiatorDepth)}, [2]uint16{p.setup.IRD, p.setup.ORD})
			reads := &e.qp.(*qp).tx.reads
			require.Equal(t, [2]int{int(c.ours.ResponderResources), c.dialORD}, [2]int{reads.ird, reads.ord})
		})
	}
	t.Run("revision 1", func(t *testing.T) { // agreed elsewhere
		for _, weDial := range roles {
			ours := depths(3)
			ours.MPARevision = 1
			e, _ := connectPeerWith(t, weDial, 100, wire.SetupFrame{Revision: 1}, ours)
			require.Equal(t, [2]int{3, 3}, [2]int{e.qp.(*qp).tx.reads.ird, e.qp.(*qp).tx.reads.ord})
		}
	})
}

// RFC 6581 section 8: insufficient IRD.
func TestAReplyWithMoreORDThanOurIRDIsAnsweredWithTerminate(t *testing.T) {
	leaksNoDescriptor(t)
	for _, crc := range []bool{false, true} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ch := newChannel(t)
		e := resolved(t, ch, ln.Addr().(*net.TCPAddr).AddrPort())
		e.createQP(100)
		require.NoError(t, e.id.Connect(verbs.ConnParam{ResponderResources: 2, CRC: crc}))
		c, err := ln.Accept()
		require.NoError(t, err)
		ln.Close()
		p := newPeer(t, c.(*net.TCPConn))
		p.crc = crc
		p.readSetup(false)
		p.writeSetup(wire.SetupFrame{Reply: true, Revision: 2, Enhanced: true, ORD: 3})
		ev := next(t, ch, verbs.EventConnectError)
		require.ErrorContains(t, ev.Err, "the peer's ORD is 3, our IRD 2")
		sent := p.rest()
		require.Len(t, sent, 1)
		tm, err := wire.ParseTerminate(sent[0].payload)
		require.NoError(t, err)
		require.Equal(t, wire.Terminate{Code: wire.CodeMPAInsufficientIRD}, tm)
		e.settles()
		nothingMore(t, ch)
	}
}

// RFC 6581 section 9.2: the dialer's first message makes the connection.
func TestAPeerToPeerRequestIsAnswered(t *testing.T) {
	write, read, send := wire.SetupFrame{RTRWrite: true}, wire.SetupFrame{RTRRead: true}, wire.SetupFrame{RTRSend: true}
	all := wire.SetupFrame{RTRWrite: true, RTRRead: true, RTRSend: true}
	zeroWrite, zeroRead := tagged(wire.OpWrite, 0, 0, true, nil), readRequest(1, wire.ReadRequest{})
	for _, c := range []struct {
		name   string
		offers wire.SetupFrame
		ird    uint8
		chosen wire.SetupFrame
		first  fpdu
	}{
		{"write", write, 0, write, zeroWrite},
		{"read", read, 1, read, zeroRead},
		{"read where IRD is 0", read, 0, write, zeroWrite},
		{"send", send, 1, write, zeroWrite},
		{"nothing", wire.SetupFrame{}, 1, write, zeroWrite},
		{"all", all, 1, write, zeroWrite},
		{"data of its own first", write, 0, write, fpdu{sendHeader(1, 0, true), []byte("first")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := c.offers
			f.Revision, f.Enhanced, f.PeerToPeer, f.ORD = 2, true, true, 1
			e, p := connectPeerWith(t, false, 5000, f, verbs.ConnParam{ResponderResources: c.ird})
			got := p.setup
			require.Equal(t, []bool{true, c.chosen.RTRWrite, c.chosen.RTRRead, false}, []bool{got.PeerToPeer, got.RTRWrite, got.RTRRead, got.RTRSend})

			// Until then nothing of ours is sent.
			large := bytes5000("large")
			require.NoError(t, e.send(verbs.SendWR{WRID: 1, Inline: true, SGL: []verbs.SGE{{Data: []byte("small")}}}))
			require.NoError(t, e.send(verbs.SendWR{WRID: 2, Inline: true, SGL: []verbs.SGE{{Data: large}}}))
			clear(large)
			require.Zero(t, e.poll())
			require.Zero(t, e.sends)
			p.writeFPDU(c.first)
			eventually(t, "both sent", func() bool { e.poll(); return e.sends == 2 })
			require.NoError(t, e.id.Disconnect())
			sent := p.rest()
			if c.first.Opcode == wire.OpReadRequest {
				i := 0
				for sent[i].Opcode != wire.OpReadResponse {
					i++
				}
				require.Empty(t, sent[i].payload)
				sent = append(sent[:i:i], sent[i+1:]...)
			}
			require.Equal(t, "small", string(sent[0].payload))
			text := ""
			for _, f := range sent[1:] {
				text += string(f.payload)
			}
			require.Equal(t, string(bytes5000("large")), text)
			e.settles()
		})
	}
	t.Run("no request", func(t *testing.T) {
		_, p := connectPeerWith(t, false, 100, wire.SetupFrame{Revision: 2, Enhanced: true, RTRWrite: true}, verbs.ConnParam{})
		require.False(t, p.setup.PeerToPeer || p.setup.RTRWrite)
	})
}

func bytes5000(s string) (b []byte) {
	for len(b) < 5000 {
		b = append(b, s...)
	}
	return b
}

// RFC 5044 section 7.1: there are at most 512 bytes. A frame with more is not
// answered, not by a Terminate either: only a connection can be terminated.
func TestPrivateDataHasLimits(t *testing.T) {
	for _, n := range []int{0, 512, 513} {
		f := wire.SetupFrame{Revision: 1, PrivateData: randomBytes(min(n, 512))}
		frame := func(reply bool) []byte {
			f.Reply = reply
			b := setupBytes(t, f)
			b[lengthAt], b[lengthAt+1] = byte(n>>8), byte(n)
			return append(b, make([]byte, n-len(f.PrivateData))...)
		}
		t.Run(fmt.Sprint("request/", n), func(t *testing.T) {
			leaksNoDescriptor(t)
			ch := newChannel(t)
			p := dialPeer(t, listenOn(t, ch, "127.0.0.1:0", 1).LocalAddr())
			p.write(frame(false))
			if n > 512 {
				_, err := p.Read(make([]byte, 1))
				require.Error(t, err)
				require.False(t, isTimeout(err))
				nothingMore(t, ch)
				return
			}
			ev := next(t, ch, verbs.EventConnectRequest)
			require.Len(t, ev.PrivateData, n)
			require.Equal(t, string(f.PrivateData), string(ev.PrivateData))
			e := accept(t, ch, ev, 100, verbs.ConnParam{})
			next(t, ch, verbs.EventEstablished)
			require.False(t, p.readSetup(true).Reject)
			alive(e, p)
		})
		t.Run(fmt.Sprint("reply/", n), func(t *testing.T) {
			leaksNoDescriptor(t)
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer ln.Close()
			ch := newChannel(t)
			e := resolved(t, ch, ln.Addr().(*net.TCPAddr).AddrPort())
			e.createQP(100)
			require.NoError(t, e.id.Connect(verbs.ConnParam{MPARevision: 1}))
			c, err := ln.Accept()
			require.NoError(t, err)
			p := newPeer(t, c.(*net.TCPConn))
			p.readSetup(false)
			p.write(frame(true))
			if n > 512 {
				require.ErrorContains(t, next(t, ch, verbs.EventConnectError).Err, "private data length is 513")
				_, err := p.Read(make([]byte, 1))
				require.Error(t, err)
				require.False(t, isTimeout(err))
				e.settles()
				return
			}
			require.Equal(t, string(f.PrivateData), string(next(t, ch, verbs.EventEstablished).PrivateData))
			alive(e, p)
		})
	}
}

// alive fails the test unless a message gets through.
func alive(e *end, p *peer) {
	p.writeFPDU(fpdu{sendHeader(1, 0, true), []byte("alive")})
	eventually(e.t, "the message", func() bool { e.poll(); return len(e.got) == 1 })
	require.Equal(e.t, "alive", string(e.got[0]))
}
