package iwarp

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarp/wire"
	"github.com/rdmanet/rdmanet/internal/verbs"
)

// FPDUs fill TCP's segments and are no longer, also when the segment size changes.
func TestFPDUsFitSegmentsThatChange(t *testing.T) {
	ch := newChannel(t)
	for _, crc := range []bool{false, true} {
		l := newTape()
		q, c := onTape(t, ch, l, 1448, crc, verbs.QPCap{SendWR: 1, RecvWR: 1, SendSGE: 1})
		// send sends messages, and returns the length of the longest FPDU.
		send := func(message, count int) (longest int) {
			l.out = nil
			b := make([]byte, message)
			for range count {
				n, err := q.PostSend([]verbs.SendWR{{Inline: true, Signaled: true, SGL: []verbs.SGE{{Data: b}}}})
				require.NoError(t, err)
				require.Equal(t, 1, n)
				require.Equal(t, 1, c.pop(make([]verbs.WC, 1)))
			}
			for _, f := range parseFPDUs(t, l.out, crc) {
				longest = max(longest, wire.FPDULen(f.Len()+len(f.payload)))
			}
			return longest
		}
		for _, s := range []struct{ mss, longest int }{
			{1448, 1448}, {1000, 1000}, {8948, 8948}, {1447, 1444}, {536, 536}, {0, 528}, {65483, 65480}, {1448, 1448},
		} {
			for _, message := range []int{10_000, 300_000} {
				l.segment = s.mss
				send(message, fitsFor/message+1) // until it is noticed
				require.Equal(t, min(s.longest, wire.FPDULen(wire.UntaggedHeaderLen+message)), send(message, 1), fmt.Sprint(s, message))
			}
		}
	}
}
