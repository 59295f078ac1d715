package main

import (
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// machine is where a run took place.
type machine struct {
	CPU      string `json:"cpu"`
	CPUs     int    `json:"cpus"`
	MaxProcs int    `json:"gomaxprocs"`
	Kernel   string `json:"kernel"`
	Go       string `json:"go"`
	Load     string `json:"load"` // of the last minute, before the run
	Date     string `json:"date"`
}

func thisMachine() machine {
	return machine{
		CPU: cpuModel(), CPUs: runtime.NumCPU(), MaxProcs: runtime.GOMAXPROCS(0),
		Kernel: kernel(), Go: runtime.Version(), Load: load(),
		Date: time.Now().UTC().Format("2006-01-02 15:04 UTC"),
	}
}

func kernel() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return runtime.GOOS
	}
	return unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:]) + " " + runtime.GOARCH
}

func cpuModel() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if name, model, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(model)
		}
	}
	return "unknown CPU"
}

func load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	if first, _, ok := strings.Cut(string(b), " "); ok {
		return first
	}
	return "unknown"
}
