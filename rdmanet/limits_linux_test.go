package rdmanet

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Processes that may not have as much on a device as they ask for. The limits
// are imposed on children of the test, which ends them.

const (
	envLimit = "RDMANET_TEST_LIMIT" // memlock, or the path of a cgroup

	limitMemlock = "memlock"
	memlockBytes = 64 << 10
	// How many objects of a device a cgroup allows: some are for all connections,
	// three or four for each.
	manyObjects = 24
	oneObject   = 1 // librdmacm's own protection domain
	// manyTimes is how often something fails that must leave nothing.
	manyTimes = 20
)

// limited is a limit as a test sees it.
type limited struct {
	value string // of envLimit
	none  bool   // not even one connection is possible
	errno syscall.Errno
	says  []string // in a Dial's error, and in the listener's log
}

func onEachLimit(t *testing.T, f func(t *testing.T, d labDevice, l limited)) {
	onEachDevice(t, func(t *testing.T, d labDevice) {
		t.Run("RLIMIT_MEMLOCK", func(t *testing.T) {
			f(t, d, limited{limitMemlock, true, syscall.ENOMEM,
				[]string{"1048576 bytes", fmt.Sprintf("RLIMIT_MEMLOCK is %d bytes", memlockBytes), "ulimit -l unlimited"}})
		})
		for _, objects := range []int{oneObject, manyObjects} {
			t.Run(fmt.Sprint("hca_object ", objects), func(t *testing.T) {
				f(t, d, limited{objectGroup(t, objects), objects == oneObject, syscall.ENOBUFS, []string{"cgroup", "rdma.max"}})
			})
		}
	})
}

// objectGroup makes a cgroup that bounds the objects on every device.
func objectGroup(t *testing.T, objects int) (dir string) {
	t.Helper()
	cannot := func(why any) {
		t.Helper()
		if os.Getenv("RDMANET_LAB") == "1" {
			t.Fatal("no cgroup with rdma.max:", why)
		}
		t.Skip("no cgroup with rdma.max:", why)
	}
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil {
		root = t.TempDir()
		if err := unix.Mount("none", root, "cgroup2", 0, ""); err != nil {
			cannot(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(root, 0) })
	}
	if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+rdma"), 0); err != nil {
		cannot(err)
	}
	dir = filepath.Join(root, "rdmanet-test-"+strconv.Itoa(os.Getpid()))
	if err := os.Mkdir(dir, 0o700); err != nil {
		cannot(err)
	}
	t.Cleanup(func() { eventually(t, func() bool { return os.Remove(dir) == nil }, "the cgroup is empty") })
	if err := setObjects(dir, objects); err != nil {
		cannot(err)
	}
	return dir
}

// setObjects sets how many objects of each device a cgroup allows.
func setObjects(group string, objects int) error {
	devices, err := os.ReadDir("/sys/class/infiniband")
	for _, d := range devices {
		rule := fmt.Sprintf("%s hca_object=%d", d.Name(), objects)
		err = errors.Join(err, os.WriteFile(filepath.Join(group, "rdma.max"), []byte(rule), 0))
	}
	return err
}

// impose puts this process, a child, under the limit.
func impose() error {
	v := os.Getenv(envLimit)
	if v != limitMemlock {
		return os.WriteFile(filepath.Join(v, "cgroup.procs"), []byte("0"), 0)
	}
	var hdr = unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return err
	}
	if caps[0].Effective&(1<<unix.CAP_IPC_LOCK) != 0 {
		return errors.New("this child has CAP_IPC_LOCK")
	}
	return setMemlock(0, memlockBytes)
}

// setMemlock sets a process's soft limit; 0 is this one.
func setMemlock(pid int, bytes uint64) error {
	var lim unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_MEMLOCK, nil, &lim); err != nil {
		return err
	}
	lim.Cur = min(bytes, lim.Max)
	return unix.Prlimit(pid, unix.RLIMIT_MEMLOCK, &lim, nil)
}

const noMemlock = unix.RLIM_INFINITY // or as much as the hard limit allows

// makeRoom lets a process have one more connection than it had: by a higher limit,
// or instead of another one.
func (l limited) makeRoom(pid int, open *[]net.Conn) error {
	switch {
	case l.value == limitMemlock:
		return setMemlock(pid, noMemlock)
	case len(*open) == 0:
		return setObjects(l.value, manyObjects)
	}
	err := (*open)[0].Close()
	*open = (*open)[1:]
	return err
}

// limitedChild starts one that can't pin memory by a capability.
func limitedChild(t *testing.T, name string, l limited, env ...string) (cmd *exec.Cmd, out io.Reader) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocks it: this thread ends here
		// Without the right to do this there is no such capability.
		_ = unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_IPC_LOCK, 0, 0, 0)
		cmd, out = child(t, name, append(env, envLimit+"="+l.value)...)
	}()
	<-done
	if cmd == nil {
		t.FailNow()
	}
	return cmd, out
}

// dialUntilRefused opens connections until that fails.
func dialUntilRefused(addr string) (open []net.Conn, err error) {
	for range 1000 {
		c, err := DialTimeout("rdma", addr, patience)
		if err != nil {
			return open, err
		}
		open = append(open, c)
	}
	return open, nil
}

// dialReport is what a child that dials under a limit says of it.
type dialReport struct {
	Open    int    // connections, before one failed
	Failed  string // how
	Errno   syscall.Errno
	Timeout bool
	Error   string // of anything that should have gone well
}

func (r *dialReport) run(addr string) error {
	l := limited{value: os.Getenv(envLimit)}
	if err := impose(); err != nil {
		return err
	}
	open, err := dialUntilRefused(addr)
	if err == nil {
		return errors.New("there is no limit")
	}
	r.Open, r.Failed = len(open), err.Error()
	errors.As(err, &r.Errno)
	var timeout net.Error
	r.Timeout = errors.As(err, &timeout) && timeout.Timeout()
	for i := range manyTimes {
		if c, err := DialTimeout("rdma", addr, patience); err == nil {
			_ = c.Close()
			return fmt.Errorf("dial %d after the first that failed did not fail", i)
		}
	}
	if len(open) == 0 {
		if err := errors.Join(leaked(0), leftOnDevices()); err != nil {
			return err
		}
	}
	for _, c := range open {
		if err := echoed(c, bytesOf(1, 100_000)); err != nil {
			return err
		}
	}
	if err := l.makeRoom(0, &open); err != nil {
		return err
	}
	c, err := DialTimeout("rdma", addr, patience)
	if err != nil {
		return fmt.Errorf("with room: %w", err)
	}
	for _, c := range append(open, c) {
		if err := errors.Join(echoed(c, bytesOf(1, 100_000)), c.Close()); err != nil {
			return err
		}
	}
	return errors.Join(leaked(0), leftOnDevices())
}

func init() {
	children["limited dialer"] = func() {
		var r dialReport
		if err := r.run(os.Getenv(envAddr)); err != nil {
			r.Error = err.Error()
		}
		_ = json.NewEncoder(os.Stdout).Encode(r)
	}
	children["limited listener"] = func() {
		if err := listenLimited(os.Getenv(envAddr)); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
}

// listenLimited serves until SIGTERM. It says where, and then logs.
func listenLimited(addr string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := impose(); err != nil {
		return err
	}
	var log logBuffer
	l, err := (&ListenConfig{Config: Config{Logger: log.logger()}}).Listen(ctx, "rdma", addr)
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	go echo(l)
	<-ctx.Done()
	fmt.Println(&log)
	err = l.Close()
	stop()
	return errors.Join(err, leftOnDevices(), leaked(0))
}

// TestLimitsFailADial: with an error that says why, and no effect on anything
// else.
func TestLimitsFailADial(t *testing.T) {
	onEachLimit(t, func(t *testing.T, d labDevice, l limited) {
		checkLeaks(t)
		to := echoes(t, d, Config{})
		_, out := limitedChild(t, "limited dialer", l, envAddr+"="+to.Addr().String())
		var r dialReport
		var err error
		within(t, 2*patience, func() { err = json.NewDecoder(out).Decode(&r) })
		require.NoError(t, err)
		t.Logf("%+v", r)
		require.Empty(t, r.Error)
		require.Equal(t, l.none, r.Open == 0)
		require.Equal(t, l.errno, r.Errno)
		require.False(t, r.Timeout, "nothing has timed out")
		for _, words := range l.says {
			require.Contains(t, r.Failed, words)
		}
	})
}

// TestLimitsOfAListenerRefuseTheDialer: with a reason, and the listener logs its
// own, and goes on.
func TestLimitsOfAListenerRefuseTheDialer(t *testing.T) {
	onEachLimit(t, func(t *testing.T, d labDevice, l limited) {
		checkLeaks(t)
		cmd, out := limitedChild(t, "limited listener", l, envAddr+"="+net.JoinHostPort(d.addr, "0"))
		lines := bufio.NewReader(out)
		addr, err := lines.ReadString('\n')
		require.NoError(t, err)
		addr = strings.TrimSpace(addr)

		open, err := dialUntilRefused(addr)
		t.Logf("%d connections, then: %v", len(open), err)
		require.Equal(t, l.none, len(open) == 0)
		requireOpError(t, err, "dial", syscall.ECONNREFUSED)
		require.ErrorContains(t, err, reasonResources.String())
		for range manyTimes {
			_, err := DialTimeout("rdma", addr, patience)
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
		}
		for _, c := range open {
			require.NoError(t, echoed(c, bytesOf(1, 100_000)))
		}

		require.NoError(t, l.makeRoom(cmd.Process.Pid, &open))
		eventually(t, func() bool { // the listener's end is closed, too
			var c net.Conn
			if c, err = DialTimeout("rdma", addr, patience); err == nil {
				open = append(open, c)
			}
			return err == nil
		}, "there is room again")
		for _, c := range open {
			require.NoError(t, echoed(c, bytesOf(1, 100_000)))
			require.NoError(t, c.Close())
		}

		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		var log logBuffer
		within(t, patience, func() { _, _ = io.Copy(&log, lines) })
		require.NoError(t, cmd.Wait(), "%s", &log)
		require.True(t, log.has(append(l.says, "level=INFO", "connection refused", "peer="+d.addr+":")...), "%s", &log)
	})
}
