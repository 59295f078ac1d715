//go:build !linux

package iwarp

import "syscall"

// Without epoll's EPOLLRDHUP the peer's end is noticed when the QP is polled.

func watch(*qp, syscall.RawConn) {}

func unwatch(*qp) {}
