package rdmanet

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/rpc"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// serveHTTP serves until the test ends, and returns a client whose transport
// dials with our Dialer.
func serveHTTP(t *testing.T, srv *http.Server) (url string, client *http.Client) {
	t.Helper()
	l := listen(t, ListenConfig{})
	served := make(chan error, 1)
	tr := &http.Transport{DialContext: byRelay((&Dialer{}).DialContext)}
	scheme := "http"
	if srv.TLSConfig != nil {
		scheme = "https"
		tr.ForceAttemptHTTP2 = true
		tr.TLSClientConfig = clientTLS(t, srv.TLSConfig)
		go func() { served <- srv.ServeTLS(l, "", "") }()
	} else {
		go func() { served <- srv.Serve(l) }()
	}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		srv.Close()
		require.ErrorIs(t, <-served, http.ErrServerClosed)
	})
	return scheme + "://" + l.Addr().String(), &http.Client{Transport: tr, Timeout: 2 * patience}
}

// selfSigned returns a server's configuration with a certificate of its own.
func selfSigned(t *testing.T) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "rdmanet"}, DNSNames: []string{"rdmanet.test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(crand.Reader, tmpl, tmpl, &key.PublicKey, key)
	require.NoError(t, err)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

func clientTLS(t *testing.T, server *tls.Config) *tls.Config {
	t.Helper()
	cert, err := x509.ParseCertificate(server.Certificates[0].Certificate[0])
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{RootCAs: roots, ServerName: "rdmanet.test"}
}

// hashing answers a body with its hash, and a GET with a body of the size asked
// for.
func hashing(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Remote", r.RemoteAddr)
	if r.Method == http.MethodGet {
		var n int64
		_, _ = fmt.Sscan(r.URL.Query().Get("n"), &n)
		_, _ = io.CopyN(w, stream(9), n)
		return
	}
	h := sha256.New()
	_, _ = io.Copy(h, r.Body)
	_, _ = fmt.Fprintf(w, "%x", h.Sum(nil))
}

func get(t *testing.T, c *http.Client, url string) (*http.Response, []byte) {
	t.Helper()
	resp, err := c.Get(url)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp, body
}

func TestHTTPKeepsConnectionsAlive(t *testing.T) {
	checkLeaks(t)
	url, client := serveHTTP(t, &http.Server{Handler: http.HandlerFunc(hashing)})
	var remote string
	for i := range 50 {
		resp, body := get(t, client, fmt.Sprintf("%s/?n=%d", url, 10*i))
		require.Len(t, body, 10*i)
		if i == 0 {
			remote = resp.Header.Get("X-Remote")
		}
		require.Equal(t, remote, resp.Header.Get("X-Remote"), "the same connection")
	}
}

func TestHTTPLargeBodiesBothWays(t *testing.T) {
	for _, tc := range []struct {
		name, proto string
		tls         bool
		size        int64
	}{{"HTTP/1.1", "HTTP/1.1", false, 100 << 20}, {"HTTP/2 over TLS", "HTTP/2.0", true, 16 << 20}} {
		t.Run(tc.name, func(t *testing.T) {
			checkLeaks(t)
			n := tc.size
			if testing.Short() {
				n /= 16
			}
			srv := &http.Server{Handler: http.HandlerFunc(hashing)}
			if tc.tls {
				srv.TLSConfig = selfSigned(t)
			}
			url, client := serveHTTP(t, srv)

			h := sha256.New()
			resp, err := client.Post(url, "application/octet-stream", io.TeeReader(io.LimitReader(stream(8), n), h))
			require.NoError(t, err)
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			require.NoError(t, err)
			require.Equal(t, tc.proto, resp.Proto)
			require.Equal(t, fmt.Sprintf("%x", h.Sum(nil)), string(body))

			want, got := sha256.New(), sha256.New()
			_, _ = io.CopyN(want, stream(9), n)
			resp, err = client.Get(fmt.Sprintf("%s/?n=%d", url, n))
			require.NoError(t, err)
			k, err := io.Copy(got, resp.Body)
			resp.Body.Close()
			require.NoError(t, err)
			require.Equal(t, n, k)
			require.Equal(t, want.Sum(nil), got.Sum(nil))
		})
	}
}

func TestHTTP2ManyStreams(t *testing.T) {
	checkLeaks(t)
	url, client := serveHTTP(t, &http.Server{Handler: http.HandlerFunc(hashing), TLSConfig: selfSigned(t)})
	remotes := make(map[string]bool)
	var mu sync.Mutex
	resp, _ := get(t, client, url+"/?n=1") // so that the others share the connection
	remotes[resp.Header.Get("X-Remote")] = true
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			resp, err := client.Get(fmt.Sprintf("%s/?n=%d", url, 1000*i))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			n, err := io.Copy(io.Discard, resp.Body)
			if err != nil || n != int64(1000*i) {
				t.Errorf("%d bytes of %d: %v", n, 1000*i, err)
			}
			mu.Lock()
			remotes[resp.Header.Get("X-Remote")] = true
			mu.Unlock()
		})
	}
	wg.Wait()
	require.Len(t, remotes, 1)
}

// TestHTTPShutdownIsGraceful with a request in flight and an idle connection.
func TestHTTPShutdownIsGraceful(t *testing.T) {
	checkLeaks(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			close(entered)
			<-leave
		}
		_, _ = io.WriteString(w, "done")
	})}
	url, client := serveHTTP(t, srv)
	get(t, client, url) // leaves an idle connection
	type result struct {
		body string
		err  error
	}
	got := make(chan result, 1)
	go func() {
		resp, err := client.Get(url + "/slow")
		if err != nil {
			got <- result{"", err}
			return
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		got <- result{string(b), err}
	}()
	<-entered
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	down := make(chan error, 1)
	go func() { down <- srv.Shutdown(ctx) }()
	eventually(t, func() bool {
		c, err := byRelay(plainDial)(t.Context(), "rdma", url[len("http://"):])
		if err == nil {
			c.Close()
		}
		return err != nil
	}, "it takes no more connections")
	select {
	case err := <-down:
		t.Fatalf("Shutdown did not wait for the request: %v", err)
	default:
	}
	close(leave)
	require.Equal(t, result{"done", nil}, <-got)
	require.NoError(t, <-down)
}

func TestHTTPClientTimeout(t *testing.T) {
	checkLeaks(t)
	leave := make(chan struct{})
	var cancelled atomic.Bool
	url, client := serveHTTP(t, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			<-r.Context().Done() // the server learns of the client's going
			cancelled.Store(true)
			<-leave
		}
	})})
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // the request is there by then
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/slow", nil)
	require.NoError(t, err)
	_, err = client.Do(req)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	var ne net.Error
	require.True(t, errors.As(err, &ne) && ne.Timeout())
	eventually(t, cancelled.Load, "the server's context ends")
	close(leave)
	get(t, client, url) // and the client works on
}

func TestHTTPServerTimeouts(t *testing.T) {
	checkLeaks(t)
	url, _ := serveHTTP(t, &http.Server{ReadHeaderTimeout: 50 * time.Millisecond, Handler: http.HandlerFunc(hashing)})
	c, err := byRelay(plainDial)(t.Context(), "tcp", url[len("http://"):])
	require.NoError(t, err)
	closeLater(t, c)
	write(t, c, []byte("GET / HTTP/1.1\r\nHost:"))
	_ = c.SetReadDeadline(time.Now().Add(patience))
	_, err = io.Copy(io.Discard, c)
	require.NoError(t, err, "the server closes the connection")
}

func TestTLSEchoWithCloseWrite(t *testing.T) {
	checkLeaks(t)
	cfg := selfSigned(t)
	a, b, stop, err := pipe(listen(t, ListenConfig{}), plainDial)
	require.NoError(t, err)
	t.Cleanup(stop)
	server, client := tls.Server(b, cfg), tls.Client(a, clientTLS(t, cfg))
	_ = a.SetDeadline(time.Now().Add(patience))
	_ = b.SetDeadline(time.Now().Add(patience))
	served := make(chan error, 1)
	go func() {
		_, err := io.Copy(server, server)
		served <- errors.Join(err, server.CloseWrite(), server.Close())
	}()
	p := bytesOf(1, 1<<20)
	sent := make(chan error, 1)
	go func() {
		_, err := client.Write(p)
		sent <- errors.Join(err, client.CloseWrite())
	}()
	got, err := io.ReadAll(client)
	require.NoError(t, err)
	require.True(t, bytes.Equal(p, got))
	require.NoError(t, <-sent)
	require.NoError(t, <-served)
	require.NoError(t, client.Close())
}

type Arith struct{}

func (Arith) Multiply(args [2]int, reply *int) error {
	*reply = args[0] * args[1]
	return nil
}

func (Arith) Echo(args []byte, reply *[]byte) error {
	*reply = args
	return nil
}

func TestRPC(t *testing.T) {
	checkLeaks(t)
	srv := rpc.NewServer()
	require.NoError(t, srv.Register(Arith{}))
	l := listen(t, ListenConfig{})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go srv.ServeConn(c)
		}
	}()
	c, err := byRelay(plainDial)(t.Context(), "rdma", l.Addr().String())
	require.NoError(t, err)
	client := rpc.NewClient(c)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			var n int
			if err := client.Call("Arith.Multiply", [2]int{i, i}, &n); err != nil || n != i*i {
				t.Errorf("%d: %v", n, err)
			}
		})
	}
	wg.Wait()
	p := bytesOf(1, 1<<20)
	var q []byte
	require.NoError(t, client.Call("Arith.Echo", p, &q))
	require.True(t, bytes.Equal(p, q))
	require.NoError(t, client.Close())
}
