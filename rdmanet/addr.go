package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
)

// Addr is the address of an end of a connection: the IP address and port that
// rdma_cm uses, whatever the device.
type Addr struct{ ap netip.AddrPort }

var _ net.Addr = (*Addr)(nil)

// Network returns "rdma".
func (a *Addr) Network() string { return "rdma" }

// String returns host:port in the form that net.SplitHostPort takes, with the
// zone of a link-local address.
func (a *Addr) String() string {
	if a == nil {
		return "<nil>"
	}
	return a.ap.String()
}

// AddrPort returns the address as a netip.AddrPort.
func (a *Addr) AddrPort() netip.AddrPort {
	if a == nil {
		return netip.AddrPort{}
	}
	return a.ap
}

// AddrFrom returns the Addr of an AddrPort, for Dialer.LocalAddr.
func AddrFrom(ap netip.AddrPort) *Addr { return &Addr{ap} }

// family is what a network name restricts addresses to.
type family uint8

const (
	familyAny family = iota
	family4
	family6
)

func (f family) has(a netip.Addr) bool {
	return f == familyAny || (f == family4) == a.Unmap().Is4()
}

// parseNetwork knows rdma, rdma4 and rdma6. Programs that dial through a hook of
// ours say tcp, and mean the same.
func parseNetwork(network string) (family, error) {
	switch network {
	case "rdma", "tcp":
		return familyAny, nil
	case "rdma4", "tcp4":
		return family4, nil
	case "rdma6", "tcp6":
		return family6, nil
	}
	return 0, net.UnknownNetworkError(network)
}

// lookup resolves host:port to the addresses of the family, in the resolver's
// order. An empty host gives none.
func lookup(ctx context.Context, f family, address string) (addrs []netip.Addr, port uint16, err error) {
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, 0, err
	}
	p, err := net.DefaultResolver.LookupPort(ctx, "tcp", service)
	if err != nil {
		return nil, 0, err
	}
	port = uint16(p)
	if host == "" {
		return nil, port, nil
	}
	all, err := net.DefaultResolver.LookupIPAddr(ctx, host) // LookupNetIP drops the zone
	if err != nil {
		return nil, 0, err
	}
	for _, ip := range all {
		if a, ok := netip.AddrFromSlice(ip.IP); ok && f.has(a) {
			addrs = append(addrs, a.Unmap().WithZone(ip.Zone))
		}
	}
	if len(addrs) == 0 {
		return nil, 0, &net.AddrError{Err: fmt.Sprintf("no suitable address: %s has none of that family", host), Addr: address}
	}
	return addrs, port, nil
}

// addrPortOf takes any address that is an IP address and port.
func addrPortOf(a net.Addr) (netip.AddrPort, error) {
	var ap netip.AddrPort
	switch a := a.(type) {
	case nil:
		return ap, nil
	case interface{ AddrPort() netip.AddrPort }:
		ap = a.AddrPort()
	default:
		var err error
		if ap, err = netip.ParseAddrPort(a.String()); err != nil {
			return ap, fmt.Errorf("local address %q is not an IP address and port (use *rdmanet.Addr or *net.TCPAddr): %w", a, syscall.EINVAL)
		}
	}
	if !ap.Addr().IsValid() { // a *net.TCPAddr with a port only
		return netip.AddrPortFrom(netip.Addr{}, ap.Port()), nil
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
}

// namedAddr stands for an address that did not resolve, in errors.
type namedAddr string

func (namedAddr) Network() string  { return "rdma" }
func (a namedAddr) String() string { return string(a) }

// ipv6Off reports an error that means that the machine has no IPv6.
func ipv6Off(err error) bool {
	return errors.Is(err, syscall.EAFNOSUPPORT) || errors.Is(err, syscall.EADDRNOTAVAIL)
}
