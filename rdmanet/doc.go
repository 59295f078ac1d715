// Package rdmanet carries streams over RDMA: Dial returns a net.Conn and Listen a
// net.Listener, so a service moves from TCP to RDMA by changing two calls.
//
//	l, err := rdmanet.Listen("rdma", ":7471")
//	c, err := rdmanet.Dial("rdma", "server:7471")
//
// The connections do what those of package net do: deadlines that end a blocked
// call, half-close, linger, keepalive, addresses, and errors that are
// *net.OpError and say what they are to errors.Is. net/http (HTTP/2 too),
// crypto/tls and net/rpc run on them unchanged.
//
// # How it works
//
// Bytes travel as SEND and RECEIVE work requests on one reliable-connected queue
// pair for each connection, out of and into a pool of registered buffers that the
// connections of a device share. Flow control by credits makes sure that every
// SEND finds a posted receive. SPEC.md in the repository has the wire format.
// Connections are made and ended by the RDMA connection manager: package cm has
// it, and package qp the queue pairs and the pool.
//
// Nobody waits on a connection's behalf: a goroutine in Read or Write polls the
// completion queue itself and parks in the runtime's netpoller. An idle connection
// has no goroutine and uses no CPU. On devices, who waits for an answer polls for a
// moment first (Config.Spin), and who reads a stream naps, rather than being woken
// for each of its Writes (Config.Moderation).
//
// # Zero copy
//
// Read and Write cost one copy. ReadBuffer hands out the registered block in which
// data arrived, and WriteBuffer sends a block from NewBuffer, without a copy;
// ReadFrom and WriteTo, and so io.Copy, use them.
//
// # Providers
//
// A provider is a way to do RDMA. "iwarp" does it in software, over TCP, as the
// iWARP standard has it: it is always there, and needs neither a device nor
// privileges. "device" uses kernel and hardware devices through rdma-core.
// Config.Provider or the environment variable RDMANET_PROVIDER chooses.
//
// The default, "auto", listens on the devices of this machine and in software, on
// the same port, so that it serves every dialer. It dials by a device if one
// leads to the address, and in software a quarter of a second later, or when that
// has failed; the loser is closed, and comes out of nobody's Accept.
// Conn.Provider tells which it was. A listener takes the devices that there are
// when it is made. The TCP port of an iWARP device's address is the device's: the
// kernel lets no program have it beside.
package rdmanet
