package qp

import (
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMemoryGrantsLocalAccessOnly(t *testing.T) {
	_, a, _ := newPair(t)
	mr, err := a.pd.RegMR(mapped(t, 4096))
	require.NoError(t, err)
	require.Equal(t, AccessLocalWrite, mr.Access())
	require.Zero(t, mr.Access()&(AccessRemoteRead|AccessRemoteWrite))
	require.Equal(t, 4096, mr.Len())

	pool, err := NewPool(a.pd, PoolConfig{BlockSize: 100, MaxBytes: 1 << 20})
	require.NoError(t, err)
	b, err := pool.Get()
	require.NoError(t, err)
	require.Equal(t, AccessLocalWrite, pool.arenas[0].mr.Access())
	b.Release()
	require.NoError(t, pool.Close())
	require.NoError(t, mr.Close())
	err = mr.Close()
	require.ErrorIs(t, err, net.ErrClosed)
	requireErrno(t, err, syscall.EBADF)
}

func TestBusyPDCannotBeClosed(t *testing.T) {
	_, a, _ := newPair(t)
	mr, err := a.pd.RegMR(mapped(t, 4096))
	require.NoError(t, err)
	err = a.pd.Close()
	var busy *BusyError
	require.ErrorAs(t, err, &busy)
	require.Equal(t, BusyError{Object: "protection domain", MRs: 1, QPs: 1}, *busy)
	requireErrno(t, err, syscall.EBUSY)

	require.NoError(t, mr.Close())
	require.ErrorAs(t, a.pd.Close(), &busy)
	require.Equal(t, 0, busy.MRs)
}

func TestMemlockErrorNamesLimitAndFix(t *testing.T) {
	p, a, _ := newPair(t)
	for _, errno := range []syscall.Errno{syscall.ENOMEM, syscall.EPERM} {
		p.SetFail(func(op string) error {
			if op == "reg mr" {
				return errno
			}
			return nil
		})
		_, err := a.pd.RegMR(mapped(t, 4096))
		var lock *MemlockError
		require.ErrorAs(t, err, &lock)
		require.Equal(t, 4096, lock.Bytes)
		requireErrno(t, err, errno)
		for _, part := range []string{"4096 bytes", "RLIMIT_MEMLOCK is " + memlockLimit(), "ulimit -l unlimited", "LimitMEMLOCK=", "CAP_IPC_LOCK"} {
			require.Contains(t, err.Error(), part)
		}

		pool, err := NewPool(a.pd, PoolConfig{BlockSize: 100, MaxBytes: 1 << 20})
		require.NoError(t, err)
		_, err = pool.Get()
		require.ErrorAs(t, err, &lock)
		require.Equal(t, PoolStats{}, pool.Stats())
		require.NoError(t, pool.Close())
	}
	p.SetFail(func(op string) error {
		if op == "reg mr" {
			return syscall.EFAULT
		}
		return nil
	})
	_, err := a.pd.RegMR(mapped(t, 4096))
	requireErrno(t, err, syscall.EFAULT)
	require.NotContains(t, err.Error(), "MEMLOCK")
	p.SetFail(nil)
}

func TestClosedPD(t *testing.T) {
	p := newProvider(t)
	pd, err := NewDevice(p.Device()).AllocPD()
	require.NoError(t, err)
	require.NoError(t, pd.Close())
	_, err = pd.RegMR(mapped(t, 4096))
	require.ErrorIs(t, err, net.ErrClosed)
	require.ErrorIs(t, pd.Close(), net.ErrClosed)
}

func TestSameDeviceIsTheSameMapKey(t *testing.T) {
	p := newProvider(t)
	m := map[Device]int{NewDevice(p.Device()): 1}
	require.Equal(t, 1, m[NewDevice(p.Device())])
	require.Equal(t, "fake0", NewDevice(p.Device()).Name())
}

func TestStatusErr(t *testing.T) {
	require.NoError(t, StatusErr(WC{}))
	for status, errno := range map[Status]syscall.Errno{
		StatusRetryExcErr:    syscall.ETIMEDOUT,
		StatusRNRRetryExcErr: syscall.ETIMEDOUT,
		StatusWRFlushErr:     syscall.ECANCELED,
		StatusRemOpErr:       syscall.ECONNRESET,
		StatusRemAbortErr:    syscall.ECONNRESET,
		StatusRemAccessErr:   syscall.EIO,
	} {
		err := StatusErr(WC{Op: OpRecv, Status: status, VendorErr: 0x81})
		var se *StatusError
		require.ErrorAs(t, err, &se)
		require.Equal(t, status, se.Status)
		requireErrno(t, err, errno)
		require.Contains(t, err.Error(), "recv: "+status.String())
		require.Contains(t, err.Error(), "0x81")
	}
}
