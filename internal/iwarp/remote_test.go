package iwarp

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

const (
	localOnly   = verbs.AccessLocalWrite
	remoteWrite = verbs.AccessLocalWrite | verbs.AccessRemoteWrite
	remoteRead  = verbs.AccessRemoteRead
	remoteBoth  = remoteWrite | remoteRead
)

// granted is an end with memory that its peer may access, in many ways or none.
type granted struct {
	*end
	mem     map[string][]byte
	regions map[string]verbs.MR
}

const grantedSize = 1000

func grant(e *end) *granted {
	g := &granted{end: e, mem: map[string][]byte{}, regions: map[string]verbs.MR{}}
	other, err := device{}.AllocPD()
	require.NoError(e.t, err)
	for _, r := range []struct {
		name   string
		pd     verbs.PD
		access verbs.Access
	}{
		{"both", e.pd, remoteBoth},
		{"write", e.pd, remoteWrite},
		{"read", e.pd, remoteRead},
		{"local", e.pd, localOnly},
		{"another PD's", other, remoteBoth},
		{"expired", e.pd, remoteBoth},
	} {
		g.mem[r.name] = randomBytes(grantedSize)
		g.regions[r.name] = regMR(e.t, r.pd, g.mem[r.name], r.access)
	}
	gone := g.regions["expired"]
	require.NoError(e.t, gone.Dereg())
	for reused := false; !reused; { // by memory that the peer may access
		m := regMR(e.t, e.pd, randomBytes(grantedSize), remoteBoth)
		reused = m.RKey()>>8 == gone.RKey()>>8
		require.NotEqual(e.t, gone.RKey(), m.RKey())
	}
	return g
}

// untouched fails the test if any memory has changed.
func (g *granted) untouched() {
	for name, mem := range g.mem {
		require.True(g.t, bytes.Equal(randomBytes(grantedSize), mem), name)
	}
}

// at is the tagged offset of a byte of a region.
func (g *granted) at(region string, off int) uint64 {
	return addressOf(g.mem[region]) + uint64(int64(off))
}

// terminated fails the test unless the connection ends, with all accounts
// balanced, in the Terminate that quotes the segment and no more than it may.
func terminated(e *end, p *peer, code wire.Code, at fpdu, before int) {
	t := e.t
	t.Helper()
	e.settles()
	ev := next(t, e.ch, verbs.EventDisconnected)
	te, ok := errors.AsType[*wire.TerminateError](ev.Err)
	require.True(t, ok, "%v", ev.Err)
	require.False(t, te.Remote)
	require.Equal(t, code, te.Code)
	require.NoError(t, p.CloseWrite())
	sent := p.rest()
	require.Len(t, sent, before+1)
	tm, err := wire.ParseTerminate(sent[before].payload)
	require.NoError(t, err)
	require.Equal(t, code, tm.Code)
	if code == wire.CodeRDMAPOpcode {
		require.Nil(t, tm.DDPHeader)
	} else {
		header := make([]byte, at.Len())
		at.Put(header)
		require.Equal(t, header, tm.DDPHeader)
		require.True(t, tm.SegmentLenValid)
		require.EqualValues(t, at.Len()+len(at.payload), tm.SegmentLen)
	}
	if tm.DDPHeader != nil && at.Opcode == wire.OpReadRequest && code.Layer() == wire.LayerRDMAP && len(at.payload) == wire.ReadRequestLen {
		require.Equal(t, at.payload, tm.RDMAPHeader, "RFC 5040 section 4.8")
	} else {
		require.Nil(t, tm.RDMAPHeader)
	}
	nothingMore(t, e.ch)
}

// withPeers runs a test in both roles, without and with CRC.
func withPeers(t *testing.T, name string, param verbs.ConnParam, test func(t *testing.T, e *end, p *peer)) {
	for role, weDial := range roles {
		for _, crc := range []bool{false, true} {
			full := name + "/" + role
			if crc {
				full += "/CRC"
			}
			t.Run(full, func(t *testing.T) {
				f := wire.SetupFrame{Revision: 2, Enhanced: true, CRC: crc, IRD: uint16(param.InitiatorDepth), ORD: uint16(param.ResponderResources)}
				e, p := connectPeerWith(t, weDial, 500, f, param)
				test(t, e, p)
			})
		}
	}
}

func (p *peer) writeFPDU(f fpdu) { p.write(makeFPDU(p.crc, f.Header, f.payload)) }

// Validation of an STag: RFC 5041 section 7.1 for what DDP finds out, RFC 5040
// sections 4.8 and 7.2 for the rest.
func TestAccessThatWasNotGrantedIsAnsweredWithTerminate(t *testing.T) {
	const size = 100
	for _, c := range []struct {
		name        string
		region      string
		key         uint32 // is added to the STag
		off         int    // in the region
		write, read wire.Code
	}{
		{"no such STag", "both", 1 << 20, 0, wire.CodeDDPInvalidSTag, wire.CodeRDMAPInvalidSTag},
		{"wrong key", "both", 1, 0, wire.CodeDDPInvalidSTag, wire.CodeRDMAPInvalidSTag},
		{"expired STag", "expired", 0, 0, wire.CodeDDPInvalidSTag, wire.CodeRDMAPInvalidSTag},
		{"STag of another PD", "another PD's", 0, 0, wire.CodeDDPSTagNotAssociated, wire.CodeRDMAPSTagNotAssociated},
		{"local access only", "local", 0, 0, wire.CodeRDMAPAccess, wire.CodeRDMAPAccess},
		{"write access only", "write", 0, 0, 0, wire.CodeRDMAPAccess},
		{"read access only", "read", 0, 0, wire.CodeRDMAPAccess, 0},
		{"before the region", "both", 0, -1, wire.CodeDDPBaseBounds, wire.CodeRDMAPBaseBounds},
		{"over its end", "both", 0, grantedSize - size + 1, wire.CodeDDPBaseBounds, wire.CodeRDMAPBaseBounds},
		{"behind its end", "both", 0, grantedSize, wire.CodeDDPBaseBounds, wire.CodeRDMAPBaseBounds},
		{"far behind its end", "both", 0, 1 << 40, wire.CodeDDPBaseBounds, wire.CodeRDMAPBaseBounds},
		{"an offset that wraps", "both", 0, 0, wire.CodeDDPTOWrap, wire.CodeRDMAPTOWrap},
	} {
		param := verbs.ConnParam{ResponderResources: 2}
		if c.write != 0 {
			withPeers(t, "WRITE/"+c.name, param, func(t *testing.T, e *end, p *peer) {
				g := grant(e)
				to := g.at(c.region, c.off)
				if c.write == wire.CodeDDPTOWrap {
					to = ^uint64(0) - size/2
				}
				f := tagged(wire.OpWrite, g.regions[c.region].RKey()+c.key, to, true, make([]byte, size))
				p.writeFPDU(f)
				terminated(e, p, c.write, f, 0)
				g.untouched()
			})
		}
		if c.read != 0 {
			withPeers(t, "READ/"+c.name, param, func(t *testing.T, e *end, p *peer) {
				g := grant(e)
				to := g.at(c.region, c.off)
				if c.read == wire.CodeRDMAPTOWrap {
					to = ^uint64(0) - size/2
				}
				f := readRequest(1, wire.ReadRequest{SinkSTag: 1, SinkTO: 2, Size: size, SourceSTag: g.regions[c.region].RKey() + c.key, SourceTO: to})
				p.writeFPDU(f)
				terminated(e, p, c.read, f, 0)
				g.untouched()
			})
		}
	}
}

// The queue of Read Requests, RFC 5041 section 7.1 and RFC 5040 section 4.4.
func TestAMalformedReadRequestIsAnsweredWithTerminate(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(f *fpdu)
		code   wire.Code
	}{
		{"message 0", func(f *fpdu) { f.MSN = 0 }, wire.CodeDDPMSNRange},
		{"message 2 before 1", func(f *fpdu) { f.MSN = 2 }, wire.CodeDDPMSNRange},
		{"offset 1", func(f *fpdu) { f.MO = 1 }, wire.CodeDDPInvalidMO},
		{"a byte too long", func(f *fpdu) { f.payload = append(f.payload, 0) }, wire.CodeDDPTooLong},
		{"two segments", func(f *fpdu) { f.Last = false }, wire.CodeDDPTooLong},
		{"a byte too short", func(f *fpdu) { f.payload = f.payload[1:] }, wire.CodeRDMAPUnspecified},
		{"empty", func(f *fpdu) { f.payload = nil }, wire.CodeRDMAPUnspecified},
		{"on queue 2", func(f *fpdu) { f.QN = 2 }, wire.CodeRDMAPOpcode},
	} {
		withPeers(t, c.name, verbs.ConnParam{ResponderResources: 1}, func(t *testing.T, e *end, p *peer) {
			g := grant(e)
			f := readRequest(1, wire.ReadRequest{Size: 10, SourceSTag: g.regions["both"].RKey(), SourceTO: g.at("both", 0)})
			c.change(&f)
			p.writeFPDU(f)
			terminated(e, p, c.code, f, 0)
			g.untouched()
		})
	}
	withPeers(t, "the same again", verbs.ConnParam{ResponderResources: 2}, func(t *testing.T, e *end, p *peer) {
		f := readRequest(1, wire.ReadRequest{})
		p.writeFPDU(f)
		p.writeFPDU(f)
		terminated(e, p, wire.CodeDDPMSNRange, f, 1)
	})
}

// The one who asked checks what comes: RFC 5041 section 7.1, and for lengths what
// siw answers.
func TestAReadResponseThatDoesNotMatchIsAnsweredWithTerminate(t *testing.T) {
	const size = 300
	type responses func(stag uint32, to uint64) []fpdu
	one := func(stag uint32, to uint64, last bool, n int) fpdu {
		return tagged(wire.OpReadResponse, stag, to, last, bytes.Repeat([]byte{1}, n))
	}
	for _, c := range []struct {
		name   string
		what   responses // the last is at fault
		code   wire.Code
		placed int
	}{
		{"another STag", func(s uint32, to uint64) []fpdu { return []fpdu{one(s+1, to, true, size)} }, wire.CodeDDPInvalidSTag, 0},
		{"another offset", func(s uint32, to uint64) []fpdu { return []fpdu{one(s, to+1, true, size)} }, wire.CodeDDPBaseBounds, 0},
		{"too long", func(s uint32, to uint64) []fpdu { return []fpdu{one(s, to, true, size+1)} }, wire.CodeDDPBaseBounds, 0},
		{"too short", func(s uint32, to uint64) []fpdu { return []fpdu{one(s, to, true, size-1)} }, wire.CodeDDPBaseBounds, 0},
		{"empty", func(s uint32, to uint64) []fpdu { return []fpdu{one(s, to, true, 0)} }, wire.CodeDDPBaseBounds, 0},
		{"too long by its second segment", func(s uint32, to uint64) []fpdu {
			return []fpdu{one(s, to, false, size), one(s, to+size, true, 1)}
		}, wire.CodeDDPBaseBounds, size},
		{"a segment again", func(s uint32, to uint64) []fpdu {
			return []fpdu{one(s, to, false, 100), one(s, to, true, 200)}
		}, wire.CodeDDPBaseBounds, 100},
		{"a hole", func(s uint32, to uint64) []fpdu {
			return []fpdu{one(s, to, false, 100), one(s, to+101, true, 199)}
		}, wire.CodeDDPBaseBounds, 100},
		{"one too many", func(s uint32, to uint64) []fpdu {
			return []fpdu{one(s, to, true, size), one(s, to, true, size)}
		}, wire.CodeDDPInvalidSTag, size},
		{"an empty one too many", func(s uint32, to uint64) []fpdu {
			return []fpdu{one(s, to, true, size), one(s, to, true, 0)}
		}, wire.CodeRDMAPOpcode, size},
		{"an RDMA Write to the same place", func(s uint32, to uint64) []fpdu {
			return []fpdu{tagged(wire.OpWrite, s, to, true, make([]byte, size))}
		}, wire.CodeRDMAPAccess, 0},
	} {
		withPeers(t, c.name, verbs.ConnParam{InitiatorDepth: 1}, func(t *testing.T, e *end, p *peer) {
			sink := e.buf(testDepth)[:size]
			require.NoError(t, e.send(verbs.SendWR{Op: verbs.WRRDMARead, SGL: []verbs.SGE{{Data: sink, LKey: e.mr.LKey()}}, RKey: 5, RemoteAddr: 6}))
			all := c.what(e.mr.LKey(), addressOf(sink))
			for _, f := range all {
				p.writeFPDU(f)
			}
			terminated(e, p, c.code, all[len(all)-1], 1)
			require.Equal(t, append(bytes.Repeat([]byte{1}, c.placed), make([]byte, 500-c.placed)...), e.buf(testDepth))
		})
	}
}

// An answer that overtakes its request is none.
func TestAReadResponseBeforeTheRequestIsOutIsAFault(t *testing.T) {
	ch := newChannel(t)
	l := newTape()
	l.room = 10 // a part of the request
	q, c := onTapeWith(t, ch, l, 1460, agreed{ord: 1}, verbs.QPCap{SendWR: 1, RecvWR: 1, SendSGE: 1})
	mem := make([]byte, 8)
	m := regMR(t, q.pd, mem, localOnly)
	_, err := q.PostSend([]verbs.SendWR{{Op: verbs.WRRDMARead, SGL: []verbs.SGE{{Data: mem, LKey: m.LKey()}}}})
	require.NoError(t, err)
	f := tagged(wire.OpReadResponse, m.LKey(), addressOf(mem), true, []byte("forged!!"))
	l.in = makeFPDU(false, f.Header, f.payload)
	var wc [4]verbs.WC
	n, err := c.Poll(wc[:])
	require.NoError(t, err)
	require.Equal(t, []verbs.WC{{Op: verbs.OpSend, Status: verbs.StatusWRFlushErr}}, wc[:n])
	require.Equal(t, make([]byte, 8), mem)
	require.ErrorContains(t, next(t, ch, verbs.EventDisconnected).Err, wire.CodeDDPInvalidSTag.String())
}

// RFC 5041 section 7.1: no buffer is left on queue 1. The answers before fill the
// socket, so the peer can't be told.
func TestMoreReadRequestsThanIRDEndTheConnection(t *testing.T) {
	ch := newChannel(t)
	l := newTape()
	l.room = 0
	q, c := onTapeWith(t, ch, l, 536, agreed{ird: 3}, verbs.QPCap{SendWR: 1, RecvWR: 1, SendSGE: 1})
	m := newTapeMemory()
	defer m.register(t, q)()
	request := func(msn uint32) {
		f := readRequest(msn, wire.ReadRequest{Size: 4000, SourceSTag: tapeReadable, SourceTO: readableAt})
		l.in = appendFPDU(l.in, false, f.Header, f.payload)
	}
	for msn := range uint32(3) {
		request(msn + 1)
	}
	c.Poll(make([]verbs.WC, 1))
	require.True(t, q.open.Load())
	request(4)
	c.Poll(make([]verbs.WC, 1))
	require.False(t, q.open.Load())
	require.ErrorContains(t, next(t, ch, verbs.EventDisconnected).Err, wire.CodeDDPNoBuffer.String())
	require.Empty(t, l.out)
}

// Placement is an all or nothing of each segment, and the CRC comes first.
func TestASegmentWithABadCRCWritesNothing(t *testing.T) {
	e, p := connectPeer(t, false, 500, true)
	g := grant(e)
	for at := range 5 {
		f := tagged(wire.OpWrite, g.regions["both"].RKey(), g.at("both", 0), true, make([]byte, grantedSize))
		b := makeFPDU(true, f.Header, f.payload)
		if at == 4 {
			b[len(b)-1] ^= 1
			p.write(b)
			break
		}
		f.payload = bytes.Clone(g.mem["both"]) // no change
		p.writeFPDU(f)
	}
	e.settles()
	require.ErrorContains(t, next(t, e.ch, verbs.EventDisconnected).Err, wire.CodeMPACRC.String())
	g.untouched()
}
