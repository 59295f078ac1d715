package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/rdmanet/rdmanet/cm"
)

// listDevices is rcat --devices. It fails unless one can be used.
func listDevices(w io.Writer, get func() ([]cm.DeviceInfo, error)) error {
	infos, missing := get()
	if len(infos) > 0 {
		if err := printDevices(w, infos); err != nil {
			return &localError{"stdout", err}
		}
	}
	switch {
	case missing != nil:
		return missing
	case slices.ContainsFunc(infos, active):
		return nil
	case slices.ContainsFunc(infos, works):
		return errors.New("no device can be used: none has a port that is ACTIVE (bring its network interface up: ip link set eth0 up; InfiniBand needs a subnet manager: opensm)")
	}
	return errors.New("no device can be used, for the reasons given")
}

func works(i cm.DeviceInfo) bool { return i.Err == nil }

func active(i cm.DeviceInfo) bool {
	return works(i) && slices.ContainsFunc(i.Ports, func(p cm.Port) bool { return p.State == "ACTIVE" })
}

// printDevices prints one table of ports and one of limits, and why a device can't
// be used.
func printDevices(w io.Writer, infos []cm.DeviceInfo) error {
	ports := [][]string{{"DEVICE", "PORT", "STATE", "TRANSPORT", "LINK LAYER", "INTERFACE", "ADDRESS", "GID"}}
	limits := [][]string{{"DEVICE", "SEND DEPTH", "RECEIVE DEPTH", "SGE", "CQE", "INLINE BYTES"}}
	var faults string
	for _, i := range infos {
		if i.Err != nil {
			faults += fmt.Sprintf("%s can't be used: %s\n", i.Name, oneLine(i.Err))
			continue
		}
		for _, p := range i.Ports {
			ports = append(ports, portRows(i, p)...)
		}
		a := i.Attr
		row := []string{i.Name}
		for _, n := range []int{a.MaxQPWR, a.MaxQPWR, a.MaxSGE, a.MaxCQE, a.MaxInline} {
			row = append(row, strconv.Itoa(n))
		}
		limits = append(limits, row)
	}
	var text string
	if len(limits) > 1 {
		text = table(ports) + "\n" + table(limits)
		if faults != "" {
			text += "\n"
		}
	}
	_, err := io.WriteString(w, text+faults)
	return err
}

// portRows are a port's row and those below it, which go on with the addresses and
// GIDs.
func portRows(i cm.DeviceInfo, p cm.Port) [][]string {
	gids := usefulGIDs(i.Transport, p.GIDs)
	rows := make([][]string, max(1, len(p.Addrs), len(gids)))
	for n := range rows {
		rows[n] = make([]string, 8)
	}
	copy(rows[0], []string{i.Name, strconv.Itoa(p.Num), p.State, i.Transport, p.LinkLayer, p.Interface})
	for n, a := range p.Addrs {
		rows[n][6] = a.String()
	}
	for n, g := range gids {
		rows[n][7] = fmt.Sprintf("%d: %v", g.Index, g.Addr)
		if i.Transport == "RoCE" && g.Type != "" {
			rows[n][7] += " (" + g.Type + ")"
		}
	}
	for n, s := range rows[0] {
		if s == "" {
			rows[0][n] = "-"
		}
	}
	return rows
}

// usefulGIDs are those that a connection may have. An iWARP device's is its hardware
// address. A RoCE device has each address in several versions, of which rdma_cm by
// default takes the second, and one of link scope, which few connections have.
func usefulGIDs(transport string, all []cm.GID) []cm.GID {
	switch transport {
	case "iWARP":
		return nil
	case "RoCE":
		all = preferred(all, func(g cm.GID) bool { return g.Type == "RoCE v2" })
		all = preferred(all, func(g cm.GID) bool { return !g.Addr.IsLinkLocalUnicast() })
	}
	return all
}

// preferred are the GIDs that f likes; all, if it likes none.
func preferred(all []cm.GID, f func(cm.GID) bool) []cm.GID {
	liked := slices.DeleteFunc(slices.Clone(all), func(g cm.GID) bool { return !f(g) })
	if len(liked) == 0 {
		return all
	}
	return liked
}

// table aligns columns.
func table(rows [][]string) string {
	var aligned bytes.Buffer
	t := tabwriter.NewWriter(&aligned, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintln(t, strings.Join(r, "\t"))
	}
	t.Flush()
	var text strings.Builder
	for line := range strings.Lines(aligned.String()) {
		fmt.Fprintln(&text, strings.TrimRight(line, " \n"))
	}
	return text.String()
}
