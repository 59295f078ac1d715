package qp

import "golang.org/x/sys/unix"

const hugePage = 2 << 20

// adviseHuge asks for huge pages where one fits. It is advice: a kernel without
// them changes nothing.
func adviseHuge(mem []byte) {
	if len(mem) >= hugePage {
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	}
}
