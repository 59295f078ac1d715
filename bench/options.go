package main

import (
	"fmt"
	"io"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/rdmanet/rdmanet/rdmanet"
)

const usage = `bench: rdmanet beside TCP, in one run. Prints a Markdown table.

Usage: cd bench && go run . [flags]

`

// options are what the command line says.
type options struct {
	providers     []string
	config        rdmanet.Config // without a provider
	address       string
	duration      time.Duration // of a point and kind
	sliceLength   time.Duration
	idle          time.Duration
	only          *regexp.Regexp
	processes     bool
	serverCommand string
	quick, check  bool
	jsonFile      string
	plotDir       string

	serve string // the kind to serve, in the child process
}

// Of a run with --quick: enough to see that everything works.
const (
	quickDuration = 150 * time.Millisecond
	quickSlice    = 50 * time.Millisecond
	quickIdle     = 200 * time.Millisecond
)

type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func parseOptions(args []string, stderr io.Writer) (options, error) {
	var o options
	var only string
	f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	f.SortFlags = false
	f.SetOutput(stderr)
	f.StringSliceVar(&o.providers, "provider", []string{"auto"}, "rdmanet's `NAME`, or several with commas: each is a kind beside tcp")
	f.IntVar(&o.config.BufferSize, "buffer-size", 0, "rdmanet's Config.BufferSize, in `BYTES`; 0 is its default, here and below")
	f.IntVar(&o.config.RecvDepth, "recv-depth", 0, "rdmanet's Config.RecvDepth, `N` buffers")
	f.IntVar(&o.config.SendDepth, "send-depth", 0, "rdmanet's Config.SendDepth, `N` buffers")
	f.StringVar(&o.address, "address", "127.0.0.1", "the server's `IP`, for every kind")
	f.DurationVar(&o.duration, "duration", 2*time.Second, "`TIME` for each point and kind")
	f.DurationVar(&o.sliceLength, "slice", 100*time.Millisecond, "`TIME` after which the next kind has its turn")
	f.DurationVar(&o.idle, "idle", time.Second, "`TIME` for which the idle connections are watched")
	f.StringVar(&only, "only", "", "only the points that match `REGEXP`, such as 'round trip' or '^64 B'")
	f.BoolVar(&o.processes, "processes", false, "client and server in two processes")
	f.StringVar(&o.serverCommand, "server-command", "", "with --processes: `COMMAND` that runs bench elsewhere, such as 'ssh host bench'")
	f.BoolVar(&o.quick, "quick", false, "a few seconds in all; the numbers are rough")
	f.BoolVar(&o.check, "check", false, "exit 1 if a target is missed")
	f.StringVar(&o.jsonFile, "json", "", "write everything to `FILE` too")
	f.StringVar(&o.plotDir, "plot", "", "write PNG plots into `DIR`")
	f.StringVar(&o.serve, "serve", "", "serve a kind (what --processes starts)")
	_ = f.MarkHidden("serve")
	f.Usage = func() { fmt.Fprint(stderr, usage+f.FlagUsages()) }
	if err := f.Parse(args); err != nil {
		if err == pflag.ErrHelp {
			return o, err
		}
		return o, usageError{err}
	}
	if o.quick {
		for name, set := range map[string]func(){
			"duration": func() { o.duration = quickDuration },
			"slice":    func() { o.sliceLength = quickSlice },
			"idle":     func() { o.idle = quickIdle },
		} {
			if !f.Changed(name) {
				set()
			}
		}
	}
	return o, o.validate(f.Args(), only)
}

func (o *options) validate(args []string, only string) (err error) {
	switch {
	case len(args) > 0:
		return usageError{fmt.Errorf("unexpected argument %q", args[0])}
	case o.sliceLength <= 0 || o.duration < o.sliceLength:
		return usageError{fmt.Errorf("--duration %v is less than a --slice of %v", o.duration, o.sliceLength)}
	case o.idle <= 0:
		return usageError{fmt.Errorf("--idle %v is no time to watch", o.idle)}
	case o.serverCommand != "" && !o.processes:
		return usageError{fmt.Errorf("--server-command needs --processes")}
	case len(o.providers) == 0:
		return usageError{fmt.Errorf("--provider is empty")}
	}
	if o.only, err = regexp.Compile(only); err != nil {
		return usageError{fmt.Errorf("--only: %w", err)}
	}
	return nil
}

// rounds is how many slices each kind gets of a point.
func (o *options) rounds() int { return int(o.duration / o.sliceLength) }

// serverArgs is the command that serves a kind in a process of its own.
func (o *options) serverArgs(self, kind string) []string {
	command := []string{self}
	if o.serverCommand != "" {
		command = strings.Fields(o.serverCommand)
	}
	command = append(command, "--serve="+kind, "--address="+o.address, "--provider="+strings.Join(o.providers, ","))
	for name, n := range map[string]int{"buffer-size": o.config.BufferSize, "recv-depth": o.config.RecvDepth, "send-depth": o.config.SendDepth} {
		if n != 0 {
			command = append(command, fmt.Sprintf("--%s=%d", name, n))
		}
	}
	return command
}
