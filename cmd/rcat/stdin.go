package main

import (
	"errors"
	"io"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// stdin is standard input, which connections use one after the other.
type stdin struct {
	file  *os.File
	ended bool // for good, also if it is a terminal
}

func (s *stdin) terminal() bool { return term.IsTerminal(int(s.file.Fd())) }

// input is what one connection reads of stdin. In contrast to a file's, its Read
// can be interrupted, and takes nothing from the next connection then.
type input struct {
	stdin     *stdin
	taken     atomic.Int64 // bytes that were read
	wait      bool         // reading may block
	interrupt func()       // may be called at any time
	wake      *os.File     // readable after interrupt
}

var errInterrupted = errors.New("interrupted")

// open returns the input for a connection.
func (s *stdin) open() (*input, error) {
	info, err := s.file.Stat()
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	return &input{stdin: s, wait: !info.Mode().IsRegular(), wake: r, interrupt: func() { w.Close() }}, nil
}

func (in *input) Read(p []byte) (int, error) {
	if in.stdin.ended {
		return 0, io.EOF
	}
	if in.wait {
		if err := in.await(); err != nil {
			return 0, err
		}
	}
	n, err := in.stdin.file.Read(p)
	in.taken.Add(int64(n))
	if errors.Is(err, syscall.EIO) && in.stdin.terminal() { // it isn't ours: we are in the background
		err = io.EOF
	}
	if err == io.EOF {
		in.stdin.ended = true
	}
	return n, err
}

// await waits until there is something to read, or for interrupt.
func (in *input) await() error {
	fds := []unix.PollFd{
		{Fd: int32(in.stdin.file.Fd()), Events: unix.POLLIN},
		{Fd: int32(in.wake.Fd()), Events: unix.POLLIN},
	}
	for {
		_, err := unix.Poll(fds, -1)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return os.NewSyscallError("poll", err)
		case fds[1].Revents != 0:
			return errInterrupted
		default:
			return nil
		}
	}
}

// close must come after the last Read.
func (in *input) close() {
	in.interrupt()
	in.wake.Close()
}
