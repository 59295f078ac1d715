package qp

import (
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOpError(t *testing.T) {
	require.NoError(t, opError("poll", nil))
	for _, tc := range []struct {
		err   error
		errno syscall.Errno
		text  string
	}{
		{syscall.ENODEV, syscall.ENODEV, "qp: poll: no such device"},
		{io.ErrUnexpectedEOF, syscall.EIO, "qp: poll: unexpected EOF (input/output error)"},
		{errClosed, syscall.EBADF, "qp: poll: use of closed network connection (bad file descriptor)"},
		{&BusyError{Object: "pool", Buffers: 2}, syscall.EBUSY, "qp: poll: pool is in use: 2 buffer(s) not released"},
		{&FullError{Op: OpSend, Depth: 8}, syscall.ENOMEM,
			"qp: poll: all 8 entries of the send queue are outstanding: cannot allocate memory; poll for completions first"},
		{&LimitError{What: "depth", Value: 9, Limit: 8, Fix: "ask for less", Errno: syscall.EINVAL}, syscall.EINVAL,
			"qp: poll: depth: 9 is more than the limit of 8: invalid argument; ask for less"},
		{&LimitError{What: "depth", Value: 0, Limit: 1, Fix: "ask for more", Errno: syscall.EINVAL}, syscall.EINVAL,
			"qp: poll: depth: 0 is less than 1: invalid argument; ask for more"},
		{&AccountingError{QP: 3, Op: OpRecv, WRID: 16, Status: StatusWRFlushErr}, syscall.EPROTO,
			"qp: poll: QP 3: recv completion for WR 0x10 (work request flushed) does not match the oldest outstanding receive"},
	} {
		err := opError("poll", tc.err)
		require.ErrorIs(t, err, tc.err)
		requireErrno(t, err, tc.errno)
		require.Equal(t, tc.text, err.Error())
	}
	require.ErrorIs(t, errClosed, net.ErrClosed)
}
