package rdmanet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// labDevice is an RDMA device of this machine.
type labDevice struct {
	addr string // IPv4
	siw  bool
}

// onEachDevice runs a test on each device that the lab names.
func onEachDevice(t *testing.T, f func(t *testing.T, d labDevice)) {
	if testProvider() != ProviderDevice {
		t.Skipf("about devices; try: %s=device lab/guest go test ./rdmanet", envProvider)
	}
	testAddrs(t) // or skip
	for _, name := range []string{"RXE", "SIW"} {
		if addr := os.Getenv("RDMANET_LAB_" + name + "4"); addr != "" {
			t.Run(strings.ToLower(name), func(t *testing.T) { f(t, labDevice{addr, name == "SIW"}) })
		}
	}
}

// skipWithoutDevices fails instead where devices, and all that goes with them,
// are required.
func skipWithoutDevices(t testing.TB, why string) {
	t.Helper()
	if os.Getenv(envRequire) == "1" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// leftOnDevices reports what this process has on RDMA devices, as the kernel
// counts it. What it lists goes a moment after it was destroyed.
func leftOnDevices() error {
	if testProvider() != ProviderDevice {
		return nil
	}
	for end := time.Now().Add(15 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		left, err := onDevices()
		if err != nil || left == "" {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("on the devices is left:\n%s", left)
		}
	}
}

// onDevices returns the lines of rdma resource show that are of this process.
func onDevices() (string, error) {
	if _, err := exec.LookPath("rdma"); err != nil {
		return "", nil // iproute2 is not installed
	}
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		return "", err
	}
	var left strings.Builder
	for _, kind := range resourceKinds {
		out, err := exec.Command("rdma", "resource", "show", kind).Output()
		if err != nil {
			return "", fmt.Errorf("rdma resource show %s: %w", kind, err)
		}
		for line := range bytes.Lines(out) {
			if ours(string(line), strings.TrimSpace(string(comm))) {
				fmt.Fprintf(&left, "%s: %s", kind, line)
			}
		}
	}
	return left.String(), nil
}

var resourceKinds = []string{"qp", "cq", "mr", "cm_id", "pd"}

// ours finds a thread of this process where the kernel says pid: the one that made
// the object. When that one is gone there is a name and no pid.
func ours(line, comm string) bool {
	word := func(after string) string {
		_, rest, _ := strings.Cut(line, " "+after+" ")
		w, _, _ := strings.Cut(rest, " ")
		return strings.TrimSpace(w)
	}
	tid := word("pid")
	if tid == "" {
		return word("comm") == comm
	}
	_, err := os.Stat("/proc/self/task/" + tid)
	return err == nil
}

// TestTheDevicesAreLookedAt: a check that sees nothing would find nothing.
func TestTheDevicesAreLookedAt(t *testing.T) {
	if _, err := exec.LookPath("rdma"); err != nil {
		skipWithoutDevices(t, "rdma is not installed; try: apt install iproute2")
	}
	onEachDevice(t, func(t *testing.T, d labDevice) {
		checkLeaks(t)
		a, b := pairOf(t, Config{}, Config{}, net.JoinHostPort(d.addr, "0"))
		left, err := onDevices()
		require.NoError(t, err)
		for _, kind := range resourceKinds {
			require.Contains(t, left, kind+": ")
		}
		require.NoError(t, a.Close())
		require.NoError(t, b.Close())
		require.NoError(t, leftOnDevices())
	})
}

// echo sends back what its connections carry, until the listener is closed.
func echo(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}()
	}
}

// echoes listens on a device until the test ends.
func echoes(t *testing.T, d labDevice, cfg Config) net.Listener {
	t.Helper()
	l, err := (&ListenConfig{Config: cfg}).Listen(context.Background(), "rdma", net.JoinHostPort(d.addr, "0"))
	require.NoError(t, err)
	closeLater(t, l)
	go echo(l)
	return l
}

// echoed sends bytes and wants them back.
func echoed(c net.Conn, p []byte) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write(p); err != nil {
		return err
	}
	got := make([]byte, len(p))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if !bytes.Equal(p, got) {
		return errors.New("other bytes came back")
	}
	return nil
}

// TestManyConnectionsOneAfterTheOther: other libraries die after about 1,000.
func TestManyConnectionsOneAfterTheOther(t *testing.T) {
	onEachDevice(t, func(t *testing.T, d labDevice) {
		checkLeaks(t)
		l := echoes(t, d, Config{})
		p := bytesOf(1, 10_000)
		n := scaled(200, 3000)
		var fdsAt, goroutinesAt int
		for i := range n {
			c, err := Dial("rdma", l.Addr().String())
			require.NoError(t, err, "after %d", i)
			require.NoError(t, echoed(c, p), "after %d", i)
			require.NoError(t, c.Close(), "after %d", i)
			if i == n/10 {
				fdsAt, goroutinesAt = fds(t), runtime.NumGoroutine()
			}
		}
		// Two of the other end's may be in Close.
		eventually(t, func() bool { return fds(t) <= fdsAt+2 && runtime.NumGoroutine() <= goroutinesAt+2 },
			"descriptors and goroutines stay flat, from %d and %d", fdsAt, goroutinesAt)
		require.NoError(t, l.Close())
		require.NoError(t, leftOnDevices())
	})
}

// needsProgram is for rdma-core's example programs.
func needsProgram(t *testing.T, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		skipWithoutDevices(t, name+" is not installed; try: apt install rdmacm-utils")
	}
}

// runProgram runs one until it ends.
func runProgram(ctx context.Context, name string, args ...string) (out string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	b, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return string(b), err
}

// TestForeignClientsAreRefused: with a reason, which the listener logs, and it
// goes on.
func TestForeignClientsAreRefused(t *testing.T) {
	onEachDevice(t, func(t *testing.T, d labDevice) {
		for _, client := range [][]string{
			{"rping", "-c", "-C", "1", "-a", d.addr, "-p"},
			{"rdma_client", "-s", d.addr, "-p"},
		} {
			t.Run(client[0], func(t *testing.T) {
				needsProgram(t, client[0])
				checkLeaks(t)
				var log logBuffer
				l := echoes(t, d, Config{Logger: log.logger()})
				_, port, err := net.SplitHostPort(l.Addr().String())
				require.NoError(t, err)
				out, err := runProgram(t.Context(), client[0], append(client[1:], port)...)
				t.Logf("%v: %s", err, out)
				var exit *exec.ExitError
				require.ErrorAs(t, err, &exit, "it fails, by itself")
				require.True(t, exit.Exited(), "%v", exit)
				require.Regexp(t, "(?i)reject|refused|reset", out)
				eventually(t, func() bool {
					return log.has("level=INFO", "connection refused", "peer="+d.addr+":", reasonNotOurs.String())
				}, "the listener logs it: %s", &log)
				c, err := Dial("rdma", l.Addr().String())
				require.NoError(t, err)
				require.NoError(t, echoed(c, bytesOf(1, 100_000)))
				require.NoError(t, c.Close())
			})
		}
	})
}

// TestDialToForeignServersFails, and says why.
func TestDialToForeignServersFails(t *testing.T) {
	onEachDevice(t, func(t *testing.T, d labDevice) {
		for _, server := range [][]string{
			{"rping", "-s", "-C", "1", "-a", d.addr, "-p"},
			{"rdma_server", "-s", d.addr, "-p"},
		} {
			t.Run(server[0], func(t *testing.T) {
				needsProgram(t, server[0])
				checkLeaks(t)
				l := echoes(t, d, Config{})
				addr := l.Addr().String()
				require.NoError(t, l.Close())
				_, port, err := net.SplitHostPort(addr)
				require.NoError(t, err)
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				ended := make(chan string, 1)
				go func() {
					out, err := runProgram(ctx, server[0], append(server[1:], port)...)
					ended <- fmt.Sprintf("%v: %s", err, out)
				}()
				eventually(t, func() bool {
					_, err = DialTimeout("rdma", addr, patience)
					return !errors.Is(err, syscall.ECONNREFUSED)
				}, "%s listens", server[0])
				t.Log(err)
				requireOpError(t, err, "dial", syscall.EPROTO)
				require.ErrorContains(t, err, "does not speak our protocol")
				stop() // if it waits for another client
				t.Log(<-ended)
			})
		}
	})
}
