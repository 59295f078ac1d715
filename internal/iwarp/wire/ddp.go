package wire

import (
	"encoding/binary"
	"fmt"
)

// Sizes of the combined DDP and RDMAP headers (RFC 5041 section 4, RFC 5040 sections 4.1 to 4.4).
const (
	TaggedHeaderLen   = 14
	UntaggedHeaderLen = 18
	ReadRequestLen    = 28 // after the untagged header
)

// The untagged queues (RFC 5040 section 4.1). Message sequence numbers count from 1 on each.
const (
	QueueSend = iota
	QueueReadRequest
	QueueTerminate
)

const (
	ddpTagged  = 0x80
	ddpLast    = 0x40
	ddpVersion = 0x01 // DV, 2 bits

	rdmapVersion = 0x01 << 6 // RV, 2 bits
	versionMask  = 0x03
	opcodeMask   = 0x0f
)

// Opcode says what an RDMAP message is (RFC 5040 section 4.1).
type Opcode uint8

const (
	OpWrite Opcode = iota
	OpReadRequest
	OpReadResponse
	OpSend
	OpSendInvalidate
	OpSendSolicited
	OpSendSolicitedInvalidate
	OpTerminate
)

var opcodeNames = [...]string{"RDMA Write", "RDMA Read Request", "RDMA Read Response", "Send", "Send with Invalidate",
	"Send with Solicited Event", "Send with Solicited Event and Invalidate", "Terminate"}

func (o Opcode) String() string {
	if o.Valid() {
		return opcodeNames[o]
	}
	return fmt.Sprintf("opcode %#x", uint8(o))
}

// Valid reports whether RFC 5040 defines o.
func (o Opcode) Valid() bool { return o <= OpTerminate }

// Tagged reports whether o travels in tagged DDP segments.
func (o Opcode) Tagged() bool { return o == OpWrite || o == OpReadResponse }

// IsSend reports whether o is one of the four Sends, which each consume a posted receive.
func (o Opcode) IsSend() bool { return o >= OpSend && o <= OpSendSolicitedInvalidate }

// Invalidates reports whether o names an STag to invalidate.
func (o Opcode) Invalidates() bool { return o == OpSendInvalidate || o == OpSendSolicitedInvalidate }

// Solicited reports whether o asks for a solicited event.
func (o Opcode) Solicited() bool { return o == OpSendSolicited || o == OpSendSolicitedInvalidate }

// Queue returns the untagged queue that o belongs to. It means nothing for a tagged opcode.
func (o Opcode) Queue() uint32 {
	switch o {
	case OpReadRequest:
		return QueueReadRequest
	case OpTerminate:
		return QueueTerminate
	}
	return QueueSend
}

// UntaggedHeader begins a segment of a Send, an RDMA Read Request or a Terminate (RFC 5041 section 4.3).
type UntaggedHeader struct {
	Last    bool // the message's last segment
	Opcode  Opcode
	InvSTag uint32 // sent only if Opcode.Invalidates
	QN      uint32 // Opcode.Queue
	MSN     uint32 // message sequence number: 1 for the queue's first message
	MO      uint32 // the segment's offset in the message, in bytes
}

// Put writes h to b[:UntaggedHeaderLen].
func (h UntaggedHeader) Put(b []byte) {
	_ = b[UntaggedHeaderLen-1]
	putControl(b, ddpVersion, h.Last, h.Opcode)
	inv := h.InvSTag
	if !h.Opcode.Invalidates() {
		inv = 0
	}
	binary.BigEndian.PutUint32(b[2:], inv)
	binary.BigEndian.PutUint32(b[6:], h.QN)
	binary.BigEndian.PutUint32(b[10:], h.MSN)
	binary.BigEndian.PutUint32(b[14:], h.MO)
}

// TaggedHeader begins a segment of an RDMA Write or an RDMA Read Response (RFC 5041 section 4.2).
type TaggedHeader struct {
	Last   bool // the message's last segment
	Opcode Opcode
	STag   uint32 // the receiver's buffer
	TO     uint64 // the segment's offset in that buffer
}

// Put writes h to b[:TaggedHeaderLen].
func (h TaggedHeader) Put(b []byte) {
	_ = b[TaggedHeaderLen-1]
	putControl(b, ddpTagged|ddpVersion, h.Last, h.Opcode)
	binary.BigEndian.PutUint32(b[2:], h.STag)
	binary.BigEndian.PutUint64(b[6:], h.TO)
}

func putControl(b []byte, ddp byte, last bool, op Opcode) {
	setBit(&ddp, ddpLast, last)
	b[0], b[1] = ddp, rdmapVersion|byte(op)&opcodeMask
}

// Header is a received header of either kind. The fields of the other kind are zero.
type Header struct {
	Tagged, Last bool
	Opcode       Opcode

	STag uint32 // tagged
	TO   uint64

	InvSTag uint32 // untagged
	QN      uint32
	MSN     uint32
	MO      uint32
}

// Len returns the header's length in bytes; the payload follows it.
func (h Header) Len() int {
	if h.Tagged {
		return TaggedHeaderLen
	}
	return UntaggedHeaderLen
}

// Put writes h to b[:h.Len()].
func (h Header) Put(b []byte) {
	if h.Tagged {
		TaggedHeader{Last: h.Last, Opcode: h.Opcode, STag: h.STag, TO: h.TO}.Put(b)
		return
	}
	UntaggedHeader{Last: h.Last, Opcode: h.Opcode, InvSTag: h.InvSTag, QN: h.QN, MSN: h.MSN, MO: h.MO}.Put(b)
}

// ParseHeader parses the header at the start of a ULPDU. b is the ULPDU, or at least its first UntaggedHeaderLen bytes.
// What it refuses it reports as a *ProtocolError with the code for the Terminate message: wrong versions, opcodes that are
// unknown, of the other kind or on the wrong queue, queues that do not exist, and ULPDUs shorter than their header. It does
// not know the connection, so sequence numbers, offsets and STags are the caller's to check. Reserved bits are ignored.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < TaggedHeaderLen || b[0]&ddpTagged == 0 && len(b) < UntaggedHeaderLen {
		return Header{}, &ProtocolError{Code: CodeRDMAPUnspecified, Detail: fmt.Sprintf("ULPDU of %d bytes", len(b))}
	}
	h := Header{Tagged: b[0]&ddpTagged != 0, Last: b[0]&ddpLast != 0, Opcode: Opcode(b[1] & opcodeMask)}
	if h.Tagged {
		h.STag = binary.BigEndian.Uint32(b[2:])
		h.TO = binary.BigEndian.Uint64(b[6:])
	} else {
		h.QN = binary.BigEndian.Uint32(b[6:])
		h.MSN = binary.BigEndian.Uint32(b[10:])
		h.MO = binary.BigEndian.Uint32(b[14:])
		if h.Opcode.Invalidates() {
			h.InvSTag = binary.BigEndian.Uint32(b[2:])
		}
	}
	if b[0]&versionMask == ddpVersion && b[1]&^0x3f == rdmapVersion && h.Opcode.Valid() &&
		h.Opcode.Tagged() == h.Tagged && (h.Tagged || h.QN == h.Opcode.Queue()) {
		return h, nil
	}
	return Header{}, h.fault(b[0]&versionMask, b[1]>>6)
}

// fault names what is wrong with h. The lower layer is judged first, since nothing above a wrong DDP version can be trusted.
func (h Header) fault(dv, rv byte) error {
	switch {
	case dv != ddpVersion && h.Tagged:
		return &ProtocolError{Code: CodeDDPTaggedVersion, Detail: fmt.Sprint("version ", dv)}
	case dv != ddpVersion:
		return &ProtocolError{Code: CodeDDPUntaggedVersion, Detail: fmt.Sprint("version ", dv)}
	case !h.Tagged && h.QN > QueueTerminate:
		return &ProtocolError{Code: CodeDDPInvalidQN, Detail: fmt.Sprint("queue ", h.QN)}
	case rv != rdmapVersion>>6:
		return &ProtocolError{Code: CodeRDMAPVersion, Detail: fmt.Sprint("version ", rv)}
	case h.Opcode.Valid() && !h.Tagged && !h.Opcode.Tagged():
		return &ProtocolError{Code: CodeRDMAPOpcode, Detail: fmt.Sprintf("%v on queue %d", h.Opcode, h.QN)}
	case h.Tagged:
		return &ProtocolError{Code: CodeRDMAPOpcode, Detail: fmt.Sprintf("%v in a tagged segment", h.Opcode)}
	}
	return &ProtocolError{Code: CodeRDMAPOpcode, Detail: fmt.Sprintf("%v in an untagged segment", h.Opcode)}
}

// ReadRequest is the payload of an RDMA Read Request (RFC 5040 section 4.4): copy Size bytes from the receiver's Source to the
// sender's Sink.
type ReadRequest struct {
	SinkSTag   uint32
	SinkTO     uint64
	Size       uint32
	SourceSTag uint32
	SourceTO   uint64
}

// Put writes r to b[:ReadRequestLen].
func (r ReadRequest) Put(b []byte) {
	_ = b[ReadRequestLen-1]
	binary.BigEndian.PutUint32(b, r.SinkSTag)
	binary.BigEndian.PutUint64(b[4:], r.SinkTO)
	binary.BigEndian.PutUint32(b[12:], r.Size)
	binary.BigEndian.PutUint32(b[16:], r.SourceSTag)
	binary.BigEndian.PutUint64(b[20:], r.SourceTO)
}

// ParseReadRequest parses the payload of an RDMA Read Request, which is exactly ReadRequestLen bytes; any other length gives
// a *ProtocolError.
func ParseReadRequest(b []byte) (ReadRequest, error) {
	switch {
	case len(b) < ReadRequestLen:
		return ReadRequest{}, &ProtocolError{Code: CodeRDMAPUnspecified, Detail: fmt.Sprintf("Read Request of %d bytes", len(b))}
	case len(b) > ReadRequestLen:
		return ReadRequest{}, &ProtocolError{Code: CodeDDPTooLong, Detail: fmt.Sprintf("Read Request of %d bytes", len(b))}
	}
	return ReadRequest{
		SinkSTag:   binary.BigEndian.Uint32(b),
		SinkTO:     binary.BigEndian.Uint64(b[4:]),
		Size:       binary.BigEndian.Uint32(b[12:]),
		SourceSTag: binary.BigEndian.Uint32(b[16:]),
		SourceTO:   binary.BigEndian.Uint64(b[20:]),
	}, nil
}
