package rdmanet

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The record that testdata/recorder makes of a process's calls of rdma-core, and
// what can be proved from it.

// call is a line of a record.
type call struct {
	line int
	text string
	name string
	arg  map[string]uint64
}

func parseRecord(text string) (calls []call, err error) {
	for line := range strings.Lines(text) {
		c := call{line: len(calls) + 1, text: strings.TrimSpace(line), arg: map[string]uint64{}}
		fields := strings.Fields(line)
		if len(fields) < 2 {
			return nil, fmt.Errorf("line %d is incomplete: %q", c.line, line)
		}
		c.name = fields[0]
		for _, f := range fields[1:] {
			key, value, _ := strings.Cut(f, "=")
			if c.name == "failed" {
				continue
			}
			if c.arg[key], err = strconv.ParseUint(value, 16, 64); err != nil {
				return nil, fmt.Errorf("line %d: %w", c.line, err)
			}
		}
		calls = append(calls, c)
	}
	return calls, nil
}

// makes are the calls that make an object, whose kind is the name of the argument
// with its address; it can't be freed before what is made of it.
var makes = map[string]struct {
	kind string
	of   []string
}{
	"rdma_create_event_channel": {"channel", nil},
	"rdma_create_id":            {"id", []string{"channel"}},
	"CONNECT_REQUEST":           {"id", []string{"channel"}},
	"rdma_get_cm_event":         {"event", []string{"channel"}},
	"ibv_alloc_pd":              {"pd", nil},
	"ibv_reg_mr":                {"mr", []string{"pd"}},
	"ibv_create_comp_channel":   {"comp", nil},
	"ibv_create_cq":             {"cq", []string{"comp"}},
	"ibv_create_qp":             {"qp", []string{"pd", "cq"}},
	"rdma_create_qp":            {"qp", []string{"id", "pd", "cq"}},
}

var frees = map[string]string{
	"rdma_destroy_event_channel": "channel",
	"rdma_destroy_id":            "id",
	"rdma_ack_cm_event":          "event",
	"ibv_dealloc_pd":             "pd",
	"ibv_dereg_mr":               "mr",
	"ibv_destroy_comp_channel":   "comp",
	"ibv_destroy_cq":             "cq",
	"ibv_destroy_qp":             "qp",
}

type thing struct {
	kind string
	addr uint64
}

func (t thing) String() string { return fmt.Sprintf("%s %x", t.kind, t.addr) }

type object struct {
	thing
	of    []*object
	users int     // that live
	qp    *object // an id's, a completion queue's, or nil

	// An id.
	connected, disconnected bool
	ports                   [2]uint64 // its own, and its peer's
	cq                      *object   // its queue pair's

	// A queue pair.
	id     *object    // or nil
	queues [2][]*work // sends and receives, oldest first
	ending int        // the line in which either end began to end the connection

	// A completion queue.
	events int // not acked
}

// work is an outstanding work request.
type work struct {
	wr       uint64
	line     int
	signaled bool
}

const (
	sendQueue = iota
	recvQueue
)

// audit is what a record adds up to.
type audit struct {
	connections int // the ends of connections
	posted      int
	flushed     int // completed with an error
	left        int // for the provider to flush
	events      int // of completion queues
}

type auditor struct {
	audit
	flushesItself bool
	live          map[thing]*object
	ends          map[[2]uint64]*object // ids that are connected, by their ports
	faults        []error
}

// auditRecord proves that connections ended as section 6 of the design says:
// rdma_disconnect; every posted work request completed, once, and in its queue's
// order; the queue pair destroyed; every event of the completion queue acked, and
// it destroyed; the id destroyed; with the last one, and with every event acked,
// the event channel. And that nothing was used that was gone, or is left.
//
// A provider that flushes itself does that where the device does not: with what
// was posted after either end had begun to end the connection, and with
// unsignaled sends that no other send followed.
func auditRecord(calls []call, flushesItself bool) (audit, error) {
	a := &auditor{flushesItself: flushesItself, live: map[thing]*object{}, ends: map[[2]uint64]*object{}}
	for _, c := range calls {
		a.take(c)
	}
	for t, o := range a.live {
		a.faults = append(a.faults, fmt.Errorf("%v is left at the end, with %d that use it", t, o.users))
	}
	return a.audit, errors.Join(a.faults...)
}

func (a *auditor) fault(c call, format string, args ...any) {
	a.faults = append(a.faults, fmt.Errorf("line %d, %s: %s", c.line, c.text, fmt.Sprintf(format, args...)))
}

// take enters a call into the books.
func (a *auditor) take(c call) {
	if m, ok := makes[c.name]; ok {
		a.make(c, m.kind, m.of)
		return
	}
	if kind, ok := frees[c.name]; ok {
		if o := a.find(c, kind); o != nil {
			a.free(c, o)
		}
		return
	}
	switch c.name {
	case "rdma_connect", "rdma_accept":
		if id := a.find(c, "id"); id != nil {
			id.connected, id.ports = true, [2]uint64{c.arg["local"], c.arg["peer"]}
			a.ends[id.ports] = id
			a.connections++
		}
	case "rdma_disconnect":
		if id := a.find(c, "id"); id != nil {
			id.disconnected = true
			a.ending(c, id)
		}
	case "ibv_modify_qp":
		const stateError = 6
		if qp := a.find(c, "qp"); qp != nil && c.arg["state"] == stateError {
			a.ending(c, qp.id)
		}
	case "ibv_post_send":
		a.post(c, sendQueue, c.arg["signaled"] != 0)
	case "ibv_post_recv":
		a.post(c, recvQueue, true)
	case "refused":
		a.refuse(c)
	case "ibv_poll_cq":
		a.complete(c)
	case "ibv_get_cq_event":
		if cq := a.find(c, "cq"); cq != nil {
			cq.events++
			a.events++
		}
	case "ibv_ack_cq_events":
		if cq := a.find(c, "cq"); cq != nil {
			if cq.events -= int(c.arg["count"]); cq.events < 0 {
				a.fault(c, "more events acked than got")
			}
		}
	default:
		a.fault(c, "must not be")
	}
}

func (a *auditor) find(c call, kind string) *object {
	o := a.live[thing{kind, c.arg[kind]}]
	if o == nil {
		a.fault(c, "there is no such %s", kind)
	}
	return o
}

func (a *auditor) make(c call, kind string, of []string) {
	o := &object{thing: thing{kind, c.arg[kind]}}
	if a.live[o.thing] != nil {
		a.fault(c, "there is one already")
	}
	for _, k := range of {
		if k == "comp" && c.arg[k] == 0 { // a completion queue without events
			continue
		}
		u := a.find(c, k)
		if u == nil {
			continue
		}
		u.users++
		o.of = append(o.of, u)
		switch {
		case kind == "qp" && k == "id":
			o.id, u.qp = u, o
		case kind == "qp" && k == "cq":
			u.qp = o
			if o.id != nil {
				o.id.cq = u
			}
		}
	}
	a.live[o.thing] = o
}

func (a *auditor) free(c call, o *object) {
	if o.users > 0 {
		a.fault(c, "%d that use it are left", o.users)
	}
	switch o.kind {
	case "qp":
		a.finished(c, o)
	case "cq":
		if o.events > 0 {
			a.fault(c, "%d events are not acked", o.events)
		}
	case "id":
		if o.cq != nil && a.live[o.cq.thing] == o.cq {
			a.fault(c, "its completion queue is left")
		}
		if a.ends[o.ports] == o {
			delete(a.ends, o.ports)
		}
	}
	for _, u := range o.of {
		u.users--
	}
	delete(a.live, o.thing)
}

// finished checks a queue pair that is about to be destroyed.
func (a *auditor) finished(c call, qp *object) {
	if qp.id != nil && qp.id.connected && !qp.id.disconnected {
		a.fault(c, "no rdma_disconnect before")
	}
	for queue, outstanding := range qp.queues {
		for _, w := range outstanding {
			unreported := queue == sendQueue && !w.signaled
			late := qp.ending > 0 && w.line > qp.ending
			if !a.flushesItself || !unreported && !late {
				a.fault(c, "work request %x of line %d has not completed", w.wr, w.line)
				continue
			}
			a.left++
		}
	}
}

// ending notes that one end begins to end its connection.
func (a *auditor) ending(c call, id *object) {
	if id == nil {
		return
	}
	for _, end := range []*object{id, a.ends[[2]uint64{id.ports[1], id.ports[0]}]} {
		if end != nil && end.qp != nil && end.qp.ending == 0 {
			end.qp.ending = c.line
		}
	}
}

func (a *auditor) post(c call, queue int, signaled bool) {
	if qp := a.find(c, "qp"); qp != nil {
		a.posted++
		qp.queues[queue] = append(qp.queues[queue], &work{wr: c.arg["wr"], line: c.line, signaled: signaled})
	}
}

// outstanding finds a work request: the two queues' have different numbers.
func (o *object) outstanding(wr uint64) (queue, i int) {
	for queue := range o.queues {
		if i := slices.IndexFunc(o.queues[queue], func(w *work) bool { return w.wr == wr }); i >= 0 {
			return queue, i
		}
	}
	return 0, -1
}

// refuse takes back what a post did not take: the newest.
func (a *auditor) refuse(c call) {
	qp := a.find(c, "qp")
	if qp == nil {
		return
	}
	queue, i := qp.outstanding(c.arg["wr"])
	if i < 0 {
		a.fault(c, "was not posted")
		return
	}
	a.posted--
	qp.queues[queue] = slices.Delete(qp.queues[queue], i, i+1)
}

// complete enters a completion. One of a send stands for the unsignaled ones
// before it, too.
func (a *auditor) complete(c call) {
	cq := a.find(c, "cq")
	if cq == nil {
		return
	}
	if cq.qp == nil || a.live[cq.qp.thing] != cq.qp {
		a.fault(c, "its queue pair is gone")
		return
	}
	queue, i := cq.qp.outstanding(c.arg["wr"])
	if i < 0 {
		a.fault(c, "is not outstanding")
		return
	}
	for _, w := range cq.qp.queues[queue][:i] {
		if w.signaled {
			a.fault(c, "work request %x of line %d should have been first", w.wr, w.line)
		}
	}
	if c.arg["status"] != 0 {
		a.flushed++
	}
	cq.qp.queues[queue] = cq.qp.queues[queue][i+1:]
}

// goodRecord is a dialer and an acceptor in one process. The dialer closes first.
// In both, something was flushed.
const goodRecord = `rdma_create_event_channel channel=c1
rdma_create_id id=1 channel=c1
rdma_create_id id=d channel=c1
rdma_get_cm_event event=e1 id=d channel=c1 type=0
rdma_ack_cm_event event=e1
ibv_alloc_pd pd=b
ibv_reg_mr mr=f pd=b
ibv_create_comp_channel comp=dc
ibv_create_cq cq=d0 comp=dc
rdma_create_qp qp=d1 id=d pd=b cq=d0
ibv_post_recv qp=d1 wr=1
ibv_post_recv qp=d1 wr=3
rdma_connect id=d local=10 peer=20
CONNECT_REQUEST id=a channel=c1
rdma_get_cm_event event=e1 id=a channel=c1 type=4
rdma_ack_cm_event event=e1
ibv_create_comp_channel comp=ac
ibv_create_cq cq=a0 comp=ac
rdma_create_qp qp=a1 id=a pd=b cq=a0
ibv_post_recv qp=a1 wr=1
rdma_accept id=a local=20 peer=10
ibv_post_send qp=d1 wr=0 signaled=0
ibv_post_send qp=d1 wr=2 signaled=1
ibv_poll_cq cq=d0 wr=2 status=0
ibv_get_cq_event cq=a0
ibv_ack_cq_events cq=a0 count=1
ibv_poll_cq cq=a0 wr=1 status=0
ibv_post_recv qp=a1 wr=3
rdma_disconnect id=d
ibv_post_send qp=d1 wr=4 signaled=1
refused qp=d1 wr=4
ibv_poll_cq cq=d0 wr=1 status=5
ibv_poll_cq cq=d0 wr=3 status=5
ibv_destroy_qp qp=d1
ibv_destroy_cq cq=d0
ibv_destroy_comp_channel comp=dc
rdma_destroy_id id=d
ibv_modify_qp qp=a1 state=6
rdma_disconnect id=a
ibv_poll_cq cq=a0 wr=3 status=5
ibv_destroy_qp qp=a1
ibv_destroy_cq cq=a0
ibv_destroy_comp_channel comp=ac
rdma_destroy_id id=a
ibv_dereg_mr mr=f
ibv_dealloc_pd pd=b
rdma_destroy_id id=1
rdma_destroy_event_channel channel=c1
`

func auditText(t *testing.T, text string, flushesItself bool) (audit, error) {
	calls, err := parseRecord(text)
	require.NoError(t, err)
	return auditRecord(calls, flushesItself)
}

// edit replaces a line that must be there once.
func edit(t *testing.T, text, line, by string) string {
	t.Helper()
	require.Equal(t, 1, strings.Count(text, line+"\n"), "%s", line)
	return strings.Replace(text, line+"\n", by, 1)
}

func TestAuditOfAGoodRecord(t *testing.T) {
	for _, flushesItself := range []bool{false, true} {
		a, err := auditText(t, goodRecord, flushesItself)
		require.NoError(t, err)
		require.Equal(t, audit{connections: 2, posted: 6, flushed: 3, events: 1}, a)
	}
}

// TestAuditMissesEveryLine takes each line away in turn.
func TestAuditMissesEveryLine(t *testing.T) {
	lines := slices.Collect(strings.Lines(goodRecord))
	for i, line := range lines {
		switch strings.Fields(line)[0] {
		case "ibv_modify_qp", "rdma_connect", "rdma_accept": // may be left out
			continue
		}
		if strings.HasSuffix(line, "signaled=0\n") { // nothing tells of it
			continue
		}
		_, err := auditText(t, strings.Join(slices.Delete(slices.Clone(lines), i, i+1), ""), false)
		require.Error(t, err, "without %s", line)
	}
}

func TestAuditRejects(t *testing.T) {
	for name, c := range map[string]struct{ line, by, want string }{
		"a send completed twice": {"ibv_poll_cq cq=d0 wr=2 status=0",
			"ibv_poll_cq cq=d0 wr=2 status=0\nibv_poll_cq cq=d0 wr=2 status=0\n", "is not outstanding"},
		"a send that completed silently completes": {"ibv_poll_cq cq=d0 wr=2 status=0",
			"ibv_poll_cq cq=d0 wr=2 status=0\nibv_poll_cq cq=d0 wr=0 status=5\n", "is not outstanding"},
		"a receive completed out of order": {"ibv_poll_cq cq=d0 wr=1 status=5", "", "work request 1 of line 11 should have been first"},
		"a completion that was never posted": {"rdma_disconnect id=d",
			"ibv_poll_cq cq=a0 wr=9 status=0\nrdma_disconnect id=d\n", "is not outstanding"},
		"no completion": {"ibv_poll_cq cq=d0 wr=3 status=5", "", "work request 3 of line 12 has not completed"},
		"a completion after the queue pair's end": {"ibv_destroy_qp qp=d1",
			"ibv_destroy_qp qp=d1\nibv_poll_cq cq=d0 wr=3 status=5\n", "its queue pair is gone"},
		"no disconnect": {"rdma_disconnect id=d", "", "no rdma_disconnect before"},
		"a disconnect that comes late": {"rdma_destroy_id id=d",
			"rdma_disconnect id=d\nrdma_destroy_id id=d\nrdma_disconnect id=d\n", "there is no such id"},
		"a queue pair destroyed twice": {"ibv_destroy_qp qp=d1",
			"ibv_destroy_qp qp=d1\nibv_destroy_qp qp=d1\n", "there is no such qp"},
		"a queue pair that is left": {"ibv_destroy_qp qp=a1", "", "qp a1 is left"},
		"an id before its queue pair": {"ibv_destroy_qp qp=d1",
			"rdma_destroy_id id=d\nibv_destroy_qp qp=d1\n", "1 that use it are left"},
		"an id before its completion queue": {"ibv_destroy_qp qp=d1",
			"ibv_destroy_qp qp=d1\nrdma_destroy_id id=d\n", "its completion queue is left"},
		"a completion queue before its queue pair": {"ibv_destroy_qp qp=d1",
			"ibv_destroy_cq cq=d0\nibv_destroy_qp qp=d1\n", "1 that use it are left"},
		"a completion channel before its queue": {"ibv_destroy_cq cq=d0",
			"ibv_destroy_comp_channel comp=dc\nibv_destroy_cq cq=d0\n", "1 that use it are left"},
		"a completion event not acked":       {"ibv_ack_cq_events cq=a0 count=1", "", "1 events are not acked"},
		"a completion event acked twice":     {"ibv_ack_cq_events cq=a0 count=1", "ibv_ack_cq_events cq=a0 count=2\n", "more events acked than got"},
		"a protection domain before memory":  {"ibv_dereg_mr mr=f", "ibv_dealloc_pd pd=b\nibv_dereg_mr mr=f\n", "1 that use it are left"},
		"an event channel before its ids":    {"rdma_destroy_id id=1", "rdma_destroy_event_channel channel=c1\nrdma_destroy_id id=1\n", "1 that use it are left"},
		"an event channel with events":       {"rdma_destroy_event_channel channel=c1", "rdma_get_cm_event event=e2 id=1 channel=c1 type=a\nrdma_destroy_event_channel channel=c1\n", "1 that use it are left"},
		"an event acked twice":               {"CONNECT_REQUEST id=a channel=c1", "rdma_ack_cm_event event=e1\nCONNECT_REQUEST id=a channel=c1\n", "there is no such event"},
		"memory of a domain that is not":     {"ibv_reg_mr mr=f pd=b", "ibv_reg_mr mr=f pd=c\n", "there is no such pd"},
		"a failure":                          {"rdma_destroy_id id=d", "rdma_destroy_id id=d\nfailed rdma_destroy_id\n", "must not be"},
		"a call that the audit doesn't know": {"rdma_destroy_id id=d", "rdma_destroy_id id=d\nrdma_frobnicate id=1\n", "must not be"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, flushesItself := range []bool{false, true} {
				_, err := auditText(t, edit(t, goodRecord, c.line, c.by), flushesItself)
				require.ErrorContains(t, err, c.want)
			}
		})
	}
}

// TestAuditOfAProviderThatFlushes: what it may leave, and what it may not.
func TestAuditOfAProviderThatFlushes(t *testing.T) {
	for name, c := range map[string]struct {
		line, by string
		left     int // or -1: not even this provider's to flush
	}{
		"a receive posted after its end began":            {"rdma_disconnect id=d", "rdma_disconnect id=d\nibv_post_recv qp=d1 wr=5\n", 1},
		"a receive posted after the peer's end began":     {"rdma_disconnect id=d", "rdma_disconnect id=d\nibv_post_recv qp=a1 wr=5\n", 1},
		"a send posted after the queue pair was in error": {"ibv_modify_qp qp=a1 state=6", "ibv_modify_qp qp=a1 state=6\nibv_post_send qp=a1 wr=0 signaled=1\n", 1},
		"a send posted before":                            {"rdma_disconnect id=d", "ibv_post_send qp=a1 wr=0 signaled=1\nrdma_disconnect id=d\n", -1},
		"a receive posted before":                         {"rdma_disconnect id=d", "ibv_post_recv qp=a1 wr=5\nrdma_disconnect id=d\n", -1},
		"unsignaled sends that none followed": {"rdma_disconnect id=d",
			"ibv_post_send qp=d1 wr=6 signaled=0\nibv_post_send qp=d1 wr=8 signaled=0\nrdma_disconnect id=d\n", 2},
	} {
		t.Run(name, func(t *testing.T) {
			text := edit(t, goodRecord, c.line, c.by)
			_, err := auditText(t, text, false)
			require.ErrorContains(t, err, "has not completed")
			a, err := auditText(t, text, true)
			if c.left < 0 {
				require.ErrorContains(t, err, "has not completed")
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.left, a.left)
		})
	}
}
