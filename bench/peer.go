package main

import (
	"context"
	"fmt"
	"net"

	"github.com/rdmanet/rdmanet/rdmanet"
)

func netKind(name string, t transport) kind {
	start := func(ctx context.Context, o options) (peer, error) {
		p := &netPeer{t: &t}
		var err error
		if o.processes {
			if p.process, err = startProcess(ctx, o, name); err == nil {
				p.addr = p.process.addr
			}
		} else {
			if p.server, err = startServer(ctx, &t, o.address); err == nil {
				p.addr = p.server.l.Addr().String()
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		return p, nil
	}
	return kind{name: name, start: start, net: &t}
}

// netPeer is a server of a transport, in this process or in another one.
type netPeer struct {
	t        *transport
	addr     string
	server   *server // or
	process  *process
	provider rdmanet.Provider // of the last connection dialed
}

func (p *netPeer) close() error {
	if p.process != nil {
		if err := p.process.close(); err != nil {
			return fmt.Errorf("server process: %w", err)
		}
		return nil
	}
	return p.server.close()
}

func (p *netPeer) describe() string {
	if p.provider == "" {
		return "package net"
	}
	return fmt.Sprintf("rdmanet, provider %s", p.provider)
}

// resources are those of both ends.
func (p *netPeer) resources() (resources, error) {
	r := ownResources()
	if p.process == nil {
		return r, nil
	}
	s, err := p.process.resources()
	return r.plus(s), err
}

func (p *netPeer) dial(ctx context.Context) (net.Conn, error) {
	c, err := p.t.dial(ctx, p.addr)
	if rc, ok := c.(interface{ Provider() rdmanet.Provider }); ok {
		p.provider = rc.Provider()
	}
	return c, err
}
