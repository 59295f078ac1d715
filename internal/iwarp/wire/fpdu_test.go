package wire

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// The examples of RFC 3720 appendix B.4, whose CRC is MPA's.
func TestCRCKnownAnswers(t *testing.T) {
	ascending, descending := make([]byte, 32), make([]byte, 32)
	for i := range ascending {
		ascending[i], descending[i] = byte(i), byte(31-i)
	}
	for _, tc := range []struct {
		data []byte
		wire []byte
	}{
		{make([]byte, 32), []byte{0xaa, 0x36, 0x91, 0x8a}},
		{bytes.Repeat([]byte{0xff}, 32), []byte{0x43, 0xab, 0xa8, 0x62}},
		{ascending, []byte{0x4e, 0x79, 0xdd, 0x46}},
		{descending, []byte{0x5c, 0xdb, 0x3f, 0x11}},
	} {
		// 30 bytes of ULPDU behind 2 of length: no pad.
		crc := UpdateCRC(UpdateCRC(0, tc.data[:2]), tc.data[2:])
		var trailer [MaxTrailerLen]byte
		require.Equal(t, CRCLen, PutTrailer(trailer[:], 30, true, crc))
		require.Equal(t, tc.wire, trailer[:CRCLen])
		require.NoError(t, CheckCRC(crc, trailer[:CRCLen]))
	}
}

func TestFPDUSizes(t *testing.T) {
	for _, tc := range []struct{ ulpdu, pad, fpdu int }{
		{0, 2, 8}, {1, 1, 8}, {2, 0, 8}, {3, 3, 12}, {14, 0, 20}, {18, 0, 24}, {118, 0, 124}, {65474, 0, 65480}, {MaxULPDU, 3, MaxFPDU},
	} {
		require.Equal(t, tc.pad, PadLen(tc.ulpdu))
		require.Equal(t, tc.pad+CRCLen, TrailerLen(tc.ulpdu))
		require.Equal(t, tc.fpdu, FPDULen(tc.ulpdu))
		var b [FPDUHeaderLen]byte
		PutFPDUHeader(b[:], tc.ulpdu)
		require.Equal(t, tc.ulpdu, FPDUHeader(b[:]))
	}
	for _, tc := range []struct{ mss, ulpdu int }{{0, 0}, {5, 0}, {8, 2}, {11, 2}, {1448, 1442}, {1460, 1454}, {65483, 65474}, {1 << 20, MaxULPDU}} {
		require.Equal(t, tc.ulpdu, ULPDUFor(tc.mss), "MSS %d", tc.mss)
	}
	for mss := 8; mss < 65540; mss++ {
		n := ULPDUFor(mss)
		require.LessOrEqual(t, FPDULen(n), mss)
		require.Greater(t, FPDULen(n+1), mss)
	}
}

func TestTrailerPadsWithZerosAndProtectsEveryBit(t *testing.T) {
	for ulpdu := 30; ulpdu < 34; ulpdu++ {
		fpdu := bytes.Repeat([]byte{0xee}, FPDULen(ulpdu))
		PutFPDUHeader(fpdu, ulpdu)
		covered := fpdu[:FPDUHeaderLen+ulpdu]
		trailer := fpdu[len(covered):]

		require.Equal(t, len(trailer), PutTrailer(trailer, ulpdu, false, 0))
		require.Equal(t, make([]byte, len(trailer)), trailer, "CRC off")

		require.Equal(t, len(trailer), PutTrailer(trailer, ulpdu, true, UpdateCRC(0, covered)))
		require.Equal(t, make([]byte, PadLen(ulpdu)), trailer[:PadLen(ulpdu)])
		require.NoError(t, CheckCRC(UpdateCRC(0, covered), trailer))
		for bit := range len(fpdu) * 8 {
			fpdu[bit/8] ^= 1 << (bit % 8)
			var e *ProtocolError
			require.ErrorAs(t, CheckCRC(UpdateCRC(0, covered), trailer), &e)
			require.Equal(t, CodeMPACRC, e.Code)
			fpdu[bit/8] ^= 1 << (bit % 8)
		}
	}
	require.EqualError(t, CheckCRC(0, make([]byte, CRCLen-1)), "iwarp: MPA error: CRC mismatch")
}

func TestFramingDoesNotAllocate(t *testing.T) {
	b := make([]byte, 64)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		PutFPDUHeader(b, 21)
		crc := UpdateCRC(0, b[:2+21])
		n := PutTrailer(b[2+21:], 21, true, crc)
		if CheckCRC(crc, b[2+21:2+21+n]) != nil || FPDUHeader(b) != 21 {
			panic("broken")
		}
		b[2+21+n-1] ^= 1
		if CheckCRC(crc, b[2+21:2+21+n]) == nil {
			panic("broken")
		}
	}))
}
