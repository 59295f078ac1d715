package qp

import "github.com/rdmanet/rdmanet/internal/verbs"

// The structures of libibverbs that callers fill in and read.
type (
	// SendWR is a work request of the send queue, ibv_send_wr: a SEND, RDMA WRITE or
	// RDMA READ.
	SendWR = verbs.SendWR
	// WROp is what a request of the send queue does, an ibv_wr_opcode.
	WROp = verbs.WROp
	// RecvWR is a receive work request, ibv_recv_wr.
	RecvWR = verbs.RecvWR
	// SGE is a scatter/gather entry, ibv_sge.
	SGE = verbs.SGE
	// WC is a work completion, ibv_wc.
	WC = verbs.WC
	// Op says which queue a completion belongs to.
	Op = verbs.Op
	// Status is an ibv_wc_status.
	Status = verbs.Status
	// Cap is what a queue pair can hold, ibv_qp_cap.
	Cap = verbs.QPCap
	// DeviceAttr holds the limits of a device, as ibv_query_device(3) reports them.
	DeviceAttr = verbs.DeviceAttr
	// Access is a set of the access flags of ibv_reg_mr(3).
	Access = verbs.Access
)

// Completion kinds.
const (
	OpSend = verbs.OpSend
	OpRecv = verbs.OpRecv
)

// The operations of a send queue. The zero value is a SEND.
const (
	WRSend      = verbs.WRSend
	WRRDMAWrite = verbs.WRRDMAWrite
	WRRDMARead  = verbs.WRRDMARead
)

// MaxRDMA is the most that one RDMA WRITE or RDMA READ moves, in bytes.
const MaxRDMA = 1 << 30

// Access flags. RegMR grants AccessLocalWrite and nothing else, RegRemoteMR what it
// is told.
const (
	AccessLocalWrite  = verbs.AccessLocalWrite
	AccessRemoteWrite = verbs.AccessRemoteWrite
	AccessRemoteRead  = verbs.AccessRemoteRead
)

// Completion statuses.
const (
	StatusSuccess        = verbs.StatusSuccess
	StatusLocLenErr      = verbs.StatusLocLenErr
	StatusLocQPOpErr     = verbs.StatusLocQPOpErr
	StatusLocEECOpErr    = verbs.StatusLocEECOpErr
	StatusLocProtErr     = verbs.StatusLocProtErr
	StatusWRFlushErr     = verbs.StatusWRFlushErr
	StatusMWBindErr      = verbs.StatusMWBindErr
	StatusBadRespErr     = verbs.StatusBadRespErr
	StatusLocAccessErr   = verbs.StatusLocAccessErr
	StatusRemInvReqErr   = verbs.StatusRemInvReqErr
	StatusRemAccessErr   = verbs.StatusRemAccessErr
	StatusRemOpErr       = verbs.StatusRemOpErr
	StatusRetryExcErr    = verbs.StatusRetryExcErr
	StatusRNRRetryExcErr = verbs.StatusRNRRetryExcErr
	StatusLocRDDViolErr  = verbs.StatusLocRDDViolErr
	StatusRemInvRDReqErr = verbs.StatusRemInvRDReqErr
	StatusRemAbortErr    = verbs.StatusRemAbortErr
	StatusInvEECNErr     = verbs.StatusInvEECNErr
	StatusInvEECStateErr = verbs.StatusInvEECStateErr
	StatusFatalErr       = verbs.StatusFatalErr
	StatusRespTimeoutErr = verbs.StatusRespTimeoutErr
	StatusGeneralErr     = verbs.StatusGeneralErr
)
