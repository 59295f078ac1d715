package verbs

import (
	"fmt"
	"sort"
	"strings"
	"sync"
	"syscall"
)

var registry struct {
	sync.Mutex
	open map[string]func() (Provider, error)
}

// Register makes a provider available to Open. Providers call it from init.
// open is called at every Open, and should be cheap or cache its result.
func Register(name string, open func() (Provider, error)) {
	registry.Lock()
	defer registry.Unlock()
	if registry.open == nil {
		registry.open = make(map[string]func() (Provider, error))
	}
	registry.open[name] = open
}

// Open returns the provider of that name. An unknown name is an error that
// lists the known ones and wraps ENODEV.
func Open(name string) (Provider, error) {
	registry.Lock()
	open := registry.open[name]
	registry.Unlock()
	if open == nil {
		return nil, fmt.Errorf("unknown RDMA provider %q (known: %s): %w", name, strings.Join(Names(), ", "), syscall.ENODEV)
	}
	return open()
}

// Names returns the names of all registered providers, sorted.
func Names() []string {
	registry.Lock()
	defer registry.Unlock()
	names := make([]string, 0, len(registry.open))
	for n := range registry.open {
		names = append(names, n)
	}
	sort.Strings(names)
	return names
}
