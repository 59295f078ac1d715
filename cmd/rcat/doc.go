// Rcat is netcat for RDMA: it connects standard input and output with a
// connection of package rdmanet.
//
//	rcat [options] HOST PORT
//	rcat [options] -l [HOST] PORT
//	rcat --demo[=SIZE]
//	rcat --devices
//
// The first form dials, the second waits for a connection and takes it. Then both
// do the same: what they read from standard input goes to the peer, and what the
// peer sends goes to standard output. HOST and PORT may be names. To listen, HOST
// may be left out, which is every address of this machine, and PORT may be 0,
// which is a free one (-v says which).
//
// To copy a file, on the receiver and on the sender:
//
//	rcat -l 7471 > copy
//	rcat receiver 7471 < file
//
// Both end by themselves, with status 0 if all of it has arrived. To see whether
// RDMA works on this machine, and how:
//
//	rcat --demo
//
// It sends SIZE random bytes, 256 MiB if nothing else is said, from a dialer to a
// listener in the same process, compares their SHA-256 and prints the rate, in
// which making and hashing the bytes is included. SIZE is in bytes, or has a unit:
// 64MiB and 64M are 2^26, 500MB is 5·10^8.
//
// Provider iwarp needs no RDMA device. Those that provider device can use are listed
// by
//
//	rcat --devices
//
// with state, network interface, addresses, GIDs and what a program may ask of each:
// the depth of the queues, scatter/gather entries (SGE) of a send, entries of a
// completion queue (CQE), bytes of inline data. GIDs are those that a connection may
// have: on RoCE, of version 2 if there are any. If no device can be used, it says
// what is missing and how to get it.
//
// # Options
//
//	-l, --listen             wait for a connection instead of dialing
//	-k, --keep-open          with -l: after a connection, take the next one
//	-v, --verbose            say on stderr who is connected, by which provider,
//	                         device, port, transport, link layer and GID (a provider
//	                         in software has only its name), and how much was moved
//	                         how fast; -vv adds the library's log
//	-w, --wait TIME          give up a dial, or a connection on which nothing moves,
//	                         after that time: in seconds (5, 1.5) or with a unit
//	                         (500ms). Waiting for a connection with -l has no limit
//	-4, --ipv4, -6, --ipv6   use only IPv4, or only IPv6
//	-s, --source ADDRESS     dial from that address of this machine
//	-p, --source-port PORT   dial from that port
//	    --reply-wait TIME    see "How a connection ends"; 3 s if not given
//	    --provider NAME      which way to do RDMA; if not given, that of the
//	                         environment variable RDMANET_PROVIDER, or auto
//	    --crc                ask for a CRC32C in each packet (provider iwarp)
//	    --demo[=SIZE]        test this machine, as above
//	    --devices            list its RDMA devices, as above
//	    --version, --help
//
// Short options may be put together: rcat -lvk 7471.
//
// With -k connections are taken one at a time, while others wait. Standard input
// goes to the one that is there, and when it has ended, later ones get end-of-file
// at once. A connection that fails is reported and the next one taken. It ends by a
// signal.
//
// # How a connection ends
//
// End-of-file of standard input becomes a half-close: the peer reads what came
// before and then end-of-file, and can still send. That is netcat's -N, always on.
// The connection ends, with status 0, when both directions have.
//
// A standard input that never ends (a terminal, a pipe that somebody keeps open)
// would keep both sides waiting for ever. So after the peer's end-of-file rcat goes
// by what standard input has done so far:
//
//   - A terminal: the connection ends at once. A dialer that has received nothing
//     goes on, because its peer may only be listening.
//   - It has brought something, or nothing was received: this side is sending, or
//     is going to. The connection ends with standard input, or when the peer closes
//     it entirely.
//   - It has brought nothing, and something was received: a reply may follow. If it
//     has not begun after --reply-wait, there is none, and the connection ends.
//
// If a connection ends in any other way, the status is not 0, and the peer gets
// "connection reset", so that nobody takes a part for the whole. That includes
// SIGINT and SIGTERM, and -w when nothing moves, unless the peer has sent its
// end-of-file and nothing waits to be sent: then all is done, and the status is 0.
// When whoever reads standard output has gone, rcat dies of SIGPIPE, as cat does.
//
// # Exit status
//
//	0    everything was sent and received; --devices: a device can be used
//	1    something failed, also a --demo in which a byte differs; no device can be
//	     used
//	2    wrong usage
//	130  SIGINT (143: SIGTERM)
package main
