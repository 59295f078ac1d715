package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/rdmanet/rdmanet/cm"
)

// Exit statuses. A signal adds its number to statusSignal, as shells do.
const (
	statusOK      = 0
	statusFailure = 1
	statusUsage   = 2
	statusSignal  = 128
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	err := rcat(args)
	status := statusOf(err)
	if status != statusOK && status < statusSignal {
		fmt.Fprintf(os.Stderr, "rcat: %s\n", oneLine(err))
	}
	return status
}

func statusOf(err error) int {
	var sig signalError
	var usage usageError
	switch {
	case err == nil:
		return statusOK
	case errors.As(err, &sig):
		return statusSignal + int(sig)
	case errors.As(err, &usage):
		return statusUsage
	}
	return statusFailure
}

func rcat(args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	ctx, stop := untilSignal()
	defer stop()
	switch {
	case o.help:
		_, err = fmt.Printf(usage, providers())
	case o.version:
		_, err = fmt.Println(version())
	case o.devices:
		err = listDevices(os.Stdout, cm.Devices)
	case o.demo > 0:
		err = newDemo(o).run(ctx)
	case o.listen:
		err = listen(ctx, o)
	default:
		err = dial(ctx, o)
	}
	return err
}

// untilSignal returns a context that ends with SIGINT or SIGTERM, its cause then
// being a signalError. The second signal kills.
func untilSignal() (context.Context, func()) {
	// A background process that reads its terminal gets EIO, and isn't stopped.
	signal.Ignore(syscall.SIGTTIN)
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		select {
		case s := <-signals:
			cancel(signalError(s.(syscall.Signal)))
		case <-ctx.Done():
		}
		signal.Stop(signals)
	}()
	return ctx, func() { cancel(nil) }
}

// signalError is the signal that ends the program.
type signalError syscall.Signal

func (e signalError) Error() string { return syscall.Signal(e).String() }

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
