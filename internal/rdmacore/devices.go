//go:build cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// Devices describes the RDMA devices of this machine. An error says what is
// missing to use any of them, and how to get it; devices that exist come with it.
func Devices() ([]verbs.DeviceInfo, error) {
	if err := load(); err != nil {
		return nil, err
	}
	err := diagnose()
	var n C.int
	list := C.rn_get_device_list(&n)
	if list == nil {
		return nil, err
	}
	defer C.rn_free_device_list(list)
	var infos []verbs.DeviceInfo
	for _, dev := range unsafe.Slice(list, int(n)) {
		infos = append(infos, describe(dev))
	}
	if err == nil && len(infos) == 0 {
		err = noDriver()
	}
	return infos, err
}

func describe(dev *C.struct_ibv_device) verbs.DeviceInfo {
	info := verbs.DeviceInfo{Name: C.GoString(&dev.name[0])}
	var ctx *C.struct_ibv_context
	if info.Err = errnoOf(int(C.rn_open_device(dev, &ctx))); info.Err != nil {
		node := C.GoString(&dev.dev_name[0])
		info.Err = errors.Join(opError("ibv_open_device", info.Err), canOpen(node, "ib_uverbs"))
		return info
	}
	defer C.rn_close_device(ctx)
	var a C.struct_ibv_device_attr
	if info.Err = errnoOf(int(C.rn_query_device(ctx, &a))); info.Err != nil {
		info.Err = opError("ibv_query_device", info.Err)
		return info
	}
	info.Attr = limits(&a, max(int(C.rn_probe_inline(ctx)), 0))
	for num := range int(a.phys_port_cnt) {
		info.Ports = append(info.Ports, describePort(ctx, info.Name, num+1))
	}
	link := ""
	if len(info.Ports) > 0 {
		link = info.Ports[0].LinkLayer
	}
	info.Transport = transport(ctx, link)
	return info
}

func transport(ctx *C.struct_ibv_context, link string) string {
	switch {
	case ctx.device.transport_type == C.IBV_TRANSPORT_IWARP:
		return "iWARP"
	case link == linkEthernet:
		return "RoCE"
	}
	return linkInfiniBand
}

const (
	linkEthernet   = "Ethernet"
	linkInfiniBand = "InfiniBand"
)

var portStates = [...]string{"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"}

func describePort(ctx *C.struct_ibv_context, device string, num int) verbs.Port {
	p := verbs.Port{Num: num, State: "UNKNOWN"}
	var a C.struct_ibv_port_attr
	if C.rn_query_port(ctx, C.uint8_t(num), &a) < 0 {
		return p
	}
	if s := int(a.state); s >= 0 && s < len(portStates) {
		p.State = portStates[s]
	}
	// Old drivers say nothing: then it is InfiniBand.
	p.LinkLayer = linkInfiniBand
	if a.link_layer == C.IBV_LINK_LAYER_ETHERNET {
		p.LinkLayer = linkEthernet
	}
	dir := filepath.Join(sysClass, "infiniband", device, "ports", strconv.Itoa(num), "gid_attrs")
	for index := range int(a.gid_tbl_len) {
		typ := readLine(filepath.Join(dir, "types", strconv.Itoa(index)))
		var gid C.union_ibv_gid
		if C.rn_query_gid(ctx, C.uint8_t(num), C.int(index), &gid) < 0 {
			continue
		}
		addr := netip.AddrFrom16(gid)
		if addr.IsUnspecified() || typ == "" && index > 0 {
			continue
		}
		p.GIDs = append(p.GIDs, verbs.GID{Index: index, Type: typ, Addr: addr})
		if p.Interface == "" {
			p.Interface = readLine(filepath.Join(dir, "ndevs", strconv.Itoa(index)))
		}
	}
	if p.Interface == "" {
		p.Interface = interfaceByGID(p.GIDs)
	}
	p.Addrs = addressesOf(p.Interface)
	return p
}

func readLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// interfaceByGID finds the interface of an iWARP device, whose one GID begins
// with its hardware address.
func interfaceByGID(gids []verbs.GID) string {
	all, err := net.Interfaces()
	if err != nil || len(gids) == 0 {
		return ""
	}
	gid := gids[0].Addr.As16()
	for _, ifi := range all {
		if len(ifi.HardwareAddr) == 6 && string(ifi.HardwareAddr) == string(gid[:6]) {
			return ifi.Name
		}
	}
	return ""
}

func addressesOf(name string) (prefixes []netip.Prefix) {
	ifi, err := net.InterfaceByName(name)
	if err != nil {
		return nil
	}
	addrs, _ := ifi.Addrs()
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			prefixes = append(prefixes, p)
		}
	}
	return prefixes
}

func (i *id) Endpoint() (verbs.Endpoint, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.destroyed {
		return verbs.Endpoint{}, false
	}
	ch := i.lockChannel()
	defer ch.mu.Unlock()
	ctx := i.c.verbs
	if ctx == nil {
		return verbs.Endpoint{}, false
	}
	d := deviceOf(ctx)
	e := verbs.Endpoint{Device: d.name, Port: int(i.c.port_num), LinkLayer: linkEthernet}
	var a C.struct_ibv_port_attr
	if !d.iwarp && C.rn_query_port(ctx, i.c.port_num, &a) >= 0 && a.link_layer != C.IBV_LINK_LAYER_ETHERNET {
		e.LinkLayer = linkInfiniBand
	}
	e.Transport = transport(ctx, e.LinkLayer)
	ib := (*C.struct_rdma_ib_addr)(unsafe.Pointer(&i.c.route.addr.addr))
	if gid := netip.AddrFrom16(ib.sgid); !d.iwarp && !gid.IsUnspecified() {
		e.GID = gid
	}
	return e, true
}
