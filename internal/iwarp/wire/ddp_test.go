package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHeaderOnTheWire(t *testing.T) {
	for _, tc := range []struct {
		put  interface{ Put([]byte) }
		want Header
		wire string
	}{
		{UntaggedHeader{Last: true, Opcode: OpSend, MSN: 1}, Header{Last: true, Opcode: OpSend, MSN: 1},
			"\x41\x43\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00"},
		{UntaggedHeader{Opcode: OpSendSolicited, MSN: 0x01020304, MO: 0x05060708, InvSTag: 9},
			Header{Opcode: OpSendSolicited, MSN: 0x01020304, MO: 0x05060708},
			"\x01\x45\x00\x00\x00\x00\x00\x00\x00\x00\x01\x02\x03\x04\x05\x06\x07\x08"},
		{UntaggedHeader{Last: true, Opcode: OpSendInvalidate, InvSTag: 0x0a0b0c0d, MSN: 2},
			Header{Last: true, Opcode: OpSendInvalidate, InvSTag: 0x0a0b0c0d, MSN: 2},
			"\x41\x44\x0a\x0b\x0c\x0d\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00"},
		{UntaggedHeader{Last: true, Opcode: OpSendSolicitedInvalidate, InvSTag: 1, MSN: 2},
			Header{Last: true, Opcode: OpSendSolicitedInvalidate, InvSTag: 1, MSN: 2},
			"\x41\x46\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00"},
		{UntaggedHeader{Last: true, Opcode: OpReadRequest, QN: QueueReadRequest, MSN: 1},
			Header{Last: true, Opcode: OpReadRequest, QN: 1, MSN: 1},
			"\x41\x41\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x00"},
		{TerminateHeader, Header{Last: true, Opcode: OpTerminate, QN: 2, MSN: 1},
			"\x41\x47\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00\x00"},
		{TaggedHeader{Last: true, Opcode: OpWrite, STag: 0x01020304, TO: 0x1112131415161718},
			Header{Tagged: true, Last: true, Opcode: OpWrite, STag: 0x01020304, TO: 0x1112131415161718},
			"\xc1\x40\x01\x02\x03\x04\x11\x12\x13\x14\x15\x16\x17\x18"},
		{TaggedHeader{Opcode: OpReadResponse}, Header{Tagged: true, Opcode: OpReadResponse},
			"\x81\x42\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"},
	} {
		require.Len(t, tc.wire, tc.want.Len())
		for _, put := range []interface{ Put([]byte) }{tc.put, tc.want} {
			b := []byte("xxxxxxxxxxxxxxxxxxyy")
			put.Put(b)
			require.Equal(t, tc.wire+"xxxxxxxxxxxxxxxxxxyy"[len(tc.wire):], string(b))
		}
		h, err := ParseHeader([]byte(tc.wire))
		require.NoError(t, err)
		require.Equal(t, tc.want, h)
	}
}

func TestHeaderIgnoresReservedBits(t *testing.T) {
	h, err := ParseHeader([]byte("\x7d\x73\xff\xff\xff\xff\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00"))
	require.NoError(t, err)
	require.Equal(t, Header{Last: true, Opcode: OpSend, MSN: 1}, h)
}

func TestFaultyHeaderNamesItsTerminateCode(t *testing.T) {
	const untagged, tagged = "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	queue := func(n string) string { return untagged[:7] + n + untagged[8:] }
	for _, tc := range []struct {
		wire string
		code Code
		text string
	}{
		{"", CodeRDMAPUnspecified, "iwarp: RDMAP remote operation error: unspecified (ULPDU of 0 bytes)"},
		{"\xc1\x40" + tagged[1:], CodeRDMAPUnspecified, "iwarp: RDMAP remote operation error: unspecified (ULPDU of 13 bytes)"},
		{"\x41\x43" + untagged[1:], CodeRDMAPUnspecified, "iwarp: RDMAP remote operation error: unspecified (ULPDU of 17 bytes)"},
		{"\xc0\x40" + tagged, CodeDDPTaggedVersion, "iwarp: DDP tagged buffer error: invalid DDP version (version 0)"},
		{"\x42\x03" + queue("\x09"), CodeDDPUntaggedVersion, "iwarp: DDP untagged buffer error: invalid DDP version (version 2)"},
		{"\x41\x43" + queue("\x03"), CodeDDPInvalidQN, "iwarp: DDP untagged buffer error: invalid queue number (queue 3)"},
		{"\x41\x03" + untagged, CodeRDMAPVersion, "iwarp: RDMAP remote operation error: invalid RDMAP version (version 0)"},
		{"\xc1\xc0" + tagged, CodeRDMAPVersion, "iwarp: RDMAP remote operation error: invalid RDMAP version (version 3)"},
		{"\x41\x48" + untagged, CodeRDMAPOpcode, "iwarp: RDMAP remote operation error: unexpected opcode (opcode 0x8 in an untagged segment)"},
		{"\xc1\x4f" + tagged, CodeRDMAPOpcode, "iwarp: RDMAP remote operation error: unexpected opcode (opcode 0xf in a tagged segment)"},
		{"\xc1\x43" + tagged, CodeRDMAPOpcode, "iwarp: RDMAP remote operation error: unexpected opcode (Send in a tagged segment)"},
		{"\x41\x40" + untagged, CodeRDMAPOpcode, "iwarp: RDMAP remote operation error: unexpected opcode (RDMA Write in an untagged segment)"},
		{"\x41\x42" + queue("\x01"), CodeRDMAPOpcode, "iwarp: RDMAP remote operation error: unexpected opcode (RDMA Read Response in an untagged segment)"},
		{"\x41\x43" + queue("\x01"), CodeRDMAPOpcode, "iwarp: RDMAP remote operation error: unexpected opcode (Send on queue 1)"},
		{"\x41\x41" + queue("\x00"), CodeRDMAPOpcode, "iwarp: RDMAP remote operation error: unexpected opcode (RDMA Read Request on queue 0)"},
		{"\x41\x47" + queue("\x00"), CodeRDMAPOpcode, "iwarp: RDMAP remote operation error: unexpected opcode (Terminate on queue 0)"},
	} {
		h, err := ParseHeader([]byte(tc.wire))
		require.EqualError(t, err, tc.text)
		var e *ProtocolError
		require.ErrorAs(t, err, &e)
		require.Equal(t, tc.code, e.Code)
		require.Zero(t, h)
	}
}

func TestOpcodeProperties(t *testing.T) {
	for op, want := range map[Opcode]struct {
		name                                       string
		valid, tagged, send, invalidate, solicited bool
		queue                                      uint32
	}{
		OpWrite:                   {name: "RDMA Write", valid: true, tagged: true},
		OpReadRequest:             {name: "RDMA Read Request", valid: true, queue: QueueReadRequest},
		OpReadResponse:            {name: "RDMA Read Response", valid: true, tagged: true},
		OpSend:                    {name: "Send", valid: true, send: true},
		OpSendInvalidate:          {name: "Send with Invalidate", valid: true, send: true, invalidate: true},
		OpSendSolicited:           {name: "Send with Solicited Event", valid: true, send: true, solicited: true},
		OpSendSolicitedInvalidate: {name: "Send with Solicited Event and Invalidate", valid: true, send: true, invalidate: true, solicited: true},
		OpTerminate:               {name: "Terminate", valid: true, queue: QueueTerminate},
		8:                         {name: "opcode 0x8"},
	} {
		require.Equal(t, want.name, op.String())
		require.Equal(t, want.valid, op.Valid(), op)
		require.Equal(t, want.tagged, op.Tagged(), op)
		require.Equal(t, want.send, op.IsSend(), op)
		require.Equal(t, want.invalidate, op.Invalidates(), op)
		require.Equal(t, want.solicited, op.Solicited(), op)
		require.Equal(t, want.queue, op.Queue(), op)
	}
}

func TestReadRequestRoundTripAndLengths(t *testing.T) {
	r := ReadRequest{SinkSTag: 1, SinkTO: 2<<32 | 3, Size: 4, SourceSTag: 5, SourceTO: 6<<32 | 7}
	var b [ReadRequestLen]byte
	r.Put(b[:])
	require.Equal(t, "\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00\x04\x00\x00\x00\x05\x00\x00\x00\x06\x00\x00\x00\x07", string(b[:]))
	got, err := ParseReadRequest(b[:])
	require.NoError(t, err)
	require.Equal(t, r, got)

	_, err = ParseReadRequest(b[:27])
	require.Equal(t, &ProtocolError{CodeRDMAPUnspecified, "Read Request of 27 bytes"}, err)
	_, err = ParseReadRequest(append(b[:], 0))
	require.Equal(t, &ProtocolError{CodeDDPTooLong, "Read Request of 29 bytes"}, err)
}

func TestHeadersDoNotAllocate(t *testing.T) {
	b := make([]byte, UntaggedHeaderLen)
	request := make([]byte, ReadRequestLen)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		UntaggedHeader{Last: true, Opcode: OpSend, MSN: 1}.Put(b)
		h, err := ParseHeader(b)
		h.Put(b)
		TaggedHeader{Opcode: OpWrite, STag: 1}.Put(b)
		h2, err2 := ParseHeader(b)
		ReadRequest{Size: 1}.Put(request)
		r, err3 := ParseReadRequest(request)
		if err != nil || err2 != nil || err3 != nil || h.MSN != 1 || h2.STag != 1 || r.Size != 1 {
			panic("broken")
		}
	}))
}
