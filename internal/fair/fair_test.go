package fair

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHost(t *testing.T) {
	for _, tc := range []struct {
		a, b string
		same bool
	}{
		{"192.0.2.1", "192.0.2.1", true},
		{"192.0.2.1", "192.0.2.2", false},
		{"192.0.2.1", "::ffff:192.0.2.1", true},
		{"2001:db8::1", "2001:db8::ffff:1", true},
		{"2001:db8::1", "2001:db8:0:1::1", false},
		{"fe80::1", "fe80::2", false},
		{"fe80::1%a", "fe80::1%a", true},
		{"::1", "127.0.0.1", false},
	} {
		a, b := netip.MustParseAddr(tc.a), netip.MustParseAddr(tc.b)
		require.Equal(t, tc.same, Host(a) == Host(b), tc)
	}
	require.Equal(t, netip.Prefix{}, Host(netip.Addr{}))
}

func TestMost(t *testing.T) {
	host := func(s string) netip.Prefix { return Host(netip.MustParseAddr(s)) }
	_, n := Count(nil).Most()
	require.Zero(t, n)
	h, n := Count{host("192.0.2.1"): 2, host("192.0.2.2"): 5, host("2001:db8::1"): 4}.Most()
	require.Equal(t, host("192.0.2.2"), h)
	require.Equal(t, 5, n)
}
