package rdmanet_test

import (
	"bufio"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"

	"github.com/rdmanet/rdmanet/rdmanet"
)

// A server and a client, as with package net.
func Example() {
	l, err := rdmanet.Listen("rdma", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // the listener is closed
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()

	c, err := rdmanet.Dial("rdma", l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintln(c, "hello")
	line, err := bufio.NewReader(c).ReadString('\n')
	fmt.Print(line, err)
	// Output:
	// hello
	// <nil>
}

// An HTTP server needs our listener, and a client our dialer; neither notices.
func Example_http() {
	l, err := rdmanet.Listen("rdma", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", r.Method, r.URL.Path)
	})}
	go srv.Serve(l)
	defer srv.Close()

	client := &http.Client{Transport: &http.Transport{DialContext: (&rdmanet.Dialer{}).DialContext}}
	defer client.CloseIdleConnections()
	resp, err := client.Get("http://" + l.Addr().String() + "/over/rdma")
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(resp.Status, string(body), err)
	// Output: 200 OK GET /over/rdma <nil>
}

// ReadBuffer and WriteBuffer move data without a copy: the registered block that
// a frame arrived in is handed out, and a block is sent as it is.
func ExampleConn_ReadBuffer() {
	l, err := rdmanet.Listen("rdma", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	go echoBuffers(l)

	nc, err := rdmanet.Dial("rdma", l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer nc.Close()
	c := nc.(*rdmanet.Conn)

	b, err := c.NewBuffer()
	if err != nil {
		log.Fatal(err)
	}
	const text = "no copies"
	b.Resize(len(text))
	copy(b.Bytes(), text)
	if _, err := c.WriteBuffer(b); err != nil { // b is the connection's now
		log.Fatal(err)
	}

	b, err = c.ReadBuffer()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", b.Bytes())
	b.Release() // the peer may use its place again
	// Output: no copies
}

// echoBuffers sends each block that it receives back.
func echoBuffers(l net.Listener) {
	nc, err := l.Accept()
	if err != nil {
		return
	}
	defer nc.Close()
	c := nc.(*rdmanet.Conn)
	for {
		b, err := c.ReadBuffer()
		if err != nil {
			return
		}
		if _, err := c.WriteBuffer(b); err != nil {
			return
		}
	}
}
