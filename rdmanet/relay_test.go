package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// envRelay is the address of a relay on another host. It puts the wire between
// the ends of a connection that are in one process, which nettest wants, and so
// do tests of a server and its client.
const envRelay = "RDMANET_TEST_RELAY"

type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// plainDial is Dial.
func plainDial(_ context.Context, network, address string) (net.Conn, error) {
	return Dial(network, address)
}

// byRelay makes a function that dials do so by the relay, if there is one.
func byRelay(dial dialFunc) dialFunc {
	relay := os.Getenv(envRelay)
	if relay == "" {
		return dial
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, relay)
		if err != nil {
			return nil, err
		}
		if err := ask(c, address); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	}
}

// ask has a relay dial an address.
func ask(c net.Conn, address string) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	_, err := fmt.Fprintln(c, address)
	if err != nil {
		return err
	}
	refused, err := line(c)
	if err == nil && refused != "" {
		err = errors.New(refused)
	}
	return errors.Join(err, c.SetDeadline(time.Time{}))
}

// line reads a line, and nothing beyond.
func line(r io.Reader) (string, error) {
	var s []byte
	var b [1]byte
	for {
		if _, err := io.ReadFull(r, b[:]); err != nil || b[0] == '\n' {
			return string(s), err
		}
		s = append(s, b[0])
	}
}

// pipe dials a listener, which it closes, and is what a nettest.MakePipe returns.
func pipe(l net.Listener, dial dialFunc) (c1, c2 net.Conn, stop func(), err error) {
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		var err error
		c2, err = l.Accept()
		accepted <- err
	}()
	if c1, err = byRelay(dial)(context.Background(), "tcp", l.Addr().String()); err != nil {
		return nil, nil, nil, err
	}
	if err := <-accepted; err != nil {
		return nil, nil, nil, errors.Join(err, c1.Close())
	}
	return c1, c2, func() { c1.Close(); c2.Close() }, nil
}

func init() {
	children["relay"] = func() {
		l, err := Listen("rdma", os.Getenv(envAddr))
		if err == nil {
			fmt.Println(l.Addr())
			go func() {
				_, _ = io.Copy(io.Discard, os.Stdin)
				l.Close()
			}()
			relay(l)
			err = leaked(0)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

// relay takes connections until the listener is closed. The first line of each is
// an address. It dials that, answers with a line, which is empty or says why not,
// and passes on what comes from either side.
func relay(l net.Listener) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		wg.Go(func() { relayed(c.(*Conn)) })
	}
}

func relayed(a *Conn) {
	defer a.Close()
	address, err := line(a)
	if err != nil {
		return
	}
	c, err := Dial("rdma", address)
	if err != nil {
		_, _ = fmt.Fprintln(a, err)
		return
	}
	b := c.(*Conn)
	defer b.Close()
	if _, err := fmt.Fprintln(a); err != nil {
		reset(b)
	}
	var wg sync.WaitGroup
	wg.Go(func() { passOn(a, b) })
	wg.Go(func() { passOn(b, a) })
	wg.Wait()
}

// passOn copies one way. End-of-file becomes a half-close and a reset a reset. If
// the receiver has closed, the other way ends as well, and then the sender will
// learn of it.
func passOn(from, to *Conn) {
	_, err := io.Copy(to, from)
	if err == nil {
		err = to.CloseWrite()
	}
	if err != nil && !errors.Is(err, syscall.EPIPE) {
		reset(from)
		reset(to)
	}
}

func reset(c *Conn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// relayedPair returns both ends of a connection by way of a relay in this process.
func relayedPair(t *testing.T) (dialed, accepted *Conn) {
	t.Helper()
	relays, l := listen(t, ListenConfig{}), listen(t, ListenConfig{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		relay(relays)
	}()
	t.Cleanup(func() {
		relays.Close()
		<-done
	})
	t.Setenv(envRelay, relays.Addr().String())
	a, b, stop, err := pipe(l, plainDial)
	require.NoError(t, err)
	t.Cleanup(stop)
	return a.(*Conn), b.(*Conn)
}

// The relay hides nothing that the tests which use it are about.
func TestRelay(t *testing.T) {
	t.Run("half-close", func(t *testing.T) {
		checkLeaks(t)
		a, b := relayedPair(t)
		p := bytesOf(1, 1<<20)
		written := make(chan error, 1)
		go func() {
			_, err := a.Write(p)
			written <- errors.Join(err, a.CloseWrite())
		}()
		require.Equal(t, p, read(t, b, len(p)))
		requireEOF(t, b)
		require.NoError(t, <-written)
		write(t, b, p[:1000])
		require.NoError(t, b.Close())
		require.Equal(t, p[:1000], read(t, a, 1000))
		requireEOF(t, a)
	})
	t.Run("close", func(t *testing.T) {
		checkLeaks(t)
		a, b := relayedPair(t)
		write(t, a, []byte("last"))
		require.NoError(t, a.Close())
		require.Equal(t, []byte("last"), read(t, b, 4))
		requireEOF(t, b)
		eventually(t, func() bool {
			_, err := b.Write([]byte("too late"))
			return errors.Is(err, syscall.EPIPE)
		}, "the peer has gone")
	})
	t.Run("reset", func(t *testing.T) {
		checkLeaks(t)
		a, b := relayedPair(t)
		reset(a)
		_ = b.SetReadDeadline(time.Now().Add(patience))
		_, err := b.Read(make([]byte, 1))
		requireOpError(t, err, "read", syscall.ECONNRESET)
	})
	t.Run("nobody listens", func(t *testing.T) {
		checkLeaks(t)
		relayedPair(t) // sets the relay
		addr := refusing(t)
		_, direct := Dial("rdma", addr)
		require.Error(t, direct)
		_, err := byRelay(plainDial)(t.Context(), "rdma", addr)
		require.EqualError(t, err, direct.Error())
	})
}
