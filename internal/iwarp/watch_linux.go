package iwarp

import (
	"cmp"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// watcher notices the peer's end on connections that nobody polls, as an
// adapter would: one goroutine and one epoll descriptor for the process, woken
// by a FIN, a reset or an error, and never by data. The exception are peers that
// send RDMA READs: those are answered whether or not anybody polls, since an
// iWARP device asks with one whether we are alive.
//
// mu is taken with id.mu held at most, and nothing else is taken under it.
type watcherState struct {
	mu      sync.Mutex
	file    *os.File // nil while there is nothing to watch
	raw     syscall.RawConn
	watched map[int32]watched // by QP number
}

type watched struct {
	qp   *qp
	conn syscall.RawConn
}

var watcher watcherState

// watch begins to watch a connection. If there are no descriptors left it does
// not: then the end is noticed when the QP is polled.
func watch(q *qp, conn syscall.RawConn) {
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
		w.watched = make(map[int32]watched)
		go watchLoop(w.raw)
	}
	ev := q.interest()
	if w.ctl(unix.EPOLL_CTL_ADD, conn, &ev) == nil {
		w.watched[int32(q.num)] = watched{q, conn}
	}
	w.closeIfIdle()
}

// interest is what the watcher wants to know. Of data it is told once, and again
// after answerDelay.
func (q *qp) interest() unix.EpollEvent {
	ev := unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(q.num)}
	if q.asked {
		ev.Events = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLONESHOT
	}
	return ev
}

// answerDelay is how long what may be an RDMA READ waits for somebody to poll, as
// is usual. It bounds what the watcher costs a busy connection.
const answerDelay = 100 * time.Millisecond

// answerLater receives what there is, if nobody else has, and watches again.
func (w *watcherState) answerLater(q *qp) {
	time.AfterFunc(answerDelay, func() {
		q.progress(len(q.cq.ring), shortIsNothing)
		w.mu.Lock()
		defer w.mu.Unlock()
		if e := w.watched[int32(q.num)]; e.qp == q {
			ev := q.interest()
			w.ctl(unix.EPOLL_CTL_MOD, e.conn, &ev)
		}
	})
}

// unwatch ends that. It comes before the connection is closed, and may be
// repeated.
func unwatch(q *qp) {
	w := &watcher
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.watched[int32(q.num)]
	if e.qp != q {
		return
	}
	delete(w.watched, int32(q.num))
	w.ctl(unix.EPOLL_CTL_DEL, e.conn, nil)
	w.closeIfIdle()
}

// ctl is epoll_ctl(2) on a connection that can't be closed meanwhile, so that
// its descriptor is no other's.
func (w *watcherState) ctl(op int, conn syscall.RawConn, ev *unix.EpollEvent) (err error) {
	closed := w.raw.Control(func(ep uintptr) {
		closed := conn.Control(func(fd uintptr) { err = unix.EpollCtl(int(ep), op, int(fd), ev) })
		err = cmp.Or(err, closed)
	})
	return cmp.Or(err, closed)
}

func (w *watcherState) closeIfIdle() {
	if len(w.watched) == 0 && w.file != nil {
		w.file.Close() // ends watchLoop
		w.file = nil
	}
}

func watchLoop(raw syscall.RawConn) {
	events := make([]unix.EpollEvent, 64)
	for {
		n := 0
		err := raw.Read(func(ep uintptr) bool {
			n, _ = unix.EpollWait(int(ep), events, 0) // it doesn't block: no EINTR
			return n > 0
		})
		if err != nil {
			return
		}
		for _, ev := range events[:n] {
			switch q := watcher.find(ev.Fd); {
			case q == nil:
			case ev.Events == unix.EPOLLIN:
				watcher.answerLater(q)
			default:
				q.hangup()
			}
		}
	}
}

func (w *watcherState) find(num int32) *qp {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.watched[num].qp
}
