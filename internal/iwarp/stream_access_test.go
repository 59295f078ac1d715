package iwarp_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp"
	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/rdmanet"
)

// A stream grants its peer no access to memory. One that knows all about a region
// gets a Terminate.
func TestTheMemoryOfAStreamIsOutOfReach(t *testing.T) {
	write := func(stag uint32, to uint64) (wire.Header, []byte) {
		return wire.Header{Tagged: true, Last: true, Opcode: wire.OpWrite, STag: stag, TO: to}, []byte("forged")
	}
	read := func(stag uint32, to uint64) (wire.Header, []byte) { // IRD is 1, for those of no bytes
		b := make([]byte, wire.ReadRequestLen)
		wire.ReadRequest{Size: 6, SourceSTag: stag, SourceTO: to}.Put(b)
		return wire.Header{Last: true, Opcode: wire.OpReadRequest, QN: wire.QueueReadRequest, MSN: 1}, b
	}
	for _, c := range []struct {
		name string
		what func(r iwarp.Region) (wire.Header, []byte)
		code wire.Code
	}{
		{"RDMA Write", func(r iwarp.Region) (wire.Header, []byte) { return write(r.STag, r.Base) }, wire.CodeRDMAPAccess},
		{"RDMA Write, a guess", func(r iwarp.Region) (wire.Header, []byte) { return write(r.STag^0x80, r.Base) }, wire.CodeDDPInvalidSTag},
		{"RDMA Read Response", func(r iwarp.Region) (wire.Header, []byte) {
			h, b := write(r.STag, r.Base)
			h.Opcode = wire.OpReadResponse
			return h, b
		}, wire.CodeDDPInvalidSTag},
		{"RDMA Read Request", func(r iwarp.Region) (wire.Header, []byte) { return read(r.STag, r.Base) }, wire.CodeRDMAPAccess},
		{"RDMA Read Request, a guess", func(r iwarp.Region) (wire.Header, []byte) { return read(r.STag^0x80, r.Base) }, wire.CodeRDMAPInvalidSTag},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Empty(t, iwarp.Regions())
			conn, peer := hostileStream(t)
			regions := iwarp.Regions()
			require.NotEmpty(t, regions)
			var before [][]byte
			for _, r := range regions {
				require.Equal(t, verbs.AccessLocalWrite, r.Access)
				before = append(before, bytes.Clone(r.Mem))
			}
			h, payload := c.what(regions[0])
			_, err := peer.Write(fpduOf(h, payload))
			require.NoError(t, err)
			_, err = conn.Read(make([]byte, 1))
			require.Error(t, err)
			require.NotErrorIs(t, err, io.EOF)
			require.ErrorIs(t, err, syscall.EPROTO)
			require.Equal(t, c.code, readTerminate(t, peer))
			for i, r := range regions {
				require.True(t, bytes.Equal(before[i], r.Mem), "memory has changed")
			}
		})
	}
}

// hostileStream returns a stream and the socket of its peer, which keeps to the
// protocol so far (SPEC.md sections 3 and 4).
func hostileStream(t *testing.T) (conn net.Conn, peer *net.TCPConn) {
	lc := rdmanet.ListenConfig{Config: rdmanet.Config{Provider: rdmanet.Provider("iwarp")}}
	l, err := lc.Listen(t.Context(), "rdma", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
	greeting := append([]byte("RDNT"), 1, 1, 0, 0, 0, 1, 0, 0, 0, 16, 0, 0)
	b, err := wire.AppendSetup(nil, &wire.SetupFrame{Revision: 2, Enhanced: true, PrivateData: greeting})
	require.NoError(t, err)
	_, err = c.Write(b)
	require.NoError(t, err)
	reply := make([]byte, wire.SetupHeaderLen)
	_, err = io.ReadFull(c, reply)
	require.NoError(t, err)
	f, n, err := wire.ParseSetupHeader(reply)
	require.NoError(t, err)
	require.False(t, f.Reject)
	_, err = io.CopyN(io.Discard, c, int64(n))
	require.NoError(t, err)
	hello := []byte{1, 0, 0, 0, 0, 0, 0, 0}
	_, err = c.Write(fpduOf(wire.Header{Last: true, Opcode: wire.OpSendSolicited, MSN: 1}, hello))
	require.NoError(t, err)
	conn, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn, c.(*net.TCPConn)
}

// fpduOf is an FPDU without CRC.
func fpduOf(h wire.Header, payload []byte) []byte {
	b := make([]byte, wire.FPDUHeaderLen+h.Len())
	ulpdu := h.Len() + len(payload)
	wire.PutFPDUHeader(b, ulpdu)
	h.Put(b[wire.FPDUHeaderLen:])
	b = append(b, payload...)
	return append(b, make([]byte, wire.TrailerLen(ulpdu))...)
}

// readTerminate reads to the end of the stream, and returns what the Terminate
// there says.
func readTerminate(t *testing.T, peer *net.TCPConn) wire.Code {
	require.NoError(t, peer.CloseWrite())
	b, err := io.ReadAll(peer)
	require.NoError(t, err)
	for len(b) > 0 {
		n := int(binary.BigEndian.Uint16(b))
		h, err := wire.ParseHeader(b[wire.FPDUHeaderLen:])
		require.NoError(t, err)
		if h.Opcode == wire.OpTerminate {
			tm, err := wire.ParseTerminate(b[wire.FPDUHeaderLen+h.Len():][:n-h.Len()])
			require.NoError(t, err)
			return tm.Code
		}
		b = b[wire.FPDULen(n):]
	}
	require.Fail(t, "no Terminate")
	return 0
}
