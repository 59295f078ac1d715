package iwarp

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// tape is a link without a socket: what is on it is read in pieces of a given
// size, and what is written is recorded, as far as there is room.
type tape struct {
	piece   func() int // bytes that the next read may have; nil is any number
	segment int        // what mss returns

	mu     sync.Mutex
	in     []byte
	eof    bool
	out    []byte
	room   int // bytes that may be written before EAGAIN
	closed bool
	change sync.Cond
	after  func() // called between the end of awaitWrite's work and its return
}

func newTape() *tape {
	l := &tape{room: 1 << 40}
	l.change.L = &l.mu
	return l
}

func (l *tape) read(p []byte) (int, error) { return l.readv([][]byte{p}) }

func (l *tape) readv(p [][]byte) (n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	piece := len(l.in)
	if l.piece != nil {
		piece = min(piece, l.piece())
	}
	switch {
	case len(l.in) == 0 && l.eof:
		return 0, nil
	case piece == 0:
		return -1, unix.EAGAIN
	}
	for _, b := range p {
		k := copy(b, l.in[:piece-n])
		l.in = l.in[k:]
		n += k
		if n == piece {
			break
		}
	}
	return n, nil
}

func (l *tape) pending() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.in) > 0 || l.eof
}

func (l *tape) writev(p [][]byte) (n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range p {
		k := min(len(b), l.room)
		l.out = append(l.out, b[:k]...)
		l.room -= k
		n += k
	}
	if n == 0 {
		return -1, unix.EAGAIN
	}
	return n, nil
}

func (l *tape) mss() int { return l.segment }

// give makes room for n more bytes.
func (l *tape) give(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.room += n
	l.change.Broadcast()
}

func (l *tape) awaitRead(done func(uintptr) bool) error { panic("a tape is polled") }

func (l *tape) awaitWrite(done func(uintptr) bool) error {
	for !done(0) {
		l.mu.Lock()
		for l.room == 0 && !l.closed {
			l.change.Wait()
		}
		closed := l.closed
		l.mu.Unlock()
		if closed {
			return syscall.ECONNABORTED
		}
	}
	if l.after != nil {
		l.after()
	}
	return nil
}

func (l *tape) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.change.Broadcast()
	return nil
}

func (l *tape) SetWriteDeadline(time.Time) error { return l.Close() }
func (l *tape) SetReadDeadline(time.Time) error  { return nil }
func (l *tape) Read([]byte) (int, error)         { return 0, io.EOF }
func (l *tape) CloseWrite() error                { return nil }
func (l *tape) SetLinger(int) error              { return nil }

// onTape is a QP on a tape.
func onTape(t testing.TB, ch *eventChannel, l *tape, mss int, crc bool, want verbs.QPCap) (*qp, *cq) {
	return onTapeWith(t, ch, l, mss, agreed{crc: crc}, want)
}

func onTapeWith(t testing.TB, ch *eventChannel, l *tape, mss int, a agreed, want verbs.QPCap) (*qp, *cq) {
	l.segment = mss
	return onLink(t, ch, l, a, want)
}

func onLink(t testing.TB, ch *eventChannel, l link, a agreed, want verbs.QPCap) (*qp, *cq) {
	c := newCQ(want.SendWR + want.RecvWR)
	q, err := newQP(newID(ch), &pd{}, c, want)
	require.NoError(t, err)
	require.NoError(t, q.start(l, a, &verbs.Event{Type: verbs.EventEstablished}))
	next(t, ch, verbs.EventEstablished)
	t.Cleanup(func() {
		q.Destroy()
		q.end.drain.Wait()
	})
	return q, c
}

// arena is registered memory with receives in it, and guards between them.
type arena struct {
	mem  []byte
	lkey uint32
	at   [][]byte
}

const guard = 32

func newArena(t testing.TB, q *qp, sizes ...int) *arena {
	total := guard
	for _, n := range sizes {
		total += n + guard
	}
	a := &arena{mem: bytes.Repeat([]byte{0xaa}, total)}
	a.lkey = regMR(t, q.pd, a.mem, verbs.AccessLocalWrite).LKey()
	at := guard
	for i, n := range sizes {
		a.at = append(a.at, a.mem[at:at+n])
		at += n + guard
		k, err := q.PostRecv([]verbs.RecvWR{{WRID: uint64(i), SGE: verbs.SGE{Data: a.at[i], LKey: a.lkey}}})
		require.NoError(t, err)
		require.Equal(t, 1, k)
	}
	return a
}

// guardsIntact fails the test if memory outside the receives has changed.
func (a *arena) guardsIntact(t testing.TB) {
	left := a.mem
	for _, b := range append(a.at, nil) {
		require.Equal(t, bytes.Repeat([]byte{0xaa}, guard), left[:guard])
		left = left[guard+len(b):]
	}
}

// digest identifies a message.
func digest(b []byte) string { return fmt.Sprintf("%d bytes, %x", len(b), sha256.Sum256(b)) }

// result is what became of a stream.
type result struct {
	got     []string // digests
	code    int      // of the Terminate, or -1
	end     bool
	memory  string   // what the peer may write to, a digest
	reads   int      // RDMA READs that are complete
	sink    string   // where their data goes, a digest
	answers []string // Read Responses
}

// expect is the straightforward way to receive a stream: all of it is there.
func expect(b []byte, crc bool, sizes []int) (r result) {
	r.code = -1
	fail := func(code wire.Code) result { r.code, r.end = int(code), true; return r }
	peer := newTapeMemory()
	defer func() { r.memory, r.sink = digest(peer.writable), digest(peer.sink) }()
	var msg []byte
	msn, readMSN := uint32(1), uint32(1)
	for {
		if len(b) < wire.FPDUHeaderLen {
			return r
		}
		n := wire.FPDUHeader(b)
		if len(b) < wire.FPDUHeaderLen+min(n, wire.UntaggedHeaderLen) {
			return r
		}
		h, err := wire.ParseHeader(b[wire.FPDUHeaderLen:][:min(n, wire.UntaggedHeaderLen)])
		size := n - h.Len()
		fault := wire.Code(0)
		switch {
		case err != nil:
			fault = err.(*wire.ProtocolError).Code
		case h.Opcode == wire.OpTerminate:
			if h.MSN != 1 || h.MO != 0 || !h.Last || size > wire.MaxTerminateLen {
				fault = wire.CodeDDPTooLong
			}
		case h.Tagged:
		case h.Opcode == wire.OpReadRequest && h.MSN != readMSN:
			fault = wire.CodeDDPMSNRange
		case h.Opcode == wire.OpReadRequest && h.MO != 0:
			fault = wire.CodeDDPInvalidMO
		case h.Opcode == wire.OpReadRequest && (size > wire.ReadRequestLen || !h.Last):
			fault = wire.CodeDDPTooLong
		case h.Opcode == wire.OpReadRequest:
			if size < wire.ReadRequestLen {
				fault = wire.CodeRDMAPUnspecified
			}
		case h.Opcode.Invalidates():
			fault = wire.CodeRDMAPCannotInvalidate
		case h.MSN != msn:
			fault = wire.CodeDDPMSNRange
		case uint64(h.MO) != uint64(len(msg)):
			fault = wire.CodeDDPInvalidMO
		case int(msn) > len(sizes):
			fault = wire.CodeDDPNoBuffer
		case len(msg)+size > sizes[msn-1]:
			fault = wire.CodeDDPTooLong
		}
		if fault != 0 && !crc {
			return fail(fault)
		}
		if len(b) < wire.FPDULen(n) {
			return r
		}
		ulpdu, trailer := b[:wire.FPDUHeaderLen+n], b[wire.FPDUHeaderLen+n:wire.FPDULen(n)]
		if crc && wire.CheckCRC(wire.UpdateCRC(0, ulpdu), trailer) != nil {
			return fail(wire.CodeMPACRC)
		}
		if fault != 0 {
			return fail(fault)
		}
		b = b[wire.FPDULen(n):]
		payload := ulpdu[wire.FPDUHeaderLen+h.Len():]
		switch {
		case h.Opcode == wire.OpTerminate:
			r.end = true
			return r
		case h.Opcode == wire.OpWrite:
			fault = peer.write(h, payload)
		case h.Opcode == wire.OpReadResponse:
			fault = peer.response(h, payload, &r)
		case h.Opcode == wire.OpReadRequest:
			readMSN++
			fault = peer.request(payload, &r)
		}
		if fault != 0 {
			return fail(fault)
		}
		if !h.Opcode.IsSend() {
			continue
		}
		msg = append(msg, payload...)
		if h.Last {
			r.got = append(r.got, digest(msg))
			msg = nil
			msn++
		}
	}
}

// receive lets a QP on a tape receive the stream, in pieces.
func receive(t testing.TB, ch *eventChannel, stream []byte, crc bool, sizes []int, piece func() int) (r result) {
	l := newTape()
	l.in, l.piece = stream, piece
	q, c := onTapeWith(t, ch, l, 1460, agreed{crc: crc, ird: 2, ord: len(tapeReads)},
		verbs.QPCap{SendWR: len(tapeReads), RecvWR: len(sizes), SendSGE: 1})
	a := newArena(t, q, sizes...)
	memory := newTapeMemory()
	defer memory.register(t, q)()
	memory.read(t, q)
	completed := make([]bool, len(sizes))
	flushed := 0
	poll := func() int {
		var wc [3]verbs.WC
		n, err := c.Poll(wc[:])
		require.NoError(t, err)
		for _, w := range wc[:n] {
			if w.Op == verbs.OpSend {
				require.EqualValues(t, r.reads+flushed, w.WRID, "RDMA READs complete in order")
				if w.Status == verbs.StatusSuccess {
					require.Zero(t, flushed)
					r.reads++
				} else {
					require.Equal(t, verbs.StatusWRFlushErr, w.Status)
					flushed++
				}
				continue
			}
			require.False(t, completed[w.WRID])
			completed[w.WRID] = true
			if w.Status == verbs.StatusSuccess {
				require.Len(t, r.got, int(w.WRID), "receives complete in order")
				require.LessOrEqual(t, w.ByteLen, sizes[w.WRID])
				r.got = append(r.got, digest(a.at[w.WRID][:w.ByteLen]))
			} else {
				require.Equal(t, verbs.StatusWRFlushErr, w.Status)
				require.Zero(t, w.ByteLen)
			}
		}
		return n
	}
	for idle := 0; idle < 2; {
		before := len(l.in)
		if poll() > 0 || len(l.in) < before || len(l.in) > 0 && q.open.Load() {
			idle = 0
		} else {
			idle++
		}
	}
	r.end, r.code = !q.open.Load(), -1
	out := parseFPDUs(t, l.out, crc)
	require.GreaterOrEqual(t, len(out), len(tapeReads))
	out = out[len(tapeReads):]
	if n := len(out); n > 0 && out[n-1].Opcode == wire.OpTerminate {
		tm, err := wire.ParseTerminate(out[n-1].payload)
		require.NoError(t, err)
		r.code = int(tm.Code)
		out = out[:n-1]
	}
	r.answers = joinAnswers(t, out)
	r.memory, r.sink = digest(memory.writable), digest(memory.sink)
	q.abort()
	for c.count.Load() > 0 {
		poll()
	}
	require.NotContains(t, completed, false)
	require.Equal(t, len(tapeReads), r.reads+flushed)
	a.guardsIntact(t)
	memory.othersIntact(t)
	next(t, ch, verbs.EventDisconnected)
	nothingMore(t, ch)
	return r
}

// randomStream is what a peer might send, well formed, in segments of any size,
// with other FPDUs in between.
func randomStream(rnd *rand.Rand, crc bool, sizes []int, others []fpdu) (stream []byte) {
	for i, size := range sizes {
		msg := make([]byte, size)
		for k := range msg {
			msg[k] = byte(rnd.Uint32())
		}
		for at := 0; ; {
			n := min(rnd.IntN(1<<rnd.IntN(14)), size-at)
			h := sendHeader(uint32(i+1), uint32(at), at+n == size && rnd.IntN(4) > 0)
			if rnd.IntN(2) == 0 {
				h.Opcode = wire.OpSendSolicited
			}
			stream = appendFPDU(stream, crc, h, msg[at:at+n])
			if rnd.IntN(4) == 0 && len(others) > 0 {
				stream = appendFPDU(stream, crc, others[0].Header, others[0].payload)
				others = others[1:]
			}
			if at += n; h.Last {
				break
			}
		}
	}
	return stream
}

func TestAStreamIsReceivedAlikeHoweverItIsCutUp(t *testing.T) {
	ch := newChannel(t)
	for seed := range uint64(100) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		crc := seed%2 == 0
		sizes := make([]int, 1+rnd.IntN(10))
		for i := range sizes {
			sizes[i] = rnd.IntN(1 << rnd.IntN(15))
		}
		stream := randomStream(rnd, crc, sizes, randomTagged(rnd))
		want := expect(stream, crc, sizes)
		require.Len(t, want.got, len(sizes))
		pieces := map[string]func() int{
			"whole":              nil,
			"small pieces":       func() int { return 1 + rnd.IntN(40) },
			"pieces of any size": func() int { return rnd.IntN(1 << rnd.IntN(15)) },
		}
		if seed%10 == 0 {
			pieces["single bytes"] = func() int { return 1 }
		}
		for name, piece := range pieces {
			got := receive(t, ch, stream, crc, sizes, piece)
			require.Equal(t, want, got, "seed %d, %s", seed, name)
		}
		cut := rnd.IntN(len(stream)) // and a stream with a random fault
		stream[cut] ^= byte(1 + rnd.IntN(255))
		want = expect(stream, crc, sizes)
		for name, piece := range pieces {
			require.Equal(t, want, receive(t, ch, stream, crc, sizes, piece), "seed %d with a fault, %s", seed, name)
		}
	}
}

// Every gather list comes out as the same message, whatever the sizes of its
// entries, the segments and what the socket takes at a time.
func TestEveryGatherListIsSentWhole(t *testing.T) {
	ch := newChannel(t)
	memory := randomBytes(1 << 20)
	for seed := range uint64(150) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		l := newTape()
		crc := seed%2 == 0
		q, c := onTape(t, ch, l, []int{0, 536, 600, 1460, 9000, 65483}[rnd.IntN(6)], crc, verbs.QPCap{SendWR: 64, RecvWR: 1, SendSGE: attr.MaxSGE})
		m := regMR(t, q.pd, memory, verbs.AccessLocalWrite)
		l.room = rnd.IntN(1 << rnd.IntN(20))

		var want []string
		var wrs []verbs.SendWR
		for i := range 1 + rnd.IntN(20) {
			wr := verbs.SendWR{WRID: uint64(i), Signaled: true, Solicited: i%3 == 0, Inline: i%2 == 0}
			msg := ""
			for range rnd.IntN(attr.MaxSGE + 1) {
				n := rnd.IntN(1 << rnd.IntN(15))
				switch rnd.IntN(4) {
				case 0:
					n = 0
				case 1:
					n = 1 + rnd.IntN(80)
				}
				at := rnd.IntN(len(memory) - n)
				sge := verbs.SGE{Data: memory[at : at+n : at+n], LKey: m.LKey()}
				if wr.Inline {
					sge = verbs.SGE{Data: bytes.Clone(sge.Data)}
				}
				wr.SGL = append(wr.SGL, sge)
				msg += string(sge.Data)
			}
			want = append(want, msg)
			wrs = append(wrs, wr)
		}
		for at := 0; at < len(wrs); { // some at a time
			k := at + 1 + rnd.IntN(len(wrs)-at)
			n, err := q.PostSend(wrs[at:k])
			for _, wr := range wrs[at : at+n] {
				for _, sge := range wr.SGL {
					if wr.Inline {
						clear(sge.Data) // ours again
					}
				}
			}
			if at += n; err != nil {
				require.ErrorIs(t, err, syscall.EAGAIN)
				require.Less(t, at, k)
				// Whoever is refused gets an event, however late it arms.
				l.give(rnd.IntN(1 << rnd.IntN(22)))
				if rnd.IntN(2) == 0 {
					l.give(1 << 40)
					eventually(t, "the flusher's end", func() bool {
						q.tx.mu.Lock()
						defer q.tx.mu.Unlock()
						return !q.tx.flushing
					})
					require.NoError(t, c.Arm(true))
					c.mu.Lock()
					require.True(t, c.woken)
					c.woken = false
					c.mu.Unlock()
				}
			} else {
				require.Equal(t, k, at)
			}
		}
		l.give(1 << 40)
		var wc [64]verbs.WC
		for done := 0; done < len(want); {
			n, err := c.Poll(wc[:])
			require.NoError(t, err)
			for _, w := range wc[:n] {
				require.Equal(t, verbs.WC{WRID: uint64(done), Op: verbs.OpSend}, w)
				done++
			}
		}
		var got []string
		msg, mo := "", 0
		for _, f := range parseFPDUs(t, l.out, crc) {
			require.EqualValues(t, len(got)+1, f.MSN)
			require.EqualValues(t, mo, f.MO)
			require.LessOrEqual(t, len(f.payload), q.maxPayload)
			require.Equal(t, len(got)%3 == 0, f.Opcode.Solicited())
			msg, mo = msg+string(f.payload), mo+len(f.payload)
			if f.Last {
				got, msg, mo = append(got, msg), "", 0
			}
		}
		require.Equal(t, len(want), len(got))
		for i := range want {
			require.True(t, want[i] == got[i], "seed %d, message %d", seed, i)
		}
		q.abort()
		next(t, ch, verbs.EventDisconnected)
	}
}

// A send that is posted while the flusher is about to end must not be left to it.
func TestNoSendIsLeftBehindByTheFlusher(t *testing.T) {
	l := newTape()
	q, c := onTape(t, newChannel(t), l, 1460, false, verbs.QPCap{SendWR: 4, RecvWR: 1, SendSGE: 1})
	post := func(id uint64) {
		n, err := q.PostSend([]verbs.SendWR{{WRID: id, Signaled: true, Inline: true, SGL: []verbs.SGE{{Data: []byte("x")}}}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	posted := make(chan struct{})
	l.after = func() {
		post(2)
		close(posted)
	}
	l.room = 10
	post(1)
	l.give(1 << 20)
	<-posted
	eventually(t, "both sends", func() bool { return c.count.Load() == 2 })
	require.Len(t, parseFPDUs(t, l.out, false), 2)
}

func TestWorkRequestsOutsideRegisteredMemoryAreRefused(t *testing.T) {
	q, _ := onTape(t, newChannel(t), newTape(), 1460, false, verbs.QPCap{SendWR: 1, RecvWR: 1, SendSGE: 2})
	mem := make([]byte, 300)
	region := regMR(t, q.pd, mem[100:200], verbs.AccessLocalWrite)
	readOnly := regMR(t, q.pd, mem[100:200], 0)
	gone := regMR(t, q.pd, mem, verbs.AccessLocalWrite)
	require.NoError(t, gone.Dereg())
	require.ErrorIs(t, gone.Dereg(), syscall.EINVAL)
	foreign := regMR(t, &pd{}, mem, verbs.AccessLocalWrite)
	for _, c := range []struct {
		name       string
		sge        verbs.SGE
		send, recv error
	}{
		{"before it", verbs.SGE{Data: mem[99:101], LKey: region.LKey()}, syscall.EFAULT, syscall.EFAULT},
		{"behind it", verbs.SGE{Data: mem[199:201], LKey: region.LKey()}, syscall.EFAULT, syscall.EFAULT},
		{"around it", verbs.SGE{Data: mem, LKey: region.LKey()}, syscall.EFAULT, syscall.EFAULT},
		{"longer than it", verbs.SGE{Data: mem[100:300], LKey: region.LKey()}, syscall.EFAULT, syscall.EFAULT},
		{"no key", verbs.SGE{Data: mem[100:200]}, syscall.EFAULT, syscall.EFAULT},
		{"key of none", verbs.SGE{Data: mem[100:200], LKey: 1 << 31}, syscall.EFAULT, syscall.EFAULT},
		{"key off by one", verbs.SGE{Data: mem[100:200], LKey: region.LKey() + 1}, syscall.EFAULT, syscall.EFAULT},
		{"of another PD", verbs.SGE{Data: mem[100:200], LKey: foreign.LKey()}, syscall.EFAULT, syscall.EFAULT},
		{"deregistered", verbs.SGE{Data: mem[100:200], LKey: gone.LKey()}, syscall.EFAULT, syscall.EFAULT},
		{"not writable", verbs.SGE{Data: mem[100:200], LKey: readOnly.LKey()}, nil, syscall.EFAULT},
		{"all of it", verbs.SGE{Data: mem[100:200], LKey: region.LKey()}, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := q.PostSend([]verbs.SendWR{{SGL: []verbs.SGE{c.sge}}})
			require.Equal(t, c.send, err)
			_, err = q.PostRecv([]verbs.RecvWR{{SGE: c.sge}})
			require.Equal(t, c.recv, err)
		})
	}
	_, err := q.PostSend([]verbs.SendWR{{SGL: make([]verbs.SGE, 3)}})
	require.Equal(t, syscall.EINVAL, err)
	_, err = q.PostRecv([]verbs.RecvWR{{SGE: verbs.SGE{Data: mem[100:200], LKey: region.LKey()}}})
	require.Equal(t, syscall.ENOMEM, err)
	_, err = q.pd.RegMR(nil, verbs.AccessLocalWrite)
	require.ErrorIs(t, err, syscall.EINVAL)
	for _, access := range []verbs.Access{verbs.AccessRemoteWrite, verbs.AccessRemoteWrite | verbs.AccessRemoteRead, 1 << 3} {
		_, err = q.pd.RegMR(mem, access)
		require.ErrorIs(t, err, syscall.EINVAL)
	}
}
