package main

import (
	"bytes"
	"context"
	"encoding/json"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// The test binary is the server's process too.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], "--serve=") {
		main()
	}
	goleak.VerifyTestMain(m)
}

// brief is a run that is over soon.
var brief = []string{"--duration=6ms", "--slice=3ms", "--idle=5ms"}

func TestRunMeasuresEveryPointForEveryKind(t *testing.T) {
	for _, name := range []string{"one process", "two processes"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "report.json")
			args := append(brief, "--json="+file, "--plot="+filepath.Join(dir, "plots"))
			if name == "two processes" {
				args = append(args, "--processes")
			}
			var stdout, stderr bytes.Buffer
			require.NoError(t, run(t.Context(), args, nil, &stdout, &stderr))

			r := readReport(t, file)
			for _, pt := range points {
				require.Contains(t, stdout.String(), "| "+pt.String()+": ")
				require.Contains(t, stderr.String(), pt.String()+"\n")
				for _, m := range pt.metrics() {
					row := r.row(pt, m.name)
					require.NotNil(t, row, "%s: %s", pt, m.name)
					require.NotNil(t, row.value("rdma"), "%s: %s", pt, m.name)
					require.Equal(t, pt.what != registered, row.value("tcp") != nil, "%s: %s", pt, m.name)
				}
			}
			require.Len(t, r.Targets, len(targets))
			requirePlots(t, filepath.Join(dir, "plots"))
		})
	}
}

func readReport(t *testing.T, file string) *report {
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	r := new(report)
	require.NoError(t, json.Unmarshal(b, r))
	return r
}

func requirePlots(t *testing.T, dir string) {
	files, err := filepath.Glob(filepath.Join(dir, "*.png"))
	require.NoError(t, err)
	require.Len(t, files, 3)
	for _, name := range files {
		f, err := os.Open(name)
		require.NoError(t, err)
		defer f.Close()
		_, err = png.Decode(f)
		require.NoError(t, err)
	}
}

func TestRunTakesOnlyThePointsAskedFor(t *testing.T) {
	var stdout, stderr bytes.Buffer
	require.NoError(t, run(t.Context(), append(brief, "--only=^64 B round"), nil, &stdout, &stderr))
	require.Equal(t, "64 B round trip\n", stderr.String())
}

func TestRunComparesSeveralProviders(t *testing.T) {
	var stdout, stderr bytes.Buffer
	args := append(brief, "--only=^64 B round", "--provider=auto,iwarp")
	require.NoError(t, run(t.Context(), args, nil, &stdout, &stderr))
	require.Contains(t, stdout.String(), "| rdma/auto/tcp |")
	require.Contains(t, stdout.String(), "| rdma/iwarp/tcp |")
	require.Contains(t, stdout.String(), "`rdma/iwarp` is rdmanet, provider iwarp.")
}

func TestRunFailsWhereTheKindDoes(t *testing.T) {
	for _, processes := range []string{"--processes=false", "--processes"} {
		var stdout, stderr bytes.Buffer
		err := run(t.Context(), append(brief, "--provider=carrier-pigeon", processes), nil, &stdout, &stderr)
		require.ErrorContains(t, err, "rdma: ")
		require.Equal(t, statusFailed, status(err))
		require.Empty(t, stdout.String())
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	stderr := writerFunc(func(p []byte) (int, error) { cancel(); return len(p), nil }) // the first point has begun
	var stdout bytes.Buffer
	require.ErrorIs(t, run(ctx, []string{"--duration=1h"}, nil, &stdout, stderr), context.Canceled)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestCheckNeedsATarget(t *testing.T) {
	var stdout, stderr bytes.Buffer
	err := run(t.Context(), append(brief, "--only=connection", "--check"), nil, &stdout, &stderr)
	require.ErrorIs(t, err, errNoTarget)
	require.Contains(t, stdout.String(), "connection: rate")
}

func TestStatus(t *testing.T) {
	require.Equal(t, statusOK, status(nil))
	require.Equal(t, statusOK, status(pflag.ErrHelp))
	require.Equal(t, statusFailed, status(errMissed))
	require.Equal(t, statusUsage, status(usageError{errNoTarget}))
}
