package rdmanet

import (
	"encoding/binary"
	"fmt"
)

// Each SEND is one frame: a header and, for data, a payload. SPEC.md section 4.
const headerLen = 8

type frameType uint8

const (
	frameHello  frameType = 1 // the dialer's first frame: the connection is used
	frameData   frameType = 2
	frameCredit frameType = 3 // nothing but credits
	frameFin    frameType = 4 // no data follows
)

func (t frameType) String() string {
	switch t {
	case frameHello:
		return "HELLO"
	case frameData:
		return "DATA"
	case frameCredit:
		return "CREDIT"
	case frameFin:
		return "FIN"
	}
	return fmt.Sprintf("frame type %d", uint8(t))
}

// header begins every frame. Credits are returned on any of them.
type header struct {
	typ     frameType
	credits int // 0 to maxSlots
	length  int // of the payload, in bytes
}

func (h header) put(b []byte) {
	_ = b[headerLen-1]
	b[0] = byte(h.typ)
	b[1] = 0 // flags: none defined
	binary.BigEndian.PutUint16(b[2:], uint16(h.credits))
	binary.BigEndian.PutUint32(b[4:], uint32(h.length))
}

// setCredits changes the credits of a header that is in place.
func setCredits(b []byte, credits int) { binary.BigEndian.PutUint16(b[2:], uint16(credits)) }

// parseHeader checks a received frame by itself; credit.go checks it against the
// state of the connection.
func parseHeader(msg []byte) (header, error) {
	if len(msg) < headerLen {
		return header{}, protocolErrorf("frame of %d bytes, less than a header of %d", len(msg), headerLen)
	}
	h := header{
		typ:     frameType(msg[0]),
		credits: int(binary.BigEndian.Uint16(msg[2:])),
		length:  int(binary.BigEndian.Uint32(msg[4:])),
	}
	switch h.typ {
	case frameData:
		if h.length == 0 {
			return h, protocolErrorf("DATA without a payload")
		}
	case frameHello, frameCredit, frameFin:
		if h.length != 0 {
			return h, protocolErrorf("%v with a payload of %d bytes", h.typ, h.length)
		}
	default:
		return h, protocolErrorf("unknown %v", h.typ)
	}
	if h.length != len(msg)-headerLen {
		return h, protocolErrorf("%v announces %d bytes of payload and has %d", h.typ, h.length, len(msg)-headerLen)
	}
	return h, nil
}
