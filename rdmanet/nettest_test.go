package rdmanet

import (
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/nettest"
)

// tiny makes every limit bite: one frame of 1 KiB at a time.
var tiny = Config{BufferSize: minBufferSize, RecvDepth: 1, SendDepth: 1}

// Most of nettest's time is waiting: the cases run side by side.
func TestConn(t *testing.T) {
	checkLeaks(t)
	crc := Config{CRC: true}
	var wg sync.WaitGroup
	for _, tc := range []struct {
		name             string
		dialer, listener Config
	}{
		{"defaults", Config{}, Config{}},
		{"CRC", crc, crc},
		{"tiny buffers", tiny, tiny},
		{"default to tiny", Config{}, tiny},
		{"never spins", Config{Spin: -1}, Config{Spin: -1}},
		{"spins", Config{Spin: 50 * time.Microsecond}, Config{Spin: 50 * time.Microsecond}},
	} {
		for _, addr := range testAddrs(t) {
			wg.Go(func() {
				t.Run(tc.name+"/"+addr, func(t *testing.T) {
					if testing.Short() && tc.name != "defaults" {
						t.Skip("long")
					}
					nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
						a, b := pairOf(t, tc.dialer, tc.listener, net.JoinHostPort(addr, "0"))
						return a, b, func() { a.Close(); b.Close() }, nil
					})
				})
			})
		}
	}
	wg.Wait()
}

// TestConnOfFuncs goes by the functions that a program uses which only changes
// net.Dial and net.Listen, and by names of networks that it knows.
func TestConnOfFuncs(t *testing.T) {
	checkLeaks(t)
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		l, err := Listen("tcp", testAddr(t))
		if err != nil {
			return nil, nil, nil, err
		}
		defer l.Close()
		accepted := make(chan error, 1)
		go func() {
			var err error
			c2, err = l.Accept()
			accepted <- err
		}()
		if c1, err = Dial("tcp", l.Addr().String()); err != nil {
			return nil, nil, nil, err
		}
		if err := <-accepted; err != nil {
			return nil, nil, nil, err
		}
		return c1, c2, func() { c1.Close(); c2.Close() }, nil
	})
}

func TestConnOfCopies(t *testing.T) {
	checkLeaks(t)
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		a, b := pair(t, Config{Provider: "fake"})
		return a, b, func() { a.Close(); b.Close() }, nil
	})
}
