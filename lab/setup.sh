#!/bin/bash
# setup.sh: process 1 of a guest, once the root is mounted. Makes the devices, runs the command and reports its end.
# What it prints itself goes to the console, never to the command's output.
set -u
cd /run/lab || exit
export RDMANET_LAB=1
directory='' command=()
# shellcheck source=/dev/null
. ./vars

main() {
	machine
	if [ -n "${SIDE:-}" ]; then one_of_two; else alone; fi
	dmesg -n 5 # from here on a warning of a driver reaches the console's log
	: >started
	if [ -n "${TERMINAL:-}" ]; then on_terminal; else streamed; fi
	printf '%-8d' "$status" 1<>status # in place, so that a full disk cannot lose it
	[ -z "${SIDE:-}" ] || { touch shared/.done-"$SIDE"; await shared/.done-"$PEER" 1000000; }
	leave
}

leave() {
	# shellcheck disable=SC2094 # a program and a file
	dmesg >dmesg
	sync
	echo o >/proc/sysrq-trigger
	sleep 60
}

fail() {
	printf '%-200s\n' "$*" 1<>reason
	leave
}

# await FILE SECONDS
await() {
	local end=$((SECONDS + $2))
	until [ -e "$1" ]; do
		[ "$SECONDS" -lt "$end" ] || return 1
		sleep 0.1
	done
}

mount_9p() {
	mkdir -p "$2" && mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none "$1" "$2" || fail "cannot mount $2 in the guest"
}

machine() {
	mount -o remount,rw / 2>/dev/null
	hostname "lab${SIDE:+-$SIDE}"
	ulimit -Hn 524288 && ulimit -Sn 1024
	ulimit -l unlimited # as on every host with RDMA: siw counts what root pins, too
	# Addresses are usable at once: nobody else is on these wires.
	echo 0 >/proc/sys/net/ipv6/conf/all/accept_dad
	echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
	ip link set lo up
	[ -z "${OUT:-}" ] || mount_9p out "$OUT"
}

# device NAME TYPE INTERFACE ADDRESS4 ADDRESS6: an RDMA device on an interface, up and ACTIVE
device() {
	ip addr add "$4" dev "$3" && ip addr add "$5" dev "$3" nodad && ip link set "$3" up || fail "cannot set up $3"
	local _
	for _ in {1..50}; do
		[ "$(cat "/sys/class/net/$3/operstate")" = up ] && break
		sleep 0.1
	done
	rdma link add "$1" type "$2" netdev "$3" || fail "cannot make $1 on $3"
	for _ in {1..100}; do
		grep -q ACTIVE "/sys/class/infiniband/$1/ports/1/state" && [ -e /dev/infiniband/rdma_cm ] && return
		sleep 0.1
	done
	fail "$1 did not become ACTIVE"
}

# alone: rxe0 and siw0, each on one end of a veth pair
alone() {
	local t
	for t in rxe siw; do
		ip link add "$t-eth" type veth peer name "$t-far" && ip link set "$t-far" up || fail "cannot make $t-eth"
	done
	device rxe0 rxe rxe-eth 10.77.0.1/24 fd77::1/64
	device siw0 siw siw-eth 10.78.0.1/24 fd78::1/64
	export RDMANET_LAB_RXE4=10.77.0.1 RDMANET_LAB_RXE6=fd77::1 RDMANET_LAB_RXE_INTERFACE=rxe-eth
	export RDMANET_LAB_SIW4=10.78.0.1 RDMANET_LAB_SIW6=fd78::1 RDMANET_LAB_SIW_INTERFACE=siw-eth
}

# one_of_two: one device, on the wire to the other guest. Commands start together, when both have theirs.
one_of_two() {
	local n=1 p=2
	[ "$SIDE" = a ] || { n=2 p=1; }
	mount_9p shared /run/lab/shared
	await /sys/class/net/eth0 30 || fail "eth0 did not appear"
	ip link set eth0 mtu 9000
	device "${DEVICE}0" "$DEVICE" eth0 "10.79.0.$n/24" "fd79::$n/64"
	export RDMANET_LAB_SIDE=$SIDE RDMANET_LAB_DEVICE=${DEVICE}0 RDMANET_LAB_INTERFACE=eth0
	export RDMANET_LAB_SELF4=10.79.0.$n RDMANET_LAB_SELF6=fd79::$n RDMANET_LAB_PEER4=10.79.0.$p RDMANET_LAB_PEER6=fd79::$p
	export "RDMANET_LAB_${DEVICE^^}4=10.79.0.$n" "RDMANET_LAB_${DEVICE^^}6=fd79::$n" RDMANET_LAB_SHARED=/run/lab/shared
	touch "shared/.ready-$SIDE"
	await "shared/.ready-$PEER" 300 || fail "the other guest did not come up"
}

# streamed: runs the command with its output in pipes, as under go test. A relay takes it from there straight to the host, so a
# panic loses no more than the moment before it. Sets status.
streamed() {
	local out err
	mkfifo -m 600 /run/stdout /run/stderr
	relay stdout & out=$!
	relay stderr & err=$!
	(run </dev/null >/run/stdout 2>/run/stderr)
	status=$?
	[ ! -e /run/no-directory ] || fail "the directory $directory does not exist in the guest"
	delivered "$out" && delivered "$err" || fail "the command's output could not be written (a full disk, or more than 1 GiB of it)"
}

relay() {
	ulimit -f 1048576
	# shellcheck disable=SC2094 # two files
	exec cat <"/run/$1" >>"$1"
}

# delivered PID: a relay has done its work. One that is still open after 5 s is held by a process that the command left behind.
delivered() {
	local _
	for _ in {1..50}; do
		kill -0 "$1" 2>/dev/null || break
		sleep 0.1
	done
	kill -0 "$1" 2>/dev/null || wait "$1"
}

# on_terminal: the same on the terminal of whoever called lab/guest.
on_terminal() {
	await /dev/hvc0 30 || fail "the terminal did not appear"
	stty -F /dev/hvc0 sane rows "$ROWS" cols "$COLUMNS_"
	export TERM=$TERMINAL
	export -f run
	declare -p command directory >/run/command
	setsid -c -w bash -c '. /run/command; run' </dev/hvc0 >/dev/hvc0 2>&1
	status=$?
	[ ! -e /run/no-directory ] || fail "the directory $directory does not exist in the guest"
	sleep 0.3 # hvc writes behind
}

run() {
	BASH_ARGV0=lab/guest # what an error message of exec begins with
	cd "$directory" || {
		touch /run/no-directory
		exit 125
	}
	exec -- "${command[@]}"
}

main; exit
