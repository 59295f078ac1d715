// Package fair decides who has to go when a listener can't take any more: one of
// the host that takes the most room. So whoever floods a listener pushes out its
// own connections, and not those of others.
package fair

import "net/netip"

// Host is what a peer's address says about who it is: for IPv6 the first 64 bits,
// since one host may use all that follow, except on a link; for IPv4 all of it.
func Host(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := a.BitLen()
	if a.Is6() && !a.IsLinkLocalUnicast() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // the zero Addr has the zero Prefix
	return p
}

// Count is how many connections each host has.
type Count map[netip.Prefix]int

// Most returns a host that has the most connections, and how many.
func (c Count) Most() (host netip.Prefix, n int) {
	for h, k := range c {
		if k > n {
			host, n = h, k
		}
	}
	return host, n
}
