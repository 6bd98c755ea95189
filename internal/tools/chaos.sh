#!/bin/sh
# chaos.sh runs the long form of the chaos tests and of the simulation, and adds up what they did and found.
#
#	PERCENT    of the whole campaign: 10,000 SIGKILLs, 1,000 SIGSTOPs, 100 restarts, 50 failovers. Default: 100
#	SCHEDULES  to be simulated. Default: 1,500 for each percent
#	FROM       the first of them. Default: 1
#	LOGS       a directory for the logs. Default: a new one, which stays if a test fails
#
# Its end can be pasted into docs/verification.md.
set -eu

PERCENT=${PERCENT:-100}
SCHEDULES=${SCHEDULES:-$((PERCENT * 1500))}
FROM=${FROM:-1}
LOGS=${LOGS:-$(mktemp -d)}
mkdir -p "$LOGS"
cores=$(getconf _NPROCESSORS_ONLN)
binary=$LOGS/chaos.test
go test -c -o "$binary" .

# part units percent: that much of units, rounded up.
part() { echo $((($1 * PERCENT + 99) / 100)); }

# run name rounds tests: one process of the test binary. It goes on if it fails: the others may find something else.
run() {
	RECOVERY_CHAOS=$2 "$binary" -test.v -test.timeout 6h -test.parallel 8 -test.run "^($3)\$" >"$LOGS/$1.log" 2>&1 ||
		touch "$LOGS/$1.failed"
}

# Random kills, in legs: a ledger is read into memory when its leg ends.
kills() {
	left=$(part 420) leg=0
	while [ "$left" -gt 0 ]; do
		leg=$((leg + 1)) rounds=$((left < 30 ? left : 30))
		run "kills-$leg" "$rounds" TestChaos_killsAndPauses
		left=$((left - rounds))
	done
}

others() {
	run redis "$(part 50)" 'TestChaos_redis|TestChaos_sentinel'
	run cluster "$(part 13)" 'TestChaos_clusterFailover|TestChaos_clusterMigration'
	run faults "$(part 13)" 'TestChaos_network|TestChaos_outOfMemory|TestChaos_flushAll|TestChaos_clock|TestChaos_everyStep'
}

# One process a core, each on one: goroutines of a bubble hardly ever run side by side, and the garbage is short-lived.
simulate() {
	each=$(((SCHEDULES + cores - 1) / cores)) core=0 pids=""
	while [ "$core" -lt "$cores" ]; do
		from=$((FROM + core * each)) log=$LOGS/simulation-$core
		(GOMAXPROCS=1 GOGC=1000 "$binary" -test.v -test.timeout 24h -test.run '^TestSimulation$' -sim.n "$each" -sim.from "$from" >"$log.log" 2>&1 ||
			touch "$log.failed") &
		pids="$pids $!" core=$((core + 1))
	done
	# $pids is split into words on purpose.
	wait $pids
}

began=$(date +%s)
echo "logs: $LOGS"
kills &
pid=$!
others
wait "$pid"
fleets=$(date +%s)
simulate
ended=$(date +%s)

cat "$LOGS"/*.log | awk -v fleets=$((fleets - began)) -v sims=$((ended - fleets)) '
/chaos: kills=/ {
	for (i = 1; i <= NF; i++) {
		if (split($i, f, "=") != 2) continue
		if (f[1] == "worst") { if (index($0, "bound=0.000s") == 0 && f[2] + 0 > worst) worst = f[2] + 0 }
		else if (f[1] == "bound") { if (f[2] + 0 > bound) bound = f[2] + 0 }
		else sum[f[1]] += f[2]
	}
}
/ schedules: \{/ { for (i = 1; i < NF; i++) if ($(i + 1) == "schedules:") schedules += $i }
/^ *--- FAIL/ { failed++ }
END {
	print "\n| what | how often | lost | silent doubles |\n|---|---|---|---|"
	n = split("kills SIGKILL,stops SIGSTOP,restarts Redis killed and restarted,freezes Redis frozen,failovers failovers of Sentinel and Cluster,migrations slots moved under load,jumps clock of Redis set", rows, ",")
	for (i = 1; i <= n; i++) { key = rows[i]; sub(/ .*/, "", key); text = rows[i]; sub(/^[^ ]+ /, "", text); printf "| %s | %d | | |\n", text, sum[key] }
	printf "| jobs tracked meanwhile | %d | %d | %d; %d explained by a Done that a failover undid |\n", sum["jobs"], sum["lost"], sum["doubles"], sum["explained"]
	printf "| simulated schedules | %d | | |\n| tests that failed | %d | | |\n\n", schedules, failed
	printf "From a kill to Enqueue: %d leases, %d of them later than OrphanThreshold + SweepInterval;", sum["recovered"], sum["late"]
	printf " where Redis stayed up the worst took %.2f s, the bound with one sweeper that dies is %.2f s.\n", worst, bound
	printf "%d s of fleets (%.0f kills, %.0f stops, %.1f restarts, %.1f failovers a minute), %d s of simulation (%.1f schedules a second).\n",
		fleets, sum["kills"] * 60 / (fleets + 1e-9), sum["stops"] * 60 / (fleets + 1e-9), sum["restarts"] * 60 / (fleets + 1e-9), sum["failovers"] * 60 / (fleets + 1e-9), sims, schedules / (sims + 1e-9)
}'

for f in "$LOGS"/*.failed; do
	[ -e "$f" ] || continue
	echo "FAILED: ${f%.failed}.log" >&2
	failed=1
done
[ -z "${failed:-}" ]
