package rdmacore

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The declarations of abi.h are compared with the headers that they stand for:
// one program is compiled twice, once with each, and must print the same.
// It goes by abi.h itself, so that nothing declared there can be left out.
func TestDeclarationsMatchTheHeaders(t *testing.T) {
	cc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("no C compiler (try: apt install gcc)")
	}
	for _, h := range []string{"infiniband/verbs.h", "rdma/rdma_cma.h"} {
		check := exec.Command(cc, "-E", "-include", h, "-x", "c", os.DevNull)
		if check.Run() != nil {
			t.Skipf("<%s> is not installed (try: apt install libibverbs-dev librdmacm-dev)", h)
		}
	}
	text, err := os.ReadFile("abi.h")
	require.NoError(t, err)
	facts := abiFacts(string(text))
	require.Contains(t, facts, `offsetof(struct ibv_wc, byte_len)`)
	require.Contains(t, facts, `(size_t)RDMA_CM_EVENT_TIMEWAIT_EXIT`)
	require.Contains(t, facts, `sizeof(struct ibv_send_wr)`)

	ours := compileAndRun(t, cc, `#include "abi.h"`, facts)
	theirs := compileAndRun(t, cc, "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>", facts)
	want := strings.Split(theirs, "\n")
	for i, line := range strings.Split(ours, "\n") {
		assert.Equal(t, want[i], line)
	}
}

var (
	abiStruct = regexp.MustCompile(`(?ms)^(struct|union) (\w+) \{\n(.*?)^\}`)
	abiEnum   = regexp.MustCompile(`(?s)enum \{(.*?)\}`)
	abiField  = regexp.MustCompile(`(\w+)(?:\[\w+\])?;|\(\*(\w+)\)\(`)
	abiConst  = regexp.MustCompile(`\b((?:IBV|RDMA)_\w+)`)
)

// notOurs are fields that the headers do not have under that name.
var notOurs = map[string]bool{
	"aligned": true, // union ibv_gid, for its alignment
	"unused":  true, // of ibv_send_wr
	"_ops":    true,
	"param":   true, // a union that goes on
}

// incomplete are structures that only the library allocates, and of which we
// declare the beginning.
var incomplete = map[string]bool{
	"ibv_cq": true, "ibv_qp": true, "ibv_context": true, "rdma_cm_id": true, "rdma_cm_event": true,
}

// abiFacts returns a C expression for everything that abi.h promises.
func abiFacts(text string) (facts []string) {
	for _, m := range abiStruct.FindAllStringSubmatch(text, -1) {
		name := m[1] + " " + m[2]
		if !incomplete[m[2]] {
			facts = append(facts, "sizeof("+name+")")
		}
		for line := range strings.Lines(m[3]) {
			line, _, _ = strings.Cut(line, "//")
			f := abiField.FindStringSubmatch(line)
			if f == nil || strings.HasPrefix(line, "\t\t") { // within a union: by its own name
				continue
			}
			field := f[1] + f[2]
			if notOurs[field] || strings.HasPrefix(field, "compat_") || m[2] == "rdma_addr" && field == "" {
				continue
			}
			facts = append(facts, fmt.Sprintf("offsetof(%s, %s)", name, field),
				fmt.Sprintf("sizeof(((%s *)0)->%s)", name, field))
		}
	}
	facts = append(facts, "offsetof(struct ibv_send_wr, wr.rdma.remote_addr)", "offsetof(struct ibv_send_wr, wr.rdma.rkey)")
	facts = append(facts, "offsetof(struct rdma_cm_event, param.conn)", "offsetof(struct rdma_addr, addr.ibaddr)")
	for _, m := range abiEnum.FindAllStringSubmatch(text, -1) {
		for _, c := range abiConst.FindAllStringSubmatch(m[1], -1) {
			facts = append(facts, "(size_t)"+c[1])
		}
	}
	return facts
}

func compileAndRun(t *testing.T, cc, include string, facts []string) string {
	here, err := os.Getwd()
	require.NoError(t, err)
	var src strings.Builder
	fmt.Fprintf(&src, "#include <stddef.h>\n#include <stdio.h>\n%s\nint main(void)\n{\n", include)
	for _, f := range facts {
		fmt.Fprintf(&src, "\tprintf(\"%%s = %%zu\\n\", %q, %s);\n", f, f)
	}
	src.WriteString("\treturn 0;\n}\n")
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "facts.c"), []byte(src.String()), 0o600))
	out, err := exec.Command(cc, "-I", here, "-o", filepath.Join(dir, "facts"), filepath.Join(dir, "facts.c")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command(filepath.Join(dir, "facts")).Output()
	require.NoError(t, err)
	return string(out)
}
