package iwarp

import (
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// link is a TCP connection as a queue pair uses it.
//
// read, readv, writev and pending never block: the first three return EAGAIN
// instead. They and mss use the bare descriptor, so they may only be called while
// the half of the queue pair that they belong to is open and its lock is held;
// nobody closes the connection before both halves are dead.
type link interface {
	read(p []byte) (int, error)
	readv(p [][]byte) (int, error)
	writev(p [][]byte) (int, error)
	pending() bool // a read would find something, if only the end

	// mss is TCP's maximum segment size, in bytes of payload, as it is now; 0 if
	// unknown. It is for whoever may call writev.
	mss() int

	// awaitRead and awaitWrite call done whenever the socket becomes readable or
	// writable, and once at the start, until it returns true. A deadline or Close
	// ends them with an error.
	awaitRead(done func(uintptr) bool) error
	awaitWrite(done func(uintptr) bool) error
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error

	askEvery(time.Duration)
	silence() time.Duration

	Read([]byte) (int, error) // blocks
	CloseWrite() error
	SetLinger(seconds int) error
	Close() error
}

type tcpLink struct {
	*net.TCPConn
	raw syscall.RawConn
	fd  int
}

func newTCPLink(conn *net.TCPConn) (*tcpLink, error) {
	l := &tcpLink{TCPConn: conn}
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	l.raw = raw
	if err := raw.Control(func(fd uintptr) { l.fd = int(fd) }); err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	return l, nil
}

func (l *tcpLink) read(p []byte) (int, error) {
	for {
		if n, err := unix.Read(l.fd, p); err != unix.EINTR {
			return n, err
		}
	}
}

func (l *tcpLink) readv(p [][]byte) (int, error) {
	for {
		if n, err := unix.Readv(l.fd, p); err != unix.EINTR {
			return n, err
		}
	}
}

func (l *tcpLink) writev(p [][]byte) (int, error) {
	for {
		var n int
		var err error
		if len(p) == 1 {
			n, err = unix.Write(l.fd, p[0]) // costs less
		} else {
			n, err = unix.Writev(l.fd, p)
		}
		if err != unix.EINTR {
			return n, err
		}
	}
}

func (l *tcpLink) pending() bool {
	var b [1]byte
	_, _, err := unix.Recvfrom(l.fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return err != unix.EAGAIN && err != unix.EINTR
}

func (l *tcpLink) mss() int {
	mss, err := unix.GetsockoptInt(l.fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	if err != nil {
		return 0
	}
	return mss
}

func (l *tcpLink) awaitRead(done func(uintptr) bool) error  { return l.raw.Read(done) }
func (l *tcpLink) awaitWrite(done func(uintptr) bool) error { return l.raw.Write(done) }
