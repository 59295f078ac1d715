package rdmanet

import (
	"net"
	"testing"

	"golang.org/x/net/nettest"
)

func TestConn(t *testing.T) {
	checkLeaks(t)
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		a, b := pair(t, Config{})
		return a, b, func() { a.Close(); b.Close() }, nil
	})
}
