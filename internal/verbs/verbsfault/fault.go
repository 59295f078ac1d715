// Package verbsfault wraps an RDMA provider, for tests, and makes it do what
// hardware rarely does: refuse any call, report completions of one queue before
// the other's, late, twice or never, and events likewise.
//
// It keeps books of its own, so that a test can see that every work request was
// completed and every event acked, whatever failed meanwhile.
package verbsfault

import (
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// Provider is a provider with faults. Without any it does what the wrapped one
// does. Make it with Wrap. Its methods may be called at any time.
type Provider struct {
	inner verbs.Provider
	name  string

	// Lock order: a channel's mu → mu; a CQ's mu → mu. None is held while the
	// wrapped provider or a test's function is called, except that GetEvent holds
	// the channel's and Poll the CQ's.
	mu          sync.Mutex
	fail        func(op string, n int) error
	events      func(t verbs.EventType, n int) []time.Duration
	completions func(wc verbs.WC) int
	calls       map[string]int
	reported    map[verbs.EventType]int
	ids         map[verbs.ID]*id // by the wrapped id
	cqs         map[*cq]struct{}
	books       Books
}

// Books are counts since Reset.
type Books struct {
	Events     int // got and not acked
	Unfinished int // work requests of queue pairs that were destroyed, not completed
	Posted     int // work requests
}

// Done, returned by a function of SetFail, lets the call do its work and then
// report Err: what happens when a signal comes late.
type Done struct{ Err error }

func (d *Done) Error() string { return "done, but: " + d.Err.Error() }

// Wrap returns a provider of that name around another.
func Wrap(inner verbs.Provider, name string) *Provider {
	p := &Provider{inner: inner, name: name, ids: make(map[verbs.ID]*id), cqs: make(map[*cq]struct{})}
	p.Reset()
	return p
}

// Name implements verbs.Provider.
func (p *Provider) Name() string { return p.name }

// Reset takes all faults away and begins to count anew.
func (p *Provider) Reset() {
	p.mu.Lock()
	p.fail, p.events = nil, nil
	p.calls, p.reported = make(map[string]int), make(map[verbs.EventType]int)
	p.books = Books{}
	p.mu.Unlock()
	p.SetCompletions(nil)
}

// SetFail makes every call ask f first, by its type and method ("QP.PostSend",
// which is asked for each request), and with how many such calls came before it.
// The call fails with what f returns, and does nothing, unless that is a *Done.
// Nil is back to normal. f may block, and call what it likes.
func (p *Provider) SetFail(f func(op string, n int) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail = f
}

// Behind, returned by a function of SetEvents, reports the event after the channel's
// next one.
const Behind time.Duration = -1

// SetEvents makes f say what becomes of each event: it is reported once for each
// duration, that much later. Nil is back to normal: once, at once.
func (p *Provider) SetEvents(f func(t verbs.EventType, n int) []time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.events = f
}

// SetCompletions makes f say how often each completion is reported now; 0 holds it,
// and what follows it on its queue, back until f changes. Nil is back to normal:
// once. Whoever waits for completions looks again.
func (p *Provider) SetCompletions(f func(wc verbs.WC) int) {
	p.mu.Lock()
	p.completions = f
	cqs := maps.Clone(p.cqs)
	p.mu.Unlock()
	for c := range cqs {
		c.Wake()
	}
}

// Report reports an event for each id that there is.
func (p *Provider) Report(t verbs.EventType, err error) {
	p.mu.Lock()
	ids := maps.Clone(p.ids)
	p.mu.Unlock()
	for _, i := range ids {
		i.channel().report(&verbs.Event{Type: t, ID: i, Err: err})
	}
}

// Calls returns how many calls there were, by type and method.
func (p *Provider) Calls() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.calls)
}

// Reported returns how many events of a type the wrapped provider has reported.
func (p *Provider) Reported(t verbs.EventType) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reported[t]
}

// Books returns the counts.
func (p *Provider) Books() Books {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.books
}

func (p *Provider) note(f func(*Books)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.books)
}

// ask counts a call, and returns whether and how it fails.
func (p *Provider) ask(op string) error {
	p.mu.Lock()
	n, f := p.calls[op], p.fail
	p.calls[op]++
	p.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(op, n)
}

// do makes a call, unless it fails.
func (p *Provider) do(op string, call func() error) error {
	err := p.ask(op)
	var done *Done
	if err != nil && !errors.As(err, &done) {
		return err
	}
	if err := call(); err != nil || done == nil {
		return err
	}
	return done.Err
}

// askEach is ask for each of n requests. It returns how many come before the one
// that fails.
func (p *Provider) askEach(op string, n int) (int, error) {
	for i := range n {
		if err := p.ask(op); err != nil {
			return i, err
		}
	}
	return n, nil
}

// fate returns when an event is reported.
func (p *Provider) fate(t verbs.EventType) []time.Duration {
	p.mu.Lock()
	n, f := p.reported[t], p.events
	p.reported[t]++
	p.mu.Unlock()
	if f == nil {
		return []time.Duration{0}
	}
	return f(t, n)
}

// times returns how often a completion is reported now.
func (p *Provider) times(wc verbs.WC) int {
	p.mu.Lock()
	f := p.completions
	p.mu.Unlock()
	if f == nil {
		return 1
	}
	return f(wc)
}

// NewEventChannel implements verbs.Provider.
func (p *Provider) NewEventChannel() (verbs.EventChannel, error) {
	if err := p.ask("Provider.NewEventChannel"); err != nil {
		return nil, err
	}
	c, err := p.inner.NewEventChannel()
	if err != nil {
		return nil, err
	}
	return &channel{EventChannel: c, p: p}, nil
}

var _ verbs.Provider = (*Provider)(nil)
