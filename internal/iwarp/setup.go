package iwarp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// setupTimeout bounds each side's wait for the other's set-up frame.
const setupTimeout = 10 * time.Second

// rejectedError is an MPA reply with the reject flag.
type rejectedError struct{ privateData []byte }

func (*rejectedError) Error() string { return "rejected by the peer" }

// dialSetup connects and exchanges set-up frames (RFC 5044 section 7.1). It
// ends when ctx does.
func dialSetup(ctx context.Context, local, remote netip.AddrPort, p verbs.ConnParam) (*net.TCPConn, wire.SetupFrame, error) {
	d := net.Dialer{Timeout: setupTimeout}
	if local.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(local)
	}
	c, err := d.DialContext(ctx, "tcp", remote.String())
	if err != nil {
		return nil, wire.SetupFrame{}, err
	}
	conn := c.(*net.TCPConn)
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(longAgo) })
	reply, err := request(conn, p)
	if !stop() && err == nil {
		err = ctx.Err() // the deadline may have been spoilt
	}
	if err != nil {
		conn.Close()
		return nil, reply, err
	}
	return conn, reply, nil
}

// request sends a set-up request and returns the reply that accepts it.
func request(conn *net.TCPConn, p verbs.ConnParam) (reply wire.SetupFrame, err error) {
	f := wire.SetupFrame{Revision: p.MPARevision, CRC: p.CRC, PrivateData: p.PrivateData}
	if f.Revision == 0 {
		f.Revision = wire.Revision2
	}
	if f.Revision == wire.Revision2 {
		f.Enhanced, f.IRD, f.ORD = true, uint16(p.ResponderResources), uint16(p.InitiatorDepth)
	}
	b, err := wire.AppendSetup(nil, &f)
	if err != nil {
		return reply, &errnoError{err, syscall.EINVAL}
	}
	conn.SetDeadline(time.Now().Add(setupTimeout))
	defer conn.SetDeadline(time.Time{})
	if _, err := conn.Write(b); err != nil {
		return reply, err
	}
	reply, err = readSetup(conn, true)
	switch {
	case err != nil:
		return reply, err
	case reply.Reject:
		return reply, &rejectedError{reply.PrivateData}
	case reply.Markers:
		return reply, errMarkers
	case reply.Revision > f.Revision:
		return reply, fmt.Errorf("MPA reply of revision %d to a request of revision %d", reply.Revision, f.Revision)
	}
	return reply, nil
}

var errMarkers = errors.New("the peer asks for MPA markers, which are not supported (RFC 5044 section 4.3)")

// replySetup answers a request. Only the CRC and reject flags and the private
// data are taken from f.
func replySetup(conn *net.TCPConn, req, f wire.SetupFrame) error {
	f.Reply, f.Revision, f.Enhanced = true, req.Revision, req.Enhanced
	b, err := wire.AppendSetup(nil, &f)
	if err != nil {
		return &errnoError{err, syscall.EINVAL}
	}
	conn.SetWriteDeadline(time.Now().Add(setupTimeout))
	defer conn.SetWriteDeadline(time.Time{})
	_, err = conn.Write(b)
	return err
}

// readSetup reads one set-up frame and not a byte more. What is not one is
// refused at its first wrong byte.
func readSetup(conn *net.TCPConn, reply bool) (wire.SetupFrame, error) {
	var buf [wire.SetupHeaderLen + wire.MaxPrivateData]byte
	have, want := 0, wire.SetupHeaderLen
	for have < want {
		n, err := conn.Read(buf[have:want])
		if err != nil {
			return wire.SetupFrame{}, fmt.Errorf("MPA set-up ended after %d bytes: %w", have, err)
		}
		have += n
		if want > wire.SetupHeaderLen {
			continue
		}
		f, pdLen, err := wire.ParseSetupHeader(buf[:have])
		switch {
		case have == wire.SetupHeaderLen && err == nil:
			want += pdLen
		case isSetupError(err):
			return f, err
		}
	}
	f, _, err := wire.ParseSetup(buf[:have])
	if err != nil {
		return f, err
	}
	if f.Reply != reply {
		return f, fmt.Errorf("MPA set-up frame is a %s, must be a %s", frameKind(f.Reply), frameKind(reply))
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
