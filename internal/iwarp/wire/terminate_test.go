package wire

import (
	"encoding/hex"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	sendHeader  = "41430000000000000000000000070000" + "0000" // Send, MSN 7
	writeHeader = "c1400102030411121314151617" + "18"
	readHeader  = "4141000000000000000100000001" + "00000000"
	readRequest = "000000010000000000000002000000030000000400000000" + "00000005"
)

func unhex(t testing.TB, s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	require.NoError(t, err)
	return b
}

func TestTerminateOnTheWire(t *testing.T) {
	for name, tc := range map[string]struct {
		code   Code
		header string // what NewTerminate gets
		wire   string
	}{
		"no buffer":                 {CodeDDPNoBuffer, sendHeader, "1202 c000 0076" + sendHeader},
		"payload is left out":       {CodeDDPTooLong, sendHeader + "eeee", "1205 c000 0076" + sendHeader},
		"tagged":                    {CodeDDPInvalidSTag, writeHeader, "1100 c000 0076" + writeHeader},
		"read request, RDMAP error": {CodeRDMAPAccess, readHeader + readRequest, "0102 e000 0076" + readHeader + readRequest},
		"read request, DDP error":   {CodeDDPMSNRange, readHeader + readRequest, "1203 c000 0076" + readHeader},
		"read request, cut short":   {CodeRDMAPAccess, readHeader, "0102 c000 0076" + readHeader},
		"unexpected opcode":         {CodeRDMAPOpcode, sendHeader, "0206 0000"},
		"RDMAP version":             {CodeRDMAPVersion, sendHeader, "0205 0000"},
		"DDP version, untagged":     {CodeDDPUntaggedVersion, sendHeader, "1206 0000"},
		"DDP version, tagged":       {CodeDDPTaggedVersion, writeHeader, "1104 0000"},
		"catastrophe":               {CodeRDMAPLocalCatastrophic, sendHeader, "0000 0000"},
		"CRC":                       {CodeMPACRC, sendHeader, "2002 0000"},
		"no header":                 {CodeRDMAPUnspecified, "", "02ff 0000"},
		"untagged header cut short": {CodeRDMAPUnspecified, sendHeader[:34], "02ff 0000"},
		"tagged header cut short":   {CodeRDMAPUnspecified, writeHeader[:26], "02ff 0000"},
		"RDMAP stream catastrophe":  {CodeRDMAPStreamCatastrophic, sendHeader, "0207 c000 0076" + sendHeader},
	} {
		t.Run(name, func(t *testing.T) {
			built := NewTerminate(tc.code, unhex(t, tc.header), 0x76)
			want := unhex(t, tc.wire)
			b, err := AppendTerminate([]byte("before"), &built)
			require.NoError(t, err)
			require.Equal(t, append([]byte("before"), want...), b)
			require.LessOrEqual(t, len(want), MaxTerminateLen)

			parsed, err := ParseTerminate(append(want, "behind"...))
			require.NoError(t, err)
			require.Equal(t, built, parsed)
			for i := range want {
				parsed, err := ParseTerminate(want[:i])
				require.ErrorIs(t, err, io.ErrUnexpectedEOF, "%d bytes", i)
				if i >= terminateLen {
					require.Equal(t, tc.code, parsed.Code, "the code survives truncation")
				}
			}
		})
	}
}

// siw lays the first 32 bits out in a C bit-field, so that a little-endian host sends the parts of each byte in the wrong order.
func TestTerminateFromSiw(t *testing.T) {
	for name, tc := range map[string]struct {
		wire string
		want Terminate
	}{
		"no buffer":      {"2102 0300 0064" + sendHeader, Terminate{CodeDDPNoBuffer, unhex(t, sendHeader), 0x64, true, nil}},
		"protection":     {"1002 0700 0064" + sendHeader, Terminate{CodeRDMAPAccess, unhex(t, sendHeader), 0x64, true, nil}}, // R without its header
		"read request":   {"1002 0700 0064" + readHeader + readRequest, Terminate{CodeRDMAPAccess, unhex(t, readHeader), 0x64, true, unhex(t, readRequest)}},
		"invalid STag":   {"1100 0300 0064" + writeHeader, Terminate{CodeDDPInvalidSTag, unhex(t, writeHeader), 0x64, true, nil}},
		"CRC":            {"0202 0000", Terminate{Code: CodeMPACRC}},
		"DDP version":    {"2106 0000", Terminate{Code: CodeDDPUntaggedVersion}},
		"catastrophe":    {"0000 0000", Terminate{}},
		"taken as MPA's": {"2006 0000", Terminate{Code: CodeMPAInsufficientIRD}}, // siw means CodeRDMAPOpcode, which cannot be told
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseTerminate(unhex(t, tc.wire))
			require.NoError(t, err)
			require.Equal(t, tc.want, got)
		})
	}
}

func TestTerminateThatContradictsItselfIsNotBuilt(t *testing.T) {
	for _, tc := range []struct {
		t    Terminate
		want string
	}{
		{Terminate{DDPHeader: []byte{0x41}}, "iwarp: terminate: DDP header of 1 bytes, must be 18"},
		{Terminate{DDPHeader: unhex(t, writeHeader+"00")}, "iwarp: terminate: DDP header of 15 bytes, must be 14"},
		{Terminate{RDMAPHeader: []byte{1}}, "iwarp: terminate: RDMAP header of 1 bytes, must be 28"},
		{Terminate{SegmentLen: 7}, "iwarp: terminate: segment length 7 without a DDP header"},
		{Terminate{SegmentLenValid: true}, "iwarp: terminate: segment length 0 without a DDP header"},
	} {
		b, err := AppendTerminate([]byte("before"), &tc.t)
		require.EqualError(t, err, tc.want)
		require.Equal(t, "before", string(b))
	}
}

func TestCodeNames(t *testing.T) {
	for code := range codeNames {
		require.True(t, code.Known())
		require.NotContains(t, code.String(), "0x")
		require.Equal(t, code, NewCode(code.Layer(), code.EType(), code.ECode()))
	}
	for code, want := range map[Code]string{
		CodeDDPNoBuffer:            "DDP untagged buffer error: invalid MSN, no buffer available",
		CodeRDMAPInvalidSTag:       "RDMAP remote protection error: invalid STag",
		CodeRDMAPLocalCatastrophic: "RDMAP local catastrophic error",
		0x10ab:                     "DDP local catastrophic error",
		0x1200:                     "DDP untagged buffer error: code 0x00",
		0x3456:                     "layer 3, error type 4, code 0x56",
	} {
		require.Equal(t, want, code.String())
	}
	require.True(t, Code(0x10ab).Known())
	require.False(t, Code(0x1200).Known())
	require.False(t, Code(0x3456).Known())
}

func TestTerminateErrorSaysWhoSentIt(t *testing.T) {
	e := &TerminateError{Terminate: Terminate{Code: CodeDDPNoBuffer}}
	require.EqualError(t, e, "iwarp: terminate: DDP untagged buffer error: invalid MSN, no buffer available")
	e.Remote = true
	require.EqualError(t, e, "iwarp: terminate: DDP untagged buffer error: invalid MSN, no buffer available, reported by the peer")
	require.EqualError(t, &ProtocolError{Code: CodeMPACRC}, "iwarp: MPA error: CRC mismatch")
}
