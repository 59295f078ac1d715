package main

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/rdmanet/rdmanet/rdmanet"
)

// kind is one of the things compared. The first one is the baseline. Another way
// to make a net.Conn is another entry here; a peer that is no net.Conn, such as
// a program that reports its own numbers, is another implementation of peer.
type kind struct {
	name  string
	start func(context.Context, options) (peer, error)
	net   *transport // what start serves, if it is a transport
}

// peer is a running server, and the way to it.
type peer interface {
	// open makes what a point needs. It fails with errors.ErrUnsupported for a
	// point that the kind doesn't have.
	open(context.Context, point) (session, error)
	// describe says what carries the connections.
	describe() string
	close() error
}

// session measures one point, one slice at a time.
type session interface {
	slice(ctx context.Context, length time.Duration) (sample, error)
	close() error
}

// transport makes connections.
type transport struct {
	listen func(ctx context.Context, host string) (net.Listener, error)
	dial   func(ctx context.Context, address string) (net.Conn, error)
	// dialWithin dials with a bound on the bytes registered for all connections
	// of that bound. It is nil where nothing is registered.
	dialWithin func(ctx context.Context, address string, bytes int64) (net.Conn, error)
}

// kinds returns TCP and a kind for each of rdmanet's providers.
func kinds(o options) []kind {
	all := []kind{netKind("tcp", tcpTransport())}
	for _, p := range o.providers {
		name := "rdma"
		if len(o.providers) > 1 {
			name += "/" + p
		}
		cfg := o.config
		cfg.Provider = rdmanet.Provider(p)
		all = append(all, netKind(name, rdmaTransport(cfg)))
	}
	return all
}

// transportNamed returns the transport of a kind.
func transportNamed(name string, o options) (*transport, error) {
	for _, k := range kinds(o) {
		if k.name == name && k.net != nil {
			return k.net, nil
		}
	}
	return nil, usageError{fmt.Errorf("no kind to serve is named %q", name)}
}

func tcpTransport() transport {
	return transport{
		listen: func(ctx context.Context, host string) (net.Listener, error) {
			var lc net.ListenConfig
			return lc.Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
		},
		dial: func(ctx context.Context, address string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", address)
		},
	}
}

func rdmaTransport(cfg rdmanet.Config) transport {
	dialWithin := func(ctx context.Context, address string, bytes int64) (net.Conn, error) {
		d := rdmanet.Dialer{Config: cfg}
		d.MaxRegistered = bytes
		return d.DialContext(ctx, "rdma", address)
	}
	return transport{
		listen: func(ctx context.Context, host string) (net.Listener, error) {
			lc := rdmanet.ListenConfig{Config: cfg}
			return lc.Listen(ctx, "rdma", net.JoinHostPort(host, "0"))
		},
		dial: func(ctx context.Context, address string) (net.Conn, error) {
			return dialWithin(ctx, address, 0)
		},
		dialWithin: dialWithin,
	}
}
