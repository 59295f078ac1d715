//go:build cgo && linux

package rdmacore

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/verbs"
)

func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// What Devices says of a device is what its connections find.
func TestDevicesAreDescribed(t *testing.T) {
	onEveryDevice(t, func(t *testing.T, addr netip.Addr) {
		infos, err := Devices()
		require.NoError(t, err)
		a, b := pair(t, 64, addr)
		var info *verbs.DeviceInfo
		for i := range infos {
			if infos[i].Name == a.id.Device().Name() {
				info = &infos[i]
			}
		}
		require.NotNil(t, info)
		require.NoError(t, info.Err)
		require.Equal(t, a.id.Device().Attr(), info.Attr)
		require.Len(t, info.Ports, 1)
		port := info.Ports[0]
		require.Equal(t, "ACTIVE", port.State)
		require.NotEmpty(t, port.Interface)
		require.NotEmpty(t, port.GIDs)
		found := false
		for _, p := range port.Addrs {
			found = found || p.Addr() == addr
		}
		require.True(t, found, "%v is one of %v", addr, port.Addrs)

		for _, e := range []*end{a, b} {
			ep, ok := e.id.Endpoint()
			require.True(t, ok)
			require.Equal(t, info.Name, ep.Device)
			require.Equal(t, info.Transport, ep.Transport)
			require.Equal(t, port.LinkLayer, ep.LinkLayer)
			require.Equal(t, port.Num, ep.Port)
			if info.Transport == "RoCE" {
				require.Equal(t, addr, ep.GID.Unmap())
			}
			require.Equal(t, a.id.Device(), e.id.Device(), "the same device is the same value")
		}
		unbound := newTestID(t, a.ch)
		_, ok := unbound.Endpoint()
		require.False(t, ok)
		require.Nil(t, unbound.Device())
	})
}
