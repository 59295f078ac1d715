package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		args []string
		want options
	}{
		{[]string{"host", "7471"}, options{host: "host", port: "7471"}},
		{[]string{"-l", "7471"}, options{listen: true, port: "7471"}},
		{[]string{"-lvk", "7471"}, options{listen: true, verbose: 1, keep: true, port: "7471"}},
		{[]string{"-l", "::1", "0"}, options{listen: true, host: "::1", port: "0"}},
		{[]string{"[fe80::1%eth0]", "1"}, options{host: "fe80::1%eth0", port: "1"}},
		{[]string{"host", "http", "-vv"}, options{verbose: 2, host: "host", port: "http"}},
		{[]string{"-4w5", "host", "1"}, options{only4: true, wait: seconds{5 * time.Second, "5"}, host: "host", port: "1"}},
		{[]string{"-w", "1.5", "host", "1"}, options{wait: seconds{1500 * time.Millisecond, "1.5"}, host: "host", port: "1"}},
		{[]string{"-6", "-w500ms", "host", "1"}, options{only6: true, wait: seconds{500 * time.Millisecond, "500ms"}, host: "host", port: "1"}},
		{[]string{"-s", "::1", "-p", "99", "host", "1"}, options{source: "::1", sourcePort: 99, host: "host", port: "1"}},
		{[]string{"--provider=auto", "--crc", "host", "1"}, options{provider: "auto", crc: true, host: "host", port: "1"}},
		{[]string{"--reply-wait", "1m", "host", "1"}, options{replyWait: seconds{time.Minute, "1m"}, host: "host", port: "1"}},
		{[]string{"--demo"}, options{demo: 256 << 20}},
		{[]string{"--demo=1000", "-v", "-6"}, options{demo: 1000, verbose: 1, only6: true}},
		{[]string{"--devices"}, options{devices: true}},
		{[]string{"--help"}, options{help: true}},
		{[]string{"-h", "whatever"}, options{help: true}},
		{[]string{"--version"}, options{version: true}},
	} {
		if c.want.replyWait.text == "" {
			c.want.replyWait = seconds{defaultReplyWait, "3"}
		}
		got, err := parse(c.args)
		require.NoError(t, err, c.args)
		require.Equal(t, &c.want, got, c.args)
	}
}

func TestWrongUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "use rcat HOST PORT"},
		{[]string{"-l"}, "use rcat -l [HOST] PORT"},
		{[]string{"host"}, `"host" is one argument`},
		{[]string{"host:7471"}, "use rcat host 7471"},
		{[]string{"host", "7471", "more"}, `"more" is too many`},
		{[]string{"host", "65536"}, "port 65536 is out of range: 1 to 65535"},
		{[]string{"host", "no-such-service"}, `port "no-such-service"`},
		{[]string{"host", "0"}, "port 0 can't be dialed"},
		{[]string{"-46", "host", "1"}, "-4 and -6 exclude each other"},
		{[]string{"-k", "host", "1"}, "use it with -l"},
		{[]string{"-l", "-p", "7471"}, "use rcat -l 7471"},
		{[]string{"-l", "-s", "10.0.0.1", "7471"}, "use rcat -l 10.0.0.1 PORT"},
		{[]string{"-4", "-s", "::1", "host", "1"}, "-s ::1 is not an address of the family that -4 asks for"},
		{[]string{"-6", "-s", "127.0.0.1", "host", "1"}, "that -6 asks for"},
		{[]string{"-p", "99999", "host", "1"}, "port 99999 is out of range"},
		{[]string{"-w", "0", "host", "1"}, "-w 0 is no time to wait"},
		{[]string{"-w", "-1", "host", "1"}, "must be seconds"},
		{[]string{"-w", "soon", "host", "1"}, `"soon"`},
		{[]string{"--provider", "pigeon", "host", "1"}, "--provider pigeon is not known here: use auto or one of "},
		{[]string{"--demo", "64MiB"}, "given as --demo=64MiB"},
		{[]string{"--demo=0"}, "must be 1 byte to 8 EiB"},
		{[]string{"--demo=many"}, `"many"`},
		{[]string{"--demo", "-l"}, "--demo dials itself"},
		{[]string{"--demo", "-w", "1"}, "--demo dials itself"},
		{[]string{"--devices", "-v"}, "--devices goes with no other option"},
		{[]string{"--devices", "rxe0"}, `--devices takes no "rxe0"`},
		{[]string{"-z", "host", "1"}, "rcat --help lists the options"},
		{[]string{"--nonsense"}, "--nonsense"},
	} {
		_, err := parse(c.args)
		require.ErrorContains(t, err, c.want, c.args)
		require.ErrorAs(t, err, new(usageError), c.args)
	}
}

func TestWrongUsageHasStatus2(t *testing.T) {
	t.Parallel()
	p := start(t, nil, nil, "-l", "-p", "7471")
	require.Equal(t, 2, p.status())
	requireOneLine(t, p.err.String())
	require.Empty(t, p.out.String())
}

func TestHelpAndVersion(t *testing.T) {
	t.Parallel()
	p := start(t, nil, nil, "--help")
	require.Equal(t, 0, p.status())
	require.Contains(t, p.out.String(), "rcat [options] -l [HOST] PORT")
	require.Empty(t, p.err.String())
	p = start(t, nil, nil, "--version")
	require.Equal(t, 0, p.status())
	require.Regexp(t, `^rcat \S+, go1.*iwarp.*\n$`, p.out.String())
}

func TestEveryOptionIsInTheHelp(t *testing.T) {
	f := new(options).flags()
	for _, arg := range []string{"listen", "keep-open", "verbose", "wait", "ipv4", "ipv6", "source", "source-port",
		"reply-wait", "provider", "crc", "demo", "devices", "version", "help"} {
		require.NotNil(t, f.Lookup(arg), arg)
		require.Contains(t, usage, "--"+arg)
	}
}

func TestByteSize(t *testing.T) {
	for text, want := range map[string]byteSize{
		"1": 1, "4096": 4096, "64MiB": 64 << 20, "1GiB": 1 << 30, "1G": 1 << 30, "500MB": 500e6, "1.5k": 1536, "2 KB": 2000, "7b": 7, "3tib": 3 << 40,
	} {
		var got byteSize
		require.NoError(t, got.Set(text), text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "0", "-1", "G", "1X", "1KKB", "0.5", "1e30", "9999999TiB", "inf", "nan", "MiB1"} {
		require.Error(t, new(byteSize).Set(text), text)
	}
}

func TestHuman(t *testing.T) {
	for want, n := range map[string]float64{
		"0 B": 0, "1023 B": 1023, "1 KiB": 1024, "1.5 KiB": 1536, "256 MiB": 256 << 20, "1.2 GiB": 1.2 * (1 << 30), "2048 TiB": 2 << 50,
	} {
		require.Equal(t, want, human(n))
	}
}
