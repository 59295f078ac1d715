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
