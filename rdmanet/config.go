package rdmanet

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/cm"
	"github.com/rdmanet/rdmanet/qp"
)

// Provider names a way to do RDMA.
type Provider string

// The providers. The environment variable RDMANET_PROVIDER takes the same names
// and is used where Config leaves the choice open.
const (
	ProviderAuto   Provider = "auto"   // device and iwarp: see package documentation
	ProviderIWARP  Provider = "iwarp"  // in software, iWARP over TCP: always there
	ProviderDevice Provider = "device" // kernel and hardware devices, through rdma-core
)

// Defaults of Config.
const (
	DefaultBufferSize    = 32 << 10
	DefaultRecvDepth     = 16
	DefaultSendDepth     = 8
	DefaultMaxRegistered = 4 << 30
	DefaultLinger        = 5 * time.Second
)

// Config holds what a Dialer and a ListenConfig have in common. The zero value
// works. It is checked when it is used; a value out of bounds is an error that
// names it.
type Config struct {
	// Provider chooses the provider; empty means RDMANET_PROVIDER, or auto.
	Provider Provider

	// BufferSize is the payload of a registered buffer, and so of a frame, in
	// bytes: 1 KiB to 1 MiB; 0 means 32 KiB. The two sides may differ. Over
	// devices, 64 KiB with half the RecvDepth may carry bulk data faster; but a
	// small message uses up a buffer, too.
	BufferSize int
	// RecvDepth is how many buffers are posted for the peer's data: 1 to 4096;
	// 0 means 16. BufferSize times RecvDepth is the window, of which the peer may
	// send all, and half at least, before this side reads again. Four more are
	// posted for control frames. A device that has shorter queues lowers it.
	RecvDepth int
	// SendDepth is how many data frames may be on their way out: 1 to 4096; 0
	// means 8. A device lowers it likewise.
	SendDepth int
	// MaxRegistered bounds the registered memory, in bytes, of all connections
	// of one device and BufferSize: 0 means 4 GiB. A connection of the default
	// sizes takes less than 1 MiB, when it is made, and never fails for want of
	// more.
	MaxRegistered int64

	// Spin is for how long a blocked Read or Write polls at most before it
	// parks, while waits have been that short of late: 0 means, on devices, eight
	// times what a wake-up takes, but 100 µs to 1 ms, and in software not at all;
	// negative, not at all.
	Spin time.Duration
	// Moderation is for how long at most who reads a stream leaves what arrives
	// lie before it looks again, instead of being woken for each Write. A stream
	// is frames of more than 4 KiB that come one after the other while nothing is
	// sent, less fast than they could be read. It is a compromise: the stream takes
	// less of the reader's processor and, on software devices, of the sender's; its
	// last bytes, and the effect of a deadline or of Close, may come so much later:
	// 10 ms at most. 0 means, on devices, twenty times what a wake-up takes, but
	// 100 µs to 1 ms, and in software not at all; negative, or less than 50 µs, not
	// at all.
	Moderation time.Duration
	// Linger bounds how long Close takes to send what was written and to end the
	// connection in order: 0 means 5 s, negative that Close aborts the
	// connection. SetLinger changes it for a connection.
	Linger time.Duration
	// KeepAlive is how the peer's host is proved alive, whether or not its
	// application reads, while nothing comes from it. One that was silent for
	// Idle is probed, and one that was silent for Idle + Interval × Count, also
	// while data is on its way to it, is given up with ETIMEDOUT. The zero value
	// means on, with net's defaults (15 s, then 9 probes 15 s apart); a negative
	// Idle turns it off. See SetKeepAliveConfig for what each provider does.
	KeepAlive net.KeepAliveConfig

	// CRC asks for a CRC32C in each FPDU, in the provider iwarp. It is used if
	// either side asks. Devices have checksums of their own.
	CRC bool

	// Logger gets connections at debug level, and peers that were turned away
	// at info level. Nil means no log.
	Logger *slog.Logger
}

// resolve checks c and fills in the defaults.
func (c Config) resolve() (Config, error) {
	for _, f := range []struct {
		name     string
		value    *int
		def      int
		min, max int
	}{
		{"BufferSize", &c.BufferSize, DefaultBufferSize, minBufferSize, maxBufferSize},
		{"RecvDepth", &c.RecvDepth, DefaultRecvDepth, 1, maxSlots},
		{"SendDepth", &c.SendDepth, DefaultSendDepth, 1, maxSlots},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value < f.min || *f.value > f.max {
			return c, fmt.Errorf("value %d of Config.%s must be %d to %d: %w", *f.value, f.name, f.min, f.max, syscall.EINVAL)
		}
	}
	if c.Moderation > maxModeration { // nothing interrupts a nap
		return c, fmt.Errorf("value %v of Config.Moderation must be at most %v: %w", c.Moderation, maxModeration, syscall.EINVAL)
	}
	if c.MaxRegistered == 0 {
		c.MaxRegistered = DefaultMaxRegistered
	}
	if need := c.poolConfig().Bytes(c.receives() + c.SendDepth); c.MaxRegistered < need {
		return c, fmt.Errorf("a connection of this Config takes %d bytes of registered memory, and Config.MaxRegistered is %d (raise it, or lower BufferSize, RecvDepth or SendDepth): %w",
			need, c.MaxRegistered, syscall.EINVAL)
	}
	if c.Linger == 0 {
		c.Linger = DefaultLinger
	}
	if c.KeepAlive == (net.KeepAliveConfig{}) {
		c.KeepAlive.Enable = true
	}
	if c.KeepAlive.Idle < 0 {
		c.KeepAlive = net.KeepAliveConfig{}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c.resolveProvider()
}

func (c Config) resolveProvider() (Config, error) {
	from := "Config.Provider"
	if c.Provider == "" {
		c.Provider, from = Provider(os.Getenv("RDMANET_PROVIDER")), "RDMANET_PROVIDER"
	}
	if c.Provider == "" {
		c.Provider = ProviderAuto
	}
	if c.Provider == ProviderAuto {
		return c, nil
	}
	if known := cm.Providers(); !slices.Contains(known, string(c.Provider)) {
		return c, fmt.Errorf("provider %q from %s must be one of %v or auto: %w", c.Provider, from, known, syscall.ENODEV)
	}
	return c, nil
}

// automatic are the providers of ProviderAuto, in order of preference. A variable
// for tests.
var automatic = []Provider{ProviderDevice, ProviderIWARP}

// providers returns the providers to try, in order of preference.
func (c Config) providers() []Provider {
	if c.Provider != ProviderAuto {
		return []Provider{c.Provider}
	}
	if noDevice() {
		return automatic[1:]
	}
	return automatic
}

// reaches reports whether a provider may lead to an address: loopback is not on
// the wire.
func (p Provider) reaches(a netip.Addr) bool { return p != ProviderDevice || !a.IsLoopback() }

// fit lowers the depths to what a device has.
func (c *Config) fit(d qp.DeviceAttr) {
	queue := min(d.MaxQPWR, d.MaxCQE/2) - controlSlots - 1 // one more for the end of the queue
	c.RecvDepth, c.SendDepth = min(c.RecvDepth, queue), min(c.SendDepth, queue)
}

// receives is how many receives a connection posts.
func (c Config) receives() int { return c.RecvDepth + controlSlots }

// sends is the depth of the send queue.
func (c Config) sends() int { return c.SendDepth + controlSlots }

func (c Config) greeting() greeting {
	return greeting{version: protocolVersion, oldest: oldestVersion, recvSize: headerLen + c.BufferSize, dataSlots: c.RecvDepth}
}

// transportRetries is how often an adapter sends again before it gives a peer up:
// the most there is but one, since rxe takes the most for ever.
const transportRetries = 6

// connParam allows the peer an RDMA READ, with which an iWARP device proves that
// we are alive; it is one of no bytes, since no memory is registered for it.
func (c Config) connParam(private []byte) cm.ConnParam {
	return cm.ConnParam{PrivateData: private, ResponderResources: 1, RetryCount: transportRetries, RNRRetryCount: 7, CRC: c.CRC}
}

func (c Config) poolConfig() qp.PoolConfig {
	return qp.PoolConfig{BlockSize: c.BufferSize, Headroom: headerLen, MaxBytes: c.MaxRegistered}
}
