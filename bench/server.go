package main

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"

	"github.com/rdmanet/rdmanet/rdmanet"
)

// The first byte of a connection says what the server does with it. All but
// modeConnect are followed by the message size, 4 bytes big-endian.
const (
	modeConnect = 'c' // answer with a byte and wait for the end
	modeEcho    = 'e' // send every message back
	modeRead    = 'r' // take everything with Read
	modeBuffer  = 'b' // take everything with ReadBuffer
	modeCopy    = 'w' // take everything with io.Copy
)

// A stream's bytes are 0, but for the last one of a slice: it is mark, and the
// server answers it with one byte. Nothing else is counted or framed, so the
// server's loop is what a program's would be.
const mark = 1

const readSize = 64 << 10 // of a server's Read, if messages aren't larger

// bufferConn is a connection with rdmanet's zero-copy methods.
type bufferConn interface {
	net.Conn
	NewBuffer() (*rdmanet.Buffer, error)
	ReadBuffer() (*rdmanet.Buffer, error)
	WriteBuffer(*rdmanet.Buffer) (int, error)
}

// server serves the connections of a listener until close.
type server struct {
	l  net.Listener
	wg sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{}
}

func startServer(ctx context.Context, t *transport, host string) (*server, error) {
	l, err := t.listen(ctx, host)
	if err != nil {
		return nil, err
	}
	s := &server{l: l, conns: make(map[net.Conn]struct{})}
	s.wg.Go(s.accept)
	return s, nil
}

func (s *server) accept() {
	for {
		c, err := s.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		if !s.add(c) {
			c.Close()
			return
		}
		s.wg.Go(func() {
			// The client sees what goes wrong here as the end of the connection.
			_ = serve(c)
			s.remove(c)
			c.Close()
		})
	}
}

func (s *server) add(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *server) remove(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

func (s *server) close() error {
	err := s.l.Close()
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}

func serve(c net.Conn) error {
	var head [5]byte
	if _, err := io.ReadFull(c, head[:1]); err != nil {
		return err
	}
	if head[0] == modeConnect {
		return serveConnect(c, head[:1])
	}
	if _, err := io.ReadFull(c, head[1:]); err != nil {
		return err
	}
	size := int(binary.BigEndian.Uint32(head[1:]))
	switch head[0] {
	case modeEcho:
		return serveEcho(c, make([]byte, size))
	case modeRead:
		return serveRead(c, make([]byte, max(size, readSize)))
	case modeBuffer:
		return serveBuffer(c)
	case modeCopy:
		_, err := io.Copy(&acker{c: c}, c)
		return err
	}
	return errors.New("unknown mode")
}

func serveConnect(c net.Conn, b []byte) error {
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err := c.Read(b)
	return err
}

func serveEcho(c net.Conn, msg []byte) error {
	for {
		if _, err := io.ReadFull(c, msg); err != nil {
			return err
		}
		if _, err := c.Write(msg); err != nil {
			return err
		}
	}
}

func serveRead(c net.Conn, buf []byte) error {
	a := acker{c: c}
	for {
		n, err := c.Read(buf)
		if err != nil {
			return err
		}
		if _, err := a.Write(buf[:n]); err != nil {
			return err
		}
	}
}

func serveBuffer(c net.Conn) error {
	bc, ok := c.(bufferConn)
	if !ok {
		return errors.ErrUnsupported
	}
	a := acker{c: c}
	for {
		b, err := bc.ReadBuffer()
		if err != nil {
			return err
		}
		_, err = a.Write(b.Bytes())
		b.Release()
		if err != nil {
			return err
		}
	}
}

// acker discards what is written to it, and answers a mark.
type acker struct {
	c   net.Conn
	ack [1]byte
}

func (a *acker) Write(p []byte) (int, error) {
	if len(p) > 0 && p[len(p)-1] == mark {
		if _, err := a.c.Write(a.ack[:]); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}
