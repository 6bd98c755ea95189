#!/usr/bin/env bash
# Checks recovery.pml with spin: the protocol as it is must have no error, and each switch that removes a protection must have one.
# Every search of the first part is exhaustive: no bitstate, no hash compaction. COLLAPSE only packs states more tightly.
# Needs spin and gcc. Takes some minutes on one core, and less than 4 GB.
set -euo pipefail

model=$(cd "$(dirname "$0")" && pwd)/recovery.pml
for tool in spin gcc; do
  command -v "$tool" >/dev/null || { echo "check.sh needs $tool" >&2; exit 2; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
failed=0
TIMEFORMAT=%U
began=$SECONDS

# search <safety|liveness> <optimisation> <definitions...>: leaves pan's report in the file out
search() {
  local kind=$1 optimise=$2 build=() run=()
  shift 2
  rm -f pan pan.* ./*.trail
  if [ "$kind" = safety ]; then
    build=(-DSAFETY) run=(-E)
  else
    set -- -DLIVENESS "$@"
    build=(-DNFAIR=5) run=(-a -f -E) # acceptance cycles, under weak fairness
  fi
  spin "$@" -a "$model" >spin.out 2>&1 || { cat spin.out >&2; exit 2; }
  # NOREDUCE: nearly every step is about shared state, so partial order reduction would only cost time.
  gcc "$optimise" -w -DCOLLAPSE -DNOREDUCE -DMEMLIM=3800 "${build[@]}" -o pan pan.c
  { time ./pan "${run[@]}" -m1000000 >out 2>&1 || true; } 2>cpu
}

states() { awk '/states, stored/ { print $1; found = 1; exit } END { if (!found) print "?" }' out; }
seconds() { cat cpu; } # of the processor: other work on the machine does not count

# holds <name> <kind> <definitions...>: the search must be complete and without error
holds() {
  local name=$1 kind=$2 result=holds
  shift 2
  search "$kind" -O2 "$@"
  if ! grep -q 'errors: 0' out || grep -qE 'Search not completed|max search depth too small|out of memory|reached -DMEMLIM' out; then
    result=FAILED failed=1
    sed -n 1,12p out >&2
  fi
  printf '%-28s %12s %8ss  %s\n' "$name" "$(states)" "$(seconds)" "$result"
}

# breaks <switch> <kind> <property> <definitions...>: the search must find that property violated
breaks() {
  local switch=$1 kind=$2 property=$3 result
  shift 3
  search "$kind" -O1 "-D$switch" "$@"
  if [ "$kind" = liveness ]; then
    result=$(grep -q 'acceptance cycle' out && echo handed_back || true)
  else
    result=$(sed -n 's/.*assertion violated \([a-z_]*\).*/\1/p' out | head -n 1)
  fi
  if [ "$result" = "$property" ]; then
    result="breaks $property"
  else
    result="FAILED: found ${result:-nothing}, not $property" failed=1
  fi
  printf '%-28s %12s  %s\n' "$switch" "$(states)" "$result"
}

printf '%-28s %12s %9s  %s\n' configuration states time result
holds 'safety, two workers'      safety   -DHOLDERS=5 -DFAULTS=2 -DSTOP -DRETENTION -DSESSIONLOSS
holds 'safety, two incarnations' safety   -DHOLDERS=3 -DFAULTS=2 -DSTOP -DRETENTION -DSESSIONLOSS
holds 'safety, three faults'     safety   -DHOLDERS=1 -DFAULTS=3 -DRETENTION
holds 'safety, two jobs'         safety   -DHOLDERS=1 -DFAULTS=1 -DSTOP -DRETENTION -DSESSIONLOSS -DNJ=2
holds 'liveness, of the dead'    liveness -DHOLDERS=1 -DFAULTS=2 -DSTOP
holds 'liveness, of the living'  liveness -DHOLDERS=4 -DFAULTS=2 -DSTOP

echo
printf '%-28s %12s  %s\n' switch states result
few=(-DHOLDERS=1 -DFAULTS=2)
breaks NO_FENCE                  safety   no_hidden_worker     "${few[@]}"
breaks NO_FENCE_ABSENT           safety   no_hidden_worker     "${few[@]}"
breaks NO_POSITIVE_STATE         safety   no_hidden_worker     "${few[@]}" -DRETENTION
breaks SESSION_BEFORE_REGISTRY   safety   no_hidden_worker     "${few[@]}"
breaks UNDO_WITHOUT_FENCE        safety   no_hidden_worker     "${few[@]}"
breaks SREM_BEFORE_FENCE         safety   no_hidden_worker     "${few[@]}" -DSTOP
breaks CLAIM_EXPIRES_TO_DONE     safety   no_silent_double     "${few[@]}"
breaks FORGET_BEFORE_ENQUEUE     safety   no_loss              "${few[@]}"
breaks NOT_THERE_MEANS_LOST      safety   no_false_loss        "${few[@]}"
breaks NOT_THERE_MEANS_NIL       safety   no_silent_double     "${few[@]}"
breaks NO_LANE_NUMBERS           safety   no_silent_double     "${few[@]}"
breaks OTHER_LANE                safety   settled_means_gone   "${few[@]}"
breaks TRUST_REFUSAL             safety   no_silent_double     "${few[@]}"
breaks CLOSED_MEANS_NOT_RECORDED safety   no_silent_double     "${few[@]}" -DSESSIONLOSS
breaks AWAY_IS_FORGOTTEN         safety   no_silent_double     "${few[@]}" -DRETENTION
breaks AWAY_ONLY_IF_ABSENT       safety   no_silent_double     -DHOLDERS=1 -DFAULTS=3 -DRETENTION
breaks UNKNOWN_IS_KEPT           safety   no_silent_double     "${few[@]}" -DRETENTION
breaks CLAIM_NEVER_ENDS          liveness handed_back          "${few[@]}"

echo
echo "took $((SECONDS - began)) s"
exit "$failed"
