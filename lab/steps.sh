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
		FAILURES+=("$name")
		printf 'FAIL  %s (%d s), status %d:\n' "$name" $((SECONDS - start)) "$status"
		grep -avE '^ *(=== (RUN|PAUSE|CONT|NAME)|--- PASS)' "$WORK/step" | tail -n 400 | sed 's/^/      /'
	fi
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
