// Package verbs is the interface that an RDMA provider implements, and all that
// packages cm and qp know of one. Its terms and rules are those of librdmacm and
// libibverbs; where a method names a manual page, the page is the contract.
//
// A provider moves work requests and reports events. Accounting, busy checks,
// typed errors and waiting with a context are done once, in qp and cm, and a
// provider may rely on them: it is never asked to destroy what is in use.
package verbs

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"
)

// Provider is one way to do RDMA: a kernel device, or software.
type Provider interface {
	// Name is the name users choose it by, such as "iwarp".
	Name() string
	// NewEventChannel is rdma_create_event_channel(3).
	NewEventChannel() (EventChannel, error)
}

// EventChannel is an rdma_event_channel. Its methods may be called concurrently.
type EventChannel interface {
	// File is the channel's descriptor: non-blocking, registered with the
	// runtime's netpoller, readable while an event waits. The channel owns it.
	File() *os.File
	// NewID is rdma_create_id(3) in port space RDMA_PS_TCP.
	NewID() (ID, error)
	// GetEvent is rdma_get_cm_event(3) on a non-blocking channel: it returns
	// EAGAIN when no event waits.
	GetEvent() (*Event, error)
	// AckEvent is rdma_ack_cm_event(3).
	AckEvent(*Event) error
	// Close is rdma_destroy_event_channel(3).
	Close() error
}

// ID is an rdma_cm_id. The asynchronous methods return once the operation has
// begun; its result is an Event. Destroy cancels what has begun.
type ID interface {
	Bind(netip.AddrPort) error                                        // rdma_bind_addr(3)
	Listen(backlog int) error                                         // rdma_listen(3)
	ResolveAddr(src, dst netip.AddrPort, timeout time.Duration) error // rdma_resolve_addr(3), asynchronous
	ResolveRoute(timeout time.Duration) error                         // rdma_resolve_route(3), asynchronous
	CreateQP(pd PD, cq CQ, want QPCap) (QP, error)                    // rdma_create_qp(3)
	Connect(ConnParam) error                                          // rdma_connect(3), asynchronous
	Accept(ConnParam) error                                           // rdma_accept(3), asynchronous
	Reject(privateData []byte) error                                  // rdma_reject(3)
	Disconnect() error                                                // rdma_disconnect(3)
	Migrate(EventChannel) error                                       // rdma_migrate_id(3)
	Destroy() error                                                   // rdma_destroy_id(3)
	LocalAddr() netip.AddrPort                                        // rdma_get_local_addr(3)
	RemoteAddr() netip.AddrPort                                       // rdma_get_peer_addr(3)
	// Device is nil until the id is bound to one: after EventAddrResolved, or
	// for an id that came with EventConnectRequest.
	Device() Device
	// SetKeepAlive sets how the provider proves that an idle peer is alive.
	SetKeepAlive(net.KeepAliveConfig) error
	// SetLogger names where a listening id reports peers that it turned away.
	SetLogger(*slog.Logger)
	// The options of rdma_set_option(3), each of which cm lets through while it can
	// have an effect.

	// SetAFOnly is RDMA_OPTION_ID_AFONLY: a listener on the IPv6 wildcard takes no
	// IPv4.
	SetAFOnly(bool) error
	// SetTOS is RDMA_OPTION_ID_TOS, a differentiated services field (RFC 2474).
	SetTOS(uint8) error
	// SetReuseAddr is RDMA_OPTION_ID_REUSEADDR: the address may be bound by others
	// that have set it.
	SetReuseAddr(bool) error
	// SetAckTimeout is RDMA_OPTION_ID_ACK_TIMEOUT: 4.096 µs·2^n, n at most
	// MaxAckTimeout, or no time-out for 0. Where TCP retransmits it is EOPNOTSUPP.
	SetAckTimeout(n uint8) error

	// Endpoint says over which device the id communicates. It reports false
	// while there is none, and always in software.
	Endpoint() (Endpoint, bool)
}

// MaxAckTimeout is the largest ack time-out of a queue pair, which has 5 bits.
const MaxAckTimeout = 31

// Device is an ibv_context: one adapter, or a software stand-in. Devices are
// comparable: the same adapter is the same value.
type Device interface {
	Name() string
	Attr() DeviceAttr
	AllocPD() (PD, error)
	// CreateCQ makes a completion queue of at least depth entries with a
	// completion channel of its own. It serves one QP.
	CreateCQ(depth int) (CQ, error)
}

// DeviceAttr holds the limits of a device that its users must respect, as
// ibv_query_device(3) reports them.
type DeviceAttr struct {
	MaxQPWR   int // work requests in one queue
	MaxSGE    int // scatter/gather entries of one send
	MaxCQE    int // entries of one completion queue
	MaxInline int // bytes of a send that may come from unregistered memory

	// WaitPolls says that CQ.Wait looks for completions before it parks, so that
	// there is no need to poll after Arm.
	WaitPolls bool
}

// DeviceInfo describes a device, for people.
type DeviceInfo struct {
	Name      string     // such as "mlx5_0"
	Transport string     // "InfiniBand", "RoCE" or "iWARP"
	Attr      DeviceAttr // the usable limits; zero if Err is set
	Ports     []Port
	Err       error // why the device can't be used
}

// Port is a port of a device.
type Port struct {
	Num       int
	State     string // "ACTIVE", "DOWN", ...
	LinkLayer string // "Ethernet" or "InfiniBand"
	Interface string // network interface, such as "eth0", or ""
	Addrs     []netip.Prefix
	GIDs      []GID
}

// GID is an entry of a port's GID table.
type GID struct {
	Index int
	Type  string     // "RoCE v2", "IB/RoCE v1", ...
	Addr  netip.Addr // IPv4 addresses are in IPv6 form
}

var deviceLists struct {
	sync.Mutex
	list []func() ([]DeviceInfo, error)
}

// RegisterDevices makes a provider's devices known to Devices. Providers that
// have devices call it from init. list also works while the provider doesn't:
// its error says what is missing to use any device, and how to get it.
func RegisterDevices(list func() ([]DeviceInfo, error)) {
	deviceLists.Lock()
	defer deviceLists.Unlock()
	deviceLists.list = append(deviceLists.list, list)
}

// Devices describes the devices of all providers. Those that exist come with an
// error, too.
func Devices() (all []DeviceInfo, err error) {
	deviceLists.Lock()
	lists := slices.Clone(deviceLists.list)
	deviceLists.Unlock()
	for _, list := range lists {
		infos, e := list()
		all, err = append(all, infos...), errors.Join(err, e)
	}
	return all, err
}

// Endpoint says over what an id communicates.
type Endpoint struct {
	Device    string // such as "mlx5_0"
	Port      int
	Transport string     // "InfiniBand", "RoCE" or "iWARP"
	LinkLayer string     // "Ethernet" or "InfiniBand"
	GID       netip.Addr // local; not valid for iWARP
}

// String returns all of it in one line, such as
// "rxe0 port 1, RoCE over Ethernet, GID ::ffff:10.0.0.1".
func (e Endpoint) String() string {
	s := fmt.Sprintf("%s port %d, %s", e.Device, e.Port, e.Transport)
	if e.LinkLayer != e.Transport {
		s += " over " + e.LinkLayer
	}
	if e.GID.IsValid() {
		s += ", GID " + e.GID.String()
	}
	return s
}

// PD is a protection domain, ibv_alloc_pd(3).
type PD interface {
	// RegMR is ibv_reg_mr(3). Peers of the domain's queue pairs may access the
	// region as far as access says: remote writing also needs local writing.
	RegMR(b []byte, access Access) (MR, error)
	Dealloc() error
}

// Access is a set of the access flags of ibv_reg_mr(3).
type Access uint32

// Access flags, with the values of enum ibv_access_flags.
const (
	AccessLocalWrite  Access = 1 << 0
	AccessRemoteWrite Access = 1 << 1
	AccessRemoteRead  Access = 1 << 2
)

// MR is a memory region, ibv_reg_mr(3).
type MR interface {
	LKey() uint32
	// RKey is the key that names the region to peers. It is of use to them as far
	// as the region grants remote access.
	RKey() uint32
	Access() Access
	Dereg() error
}

// CQ is a completion queue with its completion channel. Poll and Arm may be
// called by anyone at any time; Wait by one goroutine at a time.
type CQ interface {
	// Poll is ibv_poll_cq(3): it never blocks, and in software providers is
	// also what makes progress.
	Poll(wc []WC) (int, error)
	// Arm is ibv_req_notify_cq(3): the next completion (of a solicited
	// message, or an error, if solicitedOnly) ends a Wait. Poll again after it.
	Arm(solicitedOnly bool) error
	// Wait parks the goroutine until an armed CQ has a completion, until Wake,
	// or spuriously. It acks the completion events it takes.
	Wait() error
	// Wake ends the Wait in progress, or else the next one.
	Wake()
	Destroy() error
}

// QPCap is what a queue pair can hold, ibv_qp_cap.
type QPCap struct {
	SendWR    int // depth of the send queue
	RecvWR    int // depth of the receive queue
	SendSGE   int // entries in a send's gather list
	MaxInline int // bytes of a send taken from unregistered memory before PostSend returns
}

// QP is a reliable-connected queue pair. PostSend and PostRecv may run
// concurrently with each other, but not with themselves.
type QP interface {
	Num() uint32
	// Cap is what CreateQP granted, at least what was wanted except for
	// MaxInline, which is the provider's own.
	Cap() QPCap
	// PostSend is ibv_post_send(3). It takes the first n requests; err says
	// why the next was not taken. Memory of a request marked Inline is the
	// caller's again when PostSend returns.
	PostSend(wr []SendWR) (n int, err error)
	// PostRecv is ibv_post_recv(3).
	PostRecv(wr []RecvWR) (n int, err error)
	// SetError is ibv_modify_qp(3) to IBV_QPS_ERR: posted work is flushed. On a
	// live connection it is an abort.
	SetError() error
	Destroy() error
}

// SGE is a scatter/gather entry. LKey is ignored in a request marked Inline.
type SGE struct {
	Data []byte
	LKey uint32
}

// SendWR is a work request of the send queue, ibv_send_wr. WRID must be unique
// among the requests outstanding on the queue, which complete in order.
type SendWR struct {
	WRID      uint64
	SGL       []SGE // at most one entry for an RDMA READ, whose data it receives
	Signaled  bool  // report success; failures are always reported
	Solicited bool  // of a SEND: wake a receiver that armed for solicited completions
	Inline    bool  // not for an RDMA READ
	Op        WROp
	Fence     bool // begin only when the RDMA READs before it have completed

	// The peer's memory, for RDMA WRITE and RDMA READ. A request of no bytes
	// touches none, and these mean nothing.
	RemoteAddr uint64
	RKey       uint32
}

// WROp is what a request of the send queue does, an ibv_wr_opcode.
type WROp uint8

// The operations of a send queue.
const (
	WRSend      WROp = iota // takes a receive of the peer's
	WRRDMAWrite             // writes into the peer's memory, unnoticed by the peer
	WRRDMARead              // reads the peer's memory, unnoticed by the peer
)

func (o WROp) String() string {
	switch o {
	case WRSend:
		return "SEND"
	case WRRDMAWrite:
		return "RDMA WRITE"
	case WRRDMARead:
		return "RDMA READ"
	}
	return fmt.Sprintf("operation %d", uint8(o))
}

// RecvWR is a receive work request with room for one message.
type RecvWR struct {
	WRID uint64
	SGE  SGE
}

// WC is a work completion, ibv_wc.
type WC struct {
	WRID      uint64
	Op        Op
	Status    Status
	ByteLen   int    // received bytes, for a receive that succeeded
	VendorErr uint32 // the device's own code for a bad status
}

// Op says which queue a completion belongs to.
type Op uint8

// Completion kinds.
const (
	OpSend Op = iota
	OpRecv
)

func (o Op) String() string {
	if o == OpSend {
		return "send"
	}
	return "recv"
}

// ConnParam is what rdma_connect(3) and rdma_accept(3) are told.
type ConnParam struct {
	PrivateData []byte // at most MaxPrivateData bytes

	ResponderResources uint8 // RDMA READs that the peer may have outstanding; streams use none
	InitiatorDepth     uint8 // RDMA READs that this side may have outstanding; streams use none
	RetryCount         uint8 // transport retries, 0 to 7; Soft-RoCE takes 7 to be for ever
	RNRRetryCount      uint8 // receiver-not-ready retries, 0 to 7; 7 is for ever

	CRC         bool  // iWARP in software: ask for a CRC32C in each FPDU (RFC 5044)
	MPARevision uint8 // iWARP in software: 1 (RFC 5044) or 2 (RFC 6581); 0 means 2
}

// MaxPrivateData is the most private data that every link layer carries:
// InfiniBand's 56 bytes.
const MaxPrivateData = 56

// EventType is an rdma_cm_event_type, with the values of librdmacm.
type EventType int

// The events of rdma_get_cm_event(3).
const (
	EventAddrResolved EventType = iota
	EventAddrError
	EventRouteResolved
	EventRouteError
	EventConnectRequest
	EventConnectResponse
	EventConnectError
	EventUnreachable
	EventRejected
	EventEstablished
	EventDisconnected
	EventDeviceRemoval
	EventMulticastJoin
	EventMulticastError
	EventAddrChange
	EventTimewaitExit
)

var eventNames = [...]string{
	"ADDR_RESOLVED", "ADDR_ERROR", "ROUTE_RESOLVED", "ROUTE_ERROR", "CONNECT_REQUEST",
	"CONNECT_RESPONSE", "CONNECT_ERROR", "UNREACHABLE", "REJECTED", "ESTABLISHED",
	"DISCONNECTED", "DEVICE_REMOVAL", "MULTICAST_JOIN", "MULTICAST_ERROR", "ADDR_CHANGE",
	"TIMEWAIT_EXIT",
}

// String returns the event's name in librdmacm, without RDMA_CM_EVENT_.
func (t EventType) String() string {
	if t >= 0 && int(t) < len(eventNames) {
		return eventNames[t]
	}
	return "UNKNOWN"
}

// Event is an rdma_cm_event. PrivateData is a copy.
type Event struct {
	Type     EventType
	ID       ID // for EventConnectRequest the new id
	Listener ID // for EventConnectRequest the listening id
	// Err says why, for events that report a failure or a connection's
	// unorderly end; errors.As finds a syscall.Errno in it.
	Err         error
	PrivateData []byte
}
