package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/rdmanet"
)

// session is a connection's life: stdin and stdout are moved through it, both at
// a time, until it ends. The manual (doc.go) says when that is.
type session struct {
	o     *options
	conn  *rdmanet.Conn
	stdin *stdin
	in    *input
	out   io.Writer

	received, sent <-chan error // a direction has ended; nil after that was taken
	lost           error        // the peer went while we were sending

	moved   uint64    // bytes, when that last changed
	movedAt time.Time // when it did
}

// lookInterval is how often to look for what nothing else reports.
const lookInterval = 100 * time.Millisecond

func newSession(o *options, conn *rdmanet.Conn, in *stdin, out io.Writer) *session {
	return &session{o: o, conn: conn, stdin: in, out: out}
}

// run returns when the connection is closed.
func (s *session) run(ctx context.Context) error {
	start := time.Now()
	s.movedAt = start
	var err error
	if s.in, err = s.stdin.open(); err != nil {
		err = &localError{"stdin", err}
	} else {
		defer s.in.close()
		s.received, s.sent = background(s.receive), background(s.send)
		err = s.await(ctx)
	}
	err = errors.Join(err, s.close(ctx, err != nil))
	t := s.conn.Stats()
	took := time.Since(start)
	s.o.logf("received %d bytes, sent %d bytes in %s, %s", t.BytesRead, t.BytesWritten, inSeconds(took), rate(t.BytesRead+t.BytesWritten, took))
	return err
}

func background(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return done
}

// receive moves what the peer sends to stdout, until its end-of-file.
func (s *session) receive() error {
	out := &output{w: s.out}
	_, err := s.conn.WriteTo(out)
	if out.err != nil {
		return &localError{"stdout", out.err}
	}
	return err
}

// send moves stdin to the peer, until end-of-file.
func (s *session) send() error {
	in := &source{r: s.in}
	_, err := s.conn.ReadFrom(in)
	if in.err != nil {
		return &localError{"stdin", in.err}
	}
	if err != nil {
		return err
	}
	if err := s.conn.CloseWrite(); err != nil && !errors.Is(err, syscall.EPIPE) { // a peer that has gone misses nothing
		return err
	}
	return nil
}

// await returns nil when the connection may be closed in order, and otherwise
// why it is to be aborted.
func (s *session) await(ctx context.Context) error {
	idle, stop := s.idleTicks()
	defer stop()
	var gone <-chan error
	var silent <-chan time.Time
	for s.received != nil || s.sent != nil {
		select {
		case err := <-s.received:
			s.received = nil
			if err != nil {
				return errors.Join(s.lost, err)
			}
			if s.sent != nil {
				gone, silent = s.peerGone(), s.silence()
			}
		case err := <-s.sent:
			s.sent = nil
			if errors.Is(err, syscall.EPIPE) { // what the peer sent before it went can be read
				s.lost = fmt.Errorf("%w: the peer closed the connection before it had everything", err)
			} else if err != nil {
				return err
			}
		case err := <-gone:
			if !errors.Is(err, syscall.EPIPE) {
				return err
			}
			if !s.sending() {
				return nil
			}
			gone = s.peerGone() // unless the write finds out first
		case <-silent:
			if s.sending() {
				silent = time.After(lookInterval) // it is to get through
			} else if s.stdin.terminal() || s.in.taken.Load() == 0 {
				return nil
			}
		case <-idle:
			if over, err := s.idleOver(); over {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return s.lost
}

// close closes the connection, in order or by a reset, and waits until both
// directions have left stdin and stdout; but when the program is to end, not for
// somebody who doesn't read stdout.
func (s *session) close(ctx context.Context, abort bool) error {
	if abort {
		_ = s.conn.SetLinger(0)
	}
	err := s.conn.Close()
	if s.sent != nil {
		s.in.interrupt()
		<-s.sent
	}
	if s.received != nil && s.o.keep {
		select {
		case <-s.received:
		case <-ctx.Done():
		}
	}
	return err
}

// silence returns when to end a connection whose peer has sent its end-of-file
// while stdin is open, if that is a terminal or has still brought nothing by then;
// nil is never.
func (s *session) silence() <-chan time.Time {
	nothing := s.conn.Stats().BytesRead == 0
	terminal := s.stdin.terminal()
	switch {
	case terminal && (s.o.listen || !nothing):
		return time.After(0)
	case terminal || nothing:
		return nil
	}
	return time.After(s.o.replyWait.d)
}

// peerGone returns a channel on which it comes why nothing can be sent any more:
// EPIPE when the peer has closed the connection entirely.
func (s *session) peerGone() <-chan error {
	return background(func() (err error) {
		for err == nil {
			time.Sleep(lookInterval)
			_, err = s.conn.Write(nil)
		}
		return err
	})
}

// sending reports whether something was read of stdin that is not yet written.
func (s *session) sending() bool { return s.in.taken.Load() > int64(s.conn.Stats().BytesWritten) }

// idleTicks returns when to look whether anything has moved, for -w.
func (s *session) idleTicks() (<-chan time.Time, func()) {
	if s.o.wait.d == 0 {
		return nil, func() {}
	}
	t := time.NewTicker(min(max(s.o.wait.d/10, time.Millisecond), time.Second/5))
	return t.C, t.Stop
}

// idleOver reports whether nothing has moved for as long as -w says, and if so
// whether that is a failure.
func (s *session) idleOver() (bool, error) {
	t := s.conn.Stats()
	if n := t.BytesRead + t.BytesWritten; n != s.moved {
		s.moved, s.movedAt = n, time.Now()
	}
	if time.Since(s.movedAt) < s.o.wait.d {
		return false, nil
	}
	if s.received == nil && !s.sending() {
		return true, nil
	}
	return true, fmt.Errorf("nothing was sent or received for %v: allow more with -w", s.o.wait.d)
}

// localError is an error of stdin or stdout, not of the connection.
type localError struct {
	file string
	err  error
}

func (e *localError) Error() string {
	err := e.err
	var path *os.PathError
	if errors.As(err, &path) {
		err = fmt.Errorf("%s: %w", path.Op, path.Err)
	}
	return fmt.Sprintf("%s: %v", e.file, err)
}

func (e *localError) Unwrap() error { return e.err }

// source and output remember whose error ended a copy.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

type output struct {
	w   io.Writer
	err error
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.w.Write(p)
	o.err = err
	return n, err
}
