# shellcheck shell=bash
# inside.sh: what the scripts that run inside a guest share. Sourced, never run.

SERVER=

# serve PORT COMMAND...: starts a server, its output in $WORK/server, and waits until it listens on PORT.
serve() {
	local port=$1 _
	shift
	"$@" </dev/null >"$WORK/server" 2>&1 &
	SERVER=$!
	for _ in {1..100}; do
		if listening "$port"; then return; fi
		kill -0 "$SERVER" 2>/dev/null || break
		sleep 0.1
	done
	cat "$WORK/server"
	echo "does not listen on port $port: $*"
	stop_server
	return 1
}

listening() {
	rdma resource show cm_id 2>/dev/null | grep -q "state LISTEN .*:$1\b" || [ -n "$(ss -Hltn "sport = :$1")" ]
}

# stop_server: some of them serve for ever.
stop_server() {
	[ -n "$SERVER" ] || return 0
	kill "$SERVER" 2>/dev/null
	wait "$SERVER" 2>/dev/null
	SERVER=
}

# wait_server: waits for a server that ends by itself; its exit status.
wait_server() {
	local status=0
	wait "$SERVER" || status=$?
	SERVER=
	[ "$status" = 0 ] || { cat "$WORK/server" && echo "the server ended with status $status"; }
	return "$status"
}

address() { # RXE|SIW|SELF|PEER 4|6
	local name=RDMANET_LAB_$1$2
	echo "${!name}"
}

# INTO FILE COMMAND...: a command with its stdout in FILE
# shellcheck disable=SC2034 # whoever sources this uses it
INTO=(bash -c 'exec "$@" >"$0"')

# same_data DIR FILE: FILE is a copy of DIR/data.
same_data() {
	local sum
	sum=$(sha256sum <"$2")
	[ "$sum" = "$(cat "$1/data.sha256")" ] || { echo "$2 is another than $1/data: SHA-256 $sum" && return 1; }
}

# rate FILE: the rate from what rcat -v has said.
rate() { sed -n 's/^received .*, //p' "$1"; }

# no_leftovers: the devices list nothing of a process's, after a moment. What it has reported before, in $WORK/left, is not the
# fault of the step that calls it now.
no_leftovers() {
	local _ kind left
	touch "$WORK/left"
	for _ in {1..50}; do
		# What the kernel has for itself is marked [ib_core] and the like. The rest is a process's, even if that has gone.
		left=$(for kind in qp cq mr cm_id pd; do rdma resource show "$kind" | grep -v 'comm \[' | sed "s/^/$kind: /"; done |
			grep -vxFf "$WORK/left")
		[ -n "$left" ] || return 0
		sleep 0.1
	done
	echo 'left on the devices:'
	echo "$left" | tee -a "$WORK/left"
	return 1
}
