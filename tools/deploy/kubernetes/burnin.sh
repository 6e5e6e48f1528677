#!/usr/bin/env bash
# Runs a burn-in in a pod, and writes the result for node-verdict.sh: verdict, whether simulated, time and sentence.
#
#   burnin.sh FILE FLAGS...   FLAGS are those of sdc burnin
#
# Exits with 0 for every verdict, so that the next container of the pod runs.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib/ask.sh
source "$here/../lib/ask.sh" || exit 1
sdc_settings
file=$1
shift
run=$SDC_STATE/pod-${HOSTNAME:-burnin}-$(date -u +%Y%m%dT%H%M%S)
# The output decides if the disk is full, so a copy of it is kept in memory.
said=$(mktemp -p /dev/shm) || said=/dev/null
exec {copy}> >(tee "$said")
copies=$!
>&"$copy" 2>&1 "$SDC" burnin --run "$run" "$@" &
child=$!
# If the pod is deleted, the burn-in ends within 5 s with the result so far.
trap 'kill -TERM "$child" 2>/dev/null' TERM INT
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, but not the burn-in
  wait "$child"
  code=$?
done
exec {copy}>&-
wait "$copies"
sdc_ask_after "$run" "$code" "$(cat "$said")"
[[ $said == /dev/null ]] || rm -f "$said"
simulated=false
[[ $SDC_LINE == "SIMULATION  "* ]] && simulated=true
printf '%s\n' "$SDC_WORD" "$simulated" "$SDC_ENDED" "${SDC_LINE//$'\n'/ }" >"$file"
