# shellcheck shell=bash
# lib.sh: what guest, pair, test, selftest and peers share. Sourced, never run.
#
# A run has a directory of its own (RUN). Each guest of the run has a directory below it, which the guest mounts at
# /run/lab and which carries everything between the two sides:
#
#   setup.sh       the guest's process 1 (a copy of lab/setup.sh)
#   vars           what it is to run: shell assignments
#   stdout stderr  the command's output, written by the guest, followed by us
#   status         the exit status, once the command has ended and its output is here
#   reason         why the guest couldn't run the command, if it couldn't
#                  (both begin as blanks that the guest overwrites in place: that works on a full disk, too)
#   started        exists from when the command is started
#   console        the kernel's console; qemu: what QEMU itself said; dmesg: the kernel log, written at the end

LAB=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ME=lab/$(basename "$0")
CACHE=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/rdmanet-lab
QEMU=${RDMANET_LAB_QEMU:-qemu-system-x86_64}
BOOT=${RDMANET_LAB_BOOT:-180} # seconds that a guest may take to come up, on a busy machine
FAILED=125 # the status for "the lab failed", as opposed to "the command failed"
RUN=

say() { printf '%s: %s\n' "$ME" "$*" >&2; }
die() {
	say "$*"
	exit "$FAILED"
}

# whole NAME VALUE: refuses anything but a positive whole number, before a guest finds out.
whole() { [[ $2 =~ ^[1-9][0-9]{0,8}$ ]] || die "$1 takes a positive whole number, not '$2'"; }

# new_run: makes RUN and sees to it that nothing of this run outlives it.
new_run() {
	remove_abandoned
	RUN=$(mktemp -d "${TMPDIR:-/tmp}/rdmanet-lab.XXXXXXXX") || die "cannot make a directory in ${TMPDIR:-/tmp}"
	trap end_run EXIT
	trap 'interrupted HUP 129' HUP
	trap 'interrupted INT 130' INT
	trap 'interrupted QUIT 131' QUIT
	trap 'interrupted TERM 143' TERM
	exec {RUN_LOCK}>"$RUN/lock" && flock -n "$RUN_LOCK" || die "cannot lock $RUN/lock"
	TTY_STATE=
	GUESTS=()
}

interrupted() { # SIGNAL STATUS
	say "ended by SIG$1"
	exit "$2"
}

# remove_abandoned removes what a run left that was killed with SIGKILL: its lock is free. (A minute's age protects a run
# that has made its directory and not yet locked it.)
remove_abandoned() {
	local d
	while IFS= read -r -d '' d; do
		if flock -n "$d/lock" true 2>/dev/null; then rm -rf -- "$d"; fi
	done < <(find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'rdmanet-lab.????????' -user "$(id -u)" -mmin +1 -print0 2>/dev/null)
}

end_run() {
	local pid
	trap '' HUP INT QUIT TERM
	[ -z "${CHILD:-}" ] || kill -TERM "$CHILD" 2>/dev/null || true
	for pid in ${GUESTS[@]+"${GUESTS[@]}"}; do stop_guest "$pid"; done
	wait 2>/dev/null # for the followers of the output, which end with their guests
	[ -z "$TTY_STATE" ] || stty "$TTY_STATE" 2>/dev/null || true
	[ -z "$RUN" ] || rm -rf -- "$RUN"
}

# stop_guest PID: kills the guest started as PID, all of it: see boot.
stop_guest() {
	kill -KILL "$1" 2>/dev/null || true
	quiet_wait "$1" || true
}

alive() { kill -0 "$1" 2>/dev/null; }

# quiet_wait ARGUMENT...: wait, without bash's own report of who died of which signal.
quiet_wait() { wait "$@" 2>/dev/null; }

# prepared: makes sure that kernel and initrd are there, and sets KERNEL to their directory.
prepared() {
	local out
	out=$("$LAB/prepare" -p) || exit "$FAILED" # it has said why
	KERNEL=$out
}

# new_guest DIR: fills a guest's directory, except for the command.
new_guest() {
	rm -rf -- "$1" && mkdir -p "$1" &&
		cp "$LAB/setup.sh" "$1/setup.sh" &&
		: >"$1/stdout" && : >"$1/stderr" && : >"$1/console" &&
		printf '%-8s' '' >"$1/status" && printf '%-201s' '' >"$1/reason" &&
		environment >"$1/vars" || die "cannot write to $1 (is the disk full?)"
}

# environment: the variables that go into the guest: ours, Go's, and what any program expects.
environment() {
	local name
	for name in $(compgen -e); do
		case $name in
		RDMANET_LAB_QEMU | RDMANET_LAB_ACCEL | RDMANET_LAB_BOOT) ;;
		RDMANET_* | GO* | LC_* | PATH | HOME | USER | LOGNAME | LANG | TZ | TMPDIR) assign "export $name" "${!name}" ;;
		esac
	done
}

# assign NAME VALUE...: an assignment that bash reads back byte for byte; an array when there are several values.
assign() {
	local LC_ALL=C name=$1
	shift
	printf '%s=' "$name"
	printf '%q' "$1"
	printf '\n'
}
assign_array() {
	local LC_ALL=C name=$1
	shift
	printf '%s=(' "$name"
	printf ' %q' "$@"
	printf ' )\n'
}

# share TAG DIR [OPTION]: QEMU's argument that shows DIR to the guest under TAG.
share() { printf 'local,path=%s,mount_tag=%s,security_model=none,multidevs=remap%s' "${2//,/,,}" "$1" "${3:+,$3}"; }

# KERNEL_COMMAND_LINE: no_timer_check, because on a busy machine an emulated timer is too late for the kernel's check of it, which panics.
KERNEL_COMMAND_LINE="console=ttyS0 quiet loglevel=4 panic=-1 oops=panic no_timer_check net.ifnames=0"

# boot DIR SECONDS MIB CPUS [QEMU ARGUMENT...]: starts the guest of DIR in the background and sets PID. It ends after SECONDS, and
# with this shell, whatever that dies of: each process of the chain dies with the one before. (The shell in the chain makes
# an exit status of QEMU's death by a signal, which otherwise this shell would report in its own words.) INTERACTIVE=yes
# gives it this terminal, and then it must stay in the terminal's process group.
boot() {
	local dir=$1 seconds=$2 mib=$3 cpus=$4 foreground=()
	shift 4
	if [ "${INTERACTIVE:-no}" = yes ]; then
		foreground=(--foreground)
		exec {GUEST_IN}<&0
	else
		exec {GUEST_IN}</dev/null
	fi
	(
		cd "$RUN" || exit
		exec setpriv --pdeathsig KILL bash -c '"$@"; exit $?' - \
			setpriv --pdeathsig KILL timeout "${foreground[@]}" -k 5 "$seconds" setpriv --pdeathsig KILL \
			"$QEMU" -nodefaults -no-user-config -display none -no-reboot \
			-machine q35 -accel "${RDMANET_LAB_ACCEL:-tcg,thread=multi}" -cpu max -smp "$cpus" -m "$mib" \
			-kernel "$KERNEL/vmlinuz" -initrd "$KERNEL/initrd.gz" -append "$KERNEL_COMMAND_LINE" \
			-serial "file:${dir//,/,,}/console" \
			-virtfs "$(share host / readonly=on)" -virtfs "$(share lab "$dir")" "$@"
	) <&"$GUEST_IN" 2>"$dir/qemu" &
	PID=$!
	exec {GUEST_IN}<&-
	GUESTS+=("$PID")
}

# follow FILE PID: prints FILE as it grows, until PID is gone. Run in the background; still_read tells how it fares.
follow() { tail -n +1 -s 0.1 -f --pid="$2" "$1" || echo $? >"$RUN/unread"; }

# still_read: ends the run when what we follow cannot be passed on. When nobody reads it any more (lab/guest yes | head), the command
# would run for nobody.
still_read() {
	[ -s "$RUN/unread" ] || return 0
	[ "$(cat "$RUN/unread")" != 141 ] || exit 141
	die "the output cannot be written"
}

# Very rarely an emulated machine hangs, or panics, while it boots. As long as no command has been started, a second try is honest.
came_up() { [ -e "$1/started" ]; }

# stuck DIR...: whether a guest that was booted BOOTED seconds into the run should have come up by now
stuck() {
	local dir
	[ $((SECONDS - BOOTED)) -ge "$BOOT" ] || return 1
	for dir; do came_up "$dir" || return 0; done
	return 1
}

# worth_another_boot DIR...: whether what verdict has said is no more than a boot that failed. Says so.
worth_another_boot() {
	local dir
	for dir; do ! came_up "$dir" || return 1; done
	case $REASON in
	*'did not come up'* | *'kernel panicked'*) say "booting once more: $REASON (logs: $(keep_logs "$@"))" ;;
	*) return 1 ;;
	esac
}

# verdict DIR QEMU-STATUS SECONDS: sets STATUS to what the command in DIR's guest exited with. When it has no status,
# sets it to 125 and REASON to why, in one line.
verdict() {
	local dir=$1 qemu=$2 seconds=$3
	REASON=
	STATUS=$(tr -d ' \0' <"$dir/status" 2>/dev/null) || STATUS=
	[[ $STATUS =~ ^[0-9]{1,3}$ ]] && return
	STATUS=$FAILED
	REASON=$(head -n 1 "$dir/reason" 2>/dev/null | tr -d '\0' | sed 's/ *$//') || true
	if [ -n "$REASON" ]; then
		:
	elif [ -n "${HUNG:-}" ] && ! came_up "$dir"; then
		REASON="the guest did not come up within $BOOT s"
	elif grep -aq 'Kernel panic' "$dir/console"; then
		REASON="the guest's kernel panicked:$(tr -d '\r' <"$dir/console" | sed -n 's/.*Kernel panic[^:]*://p' | tail -n 1)"
	elif [ "$qemu" = 124 ] || [ "$SECONDS" -ge "$seconds" ]; then
		REASON="timed out after $seconds s (-t sets the bound)"
	elif [ "$qemu" -gt 128 ]; then
		REASON="QEMU was killed by signal $((qemu - 128))"
	elif [ "$qemu" != 0 ]; then
		REASON="QEMU failed with status $qemu: $(tail -n 1 "$dir/qemu")"
	else
		REASON="the guest stopped before its command had ended"
	fi
}

# keep_logs DIR...: copies the logs of failed guests to where they survive, and prints that place.
keep_logs() {
	local to dir f
	to=$CACHE/logs/$(date +%Y%m%dT%H%M%S)-$(basename "$0")-$$
	if mkdir -p "$to" 2>/dev/null; then
		for dir; do
			for f in console qemu dmesg; do
				[ ! -s "$dir/$f" ] || cp "$dir/$f" "$to/$(basename "$dir").$f" 2>/dev/null || { to=; break 2; }
			done
		done
		find "$CACHE/logs" -mindepth 1 -maxdepth 1 -printf '%T@ %p\0' | sort -zrn | tail -zn +21 | cut -zd ' ' -f 2- |
			xargs -0r rm -rf -- || true
	else
		to=
	fi
	if [ -n "$to" ]; then
		echo "$to"
	else
		echo "nowhere, $CACHE/logs cannot be written"
	fi
}
