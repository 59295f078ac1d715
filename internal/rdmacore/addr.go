//go:build cgo && linux

package rdmacore

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"unsafe"
)

// sockaddr has the layout of a sockaddr_in or sockaddr_in6.
type sockaddr struct {
	family uint16
	port   [2]byte
	rest   [24]byte // IPv4: address; IPv6: flow info, address, scope id
}

func toSockaddr(a netip.AddrPort) (sockaddr, error) {
	if !a.IsValid() {
		return sockaddr{}, fmt.Errorf("invalid address: %w", syscall.EINVAL)
	}
	var s sockaddr
	binary.BigEndian.PutUint16(s.port[:], a.Port())
	ip := a.Addr().Unmap()
	if ip.Is4() {
		s.family = syscall.AF_INET
		b := ip.As4()
		copy(s.rest[:], b[:])
		return s, nil
	}
	s.family = syscall.AF_INET6
	b := ip.As16()
	copy(s.rest[4:], b[:])
	scope, err := scopeID(ip.Zone())
	*(*uint32)(unsafe.Pointer(&s.rest[20])) = scope
	return s, err
}

// scopeID turns a zone into the number of the interface.
func scopeID(zone string) (uint32, error) {
	if zone == "" {
		return 0, nil
	}
	if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
		return uint32(n), nil
	}
	ifi, err := net.InterfaceByName(zone)
	if err != nil {
		return 0, fmt.Errorf("zone %q is no interface: %w", zone, syscall.ENODEV)
	}
	return uint32(ifi.Index), nil
}

func (s *sockaddr) addrPort() netip.AddrPort {
	port := binary.BigEndian.Uint16(s.port[:])
	switch s.family {
	case syscall.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(s.rest[:4])), port)
	case syscall.AF_INET6:
		ip := netip.AddrFrom16([16]byte(s.rest[4:20])).Unmap()
		if scope := *(*uint32)(unsafe.Pointer(&s.rest[20])); scope != 0 && ip.IsLinkLocalUnicast() {
			ip = ip.WithZone(zone(scope))
		}
		return netip.AddrPortFrom(ip, port)
	}
	return netip.AddrPort{}
}

// zoneOf returns the interface that has a link-local address.
func zoneOf(a netip.Addr) string {
	if a.Zone() != "" {
		return a.Zone()
	}
	interfaces, _ := net.Interfaces()
	for _, i := range interfaces {
		addrs, _ := i.Addrs()
		for _, of := range addrs {
			if p, err := netip.ParsePrefix(of.String()); err == nil && p.Addr() == a {
				return i.Name
			}
		}
	}
	return ""
}

func zone(scope uint32) string {
	if ifi, err := net.InterfaceByIndex(int(scope)); err == nil {
		return ifi.Name
	}
	return strconv.FormatUint(uint64(scope), 10)
}
