package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"github.com/rdmanet/rdmanet/rdmanet"
)

// dial is rcat HOST PORT.
func dial(ctx context.Context, o *options) error {
	local, err := o.local(ctx)
	if err != nil {
		return interrupted(ctx, err)
	}
	d := &rdmanet.Dialer{Config: o.config(), Timeout: o.wait.d, LocalAddr: local}
	c, err := d.DialContext(ctx, o.network(), o.address())
	if err != nil {
		return interrupted(ctx, o.dialError(err))
	}
	conn := c.(*rdmanet.Conn)
	o.logf("connected to %v from %v (%s)", conn.RemoteAddr(), conn.LocalAddr(), carrier(conn))
	return newSession(o, conn, &stdin{file: os.Stdin}, os.Stdout).run(ctx)
}

// listen is rcat -l.
func listen(ctx context.Context, o *options) error {
	lc := &rdmanet.ListenConfig{Config: o.config()}
	l, err := lc.Listen(ctx, o.network(), o.address())
	if err != nil {
		return interrupted(ctx, o.listenError(err))
	}
	defer l.Close()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	o.logf("listening on %v", l.Addr())
	in := &stdin{file: os.Stdin}
	for {
		c, err := l.Accept()
		if err != nil {
			return interrupted(ctx, err)
		}
		if !o.keep {
			l.Close() // others are refused, not kept waiting for nothing
		}
		conn := c.(*rdmanet.Conn)
		o.logf("connected from %v to %v (%s)", conn.RemoteAddr(), conn.LocalAddr(), carrier(conn))
		err = newSession(o, conn, in, os.Stdout).run(ctx)
		var local *localError
		if !o.keep || errors.As(err, &local) {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "rcat: %v: %s\n", conn.RemoteAddr(), oneLine(err))
		}
	}
}

// carrier says what carries a connection.
func carrier(c *rdmanet.Conn) string {
	s := "provider " + string(c.Provider())
	if e, ok := c.Endpoint(); ok {
		s += ", " + e.String()
	}
	return s
}

// interrupted returns the signal that has ended ctx instead of what became of
// that.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// dialError adds what can be done about it.
func (o *options) dialError(err error) error {
	var t net.Error
	var address *net.AddrError
	switch {
	case errors.As(err, &address) && o.family() != "":
		return fmt.Errorf("%w: leave out -%s, or use another address", err, o.family())
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w: nothing takes connections there (start rcat -l %s)", err, o.port)
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%w: use another port with -p, or none", err)
	case errors.Is(err, syscall.EADDRNOTAVAIL) && o.source != "":
		return fmt.Errorf("%w: use an address of this machine, of the peer's family, with -s, or none", err)
	case errors.As(err, &t) && t.Timeout() && o.wait.d > 0:
		return fmt.Errorf("%w: no connection within %v (allow more with -w)", err, o.wait.d)
	}
	return err
}

func (o *options) listenError(err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%w: use another port, or end the program that listens there", err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%w: use an address of this machine, or leave it out", err)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%w: ports below 1024 need root; use a higher one", err)
	}
	return err
}
