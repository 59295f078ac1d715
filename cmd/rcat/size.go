package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// byteSize is a number of bytes, which may be given with a unit: KiB and K are
// 1024, KB is 1000.
type byteSize int64

func (s *byteSize) Type() string   { return "size" }
func (s *byteSize) String() string { return strconv.FormatInt(int64(*s), 10) }

func (s *byteSize) Set(text string) error {
	digits := strings.TrimRight(text, "BIKMGTbikmgt ")
	n, err := strconv.ParseFloat(digits, 64)
	scale, ok := units[strings.ToLower(strings.TrimSpace(text[len(digits):]))]
	if err != nil || !ok {
		return errors.New("must be bytes, or have a unit: 64MiB, 1G, 500MB")
	}
	if n *= scale; !(n >= 1 && n < math.MaxInt64) {
		return errors.New("must be 1 byte to 8 EiB")
	}
	*s = byteSize(n)
	return nil
}

var units = map[string]float64{
	"": 1, "b": 1,
	"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
	"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
	"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
}

// human writes a number of bytes with a binary unit.
func human(n float64) string {
	unit := "B"
	for _, next := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if n < 1024 {
			break
		}
		n, unit = n/1024, next
	}
	if n >= 100 || n == math.Trunc(n) {
		return fmt.Sprintf("%.0f %s", n, unit)
	}
	return fmt.Sprintf("%.1f %s", n, unit)
}

// rate writes how fast n bytes were moved.
func rate(n uint64, in time.Duration) string {
	return human(float64(n)/max(in, time.Microsecond).Seconds()) + "/s"
}

// inSeconds writes a time with three digits or so.
func inSeconds(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.2f s", d.Seconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}
