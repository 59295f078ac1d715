package iwarp

import "github.com/rdmanet/rdmanet/internal/verbs"

// Region is a memory region as a peer would have to know it.
type Region struct {
	STag   uint32
	Base   uint64
	Mem    []byte
	Access verbs.Access
}

// Regions returns all memory regions.
func Regions() (all []Region) {
	for i := range regions.chunks {
		c := regions.chunks[i].Load()
		if c == nil {
			continue
		}
		for k := range c.mr {
			if m := c.mr[k].Load(); m != nil {
				all = append(all, Region{m.stag, m.base, m.mem, m.access})
			}
		}
	}
	return all
}
