package rdmanet

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/nettest"
)

// The two providers speak to each other: iWARP in software, and the kernel's siw.

// onEveryMix runs a test with software dialing siw, and siw dialing software, with
// and without a CRC, which either side may ask for.
func onEveryMix(t *testing.T, f func(t *testing.T, dialer, listener Config, addr string)) {
	hosts := []string{os.Getenv("RDMANET_LAB_SIW4"), os.Getenv("RDMANET_LAB_SIW6")}
	if hosts[0] == "" || testProvider() != ProviderIWARP {
		t.Skip("needs siw; try: lab/guest go test ./rdmanet")
	}
	device := Config{Provider: ProviderDevice}
	for name, software := range map[string]Config{"": {Provider: ProviderIWARP}, ", CRC": {Provider: ProviderIWARP, CRC: true}} {
		for _, host := range hosts {
			addr := net.JoinHostPort(host, "0")
			t.Run("software to siw"+name+"/"+host, func(t *testing.T) { f(t, software, device, addr) })
			t.Run("siw to software"+name+"/"+host, func(t *testing.T) { f(t, device, software, addr) })
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

// TestBulkAcrossProviders both ways at once, with half-closes.
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
			_ = c.SetDeadline(time.Now().Add(patience))
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
