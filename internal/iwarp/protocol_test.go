package iwarp

import (
	"bytes"
	"errors"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// fault is a stream of a peer that breaks the protocol.
type fault struct {
	name   string
	stream []byte
	code   wire.Code
	header bool   // the Terminate quotes the segment at fault
	got    int    // messages that arrive before it
	placed string // what else may be in the receive after those
}

// patch returns an FPDU with bytes of its ULPDU changed, and a CRC to match.
func patch(crc bool, h wire.Header, payload []byte, at int, v ...byte) []byte {
	b := makeFPDU(crc, h, payload)
	copy(b[wire.FPDUHeaderLen+at:], v)
	ulpdu := wire.FPDUHeader(b)
	end := wire.FPDUHeaderLen + ulpdu
	wire.PutTrailer(b[end:], ulpdu, crc, wire.UpdateCRC(0, b[:end]))
	return b
}

// short returns an FPDU whose ULPDU is b.
func short(crc bool, ulpdu []byte) []byte {
	b := make([]byte, wire.FPDUHeaderLen)
	wire.PutFPDUHeader(b, len(ulpdu))
	b = append(b, ulpdu...)
	var trailer [wire.MaxTrailerLen]byte
	n := wire.PutTrailer(trailer[:], len(ulpdu), crc, wire.UpdateCRC(0, b))
	return append(b, trailer[:n]...)
}

// block is the size of each receive in these tests.
const faultBlock = 3000

func faults(crc bool) []fault {
	x := []byte("xyz")
	header := func(h wire.Header) []byte {
		b := make([]byte, h.Len())
		h.Put(b)
		return b
	}
	of := func(op wire.Opcode, qn uint32) wire.Header {
		return wire.Header{Tagged: op.Tagged(), Last: true, Opcode: op, QN: qn, MSN: 1}
	}
	cat := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	good := makeFPDU(crc, sendHeader(1, 0, true), []byte("good"))
	first := makeFPDU(crc, sendHeader(1, 0, false), x)
	full := makeFPDU(crc, sendHeader(1, 0, false), make([]byte, faultBlock))
	var posted []byte
	for i := range testDepth {
		posted = appendFPDU(posted, crc, sendHeader(uint32(i+1), 0, true), x)
	}
	all := []fault{
		{"DDP version 0", patch(crc, sendHeader(1, 0, true), x, 0, 0x40), wire.CodeDDPUntaggedVersion, false, 0, ""},
		{"DDP version 0, tagged", patch(crc, of(wire.OpWrite, 0), x, 0, 0xc0), wire.CodeDDPTaggedVersion, false, 0, ""},
		{"RDMAP version 0", patch(crc, sendHeader(1, 0, true), x, 1, 0x03), wire.CodeRDMAPVersion, false, 0, ""},
		{"unknown opcode", patch(crc, sendHeader(1, 0, true), x, 1, 0x4f), wire.CodeRDMAPOpcode, false, 0, ""},
		{"queue 3", makeFPDU(crc, wire.Header{Last: true, Opcode: wire.OpSend, QN: 3, MSN: 1}, x), wire.CodeDDPInvalidQN, true, 0, ""},
		{"Send on queue 1", makeFPDU(crc, wire.Header{Last: true, Opcode: wire.OpSend, QN: 1, MSN: 1}, x), wire.CodeRDMAPOpcode, false, 0, ""},
		{"message 0", makeFPDU(crc, sendHeader(0, 0, true), x), wire.CodeDDPMSNRange, true, 0, ""},
		{"message 2 before 1", makeFPDU(crc, sendHeader(2, 0, true), x), wire.CodeDDPMSNRange, true, 0, ""},
		{"message 1 again", cat(good, good), wire.CodeDDPMSNRange, true, 1, ""},
		{"another message before the end of one", cat(first, makeFPDU(crc, sendHeader(2, 0, true), x)), wire.CodeDDPMSNRange, true, 0, "xyz"},
		{"offset 1", makeFPDU(crc, sendHeader(1, 1, true), x), wire.CodeDDPInvalidMO, true, 0, ""},
		{"a segment again", cat(first, first), wire.CodeDDPInvalidMO, true, 0, "xyz"},
		{"overlapping segments", cat(first, makeFPDU(crc, sendHeader(1, 2, true), x)), wire.CodeDDPInvalidMO, true, 0, "xyz"},
		{"a hole between segments", cat(first, makeFPDU(crc, sendHeader(1, 4, true), x)), wire.CodeDDPInvalidMO, true, 0, "xyz"},
		{"offset beyond 31 bits", makeFPDU(crc, sendHeader(1, 1<<31, true), x), wire.CodeDDPInvalidMO, true, 0, ""},
		{"ULPDU of 0 bytes", short(crc, nil), wire.CodeRDMAPUnspecified, false, 0, ""},
		{"ULPDU of 1 byte", short(crc, []byte{0x41}), wire.CodeRDMAPUnspecified, false, 0, ""},
		{"ULPDU shorter than its header", short(crc, header(sendHeader(1, 0, true))[:17]), wire.CodeRDMAPUnspecified, false, 0, ""},
		{"ULPDU shorter than its tagged header", short(crc, header(of(wire.OpWrite, 0))[:13]), wire.CodeRDMAPUnspecified, false, 0, ""},
		{"message longer than the receive", makeFPDU(crc, sendHeader(1, 0, true), make([]byte, faultBlock+1)), wire.CodeDDPTooLong, true, 0, ""},
		{"message longer by its second segment", cat(full, makeFPDU(crc, sendHeader(1, faultBlock, true), x)), wire.CodeDDPTooLong, true, 0, string(make([]byte, faultBlock))},
		{"no receive posted", cat(posted, makeFPDU(crc, sendHeader(testDepth+1, 0, true), x)), wire.CodeDDPNoBuffer, true, testDepth, ""},
		{"RDMA Write", makeFPDU(crc, of(wire.OpWrite, 0), x), wire.CodeDDPInvalidSTag, true, 0, ""},
		{"RDMA Read Response", makeFPDU(crc, of(wire.OpReadResponse, 0), x), wire.CodeDDPInvalidSTag, true, 0, ""},
		{"RDMA Read Response of no bytes", makeFPDU(crc, of(wire.OpReadResponse, 0), nil), wire.CodeRDMAPOpcode, false, 0, ""},
		{"RDMA Read Request where IRD is 0", makeFPDU(crc, of(wire.OpReadRequest, 1), make([]byte, wire.ReadRequestLen)), wire.CodeDDPNoBuffer, true, 0, ""},
		{"RDMA Read Request on queue 0", makeFPDU(crc, of(wire.OpReadRequest, 0), make([]byte, wire.ReadRequestLen)), wire.CodeRDMAPOpcode, false, 0, ""},
		{"untagged RDMA Write", patch(crc, sendHeader(1, 0, true), x, 1, 0x40), wire.CodeRDMAPOpcode, false, 0, ""},
		{"Send with Invalidate", makeFPDU(crc, of(wire.OpSendInvalidate, 0), x), wire.CodeRDMAPCannotInvalidate, true, 0, ""},
		{"Send with Solicited Event and Invalidate", makeFPDU(crc, of(wire.OpSendSolicitedInvalidate, 0), x), wire.CodeRDMAPCannotInvalidate, true, 0, ""},
		{"Terminate of two segments", makeFPDU(crc, wire.Header{Opcode: wire.OpTerminate, QN: wire.QueueTerminate, MSN: 1}, x), wire.CodeDDPTooLong, true, 0, ""},
		{"Terminate too long", makeFPDU(crc, of(wire.OpTerminate, wire.QueueTerminate), make([]byte, wire.MaxTerminateLen+1)), wire.CodeDDPTooLong, true, 0, ""},
	}
	if crc {
		big := makeFPDU(crc, sendHeader(1, 0, true), bytes.Repeat([]byte("b"), faultBlock))
		all = append(all,
			fault{"wrong payload", with(good, len(good)-6, 'x'), wire.CodeMPACRC, false, 0, "goxd"},
			fault{"wrong CRC", with(good, len(good)-1, good[len(good)-1]^1), wire.CodeMPACRC, false, 0, "good"},
			fault{"wrong reserved byte", with(good, 5, 1), wire.CodeMPACRC, false, 0, "good"},
			fault{"wrong pad", with(first, len(first)-5, 1), wire.CodeMPACRC, false, 0, "xyz"},
			fault{"wrong CRC of a long segment", with(big, len(big)-1, big[len(big)-1]^1), wire.CodeMPACRC, false, 0, string(bytes.Repeat([]byte("b"), faultBlock))},
			fault{"wrong CRC of a Terminate", with(terminate(crc, nil), 22, 1), wire.CodeMPACRC, false, 0, ""},
			// Corrupted on the way: what the header seems to say is not the peer's doing.
			fault{"corrupted DDP version", with(good, 2, good[2]^2), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted RDMAP version", with(good, 3, good[3]^0x80), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted opcode", with(good, 3, good[3]^0x08), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted queue number", with(good, 11, 7), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted MSN", with(good, 15, 9), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted offset", with(good, 19, 9), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted T bit", with(good, 2, good[2]^0x80), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted length, less than a header", with(good, 1, 3), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted length, a header only", with(good, 1, 18), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted header of a long segment", with(big, 15, 9), wire.CodeMPACRC, false, 0, ""},
			fault{"corrupted STag", with(makeFPDU(crc, of(wire.OpWrite, 0), x), 4, 9), wire.CodeMPACRC, false, 0, ""},
			fault{"zero CRC", makeFPDU(false, sendHeader(1, 0, true), x), wire.CodeMPACRC, false, 0, "xyz"},
		)
	}
	return all
}

// terminate is the Terminate FPDU with that payload; nil is a valid one.
func terminate(crc bool, payload []byte) []byte {
	if payload == nil {
		t := wire.NewTerminate(wire.CodeDDPNoBuffer, nil, 0)
		payload, _ = wire.AppendTerminate(nil, &t)
	}
	return makeFPDU(crc, wire.Header{Last: true, Opcode: wire.OpTerminate, QN: wire.QueueTerminate, MSN: 1}, payload)
}

func TestAFaultOfThePeerIsAnsweredWithTerminate(t *testing.T) {
	for _, crc := range []bool{false, true} {
		for role, weDial := range roles {
			for _, f := range faults(crc) {
				name := role + "/" + f.name
				if crc {
					name = "CRC/" + name
				}
				t.Run(name, func(t *testing.T) {
					const untouched = 0xaa
					e, p := connectPeer(t, weDial, faultBlock, crc)
					e.repost = false
					for i := range e.mem {
						e.mem[i] = untouched
					}
					require.NoError(t, e.send(verbs.SendWR{Inline: true, SGL: []verbs.SGE{{Data: []byte("before")}}}))
					p.write(f.stream)
					p.write([]byte("garbage that follows"))
					e.settles()

					ev := next(t, e.ch, verbs.EventDisconnected)
					te, ok := errors.AsType[*wire.TerminateError](ev.Err)
					require.True(t, ok, "%v", ev.Err)
					require.False(t, te.Remote)
					require.Equal(t, f.code, te.Code)
					pe, ok := errors.AsType[*wire.ProtocolError](ev.Err)
					require.True(t, ok, "%v", ev.Err)
					require.Equal(t, f.code, pe.Code)
					require.ErrorIs(t, ev.Err, syscall.EPROTO)

					require.NoError(t, p.CloseWrite())
					sent := p.rest()
					require.Len(t, sent, 2)
					require.Equal(t, "before", string(sent[0].payload))
					require.Equal(t, wire.TerminateHeader, wire.UntaggedHeader{Last: sent[1].Last, Opcode: sent[1].Opcode, QN: sent[1].QN, MSN: sent[1].MSN, MO: sent[1].MO})
					tm, err := wire.ParseTerminate(sent[1].payload)
					require.NoError(t, err)
					require.Equal(t, f.code, tm.Code)
					require.Equal(t, f.header, tm.DDPHeader != nil)
					require.Equal(t, f.header, tm.SegmentLenValid)

					require.Len(t, e.got, f.got)
					want := bytes.Repeat([]byte{untouched}, len(e.mem))
					for i, m := range e.got {
						copy(want[i*faultBlock:], m)
					}
					copy(want[f.got*faultBlock:], f.placed)
					require.True(t, bytes.Equal(want, e.mem), "memory that nothing legitimate was received into has changed")
					nothingMore(t, e.ch)
				})
			}
		}
	}
}

func TestATerminateFromThePeerEndsTheConnection(t *testing.T) {
	for _, crc := range []bool{false, true} {
		for _, c := range []struct {
			name    string
			payload []byte
			code    wire.Code
		}{
			{"valid", nil, wire.CodeDDPNoBuffer},
			{"empty", []byte{}, 0},
			{"cut short", []byte{0x12, 0x02}, 0},
			{"cut short behind its code", []byte{0x12, 0x02, 0xc0, 0}, wire.CodeDDPNoBuffer},
			{"garbage", bytes.Repeat([]byte{0xff}, wire.MaxTerminateLen), 0xffff},
		} {
			t.Run(c.name, func(t *testing.T) {
				e, p := connectPeer(t, true, 100, crc)
				p.write(makeFPDU(crc, sendHeader(1, 0, false), []byte("begun"))) // it may come inside a message
				if c.payload == nil {
					p.write(terminate(crc, nil))
				} else {
					p.write(terminate(crc, append([]byte{}, c.payload...)))
				}
				e.settles()
				ev := next(t, e.ch, verbs.EventDisconnected)
				te, ok := errors.AsType[*wire.TerminateError](ev.Err)
				require.True(t, ok, "%v", ev.Err)
				require.True(t, te.Remote)
				require.Equal(t, c.code, te.Code)
				require.ErrorIs(t, ev.Err, syscall.ECONNRESET)
				require.Empty(t, p.rest(), "a Terminate is not answered")
				nothingMore(t, e.ch)
			})
		}
	}
}

func TestTheEndOfAStreamIsInOrderOnlyBetweenMessages(t *testing.T) {
	for _, crc := range []bool{false, true} {
		small := makeFPDU(crc, sendHeader(1, 0, true), []byte("hello"))
		large := makeFPDU(crc, sendHeader(1, 0, true), make([]byte, faultBlock))
		part := makeFPDU(crc, sendHeader(1, 0, false), nil)
		unfinished := makeFPDU(crc, tagged(wire.OpWrite, 1, 2, false, nil).Header, nil)
		for _, c := range []struct {
			name    string
			stream  []byte
			got     int
			inOrder bool
		}{
			{"before anything", nil, 0, true},
			{"after a message", small, 1, true},
			{"in the length", small[:1], 0, false},
			{"after the length", small[:2], 0, false},
			{"in the header", small[:10], 0, false},
			{"after the header", small[:20], 0, false},
			{"in the payload", small[:22], 0, false},
			{"after the payload", small[:25], 0, false},
			{"in the trailer", small[:len(small)-1], 0, false},
			{"in a long payload", large[:2900], 0, false},
			{"in a long payload's trailer", large[:len(large)-1], 0, false},
			{"between segments", part, 0, false},
			{"between segments of an RDMA Write", unfinished, 0, false},
			{"in the next length", append(bytes.Clone(small), 0), 1, false},
		} {
			for _, reset := range []bool{false, true} {
				name := c.name
				if reset {
					name += ", by a reset"
				}
				t.Run(name, func(t *testing.T) {
					e, p := connectPeer(t, false, faultBlock, crc)
					p.write(c.stream)
					if reset { // which overtakes data that nobody has read
						r := &e.qp.(*qp).rx
						eventually(t, "all of it read", func() bool {
							e.poll()
							r.mu.Lock()
							defer r.mu.Unlock()
							return len(e.got) == c.got && (len(c.stream) == 0 || r.staging != nil)
						})
						require.NoError(t, p.SetLinger(0))
						require.NoError(t, p.Close())
					} else {
						require.NoError(t, p.CloseWrite())
					}
					ev := next(t, e.ch, verbs.EventDisconnected) // nobody polls
					if c.inOrder && !reset {
						require.NoError(t, ev.Err)
					} else {
						require.ErrorIs(t, ev.Err, syscall.ECONNRESET)
					}
					e.settles()
					require.Len(t, e.got, c.got)
					if !reset {
						require.Empty(t, p.rest())
					}
					nothingMore(t, e.ch)
				})
			}
		}
	}
}

// siw and adapters send one to see whether the peer is alive.
func TestAZeroLengthWriteIsIgnored(t *testing.T) {
	e, p := connectPeer(t, false, 100, true)
	write := makeFPDU(true, wire.Header{Tagged: true, Last: true, Opcode: wire.OpWrite, STag: 7, TO: 1 << 40}, nil)
	p.write(write)
	p.write(makeFPDU(true, sendHeader(1, 0, false), []byte("he")))
	p.write(write)
	p.write(makeFPDU(true, sendHeader(1, 2, true), []byte("llo")))
	p.write(write)
	require.NoError(t, p.CloseWrite())
	require.NoError(t, next(t, e.ch, verbs.EventDisconnected).Err)
	e.settles()
	require.Equal(t, [][]byte{[]byte("hello")}, e.got)
}

// endless segments of no bytes, as fast as they are read.
func TestAPeerCannotKeepTheReceiverBusyForEver(t *testing.T) {
	e, p := connectPeer(t, false, 100, false)
	flood := bytes.Repeat(makeFPDU(false, sendHeader(1, 0, false), nil), 4096)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if _, err := p.Write(flood); err != nil {
				return
			}
		}
	}()
	for range 100 {
		within(t, patience, "Poll", func() { e.poll() })
	}
	within(t, patience, "SetError", func() { require.NoError(t, e.qp.SetError()) })
	e.settles()
	<-done
	require.ErrorIs(t, next(t, e.ch, verbs.EventDisconnected).Err, syscall.ECONNABORTED)
}

func TestAResetThatASendSeesIsReported(t *testing.T) {
	e, p := connectPeer(t, false, 100, false)
	q := e.qp.(*qp)
	q.rx.mu.Lock() // so that nobody but the send sees it
	require.NoError(t, p.SetLinger(0))
	require.NoError(t, p.Close())
	id := uint64(0)
	eventually(t, "a send that fails", func() bool {
		require.NoError(t, e.send(verbs.SendWR{WRID: id, Inline: true, SGL: []verbs.SGE{{Data: []byte("x")}}}))
		id++
		q.tx.mu.Lock()
		defer q.tx.mu.Unlock()
		return q.tx.state == halfDead
	})
	q.rx.mu.Unlock()
	require.ErrorIs(t, next(t, e.ch, verbs.EventDisconnected).Err, syscall.ECONNRESET)
	e.settles()
}
