package rdmanet

// flow is the flow control of one connection. A DATA frame needs a receive that
// the peer has posted for it: a credit. Credits are returned as receives are
// posted again, on any frame that goes the other way, or by a CREDIT frame of
// their own once half a window is owed, or as soon as the peer has none left
// while the reader waits. SPEC.md section 5 shows that four receives beyond the
// window are enough for all control frames, however long an application sleeps.
//
// Conn.mu guards it.
type flow struct {
	// As a sender.
	credits int // DATA frames we may send
	theirs  int // the peer's window: credits never exceed it

	// As a receiver.
	window  int // our receives for DATA
	granted int // DATA frames the peer may still send, as far as we have told it
	owed    int // receives posted again that we have not told it about

	hello, fin bool // received
}

func (f *flow) init(theirs, ours int) {
	f.credits, f.theirs = theirs, theirs
	f.window, f.granted = ours, ours
}

// receive checks a frame against the state and enters it.
func (f *flow) receive(h header, fromDialer bool) error {
	f.credits += h.credits
	if f.credits > f.theirs {
		return protocolErrorf("%v returns %d credits, which makes %d of a window of %d", h.typ, h.credits, f.credits, f.theirs)
	}
	first := !f.hello
	switch {
	case fromDialer && first != (h.typ == frameHello):
		if first {
			return protocolErrorf("first frame is %v, must be HELLO", h.typ)
		}
		return protocolErrorf("second HELLO")
	case !fromDialer && h.typ == frameHello:
		return protocolErrorf("HELLO from the listening side")
	case h.typ == frameFin && f.fin:
		return protocolErrorf("second FIN")
	case h.typ == frameData && f.fin:
		return protocolErrorf("DATA after FIN")
	case h.typ == frameData && f.granted == 0:
		return protocolErrorf("DATA without a credit")
	case h.typ == frameData:
		f.granted--
	case h.typ == frameFin:
		f.fin = true
	}
	f.hello = true
	return nil
}

// posted notes that n receives for DATA are posted again.
func (f *flow) posted(n int) { f.owed += n }

// due reports whether owed credits are worth a frame of their own. None are once
// the peer has said that it sends no more.
func (f *flow) due(waiting bool) bool {
	if f.fin || f.owed == 0 {
		return false
	}
	return f.dueWith(0) || waiting && f.granted == 0
}

// dueWith reports whether half a window is owed once n more are posted.
func (f *flow) dueWith(n int) bool { return f.owed+n >= (f.window+1)/2 }

// take returns the credits that the next frame carries to the peer.
func (f *flow) take() int {
	n := f.owed
	f.owed = 0
	f.granted += n
	return n
}

// untake undoes take for a frame that was not sent.
func (f *flow) untake(n int) {
	f.owed += n
	f.granted -= n
}
