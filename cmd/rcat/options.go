package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/rdmanet"
)

const usage = `rcat: netcat for RDMA. Moves stdin and stdout through an RDMA connection.

Usage:
  rcat [options] HOST PORT         dial
  rcat [options] -l [HOST] PORT    listen, and take one connection
  rcat [options] --demo[=SIZE]     test this machine
  rcat --devices                   list this machine's RDMA devices

Options:
  -l, --listen             wait for a connection instead of dialing
  -k, --keep-open          with -l: after a connection, take the next one
  -v, --verbose            say on stderr who is connected, by which provider and
                           device, and how much was moved how fast; -vv adds the
                           library's log
  -w, --wait TIME          give up a dial, or a connection on which nothing moves,
                           after TIME: seconds (5, 1.5) or with a unit (500ms)
  -4, --ipv4, -6, --ipv6   use only IPv4, or only IPv6
  -s, --source ADDRESS     dial from this address of this machine
  -p, --source-port PORT   dial from this port
      --reply-wait TIME    after the peer's end-of-file, how long a stdin that is
                           open and silent may take to begin a reply (default 3)
      --provider NAME      auto, or one of: %s
                           (default: environment RDMANET_PROVIDER, or auto)
      --crc                ask for a CRC32C in each packet (provider iwarp)
      --demo[=SIZE]        send SIZE random bytes (default 256MiB; 64MiB, 1G, 500MB)
                           to itself, check their SHA-256, print rate and provider
      --devices            list RDMA devices with their addresses and limits, or say
                           what is missing; the status is 0 if one can be used
      --version            print the version
  -h, --help               print this

End-of-file of stdin becomes a half-close, so both of these end by themselves:
  rcat -l 7471 > copy
  rcat localhost 7471 < file

More examples:
  rcat --demo=1GiB                        does RDMA work here, and how fast?
  rcat -lvk 7471 >> log                   collect what many clients send
  tar c dir | rcat -w 5 10.0.0.2 7471     send a tree; the peer: rcat -l 7471 | tar x
  echo status | rcat -w 2 10.0.0.2 7471   ask, and print the answer

Exit status: 0 all was sent and received, or --devices found one that can be used;
1 failure, or it found none; 2 wrong usage; 130 SIGINT.
The manual: go doc github.com/rdmanet/rdmanet/cmd/rcat
`

// options is the command line, checked.
type options struct {
	listen, keep  bool
	verbose       int
	wait          seconds // 0: no limit
	only4, only6  bool
	source        string // address or name; empty: any
	sourcePort    uint16 // 0: any
	replyWait     seconds
	provider      rdmanet.Provider
	crc           bool
	demo          byteSize // 0: no demo
	devices       bool
	help, version bool
	host, port    string // host is empty for every address
}

const (
	defaultReplyWait = 3 * time.Second
	defaultDemo      = "256MiB"
)

// usageError is about the command line.
type usageError struct{ error }

func usageErrorf(format string, a ...any) error { return usageError{fmt.Errorf(format, a...)} }

// parse reads the command line. Its errors are of type usageError.
func parse(args []string) (*options, error) {
	o := &options{replyWait: seconds{defaultReplyWait, "3"}}
	f := o.flags()
	switch err := f.Parse(args); {
	case errors.Is(err, pflag.ErrHelp):
		o.help = true
	case err != nil:
		return nil, usageErrorf("%w (rcat --help lists the options)", err)
	}
	if o.help || o.version {
		return o, nil
	}
	if err := o.check(f); err != nil {
		return nil, err
	}
	return o, o.arguments(f.Args())
}

func (o *options) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("rcat", pflag.ContinueOnError)
	f.Usage = func() {} // help is printed by whoever finds o.help
	f.BoolVarP(&o.listen, "listen", "l", false, "")
	f.BoolVarP(&o.keep, "keep-open", "k", false, "")
	f.CountVarP(&o.verbose, "verbose", "v", "")
	f.VarP(&o.wait, "wait", "w", "")
	f.BoolVarP(&o.only4, "ipv4", "4", false, "")
	f.BoolVarP(&o.only6, "ipv6", "6", false, "")
	f.StringVarP(&o.source, "source", "s", "", "")
	f.VarP((*port)(&o.sourcePort), "source-port", "p", "")
	f.Var(&o.replyWait, "reply-wait", "")
	f.StringVar((*string)(&o.provider), "provider", "", "")
	f.BoolVar(&o.crc, "crc", false, "")
	f.Var(&o.demo, "demo", "")
	f.Lookup("demo").NoOptDefVal = defaultDemo
	f.BoolVar(&o.devices, "devices", false, "")
	f.BoolVar(&o.version, "version", false, "")
	f.BoolVarP(&o.help, "help", "h", false, "")
	return f
}

// check finds options that don't go together.
func (o *options) check(f *pflag.FlagSet) error {
	given := f.Changed
	switch {
	case o.devices && f.NFlag() > 1:
		return usageErrorf("--devices goes with no other option")
	case o.only4 && o.only6:
		return usageErrorf("-4 and -6 exclude each other: leave both out for either family")
	case given("wait") && o.wait.d == 0:
		return usageErrorf("-w %s is no time to wait: give more than 0, or leave -w out for no limit", o.wait.text)
	case given("provider") && !knownProvider(o.provider):
		return usageErrorf("--provider %s is not known here: use auto or one of %s", o.provider, providers())
	case given("demo") && (o.listen || o.keep || given("source") || given("source-port") || given("wait")):
		return usageErrorf("--demo dials itself: it goes with -v, -4, -6, --provider and --crc only")
	case o.listen && given("source"):
		return usageErrorf("-s %s is where a dial comes from: to listen on that address, use rcat -l %[1]s PORT", o.source)
	case o.listen && given("source-port"):
		return usageErrorf("-p %d is where a dial comes from: to listen on that port, use rcat -l %[1]d", o.sourcePort)
	case o.keep && !o.listen:
		return usageErrorf("-k keeps a listener open: use it with -l")
	}
	if a, err := netip.ParseAddr(o.source); err == nil && !o.has(a) {
		return usageErrorf("-s %s is not an address of the family that -%s asks for", o.source, o.family())
	}
	return nil
}

// arguments takes what is left of the command line.
func (o *options) arguments(args []string) error {
	switch {
	case o.devices && len(args) > 0:
		return usageErrorf("--devices takes no %q: it lists all", args[0])
	case o.devices:
		return nil
	case o.demo > 0 && len(args) > 0:
		return usageErrorf("--demo takes no %q: a size is given as --demo=%[1]s", args[0])
	case o.demo > 0:
		return nil
	case o.listen && len(args) == 1:
		o.port = args[0]
	case len(args) == 2:
		o.host, o.port = strings.TrimSuffix(strings.TrimPrefix(args[0], "["), "]"), args[1]
	default:
		return usageErrorf("%s", o.wanted(args))
	}
	p, err := parsePort(o.port)
	if err != nil {
		return usageError{err}
	}
	if p == 0 && !o.listen {
		return usageErrorf("port 0 can't be dialed: give the one that the listener has (rcat -lv says which)")
	}
	return nil
}

// wanted says what is wrong about the number of arguments.
func (o *options) wanted(args []string) string {
	form := "rcat HOST PORT"
	if o.listen {
		form = "rcat -l [HOST] PORT"
	}
	switch len(args) {
	case 0:
		return fmt.Sprintf("no address given: use %s, or rcat --help", form)
	case 1:
		if host, port, err := net.SplitHostPort(args[0]); err == nil {
			return fmt.Sprintf("%q is one argument, two are needed: use rcat %s %s", args[0], host, port)
		}
		return fmt.Sprintf("%q is one argument, two are needed: use %s", args[0], form)
	}
	return fmt.Sprintf("%d arguments, and %q is too many: use %s", len(args), args[len(args)-1], form)
}

// network is the name that package rdmanet has for -4 and -6.
func (o *options) network() string { return "rdma" + o.family() }

func (o *options) family() string {
	switch {
	case o.only4:
		return "4"
	case o.only6:
		return "6"
	}
	return ""
}

// has reports whether -4 and -6 admit an address.
func (o *options) has(a netip.Addr) bool {
	return !(o.only4 && !a.Unmap().Is4() || o.only6 && a.Unmap().Is4())
}

func (o *options) address() string { return net.JoinHostPort(o.host, o.port) }

// local is the address to dial from, nil for any.
func (o *options) local(ctx context.Context) (net.Addr, error) {
	if o.source == "" && o.sourcePort == 0 {
		return nil, nil
	}
	var from netip.Addr
	if o.source != "" {
		all, err := net.DefaultResolver.LookupNetIP(ctx, "ip"+o.family(), o.source)
		if err != nil {
			return nil, fmt.Errorf("-s %s: %w", o.source, err)
		}
		from = all[0].Unmap()
	}
	return rdmanet.AddrFrom(netip.AddrPortFrom(from, o.sourcePort)), nil
}

func (o *options) config() rdmanet.Config {
	c := rdmanet.Config{Provider: o.provider, CRC: o.crc}
	if o.verbose > 1 {
		c.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return c
}

// logf is what -v adds.
func (o *options) logf(format string, a ...any) {
	if o.verbose > 0 {
		fmt.Fprintf(os.Stderr, format+"\n", a...)
	}
}

func providers() string { return strings.Join(cm.Providers(), ", ") }

func knownProvider(p rdmanet.Provider) bool {
	return p == rdmanet.ProviderAuto || slices.Contains(cm.Providers(), string(p))
}

// seconds is a time in seconds, or with a unit.
type seconds struct {
	d    time.Duration
	text string // as it was given
}

func (s *seconds) Type() string   { return "time" }
func (s *seconds) String() string { return s.text }

func (s *seconds) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil {
		d, err = time.ParseDuration(text + "s")
	}
	if err != nil || d < 0 {
		return errors.New("must be seconds, such as 5 or 1.5, or have a unit, such as 500ms")
	}
	*s = seconds{d, text}
	return nil
}

// port is a port number, or the name of a service.
type port uint16

func (p *port) Type() string   { return "port" }
func (p *port) String() string { return strconv.Itoa(int(*p)) }

func (p *port) Set(text string) error {
	n, err := parsePort(text)
	*p = port(n)
	return err
}

func parsePort(text string) (uint16, error) {
	if n, err := strconv.Atoi(text); err == nil {
		if n < 0 || n > 65535 {
			return 0, fmt.Errorf("port %s is out of range: 1 to 65535", text)
		}
		return uint16(n), nil
	}
	n, err := net.LookupPort("tcp", text)
	if err != nil {
		return 0, fmt.Errorf("port %q is neither a number, 1 to 65535, nor a service that this machine knows", text)
	}
	return uint16(n), nil
}

// version says what was built.
func version() string {
	v := "(unknown version)"
	if b, ok := debug.ReadBuildInfo(); ok {
		v = b.Main.Version
	}
	return fmt.Sprintf("rcat %s, %s %s/%s, providers: %s", v, runtime.Version(), runtime.GOOS, runtime.GOARCH, providers())
}
