package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
	"github.com/rdmanet/rdmanet/rdmanet"
)

var (
	prefix = netip.MustParsePrefix
	gidOf  = netip.MustParseAddr

	roce = cm.DeviceInfo{
		Name: "rxe0", Transport: "RoCE", Attr: qp.DeviceAttr{MaxQPWR: 1048575, MaxSGE: 32, MaxCQE: 32766, MaxInline: 416},
		Ports: []cm.Port{{Num: 1, State: "ACTIVE", LinkLayer: "Ethernet", Interface: "eth0",
			Addrs: []netip.Prefix{prefix("10.0.0.1/24"), prefix("fd77::1/64"), prefix("fe80::1/64")},
			GIDs: []cm.GID{
				{Index: 0, Type: "IB/RoCE v1", Addr: gidOf("fe80::1")}, {Index: 1, Type: "RoCE v2", Addr: gidOf("fe80::1")},
				{Index: 2, Type: "IB/RoCE v1", Addr: gidOf("::ffff:10.0.0.1")}, {Index: 3, Type: "RoCE v2", Addr: gidOf("::ffff:10.0.0.1")},
				{Index: 5, Type: "RoCE v2", Addr: gidOf("fd77::1")},
			}}},
	}
	iwarp = cm.DeviceInfo{
		Name: "siw0", Transport: "iWARP", Attr: qp.DeviceAttr{MaxQPWR: 32767, MaxSGE: 6, MaxCQE: 3276800, MaxInline: 256},
		Ports: []cm.Port{{Num: 1, State: "ACTIVE", LinkLayer: "Ethernet", Interface: "eth1",
			GIDs: []cm.GID{{Addr: gidOf("7a31:c1ff:fe00::")}}}},
	}
	infiniband = cm.DeviceInfo{
		Name: "mlx5_0", Transport: "InfiniBand", Attr: qp.DeviceAttr{MaxQPWR: 32767, MaxSGE: 30, MaxCQE: 4194302, MaxInline: 0},
		Ports: []cm.Port{
			{Num: 1, State: "DOWN", LinkLayer: "InfiniBand", Interface: "ib0", GIDs: []cm.GID{{Index: 0, Type: "IB/RoCE v1", Addr: gidOf("fe80::ec0d:9a03:78:645a")}}},
			{Num: 2, State: "INIT", LinkLayer: "InfiniBand"},
		},
	}
	broken = cm.DeviceInfo{Name: "mlx5_1", Err: errors.Join(errors.New("ibv_open_device: no"), errors.New("no permission (chmod)"))}
)

func TestDevicesAreListed(t *testing.T) {
	for name, c := range map[string]struct {
		infos   []cm.DeviceInfo
		missing error
		want    string // on stdout
		err     string // "": status 0
	}{
		"all kinds": {infos: []cm.DeviceInfo{roce, iwarp, broken, infiniband}, want: `
DEVICE  PORT  STATE   TRANSPORT   LINK LAYER  INTERFACE  ADDRESS      GID
rxe0    1     ACTIVE  RoCE        Ethernet    eth0       10.0.0.1/24  3: ::ffff:10.0.0.1 (RoCE v2)
                                                         fd77::1/64   5: fd77::1 (RoCE v2)
                                                         fe80::1/64
siw0    1     ACTIVE  iWARP       Ethernet    eth1       -            -
mlx5_0  1     DOWN    InfiniBand  InfiniBand  ib0        -            0: fe80::ec0d:9a03:78:645a
mlx5_0  2     INIT    InfiniBand  InfiniBand  -          -            -

DEVICE  SEND DEPTH  RECEIVE DEPTH  SGE  CQE      INLINE BYTES
rxe0    1048575     1048575        32   32766    416
siw0    32767       32767          6    3276800  256
mlx5_0  32767       32767          30   4194302  0

mlx5_1 can't be used: ibv_open_device: no; no permission (chmod)
`},
		"no port is active": {infos: []cm.DeviceInfo{broken, infiniband}, want: `
DEVICE  PORT  STATE  TRANSPORT   LINK LAYER  INTERFACE  ADDRESS  GID
mlx5_0  1     DOWN   InfiniBand  InfiniBand  ib0        -        0: fe80::ec0d:9a03:78:645a
mlx5_0  2     INIT   InfiniBand  InfiniBand  -          -        -

DEVICE  SEND DEPTH  RECEIVE DEPTH  SGE  CQE      INLINE BYTES
mlx5_0  32767       32767          30   4194302  0

mlx5_1 can't be used: ibv_open_device: no; no permission (chmod)
`, err: "none has a port that is ACTIVE (bring its network interface up"},
		"none works": {infos: []cm.DeviceInfo{broken}, want: `
mlx5_1 can't be used: ibv_open_device: no; no permission (chmod)
`, err: "no device can be used, for the reasons given"},
		"none, and why": {missing: errors.New("no RDMA device (modprobe rdma_rxe)"), want: "\n", err: "no RDMA device (modprobe rdma_rxe)"},
		"something else is missing": {infos: []cm.DeviceInfo{iwarp}, missing: errors.New("no rdma_cm (modprobe rdma_ucm)"), want: `
DEVICE  PORT  STATE   TRANSPORT  LINK LAYER  INTERFACE  ADDRESS  GID
siw0    1     ACTIVE  iWARP      Ethernet    eth1       -        -

DEVICE  SEND DEPTH  RECEIVE DEPTH  SGE  CQE      INLINE BYTES
siw0    32767       32767          6    3276800  256
`, err: "no rdma_cm (modprobe rdma_ucm)"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			err := listDevices(&out, func() ([]cm.DeviceInfo, error) { return c.infos, c.missing })
			require.Equal(t, c.want, "\n"+out.String())
			if c.err == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.err)
			require.Equal(t, statusFailure, statusOf(err))
		})
	}
}

func TestUsefulGIDs(t *testing.T) {
	gids := roce.Ports[0].GIDs
	require.Equal(t, gids[3:], usefulGIDs("RoCE", gids))
	require.Equal(t, gids[1:2], usefulGIDs("RoCE", gids[:2]), "link scope is better than none")
	require.Equal(t, gids[2:3], usefulGIDs("RoCE", gids[2:3]), "version 1 is better than none")
	require.Equal(t, gids[:1], usefulGIDs("InfiniBand", gids[:1]))
	require.Empty(t, usefulGIDs("iWARP", gids))
}

// brokenPipe takes nothing.
type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func TestDevicesThatCantBePrinted(t *testing.T) {
	err := listDevices(brokenPipe{}, func() ([]cm.DeviceInfo, error) { return []cm.DeviceInfo{roce}, nil })
	require.ErrorIs(t, err, syscall.EPIPE)
	require.Equal(t, statusFailure, statusOf(err))
}

// rcat --devices has status 0 where there are devices, and else says why not.
func TestDevicesOfThisMachine(t *testing.T) {
	_, missing := cm.Devices()
	p := start(t, nil, nil, "--devices")
	if missing == nil {
		require.Equal(t, 0, p.status())
		require.Empty(t, p.err.String())
		require.Contains(t, p.out.String(), "ACTIVE")
		return
	}
	require.Equal(t, 1, p.status())
	requireOneLine(t, p.err.String())
	require.Contains(t, p.err.String(), oneLine(missing))
}

// inLab skips the test, or fails where devices are required, outside the lab.
func inLab(t *testing.T) {
	t.Helper()
	switch {
	case os.Getenv("RDMANET_LAB_RXE4") != "" && os.Getenv("RDMANET_LAB_SIW4") != "":
	case os.Getenv("RDMANET_REQUIRE_DEVICE") == "1":
		t.Fatal("no RDMA devices: RDMANET_LAB_RXE4 and RDMANET_LAB_SIW4 are not set")
	default:
		t.Skip("needs rxe0 and siw0 (try: lab/guest)")
	}
}

func TestDevicesOfTheLab(t *testing.T) {
	inLab(t)
	p := start(t, nil, nil, "--devices")
	require.Equal(t, 0, p.status())
	out := p.out.String()
	for _, d := range []struct{ name, transport, env string }{{"rxe0", "RoCE", "RXE"}, {"siw0", "iWARP", "SIW"}} {
		ifi, v4, v6 := os.Getenv("RDMANET_LAB_"+d.env+"_INTERFACE"), os.Getenv("RDMANET_LAB_"+d.env+"4"), os.Getenv("RDMANET_LAB_"+d.env+"6")
		row := regexp.MustCompile(`(?m)^` + d.name + ` +1 +ACTIVE +` + d.transport + ` +Ethernet +` + ifi + ` +(.*\n(?: .*\n)*)`).FindStringSubmatch(out)
		require.NotNil(t, row, "no %s in\n%s", d.name, out)
		require.Contains(t, row[1], v4+"/24")
		require.Contains(t, row[1], v6+"/64")
		require.Equal(t, d.transport == "RoCE", strings.Contains(row[1], "::ffff:"+v4+" (RoCE v2)"))
		require.Regexp(t, `(?m)^`+d.name+`( +[1-9]\d*){5}$`, out, "limits")
	}
}

func TestVerboseNamesTheDevice(t *testing.T) {
	inLab(t)
	for env, want := range map[string]string{
		"RDMANET_LAB_RXE4": ", RoCE over Ethernet, GID ::ffff:" + os.Getenv("RDMANET_LAB_RXE4") + ")\n",
		"RDMANET_LAB_RXE6": ", RoCE over Ethernet, GID " + os.Getenv("RDMANET_LAB_RXE6") + ")\n",
		"RDMANET_LAB_SIW4": ", iWARP over Ethernet)\n",
	} {
		name := strings.ToLower(env[len("RDMANET_LAB_"):len(env)-1]) + "0"
		want = " (provider device, " + name + " port 1" + want
		l := start(t, nil, nil, "--provider", "device", "-lv", os.Getenv(env), "0")
		d := start(t, "hello", nil, "--provider", "device", "-v", os.Getenv(env), l.port())
		l.says(want)
		d.says(want)
		require.Equal(t, 0, d.status())
		require.Equal(t, 0, l.status())
		require.Equal(t, "hello", l.out.String())
	}
}

// The endpoint is known as long as the connection's value is.
func TestEndpointAfterClose(t *testing.T) {
	config, addr := rdmanet.Config{Provider: rdmanet.ProviderIWARP}, "127.0.0.1"
	if lab := os.Getenv("RDMANET_LAB_RXE4"); lab != "" {
		config.Provider, addr = "device", lab
	}
	lc := rdmanet.ListenConfig{Config: config}
	l, err := lc.Listen(t.Context(), "rdma", net.JoinHostPort(addr, "0"))
	require.NoError(t, err)
	defer l.Close()
	d := rdmanet.Dialer{Config: config}
	dialed, err := d.DialContext(context.Background(), "rdma", l.Addr().String())
	require.NoError(t, err)
	accepted, err := l.Accept()
	require.NoError(t, err)
	for _, c := range []net.Conn{dialed, accepted} {
		c := c.(*rdmanet.Conn)
		before, ok := c.Endpoint()
		require.Equal(t, config.Provider == "device", ok)
		if ok {
			require.Equal(t, "rxe0", before.Device)
		}
		abort(c)
		after, still := c.Endpoint()
		require.Equal(t, before, after)
		require.Equal(t, ok, still)
	}
}
