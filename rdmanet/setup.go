package rdmanet

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"syscall"
)

// The connect request and its reply carry a greeting as private data, a
// rejection carries a refusal. SPEC.md section 3.
const (
	greetingMagic = "RDNT"
	refusalMagic  = "RDNR"
	greetingLen   = 16
	refusalLen    = 8  // without its text
	maxRefusal    = 56 // the text included

	protocolVersion = 1 // the highest that we speak
	oldestVersion   = 1 // the lowest
)

// Bounds of what a side may announce, and so of what Config may ask for.
const (
	minBufferSize = 1 << 10
	maxBufferSize = 1 << 20
	maxSlots      = 1 << 12

	// controlSlots are posted receives that data can't use: SPEC.md section 5
	// shows that HELLO, FIN and two CREDIT frames are the most that wait.
	controlSlots = 4
)

// greeting announces a side's receives.
type greeting struct {
	version, oldest uint8 // in a reply, version is the one chosen
	features        uint16
	recvSize        int // bytes that one posted receive takes, header included
	dataSlots       int // posted receives for DATA frames
}

func (g greeting) append(b []byte) []byte {
	b = append(b, greetingMagic...)
	b = append(b, g.version, g.oldest)
	b = binary.BigEndian.AppendUint16(b, g.features)
	b = binary.BigEndian.AppendUint32(b, uint32(g.recvSize))
	b = binary.BigEndian.AppendUint16(b, uint16(g.dataSlots))
	return append(b, 0, 0)
}

// parseGreeting takes bytes after the greeting: InfiniBand pads private data.
func parseGreeting(b []byte) (greeting, *refusal) {
	if len(b) < greetingLen || string(b[:4]) != greetingMagic {
		return greeting{}, refuse(reasonNotOurs, "the private data is not rdmanet's")
	}
	g := greeting{
		version:   b[4],
		oldest:    b[5],
		features:  binary.BigEndian.Uint16(b[6:]),
		recvSize:  int(binary.BigEndian.Uint32(b[8:])),
		dataSlots: int(binary.BigEndian.Uint16(b[12:])),
	}
	switch {
	case g.oldest > g.version || g.oldest > protocolVersion || g.version < oldestVersion:
		return g, refuse(reasonVersion, fmt.Sprintf("versions %d to %d, not %d to %d", g.oldest, g.version, oldestVersion, protocolVersion))
	case g.recvSize < headerLen+minBufferSize || g.recvSize > headerLen+maxBufferSize:
		return g, refuse(reasonBounds, fmt.Sprintf("receives of %d bytes", g.recvSize))
	case g.dataSlots < 1 || g.dataSlots > maxSlots:
		return g, refuse(reasonBounds, fmt.Sprintf("%d receives", g.dataSlots))
	}
	return g, nil
}

// answer is the greeting that accepts g.
func (g greeting) answer(mine greeting) greeting {
	mine.version = min(mine.version, g.version)
	return mine
}

// reason is why a connect request was rejected.
type reason uint16

const (
	reasonNotOurs   reason = 1
	reasonVersion   reason = 2
	reasonBounds    reason = 3
	reasonBacklog   reason = 4
	reasonResources reason = 5
	reasonClosing   reason = 6
)

func (r reason) String() string {
	switch r {
	case reasonNotOurs:
		return "not the rdmanet protocol"
	case reasonVersion:
		return "no common protocol version"
	case reasonBounds:
		return "parameters out of bounds"
	case reasonBacklog:
		return "backlog full"
	case reasonResources:
		return "out of resources"
	case reasonClosing:
		return "listener closed"
	}
	return fmt.Sprintf("reason %d", uint16(r))
}

// refusal is a rejection as private data, and as an error. It wraps
// ECONNREFUSED.
type refusal struct {
	reason reason
	text   string
}

func refuse(r reason, text string) *refusal { return &refusal{r, text} }

func (r *refusal) Error() string {
	if r.text == "" {
		return "refused: " + r.reason.String()
	}
	return "refused: " + r.reason.String() + ": " + r.text
}

func (r *refusal) Unwrap() error { return syscall.ECONNREFUSED }

func (r *refusal) append(b []byte) []byte {
	b = append(b, refusalMagic...)
	b = append(b, protocolVersion, oldestVersion)
	b = binary.BigEndian.AppendUint16(b, uint16(r.reason))
	return append(b, r.text[:min(len(r.text), maxRefusal-refusalLen)]...)
}

// parseRefusal returns nil for a rejection that is not ours.
func parseRefusal(b []byte) *refusal {
	if len(b) < refusalLen || string(b[:4]) != refusalMagic {
		return nil
	}
	text := b[refusalLen:min(len(b), maxRefusal)]
	if i := bytes.IndexByte(text, 0); i >= 0 { // InfiniBand's padding
		text = text[:i]
	}
	return refuse(reason(binary.BigEndian.Uint16(b[6:])), printable(text))
}

// printable makes a peer's text safe to log.
func printable(b []byte) string {
	return string(bytes.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return '?'
		}
		return r
	}, b))
}
