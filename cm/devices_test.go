package cm_test

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
)

// An id on a device says which, port and GID included; one in software has none.
func TestContractEndpoint(t *testing.T) {
	onEveryProvider(t, func(t *testing.T, on target) {
		ch := newChannel(t, on)
		unbound := newID(t, ch)
		_, ok := unbound.Endpoint()
		require.False(t, ok)

		active, passive := connect(t, ch, listen(t, ch, on))
		for _, id := range []*cm.ID{active.id, passive.id} {
			e, ok := id.Endpoint()
			if on.fake == nil && on.Name() != "device" {
				require.False(t, ok)
				require.Zero(t, e)
				continue
			}
			require.True(t, ok)
			dev, _ := id.Device()
			require.Equal(t, dev.Name(), e.Device)
			require.Equal(t, 1, e.Port)
			require.Equal(t, "Ethernet", e.LinkLayer)
			if e.Transport == "iWARP" {
				require.False(t, e.GID.IsValid())
			} else {
				require.Equal(t, "RoCE", e.Transport)
				require.Equal(t, on.addr, e.GID.Unmap())
			}
			if on.fake == nil {
				requireListed(t, e, on.addr)
			}
		}
		require.NoError(t, unbound.Destroy())
		_, ok = unbound.Endpoint()
		require.False(t, ok)
	})
}

// requireListed asserts that Devices knows of an endpoint what the endpoint does.
func requireListed(t *testing.T, e cm.Endpoint, addr netip.Addr) {
	t.Helper()
	infos, err := cm.Devices()
	require.NoError(t, err)
	n := slices.IndexFunc(infos, func(i cm.DeviceInfo) bool { return i.Name == e.Device })
	require.NotEqual(t, -1, n, "%s is one of %v", e.Device, infos)
	info := infos[n]
	require.NoError(t, info.Err)
	require.Equal(t, e.Transport, info.Transport)
	port := info.Ports[e.Port-1]
	require.Equal(t, e.LinkLayer, port.LinkLayer)
	require.Equal(t, "ACTIVE", port.State)
	require.True(t, slices.ContainsFunc(port.Addrs, func(p netip.Prefix) bool { return p.Addr() == addr }))
	require.Equal(t, e.GID.IsValid(), slices.ContainsFunc(port.GIDs, func(g cm.GID) bool { return g.Addr == e.GID }))
}

// Without a device, Devices says why, as the provider does.
func TestDevicesOrWhatIsMissing(t *testing.T) {
	infos, err := cm.Devices()
	if os.Getenv("RDMANET_REQUIRE_DEVICE") == "1" {
		require.NoError(t, err)
	}
	if err == nil {
		require.NotEmpty(t, infos)
		return
	}
	require.ErrorAs(t, err, new(syscall.Errno))
	_, open := cm.NewEventChannel("device")
	require.Error(t, open)
	require.Equal(t, errors.Unwrap(open).Error(), errors.Unwrap(err).Error())
}

func TestEndpointInWords(t *testing.T) {
	ip := netip.MustParseAddr
	for want, e := range map[string]cm.Endpoint{
		"rxe0 port 1, RoCE over Ethernet, GID ::ffff:10.0.0.1":   {Device: "rxe0", Port: 1, Transport: "RoCE", LinkLayer: "Ethernet", GID: ip("::ffff:10.0.0.1")},
		"mlx5_0 port 2, InfiniBand, GID fe80::ec0d:9a03:78:645a": {Device: "mlx5_0", Port: 2, Transport: "InfiniBand", LinkLayer: "InfiniBand", GID: ip("fe80::ec0d:9a03:78:645a")},
		"siw0 port 1, iWARP over Ethernet":                       {Device: "siw0", Port: 1, Transport: "iWARP", LinkLayer: "Ethernet"},
	} {
		require.Equal(t, want, e.String())
	}
}
