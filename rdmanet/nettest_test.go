package rdmanet

import (
	"context"
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
						l, err := (&ListenConfig{Config: tc.listener}).Listen(context.Background(), "rdma", net.JoinHostPort(addr, "0"))
						if err != nil {
							return nil, nil, nil, err
						}
						return pipe(l, (&Dialer{Config: tc.dialer}).DialContext)
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
		return pipe(l, plainDial)
	})
}

func TestConnOfCopies(t *testing.T) {
	checkLeaks(t)
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		a, b := pair(t, Config{Provider: "fake"})
		return a, b, func() { a.Close(); b.Close() }, nil
	})
}
