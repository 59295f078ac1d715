package iwarp

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// depths lets both sides of a pair have n RDMA READs outstanding.
func depths(n uint8) verbs.ConnParam {
	return verbs.ConnParam{ResponderResources: n, InitiatorDepth: n}
}

// pairWith is pair, with the same parameters on both sides.
func pairWith(t testing.TB, block int, p verbs.ConnParam) (a, b *end) {
	ch := newChannel(t)
	l := listenOn(t, ch, "127.0.0.1:0", 8)
	a = resolved(t, ch, l.LocalAddr())
	a.createQP(block)
	require.NoError(t, a.id.Connect(p))
	b = accept(t, ch, next(t, ch, verbs.EventConnectRequest), block, p)
	next(t, ch, verbs.EventEstablished)
	next(t, ch, verbs.EventEstablished)
	return a, b
}

// region is registered memory.
type region struct {
	verbs.MR
	mem []byte
}

func (e *end) register(mem []byte, access verbs.Access) *region {
	return &region{regMR(e.t, e.pd, mem, access), mem}
}

func (r *region) sge(from, n int) []verbs.SGE {
	return []verbs.SGE{{Data: r.mem[from : from+n], LKey: r.LKey()}}
}

// wr is an RDMA WRITE from, or READ to, sgl, of what is at off in the region.
func (r *region) wr(id uint64, op verbs.WROp, sgl []verbs.SGE, off int) verbs.SendWR {
	return verbs.SendWR{WRID: id, Op: op, SGL: sgl, RemoteAddr: addressOf(r.mem) + uint64(off), RKey: r.RKey()}
}

// Both ends write to, read from and send to each other at the same time. What is
// written is as long as what is read again, so all is checked.
func TestRDMABothWaysArrivesWhole(t *testing.T) {
	const size, block = 1 << 20, 5000
	for _, crc := range []bool{false, true} {
		p := depths(4)
		p.CRC = crc
		a, b := pairWith(t, block, p)
		theirs := map[*end]*region{a: b.register(make([]byte, size), remoteBoth), b: a.register(make([]byte, size), remoteBoth)}
		var running sync.WaitGroup
		var finished sync.WaitGroup
		finished.Add(2)
		done := make(chan struct{})
		go func() { finished.Wait(); close(done) }()
		for i, e := range []*end{a, b} {
			running.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(i), 5))
				source, sink := e.register(randomBytes(size), localOnly), e.register(make([]byte, size), localOnly)
				id := uint64(1000)
				post := func(wr verbs.SendWR) {
					wr.WRID = id
					id++
					for e.send(wr) != nil {
						e.poll()
					}
				}
				for at := 0; at < size; {
					n := min(size-at, rnd.IntN(1<<rnd.IntN(18)))
					wr := theirs[e].wr(0, verbs.WRRDMAWrite, source.sge(at, n), at)
					if n > 1 {
						k := 1 + rnd.IntN(n-1)
						wr.SGL = append(source.sge(at, k), source.sge(at+k, n-k)...)
					}
					wr.Inline = rnd.IntN(2) == 0
					post(wr)
					post(theirs[e].wr(0, verbs.WRRDMARead, sink.sge(at, n), at))
					if len(e.sent) < 100 || rnd.IntN(3) == 0 {
						post(verbs.SendWR{Inline: true, SGL: []verbs.SGE{{Data: source.mem[:rnd.IntN(block)]}}})
					}
					at += n
					e.poll()
				}
				waitSent := func() bool { e.poll(); return e.outstanding() == testDepth }
				eventually(t, "everything sent", waitSent)
				require.True(t, bytes.Equal(source.mem, sink.mem))
				finished.Done()
				for {
					select {
					case <-done:
						return
					default:
						e.poll() // the other may still read here
					}
				}
			})
		}
		within(t, 4*patience, "the transfer", running.Wait)
		require.Empty(t, a.bad)
		require.Empty(t, b.bad)
		require.True(t, bytes.Equal(randomBytes(size), theirs[a].mem))
		require.True(t, bytes.Equal(randomBytes(size), theirs[b].mem))
	}
}

// peerReads reads FPDUs from a peer as they come.
func (p *peer) next() fpdu {
	b := make([]byte, wire.FPDUHeaderLen)
	p.fill(b)
	n := wire.FPDUHeader(b)
	rest := make([]byte, n+wire.TrailerLen(n))
	p.fill(rest)
	return parseFPDUs(p.t, append(b, rest...), p.crc)[0]
}

func (p *peer) fill(b []byte) {
	for len(b) > 0 {
		n, err := p.Read(b)
		require.NoError(p.t, err)
		b = b[n:]
	}
}

// wcs polls until n sends have completed, and returns them.
func (e *end) wcs(n int) (ids []uint64) {
	eventually(e.t, "completions", func() bool {
		var wc [4]verbs.WC
		k, err := e.cq.Poll(wc[:])
		require.NoError(e.t, err)
		for _, w := range wc[:k] {
			require.Equal(e.t, verbs.OpSend, w.Op)
			require.Equal(e.t, verbs.StatusSuccess, w.Status)
			e.sent[w.WRID] = false
			ids = append(ids, w.WRID)
		}
		return len(ids) >= n
	})
	return ids
}

// What may overtake an RDMA READ does, on the wire, and nothing does in the CQ.
func TestOrderOfTheSendQueue(t *testing.T) {
	param := verbs.ConnParam{InitiatorDepth: 2}
	withPeers(t, "queue", param, func(t *testing.T, e *end, p *peer) {
		e.repost = false
		text := func(s string) []verbs.SGE { return []verbs.SGE{{Data: []byte(s)}} }
		sink := e.register(make([]byte, 100), localOnly)
		read := func(id uint64, n int) verbs.SendWR {
			return verbs.SendWR{WRID: id, Op: verbs.WRRDMARead, SGL: sink.sge(int(id)*10, n), RKey: 7, RemoteAddr: 1 << id}
		}
		fenced := verbs.SendWR{WRID: 6, Inline: true, SGL: text("fenced"), Fence: true}
		large := bytes.Repeat([]byte("large"), smallSend)
		for _, wr := range []verbs.SendWR{
			read(1, 4),
			{WRID: 2, Inline: true, SGL: text("overtakes")},
			read(3, 0),
			read(4, 10), // ORD is 2
			{WRID: 5, Inline: true, SGL: text("behind 4")},
			fenced,
			{WRID: 7, Inline: true, Op: verbs.WRRDMAWrite, SGL: []verbs.SGE{{Data: large}}, RKey: 8, RemoteAddr: 9},
		} {
			require.NoError(t, e.send(wr))
		}
		clear(large) // ours again

		asks := func(msn uint32, id uint64, n int) {
			t.Helper()
			want := wire.ReadRequest{Size: uint32(n), SourceSTag: 7, SourceTO: 1 << id}
			if n > 0 {
				want.SinkSTag, want.SinkTO = sink.LKey(), addressOf(sink.mem)+id*10
			}
			require.Equal(t, readRequest(msn, want), p.next())
		}
		answers := func(id uint64, data string) {
			p.writeFPDU(tagged(wire.OpReadResponse, sink.LKey(), addressOf(sink.mem)+id*10, true, []byte(data)))
		}
		sends := func(want string) {
			t.Helper()
			require.Equal(t, want, string(p.next().payload))
		}
		asks(1, 1, 4)
		sends("overtakes")
		asks(2, 3, 0)
		require.Zero(t, e.poll())
		answers(1, "data")
		require.Equal(t, []uint64{1, 2}, e.wcs(2))
		asks(3, 4, 10)
		sends("behind 4")
		require.Zero(t, e.poll())
		p.writeFPDU(tagged(wire.OpReadResponse, 99, 98, true, nil)) // of no bytes: names nothing
		require.Equal(t, []uint64{3}, e.wcs(1))
		answers(4, "0123456789")
		require.Equal(t, []uint64{4, 5, 6, 7}, e.wcs(4))
		sends("fenced")
		got := ""
		for at := 0; at < 5*smallSend; {
			f := p.next()
			require.Equal(t, tagged(wire.OpWrite, 8, uint64(9+at), at+len(f.payload) == 5*smallSend, f.payload), f)
			got, at = got+string(f.payload), at+len(f.payload)
		}
		require.Equal(t, string(bytes.Repeat([]byte("large"), smallSend)), got)
		require.Equal(t, "data", string(sink.mem[10:14]))
		require.Equal(t, "0123456789", string(sink.mem[40:50]))
		require.NoError(t, e.qp.SetError())
		e.settles()
	})
}

func TestRequestsOfNoBytesNameNothing(t *testing.T) {
	a, b := pairWith(t, 100, depths(1))
	require.NoError(t, a.send(verbs.SendWR{WRID: 1, Op: verbs.WRRDMAWrite, RemoteAddr: 1, RKey: 2}))
	require.NoError(t, a.send(verbs.SendWR{WRID: 2, Op: verbs.WRRDMARead, RemoteAddr: 3, RKey: 4}))
	require.NoError(t, a.send(verbs.SendWR{WRID: 3, Op: verbs.WRRDMARead, SGL: []verbs.SGE{{LKey: a.mr.LKey()}}}))
	eventually(t, "completions", func() bool { b.poll(); a.poll(); return a.sends == 3 })
	require.Empty(t, a.bad)
}

func TestSendQueueRefusesWhatItCannotDo(t *testing.T) {
	a, _ := pairWith(t, 100, depths(1))
	none, _ := pairWith(t, 100, verbs.ConnParam{})
	sink, readOnly := a.register(make([]byte, 10), localOnly), a.register(make([]byte, 10), remoteRead)
	for _, c := range []struct {
		name  string
		e     *end
		wr    verbs.SendWR
		errno syscall.Errno
	}{
		{"unknown operation", a, verbs.SendWR{Op: 3}, syscall.EINVAL},
		{"inline READ", a, verbs.SendWR{Op: verbs.WRRDMARead, Inline: true, SGL: sink.sge(0, 10)}, syscall.EINVAL},
		{"READ to two places", a, verbs.SendWR{Op: verbs.WRRDMARead, SGL: append(sink.sge(0, 5), sink.sge(5, 5)...)}, syscall.EINVAL},
		{"READ to memory that may not be written", a, verbs.SendWR{Op: verbs.WRRDMARead, SGL: readOnly.sge(0, 10)}, syscall.EFAULT},
		{"READ to memory of nobody", a, verbs.SendWR{Op: verbs.WRRDMARead, SGL: []verbs.SGE{{Data: make([]byte, 10), LKey: sink.LKey()}}}, syscall.EFAULT},
		{"READ where none was agreed", none, verbs.SendWR{Op: verbs.WRRDMARead}, syscall.EINVAL},
	} {
		require.Equal(t, c.errno, c.e.send(c.wr), c.name)
	}
	require.NoError(t, a.send(verbs.SendWR{WRID: 1, Op: verbs.WRRDMAWrite, SGL: readOnly.sge(0, 0)}))
}

// A queue full of requests that wait for an RDMA READ takes no more, however
// little of them is still to be sent.
func TestARequestHasItsPlaceUntilItCompletes(t *testing.T) {
	e, p := connectPeerWith(t, false, 100, wire.SetupFrame{Revision: 2, Enhanced: true, IRD: 1}, depths(1))
	require.NoError(t, e.send(verbs.SendWR{WRID: 100, Op: verbs.WRRDMARead}))
	for i := range uint64(testDepth - 1) {
		require.NoError(t, e.send(verbs.SendWR{WRID: 101 + i}))
	}
	require.Equal(t, syscall.ENOMEM, e.send(verbs.SendWR{WRID: 200}))
	p.writeFPDU(tagged(wire.OpReadResponse, 0, 0, true, nil))
	require.Len(t, e.wcs(testDepth), testDepth)
	require.NoError(t, e.send(verbs.SendWR{WRID: 200}))
}

func TestTheEndFlushesRDMAReads(t *testing.T) {
	e, p := connectPeerWith(t, false, 100, wire.SetupFrame{Revision: 2, Enhanced: true, IRD: 1}, depths(1))
	for i, wr := range []verbs.SendWR{
		{Op: verbs.WRRDMARead}, {Inline: true, SGL: []verbs.SGE{{Data: []byte("sent")}}}, {Op: verbs.WRRDMARead}, {Inline: true, Fence: true},
	} {
		wr.WRID = uint64(100 + i)
		require.NoError(t, e.send(wr))
	}
	require.Equal(t, wire.OpReadRequest, p.next().Opcode)
	require.Equal(t, "sent", string(p.next().payload))
	require.NoError(t, p.CloseWrite())
	e.settles()
	for i, w := range e.bad[testDepth:] {
		require.EqualValues(t, 100+i, w.WRID)
	}
	require.Len(t, e.bad, testDepth+4)
}

// Answers and the send queue take turns, by messages.
func TestAnswersAndSendsTakeTurns(t *testing.T) {
	ch := newChannel(t)
	l := newTape()
	l.room = 0
	q, _ := onTapeWith(t, ch, l, 536, agreed{ird: 4}, verbs.QPCap{SendWR: 4, RecvWR: 1, SendSGE: 1})
	m := newTapeMemory()
	defer m.register(t, q)()
	for msn := range uint32(4) {
		f := readRequest(msn+1, wire.ReadRequest{SinkSTag: msn, Size: 1200, SourceSTag: tapeReadable, SourceTO: readableAt})
		l.in = appendFPDU(l.in, false, f.Header, f.payload)
	}
	q.progress(1, shortIsEmpty)
	for id := range uint64(4) {
		_, err := q.PostSend([]verbs.SendWR{{WRID: id, Inline: true, SGL: []verbs.SGE{{Data: make([]byte, 800)}}}})
		require.NoError(t, err)
	}
	l.give(1 << 20)
	eventually(t, "all of it sent", func() bool {
		q.tx.mu.Lock()
		defer q.tx.mu.Unlock()
		return !q.tx.flushing
	})
	var order []string
	for _, f := range parseFPDUs(t, l.out, false) {
		if f.Last {
			order = append(order, f.Opcode.String())
		}
	}
	answer, send := wire.OpReadResponse.String(), wire.OpSend.String()
	require.Equal(t, []string{answer, send, answer, send, answer, send, answer, send}, order[len(order)-8:])
	require.Equal(t, make([]byte, 64), m.foreign)
	q.abort()
}

// Deregistration does not wait for a peer that reads slowly. It gets a Terminate
// in the place of the rest.
func TestMemoryDeregisteredWhileItIsReadEndsTheConnection(t *testing.T) {
	const size = 64 << 20
	e, p := connectPeerWith(t, false, 100, wire.SetupFrame{Revision: 2, Enhanced: true, ORD: 1}, depths(1))
	m := e.register(make([]byte, size), remoteRead)
	request := readRequest(1, wire.ReadRequest{SinkSTag: 1, SinkTO: 2, Size: size, SourceSTag: m.RKey(), SourceTO: addressOf(m.mem)})
	p.writeFPDU(request)
	q := e.qp.(*qp)
	eventually(t, "a full socket", func() bool {
		e.poll()
		q.tx.mu.Lock()
		defer q.tx.mu.Unlock()
		return q.tx.flushing
	})
	require.NoError(t, m.Dereg())
	var last fpdu
	for last.Opcode != wire.OpTerminate {
		last = p.next()
		require.Contains(t, []wire.Opcode{wire.OpReadResponse, wire.OpTerminate}, last.Opcode)
		require.False(t, last.Opcode == wire.OpReadResponse && last.Last)
	}
	tm, err := wire.ParseTerminate(last.payload)
	require.NoError(t, err)
	require.Equal(t, wire.CodeRDMAPInvalidSTag, tm.Code)
	require.Equal(t, request.payload, tm.RDMAPHeader)
	require.ErrorContains(t, next(t, e.ch, verbs.EventDisconnected).Err, "deregistered while it was read")
	e.settles()
}

// Whoever deregisters memory may unmap it: nothing is written there afterwards.
func TestNothingIsWrittenAfterDeregistration(t *testing.T) {
	const size = 50_000
	for range 20 {
		e, p := connectPeer(t, false, 100, false)
		m := e.register(make([]byte, size), remoteWrite)
		f := tagged(wire.OpWrite, m.RKey(), addressOf(m.mem), true, bytes.Repeat([]byte{1}, size))
		b := makeFPDU(false, f.Header, f.payload)
		var running sync.WaitGroup
		running.Go(func() {
			for {
				if _, err := p.Write(b); err != nil {
					return
				}
			}
		})
		q := e.qp.(*qp)
		running.Go(func() {
			var wc [4]verbs.WC
			for q.open.Load() {
				e.cq.Poll(wc[:])
			}
		})
		eventually(t, "something written", func() bool {
			q.rx.mu.Lock()
			defer q.rx.mu.Unlock()
			return m.mem[0] == 1
		})
		require.NoError(t, m.Dereg())
		clear(m.mem) // the race detector looks on
		eventually(t, "the end", func() bool { return !q.open.Load() })
		p.Close()
		running.Wait()
		require.Equal(t, make([]byte, size), m.mem)
		require.ErrorContains(t, next(t, e.ch, verbs.EventDisconnected).Err, wire.CodeDDPInvalidSTag.String())
	}
}
