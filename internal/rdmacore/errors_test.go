//go:build cgo && linux

package rdmacore

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

// machine makes a directory that looks like a machine's /sys/class and
// /dev/infiniband. A path that ends in a slash is a directory.
func machine(t *testing.T, mode os.FileMode, paths ...string) {
	dir := t.TempDir()
	sys, dev := sysClass, devDir
	t.Cleanup(func() { sysClass, devDir = sys, dev })
	sysClass, devDir = filepath.Join(dir, "sys"), filepath.Join(dir, "dev")
	for _, p := range paths {
		require.NoError(t, os.MkdirAll(filepath.Dir(dir+"/"+p+"x"), 0o755))
		if !strings.HasSuffix(p, "/") {
			require.NoError(t, os.WriteFile(filepath.Join(dir, p), nil, mode))
		}
	}
}

const (
	anyDevice  = "sys/infiniband/rxe0/"
	anyUverbs  = "sys/infiniband_verbs/uverbs0/"
	rdmaCMNode = "dev/rdma_cm"
	uverbsNode = "dev/uverbs0"
)

func TestWhatIsMissingIsNamed(t *testing.T) {
	for _, tc := range []struct {
		name, what, fix string
		paths           []string
	}{
		{"no subsystem", "no RDMA subsystem", "modprobe", nil},
		{"no device", "no RDMA device", "rdma link add", []string{"sys/infiniband/", rdmaCMNode}},
		{"no rdma_ucm", "rdma_cm does not exist", "modprobe rdma_ucm", []string{anyDevice, anyUverbs, uverbsNode}},
		{"no rdma_cm node", "rdma_cm does not exist", "udev", []string{anyDevice, anyUverbs, uverbsNode, "sys/misc/rdma_cm/"}},
		{"no ib_uverbs", "ib_uverbs is not loaded", "modprobe ib_uverbs", []string{anyDevice, rdmaCMNode}},
		{"no uverbs node", "uverbs0 does not exist", "--device", []string{anyDevice, rdmaCMNode, anyUverbs}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			machine(t, 0o666, tc.paths...)
			err := diagnose()
			require.ErrorIs(t, err, syscall.ENODEV)
			require.ErrorContains(t, err, tc.what)
			require.ErrorContains(t, err, tc.fix)
		})
	}
	t.Run("nothing", func(t *testing.T) {
		machine(t, 0o666, anyDevice, rdmaCMNode, anyUverbs, uverbsNode)
		require.NoError(t, diagnose())
	})
	t.Run("permission", func(t *testing.T) {
		machine(t, 0o600, anyDevice, rdmaCMNode, anyUverbs, uverbsNode)
		err := asNobody(t, diagnose)
		require.ErrorIs(t, err, syscall.EACCES)
		require.ErrorContains(t, err, "no permission to open "+devDir+"/rdma_cm")
		require.ErrorContains(t, err, "chmod")
	})
	t.Run("library", func(t *testing.T) {
		err := missingLibrary("librdmacm.so.1: cannot open shared object file")
		require.ErrorIs(t, err, syscall.ENODEV)
		require.ErrorContains(t, err, "librdmacm.so.1")
		require.ErrorContains(t, err, "apt install")
	})
}

// asNobody calls f on a thread that has no right to other users' files. The
// thread ends with it: the kernel's RDMA interface takes no calls from one that
// ever changed its credentials.
func asNobody(t *testing.T, f func() error) (err error) {
	if os.Getuid() != 0 {
		return f()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		unix.Setfsuid(65534)
		err = f()
	}()
	<-done
	return err
}

// Without a device, opening the provider says why; with one it works.
func TestOpenSaysWhy(t *testing.T) {
	p, err := verbs.Open(Name)
	infos, devErr := Devices()
	if err != nil {
		require.ErrorContains(t, err, "(") // the fix
		require.Error(t, devErr)
		skip(t, err.Error())
	}
	require.Equal(t, Name, p.Name())
	require.NoError(t, devErr)
	require.NotEmpty(t, infos)
}

func TestReasonsOfEvents(t *testing.T) {
	for _, tc := range []struct {
		t      verbs.EventType
		status int
		errno  syscall.Errno
		text   string
	}{
		{verbs.EventRejected, 8, syscall.ECONNREFUSED, "nobody listens"},
		{verbs.EventRejected, 28, syscall.ECONNREFUSED, "rejected by the peer's program"},
		{verbs.EventRejected, 99, syscall.ECONNREFUSED, "reason 99"},
		{verbs.EventRejected, -int(syscall.ECONNREFUSED), syscall.ECONNREFUSED, "refused"},
		{verbs.EventRejected, -int(syscall.ECONNRESET), syscall.ECONNREFUSED, "ended"},
		{verbs.EventUnreachable, -int(syscall.ETIMEDOUT), syscall.ETIMEDOUT, "timed out"},
		{verbs.EventAddrError, -int(syscall.ETIMEDOUT), syscall.EHOSTUNREACH, "ARP"},
		{verbs.EventAddrError, -int(syscall.ENODEV), syscall.ENODEV, "no RDMA device"},
		{verbs.EventDisconnected, -int(syscall.ECONNRESET), syscall.ECONNRESET, "reset"},
	} {
		err := eventError(tc.t, tc.status)
		require.ErrorIs(t, err, tc.errno)
		require.ErrorContains(t, err, tc.text)
	}
	require.NoError(t, eventError(verbs.EventDisconnected, 0))
}

func TestAddressesKeepTheirZone(t *testing.T) {
	onLoopback := "fe80::1%lo"
	for _, a := range []string{"10.1.2.3:4791", "[::]:0", "[fd77::1]:65535", "[" + onLoopback + "]:1"} {
		in := addrPort(a)
		s, err := toSockaddr(in)
		require.NoError(t, err)
		require.Equal(t, in, s.addrPort())
	}
	_, err := toSockaddr(addrPort("[fe80::1%nosuch0]:1"))
	require.ErrorIs(t, err, syscall.ENODEV)
	require.ErrorContains(t, err, "nosuch0")
}
