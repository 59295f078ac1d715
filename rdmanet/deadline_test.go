package rdmanet

import (
	"errors"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// requireTimeout checks all that a caller may look for in a deadline's error.
func requireTimeout(t *testing.T, err error, op string, source, addr net.Addr) {
	t.Helper()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	var ne net.Error
	require.ErrorAs(t, err, &ne)
	require.True(t, ne.Timeout())
	var oe *net.OpError
	require.True(t, errors.As(err, &oe))
	require.Equal(t, op, oe.Op)
	require.Equal(t, "rdma", oe.Net)
	if source != nil {
		require.Equal(t, source.String(), oe.Source.String())
	} else {
		require.Nil(t, oe.Source)
	}
	require.Equal(t, addr.String(), oe.Addr.String())
}

// fillUp writes until nothing more fits.
func fillUp(t *testing.T, c *Conn) (n int) {
	t.Helper()
	for {
		require.NoError(t, c.SetWriteDeadline(time.Now().Add(100*time.Millisecond)))
		k, err := c.Write(make([]byte, 64<<10))
		n += k
		if err != nil {
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		}
		if k == 0 {
			require.NoError(t, c.SetWriteDeadline(time.Time{}))
			return n
		}
	}
}

func TestDeadlineSetWhileBlockedEndsTheCall(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		a, b := open(t, cfg)
		full := fillUp(t, a)
		for _, tc := range []struct {
			op   string
			call func() error
			set  func(time.Time) error
		}{
			{"read", func() error { _, err := a.Read(make([]byte, 1)); return err }, a.SetReadDeadline},
			{"read", func() error { _, err := a.Read(make([]byte, 1)); return err }, a.SetDeadline},
			{"read", func() error { _, err := a.ReadBuffer(); return err }, a.SetReadDeadline},
			{"write", func() error { _, err := a.Write([]byte("x")); return err }, a.SetWriteDeadline},
			{"write", func() error { _, err := a.Write(make([]byte, 1<<20)); return err }, a.SetDeadline},
		} {
			for _, in := range []time.Duration{-time.Hour, 0, 5 * time.Millisecond} {
				parks := a.Stats().Parks
				got := make(chan error, 1)
				go func() { got <- tc.call() }()
				eventually(t, func() bool { return a.Stats().Parks > parks }, "%s blocks", tc.op)
				began := time.Now()
				require.NoError(t, tc.set(began.Add(in)))
				select {
				case err := <-got:
					requireTimeout(t, err, tc.op, a.LocalAddr(), a.RemoteAddr())
				case <-time.After(patience):
					t.Fatalf("%s goes on for ever", tc.op)
				}
				require.Less(t, time.Since(began), time.Second)
				requireTimeout(t, tc.call(), tc.op, a.LocalAddr(), a.RemoteAddr()) // it stays
				require.NoError(t, tc.set(time.Time{}))
			}
		}
		// Usable again, and nothing is lost.
		read(t, b, full)
		roundTrip(t, a, b, bytesOf(1, 100_000))
	})
}

func TestDeadlineMovedWhileBlocked(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{})
	got := make(chan error, 1)
	require.NoError(t, a.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	go func() {
		_, err := a.Read(make([]byte, 1))
		got <- err
	}()
	eventually(t, func() bool { return a.Stats().Parks > 0 }, "Read blocks")
	require.NoError(t, a.SetReadDeadline(time.Now().Add(time.Hour))) // later
	select {
	case err := <-got:
		t.Fatalf("ended by the old deadline: %v", err)
	case <-time.After(150 * time.Millisecond):
	}
	require.NoError(t, a.SetReadDeadline(time.Time{})) // never
	write(t, b, []byte("x"))
	require.NoError(t, <-got)
}

func TestDeadlineInThePastFailsAtOnce(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{})
	write(t, b, []byte("here"))
	require.NoError(t, a.SetDeadline(longAgo))
	for range 3 {
		_, err := a.Read(make([]byte, 4))
		requireTimeout(t, err, "read", a.LocalAddr(), a.RemoteAddr())
		_, err = a.Write([]byte("x"))
		requireTimeout(t, err, "write", a.LocalAddr(), a.RemoteAddr())
	}
	require.NoError(t, a.SetDeadline(time.Time{}))
	require.Equal(t, "here", string(read(t, a, 4)))
	write(t, a, []byte("back"))
	require.Equal(t, "back", string(read(t, b, 4)))
}

func TestAcceptDeadline(t *testing.T) {
	checkLeaks(t)
	l := listen(t, ListenConfig{})
	for _, in := range []time.Duration{-time.Hour, 5 * time.Millisecond} {
		require.NoError(t, l.SetDeadline(time.Now().Add(in)))
		_, err := l.Accept()
		requireTimeout(t, err, "accept", nil, l.Addr())
	}
	require.NoError(t, l.SetDeadline(time.Time{}))
	got := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		got <- err
	}()
	select {
	case err := <-got:
		t.Fatalf("Accept: %v", err)
	case <-time.After(10 * time.Millisecond):
	}
	require.NoError(t, l.SetDeadline(time.Now().Add(time.Millisecond))) // while it blocks
	requireTimeout(t, <-got, "accept", nil, l.Addr())

	require.NoError(t, l.SetDeadline(time.Time{}))
	a, b := pairOn(t, Config{}, l)
	closeLater(t, a, b)
	roundTrip(t, a, b, []byte("usable again"))
}

// TestDeadlineSetAfterStop: SetDeadline may lose a race with Close, and must not
// wait for a timer that was stopped.
func TestDeadlineSetAfterStop(t *testing.T) {
	checkLeaks(t)
	d := makeDeadline(func() {})
	d.set(time.Now().Add(time.Hour))
	d.stop()
	within(t, patience, func() {
		d.set(time.Now().Add(time.Hour))
		d.stop()
		d.set(longAgo)
		d.stop()
	})
	require.True(t, d.expired())
}

func TestDeadlineIsMovedByManyAtOnce(t *testing.T) {
	checkLeaks(t)
	var fired sync.WaitGroup
	d := makeDeadline(func() {})
	for i := range 8 {
		fired.Go(func() {
			for k := range 500 {
				switch (i + k) % 4 {
				case 0:
					d.set(time.Time{})
				case 1:
					d.set(longAgo)
				case 2:
					d.set(time.Now().Add(time.Duration(k) * time.Microsecond))
				case 3:
					d.expired()
					d.over()
				}
			}
		})
	}
	within(t, patience, fired.Wait)
	d.set(time.Now().Add(time.Millisecond))
	<-d.over()
	require.True(t, d.expired())
	d.set(time.Time{})
	require.False(t, d.expired())
}
