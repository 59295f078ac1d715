//go:build cgo && linux

package rdmacore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// siw's TCP sockets are the kernel's, and nobody has a descriptor for them. Yet
// sock_diag(7) tells of any socket what getsockopt(2) tells of one's own.

const (
	diagRequestLen = unix.SizeofNlMsghdr + 8 + diagIDLen // struct inet_diag_req_v2
	diagMessageLen = 4 + diagIDLen + 20                  // struct inet_diag_msg
	diagIDLen      = 48                                  // struct inet_diag_sockid
	diagInfo       = 2                                   // INET_DIAG_INFO
)

// tcpInfo returns what TCP knows of a connection of the first network namespace's,
// or this one's if it is another. That takes the kernel module tcp_diag, which is
// loaded when needed.
func tcpInfo(local, remote netip.AddrPort) (info unix.TCPInfo, err error) {
	info, err = askTCP(local, remote, interfaceNamed(local.Addr().Zone()))
	if errors.Is(err, unix.ENOENT) { // a socket that is bound to an interface is found only with it
		info, err = askTCP(local, remote, interfaceOf(local.Addr()))
	}
	return info, err
}

func askTCP(local, remote netip.AddrPort, ifindex int) (info unix.TCPInfo, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return info, fmt.Errorf("sock_diag: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, diagRequest(local, remote, ifindex), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return info, fmt.Errorf("sock_diag: %w", err)
	}
	b := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT) // the answer came before sendto(2) returned
	if err != nil {
		return info, fmt.Errorf("sock_diag: %w", err)
	}
	return parseDiag(b[:n])
}

// diagRequest asks for one connection.
func diagRequest(local, remote netip.AddrPort, ifindex int) []byte {
	native, b := binary.NativeEndian, make([]byte, diagRequestLen)
	native.PutUint32(b, diagRequestLen)
	native.PutUint16(b[4:], unix.SOCK_DIAG_BY_FAMILY)
	native.PutUint16(b[6:], unix.NLM_F_REQUEST)
	req := b[unix.SizeofNlMsghdr:]
	req[0] = unix.AF_INET
	if local.Addr().Is6() {
		req[0] = unix.AF_INET6
	}
	req[1] = unix.IPPROTO_TCP
	req[2] = 1 << (diagInfo - 1)
	native.PutUint32(req[4:], ^uint32(0)) // in any state
	id := req[8:]
	binary.BigEndian.PutUint16(id, local.Port())
	binary.BigEndian.PutUint16(id[2:], remote.Port())
	copy(id[4:], local.Addr().AsSlice())
	copy(id[20:], remote.Addr().AsSlice())
	native.PutUint32(id[36:], uint32(ifindex))
	native.PutUint64(id[40:], ^uint64(0)) // no cookie
	return b
}

// parseDiag reads the answer: a header, a message, and attributes.
func parseDiag(b []byte) (info unix.TCPInfo, err error) {
	native := binary.NativeEndian
	if len(b) < unix.SizeofNlMsghdr+4 {
		return info, fmt.Errorf("sock_diag: answer of %d bytes: %w", len(b), unix.EPROTO)
	}
	if native.Uint16(b[4:]) == unix.NLMSG_ERROR {
		return info, fmt.Errorf("sock_diag: %w", unix.Errno(-int32(native.Uint32(b[unix.SizeofNlMsghdr:]))))
	}
	b = b[min(len(b), unix.SizeofNlMsghdr+diagMessageLen):]
	for len(b) >= unix.SizeofRtAttr {
		size := int(native.Uint16(b))
		if size < unix.SizeofRtAttr || size > len(b) {
			break
		}
		if native.Uint16(b[2:]) == diagInfo {
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info)), b[unix.SizeofRtAttr:size])
			return info, nil
		}
		b = b[min(len(b), (size+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1)):]
	}
	return info, fmt.Errorf("sock_diag: the answer says nothing of TCP: %w", unix.ENOENT)
}

// undelivered reports whether there is something that the peer's TCP has not
// acknowledged.
func undelivered(info *unix.TCPInfo) bool { return info.Unacked > 0 || info.Notsent_bytes > 0 }

func interfaceNamed(zone string) int {
	if ifi, err := net.InterfaceByName(zone); err == nil {
		return ifi.Index
	}
	return 0
}

// interfaceOf returns the number of the interface that has an address, or 0.
func interfaceOf(a netip.Addr) int {
	interfaces, _ := net.Interfaces()
	for _, ifi := range interfaces {
		addrs, _ := ifi.Addrs()
		for _, has := range addrs {
			if n, ok := has.(*net.IPNet); ok && n.IP.Equal(a.AsSlice()) {
				return ifi.Index
			}
		}
	}
	return 0
}
