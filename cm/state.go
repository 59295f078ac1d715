package cm

import "slices"

// state is how far an id has come. A call moves it when it begins, an event
// when it arrives (EventChannel.mu held), Destroy for good.
type state int32

const (
	stateIdle state = iota
	stateBound
	stateListening
	stateResolvingAddr
	stateAddrResolved
	stateResolvingRoute
	stateRouteResolved
	stateConnecting
	stateRequested // came with a connect request
	stateAccepting
	stateRejected // by our side
	stateConnected
	stateDisconnected // the event came
	stateFailed       // the connection did not come about
	stateDestroyed
)

var stateNames = [...]string{"idle", "bound", "listening", "resolving an address", "resolved to an address",
	"resolving a route", "resolved to a route", "connecting", "a connect request", "accepting", "rejected",
	"connected", "disconnected", "failed", "destroyed"}

func (s state) String() string { return stateNames[s] }

// is reports whether the id is in one of the states.
func (id *ID) is(states ...state) bool { return slices.Contains(states, state(id.state.Load())) }

// move goes from one state to another, unless it is another meanwhile.
func (id *ID) move(from, to state) bool { return id.state.CompareAndSwap(int32(from), int32(to)) }

// advance moves the state for an event that arrived. It reports false for a
// second DISCONNECTED, which nobody should see. The caller holds the channel's
// mu, and the id is not destroyed.
func (id *ID) advance(t EventType) bool {
	switch t {
	case EventAddrResolved:
		id.move(stateResolvingAddr, stateAddrResolved)
	case EventAddrError:
		id.move(stateResolvingAddr, stateBound)
	case EventRouteResolved:
		id.move(stateResolvingRoute, stateRouteResolved)
	case EventRouteError:
		id.move(stateResolvingRoute, stateAddrResolved)
	case EventEstablished:
		_ = id.move(stateConnecting, stateConnected) || id.move(stateAccepting, stateConnected)
	case EventConnectError, EventUnreachable, EventRejected:
		_ = id.move(stateConnecting, stateFailed) || id.move(stateAccepting, stateFailed) ||
			id.move(stateRequested, stateFailed)
	case EventDisconnected:
		return id.state.Swap(int32(stateDisconnected)) != int32(stateDisconnected)
	}
	return true
}
