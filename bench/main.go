// Command bench measures rdmanet beside TCP, in one run. README.md says how to
// read what it prints.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"
)

// Exit statuses.
const (
	statusOK     = 0
	statusFailed = 1 // also: a target is missed, with --check
	statusUsage  = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second ^C doesn't wait for anything
	err := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
	stop()
	os.Exit(status(err))
}

func status(err error) int {
	var usage usageError
	switch {
	case err == nil, errors.Is(err, pflag.ErrHelp):
		return statusOK
	case errors.As(err, &usage):
		return statusUsage
	}
	return statusFailed
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	o, err := parseOptions(args, stderr)
	if err != nil {
		return err
	}
	if o.serve != "" {
		return serveProcess(ctx, o, stdin, stdout)
	}
	if o.plotDir != "" { // better now than after the run
		if err := os.MkdirAll(o.plotDir, 0o777); err != nil {
			return err
		}
	}
	r, err := measureAll(ctx, o, stderr)
	if err != nil {
		return err
	}
	if err := r.writeMarkdown(stdout); err != nil {
		return err
	}
	if o.jsonFile != "" {
		if err := r.writeJSON(o.jsonFile); err != nil {
			return err
		}
	}
	if o.plotDir != "" {
		if err := r.plot(o.plotDir); err != nil {
			return err
		}
	}
	if o.check {
		return r.checkTargets()
	}
	return nil
}
