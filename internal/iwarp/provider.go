// Package iwarp is the embedded provider: RDMA in software, as iWARP over TCP
// (MPA, RFC 5044 and RFC 6581; DDP, RFC 5041; RDMAP, RFC 5040). It needs no
// device, no privileges and no cgo, and speaks to any iWARP peer.
//
// Nothing runs in the background for an idle connection. Progress is made by
// whoever polls or waits on the completion queue (rx.go) or posts (tx.go); only
// a full socket, connection set-up and connection end use goroutines. So an RDMA
// WRITE or READ of the peer's, too, is done while somebody here polls or waits.
//
// Lock order: id.mu → rx.mu → tx.mu → cq.mu, and id.mu → listener.mu. An id's
// events lock and then its channel's are innermost, and taken with any of them
// held, as is mr.remote. watcher.mu is taken with id.mu held at most.
package iwarp

import (
	"fmt"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// Name is the provider's name.
const Name = "iwarp"

func init() {
	verbs.Register(Name, func() (verbs.Provider, error) { return provider{}, nil })
}

type provider struct{}

func (provider) Name() string { return Name }

func (provider) NewEventChannel() (verbs.EventChannel, error) { return newEventChannel() }

// device stands in for an adapter; all connections share it.
type device struct{}

// maxMessage keeps message offsets well within their 32 bits.
const maxMessage = 1 << 30

// The other limits are memory's and bookkeeping's, not the protocol's.
var attr = verbs.DeviceAttr{MaxQPWR: 1 << 14, MaxSGE: 32, MaxCQE: 1 << 16, MaxInline: maxMessage, WaitPolls: true}

func (device) Name() string               { return Name }
func (device) Attr() verbs.DeviceAttr     { return attr }
func (device) AllocPD() (verbs.PD, error) { return &pd{}, nil }

func (device) CreateCQ(depth int) (verbs.CQ, error) {
	if depth < 1 || depth > attr.MaxCQE {
		return nil, fmt.Errorf("completion queue of %d entries (1 to %d): %w", depth, attr.MaxCQE, syscall.EINVAL)
	}
	return newCQ(depth), nil
}
