package wire

import (
	"encoding/hex"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSetupFrameOnTheWire(t *testing.T) {
	for name, tc := range map[string]struct {
		frame SetupFrame
		wire  string // after the key
	}{
		"plain request":     {SetupFrame{Revision: Revision1}, "00 01 0000"},
		"plain reply":       {SetupFrame{Revision: Revision1, Reply: true, PrivateData: []byte("ok")}, "00 01 0002 6f6b"},
		"markers":           {SetupFrame{Revision: Revision1, Markers: true}, "80 01 0000"},
		"CRC":               {SetupFrame{Revision: Revision2, CRC: true}, "40 02 0000"},
		"rejection":         {SetupFrame{Revision: Revision1, Reply: true, Reject: true}, "20 01 0000"},
		"enhanced":          {SetupFrame{Revision: Revision2, Enhanced: true, IRD: 1, ORD: 2}, "10 02 0004 0001 0002"},
		"depths at limit":   {SetupFrame{Revision: Revision2, Enhanced: true, IRD: MaxDepth, ORD: DepthUnspecified}, "10 02 0004 3fff 3fff"},
		"peer to peer":      {SetupFrame{Revision: Revision2, Enhanced: true, PeerToPeer: true}, "10 02 0004 8000 0000"},
		"RTR by Send":       {SetupFrame{Revision: Revision2, Enhanced: true, RTRSend: true}, "10 02 0004 4000 0000"},
		"RTR by Write":      {SetupFrame{Revision: Revision2, Enhanced: true, RTRWrite: true}, "10 02 0004 0000 8000"},
		"RTR by Read":       {SetupFrame{Revision: Revision2, Enhanced: true, RTRRead: true}, "10 02 0004 0000 4000"},
		"enhanced and data": {SetupFrame{Revision: Revision2, Enhanced: true, IRD: 3, PrivateData: []byte{7}}, "10 02 0005 0003 0000 07"},
		"full": {SetupFrame{Revision: Revision1, PrivateData: make([]byte, MaxPrivateData)},
			"00 01 0200" + strings.Repeat("00", MaxPrivateData)},
		"full and enhanced": {SetupFrame{Revision: Revision2, Enhanced: true, PrivateData: make([]byte, MaxPrivateData-EnhancedLen)},
			"10 02 0200" + strings.Repeat("00", MaxPrivateData)},
	} {
		t.Run(name, func(t *testing.T) {
			rest, err := hex.DecodeString(strings.ReplaceAll(tc.wire, " ", ""))
			require.NoError(t, err)
			key := "MPA ID Req Frame"
			if tc.frame.Reply {
				key = "MPA ID Rep Frame"
			}
			want := append([]byte(key), rest...)

			got, err := AppendSetup([]byte("before"), &tc.frame)
			require.NoError(t, err)
			require.Equal(t, "before"+string(want), string(got))

			f, n, err := ParseSetup(append(want, "behind"...))
			require.NoError(t, err)
			require.Equal(t, tc.frame, f)
			require.Equal(t, len(want), n)
			_, pdLen, err := ParseSetupHeader(want)
			require.NoError(t, err)
			require.Equal(t, len(want), SetupHeaderLen+pdLen)
			for i := range want {
				_, n, err := ParseSetup(want[:i])
				require.ErrorIs(t, err, io.ErrUnexpectedEOF, "%d bytes", i)
				require.Zero(t, n)
			}
		})
	}
}

func TestSetupFrameIgnoresWhatTheRFCsReserve(t *testing.T) {
	f, _, err := ParseSetup([]byte("MPA ID Req Frame\x2f\x02\x00\x00")) // reject flag and all reserved bits
	require.NoError(t, err)
	require.Equal(t, SetupFrame{Revision: Revision2}, f)
	f, _, err = ParseSetup([]byte("MPA ID Rep Frame\x10\x01\x00\x02ab")) // S bit, which revision 1 does not have
	require.NoError(t, err)
	require.Equal(t, SetupFrame{Reply: true, Revision: Revision1, PrivateData: []byte("ab")}, f)
}

func TestUnlawfulSetupFrameIsNotBuilt(t *testing.T) {
	for _, tc := range []struct {
		frame SetupFrame
		want  SetupError
	}{
		{SetupFrame{}, SetupError{"revision", "0", "1 or 2"}},
		{SetupFrame{Revision: 3}, SetupError{"revision", "3", "1 or 2"}},
		{SetupFrame{Revision: Revision1, Enhanced: true}, SetupError{"revision", "1", "2 in an enhanced frame"}},
		{SetupFrame{Revision: Revision2, Reject: true}, SetupError{"reject flag", "true", "false in a request"}},
		{SetupFrame{Revision: Revision2, ORD: 1}, SetupError{"enhanced flag", "false", "true with an IRD, ORD or ready-to-receive option"}},
		{SetupFrame{Revision: Revision2, RTRRead: true}, SetupError{"enhanced flag", "false", "true with an IRD, ORD or ready-to-receive option"}},
		{SetupFrame{Revision: Revision2, Enhanced: true, IRD: 16384}, SetupError{"IRD", "16384", "at most 16383"}},
		{SetupFrame{Revision: Revision2, Enhanced: true, ORD: 65535}, SetupError{"ORD", "65535", "at most 16383"}},
		{SetupFrame{Revision: Revision1, PrivateData: make([]byte, 513)}, SetupError{"private data length", "513", "at most 512"}},
		{SetupFrame{Revision: Revision2, Enhanced: true, PrivateData: make([]byte, 509)}, SetupError{"private data length", "509", "at most 508"}},
	} {
		b, err := AppendSetup([]byte("before"), &tc.frame)
		require.Equal(t, &tc.want, err)
		require.Equal(t, "before", string(b))
	}
}

func TestUnlawfulSetupFrameIsRefused(t *testing.T) {
	const keys = `"MPA ID Req Frame" or "MPA ID Rep Frame"`
	for _, tc := range []struct {
		wire string
		want SetupError
	}{
		{"G", SetupError{"key", `"G"`, keys}},
		{"GET / HTTP/1.1\r\nHost: x\r\n\r\n", SetupError{"key", `"GET / HTTP/1.1\r\n"`, keys}},
		{"\x16\x03\x01", SetupError{"key", `"\x16\x03\x01"`, keys}},
		{"MPA ID Rex", SetupError{"key", `"MPA ID Rex"`, keys}},
		{"MPA ID Req Frame\x00\x00\x00\x00", SetupError{"revision", "0", "1 or 2"}},
		{"MPA ID Req Frame\x10\x03\x00\x00", SetupError{"revision", "3", "1 or 2"}},
		{"MPA ID Req Frame\x00\x01\x02\x01", SetupError{"private data length", "513", "at most 512"}},
		{"MPA ID Rep Frame\x10\x02\xff\xff", SetupError{"private data length", "65535", "at most 512"}},
		{"MPA ID Rep Frame\x10\x02\x00\x03abc", SetupError{"private data length", "3", "at least 4 in an enhanced frame"}},
	} {
		f, n, err := ParseSetup([]byte(tc.wire))
		require.Equal(t, &tc.want, err)
		require.Zero(t, f)
		require.Zero(t, n)
	}
	require.EqualError(t, &SetupError{"revision", "3", "1 or 2"}, "iwarp: MPA set-up frame: revision is 3, must be 1 or 2")
}
