package wire

import (
	"encoding/binary"
	"hash/crc32"
)

// Sizes of an FPDU's parts (RFC 5044 section 4.1).
const (
	FPDUHeaderLen = 2 // the ULPDU length
	CRCLen        = 4 // the CRC field, present even when CRCs are off
	MaxPadLen     = 3
	MaxULPDU      = 1<<16 - 1 // the most that the length field can say

	MaxTrailerLen = MaxPadLen + CRCLen
	MaxFPDU       = (FPDUHeaderLen+MaxULPDU+MaxPadLen)&^3 + CRCLen
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// PadLen returns how many zero bytes follow a ULPDU of the given length, so that the FPDU is a multiple of 4 bytes long.
func PadLen(ulpdu int) int { return -(FPDUHeaderLen + ulpdu) & 3 }

// TrailerLen returns the length of pad and CRC field after a ULPDU of the given length.
func TrailerLen(ulpdu int) int { return PadLen(ulpdu) + CRCLen }

// FPDULen returns the length of the whole FPDU around a ULPDU of the given length. No markers are counted.
func FPDULen(ulpdu int) int { return FPDUHeaderLen + ulpdu + TrailerLen(ulpdu) }

// ULPDUFor returns the length of the largest ULPDU whose FPDU fits into one TCP segment of mss bytes, without markers
// (RFC 5044 section 4.5's MULPDU), or 0 if none fits.
func ULPDUFor(mss int) int { return min(max(mss&^3-FPDUHeaderLen-CRCLen, 0), MaxULPDU) }

// PutFPDUHeader writes the length field of an FPDU to b[:FPDUHeaderLen].
func PutFPDUHeader(b []byte, ulpdu int) { binary.BigEndian.PutUint16(b, uint16(ulpdu)) }

// FPDUHeader returns the ULPDU length in b[:FPDUHeaderLen]. Every value is possible; RFC 5041 needs at least a DDP header.
func FPDUHeader(b []byte) (ulpdu int) { return int(binary.BigEndian.Uint16(b)) }

// UpdateCRC adds p to a running CRC32C, which starts at 0. An FPDU's CRC covers the length field, the ULPDU and the pad
// (RFC 5044 section 4.4); [PutTrailer] and [CheckCRC] add the pad themselves.
func UpdateCRC(crc uint32, p []byte) uint32 { return crc32.Update(crc, castagnoli, p) }

// PutTrailer writes the pad and the CRC field that follow a ULPDU of the given length to b and returns their length, at most
// MaxTrailerLen. crc is the running CRC over the length field and the ULPDU. With useCRC false the field is zero, as siw
// sends it; RFC 5044 lets the receiver ignore it.
func PutTrailer(b []byte, ulpdu int, useCRC bool, crc uint32) int {
	pad := PadLen(ulpdu)
	clear(b[:pad+CRCLen])
	if useCRC {
		// The field is not an integer in network order but the reflected CRC's bytes as they come, as in iSCSI.
		binary.LittleEndian.PutUint32(b[pad:], UpdateCRC(crc, b[:pad]))
	}
	return pad + CRCLen
}

// CheckCRC compares the CRC field at the end of trailer, which is pad and CRC field as received, with the running CRC over
// the length field and the ULPDU. A mismatch, or a trailer too short for a CRC, gives a *ProtocolError with CodeMPACRC. The
// pad's content is covered by the CRC and otherwise ignored: siw's is not always zero.
func CheckCRC(crc uint32, trailer []byte) error {
	pad := len(trailer) - CRCLen
	if pad < 0 || UpdateCRC(crc, trailer[:pad]) != binary.LittleEndian.Uint32(trailer[pad:]) {
		return errCRC
	}
	return nil
}

var errCRC = &ProtocolError{Code: CodeMPACRC}
