package iwarp

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// fuzzSizes are the receives that a fuzzed stream finds.
var fuzzSizes = []int{100, 100, 100, 0, 16, 5000, 2048, 3}

// FuzzStream feeds bytes as the FPDU stream to an established QP, cut up at
// random, and compares what is received with what a parser that has it all at
// once makes of it.
func FuzzStream(f *testing.F) {
	for _, stream := range captures(f) {
		for _, crc := range []bool{false, true} {
			f.Add(stream, crc, uint64(1))
		}
	}
	for _, crc := range []bool{false, true} {
		for seed := range uint64(4) {
			rnd := rand.New(rand.NewPCG(seed, 3))
			f.Add(randomStream(rnd, crc, fuzzSizes, randomTagged(rnd)), crc, seed)
		}
		for _, fault := range faults(crc) {
			f.Add(fault.stream, crc, uint64(2))
		}
		f.Add(ownStream(f, crc), crc, uint64(3))
	}
	ch := newChannel(f)
	f.Fuzz(func(t *testing.T, stream []byte, crc bool, seed uint64) {
		want := expect(stream, crc, fuzzSizes)
		rnd := rand.New(rand.NewPCG(seed, 4))
		for _, piece := range []func() int{nil, func() int { return rnd.IntN(2 + rnd.IntN(1<<rnd.IntN(13))) }} {
			require.Equal(t, want, receive(t, ch, bytes.Clone(stream), crc, fuzzSizes, piece))
		}
	})
}

// ownStream is what our sender makes of messages that fit.
func ownStream(t testing.TB, crc bool) []byte {
	ch := newChannel(t)
	l := newTape()
	q, _ := onTape(t, ch, l, 600, crc, verbs.QPCap{SendWR: len(fuzzSizes), RecvWR: 1, SendSGE: 1})
	for i, n := range fuzzSizes {
		_, err := q.PostSend([]verbs.SendWR{{WRID: uint64(i), Inline: true, SGL: []verbs.SGE{{Data: randomBytes(n)}}}})
		require.NoError(t, err)
	}
	q.abort()
	next(t, ch, verbs.EventDisconnected)
	require.Len(t, expect(l.out, crc, fuzzSizes).got, len(fuzzSizes))
	return l.out
}

// captures returns the FPDU streams of both sides of the captured connections,
// at most 16 KiB of each.
func captures(t testing.TB) (streams [][]byte) {
	files, err := filepath.Glob("wire/testdata/*.pcap")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, name := range files {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		sent := map[uint32][]byte{} // by source and destination port
		next := map[uint32]uint32{}
		var order []uint32
		for b = b[24:]; len(b) > 0; {
			n := 16 + binary.LittleEndian.Uint32(b[8:])
			ip := b[16+14 : n]
			b = b[n:]
			ip = ip[:binary.BigEndian.Uint16(ip[2:])]
			tcp := ip[int(ip[0]&0xf)*4:]
			payload := tcp[int(tcp[12]>>4)*4:]
			ports, seq := binary.BigEndian.Uint32(tcp), binary.BigEndian.Uint32(tcp[4:])
			if tcp[13]&0x02 != 0 {
				next[ports] = seq + 1
				order = append(order, ports)
			}
			if skip := int(next[ports] - seq); len(payload) > skip {
				sent[ports] = append(sent[ports], payload[skip:]...)
				next[ports] += uint32(len(payload) - skip)
			}
		}
		for _, ports := range order {
			if len(sent[ports]) == 0 {
				continue
			}
			_, n, err := wire.ParseSetup(sent[ports])
			require.NoError(t, err)
			stream := sent[ports][n:]
			streams = append(streams, stream[:min(len(stream), 16<<10)])
		}
	}
	return streams
}

func TestSiwStreamsAreReceived(t *testing.T) {
	ch := newChannel(t)
	sizes := make([]int, 16)
	for i := range sizes {
		sizes[i] = 200_000
	}
	received := 0
	for _, stream := range captures(t) {
		want := expect(stream, false, sizes)
		require.Equal(t, want, receive(t, ch, stream, false, sizes, nil))
		received += len(want.got)
	}
	require.Greater(t, received, 30)
}

func FuzzReadSetup(f *testing.F) {
	for _, reply := range []bool{false, true} {
		for _, s := range []wire.SetupFrame{
			{Revision: 1},
			{Revision: 1, CRC: true, Markers: true, PrivateData: randomBytes(512)},
			{Revision: 2, Enhanced: true, IRD: 3, ORD: 4, PrivateData: randomBytes(56)},
			{Revision: 2, Enhanced: true, PeerToPeer: true, RTRSend: true},
		} {
			s.Reply = reply
			b := setupBytes(f, s)
			f.Add(append(b, "behind"...), reply)
			f.Add(b[:len(b)/2], reply)
			f.Add(with(b, revisionAt, 3), reply)
			f.Add(with(b, lengthAt, 2), !reply)
		}
	}
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), false)
	f.Fuzz(func(t *testing.T, b []byte, reply bool) {
		r := bytes.NewReader(b)
		got, err := readSetup(r, reply)
		again, err2 := readSetup(iotest.OneByteReader(bytes.NewReader(b)), reply)
		require.Equal(t, err == nil, err2 == nil)
		require.Equal(t, got, again)
		if err != nil {
			require.NotZero(t, errnoOf(withErrno(err, syscall.EPROTO)))
			return
		}
		want, n, err := wire.ParseSetup(b)
		require.NoError(t, err)
		require.Equal(t, reply, got.Reply)
		require.Equal(t, len(b)-n, r.Len(), "not a byte more than the frame is read")
		require.True(t, bytes.Equal(want.PrivateData, got.PrivateData))
		want.PrivateData, got.PrivateData = nil, nil
		require.Equal(t, want, got)
		if !got.Reply {
			_, err = replyTo(got, wire.SetupFrame{Reject: true, CRC: got.CRC})
			require.NoError(t, err, "whatever is asked can be answered")
		}
	})
}
