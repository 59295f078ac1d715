package iwarp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// setupTimeout bounds each side's wait for the other's set-up frame, and the
// dialer's for TCP before that. It is a variable for tests.
var setupTimeout = 10 * time.Second

var errMarkers = errors.New("the peer asks for MPA markers, which are not supported (RFC 5044 section 4.3)")

// rejectedError is an MPA reply with the reject flag.
type rejectedError struct{ privateData []byte }

func (*rejectedError) Error() string { return "rejected by the peer" }

// requestFrame is the set-up request that asks for p.
func requestFrame(p verbs.ConnParam) (wire.SetupFrame, error) {
	f := wire.SetupFrame{Revision: p.MPARevision, CRC: p.CRC, PrivateData: append([]byte(nil), p.PrivateData...)}
	if f.Revision == 0 {
		f.Revision = wire.Revision2
	}
	if f.Revision == wire.Revision2 {
		f.Enhanced, f.IRD, f.ORD = true, uint16(p.ResponderResources), uint16(p.InitiatorDepth)
	}
	return f, valid(f)
}

// replyTo is the set-up reply to req that says f.
func replyTo(req, f wire.SetupFrame) (wire.SetupFrame, error) {
	f.Reply, f.Revision, f.Enhanced = true, req.Revision, req.Enhanced
	return f, valid(f)
}

func valid(f wire.SetupFrame) error {
	if _, err := wire.AppendSetup(nil, &f); err != nil {
		return &errnoError{err, syscall.EINVAL}
	}
	return nil
}

// dialSetup connects and exchanges set-up frames (RFC 5044 section 7.1). It
// ends when ctx does.
func dialSetup(ctx context.Context, d *net.Dialer, remote netip.AddrPort, req wire.SetupFrame) (*net.TCPConn, wire.SetupFrame, error) {
	c, err := d.DialContext(ctx, "tcp", remote.String())
	if err != nil {
		return nil, wire.SetupFrame{}, err
	}
	conn := c.(*net.TCPConn)
	conn.SetReadDeadline(time.Now().Add(setupTimeout))
	// From here on only this moves the read deadline.
	stop := context.AfterFunc(ctx, func() { conn.SetReadDeadline(longAgo) })
	reply, err := request(conn, req)
	if !stop() {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, reply, err
	}
	conn.SetReadDeadline(time.Time{})
	return conn, reply, nil
}

// request sends a set-up request and returns the reply that accepts it.
func request(conn *net.TCPConn, req wire.SetupFrame) (wire.SetupFrame, error) {
	if err := send(conn, req); err != nil {
		return wire.SetupFrame{}, err
	}
	reply, err := readSetup(conn, true)
	switch {
	case err != nil:
		return reply, err
	case reply.Reject:
		return reply, &rejectedError{reply.PrivateData}
	case reply.Markers:
		return reply, errMarkers
	case reply.Revision > req.Revision:
		return reply, fmt.Errorf("MPA reply of revision %d to a request of revision %d", reply.Revision, req.Revision)
	}
	return reply, nil
}

// send writes a frame. It is the first thing written, so it doesn't wait for
// the peer.
func send(conn *net.TCPConn, f wire.SetupFrame) error {
	b, err := wire.AppendSetup(nil, &f)
	if err != nil {
		return err
	}
	_, err = conn.Write(b)
	return err
}

// readSetup reads one set-up frame and not a byte more. What is not one is
// refused at its first wrong byte.
func readSetup(r io.Reader, reply bool) (wire.SetupFrame, error) {
	var buf [wire.SetupHeaderLen + wire.MaxPrivateData]byte
	have, want := 0, wire.SetupHeaderLen
	for have < want {
		n, err := r.Read(buf[have:want])
		if err != nil {
			return wire.SetupFrame{}, fmt.Errorf("MPA set-up ended after %d bytes: %w", have, err)
		}
		have += n
		if have > wire.SetupHeaderLen {
			continue
		}
		f, pdLen, err := wire.ParseSetupHeader(buf[:have])
		switch {
		case isSetupError(err):
			return f, err
		case have < wire.SetupHeaderLen:
			continue
		case f.Reply != reply:
			return f, fmt.Errorf("MPA set-up frame is a %s, must be a %s", frameKind(f.Reply), frameKind(reply))
		}
		want += pdLen
	}
	f, _, err := wire.ParseSetup(buf[:have])
	if err != nil {
		return f, err
	}
	f.PrivateData = append([]byte(nil), f.PrivateData...)
	return f, nil
}

func isSetupError(err error) bool {
	var se *wire.SetupError
	return errors.As(err, &se)
}

func frameKind(reply bool) string {
	if reply {
		return "reply"
	}
	return "request"
}
