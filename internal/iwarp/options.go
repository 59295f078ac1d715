package iwarp

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// options are those of rdma_set_option(3), for the id's TCP socket.
type options struct {
	afOnly    bool
	reuseAddr bool
	tos       *uint8 // nil: the system's default
}

// SetAFOnly keeps a listener on an IPv6 wildcard from taking IPv4.
func (i *id) SetAFOnly(on bool) error {
	return i.set("set AF only", func(o *options) { o.afOnly = on })
}

// SetReuseAddr is SO_REUSEADDR of a socket that connects. Package net sets it on
// those that listen, whatever is asked for here.
func (i *id) SetReuseAddr(on bool) error {
	return i.set("set reuse address", func(o *options) { o.reuseAddr = on })
}

// SetTOS is IP_TOS and IPV6_TCLASS, which connections that a listener accepts
// inherit. The two lowest bits are TCP's own, for ECN (RFC 3168).
func (i *id) SetTOS(tos uint8) error {
	return i.set("set TOS", func(o *options) { o.tos = &tos }, stateAddrResolved)
}

// SetAckTimeout fails: TCP measures when to retransmit.
func (i *id) SetAckTimeout(uint8) error {
	return fmt.Errorf("ack time-out over TCP: %w", syscall.EOPNOTSUPP)
}

// set changes the options of an id that has no socket yet.
func (i *id) set(op string, change func(*options), more ...state) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.in(op, append(more, stateIdle, stateBound)...); err != nil {
		return err
	}
	change(&i.options)
	return nil
}

// dialer returns what dials from a local address with the options.
func (o options) dialer(local netip.AddrPort) *net.Dialer {
	d := &net.Dialer{Timeout: setupTimeout, Control: func(network, address string, c syscall.RawConn) error {
		err := o.control(network, address, c)
		if err == nil && o.reuseAddr {
			err = setsockopt(c, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		}
		return err
	}}
	d.SetMultipathTCP(false)
	if local.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(local)
	}
	return d
}

// control sets what connecting and listening sockets have alike, before they are
// bound.
func (o options) control(network, _ string, c syscall.RawConn) error {
	switch {
	case o.tos == nil:
		return nil
	case network == "tcp4":
		return setsockopt(c, unix.IPPROTO_IP, unix.IP_TOS, int(*o.tos))
	}
	// For IPv4 on an IPv6 wildcard, where the system has that.
	_ = setsockopt(c, unix.IPPROTO_IP, unix.IP_TOS, int(*o.tos))
	return setsockopt(c, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, int(*o.tos))
}

func setsockopt(c syscall.RawConn, level, option, value int) error {
	var err error
	if closed := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, value) }); closed != nil {
		return closed
	}
	return err
}
