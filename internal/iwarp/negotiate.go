package iwarp

import (
	"fmt"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// What the two set-up frames of a connection settle (RFC 5044 section 7.1, RFC
// 6581 sections 6 and 9).

// agreed is the outcome, as one side sees it.
type agreed struct {
	crc       bool
	ird, ord  int  // RDMA READs at a time: the peer's, ours
	awaitPeer bool // we may not send before the peer has
	asked     bool // the peer may send RDMA READs
	dialed    bool // the request was ours
}

// accepting returns the reply that accepts req, and what is agreed with it.
func accepting(req wire.SetupFrame, p verbs.ConnParam) (wire.SetupFrame, agreed, error) {
	a := agreed{crc: req.CRC || p.CRC, ird: int(p.ResponderResources), ord: int(p.InitiatorDepth)}
	a.asked = a.ird > 0 && mayRead(req)
	f := wire.SetupFrame{CRC: a.crc, PrivateData: p.PrivateData}
	if req.Enhanced {
		a.ord = lowered(a.ord, req.IRD)
		f.IRD, f.ORD = uint16(a.ird), uint16(a.ord)
		a.awaitPeer = chooseRTR(&f, req)
	}
	reply, err := replyTo(req, f)
	return reply, a, err
}

// mayRead reports whether the sender of a set-up frame may send RDMA READs.
func mayRead(f wire.SetupFrame) bool { return !f.Enhanced || f.ORD > 0 }

// lowered returns our ORD as far as the peer's IRD allows it (RFC 6581 section
// 9.1).
func lowered(ord int, ird uint16) int {
	if ird == wire.DepthUnspecified { // it is settled elsewhere
		return ord
	}
	return min(ord, int(ird))
}

// chooseRTR answers a peer that wants the peer-to-peer mode (RFC 6581 section
// 9.2), in which its first message says that it is ready and we send nothing
// before. It reports whether the peer does. That message has no bytes. We like
// best an RDMA WRITE, which costs nothing; an RDMA READ needs IRD, and a Send
// would use up a receive, so it is never chosen. To a peer that offers nothing
// better we propose the WRITE, as siw does; the peer may end the connection then
// (RFC 6581 section 8, no matching RTR option).
func chooseRTR(f *wire.SetupFrame, req wire.SetupFrame) bool {
	if !req.PeerToPeer {
		return false
	}
	f.PeerToPeer = true
	f.RTRRead = !req.RTRWrite && req.RTRRead && f.IRD > 0
	f.RTRWrite = !f.RTRRead
	return true
}

// accepted is what is agreed by the reply to our request for p. A peer that
// insists on more RDMA READs at a time than we answer gets a Terminate.
func accepted(p verbs.ConnParam, reply wire.SetupFrame) (agreed, error) {
	a := agreed{crc: p.CRC || reply.CRC, ird: int(p.ResponderResources), ord: int(p.InitiatorDepth), dialed: true}
	a.asked = a.ird > 0 && mayRead(reply)
	if !reply.Enhanced {
		return a, nil
	}
	a.ord = lowered(a.ord, reply.IRD)
	if int(reply.ORD) > a.ird && reply.ORD != wire.DepthUnspecified {
		return a, &wire.ProtocolError{Code: wire.CodeMPAInsufficientIRD, Detail: fmt.Sprintf("the peer's ORD is %d, our IRD %d", reply.ORD, a.ird)}
	}
	return a, nil
}
