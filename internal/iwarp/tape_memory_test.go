package iwarp

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// Other regions are far from those that tests put in a place of their own.
func init() { regions.first, regions.used = 0, 1 }

// The memory that the peer on a tape may name, always by the same STags and
// offsets, so that a stream means the same each time.
const (
	tapeWritable = 0xfff000_11
	tapeReadable = 0xfff001_22
	tapeSink     = 0xfff002_33 // local access only
	tapeForeign  = 0xfff003_44 // of another domain

	writableAt = 0x1000
	readableAt = 0xffff_ffff_ffff_f000 // ends where offsets wrap
	sinkAt     = 0x3000
)

// tapeReads are the RDMA READs that are outstanding when a stream begins.
var tapeReads = []struct{ at, size int }{{0, 300}, {0, 0}, {400, 40}}

type tapeMemory struct {
	writable, readable, sink, foreign []byte

	next, done int // RDMA READs, and bytes of that which is next
}

func newTapeMemory() *tapeMemory {
	m := &tapeMemory{writable: make([]byte, 256), readable: make([]byte, 4096), sink: make([]byte, 500), foreign: make([]byte, 64)}
	for i := range m.readable {
		m.readable[i] = byte(i * 7)
	}
	return m
}

// register makes it the queue pair's, until the function that it returns is
// called.
func (m *tapeMemory) register(t testing.TB, q *qp) (undo func()) {
	const remote = verbs.AccessRemoteRead | verbs.AccessRemoteWrite
	all := []*mr{
		{pd: q.pd, mem: m.writable, base: writableAt, stag: tapeWritable, access: verbs.AccessLocalWrite | verbs.AccessRemoteWrite},
		{pd: q.pd, mem: m.readable, base: readableAt, stag: tapeReadable, access: verbs.AccessRemoteRead},
		{pd: q.pd, mem: m.sink, base: sinkAt, stag: tapeSink, access: verbs.AccessLocalWrite},
		{pd: &pd{}, mem: m.foreign, base: 0, stag: tapeForeign, access: verbs.AccessLocalWrite | remote},
	}
	for _, region := range all {
		place := region.stag >> 8
		c := regions.chunks[place/chunkSize].Load()
		if c == nil {
			c = newChunk()
			regions.chunks[place/chunkSize].Store(c)
		}
		require.True(t, c.mr[place%chunkSize].CompareAndSwap(nil, region))
	}
	return func() {
		for _, region := range all {
			require.True(t, regions.chunks[region.stag>>8/chunkSize].Load().mr[region.stag>>8%chunkSize].CompareAndSwap(region, nil))
		}
	}
}

// read posts the RDMA READs.
func (m *tapeMemory) read(t testing.TB, q *qp) {
	for i, r := range tapeReads {
		n, err := q.PostSend([]verbs.SendWR{{WRID: uint64(i), Op: verbs.WRRDMARead, Signaled: true, RemoteAddr: 7, RKey: 8,
			SGL: []verbs.SGE{{Data: m.sink[r.at : r.at+r.size], LKey: tapeSink}}}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
}

func (m *tapeMemory) othersIntact(t testing.TB) {
	require.Equal(t, newTapeMemory().readable, m.readable)
	require.Equal(t, newTapeMemory().foreign, m.foreign)
}

// find is the straightforward way to look a peer's buffer up. For a fault the
// codes are DDP's.
func (m *tapeMemory) find(stag uint32, to uint64, size int, write bool) ([]byte, wire.Code) {
	mem, base := m.writable, uint64(writableAt)
	switch stag {
	case tapeForeign:
		return nil, wire.CodeDDPSTagNotAssociated
	case tapeSink:
		return nil, wire.CodeRDMAPAccess
	case tapeWritable:
		if !write {
			return nil, wire.CodeRDMAPAccess
		}
	case tapeReadable:
		if write {
			return nil, wire.CodeRDMAPAccess
		}
		mem, base = m.readable, readableAt
	default:
		return nil, wire.CodeDDPInvalidSTag
	}
	for i := range uint64(size) {
		switch at := to + i; {
		case to+uint64(size) < to:
			return nil, wire.CodeDDPTOWrap
		case at < base || at >= base+uint64(len(mem)) && base+uint64(len(mem)) > base:
			return nil, wire.CodeDDPBaseBounds
		}
	}
	return mem[to-base:][:size], 0
}

func (m *tapeMemory) write(h wire.Header, payload []byte) wire.Code {
	if len(payload) == 0 {
		return 0
	}
	mem, fault := m.find(h.STag, h.TO, len(payload), true)
	copy(mem, payload)
	return fault
}

func (m *tapeMemory) response(h wire.Header, payload []byte, r *result) wire.Code {
	n := len(payload)
	if m.next == len(tapeReads) {
		if n == 0 {
			return wire.CodeRDMAPOpcode
		}
		return wire.CodeDDPInvalidSTag
	}
	read := tapeReads[m.next]
	stag, to := uint32(tapeSink), uint64(sinkAt+read.at+m.done)
	if read.size == 0 {
		stag = 0
	}
	switch {
	case n > 0 && h.STag != stag:
		return wire.CodeDDPInvalidSTag
	case n > 0 && h.TO != to, m.done+n > read.size, h.Last && m.done+n != read.size:
		return wire.CodeDDPBaseBounds
	}
	m.done += copy(m.sink[read.at+m.done:], payload)
	if h.Last {
		r.reads++
		m.next, m.done = m.next+1, 0
	}
	return 0
}

func (m *tapeMemory) request(payload []byte, r *result) wire.Code {
	req, err := wire.ParseReadRequest(payload)
	if err != nil {
		return err.(*wire.ProtocolError).Code
	}
	var data []byte
	if req.Size > 0 {
		mem, fault := m.find(req.SourceSTag, req.SourceTO, int(min(req.Size, 1<<16)), false)
		switch {
		case fault == wire.CodeRDMAPAccess:
			return fault
		case fault == 0 && req.Size > 1<<16:
			fault = wire.CodeDDPBaseBounds
		}
		if req.SourceTO+uint64(req.Size) < req.SourceTO && req.SourceSTag == tapeReadable {
			fault = wire.CodeDDPTOWrap
		}
		if fault != 0 {
			return map[wire.Code]wire.Code{
				wire.CodeDDPInvalidSTag:       wire.CodeRDMAPInvalidSTag,
				wire.CodeDDPBaseBounds:        wire.CodeRDMAPBaseBounds,
				wire.CodeDDPSTagNotAssociated: wire.CodeRDMAPSTagNotAssociated,
				wire.CodeDDPTOWrap:            wire.CodeRDMAPTOWrap,
			}[fault]
		}
		data = mem
	}
	r.answers = append(r.answers, answerString(req.SinkSTag, req.SinkTO, data))
	return 0
}

func answerString(stag uint32, to uint64, data []byte) string {
	return fmt.Sprintf("%#x at %#x: %s", stag, to, digest(data))
}

// joinAnswers puts Read Responses together.
func joinAnswers(t testing.TB, out []fpdu) (all []string) {
	var data []byte
	first := wire.Header{}
	for begun := false; len(out) > 0; out = out[1:] {
		require.Equal(t, wire.OpReadResponse, out[0].Opcode)
		if !begun {
			first, data, begun = out[0].Header, nil, true
		}
		require.Equal(t, first.STag, out[0].STag)
		require.Equal(t, first.TO+uint64(len(data)), out[0].TO)
		data = append(data, out[0].payload...)
		if out[0].Last {
			all = append(all, answerString(first.STag, first.TO, data))
			begun = false
		}
	}
	return all
}

// readRequest is a Read Request.
func readRequest(msn uint32, r wire.ReadRequest) fpdu {
	b := make([]byte, wire.ReadRequestLen)
	r.Put(b)
	return fpdu{wire.Header{Last: true, Opcode: wire.OpReadRequest, QN: wire.QueueReadRequest, MSN: msn}, b}
}

// tagged is a segment of an RDMA Write or a Read Response.
func tagged(op wire.Opcode, stag uint32, to uint64, last bool, payload []byte) fpdu {
	return fpdu{wire.Header{Tagged: true, Last: last, Opcode: op, STag: stag, TO: to}, payload}
}

// randomTagged is what else a peer on a tape might send.
func randomTagged(rnd *rand.Rand) (all []fpdu) {
	reads, msn := 0, uint32(1)
	for range 12 {
		switch k := rnd.IntN(4); {
		case k == 0: // adapters do, to see whether the peer is alive
			all = append(all, tagged(wire.OpWrite, rnd.Uint32(), rnd.Uint64(), true, nil))
		case k == 1:
			n := 1 + rnd.IntN(200)
			all = append(all, tagged(wire.OpWrite, tapeWritable, writableAt+rnd.Uint64N(uint64(256-n)), rnd.IntN(2) == 0, randomBytes(n)))
		case k == 2:
			n := rnd.IntN(4095) // the very last byte is beyond reach
			all = append(all, readRequest(msn, wire.ReadRequest{
				SinkSTag: rnd.Uint32(), SinkTO: rnd.Uint64(), Size: uint32(n), SourceSTag: tapeReadable, SourceTO: readableAt + rnd.Uint64N(4095-uint64(n)),
			}))
			msn++
		case reads < len(tapeReads):
			r := tapeReads[reads]
			for at := 0; ; {
				n := rnd.IntN(r.size - at + 1)
				stag := uint32(tapeSink)
				if n == 0 {
					stag = rnd.Uint32()
				}
				last := at+n == r.size && rnd.IntN(2) == 0
				all = append(all, tagged(wire.OpReadResponse, stag, uint64(sinkAt+r.at+at), last, bytes.Repeat([]byte{byte(at)}, n)))
				if at += n; last {
					break
				}
			}
			reads++
		}
	}
	return all
}
