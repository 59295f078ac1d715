package wire

import (
	"bytes"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

// streams calls f with what each side of each captured connection sent.
func streams(t testing.TB, f func([]byte)) {
	for _, file := range []string{"siw-ucmatose.pcap", "siw-rdma-client-server.pcap", "siw-rping.pcap", "siw-send-200000.pcap"} {
		for _, conn := range readCapture(t, file) {
			f(conn.dialer)
			f(conn.listener)
		}
	}
}

func FuzzParseSetup(f *testing.F) {
	streams(f, func(b []byte) { f.Add(b[:60]) })
	f.Add([]byte("MPA ID Rep Frame\xff\x01\x00\x02ab"))
	f.Add([]byte("MPA ID Req Frame\xd0\x02\x00\x06\xff\xff\xff\xffab"))
	f.Fuzz(func(t *testing.T, b []byte) {
		frame, n, err := ParseSetup(b)
		if err != nil {
			require.Zero(t, n)
			if _, ok := err.(*SetupError); !ok {
				require.ErrorIs(t, err, io.ErrUnexpectedEOF)
				require.Less(t, len(b), SetupHeaderLen+MaxPrivateData)
			}
			return
		}
		require.LessOrEqual(t, n, min(len(b), SetupHeaderLen+MaxPrivateData))
		_, _, err = ParseSetup(b[:n-1])
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)

		built, err := AppendSetup(nil, &frame)
		require.NoError(t, err)
		want := bytes.Clone(b[:n])
		want[16] &= flagMarkers | flagCRC | flagReject | flagEnhanced // drop what a parser ignores
		setClear(&want[16], flagReject, !frame.Reply)
		setClear(&want[16], flagEnhanced, frame.Revision == Revision1)
		require.Equal(t, want, built)
	})
}

func setClear(b *byte, bit byte, off bool) {
	if off {
		*b &^= bit
	}
}

func FuzzParseHeader(f *testing.F) {
	streams(f, func(b []byte) {
		_, segments := parseStream(f, b)
		for _, s := range segments[:min(len(segments), 8)] {
			b := make([]byte, s.Len())
			s.Put(b)
			f.Add(append(b, s.payload[:min(len(s.payload), 8)]...))
		}
	})
	f.Add([]byte("\x7d\x76\xff\xff\xff\xff\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHeader(b)
		if err != nil {
			var e *ProtocolError
			require.ErrorAs(t, err, &e)
			require.True(t, e.Code.Known())
			require.Zero(t, h)
			return
		}
		want := bytes.Clone(b[:h.Len()])
		want[0] &= ddpTagged | ddpLast | versionMask // drop what a parser ignores
		want[1] &= 0xc0 | opcodeMask
		if !h.Tagged && !h.Opcode.Invalidates() {
			clear(want[2:6])
		}
		built := make([]byte, h.Len())
		h.Put(built)
		require.Equal(t, want, built)
	})
}

func FuzzReadRequest(f *testing.F) {
	streams(f, func(b []byte) {
		_, segments := parseStream(f, b)
		for _, s := range segments {
			if s.Opcode == OpReadRequest {
				f.Add(s.payload)
			}
		}
	})
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseReadRequest(b)
		require.Equal(t, len(b) == ReadRequestLen, err == nil)
		if err == nil {
			built := make([]byte, ReadRequestLen)
			r.Put(built)
			require.Equal(t, b, built)
		}
	})
}

// No capture holds a Terminate; the seeds are those that a captured header would cause, as the RFC and as siw send them.
func FuzzParseTerminate(f *testing.F) {
	streams(f, func(b []byte) {
		_, segments := parseStream(f, b)
		header := make([]byte, segments[0].Len())
		segments[0].Put(header)
		for _, code := range []Code{CodeDDPNoBuffer, CodeRDMAPAccess, CodeRDMAPOpcode, CodeMPACRC} {
			t := NewTerminate(code, append(header, segments[0].payload...), len(header)+len(segments[0].payload))
			b, err := AppendTerminate(nil, &t)
			require.NoError(f, err)
			f.Add(bytes.Clone(b))
			b[0] = b[0]<<4 | b[0]>>4
			b[2] = b[2]>>7 | b[2]>>5&siwD | b[2]>>3&siwR
			f.Add(b)
		}
	})
	f.Fuzz(func(t *testing.T, b []byte) {
		parsed, err := ParseTerminate(b)
		if err != nil {
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.Equal(t, Terminate{Code: parsed.Code}, parsed)
			return
		}
		built, err := AppendTerminate(nil, &parsed)
		require.NoError(t, err)
		require.LessOrEqual(t, len(built), min(len(b), MaxTerminateLen))
		require.Equal(t, b[terminateLen:len(built)], built[terminateLen:], "headers")
		again, err := ParseTerminate(built)
		require.NoError(t, err)
		require.Equal(t, parsed, again)
		if again := NewCode(parsed.Code.EType(), parsed.Code.Layer(), parsed.Code.ECode()); b[0] != built[0] {
			require.EqualValues(t, b[0], again>>8, "swapped, or as it is")
		}
	})
}
