package wire

import (
	"encoding/binary"
	"fmt"
	"io"
)

// Code is what a Terminate message reports, in the order of its first 16 bits: layer(4), error type(4), error code(8).
type Code uint16

// The error codes of RFC 5040 section 4.8, RFC 5041 section 7.2, RFC 5044 section 8 and RFC 6581 section 8 (those from
// CodeMPALocalCatastrophic on).
const (
	CodeRDMAPLocalCatastrophic Code = 0x0000

	CodeRDMAPInvalidSTag          Code = 0x0100 // remote protection errors
	CodeRDMAPBaseBounds           Code = 0x0101
	CodeRDMAPAccess               Code = 0x0102
	CodeRDMAPSTagNotAssociated    Code = 0x0103
	CodeRDMAPTOWrap               Code = 0x0104
	CodeRDMAPProtectionInvalidate Code = 0x0109
	CodeRDMAPProtection           Code = 0x01ff

	CodeRDMAPVersion            Code = 0x0205 // remote operation errors
	CodeRDMAPOpcode             Code = 0x0206
	CodeRDMAPStreamCatastrophic Code = 0x0207
	CodeRDMAPGlobalCatastrophic Code = 0x0208
	CodeRDMAPCannotInvalidate   Code = 0x0209
	CodeRDMAPUnspecified        Code = 0x02ff

	CodeDDPLocalCatastrophic Code = 0x1000

	CodeDDPInvalidSTag       Code = 0x1100 // tagged buffer errors
	CodeDDPBaseBounds        Code = 0x1101
	CodeDDPSTagNotAssociated Code = 0x1102
	CodeDDPTOWrap            Code = 0x1103
	CodeDDPTaggedVersion     Code = 0x1104

	CodeDDPInvalidQN       Code = 0x1201 // untagged buffer errors
	CodeDDPNoBuffer        Code = 0x1202 // a Send found no posted receive
	CodeDDPMSNRange        Code = 0x1203
	CodeDDPInvalidMO       Code = 0x1204
	CodeDDPTooLong         Code = 0x1205 // a message does not fit into its receive
	CodeDDPUntaggedVersion Code = 0x1206

	CodeMPAConnectionLost    Code = 0x2001
	CodeMPACRC               Code = 0x2002
	CodeMPAMarker            Code = 0x2003
	CodeMPAInvalidSetup      Code = 0x2004
	CodeMPALocalCatastrophic Code = 0x2005
	CodeMPAInsufficientIRD   Code = 0x2006
	CodeMPANoMatchingRTR     Code = 0x2007
)

var codeNames = map[Code]string{
	CodeRDMAPInvalidSTag:          "invalid STag",
	CodeRDMAPBaseBounds:           "base or bounds violation",
	CodeRDMAPAccess:               "access rights violation",
	CodeRDMAPSTagNotAssociated:    "STag not associated with the stream",
	CodeRDMAPTOWrap:               "tagged offset wraps",
	CodeRDMAPProtectionInvalidate: "STag cannot be invalidated",
	CodeRDMAPProtection:           "unspecified",

	CodeRDMAPVersion:            "invalid RDMAP version",
	CodeRDMAPOpcode:             "unexpected opcode",
	CodeRDMAPStreamCatastrophic: "catastrophic for the stream",
	CodeRDMAPGlobalCatastrophic: "catastrophic for all streams",
	CodeRDMAPCannotInvalidate:   "STag cannot be invalidated",
	CodeRDMAPUnspecified:        "unspecified",

	CodeDDPInvalidSTag:       "invalid STag",
	CodeDDPBaseBounds:        "base or bounds violation",
	CodeDDPSTagNotAssociated: "STag not associated with the stream",
	CodeDDPTOWrap:            "tagged offset wraps",
	CodeDDPTaggedVersion:     "invalid DDP version",

	CodeDDPInvalidQN:       "invalid queue number",
	CodeDDPNoBuffer:        "invalid MSN, no buffer available",
	CodeDDPMSNRange:        "invalid MSN, out of range",
	CodeDDPInvalidMO:       "invalid message offset",
	CodeDDPTooLong:         "message too long for the buffer",
	CodeDDPUntaggedVersion: "invalid DDP version",

	CodeMPAConnectionLost:    "TCP connection closed or lost",
	CodeMPACRC:               "CRC mismatch",
	CodeMPAMarker:            "marker and ULPDU length disagree",
	CodeMPAInvalidSetup:      "invalid set-up frame",
	CodeMPALocalCatastrophic: "local catastrophic error",
	CodeMPAInsufficientIRD:   "insufficient IRD",
	CodeMPANoMatchingRTR:     "no matching ready-to-receive message",
}

// The layer and error type alone, and whether the type has codes of its own.
var typeNames = map[Code]struct {
	name  string
	coded bool
}{
	0x0000: {"RDMAP local catastrophic error", false},
	0x0100: {"RDMAP remote protection error", true},
	0x0200: {"RDMAP remote operation error", true},
	0x1000: {"DDP local catastrophic error", false},
	0x1100: {"DDP tagged buffer error", true},
	0x1200: {"DDP untagged buffer error", true},
	0x2000: {"MPA error", true},
}

// Layers of a Code.
const (
	LayerRDMAP = iota
	LayerDDP
	LayerLLP // MPA
)

// NewCode puts a code together from its parts; layer and etype have 4 bits.
func NewCode(layer, etype, ecode uint8) Code {
	return Code(layer&0xf)<<12 | Code(etype&0xf)<<8 | Code(ecode)
}

// Layer returns the layer that reports the error.
func (c Code) Layer() uint8 { return uint8(c >> 12) }

// EType returns the error type, which depends on the layer.
func (c Code) EType() uint8 { return uint8(c >> 8 & 0xf) }

// ECode returns the error code, which depends on the layer and the error type.
func (c Code) ECode() uint8 { return uint8(c) }

// Known reports whether one of the RFCs defines c.
func (c Code) Known() bool {
	_, named := codeNames[c]
	t, ok := typeNames[c&^0xff]
	return named || ok && !t.coded
}

func (c Code) String() string {
	t, ok := typeNames[c&^0xff]
	switch {
	case !ok:
		return fmt.Sprintf("layer %d, error type %d, code %#02x", c.Layer(), c.EType(), c.ECode())
	case !t.coded:
		return t.name
	case codeNames[c] == "":
		return fmt.Sprintf("%s: code %#02x", t.name, c.ECode())
	}
	return t.name + ": " + codeNames[c]
}

// ProtocolError reports input that breaks RFC 5040, 5041 or 5044. Code is what the Terminate message in answer should say.
type ProtocolError struct {
	Code   Code
	Detail string // what was seen, or empty
}

func (e *ProtocolError) Error() string {
	if e.Detail == "" {
		return "iwarp: " + e.Code.String()
	}
	return "iwarp: " + e.Code.String() + " (" + e.Detail + ")"
}

const (
	terminateLen = 4 // code, header control bits and reserved bits

	hdrctM = 0x80 // SegmentLen is valid
	hdrctD = 0x40 // SegmentLen and DDPHeader are present
	hdrctR = 0x20 // RDMAPHeader is present

	// The same three as siw sends them on a little-endian host.
	siwM, siwD, siwR = 0x01, 0x02, 0x04
)

// TerminateHeader is the DDP header in front of every Terminate message: the first and only message of its queue.
var TerminateHeader = UntaggedHeader{Last: true, Opcode: OpTerminate, QN: QueueTerminate, MSN: 1}

// MaxTerminateLen is the length of the longest Terminate payload.
const MaxTerminateLen = terminateLen + 2 + UntaggedHeaderLen + ReadRequestLen

// Terminate is the payload of a Terminate message (RFC 5040 section 4.8), the last message that either side sends.
type Terminate struct {
	Code Code

	// DDPHeader is the header of the segment at fault, TaggedHeaderLen or UntaggedHeaderLen bytes as its own T bit says (bit
	// D), or nil. It is kept raw, because a segment may be at fault for its header. After parsing it aliases the input.
	DDPHeader []byte

	// SegmentLen is the length of that segment, if SegmentLenValid (bit M). Both need a DDPHeader.
	SegmentLen      uint16
	SegmentLenValid bool

	// RDMAPHeader is the ReadRequestLen bytes of the Read Request at fault (bit R), or nil.
	RDMAPHeader []byte
}

// NewTerminate makes the message that reports code, caused by a received ULPDU (RFC 5040 section 4.8's table of which errors
// carry which headers). header is the ULPDU or as much of it as is at hand, and is aliased; ulpdu is the ULPDU's length.
// Headers that are cut short, or whose layout is in doubt since a version or an opcode is wrong, are left out.
func NewTerminate(code Code, header []byte, ulpdu int) Terminate {
	t := Terminate{Code: code}
	switch code {
	case CodeRDMAPLocalCatastrophic, CodeRDMAPVersion, CodeRDMAPOpcode, CodeDDPTaggedVersion, CodeDDPUntaggedVersion:
		return t
	}
	if code.Layer() == LayerLLP || len(header) < 2 || len(header) < ddpHeaderLen(header[0]) {
		return t
	}
	n := ddpHeaderLen(header[0])
	t.DDPHeader, t.SegmentLen, t.SegmentLenValid = header[:n:n], uint16(ulpdu), true
	isRead := n == UntaggedHeaderLen && Opcode(header[1]&opcodeMask) == OpReadRequest
	if isRead && code.Layer() == LayerRDMAP && len(header) >= n+ReadRequestLen {
		t.RDMAPHeader = header[n : n+ReadRequestLen : n+ReadRequestLen]
	}
	return t
}

func ddpHeaderLen(control byte) int {
	if control&ddpTagged != 0 {
		return TaggedHeaderLen
	}
	return UntaggedHeaderLen
}

// AppendTerminate appends t to dst, which already holds [TerminateHeader]. Headers of a wrong length, or a segment length
// without a header, give an error and dst unchanged.
func AppendTerminate(dst []byte, t *Terminate) ([]byte, error) {
	switch {
	case len(t.DDPHeader) > 0 && len(t.DDPHeader) != ddpHeaderLen(t.DDPHeader[0]):
		return dst, fmt.Errorf("iwarp: terminate: DDP header of %d bytes, must be %d", len(t.DDPHeader), ddpHeaderLen(t.DDPHeader[0]))
	case len(t.RDMAPHeader) != 0 && len(t.RDMAPHeader) != ReadRequestLen:
		return dst, fmt.Errorf("iwarp: terminate: RDMAP header of %d bytes, must be %d", len(t.RDMAPHeader), ReadRequestLen)
	case len(t.DDPHeader) == 0 && (t.SegmentLenValid || t.SegmentLen != 0):
		return dst, fmt.Errorf("iwarp: terminate: segment length %d without a DDP header", t.SegmentLen)
	}
	hdrct := byte(0)
	setBit(&hdrct, hdrctM, t.SegmentLenValid)
	setBit(&hdrct, hdrctD, len(t.DDPHeader) > 0)
	setBit(&hdrct, hdrctR, len(t.RDMAPHeader) > 0)
	dst = binary.BigEndian.AppendUint16(dst, uint16(t.Code))
	dst = append(dst, hdrct, 0)
	if len(t.DDPHeader) > 0 {
		dst = binary.BigEndian.AppendUint16(dst, t.SegmentLen)
		dst = append(dst, t.DDPHeader...)
	}
	return append(dst, t.RDMAPHeader...), nil
}

// ParseTerminate parses the payload of a Terminate message. A payload too short for what it says it holds gives an error that
// wraps io.ErrUnexpectedEOF, along with the Code if that much is there: the connection is over either way, and the code is
// what a user wants to know. Reserved bits and trailing bytes are ignored.
//
// It also reads what siw sends. On a little-endian host siw swaps layer and error type and puts the header control bits at the
// other end of their byte, and it sets R for a Send, which has no RDMAP header. Swapped codes are recognised by the control
// bits; without a header, by whether the RFCs define the code one way or the other, which leaves 0x2005, 0x2006 and 0x2007 apart
// from 0x0205, 0x0206 and 0x0207 to chance: the order of the RFCs wins.
func ParseTerminate(b []byte) (Terminate, error) {
	if len(b) < terminateLen {
		return Terminate{}, shortTerminate(len(b))
	}
	t := Terminate{Code: Code(binary.BigEndian.Uint16(b))}
	hdrct, swapped := b[2], NewCode(t.Code.EType(), t.Code.Layer(), t.Code.ECode())
	m, d, r := hdrct&hdrctM != 0, hdrct&hdrctD != 0, hdrct&hdrctR != 0
	switch hasHeader := d || r; { // M alone means nothing
	case !hasHeader && hdrct&(siwM|siwD) == siwM|siwD: // siw sets both or none
		t.Code, m, d, r = swapped, true, true, hdrct&siwR != 0
	case !hasHeader && !t.Code.Known() && swapped.Known():
		t.Code = swapped
	}
	rest := b[terminateLen:]
	if d {
		if len(rest) < 3 || len(rest) < 2+ddpHeaderLen(rest[2]) {
			return Terminate{Code: t.Code}, shortTerminate(len(b))
		}
		n := 2 + ddpHeaderLen(rest[2])
		t.SegmentLen, t.SegmentLenValid = binary.BigEndian.Uint16(rest), m
		t.DDPHeader, rest = rest[2:n:n], rest[n:]
	}
	if r && (!d || Opcode(t.DDPHeader[1]&opcodeMask) == OpReadRequest) {
		if len(rest) < ReadRequestLen {
			return Terminate{Code: t.Code}, shortTerminate(len(b))
		}
		t.RDMAPHeader = rest[:ReadRequestLen:ReadRequestLen]
	}
	return t, nil
}

func shortTerminate(have int) error {
	return fmt.Errorf("iwarp: terminate message of %d bytes: %w", have, io.ErrUnexpectedEOF)
}

// TerminateError is the error of a connection that a Terminate message ended.
type TerminateError struct {
	Remote bool // the peer sent it; otherwise this side did
	Terminate
}

func (e *TerminateError) Error() string {
	if e.Remote {
		return "iwarp: terminate: " + e.Code.String() + ", reported by the peer"
	}
	return "iwarp: terminate: " + e.Code.String()
}
