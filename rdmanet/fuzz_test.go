package rdmanet

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

func FuzzParseHeader(f *testing.F) {
	f.Add([]byte{})
	for typ := range frameType(6) {
		f.Add(frame(header{typ: typ, credits: 3}))
		f.Add(frame(header{typ: typ, credits: 65535, length: 2}, 1, 2))
	}
	f.Fuzz(func(t *testing.T, msg []byte) {
		h, err := parseHeader(msg)
		if err != nil {
			require.ErrorIs(t, err, syscall.EPROTO)
			return
		}
		require.Equal(t, len(msg), headerLen+h.length)
		require.Equal(t, h.typ == frameData, h.length > 0)
		again := frame(h, msg[headerLen:]...)
		again[1] = msg[1] // flags are for later versions
		require.Equal(t, msg, again)
	})
}

func FuzzParseGreeting(f *testing.F) {
	for _, g := range badGreetings {
		f.Add(g.private)
	}
	f.Add(honest())
	f.Add(append(honest(), make([]byte, 40)...))
	mine, err := Config{}.resolve()
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, b []byte) {
		g, refused := parseGreeting(b)
		if refused != nil {
			require.LessOrEqual(t, len(refused.append(nil)), maxRefusal)
			require.ErrorIs(t, refused, syscall.ECONNREFUSED)
			return
		}
		require.True(t, g.recvSize >= headerLen+minBufferSize && g.recvSize <= headerLen+maxBufferSize)
		require.True(t, g.dataSlots >= 1 && g.dataSlots <= maxSlots)
		require.Equal(t, b[:greetingLen-2], g.append(nil)[:greetingLen-2])
		reply, refused := parseGreeting(g.answer(mine.greeting()).append(nil))
		require.Nil(t, refused, "what we answer is understood")
		require.LessOrEqual(t, reply.version, g.version)
	})
}

func FuzzParseRefusal(f *testing.F) {
	f.Add([]byte{})
	for r := range reason(8) {
		f.Add(refuse(r, "some text").append(nil))
		f.Add(append(refuse(r, "").append(nil), 0, 0, 0))
	}
	f.Add(append([]byte("RDNR\x01\x01\x00\x04"), "\x1b[31m\xff\xfe\n"...))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := parseRefusal(b)
		if r == nil {
			return
		}
		require.ErrorIs(t, r, syscall.ECONNREFUSED)
		for _, c := range r.Error() {
			require.True(t, c >= ' ' && c != 0x7f, "%q is safe to log", r.Error())
		}
		require.LessOrEqual(t, len(r.append(nil)), maxRefusal)
		again := parseRefusal(r.append(nil))
		require.Equal(t, r.reason, again.reason)
	})
}

// FuzzFrames drives a connection with the frames of a raw peer, with completions of
// every status when they like to come, with faults, and with an application's calls
// in between. It checks after each that the state is one that makes sense, and at
// the end that everything is given back.
func FuzzFrames(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11})
	f.Add([]byte{1, 0, 1, 0, 1, 0, 1, 0, 5, 6, 1, 0, 5, 1, 0, 7, 7})
	for i := range 20 {
		f.Add(bytesOf(uint64(i), 10*i))
	}
	for status := range byte(30) { // of a send, and of a receive, with work on its way
		f.Add([]byte{10, 200, 10, 200, 0, 5, 11, 99, 15, 3, status, 6, 1, 10, 3})
		f.Add([]byte{0, 200, 0, 5, 8, 14, 0, 15, 4, status, 6, 100, 9, 0})
	}
	l, err := (&ListenConfig{Config: Config{Provider: "fake", BufferSize: 1024, RecvDepth: 3, SendDepth: 2}}).Listen(context.Background(), "rdma", "127.0.0.1:0")
	require.NoError(f, err)
	f.Cleanup(func() { l.Close() })
	was := held()
	f.Fuzz(func(t *testing.T, ops []byte) {
		r := rawConnect(t, "fake", l.(*Listener).addr.ap, greet("RDNT", 1, 1, headerLen+1024, 4), 4+controlSlots)
		r.l = l.(*Listener)
		r.sendWhenConnected(frame(header{typ: frameHello}))
		c := r.accepted()
		require.NoError(t, c.SetLinger(0))
		driveFrames(t, r, c, ops)
		require.NoError(t, c.Close())
		r.close()
		require.Equal(t, was, held(), "%v", fake.Live())
		for _, v := range fake.Violations() {
			t.Fatal(v)
		}
	})
}

func (r *rawPeer) sendWhenConnected(msg []byte) {
	r.wait(cm.EventEstablished)
	r.send(msg)
}

type framesFuzz struct {
	t    *testing.T
	r    *rawPeer
	c    *Conn
	held []*Buffer
	mine flow // what an honest peer would know
}

func driveFrames(t *testing.T, r *rawPeer, c *Conn, ops []byte) {
	s := &framesFuzz{t: t, r: r, c: c}
	s.mine.init(c.cfg.RecvDepth, 4)
	s.mine.fin = false
	defer func() {
		for _, b := range s.held {
			b.Release()
		}
	}()
	next := func() (b byte) {
		if len(ops) > 0 {
			b, ops = ops[0], ops[1:]
		}
		return b
	}
	for len(ops) > 0 {
		op := next()
		if os.Getenv("RDMANET_TEST_TRACE") != "" {
			t.Logf("op %d, flow %+v", op%16, c.flow)
		}
		s.step(op%16, next)
		c.poll()
		s.check()
	}
}

func (s *framesFuzz) step(op byte, next func() byte) {
	c := s.c
	switch op {
	case 0, 1: // an honest DATA frame
		s.send(data(1 + int(next())))
	case 2: // CREDIT
		s.send(frame(header{typ: frameCredit, credits: int(next() % 5)}))
	case 3: // FIN
		if next()%4 == 0 {
			s.send(frame(header{typ: frameFin}))
		}
	case 4: // anything, seldom
		if next()%8 == 0 {
			m := make([]byte, next()%20)
			for i := range m {
				m[i] = next()
			}
			s.send(m)
		}
	case 5: // any header
		if next()%8 == 0 {
			n := int(next())
			h := header{typ: frameType(next() % 6), credits: int(binary.BigEndian.Uint16([]byte{next() % 2, next()})), length: n}
			s.send(frame(h, make([]byte, n)...))
		}
	case 6, 7:
		if c.canRead() {
			_, err := c.Read(make([]byte, 1+int(next())*8))
			s.typed(err)
		}
	case 8:
		if c.canRead() {
			b, err := c.ReadBuffer()
			s.typed(err)
			if err == nil {
				s.held = append(s.held, b)
			}
		}
	case 9:
		if len(s.held) > 0 {
			i := int(next()) % len(s.held)
			s.held[i].Release()
			s.held = append(s.held[:i], s.held[i+1:]...)
		}
	case 10, 11:
		if c.canWrite() {
			_, err := c.Write(make([]byte, 1+int(next())*4))
			s.typed(err)
		}
	case 12:
		if len(s.held) > 0 && c.canWrite() {
			_, err := c.WriteBuffer(s.held[0])
			s.held = s.held[1:]
			s.typed(err)
		}
	case 13: // the peer takes what has come
		s.r.poll()
		for _, m := range s.r.got {
			h, err := parseHeader(m)
			require.NoError(s.t, err, "we send what is right")
			require.LessOrEqual(s.t, h.credits, c.cfg.RecvDepth)
		}
		s.r.got = nil
		if n := len(s.r.recvs); n < 4+controlSlots {
			s.r.post(4 + controlSlots - n)
		}
	case 14:
		if next()%4 == 0 {
			s.typed(c.CloseWrite())
		}
	case 15:
		switch next() % 16 {
		case 0:
			_ = s.r.qp.SetError()
		case 1:
			_ = s.r.id.Disconnect()
		case 2:
			s.typed(c.CloseRead())
		case 3:
			fake.Fault(c.qp.Num(), verbs.OpSend, verbs.Status(1+next()%30))
		case 4:
			fake.Fault(c.qp.Num(), verbs.OpRecv, verbs.Status(1+next()%30))
		}
	}
}

// send posts a frame, unless the raw peer's queue is full or over.
func (s *framesFuzz) send(m []byte) {
	if sends, _ := s.r.qp.Outstanding(); sends < 100 {
		s.r.send(m)
	}
}

func (s *framesFuzz) typed(err error) {
	if err == nil || err == io.EOF {
		return
	}
	var oe *net.OpError
	require.True(s.t, errors.As(err, &oe), "%T: %v", err, err)
	var errno syscall.Errno
	require.True(s.t, errors.As(err, &errno), "%v", err)
}

// check looks for a state that must not be.
func (s *framesFuzz) check() {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.flow
	if !c.rx.broken {
		require.True(s.t, f.credits >= 0 && f.credits <= f.theirs, "credits: %+v", f)
	}
	lent := 0
	for _, l := range c.rx.lent {
		if l {
			lent++
		}
	}
	require.True(s.t, f.granted >= 0 && f.granted <= f.window, "granted: %+v", f)
	require.True(s.t, f.owed >= 0 && f.owed+f.granted+c.rx.n+lent <= f.window, "owed: %+v, %d in the queue, %d lent", f, c.rx.n, lent)
	require.LessOrEqual(s.t, c.tx.posted-c.tx.done, uint64(c.cfg.sends()))
	require.GreaterOrEqual(s.t, c.tx.reserved, 0)
	if err := c.rx.err; err != nil && err != io.EOF {
		var errno syscall.Errno
		require.True(s.t, errors.As(err, &errno), "%v", err)
	}
}

// TestControlFramesNeverOutrunTheirSlots plays two honest sides against each
// other, at random and for long, in the state machine alone: a side's receives
// always suffice for what the other has sent, whether it sleeps or not.
func TestControlFramesNeverOutrunTheirSlots(t *testing.T) {
	for seed := range uint64(scaled(300, 20_000)) {
		rng := rand.New(stream(seed))
		windows := [2]int{1 + rng.IntN(17), 1 + rng.IntN(17)}
		type side struct {
			flow
			inbox          []header // sent to it, not yet polled
			unread         int
			finSent, awake bool
		}
		var s [2]side
		send := func(from int, typ frameType) {
			h := header{typ: typ, credits: s[from].take()}
			to := &s[1-from]
			to.inbox = append(to.inbox, h)
			control, dataFrames := 0, to.unread
			for _, h := range to.inbox {
				if h.typ == frameData {
					dataFrames++
				} else {
					control++
				}
			}
			require.LessOrEqual(t, control, controlSlots, "seed %d, windows %v", seed, windows)
			require.LessOrEqual(t, dataFrames, windows[1-from], "seed %d, windows %v", seed, windows)
		}
		for i := range s {
			s[i].init(windows[1-i], windows[i])
		}
		send(0, frameHello)
		for range 2000 {
			i := rng.IntN(2)
			me := &s[i]
			if rng.IntN(100) == 0 {
				me.awake = !me.awake
			}
			switch op := rng.IntN(8); {
			case op < 3 && me.credits > 0 && !me.finSent:
				me.credits--
				send(i, frameData)
			case op == 3 && rng.IntN(300) == 0 && !me.finSent:
				me.finSent = true
				send(i, frameFin)
			case op < 6 && me.awake: // poll
				for n := rng.IntN(len(me.inbox) + 1); n > 0; n-- {
					h := me.inbox[0]
					me.inbox = me.inbox[1:]
					require.NoError(t, me.receive(h, i == 1), "seed %d, windows %v", seed, windows)
					if h.typ == frameData {
						me.unread++
					}
				}
			case me.unread > 0: // read, or release
				me.unread--
				me.posted(1)
				if me.due(me.unread == 0 || rng.IntN(2) == 0) {
					send(i, frameCredit)
				}
			}
		}
	}
}
