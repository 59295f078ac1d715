// Package wire is the wire format of iWARP over TCP: MPA (RFC 5044, with RFC 6581's enhanced set-up), DDP (RFC 5041) and
// RDMAP (RFC 5040).
//
// A connection starts with one MPA set-up frame in each direction ([SetupFrame]). After that every byte belongs to an FPDU:
//
//	length(2) | DDP and RDMAP header(14 or 18) | payload | pad(0-3) | CRC(4)
//
// The package holds pure functions over byte slices. It does no I/O and starts no goroutine, and nothing on the path of an
// FPDU allocates. All integers are big endian, except the CRC.
package wire

import (
	"encoding/binary"
	"fmt"
	"io"
	"strings"
)

// Sizes and limits of a set-up frame (RFC 5044 section 7.1, RFC 6581 section 6).
const (
	SetupHeaderLen = 20  // key, flags, revision and private data length
	EnhancedLen    = 4   // the IRD/ORD words that begin the private data of an enhanced frame
	MaxPrivateData = 512 // bytes of private data in a frame, the IRD/ORD words included
	MaxDepth       = 1<<14 - 1

	// DepthUnspecified in IRD or ORD says that the sender wants no negotiation of read depths in the set-up.
	DepthUnspecified = MaxDepth
)

// The MPA revisions (RFC 5044 section 7.1.1, RFC 6581 section 6). Only Revision2 frames may be enhanced.
const (
	Revision1 = 1
	Revision2 = 2
)

const (
	requestKey = "MPA ID Req Frame"
	replyKey   = "MPA ID Rep Frame"

	flagMarkers  = 0x80
	flagCRC      = 0x40
	flagReject   = 0x20
	flagEnhanced = 0x10

	flagPeerToPeer = 0x8000 // in the IRD word
	flagRTRSend    = 0x4000 // in the IRD word
	flagRTRWrite   = 0x8000 // in the ORD word
	flagRTRRead    = 0x4000 // in the ORD word
)

// SetupFrame is an MPA Request Frame or an MPA Reply Frame (RFC 5044 section 7.1.1, RFC 6581 sections 5 and 6).
type SetupFrame struct {
	Reply    bool // a reply, not a request
	Markers  bool // M: the sender needs markers in what it receives
	CRC      bool // C: the sender wants CRCs; they are used if either side wants them
	Reject   bool // R: the connection is rejected; only in a reply
	Enhanced bool // S: IRD, ORD and the set-up options below are present; needs Revision2
	Revision uint8

	IRD, ORD                   uint16 // RDMA Reads the sender takes and issues at a time, at most MaxDepth
	PeerToPeer                 bool   // A: the requester sends a ready-to-receive message before the responder may send
	RTRSend, RTRWrite, RTRRead bool   // B, C, D: acceptable (request) or chosen (reply) ready-to-receive messages
	PrivateData                []byte // the ULP's, without the IRD/ORD words; after parsing it aliases the input
}

// MaxUserPrivateData returns how many bytes of PrivateData fit into f.
func (f *SetupFrame) MaxUserPrivateData() int {
	if f.Enhanced {
		return MaxPrivateData - EnhancedLen
	}
	return MaxPrivateData
}

// SetupError reports a set-up frame that cannot be sent or that a peer should not have sent.
type SetupError struct {
	Field string // the field, in RFC 5044's words
	Value string // what it holds
	Limit string // what it may hold
}

func (e *SetupError) Error() string {
	return fmt.Sprintf("iwarp: MPA set-up frame: %s is %s, must be %s", e.Field, e.Value, e.Limit)
}

func setupError(field string, value any, limit string) error {
	return &SetupError{Field: field, Value: fmt.Sprint(value), Limit: limit}
}

// AppendSetup appends f in wire format to dst. A frame that RFC 5044 or RFC 6581 does not allow gives a *SetupError and dst
// unchanged.
func AppendSetup(dst []byte, f *SetupFrame) ([]byte, error) {
	if err := f.validate(); err != nil {
		return dst, err
	}
	key, flags, pdLen := requestKey, byte(0), len(f.PrivateData)
	if f.Reply {
		key = replyKey
	}
	setBit(&flags, flagMarkers, f.Markers)
	setBit(&flags, flagCRC, f.CRC)
	setBit(&flags, flagReject, f.Reject)
	setBit(&flags, flagEnhanced, f.Enhanced)
	if f.Enhanced {
		pdLen += EnhancedLen
	}
	dst = append(dst, key...)
	dst = append(dst, flags, f.Revision)
	dst = binary.BigEndian.AppendUint16(dst, uint16(pdLen))
	if f.Enhanced {
		ird, ord := f.IRD, f.ORD
		setBit(&ird, flagPeerToPeer, f.PeerToPeer)
		setBit(&ird, flagRTRSend, f.RTRSend)
		setBit(&ord, flagRTRWrite, f.RTRWrite)
		setBit(&ord, flagRTRRead, f.RTRRead)
		dst = binary.BigEndian.AppendUint16(dst, ird)
		dst = binary.BigEndian.AppendUint16(dst, ord)
	}
	return append(dst, f.PrivateData...), nil
}

func (f *SetupFrame) validate() error {
	hasOptions := f.IRD != 0 || f.ORD != 0 || f.PeerToPeer || f.RTRSend || f.RTRWrite || f.RTRRead
	switch {
	case f.Revision != Revision1 && f.Revision != Revision2:
		return setupError("revision", f.Revision, "1 or 2")
	case f.Reject && !f.Reply:
		return setupError("reject flag", f.Reject, "false in a request")
	case f.Enhanced && f.Revision != Revision2:
		return setupError("revision", f.Revision, "2 in an enhanced frame")
	case !f.Enhanced && hasOptions:
		return setupError("enhanced flag", f.Enhanced, "true with an IRD, ORD or ready-to-receive option")
	case f.IRD > MaxDepth:
		return setupError("IRD", f.IRD, fmt.Sprint("at most ", MaxDepth))
	case f.ORD > MaxDepth:
		return setupError("ORD", f.ORD, fmt.Sprint("at most ", MaxDepth))
	case len(f.PrivateData) > f.MaxUserPrivateData():
		return setupError("private data length", len(f.PrivateData), fmt.Sprint("at most ", f.MaxUserPrivateData()))
	}
	return nil
}

// ParseSetupHeader parses the first SetupHeaderLen bytes of a set-up frame, so that a reader learns how many bytes follow:
// pdLen, at most MaxPrivateData, the IRD/ORD words included. The fields of f that those bytes hold are still zero; give the
// whole frame to [ParseSetup] to get them.
//
// A wrong key is reported as soon as the bytes at hand show it, as a *SetupError. Right bytes, but fewer than SetupHeaderLen,
// give an error that wraps io.ErrUnexpectedEOF. Reserved bits, a request's reject flag and a Revision1 frame's enhanced flag
// are ignored, as the RFCs ask.
func ParseSetupHeader(b []byte) (f SetupFrame, pdLen int, err error) {
	key := string(b[:min(len(b), len(requestKey))])
	if !strings.HasPrefix(requestKey, key) && !strings.HasPrefix(replyKey, key) {
		return SetupFrame{}, 0, setupError("key", fmt.Sprintf("%q", key), fmt.Sprintf("%q or %q", requestKey, replyKey))
	}
	if len(b) < SetupHeaderLen {
		return SetupFrame{}, 0, shortSetup(len(b), SetupHeaderLen)
	}
	f.Reply = key == replyKey
	flags := b[16]
	f.Revision = b[17]
	f.Markers = flags&flagMarkers != 0
	f.CRC = flags&flagCRC != 0
	f.Reject = f.Reply && flags&flagReject != 0
	f.Enhanced = f.Revision == Revision2 && flags&flagEnhanced != 0
	pdLen = int(binary.BigEndian.Uint16(b[18:]))
	switch {
	case f.Revision != Revision1 && f.Revision != Revision2:
		return SetupFrame{}, 0, setupError("revision", f.Revision, "1 or 2")
	case pdLen > MaxPrivateData:
		return SetupFrame{}, 0, setupError("private data length", pdLen, fmt.Sprint("at most ", MaxPrivateData))
	case f.Enhanced && pdLen < EnhancedLen:
		return SetupFrame{}, 0, setupError("private data length", pdLen, fmt.Sprint("at least ", EnhancedLen, " in an enhanced frame"))
	}
	return f, pdLen, nil
}

// ParseSetup parses the set-up frame at the start of b and returns it with its length in bytes. It fails as
// [ParseSetupHeader] does, and with an error that wraps io.ErrUnexpectedEOF as long as the private data is incomplete.
func ParseSetup(b []byte) (f SetupFrame, consumed int, err error) {
	f, pdLen, err := ParseSetupHeader(b)
	if err != nil {
		return SetupFrame{}, 0, err
	}
	consumed = SetupHeaderLen + pdLen
	if len(b) < consumed {
		return SetupFrame{}, 0, shortSetup(len(b), consumed)
	}
	pd := b[SetupHeaderLen:consumed:consumed]
	if f.Enhanced {
		ird, ord := binary.BigEndian.Uint16(pd), binary.BigEndian.Uint16(pd[2:])
		f.IRD, f.PeerToPeer, f.RTRSend = ird&MaxDepth, ird&flagPeerToPeer != 0, ird&flagRTRSend != 0
		f.ORD, f.RTRWrite, f.RTRRead = ord&MaxDepth, ord&flagRTRWrite != 0, ord&flagRTRRead != 0
		pd = pd[EnhancedLen:]
	}
	if len(pd) > 0 {
		f.PrivateData = pd
	}
	return f, consumed, nil
}

func shortSetup(have, want int) error {
	return fmt.Errorf("iwarp: MPA set-up frame: %d of %d bytes: %w", have, want, io.ErrUnexpectedEOF)
}

func setBit[T byte | uint16](v *T, bit T, on bool) {
	if on {
		*v |= bit
	}
}
