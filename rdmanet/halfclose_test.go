package rdmanet

import (
	"bytes"
	"errors"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	errEPIPE   = syscall.EPIPE
	errENOBUFS = syscall.ENOBUFS
)

func TestCloseWriteLeavesTheOtherDirection(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for _, who := range []string{"dialer", "listener"} {
			t.Run(who, func(t *testing.T) {
				checkLeaks(t)
				a, b := open(t, cfg)
				if who == "listener" {
					a, b = b, a
				}
				write(t, a, []byte("question"))
				require.NoError(t, a.CloseWrite())
				n, err := a.Write([]byte("x"))
				require.Zero(t, n)
				require.ErrorIs(t, err, syscall.EPIPE)

				require.Equal(t, "question", string(read(t, b, 8)))
				requireEOF(t, b)
				p := bytesOf(1, 1<<20)
				sent := make(chan error, 1)
				go func() {
					_, err := b.Write(p)
					sent <- errors.Join(err, b.CloseWrite())
				}()
				require.True(t, bytes.Equal(p, read(t, a, len(p))))
				require.NoError(t, <-sent)
				requireEOF(t, a)
				requireEOF(t, b)
				require.NoError(t, a.Close())
				require.NoError(t, b.Close())
			})
		}
	})
}

func TestCloseWriteOfNothingIsEOF(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{})
	require.NoError(t, a.CloseWrite())
	requireEOF(t, b)
	require.NoError(t, b.CloseWrite())
	requireEOF(t, a)
	require.ErrorIs(t, a.CloseWrite(), syscall.EPIPE)
}

// TestCloseWriteEndsABlockedWrite: what was counted as written arrives, and then
// EOF.
func TestCloseWriteEndsABlockedWrite(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		cfg.BufferSize, cfg.RecvDepth = 4096, 2
		a, b := open(t, cfg)
		p := bytesOf(1, 1<<20)
		type result struct {
			n   int
			err error
		}
		wrote := make(chan result, 1)
		go func() {
			n, err := a.Write(p)
			wrote <- result{n, err}
		}()
		eventually(t, func() bool { return a.Stats().WriteStalls > 0 }, "Write blocks")
		require.NoError(t, a.CloseWrite())
		r := <-wrote
		require.ErrorIs(t, r.err, syscall.EPIPE)
		require.True(t, bytes.Equal(p[:r.n], read(t, b, r.n)))
		requireEOF(t, b)
	})
}

func TestCloseWriteFlushesSmallWrites(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		for range 50 {
			checkLeaks(t)
			a, b := pair(t, cfg)
			for range 10 {
				write(t, a, []byte("small "))
			}
			require.NoError(t, a.CloseWrite())
			require.Equal(t, bytes.Repeat([]byte("small "), 10), read(t, b, 60))
			requireEOF(t, b)
			require.NoError(t, a.Close())
			require.NoError(t, b.Close())
		}
	})
}

func TestCloseReadIsEOFAndDiscards(t *testing.T) {
	checkLeaks(t)
	a, b := open(t, Config{BufferSize: 2048, RecvDepth: 4})
	write(t, a, []byte("unread"))
	blocked := make(chan error, 1)
	go func() {
		read(t, b, 6)
		_, err := b.Read(make([]byte, 1))
		blocked <- err
	}()
	eventually(t, func() bool { return b.Stats().BytesRead == 6 }, "it was read")
	require.NoError(t, b.CloseRead())
	require.Equal(t, io.EOF, <-blocked)
	write(t, a, []byte("discarded"))
	requireEOF(t, b)
	_, err := b.ReadBuffer()
	require.Equal(t, io.EOF, err)
	n, err := b.WriteTo(io.Discard)
	require.NoError(t, err)
	require.Zero(t, n)
	// The other direction lives.
	write(t, b, []byte("answer"))
	require.Equal(t, "answer", string(read(t, a, 6)))
	// The peer isn't told: it fills the window and blocks.
	require.NoError(t, a.SetWriteDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = a.Write(make([]byte, 1<<20))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

// TestWriteAfterPeersCloseIsEPIPE, whether or not anybody reads meanwhile.
func TestWriteAfterPeersCloseIsEPIPE(t *testing.T) {
	onEveryPath(t, func(t *testing.T, cfg Config) {
		checkLeaks(t)
		a, b := open(t, cfg)
		require.NoError(t, b.Close())
		_ = a.SetDeadline(time.Now().Add(patience))
		eventually(t, func() bool {
			_, err := a.Write([]byte("x"))
			return errors.Is(err, syscall.EPIPE)
		}, "Write fails with EPIPE")
		requireEOF(t, a)
		_, err := a.Write([]byte("x"))
		require.ErrorIs(t, err, syscall.EPIPE)
	})
}
