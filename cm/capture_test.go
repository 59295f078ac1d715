package cm_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/qp"
)

// The tests of this file ask Wireshark's dissectors what they make of what iWARP
// in software sends and receives.

// segment is part of a TCP stream.
type segment struct {
	fromDialer bool
	payload    []byte
}

// stream is what one side sent.
func stream(segments []segment, fromDialer bool) (b []byte) {
	for _, s := range segments {
		if s.fromDialer == fromDialer {
			b = append(b, s.payload...)
		}
	}
	return b
}

// relay carries one TCP connection, and records it.
type relay struct {
	ln net.Listener
	wg sync.WaitGroup

	mu       sync.Mutex
	segments []segment // in the order in which they came
}

// captureMSS is the segment size of an Ethernet.
const captureMSS = 1460

// newRelay returns a relay to an address. Its segments on that side are as on an
// Ethernet, and on the dialer's side if it is an Ethernet: then messages take many
// FPDUs.
func newRelay(t *testing.T, to netip.AddrPort, ethernet bool) *relay {
	var lc net.ListenConfig
	if ethernet {
		lc.Control = setMSS
	}
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &relay{ln: ln}
	t.Cleanup(r.wait)
	r.wg.Go(func() {
		in, err := ln.Accept()
		if err != nil {
			return
		}
		defer in.Close()
		d := net.Dialer{Control: setMSS}
		out, err := d.Dial("tcp", to.String())
		for start := time.Now(); errors.Is(err, syscall.ECONNREFUSED) && time.Since(start) < patience; { // not yet
			time.Sleep(20 * time.Millisecond)
			out, err = d.Dial("tcp", to.String())
		}
		if err != nil {
			return
		}
		defer out.Close()
		var back sync.WaitGroup
		back.Go(func() { r.copy(in.(*net.TCPConn), out, false) })
		r.copy(out.(*net.TCPConn), in, true)
		back.Wait()
	})
	return r
}

func setMSS(_, _ string, c syscall.RawConn) (err error) {
	closed := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, captureMSS) })
	if closed != nil {
		return closed
	}
	return err
}

func (r *relay) addr() netip.AddrPort { return r.ln.Addr().(*net.TCPAddr).AddrPort() }

// copy carries one direction to its end.
func (r *relay) copy(to *net.TCPConn, from io.Reader, fromDialer bool) {
	defer to.CloseWrite()
	b := make([]byte, captureMSS)
	for {
		n, err := from.Read(b)
		if n > 0 {
			r.mu.Lock()
			r.segments = append(r.segments, segment{fromDialer, bytes.Clone(b[:n])})
			r.mu.Unlock()
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// wait waits for the connection's end.
func (r *relay) wait() {
	r.ln.Close()
	r.wg.Wait()
}

// portOf is the port of the listener of a capture's connection.
func portOf(connection int) uint16 { return uint16(7000 + connection) }

// writeCapture writes connections to a file in pcap's format, as IPv4 packets
// without a link layer.
func writeCapture(t *testing.T, connections [][]segment) (name string) {
	const linkRaw, snapLen = 101, 1 << 16
	le, be := binary.LittleEndian, binary.BigEndian
	file := le.AppendUint32(nil, 0xa1b2c3d4) // microseconds
	file = le.AppendUint16(le.AppendUint16(file, 2), 4)
	file = append(file, make([]byte, 8)...)
	file = le.AppendUint32(le.AppendUint32(file, snapLen), linkRaw)
	for c, segments := range connections {
		port := map[bool]uint16{true: 40000, false: portOf(c)}
		host := map[bool]byte{true: 1, false: 2}
		next := map[bool]uint32{true: 1, false: 1}
		for i, s := range segments {
			n := 20 + 20 + len(s.payload)
			for _, v := range []int{i, 0, n, n} { // seconds, microseconds, lengths
				file = le.AppendUint32(file, uint32(v))
			}
			file = be.AppendUint16(append(file, 0x45, 0), uint16(n))
			file = append(file, 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0, 10, 0, 0, host[s.fromDialer], 10, 0, 0, host[!s.fromDialer])
			file = be.AppendUint16(be.AppendUint16(file, port[s.fromDialer]), port[!s.fromDialer])
			file = be.AppendUint32(be.AppendUint32(file, next[s.fromDialer]), next[!s.fromDialer])
			file = append(file, 5<<4, 0x18, 0xff, 0xff, 0, 0, 0, 0) // ACK and PSH
			file = append(file, s.payload...)
			next[s.fromDialer] += uint32(len(s.payload))
		}
	}
	name = filepath.Join(t.TempDir(), "capture.pcap")
	require.NoError(t, os.WriteFile(name, file, 0o600))
	return name
}

// sight is how many there are of each part of a connection.
type sight map[string]int

func (s sight) of(op wire.Opcode) int { return s[opcodeKey(uint64(op))] }

func opcodeKey(code uint64) string { return fmt.Sprintf("opcode %d", code) }

const faults = "faults" // what is wrong

// expected is what two streams consist of, to the last byte, by our own reading of
// them. Its longest FPDU has longest bytes.
func expected(t *testing.T, streams ...[]byte) (s sight, longest int) {
	s = sight{}
	for _, b := range streams {
		f, n, err := wire.ParseSetup(b)
		require.NoError(t, err)
		kind := "Request"
		if f.Reply {
			kind = "Reply"
		}
		s[kind]++
		for b = b[n:]; len(b) > 0; {
			n := wire.FPDULen(wire.FPDUHeader(b))
			require.GreaterOrEqual(t, len(b), n)
			h, err := wire.ParseHeader(b[wire.FPDUHeaderLen:])
			require.NoError(t, err)
			s["FPDU"]++
			s["DDP"]++
			s[opcodeKey(uint64(h.Opcode))]++
			if f.CRC {
				s["CRC"]++
			}
			longest = max(longest, n)
			b = b[n:]
		}
	}
	return s, longest
}

// firstSend returns where the FPDU of the first message begins, in what the dialer
// sends. A slow listener is nudged before it, by RDMA WRITEs of no bytes.
func firstSend(t *testing.T, b []byte) int {
	_, at, err := wire.ParseSetup(b)
	require.NoError(t, err)
	for {
		h, err := wire.ParseHeader(b[at+wire.FPDUHeaderLen:])
		require.NoError(t, err)
		if h.Opcode != wire.OpWrite {
			return at
		}
		at += wire.FPDULen(wire.FPDUHeader(b[at:]))
	}
}

// What the dissectors say of each part, and of what is wrong with it.
var (
	parts = map[string]string{"Request frame header": "Request", "Reply frame header": "Reply", "FPDU": "FPDU", "DDP header": "DDP"}

	portsLine  = regexp.MustCompile(`^Transmission Control Protocol, Src Port: (\d+), Dst Port: (\d+),`)
	opcodeLine = regexp.MustCompile(`OpCode: .*\((0x[0-9a-f]+)\)$`)
	crcLine    = regexp.MustCompile(`^CRC check: 0x[0-9a-f]+ \(Good CRC32\)$`)
	faultLine  = regexp.MustCompile(`Malformed|Expert Info|Bad CRC|bug`)
)

// dissect returns what Wireshark finds in the connections of a capture, by the port
// of either end.
func dissect(t *testing.T, name string) map[uint16]sight {
	path := find(t, "tshark", "tshark")
	// The payload is no protocol's, whatever it looks like, and the port neither.
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience) // in a guest it takes long to start
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "-n", "-r", name, "-O", "iwarp_mpa,iwarp_ddp_rdmap",
		"-o", "tcp.try_heuristic_first:TRUE", "--disable-protocol", "smb_direct", "--disable-protocol", "rpcordma")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "%s", stderr.String())
	all := map[uint16]sight{}
	var ends []sight
	note := func(what string) {
		for _, s := range ends {
			s[what]++
		}
	}
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		if m := portsLine.FindStringSubmatch(line); m != nil {
			ends = nil
			for _, p := range m[1:] {
				port, err := strconv.ParseUint(p, 10, 16)
				require.NoError(t, err)
				if all[uint16(port)] == nil {
					all[uint16(port)] = sight{}
				}
				ends = append(ends, all[uint16(port)])
			}
		} else if m := opcodeLine.FindStringSubmatch(line); m != nil {
			code, err := strconv.ParseUint(m[1], 0, 8)
			require.NoError(t, err)
			note(opcodeKey(code))
		} else if crcLine.MatchString(line) {
			note("CRC")
		} else if faultLine.MatchString(line) {
			note(faults)
		} else if parts[line] != "" {
			note(parts[line])
		}
	}
	return all
}

// recorded plays rping in software, then sends a message for which there is no
// room, and returns all that was sent.
func recorded(t *testing.T, crc bool, revision uint8) []segment {
	p, err := verbs.Open("iwarp")
	require.NoError(t, err)
	param := rpingParam
	param.CRC, param.MPARevision = crc, revision
	var r *relay
	client, server := rpingPair(t, target{Provider: p, addr: netip.MustParseAddr("127.0.0.1")}, param, func(to netip.AddrPort) netip.AddrPort {
		r = newRelay(t, to, true)
		return r.addr()
	})
	playRping(client, server, 1)
	client.post(qp.SendWR{Inline: true, Solicited: true, SGL: []qp.SGE{{Data: make([]byte, 1000)}}})
	server.drain()
	client.drain()
	server.disconnected()
	client.disconnected()
	r.wait()
	return r.segments
}

// Wireshark recognises all that iWARP in software sends, and finds no fault with
// it. It does with the same once it has been damaged.
func TestWiresharkUnderstandsUs(t *testing.T) {
	if os.Getenv("RDMANET_LAB") == "1" {
		t.Skip("needs no device, and takes long in a guest: lab/test runs it outside")
	}
	find(t, "tshark", "tshark")
	var connections [][]segment
	var check []func(found sight)
	add := func(segments []segment, f func(found sight)) {
		connections, check = append(connections, segments), append(check, f)
	}
	for _, revision := range []uint8{1, 2} {
		for _, crc := range []bool{false, true} {
			what := fmt.Sprintf("MPA revision %d, CRC %v", revision, crc)
			segments := recorded(t, crc, revision)
			want, longest := expected(t, stream(segments, true), stream(segments, false))
			require.LessOrEqual(t, longest, captureMSS, what)
			require.Greater(t, longest, captureMSS-50, what) // segments are filled
			for _, op := range []wire.Opcode{wire.OpWrite, wire.OpReadRequest, wire.OpReadResponse, wire.OpSend, wire.OpSendSolicited, wire.OpTerminate} {
				require.NotZero(t, want.of(op), "%s: %v", what, op)
			}
			add(segments, func(found sight) { require.Equal(t, want, found, what) })

			first := firstSend(t, stream(segments, true))
			for _, d := range []struct {
				what   string
				at     int // of what the dialer sends
				xor    byte
				unseen bool // without a CRC
			}{
				{"the set-up's key", 4, 0x20, false},
				{"an FPDU's length", first + 1, 0x04, false},
				{"an FPDU's length, so that no header fits", first + 1, 0x28, false},
				{"an FPDU's operation", first + 3, 0x0c, false},
				{"a payload", first + wire.FPDUHeaderLen + wire.UntaggedHeaderLen, 0x01, !crc},
			} {
				add(damaged(segments, d.at, d.xor), func(found sight) {
					if d.unseen {
						require.Equal(t, want, found)
					} else {
						require.NotEqual(t, want, found, "%s: damaged %s", what, d.what)
						t.Log(d, found)
					}
				})
			}
		}
	}
	found := dissect(t, writeCapture(t, connections))
	for i, f := range check {
		f(found[portOf(i)])
	}
}

// damaged returns segments with a byte changed of what the dialer sends.
func damaged(segments []segment, at int, xor byte) []segment {
	segments = slices.Clone(segments)
	for i := range segments {
		s := &segments[i]
		if !s.fromDialer {
			continue
		}
		if at < len(s.payload) {
			s.payload = bytes.Clone(s.payload)
			s.payload[at] ^= xor
			break
		}
		at -= len(s.payload)
	}
	return segments
}

// capture has the kernel write down what TCP sends on loopback, until stop.
func capture(t *testing.T) (name string, stop func()) {
	name = filepath.Join(t.TempDir(), "capture.pcapng")
	cmd := exec.Command(find(t, "dumpcap", "wireshark-common"), "-q", "-i", "lo", "-f", "tcp", "-w", name)
	ended := run(t, cmd)
	require.Eventually(t, func() bool {
		info, err := os.Stat(name)
		return err == nil && info.Size() > 0
	}, patience, 10*time.Millisecond)
	return name, func() {
		time.Sleep(time.Second) // packets wait a quarter of one in the kernel
		require.NoError(t, cmd.Process.Signal(os.Interrupt))
		ended()
	}
}

// The same with what passes between iWARP in software and siw: siw dials without a
// CRC, and software with one. The last thing that siw sends then is a Terminate.
func TestWiresharkUnderstandsUsAndSiw(t *testing.T) {
	if len(labAddresses("SIW4", "SIW6")) == 0 {
		t.Skip("needs siw (try: lab/guest)")
	}
	file, stop := capture(t)
	want := map[uint16]sight{}
	onEveryCounterpart(t, func(t *testing.T, c counterpart) {
		if c.Name() == "device" {
			t.Skip("about software")
		}
		n := rpingRounds
		s := sight{"Request": 1, "Reply": 1, opcodeKey(uint64(wire.OpSend)): 4 * n, opcodeKey(uint64(wire.OpReadRequest)): n}
		if c.crc {
			s[opcodeKey(uint64(wire.OpTerminate))] = 1
			addr := c.free(t)
			want[addr.Port()] = s
			start(t, "rping", rpingArgs(addr, "-s")...)
			r := rpingOn(t, c.dial(t, 256, addr, c.with(rpingParam)))
			r.ping(n)
			r.post(qp.SendWR{Op: qp.WRRDMAWrite, Inline: true, RKey: r.text.RKey() ^ 1, SGL: []qp.SGE{{Data: []byte("nowhere")}}})
			r.drain()
			r.disconnected()
			return
		}
		k, ended := c.accept(t, 256, c.with(rpingParam), func(listener netip.AddrPort) func() {
			want[listener.Port()] = s
			return start(t, "rping", rpingArgs(listener, "-c")...)
		})
		rpingOn(t, k).serve(n)
		k.disconnected()
		ended()
	})
	stop()
	found := dissect(t, file)
	require.NotEmpty(t, want)
	for port, w := range want {
		s := found[port]
		t.Log(s)
		require.Zero(t, s[faults])
		all := 0
		for key, n := range s {
			if strings.HasPrefix(key, "opcode ") {
				all += n
			}
		}
		for key, n := range w {
			require.Equal(t, n, s[key], key)
		}
		if w.of(wire.OpTerminate) > 0 {
			require.Equal(t, s["FPDU"], s["CRC"])
		}
		require.GreaterOrEqual(t, s.of(wire.OpReadResponse), rpingRounds)
		require.GreaterOrEqual(t, s.of(wire.OpWrite), rpingRounds)
		require.Equal(t, s["FPDU"], s["DDP"])
		require.Equal(t, s["FPDU"], all)
	}
}

// Software keeps its FPDUs to a segment each. siw would take longer ones as well,
// cut anywhere.
func TestSiwTakesFPDUsLongerThanSegments(t *testing.T) {
	onEveryCounterpart(t, func(t *testing.T, c counterpart) {
		if c.Name() == "device" {
			t.Skip("about software")
		}
		addr := c.free(t)
		ended := start(t, "rping", rpingArgs(addr, "-s")...)
		r := newRelay(t, addr, false)
		k := rpingOn(t, c.dial(t, 256, r.addr(), c.with(rpingParam)))
		k.ping(rpingRounds)
		require.NoError(t, k.id.Disconnect())
		k.disconnected()
		ended()
		r.wait()
		_, longest := expected(t, stream(r.segments, true))
		require.Greater(t, longest, 10*captureMSS)
	})
}
