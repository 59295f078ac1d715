package rdmanet

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
	"github.com/rdmanet/rdmanet/internal/verbs/verbsfault"
)

// dead makes a provider behave as when its device was removed: nothing completes any
// more, and no call works but those that free something.
func dead(p *verbsfault.Provider) {
	lost[p] = true
	p.SetCompletions(func(verbs.WC) int { return 0 })
	p.SetFail(func(op string, _ int) error {
		switch op[strings.Index(op, ".")+1:] {
		case "Destroy", "Dereg", "Dealloc", "Close", "AckEvent", "GetEvent", "Poll", "Wait", "Arm", "Device":
			return nil
		}
		return syscall.EIO
	})
	p.Report(verbs.EventDeviceRemoval, nil)
}

// TestDeviceIsRemovedBeforeTheConnection is there, in each state of a dial.
func TestDeviceIsRemovedBeforeTheConnection(t *testing.T) {
	for _, tc := range []struct {
		state  string
		at     *verbsfault.Provider // where the event is that does not come
		event  verbs.EventType
		begun  string // the dialer's call that waits for it
		remove *verbsfault.Provider
		is     error // of the dial
	}{
		{"resolving the address", faultyDialer, verbs.EventAddrResolved, "ID.ResolveAddr", faultyDialer, syscall.ENODEV},
		{"resolving the route", faultyDialer, verbs.EventRouteResolved, "ID.ResolveRoute", faultyDialer, syscall.ENODEV},
		{"connecting", faultyListener, verbs.EventConnectRequest, "ID.Connect", faultyDialer, syscall.ENODEV},
		{"connecting, at the other end", faultyListener, verbs.EventConnectRequest, "ID.Connect", faultyListener, syscall.ECONNREFUSED},
		{"established, at the other end", faultyDialer, verbs.EventEstablished, "ID.Connect", faultyDialer, syscall.ENODEV},
	} {
		t.Run(tc.state, func(t *testing.T) {
			faulty(t)
			impatient(t)
			l := listenFaulty(t)
			tc.at.SetEvents(func(e verbs.EventType, _ int) []time.Duration {
				if e == tc.event {
					return nil
				}
				return []time.Duration{0}
			})
			dialed := make(chan error, 1)
			go func() {
				_, err := (&Dialer{Config: smallConfig(faultyDialer)}).Dial("rdma", l.Addr().String())
				dialed <- err
			}()
			eventually(t, func() bool { return faultyDialer.Calls()[tc.begun] > 0 && tc.at.Reported(tc.event) > 0 }, "it is under way")
			dead(tc.remove)
			select {
			case err := <-dialed:
				requireOpError(t, err, "dial", tc.is)
			case <-time.After(patience):
				t.Fatal("it still waits")
			}
		})
	}
}

func listenFaulty(t testing.TB) *Listener {
	t.Helper()
	l, err := (&ListenConfig{Config: smallConfig(faultyListener)}).Listen(context.Background(), "rdma", "127.0.0.1:0")
	require.NoError(t, err)
	closeLater(t, l)
	return l.(*Listener)
}

// TestDeviceIsRemovedUnderAListener: Accept says so, whether it waits already or not.
// A listener that has another provider goes on.
func TestDeviceIsRemovedUnderAListener(t *testing.T) {
	t.Run("its only one", func(t *testing.T) {
		faulty(t)
		l := listenFaulty(t)
		accepted := make(chan error, 1)
		go func() {
			_, err := l.Accept()
			accepted <- err
		}()
		dead(faultyListener)
		select {
		case err := <-accepted:
			requireOpError(t, err, "accept", syscall.ENODEV)
		case <-time.After(patience):
			t.Fatal("it still waits")
		}
		_, err := l.Accept()
		requireOpError(t, err, "accept", syscall.ENODEV)
		eventually(t, func() bool { return faultyListener.Calls()["ID.Destroy"] == 1 }, "the device is let go")
		require.NoError(t, l.Close())
		requireOpError(t, l.Close(), "close", net.ErrClosed)
	})
	t.Run("one of two", func(t *testing.T) {
		faulty(t)
		was := automatic
		automatic = []Provider{Provider(faultyListener.Name()), ProviderIWARP}
		t.Cleanup(func() { automatic = was })
		l := listenAuto(t, Config{Provider: ProviderAuto}, "127.0.0.1:0")
		dead(faultyListener)
		eventually(t, func() bool { return faultyListener.Calls()["ID.Destroy"] == 1 }, "the device is let go")
		requireConnects(t, Config{Provider: ProviderIWARP}, l, l.Addr().String(), ProviderIWARP)
	})
}

// TestDeviceIsRemovedUnderAConnection, in each state: calls that wait end with
// ENODEV, later ones fail with it, Close is bounded.
func TestDeviceIsRemovedUnderAConnection(t *testing.T) {
	closed := func(c *Conn) error { // what was not flushed is an error to report
		if err := c.Close(); err != nil && !errors.Is(err, syscall.EIO) {
			return err
		}
		return syscall.ENODEV
	}
	reads := func(c *Conn) error {
		_, err := c.Read(make([]byte, 1))
		return err
	}
	writes := func(c *Conn) error {
		_, err := c.Write(make([]byte, 100*minBufferSize))
		return err
	}
	for _, tc := range []struct {
		state   string
		prepare func(t *testing.T, p *verbsfault.Provider, a, b *Conn)
		waits   func(c *Conn) error // for something that does not come
	}{
		{"idle", nil, nil},
		{"reading", nil, reads},
		{"writing", nil, writes},
		{"half-closed here", func(t *testing.T, _ *verbsfault.Provider, a, b *Conn) { require.NoError(t, a.CloseWrite()) }, reads},
		{"half-closed there", func(t *testing.T, _ *verbsfault.Provider, a, b *Conn) {
			require.NoError(t, b.CloseWrite())
			requireEOF(t, a)
		}, writes},
		{"closing, with data on its way", func(t *testing.T, p *verbsfault.Provider, a, b *Conn) {
			p.SetCompletions(later(func(wc verbs.WC) bool { return wc.Op == verbs.OpSend }))
			write(t, a, []byte("x"))
			require.NoError(t, a.SetLinger(3600))
		}, closed},
		{"closing, the peer's side under way", func(t *testing.T, p *verbsfault.Provider, a, b *Conn) {
			p.SetEvents(func(verbs.EventType, int) []time.Duration { return nil })
			setBounds(t, time.Hour, &disconnectTimeout)
		}, closed},
		{"closing, not flushed", func(t *testing.T, p *verbsfault.Provider, a, b *Conn) { p.SetCompletions(later(flushed)) }, closed},
	} {
		for _, p := range []*verbsfault.Provider{faultyDialer, faultyListener} {
			t.Run(p.Name()+"/"+tc.state, func(t *testing.T) {
				faulty(t)
				impatient(t)
				a, b := faultyPair(t)
				if p == faultyListener {
					a, b = b, a
				}
				if tc.prepare != nil {
					tc.prepare(t, p, a, b)
				}
				ended := make(chan error, 1)
				if tc.waits != nil {
					go func() { ended <- tc.waits(a) }()
					time.Sleep(10 * time.Millisecond) // it waits by now, most likely
				} else {
					ended <- syscall.ENODEV
				}
				dead(p)
				select {
				case err := <-ended:
					require.ErrorIs(t, err, syscall.ENODEV)
				case <-time.After(patience):
					t.Fatal("it still waits")
				}
				if !a.closed.Load() {
					eventually(t, func() bool { // the news has come
						a.mu.Lock()
						defer a.mu.Unlock()
						return a.rx.ended
					}, "it knows")
					_, err := a.Write([]byte("x"))
					if !errors.Is(err, syscall.EPIPE) { // CloseWrite was called
						requireOpError(t, err, "write", syscall.ENODEV)
					}
					if _, err := a.Read(make([]byte, 1)); err != io.EOF {
						requireOpError(t, err, "read", syscall.ENODEV)
					}
					within(t, patience, func() { require.ErrorIs(t, closed(a), syscall.ENODEV) })
				}
				require.NoError(t, b.Close())
			})
		}
	}
}

// TestDeviceIsRemovedUnderASetUp, at the listener's end, in each state of one: the
// dialer does not wait for ever, and Accept tells that there is nothing to come.
func TestDeviceIsRemovedUnderASetUp(t *testing.T) {
	for _, tc := range []struct {
		state string
		stop  func(goOn <-chan struct{}) // the set-up in this state
		there func(l *Listener) bool
	}{
		{"opening", func(goOn <-chan struct{}) {
			faultyListener.SetFail(func(op string, _ int) error {
				if op == "Device.CreateCQ" {
					<-goOn
				}
				return nil
			})
		}, func(*Listener) bool { return faultyListener.Calls()["Device.CreateCQ"] > 0 }},
		{"accepting", func(<-chan struct{}) {
			faultyListener.SetEvents(func(e verbs.EventType, _ int) []time.Duration {
				if e == verbs.EventEstablished {
					return nil
				}
				return []time.Duration{0}
			})
		}, func(*Listener) bool { return faultyListener.Reported(verbs.EventEstablished) > 0 }},
		{"waiting for the first frame", func(<-chan struct{}) {
			faultyListener.SetCompletions(later(func(wc verbs.WC) bool { return wc.Op == verbs.OpRecv }))
		}, func(*Listener) bool { return faultyListener.Calls()["CQ.Wait"] > 0 }},
		{"waiting for Accept", func(<-chan struct{}) {}, func(l *Listener) bool { return len(l.queue) > 0 }},
	} {
		t.Run(tc.state, func(t *testing.T) {
			faulty(t)
			impatient(t)
			setBounds(t, time.Hour, &setupTimeout)
			l := listenFaulty(t)
			goOn := make(chan struct{})
			tc.stop(goOn)
			ended := make(chan error, 1)
			go func() {
				c, err := (&Dialer{Config: smallConfig(faultyDialer)}).Dial("rdma", l.Addr().String())
				if err == nil {
					closeLater(t, c)
					_, err = c.Read(make([]byte, 1))
				}
				ended <- err
			}()
			eventually(t, func() bool { return tc.there(l) }, "it is under way")
			dead(faultyListener)
			close(goOn)
			within(t, patience, func() {
				for {
					c, err := l.Accept()
					if err != nil { // or else it was ready before
						requireOpError(t, err, "accept", syscall.ENODEV)
						return
					}
					_, err = c.Read(make([]byte, 1))
					requireOpError(t, err, "read", syscall.ENODEV)
					_ = c.Close()
				}
			})
			eventually(t, func() bool { return len(ended) == 1 || len(l.queue) == 1 }, "the set-up has ended")
			require.NoError(t, l.Close())
			select {
			case err := <-ended:
				var oe *net.OpError
				require.ErrorAs(t, err, &oe)
				require.True(t, errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET), "%v", err)
			case <-time.After(patience):
				t.Fatal("the dialer still waits")
			}
		})
	}
}
