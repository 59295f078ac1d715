package rdmanet

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"
)

// race tries the lanes that lead to a host, each beside those before it. The
// first connection wins. Only the winner is committed, so a loser never comes out
// of anybody's Accept.
type race struct {
	cfg   Config
	local netip.AddrPort
}

// lane is a provider, and addresses that it tries in turn.
type lane struct {
	provider Provider
	dst      []netip.AddrPort
	after    time.Duration // from the start, if the lanes before it have not failed
}

const (
	defaultFallbackDelay = 300 * time.Millisecond // RFC 8305, as in package net
	// softwareDelay is how much later than a device software starts: RFC 8305's
	// Connection Attempt Delay, section 5.
	softwareDelay = 250 * time.Millisecond
)

// lanes returns the lanes in the order of their start: the first address's family
// comes before the other, and among the lanes of a family the providers are in
// order of preference.
func lanes(providers []Provider, dst []netip.AddrPort, fallback time.Duration) []lane {
	if fallback == 0 {
		fallback = defaultFallbackDelay
	}
	var all []lane
	for i, p := range providers {
		first := lane{provider: p, after: time.Duration(i) * softwareDelay}
		second := lane{provider: p, after: first.after + fallback}
		for _, a := range dst {
			of := &first
			if fallback > 0 && a.Addr().Is4() != dst[0].Addr().Is4() {
				of = &second
			}
			if len(providers) == 1 || p.reaches(a.Addr()) {
				of.dst = append(of.dst, a)
			}
		}
		all = append(all, first, second)
	}
	all = slices.DeleteFunc(all, func(l lane) bool { return len(l.dst) == 0 })
	slices.SortStableFunc(all, func(a, b lane) int { return cmp.Compare(a.after, b.after) })
	return all
}

type dialed struct {
	c   *Conn
	err error
}

func (r *race) run(ctx context.Context, lanes []lane) (*Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan dialed)
	began := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	running := 0
	var failure error
	for running > 0 || len(lanes) > 0 {
		select {
		case <-timer.C:
		case d := <-results:
			running--
			if d.err == nil {
				cancel()
				go closeLosers(results, running)
				return d.commit()
			}
			failure = worse(failure, d.err)
		}
		if len(lanes) > 0 {
			l := lanes[0]
			lanes = lanes[1:]
			running++
			go func() {
				c, err := r.inTurn(ctx, l)
				results <- dialed{c, err}
			}()
		}
		if len(lanes) > 0 {
			timer.Reset(time.Until(began.Add(lanes[0].after)))
		}
	}
	return nil, failure
}

// worse returns the error that says more: the first, unless it is only that a
// device is missing, or out of reach.
func worse(first, second error) error {
	if first == nil || errors.Is(first, syscall.ENODEV) || errors.Is(first, os.ErrPermission) {
		return second
	}
	return first
}

func closeLosers(results <-chan dialed, n int) {
	for range n {
		if d := <-results; d.err == nil {
			d.c.linger.Store(-1)
			_ = d.c.Close()
		}
	}
}

// commit sends HELLO, which makes the peer's Accept return the connection.
func (d dialed) commit() (*Conn, error) {
	if err := d.c.sendControl(frameHello, false); err != nil {
		_ = d.c.Close()
		return nil, err
	}
	return d.c, nil
}

// inTurn tries one address after the other, each with its share of the time.
func (r *race) inTurn(ctx context.Context, l lane) (*Conn, error) {
	var firstErr error
	for i, a := range l.dst {
		c, err := r.one(ctx, l.provider, a, len(l.dst)-i)
		if err == nil {
			return c, nil
		}
		if firstErr == nil {
			firstErr = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, firstErr
}

// one tries one address. remaining says between how many, with this one, the time
// that is left is to be shared.
func (r *race) one(ctx context.Context, p Provider, dst netip.AddrPort, remaining int) (*Conn, error) {
	outer := ctx
	if limit, ok := ctx.Deadline(); ok && remaining > 1 {
		const least = 2 * time.Second
		left := time.Until(limit)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, max(left/time.Duration(remaining), min(left, least)))
		defer cancel()
	}
	c, err := connect(ctx, r.cfg, p, r.local, dst)
	if err != nil {
		var source net.Addr
		if r.local.IsValid() {
			source = &Addr{r.local}
		}
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			err = ctxError(ctx)
			if outer.Err() != nil {
				err = ctxError(outer)
			}
		}
		return nil, opError(opDial, source, &Addr{dst}, err)
	}
	return c, nil
}
