package iwarp

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// watcher notices the peer's end on connections that nobody polls, as an
// adapter would: one goroutine and one epoll descriptor for the process, woken
// by a FIN, a reset or an error, and never by data.
//
// Lock order: qp locks → watcher.mu.
type watcherState struct {
	mu   sync.Mutex
	file *os.File // nil while there is nothing to watch
	raw  syscall.RawConn
	qps  map[int32]*qp
}

var watcher watcherState

// watch begins to watch an open connection. If there are no descriptors left it
// does not: then the end is noticed when the QP is polled.
func watch(q *qp) {
	w := &watcher
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
		if err != nil {
			return
		}
		unix.SetNonblock(fd, true) // so that the file goes to the netpoller
		w.file = os.NewFile(uintptr(fd), "rdmanet watcher")
		if w.raw, err = w.file.SyscallConn(); err != nil {
			w.file.Close()
			w.file = nil
			return
		}
		w.qps = make(map[int32]*qp)
		go watchLoop(w.raw)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(q.num)}
	w.raw.Control(func(ep uintptr) {
		if unix.EpollCtl(int(ep), unix.EPOLL_CTL_ADD, q.fd, &ev) == nil {
			w.qps[int32(q.num)] = q
		}
	})
	w.closeIfIdle()
}

// unwatch ends that. The descriptor is still open.
func unwatch(q *qp) {
	w := &watcher
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.qps[int32(q.num)] != q {
		return
	}
	delete(w.qps, int32(q.num))
	w.raw.Control(func(ep uintptr) { unix.EpollCtl(int(ep), unix.EPOLL_CTL_DEL, q.fd, nil) })
	w.closeIfIdle()
}

func (w *watcherState) closeIfIdle() {
	if len(w.qps) == 0 && w.file != nil {
		w.file.Close() // ends watchLoop
		w.file = nil
	}
}

func watchLoop(raw syscall.RawConn) {
	events := make([]unix.EpollEvent, 64)
	for {
		n := 0
		err := raw.Read(func(ep uintptr) bool {
			n, _ = retry(func() (int, error) { return unix.EpollWait(int(ep), events, 0) })
			return n > 0
		})
		if err != nil {
			return
		}
		for _, ev := range events[:n] {
			watcher.mu.Lock()
			q := watcher.qps[ev.Fd]
			watcher.mu.Unlock()
			if q != nil {
				q.hangup()
			}
		}
	}
}
