package main

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/rdmanet"
)

func TestParseOptionsDefaults(t *testing.T) {
	o, err := parseOptions(nil, io.Discard)
	require.NoError(t, err)
	require.Equal(t, []string{"auto"}, o.providers)
	require.Equal(t, "127.0.0.1", o.address)
	require.Equal(t, 20, o.rounds())
	require.True(t, o.only.MatchString("anything"))
	require.False(t, o.processes)
}

func TestQuickKeepsWhatIsSaidExplicitly(t *testing.T) {
	o, err := parseOptions([]string{"--quick", "--slice=10ms"}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, 10*time.Millisecond, o.sliceLength)
	require.Equal(t, quickDuration, o.duration)
	require.Equal(t, quickIdle, o.idle)
}

func TestParseOptionsRefusesWhatMakesNoSense(t *testing.T) {
	for _, args := range []string{
		"--nonsense", "extra", "--duration=1ms", "--slice=0", "--idle=0", "--only=(", "--duration=soon", "--provider=",
		"--server-command=ssh",
	} {
		t.Run(args, func(t *testing.T) {
			_, err := parseOptions(strings.Fields(args), io.Discard)
			require.ErrorAs(t, err, new(usageError))
		})
	}
}

func TestHelpShowsEveryFlagButServe(t *testing.T) {
	var b strings.Builder
	_, err := parseOptions([]string{"--help"}, &b)
	require.ErrorIs(t, err, pflag.ErrHelp)
	require.Contains(t, b.String(), "--processes")
	require.NotContains(t, b.String(), "--serve ")
}

func TestServerArgs(t *testing.T) {
	o, err := parseOptions([]string{"--processes", "--provider=a,b", "--address=::1"}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, []string{"/bench", "--serve=tcp", "--address=::1", "--provider=a,b"}, o.serverArgs("/bench", "tcp"))
	o.serverCommand = "ssh host bench"
	require.Equal(t, []string{"ssh", "host", "bench", "--serve=tcp", "--address=::1", "--provider=a,b"}, o.serverArgs("/bench", "tcp"))
	o, err = parseOptions([]string{"--buffer-size=65536", "--recv-depth=8", "--send-depth=4"}, io.Discard)
	require.NoError(t, err)
	served, err := parseOptions(o.serverArgs("/bench", "rdma")[1:], io.Discard)
	require.NoError(t, err)
	require.Equal(t, rdmanet.Config{BufferSize: 65536, RecvDepth: 8, SendDepth: 4}, served.config)
}
