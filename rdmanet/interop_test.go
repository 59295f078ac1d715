package rdmanet

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/nettest"

	"github.com/rdmanet/rdmanet/cm"
)

// The two providers speak to each other: iWARP in software, and the kernel's siw.
// siw never asks for a CRC, and always dials with revision 2 of MPA: so it is
// software that asks, and that dials with revision 1.

// needsSIW returns siw's addresses, IPv4 and IPv6.
func needsSIW(t *testing.T) []string {
	t.Helper()
	hosts := []string{os.Getenv("RDMANET_LAB_SIW4"), os.Getenv("RDMANET_LAB_SIW6")}
	if hosts[0] == "" || testProvider() != ProviderIWARP {
		t.Skip("needs siw; try: lab/guest go test ./rdmanet")
	}
	return hosts
}

// onEveryMix runs a test with software dialing siw, and siw dialing software, on IPv4
// without a CRC and on IPv6 with one; with RDMANET_LONG, on each both ways.
func onEveryMix(t *testing.T, f func(t *testing.T, dialer, listener Config, addr string)) {
	hosts := needsSIW(t)
	device := Config{Provider: ProviderDevice}
	for _, crc := range []bool{false, true} {
		software, with := Config{Provider: ProviderIWARP, CRC: crc}, ""
		if crc {
			with = ", CRC"
		}
		for i, host := range hosts {
			if crc != (i == 1) && !long {
				continue
			}
			addr := net.JoinHostPort(host, "0")
			t.Run("software to siw"+with+"/"+host, func(t *testing.T) { f(t, software, device, addr) })
			t.Run("siw to software"+with+"/"+host, func(t *testing.T) { f(t, device, software, addr) })
		}
	}
}

func TestConnAcrossProviders(t *testing.T) {
	checkLeaks(t)
	onEveryMix(t, func(t *testing.T, dialer, listener Config, addr string) {
		nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
			a, b := pairOf(t, dialer, listener, addr)
			return a, b, func() { a.Close(); b.Close() }, nil
		})
	})
}

// TestBulkAcrossProviders both ways at once.
func TestBulkAcrossProviders(t *testing.T) {
	onEveryMix(t, func(t *testing.T, dialer, listener Config, addr string) {
		checkLeaks(t)
		a, b := pairOf(t, dialer, listener, addr)
		closeLater(t, a, b)
		const n = 64 << 20
		var want sum
		_, _ = io.CopyN(&want, stream(1), n)
		ends := make(chan error, 4)
		for i, c := range []*Conn{a, b} {
			_ = c.SetDeadline(time.Now().Add(2 * patience))
			go func() {
				_, err := io.CopyN(onlyWriter{c}, stream(1), n)
				ends <- errors.Join(err, c.CloseWrite())
			}()
			go func() {
				got, err := readSum(c, uint64(i), 100_000)
				if err == nil && got != want.String() {
					err = errors.New("other bytes: " + got)
				}
				ends <- err
			}()
		}
		for range cap(ends) {
			require.NoError(t, <-ends)
		}
	})
}

func TestCloseWriteAcrossProviders(t *testing.T) {
	onEveryMix(t, func(t *testing.T, dialer, listener Config, addr string) {
		for _, dialerIsFirst := range []bool{true, false} {
			checkLeaks(t)
			a, b := pairOf(t, dialer, listener, addr)
			closeLater(t, a, b)
			if !dialerIsFirst {
				a, b = b, a
			}
			write(t, a, []byte("question"))
			require.NoError(t, a.CloseWrite())
			require.Equal(t, "question", string(read(t, b, 8)))
			requireEOF(t, b)
			p := bytesOf(1, 1<<20)
			sent := make(chan error, 1)
			_ = b.SetWriteDeadline(time.Now().Add(patience))
			go func() {
				_, err := b.Write(p)
				sent <- errors.Join(err, b.CloseWrite())
			}()
			require.True(t, bytes.Equal(p, read(t, a, len(p))))
			require.NoError(t, <-sent)
			requireEOF(t, a)
			require.NoError(t, a.Close())
			require.NoError(t, b.Close())
		}
	})
}

// TestCloseAcrossProviders: whoever closes, the other end reads what was written
// before.
func TestCloseAcrossProviders(t *testing.T) {
	onEveryMix(t, func(t *testing.T, dialer, listener Config, addr string) {
		for _, who := range []string{"dialer", "listener"} {
			t.Run(who, func(t *testing.T) {
				checkLeaks(t)
				a, b := pairOf(t, dialer, listener, addr)
				closeLater(t, a, b)
				if who == "listener" {
					a, b = b, a
				}
				p := bytesOf(2, 100_000)
				write(t, a, p)
				require.NoError(t, a.Close())
				require.True(t, bytes.Equal(p, read(t, b, len(p))))
				requireEOF(t, b)
			})
		}
	})
}

func TestResetAcrossProviders(t *testing.T) {
	onEveryMix(t, func(t *testing.T, dialer, listener Config, addr string) {
		for _, dialerResets := range []bool{true, false} {
			checkLeaks(t)
			a, b := pairOf(t, dialer, listener, addr)
			closeLater(t, a, b)
			roundTrip(t, a, b, bytesOf(1, 100_000))
			if dialerResets {
				a, b = b, a
			}
			require.NoError(t, b.SetLinger(0))
			require.NoError(t, b.Close())
			_ = a.SetDeadline(time.Now().Add(patience))
			_, err := a.Read(make([]byte, 1))
			requireOpError(t, err, "read", syscall.ECONNRESET)
		}
	})
}

func TestRefusalAcrossProviders(t *testing.T) {
	onEveryMix(t, func(t *testing.T, dialer, listener Config, addr string) {
		checkLeaks(t)
		l, err := (&ListenConfig{Config: listener, Backlog: 1}).Listen(t.Context(), "rdma", addr)
		require.NoError(t, err)
		defer l.Close()
		d := Dialer{Config: dialer, Timeout: patience}
		c, err := d.Dial("rdma", l.Addr().String())
		require.NoError(t, err)
		closeLater(t, c)
		eventually(t, func() bool { return len(l.(*Listener).queue) == 1 }, "the backlog is full")
		_, err = d.Dial("rdma", l.Addr().String())
		requireOpError(t, err, "dial", syscall.ECONNREFUSED)
		require.ErrorContains(t, err, "backlog full")
	})
}

func init() {
	// It dials the test, and sends back what it reads until it is killed.
	children["dialing echo"] = func() {
		c, err := Dial("rdma", os.Getenv("RDMANET_TEST_ADDR"))
		if err != nil {
			panic(err)
		}
		go func() { _, _ = io.Copy(c, c) }()
		_, _ = io.Copy(io.Discard, os.Stdin)
	}
}

// TestKilledPeerAcrossProviders: a process that dies is a reset to the other
// provider, whoever dialed.
func TestKilledPeerAcrossProviders(t *testing.T) {
	onEveryMix(t, func(t *testing.T, dialer, listener Config, addr string) {
		for _, dialerDies := range []bool{true, false} {
			checkLeaks(t)
			var c net.Conn
			var kill func() error
			if dialerDies {
				l, err := (&ListenConfig{Config: listener}).Listen(t.Context(), "rdma", addr)
				require.NoError(t, err)
				closeLater(t, l)
				require.NoError(t, l.(*Listener).SetDeadline(time.Now().Add(patience)))
				cmd, _ := child(t, "dialing echo", envProvider+"="+string(dialer.Provider), "RDMANET_TEST_ADDR="+l.Addr().String())
				kill = cmd.Process.Kill
				c, err = l.Accept()
				require.NoError(t, err)
			} else {
				cmd, out := child(t, "echo", envProvider+"="+string(listener.Provider), "RDMANET_TEST_ADDR="+addr)
				kill = cmd.Process.Kill
				line, err := bufio.NewReader(out).ReadString('\n')
				require.NoError(t, err)
				c, err = (&Dialer{Config: dialer, Timeout: patience}).Dial("rdma", strings.TrimSpace(line))
				require.NoError(t, err)
			}
			closeLater(t, c)
			p := bytesOf(3, 100_000)
			write(t, c, p)
			require.True(t, bytes.Equal(p, read(t, c, len(p))))
			require.NoError(t, kill())
			_ = c.SetDeadline(time.Now().Add(patience))
			_, err := c.Read(make([]byte, 1))
			requireOpError(t, err, "read", syscall.ECONNRESET)
			_, err = c.Write(p)
			require.Error(t, err)
		}
	})
}

// TestRevision1AcrossProviders: a dialer of RFC 5044 alone, without RFC 6581.
func TestRevision1AcrossProviders(t *testing.T) {
	for _, host := range needsSIW(t) {
		for _, crc := range []bool{false, true} {
			checkLeaks(t)
			l, err := (&ListenConfig{Config: Config{Provider: ProviderDevice}}).Listen(t.Context(), "rdma", net.JoinHostPort(host, "0"))
			require.NoError(t, err)
			closeLater(t, l)
			to := netip.MustParseAddrPort(l.Addr().String())
			r := rawConnectWith(t, ProviderIWARP, to, cm.ConnParam{PrivateData: honest(), MPARevision: 1, CRC: crc}, 20)
			r.l = l.(*Listener)
			r.wait(cm.EventEstablished)
			r.sendHello()
			c := r.accepted()
			message := frame(header{typ: frameData, length: 5}, []byte("hello")...)
			r.send(message)
			require.Equal(t, "hello", string(read(t, c, 5)))
			write(t, c, []byte("hello"))
			eventually(t, func() bool {
				r.poll()
				return len(r.got) == 1 && bytes.Equal(message[headerLen:], r.got[0][headerLen:])
			}, "the answer")
			require.NoError(t, r.id.Disconnect())
			_, err = c.Read(make([]byte, 1))
			requireOpError(t, err, "read", syscall.ECONNRESET) // it said nothing of an end
		}
	}
}
