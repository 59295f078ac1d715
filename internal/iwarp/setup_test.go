package iwarp

import (
	"bytes"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// logBuffer is a buffer that a logger may write while a test reads.
type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func setupBytes(t testing.TB, f wire.SetupFrame) []byte {
	b, err := wire.AppendSetup(nil, &f)
	require.NoError(t, err)
	return b
}

// with returns b with one byte changed.
func with(b []byte, at int, v byte) []byte {
	b = bytes.Clone(b)
	b[at] = v
	return b
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

const (
	flagsAt    = 16
	revisionAt = 17
	lengthAt   = 18
)

func TestListenerTurnsAwayStrangersAndServesOthersMeanwhile(t *testing.T) {
	setSetupTimeout(t, 500*time.Millisecond)
	leaksNoDescriptor(t)
	request := setupBytes(t, wire.SetupFrame{Revision: 1, PrivateData: []byte("private")})
	tooLong := with(with(request, lengthAt, 2), lengthAt+1, 1)
	strangers := []struct {
		name      string
		sends     []byte
		shuts     bool // its write side
		log       string
		isRefused bool // with a reject reply
	}{
		{"HTTP", []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), false, "key is", false},
		{"random bytes", randomBytes(4096), false, "key is", false},
		{"silence", nil, false, "timeout", false},
		{"nothing", nil, true, "after 0 bytes: EOF", false},
		{"half a key, then silence", request[:7], false, "timeout", false},
		{"half a key", request[:7], true, "after 7 bytes: EOF", false},
		{"private data cut short, then silence", request[:len(request)-1], false, "timeout", false},
		{"private data cut short", request[:len(request)-1], true, "after 26 bytes: EOF", false},
		{"private data too long", tooLong, false, "private data length is 513", false},
		{"revision 0", with(request, revisionAt, 0), false, "revision is 0", false},
		{"revision 3", with(request, revisionAt, 3), false, "revision is 3", false},
		{"a reply", setupBytes(t, wire.SetupFrame{Reply: true, Revision: 1}), false, "is a reply, must be a request", false},
		{"markers", setupBytes(t, wire.SetupFrame{Revision: 2, Enhanced: true, Markers: true}), false, "markers", true},
	}
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 8)
	var log logBuffer
	l.SetLogger(slog.New(slog.NewTextHandler(&log, nil)))
	peers := make([]*peer, len(strangers))
	for i, s := range strangers {
		peers[i] = dialPeer(t, l.LocalAddr())
		peers[i].write(s.sends)
		if s.shuts {
			require.NoError(t, peers[i].CloseWrite())
		}
	}
	a := resolved(t, ch, l.LocalAddr())
	a.createQP(100)
	require.NoError(t, a.id.Connect(verbs.ConnParam{}))
	b := accept(t, ch, next(t, ch, verbs.EventConnectRequest), 100, verbs.ConnParam{})
	next(t, ch, verbs.EventEstablished)
	next(t, ch, verbs.EventEstablished)
	require.NoError(t, a.send(verbs.SendWR{Inline: true, SGL: []verbs.SGE{{Data: []byte("served")}}}))
	eventually(t, "the message", func() bool { b.poll(); return len(b.got) == 1 })

	for i, s := range strangers {
		t.Run(s.name, func(t *testing.T) {
			if s.isRefused {
				require.True(t, peers[i].readSetup(true).Reject)
			}
			_, err := peers[i].Read(make([]byte, 1))
			require.Error(t, err)
			require.False(t, isTimeout(err))
			from := "peer=" + peers[i].LocalAddr().String()
			eventually(t, "a log line", func() bool { return strings.Contains(log.String(), from) })
			for line := range strings.Lines(log.String()) {
				if strings.Contains(line, from) {
					require.Contains(t, line, s.log)
				}
			}
		})
	}
	nothingMore(t, ch)
}

func isTimeout(err error) bool {
	ne, ok := err.(net.Error)
	return ok && ne.Timeout()
}

func TestPrivateDataOfAnySizeArrives(t *testing.T) {
	for _, f := range []wire.SetupFrame{
		{Revision: 1},
		{Revision: 1, PrivateData: randomBytes(1)},
		{Revision: 1, PrivateData: randomBytes(512)},
		{Revision: 2},
		{Revision: 2, Enhanced: true},
		{Revision: 2, Enhanced: true, PrivateData: randomBytes(508)},
	} {
		ch := newChannel(t)
		p := dialPeer(t, listenOn(t, ch, "127.0.0.1:0", 1).LocalAddr())
		p.writeSetup(f)
		ev := next(t, ch, verbs.EventConnectRequest)
		require.Equal(t, f.PrivateData, ev.PrivateData)
		require.NoError(t, ev.ID.Reject(randomBytes(56)))
		reply := p.readSetup(true)
		require.True(t, reply.Reject)
		require.Equal(t, randomBytes(56), reply.PrivateData)
		require.Equal(t, f.Revision, reply.Revision)
		require.Equal(t, f.Enhanced, reply.Enhanced)
		require.Empty(t, p.rest())
		require.NoError(t, ev.ID.Destroy())
	}
}

func TestDialerSaysWhyAConnectFailed(t *testing.T) {
	setSetupTimeout(t, 500*time.Millisecond)
	reply := wire.SetupFrame{Reply: true, Revision: 1, PrivateData: []byte("private")}
	b := setupBytes(t, reply)
	markers, rejects := reply, reply
	markers.Markers, rejects.Reject = true, true
	for _, s := range []struct {
		name  string
		sends []byte
		after string
		event verbs.EventType
		errno syscall.Errno
	}{
		{"HTTP", []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), "", verbs.EventConnectError, syscall.EPROTO},
		{"random bytes", randomBytes(4096), "", verbs.EventConnectError, syscall.EPROTO},
		{"silence", nil, "", verbs.EventUnreachable, syscall.ETIMEDOUT},
		{"half a reply, then silence", b[:18], "", verbs.EventUnreachable, syscall.ETIMEDOUT},
		{"half a reply", b[:18], "shut", verbs.EventRejected, syscall.ECONNRESET},
		{"private data cut short", b[:22], "shut", verbs.EventRejected, syscall.ECONNRESET},
		{"close without a reply", nil, "shut", verbs.EventRejected, syscall.ECONNRESET},
		{"reset", nil, "reset", verbs.EventRejected, syscall.ECONNRESET},
		{"private data too long", with(with(b, lengthAt, 2), lengthAt+1, 1), "", verbs.EventConnectError, syscall.EPROTO},
		{"revision 0", with(b, revisionAt, 0), "", verbs.EventConnectError, syscall.EPROTO},
		{"revision 3", with(b, revisionAt, 3), "", verbs.EventConnectError, syscall.EPROTO},
		{"revision 2 to a request of revision 1", with(b, revisionAt, 2), "", verbs.EventConnectError, syscall.EPROTO},
		{"a request", setupBytes(t, wire.SetupFrame{Revision: 1}), "", verbs.EventConnectError, syscall.EPROTO},
		{"markers", setupBytes(t, markers), "", verbs.EventConnectError, syscall.EPROTO},
		{"reject", setupBytes(t, rejects), "", verbs.EventRejected, syscall.ECONNREFUSED},
	} {
		t.Run(s.name, func(t *testing.T) {
			leaksNoDescriptor(t)
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer ln.Close()
			ch := newChannel(t)
			e := resolved(t, ch, ln.Addr().(*net.TCPAddr).AddrPort())
			e.createQP(100)
			require.NoError(t, e.id.Connect(verbs.ConnParam{MPARevision: 1}))
			c, err := ln.Accept()
			require.NoError(t, err)
			p := newPeer(t, c.(*net.TCPConn))
			p.readSetup(false)
			p.write(s.sends)
			switch s.after {
			case "shut":
				require.NoError(t, p.CloseWrite())
			case "reset":
				require.NoError(t, p.SetLinger(0))
				require.NoError(t, p.Close())
			}
			ev := next(t, ch, s.event)
			require.Same(t, e.id, ev.ID)
			require.ErrorIs(t, ev.Err, s.errno)
			if s.name == "reject" {
				require.Equal(t, reply.PrivateData, ev.PrivateData)
			}
			if s.after != "reset" {
				_, err = p.Read(make([]byte, 1))
				require.Error(t, err)
				require.False(t, isTimeout(err))
			}
			e.settles()
			nothingMore(t, ch)
		})
	}
}

func TestDialerIsRefusedWhereNobodyListens(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := ln.Addr().(*net.TCPAddr).AddrPort()
	ln.Close()
	ch := newChannel(t)
	e := resolved(t, ch, addr)
	e.createQP(100)
	require.NoError(t, e.id.Connect(verbs.ConnParam{}))
	require.ErrorIs(t, next(t, ch, verbs.EventRejected).Err, syscall.ECONNREFUSED)
	e.settles()
}

func TestConnectRefusesWhatCannotBeSent(t *testing.T) {
	ch := newChannel(t)
	e := resolved(t, ch, netip.MustParseAddrPort("127.0.0.1:1"))
	e.createQP(100)
	require.ErrorIs(t, e.id.Connect(verbs.ConnParam{PrivateData: make([]byte, 513)}), syscall.EINVAL)
	require.ErrorIs(t, e.id.Connect(verbs.ConnParam{MPARevision: 3}), syscall.EINVAL)
	nothingMore(t, ch)
}

func TestRevisionsAndCRCAreNegotiated(t *testing.T) {
	for role, weDial := range roles {
		for _, revision := range []uint8{1, 2} {
			for _, crc := range []struct {
				name       string
				ours, peer bool
			}{{"no CRC", false, false}, {"we ask for CRC", true, false}, {"the peer asks for CRC", false, true}, {"both ask for CRC", true, true}} {
				t.Run(role+"/revision "+string('0'+rune(revision))+"/"+crc.name, func(t *testing.T) {
					f := wire.SetupFrame{Revision: revision, Enhanced: revision == 2, CRC: crc.peer}
					e, p := connectPeerWith(t, weDial, 100, f, verbs.ConnParam{CRC: crc.ours, MPARevision: revision})
					require.Equal(t, revision, p.setup.Revision)
					require.Equal(t, revision == 2, p.setup.Enhanced)
					require.False(t, p.setup.Markers)
					require.Equal(t, crc.ours || crc.peer && !weDial, p.setup.CRC)
					use := crc.ours || crc.peer
					p.write(makeFPDU(use, sendHeader(1, 0, true), []byte("ping")))
					eventually(t, "the message", func() bool { e.poll(); return len(e.got) == 1 })
					require.Equal(t, "ping", string(e.got[0]))
					require.NoError(t, e.send(verbs.SendWR{Inline: true, SGL: []verbs.SGE{{Data: []byte("pong")}}}))
					require.NoError(t, e.id.Disconnect())
					require.Equal(t, []fpdu{{sendHeader(1, 0, true), []byte("pong")}}, p.rest())
					p.Close()
					require.NoError(t, next(t, e.ch, verbs.EventDisconnected).Err)
					e.settles()
				})
			}
		}
	}
}

func TestAFloodOfSilentConnectionsPushesOutItself(t *testing.T) {
	leaksNoDescriptor(t)
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 8)
	const extra = 20
	peers := make([]*peer, maxHalfOpen+extra)
	for i := range peers {
		peers[i] = dialPeer(t, l.LocalAddr())
	}
	ln := l.(*id).listener
	for _, p := range peers[:extra] { // the oldest are closed
		_, err := p.Read(make([]byte, 1))
		require.Error(t, err)
		require.False(t, isTimeout(err))
	}
	p := dialPeer(t, l.LocalAddr())
	p.writeSetup(wire.SetupFrame{Revision: 1})
	ev := next(t, ch, verbs.EventConnectRequest)
	require.NoError(t, ev.ID.Reject(nil))
	require.True(t, p.readSetup(true).Reject)
	require.NoError(t, ev.ID.Destroy())
	ln.mu.Lock()
	defer ln.mu.Unlock()
	require.LessOrEqual(t, len(ln.halfOpen), maxHalfOpen)
	require.GreaterOrEqual(t, len(ln.halfOpen), maxHalfOpen-1)
}

func TestAFullBacklogRejects(t *testing.T) {
	leaksNoDescriptor(t)
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 2)
	dial := func() *end {
		e := resolved(t, newChannel(t), l.LocalAddr())
		e.createQP(100)
		require.NoError(t, e.id.Connect(verbs.ConnParam{}))
		return e
	}
	waiting := []*end{dial(), dial()}
	requests := []*verbs.Event{next(t, ch, verbs.EventConnectRequest), next(t, ch, verbs.EventConnectRequest)}
	require.ErrorIs(t, next(t, dial().ch, verbs.EventRejected).Err, syscall.ECONNREFUSED)

	// Each way out of the backlog makes room for one.
	require.NoError(t, requests[0].ID.Reject(nil))
	require.NoError(t, requests[0].ID.Destroy())
	waiting = append(waiting, dial())
	requests = append(requests, next(t, ch, verbs.EventConnectRequest))
	require.NoError(t, requests[1].ID.Destroy())
	waiting = append(waiting, dial())
	requests = append(requests, next(t, ch, verbs.EventConnectRequest))
	accept(t, ch, requests[2], 100, verbs.ConnParam{})
	next(t, ch, verbs.EventEstablished)
	dial()
	next(t, ch, verbs.EventConnectRequest).ID.Destroy()
	require.NoError(t, requests[3].ID.Destroy())
	outcomes := map[verbs.EventType]int{}
	for _, e := range waiting {
		eventually(t, "an outcome", func() bool {
			ev, err := e.ch.GetEvent()
			if err == nil {
				outcomes[ev.Type]++
			}
			return err == nil
		})
	}
	require.Equal(t, map[verbs.EventType]int{verbs.EventRejected: 3, verbs.EventEstablished: 1}, outcomes)
}

func TestDestroyOfAListenerTurnsAwayWhoeverIsThere(t *testing.T) {
	leaksNoDescriptor(t)
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 8)
	silent, half := dialPeer(t, l.LocalAddr()), dialPeer(t, l.LocalAddr())
	half.write([]byte("MPA ID"))
	pending := resolved(t, newChannel(t), l.LocalAddr())
	pending.createQP(100)
	require.NoError(t, pending.id.Connect(verbs.ConnParam{}))
	ln := l.(*id).listener
	eventually(t, "a connect request", func() bool {
		ln.mu.Lock()
		defer ln.mu.Unlock()
		return ln.waiting == 1 && len(ln.halfOpen) == 2
	})
	within(t, 5*time.Second, "Destroy", func() { require.NoError(t, l.Destroy()) })
	require.ErrorIs(t, next(t, pending.ch, verbs.EventRejected).Err, syscall.ECONNREFUSED)
	for _, p := range []*peer{silent, half} {
		_, err := p.Read(make([]byte, 1))
		require.Error(t, err)
		require.False(t, isTimeout(err))
	}
	nothingMore(t, ch)
	_, err := net.Dial("tcp", l.LocalAddr().String())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

// deafListener returns the address of a socket whose backlog is full, so that a
// connect to it goes unanswered.
func deafListener(t *testing.T) netip.AddrPort {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	require.NoError(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, unix.Listen(fd, 0))
	sa, err := unix.Getsockname(fd)
	require.NoError(t, err)
	addr := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(sa.(*unix.SockaddrInet4).Port))
	dialPeer(t, addr)
	return addr
}

func TestDestroyCancelsAConnectAtOnce(t *testing.T) {
	leaksNoDescriptor(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	for name, addr := range map[string]netip.AddrPort{
		"in TCP's handshake": deafListener(t),
		"in the set-up":      silent.Addr().(*net.TCPAddr).AddrPort(),
	} {
		t.Run(name, func(t *testing.T) {
			for i := range 100 { // with all timings
				ch := newChannel(t)
				e := resolved(t, ch, addr)
				e.createQP(100)
				require.NoError(t, e.id.Connect(verbs.ConnParam{}))
				for range i * 50 {
					e.id.LocalAddr()
				}
				within(t, 5*time.Second, "Destroy", func() {
					require.NoError(t, e.qp.Destroy())
					require.NoError(t, e.id.Destroy())
				})
				e.settles()
				nothingMore(t, ch)
			}
		})
	}
}

func TestSetupIsReadToItsLastByteAndNoFurther(t *testing.T) {
	f := wire.SetupFrame{Revision: 2, Enhanced: true, PrivateData: []byte("private")}
	b := append(setupBytes(t, f), "behind"...)
	r := bytes.NewReader(b)
	for _, r := range []io.Reader{r, iotest.OneByteReader(bytes.NewReader(b))} {
		got, err := readSetup(r, false)
		require.NoError(t, err)
		require.Equal(t, f, got)
	}
	require.Equal(t, len("behind"), r.Len())
}
