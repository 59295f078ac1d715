package rdmanet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"github.com/rdmanet/rdmanet/cm"
)

// leg is where a listener listens: an id of one provider. All legs of a listener
// have the same port, so a dialer needs not know which provider it gets.
type leg struct {
	l        *Listener
	provider Provider
	id       *cm.ID
	destroy  func() error // the id, once
	gone     bool         // its device was removed; guarded by the listener's mu
}

// handleEvent is called by the event loop for each connect request, and when the
// device is removed.
func (g *leg) handleEvent(ev *cm.Event) {
	switch ev.Type {
	case cm.EventConnectRequest:
		g.l.request(ev, g.provider)
	case cm.EventDeviceRemoval:
		g.l.lost(g)
	}
}

// requestBacklog is how many connect requests a provider keeps for the event loop,
// at least: who is admitted is the Listener's to decide, which knows one host from
// another. It is the most that the kernel takes by default.
const requestBacklog = 1024

// portTries is how many free ports of one provider are tried with the others.
const portTries = 16

// open makes the legs. If it fails, Close takes away those that there are.
func (l *Listener) open(addr netip.AddrPort, only6 bool) error {
	for try := 1; ; try++ {
		err := l.openOn(addr, only6)
		if err == nil || addr.Port() != 0 || try == portTries || !errors.Is(err, syscall.EADDRINUSE) {
			return err
		}
		for _, g := range l.legs {
			err = errors.Join(err, g.close())
		}
		l.legs = nil
	}
}

// openOn makes a leg with each provider that serves the address. A device that
// can't is left out, and so is software where an iWARP device has the TCP port:
// that serves dialers in software too. No such device shares a port with every
// address, so there each address has legs of its own.
func (l *Listener) openOn(addr netip.AddrPort, only6 bool) error {
	providers := l.cfg.providers()
	var iwarp map[netip.Addr]bool
	if len(providers) > 1 {
		iwarp = iwarpAddrs()
	}
	addrs := []netip.Addr{addr.Addr()}
	each := addr.Addr().IsUnspecified() && len(iwarp) > 0
	if each {
		addrs = localAddrs(addr.Addr(), only6)
	}
	port := addr.Port()
	for _, a := range addrs {
		onDevice := false
		for i, p := range providers {
			device := i < len(providers)-1
			if device && !p.reaches(a) || !device && onDevice && iwarp[a.WithZone("")] {
				continue
			}
			g, err := l.add(p, netip.AddrPortFrom(a, port), only6 && !each)
			switch {
			case err == nil:
				port, onDevice = g.id.LocalAddr().Port(), true
			case device && !errors.Is(err, syscall.EADDRINUSE) || each && errors.Is(err, syscall.EADDRNOTAVAIL):
				l.cfg.Logger.Debug("rdma: not listening", "provider", string(p), "addr", a.String(), "err", err)
			default:
				return err
			}
		}
	}
	if len(l.legs) == 0 {
		return fmt.Errorf("no address to listen on: %w", syscall.EADDRNOTAVAIL)
	}
	return nil
}

func (l *Listener) add(p Provider, addr netip.AddrPort, only6 bool) (*leg, error) {
	loop, err := acquireLoop(p)
	if err != nil {
		return nil, err
	}
	id, err := loop.ch.NewID()
	if err != nil {
		return nil, errors.Join(err, p.releaseLoop())
	}
	g := &leg{l: l, provider: p, id: id, destroy: sync.OnceValue(func() error { return destroyID(id) })}
	id.SetContext(g)
	_ = id.SetLogger(l.cfg.Logger)
	if only6 {
		err = id.SetAFOnly(true)
	}
	if err == nil {
		err = id.Bind(addr)
	}
	if err == nil {
		err = id.Listen(max(l.backlog, requestBacklog))
	}
	if err != nil {
		return nil, errors.Join(err, g.close())
	}
	l.legs = append(l.legs, g)
	l.cfg.Logger.Debug("rdma: listening", "provider", string(p), "addr", id.LocalAddr().String())
	return g, nil
}

func (g *leg) close() error { return errors.Join(g.destroy(), g.provider.releaseLoop()) }

// iwarpAddrs returns the addresses of iWARP devices.
func iwarpAddrs() map[netip.Addr]bool {
	taken := make(map[netip.Addr]bool)
	devices, _ := cm.Devices()
	for _, d := range devices {
		if d.Transport != "iWARP" {
			continue
		}
		for _, p := range d.Ports {
			for _, a := range p.Addrs {
				taken[a.Addr().WithZone("")] = true
			}
		}
	}
	return taken
}

// localAddrs returns the addresses of this machine that a wildcard stands for.
func localAddrs(wildcard netip.Addr, only6 bool) (addrs []netip.Addr) {
	interfaces, _ := net.Interfaces()
	for _, i := range interfaces {
		of, err := i.Addrs()
		if err != nil || i.Flags&net.FlagUp == 0 {
			continue
		}
		for _, a := range of {
			p, err := netip.ParsePrefix(a.String())
			if err != nil || p.Addr().Is6() && wildcard.Is4() || p.Addr().Is4() && only6 {
				continue
			}
			ip := p.Addr()
			if ip.Is6() && ip.IsLinkLocalUnicast() {
				ip = ip.WithZone(i.Name)
			}
			addrs = append(addrs, ip)
		}
	}
	return addrs
}
