//go:build cgo && linux

package rdmacore

import "time"

// siw completes a send when TCP has taken it, and rdma_disconnect closes the socket
// at once. If the peer then still sends anything, a credit for instance, TCP answers
// with a reset and throws away what the peer has not acknowledged. So a siw id waits
// for the acknowledgements before it disconnects: sock_diag(7) tells about them.

// ackTimeout bounds that wait: a peer that does not read acknowledges nothing.
const ackTimeout = time.Second

// awaitAcks waits until the peer's TCP has acknowledged what a siw connection has
// sent, for ackTimeout at most.
func (i *id) awaitAcks() {
	ch := i.lockChannel()
	q, live := i.qp, i.connected
	ch.mu.Unlock()
	if q == nil || !live || q.dev.quirk != quirkSIW {
		return
	}
	local, remote := i.LocalAddr(), i.RemoteAddr()
	const minPause, maxPause = 100 * time.Microsecond, 20 * time.Millisecond
	end := time.Now().Add(ackTimeout)
	for pause := minPause; time.Now().Before(end); pause = min(2*pause, maxPause) {
		info, err := tcpInfo(local, remote)
		if err != nil || !undelivered(&info) {
			return
		}
		time.Sleep(pause)
	}
}
