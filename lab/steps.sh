# shellcheck shell=bash
# steps.sh: a list of steps, each reported in one line. Sourced by test, by selftest and, in the guest, by inside-test.
# Needs WORK, a directory. A step is a command: it passes when it exits with 0. What it prints is shown when it fails.

PASSED=0
FAILURES=()

# step NAME COMMAND...
step() {
	local name=$1 start=$SECONDS status=0
	shift
	in_background "$@" </dev/null >"$WORK/step" 2>&1 || status=$?
	if [ "$status" = 0 ]; then
		PASSED=$((PASSED + 1))
		printf 'ok    %s (%d s)%s\n' "$name" $((SECONDS - start)) "$(note)"
	else
		FAILURES+=("$name$(failed_tests)")
		printf 'FAIL  %s (%d s), status %d:\n' "$name" $((SECONDS - start)) "$status"
		of_failed_tests <"$WORK/step" | tail -n 400 | sed 's/^/      /'
	fi
}

# failed_tests: the names of the Go tests that failed in the step
failed_tests() { sed -n 's/^ *--- FAIL: \([^ ]*\).*/, \1/p' "$WORK/step" | sort -u | head -n 10 | tr -d '\n'; }

# of_failed_tests: of what go test -v prints, what belongs to no test, or to one that failed or did not end. Other output is left as it is.
of_failed_tests() {
	awk '
		/^=== [A-Z]+ / { test = $3; next }
		/^ *--- (PASS|SKIP|FAIL): / { test = $3 }
		/^ *--- FAIL: / { failed[$3] = 1 }
		/^(PASS|FAIL|panic: |fatal error: |SIG[A-Z]*: )/ { test = "" }
		{ line[NR] = $0; of[NR] = test }
		END { failed[test] = 1; for (i = 1; i <= NR; i++) if (i in line && (of[i] == "" || of[i] in failed)) print line[i] }'
}

# in_background COMMAND...: runs it and returns its status. A shell that waits takes signals at once; end_run ends CHILD.
in_background() {
	local status=0
	(set +e && "$@") &
	CHILD=$!
	wait "$CHILD" 2>/dev/null || status=$?
	CHILD=
	return "$status"
}

# note: a step can have a remark appended to its line, by printing "note: ..." last.
note() { tail -n 1 "$WORK/step" | sed -n 's/^note: /, /p'; }

# summary NAME: the last line, and whether all was well
summary() {
	local f
	if [ ${#FAILURES[@]} = 0 ] && [ "$PASSED" -gt 0 ]; then
		printf '%s: %d steps passed in %d s\n' "$1" "$PASSED" "$SECONDS"
		return 0
	fi
	printf '%s: %d steps passed, %d failed in %d s\n' "$1" "$PASSED" ${#FAILURES[@]} "$SECONDS"
	for f in ${FAILURES[@]+"${FAILURES[@]}"}; do printf '%s: failed: %s\n' "$1" "$f"; done
	return 1
}
