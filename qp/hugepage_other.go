//go:build !linux

package qp

// adviseHuge does nothing: only Linux takes the advice.
func adviseHuge([]byte) {}
