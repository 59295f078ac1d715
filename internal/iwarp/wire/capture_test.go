package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// connection is one TCP connection: the bytes that each side sent.
type connection struct {
	dialer, listener []byte
	reset            bool // somebody sent RST
}

// readCapture reassembles the connections of a classic little-endian pcap file of Ethernet and IPv4, in the order of their SYNs.
func readCapture(t testing.TB, name string) []*connection {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(t, err)
	require.EqualValues(t, 0xa1b2c3d4, binary.LittleEndian.Uint32(b), "classic pcap, microseconds, little endian")
	require.EqualValues(t, 1, binary.LittleEndian.Uint32(b[20:]), "Ethernet")

	type flow struct {
		conn *connection
		sent *[]byte
		next uint32 // sequence number
	}
	flows := map[uint32]*flow{} // by source and destination port
	var conns []*connection
	for b = b[24:]; len(b) > 0; {
		n := binary.LittleEndian.Uint32(b[8:])
		require.Equal(t, n, binary.LittleEndian.Uint32(b[12:]), "truncated packet")
		packet := b[16 : 16+n]
		b = b[16+n:]

		require.EqualValues(t, 0x0800, binary.BigEndian.Uint16(packet[12:]), "IPv4")
		ip := packet[14:]
		require.EqualValues(t, 6, ip[9], "TCP")
		ip = ip[:binary.BigEndian.Uint16(ip[2:])]
		tcp := ip[int(ip[0]&0xf)*4:]
		payload := tcp[int(tcp[12]>>4)*4:]
		ports, seq, flags := binary.BigEndian.Uint32(tcp), binary.BigEndian.Uint32(tcp[4:]), tcp[13]

		f := flows[ports]
		if f == nil {
			require.EqualValues(t, 0x02, flags, "a connection starts with SYN")
			c := new(connection)
			conns = append(conns, c)
			f = &flow{conn: c, sent: &c.dialer}
			flows[ports], flows[ports<<16|ports>>16] = f, &flow{conn: c, sent: &c.listener}
		}
		f.conn.reset = f.conn.reset || flags&0x04 != 0
		if flags&0x02 != 0 {
			f.next = seq + 1
		}
		if len(payload) > 0 {
			seen := int(f.next - seq) // more than 0: a retransmission
			require.GreaterOrEqual(t, seen, 0, "hole in the stream")
			payload = payload[min(seen, len(payload)):]
			*f.sent = append(*f.sent, payload...)
			f.next += uint32(len(payload))
		}
	}
	return conns
}

// segment is one FPDU of a stream, parsed.
type segment struct {
	Header
	payload []byte
	pad     []byte
	crc     uint32 // the CRC field's bytes
}

// parseStream parses everything that one side sent, to the last byte.
func parseStream(t testing.TB, b []byte) (SetupFrame, []segment) {
	t.Helper()
	setup, n, err := ParseSetup(b)
	require.NoError(t, err)
	var segments []segment
	for b = b[n:]; len(b) > 0; {
		ulpduLen := FPDUHeader(b)
		fpdu := b[:FPDULen(ulpduLen)]
		ulpdu, trailer := fpdu[FPDUHeaderLen:FPDUHeaderLen+ulpduLen], fpdu[FPDUHeaderLen+ulpduLen:]
		h, err := ParseHeader(ulpdu)
		require.NoError(t, err)
		require.Len(t, trailer, TrailerLen(ulpduLen))
		pad := trailer[:PadLen(ulpduLen)]
		segments = append(segments, segment{h, ulpdu[h.Len():], pad, binary.LittleEndian.Uint32(trailer[len(pad):])})
		b = b[len(fpdu):]
	}
	return setup, segments
}

// buildStream is the inverse of parseStream. With crc the FPDUs carry one, and zeros as pad, not what was captured.
func buildStream(t testing.TB, setup SetupFrame, segments []segment, crc bool) []byte {
	t.Helper()
	b, err := AppendSetup(nil, &setup)
	require.NoError(t, err)
	for _, s := range segments {
		start, ulpdu := len(b), s.Len()+len(s.payload)
		b = append(b, make([]byte, FPDUHeaderLen+s.Len())...)
		PutFPDUHeader(b[start:], ulpdu)
		s.Put(b[start+FPDUHeaderLen:])
		sum := UpdateCRC(0, b[start:])
		b = append(b, s.payload...)
		sum = UpdateCRC(sum, s.payload)
		var trailer [MaxTrailerLen]byte
		n := PutTrailer(trailer[:], ulpdu, crc, sum)
		if !crc {
			copy(trailer[:], s.pad)
		}
		b = append(b, trailer[:n]...)
		require.Len(t, b[start:], FPDULen(ulpdu))
	}
	return b
}

// describe writes a segment as its opcode, for untagged ones sequence number and offset, and its payload length; "..." says that
// the message goes on.
func describe(s segment) string {
	d := s.Opcode.String()
	if !s.Tagged {
		d += fmt.Sprintf(" %d@%d", s.MSN, s.MO)
	}
	d += fmt.Sprintf(" %dB", len(s.payload))
	if !s.Last {
		d += "..."
	}
	return d
}

func TestCapturesParseToTheLastByteAndRebuild(t *testing.T) {
	sends := func(lengths ...int) (want []string) {
		for i, n := range lengths {
			want = append(want, fmt.Sprintf("Send %d@0 %dB", i+1, n))
		}
		return want
	}
	bulk := []string{"Send 1@0 32744B...", "Send 1@32744 32744B...", "Send 1@65488 32744B...", "Send 1@98232 65456B...", "Send 1@163688 36312B"}
	for msn := 2; msn <= 5; msn++ {
		for mo := 0; mo < 3*65456; mo += 65456 {
			bulk = append(bulk, fmt.Sprintf("Send %d@%d 65456B...", msn, mo))
		}
		bulk = append(bulk, fmt.Sprintf("Send %d@196368 3632B", msn))
	}
	parameters := sends(16, 4, 4, 2, 56, 56, 56, 56, 56, 56, 56) // perftest agrees on these before the test connection

	type want struct {
		depth            uint16 // IRD and ORD
		dialer, listener []string
	}
	for file, conns := range map[string][]want{
		"siw-ucmatose.pcap":           {{1, sends(100, 100, 100), sends(100, 100, 100)}},
		"siw-rdma-client-server.pcap": {{128, sends(16), sends(16)}},
		"siw-rping.pcap": {{1,
			[]string{"Send 1@0 16B", "RDMA Read Response 64B", "Send 2@0 16B", "Send 3@0 16B", "RDMA Read Response 64B", "Send 4@0 16B"},
			[]string{"RDMA Read Request 1@0 28B", "Send 1@0 16B", "RDMA Write 64B", "Send 2@0 16B",
				"RDMA Read Request 2@0 28B", "Send 3@0 16B", "RDMA Write 64B", "Send 4@0 16B"},
		}},
		"siw-send-200000.pcap": {{0, parameters, parameters}, {0, bulk, []string{"RDMA Write 4B", "RDMA Write 4B"}}},
	} {
		t.Run(file, func(t *testing.T) {
			got := readCapture(t, file)
			require.Len(t, got, len(conns))
			for i, want := range conns {
				require.False(t, got[i].reset)
				setup := SetupFrame{Revision: Revision2, Enhanced: true, IRD: want.depth, ORD: want.depth}
				checkStream(t, got[i].dialer, setup, want.dialer)
				setup.Reply = true
				checkStream(t, got[i].listener, setup, want.listener)
			}
		})
	}
}

func checkStream(t *testing.T, stream []byte, wantSetup SetupFrame, wantSegments []string) {
	setup, segments := parseStream(t, stream)
	require.Equal(t, wantSetup, setup)
	var got []string
	var msn, mo [3]uint32
	for _, s := range segments {
		got = append(got, describe(s))
		require.Zero(t, s.crc, "siw leaves the CRC field zero when CRCs are off")
		require.LessOrEqual(t, FPDULen(s.Len()+len(s.payload)), 65480)
		if s.Tagged {
			continue
		}
		require.Equal(t, msn[s.QN]+1, s.MSN)
		require.Equal(t, mo[s.QN], s.MO)
		mo[s.QN] += uint32(len(s.payload))
		if s.Last {
			msn[s.QN], mo[s.QN] = s.MSN, 0
		}
	}
	require.Equal(t, wantSegments, got)
	require.True(t, bytes.Equal(stream, buildStream(t, setup, segments, false)), "rebuilt stream differs")

	_, withCRC := parseStream(t, buildStream(t, setup, segments, true))
	for i, s := range withCRC {
		require.NotZero(t, s.crc)
		s.crc, s.pad = 0, segments[i].pad
		require.Equal(t, segments[i], s)
	}
}

// RFC 5044 wants zeros there. siw leaves what an earlier short message had in the same place, so a receiver must not check.
func TestSiwPadsWithStaleBytes(t *testing.T) {
	_, segments := parseStream(t, readCapture(t, "siw-send-200000.pcap")[0].dialer)
	require.Equal(t, "Send 4@0 2B", describe(segments[3]))
	require.Equal(t, []byte{0x00, 0x40}, segments[3].pad)
	require.Equal(t, []byte{0x00, 0x40}, segments[2].payload[2:])
}

func TestRpingReadsWhatItAdvertised(t *testing.T) {
	conn := readCapture(t, "siw-rping.pcap")[0]
	_, dialer := parseStream(t, conn.dialer)
	_, listener := parseStream(t, conn.listener)
	r, err := ParseReadRequest(listener[0].payload)
	require.NoError(t, err)
	require.EqualValues(t, 64, r.Size)
	require.Equal(t, r.SinkSTag, dialer[1].STag)
	require.Equal(t, r.SinkTO, dialer[1].TO)
	advertised := dialer[0].payload // address, key, size
	require.Equal(t, binary.BigEndian.Uint64(advertised), r.SourceTO)
	require.Equal(t, binary.BigEndian.Uint32(advertised[8:]), r.SourceSTag)

	var b [ReadRequestLen]byte
	r.Put(b[:])
	require.Equal(t, listener[0].payload, b[:])
}

func TestBulkTransferCarriesFiveMessages(t *testing.T) {
	_, segments := parseStream(t, readCapture(t, "siw-send-200000.pcap")[1].dialer)
	var total, largest int
	for _, s := range segments {
		total, largest = total+len(s.payload), max(largest, s.Len()+len(s.payload))
	}
	require.Equal(t, 5*200_000, total)
	require.Equal(t, 65_474, largest)
	require.Equal(t, largest, ULPDUFor(65_495-12), "loopback's MSS less TCP's timestamps")
}

func TestRefusedConnectionCarriesNothing(t *testing.T) {
	conns := readCapture(t, "siw-refused.pcap")
	require.Equal(t, []*connection{{reset: true}}, conns)
}
