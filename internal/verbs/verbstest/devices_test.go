package verbstest

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func TestDevicesAreThoseOfAllProviders(t *testing.T) {
	infos, err := verbs.Devices()
	require.NoError(t, err)
	require.Empty(t, infos)

	a, b := verbs.DeviceInfo{Name: "a0"}, verbs.DeviceInfo{Name: "b0"}
	missing := error(syscall.ENODEV)
	verbs.RegisterDevices(func() ([]verbs.DeviceInfo, error) { return []verbs.DeviceInfo{a}, missing })
	verbs.RegisterDevices(func() ([]verbs.DeviceInfo, error) { return []verbs.DeviceInfo{b}, nil })
	infos, err = verbs.Devices()
	require.ErrorIs(t, err, syscall.ENODEV)
	require.Equal(t, []verbs.DeviceInfo{a, b}, infos)

	missing = nil
	_, err = verbs.Devices()
	require.NoError(t, err, "it looks anew each time")
}
