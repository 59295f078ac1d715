package rdmanet

import (
	"encoding/binary"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
)

// greet makes a greeting of any content.
func greet(magic string, version, oldest byte, recvSize uint32, slots uint16) []byte {
	b := append([]byte(magic), version, oldest, 0, 0)
	b = binary.BigEndian.AppendUint32(b, recvSize)
	b = binary.BigEndian.AppendUint16(b, slots)
	return append(b, 0, 0)
}

const okSize, okSlots = headerLen + DefaultBufferSize, DefaultRecvDepth

// badGreetings are refused, with that reason.
var badGreetings = []struct {
	name    string
	private []byte
	reason  reason
}{
	{"nothing", nil, reasonNotOurs},
	{"one byte", []byte("R"), reasonNotOurs},
	{"short", greet("RDNT", 1, 1, okSize, okSlots)[:3], reasonNotOurs}, // InfiniBand fills up with zeros
	{"wrong magic", greet("RDNX", 1, 1, okSize, okSlots), reasonNotOurs},
	{"version 0", greet("RDNT", 0, 0, okSize, okSlots), reasonVersion},
	{"only later versions", greet("RDNT", 9, 2, okSize, okSlots), reasonVersion},
	{"versions upside down", greet("RDNT", 1, 2, okSize, okSlots), reasonVersion},
	{"no room", greet("RDNT", 1, 1, 0, okSlots), reasonBounds},
	{"too little room", greet("RDNT", 1, 1, headerLen+minBufferSize-1, okSlots), reasonBounds},
	{"too much room", greet("RDNT", 1, 1, headerLen+maxBufferSize+1, okSlots), reasonBounds},
	{"far too much room", greet("RDNT", 1, 1, 1<<32-1, okSlots), reasonBounds},
	{"no receives", greet("RDNT", 1, 1, okSize, 0), reasonBounds},
	{"too many receives", greet("RDNT", 1, 1, okSize, maxSlots+1), reasonBounds},
}

// shortenSetup lets set-ups time out soon.
func shortenSetup(t *testing.T, d time.Duration) {
	was := setupTimeout
	setupTimeout = d
	t.Cleanup(func() { setupTimeout = was })
}

func TestBadGreetingIsRefusedWithAReason(t *testing.T) {
	for _, tc := range badGreetings {
		t.Run(tc.name, func(t *testing.T) {
			checkLeaks(t)
			var log logBuffer
			l := listen(t, ListenConfig{Config: Config{Logger: log.logger()}})
			r := rawConnect(t, "", l.addr.ap, tc.private, 20)
			_, err := r.id.Wait(r.ctx(), cm.EventEstablished)
			var ee *cm.EventError
			require.ErrorAs(t, err, &ee)
			require.Equal(t, cm.EventRejected, ee.Type)
			why := parseRefusal(ee.PrivateData)
			require.NotNil(t, why)
			require.Equal(t, tc.reason, why.reason)
			eventually(t, func() bool { return log.has("refused", tc.reason.String()) }, "it is logged: %s", &log)
			a, b := pairOn(t, Config{}, l) // others are served
			closeLater(t, a, b)
			roundTrip(t, a, b, []byte("honest"))
		})
	}
}

func TestBadReplyFailsTheDial(t *testing.T) {
	for _, tc := range badGreetings {
		t.Run(tc.name, func(t *testing.T) {
			checkLeaks(t)
			r, dialed := rawListen(t, Config{}, tc.private, 20)
			_, err := dialed()
			requireOpError(t, err, "dial", syscall.EPROTO)
			require.ErrorContains(t, err, "does not speak our protocol")
			_ = r
		})
	}
}

// TestForeignRejectionFailsTheDial: by nobody who knows our refusals, or by one
// who lies about them.
func TestForeignRejectionFailsTheDial(t *testing.T) {
	for name, private := range map[string][]byte{
		"nothing": nil, "a word": []byte("no"), "a reason to come": append([]byte("RDNR\x01\x01\x00\x63"), "later\n\x1b[31m"...),
	} {
		t.Run(name, func(t *testing.T) {
			checkLeaks(t)
			r := newRaw(t, "")
			lid, err := r.ch.NewID()
			require.NoError(t, err)
			defer func() { require.NoError(t, lid.Destroy()) }()
			require.NoError(t, lid.Bind(mustAddr(testAddr(t))))
			require.NoError(t, lid.Listen(8))
			got := make(chan error, 1)
			go func() {
				_, err := (&Dialer{Timeout: patience}).Dial("rdma", lid.LocalAddr().String())
				got <- err
			}()
			ev, err := lid.Wait(r.ctx(), cm.EventConnectRequest)
			require.NoError(t, err)
			ev.Ack()
			require.NoError(t, ev.ID.Reject(private))
			err = <-got
			require.NoError(t, ev.ID.Destroy())
			requireOpError(t, err, "dial", syscall.ECONNREFUSED)
			require.NotContains(t, err.Error(), "\x1b")
			require.NotContains(t, err.Error(), "\n")
		})
	}
}

// offences are what a peer that passed the set-up must not send.
var offences = []struct {
	name string
	msgs [][]byte
	says string
}{
	{"short frame", [][]byte{{2, 0, 0}}, "frame of 3 bytes"},
	{"empty frame", [][]byte{{}}, "frame of 0 bytes"},
	{"unknown frame type", [][]byte{frame(header{typ: 99})}, "unknown frame type 99"},
	{"frame type 0", [][]byte{make([]byte, headerLen)}, "unknown frame type 0"},
	{"length too large", [][]byte{frame(header{typ: frameData, length: 100}, 1, 2, 3)}, "announces 100 bytes"},
	{"length too small", [][]byte{frame(header{typ: frameData, length: 1}, 1, 2, 3)}, "announces 1 bytes"},
	{"DATA of nothing", [][]byte{frame(header{typ: frameData})}, "DATA without a payload"},
	{"CREDIT with a payload", [][]byte{frame(header{typ: frameCredit, length: 1}, 1)}, "CREDIT with a payload"},
	{"FIN with a payload", [][]byte{frame(header{typ: frameFin, length: 1}, 1)}, "FIN with a payload"},
	{"HELLO again", [][]byte{frame(header{typ: frameHello})}, "HELLO"},
	{"too many credits", [][]byte{frame(header{typ: frameCredit, credits: 1})}, "returns 1 credits"},
	{"far too many credits", [][]byte{frame(header{typ: frameData, credits: 65535, length: 1}, 1)}, "returns 65535 credits"},
	{"second FIN", [][]byte{frame(header{typ: frameFin}), frame(header{typ: frameFin})}, "second FIN"},
	{"DATA after FIN", [][]byte{frame(header{typ: frameFin}), data(1)}, "DATA after FIN"},
	{"DATA without a credit", [][]byte{data(1), data(1), data(1)}, "DATA without a credit"},
}

func TestOffenderIsCutOffWithAReason(t *testing.T) {
	for _, side := range []string{"dialer", "listener"} {
		for _, tc := range offences {
			t.Run(side+"/"+tc.name, func(t *testing.T) {
				checkLeaks(t)
				var log logBuffer
				cfg := Config{RecvDepth: 2, Logger: log.logger()}
				var r *rawPeer
				var c *Conn
				var others net.Listener
				if side == "dialer" {
					r = rawDial(t, cfg, honest(), 20)
					r.sendHello()
					c, others = r.accepted(), r.l
				} else {
					var dialed func() (*Conn, error)
					r, dialed = rawListen(t, cfg, honest(), 20)
					var err error
					c, err = dialed()
					require.NoError(t, err)
					others = listen(t, ListenConfig{})
				}
				a, b := pairOn(t, Config{}, others) // honest ones
				closeLater(t, a, b)
				r.send(tc.msgs...)
				_ = c.SetDeadline(time.Now().Add(patience))
				eventually(t, func() bool { // nothing but the peer's frames makes it end
					c.poll()
					c.mu.Lock()
					defer c.mu.Unlock()
					return c.rx.broken
				}, "it is found out")
				_, err := io.Copy(io.Discard, c)
				if err != nil { // or FIN was right, and what came after it was not
					requireOpError(t, err, "read", syscall.EPROTO)
					require.ErrorContains(t, err, tc.says)
				}
				_, err = c.Write([]byte("x"))
				requireOpError(t, err, "write", syscall.EPROTO)
				require.ErrorContains(t, err, tc.says)
				require.True(t, log.has("aborted", tc.says, c.RemoteAddr().String()), &log)
				r.ended()
				require.NoError(t, c.Close())
				roundTrip(t, a, b, bytesOf(1, 100_000))
			})
		}
	}
}

func TestFirstFrameMustBeHello(t *testing.T) {
	checkLeaks(t)
	for _, first := range [][]byte{data(1), frame(header{typ: frameFin}), frame(header{typ: frameCredit}), {1}} {
		var log logBuffer
		r := rawDial(t, Config{Logger: log.logger()}, honest(), 20)
		r.send(first)
		eventually(t, func() bool {
			return log.has("connection refused", "EPROTO") || log.has("connection refused", "protocol error")
		}, "it is logged: %s", &log)
		r.ended()
		require.NoError(t, r.l.SetDeadline(time.Now().Add(10*time.Millisecond)))
		_, err := r.l.Accept()
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "nobody gets it")
	}
}

func TestSilenceAfterSetUpTimesOut(t *testing.T) {
	checkLeaks(t)
	shortenSetup(t, 300*time.Millisecond)
	var log logBuffer
	r := rawDial(t, Config{Logger: log.logger()}, honest(), 20)
	a, b := pairOn(t, Config{}, r.l) // an honest one is served meanwhile
	closeLater(t, a, b)
	roundTrip(t, a, b, []byte("honest"))
	eventually(t, func() bool { return log.has("connection refused", "did not begin") }, "it is logged: %s", &log)
	r.ended()
}

func TestPeerThatVanishesBeforeHello(t *testing.T) {
	checkLeaks(t)
	for _, how := range []string{"aborts", "disconnects"} {
		var log logBuffer
		r := rawDial(t, Config{Logger: log.logger()}, honest(), 20)
		if how == "aborts" {
			require.NoError(t, r.qp.SetError())
		} else {
			require.NoError(t, r.id.Disconnect())
		}
		eventually(t, func() bool { return log.has("connection refused") }, "it is logged: %s", &log)
		a, b := pairOn(t, Config{}, r.l)
		closeLater(t, a, b)
		roundTrip(t, a, b, []byte("honest"))
	}
}

// TestSilentSetUpsGiveWay: who fills the backlog with set-ups that never end
// loses the oldest, once it has had its time.
func TestSilentSetUpsGiveWay(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{Backlog: 4})
	for range 4 {
		rawConnect(t, "", l.addr.ap, honest(), 20).wait(cm.EventEstablished)
	}
	d := Dialer{}
	var c net.Conn
	var err error
	eventually(t, func() bool {
		c, err = d.Dial("rdma", l.Addr().String())
		if err != nil {
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
		}
		return err == nil
	}, "it gets in")
	closeLater(t, c)
	b, err := l.Accept()
	require.NoError(t, err)
	closeLater(t, b)
	roundTrip(t, c, b, []byte("honest"))
}

// TestCreditFloodIsHarmless: CREDIT frames that grant nothing are allowed, and
// cost a receive each, which comes back.
func TestCreditFloodIsHarmless(t *testing.T) {
	checkLeaks(t)
	r := rawDial(t, Config{}, honest(), 20)
	r.sendHello()
	c := r.accepted()
	go func() { _, _ = c.Read(make([]byte, 1)) }()
	for i := range uint64(1000) { // a device would end the connection for more than its receives take
		r.send(frame(header{typ: frameCredit}))
		eventually(t, func() bool { r.poll(); s, _ := r.qp.Outstanding(); return s == 0 }, "it goes out")
		eventually(t, func() bool { return c.Stats().FramesReceived == i+2 }, "it arrives: %d", i)
	}
	require.NoError(t, c.Close())
}

func TestPeerThatSpeaksLaterVersionsToo(t *testing.T) {
	checkLeaks(t)
	r := rawConnect(t, "", listenRaw(t), greet("RDNT", 7, 1, okSize, okSlots), 20)
	ev := r.wait(cm.EventEstablished)
	g, refused := parseGreeting(ev.PrivateData)
	require.Nil(t, refused)
	require.EqualValues(t, protocolVersion, g.version)
}

func TestOthersOnThePort(t *testing.T) {
	needsSoftware(t)
	checkLeaks(t)
	var log logBuffer
	l := listen(t, ListenConfig{Config: Config{Logger: log.logger()}})
	dial := func() net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
	silent := dial()
	_ = silent
	setUp := greet("RDNT", 1, 1, okSize, okSlots)
	for name, says := range map[string]string{
		"HTTP request": "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
		"TLS":          "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + string(bytesOf(1, 500)),
		"random bytes": string(bytesOf(2, 1000)),
		"our greeting": string(setUp),
		"truncated":    "MPA ID Req F",
	} {
		c := dial()
		_, err := io.WriteString(c, says) // in one segment
		require.NoError(t, err)
		_ = c.(*net.TCPConn).CloseWrite() // unless it is closed already
		_ = c.SetReadDeadline(time.Now().Add(patience))
		_, err = io.Copy(io.Discard, c) // it is closed, or reset
		require.False(t, err != nil && strings.Contains(err.Error(), "timeout"), "%s: %v", name, err)
		eventually(t, func() bool { return log.has("refused", c.LocalAddr().String()) }, "%s is logged: %s", name, &log)
		a, b := pairOn(t, Config{}, l)
		roundTrip(t, a, b, []byte("honest"))
		require.NoError(t, a.Close())
		require.NoError(t, b.Close())
	}
}
