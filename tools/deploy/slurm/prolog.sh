#!/usr/bin/env bash
# Prolog of Slurm: keeps jobs off hosts that compute wrong numbers.
#
#   slurm.conf: Prolog=.../deploy/slurm/prolog.sh
#               PrologFlags=Alloc
#               SchedulerParameters=nohold_on_prolog_fail   # requeues the job instead of holding it
#
# Settings are in the file that SDC_SETTINGS names, by default /etc/default/sdc; lib/ask.sh lists those of all scripts.
# Settings of the prolog:
#
#   SDC_PROLOG         verdict (default): reads the ledger in 0.3 s. burnin: runs a burn-in, for nodes with exclusive jobs.
#   SDC_BURNIN_FLAGS   further flags of sdc burnin, such as "--devices gpu:8", or "--suspect node11" in a rehearsal
#   SDC_BURNIN_LIMIT   seconds after which the burn-in ends with the result so far (default 240)
#   SDC_KEEP_DAYS      days to keep results without evidence (default 30); results with a FAIL or a bundle are kept
#
# Exits with 1, which drains the node, after a FAIL, and after INCONCLUSIVE if SDC_DRAIN_ON contains it; the health check
# then replaces Slurm's reason ("Prolog error") by the verdict, since a prolog must not call scontrol. Without a verdict
# (bad usage, a missing or killed command), the prolog logs a critical error and drains nothing, because otherwise a
# typo in a file that all nodes share would drain all nodes.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib/ask.sh
source "$here/../lib/ask.sh" || exit 0

# Runs a burn-in and sets SDC_WORD and SDC_LINE.
burn_in() {
  local run flags said
  run=$SDC_STATE/job-${SLURM_JOB_ID:-0}-$(date -u +%Y%m%dT%H%M%S)-$$
  read -ra flags <<<"${SDC_BURNIN_FLAGS:-}"
  said=$(timeout --kill-after=10 "${SDC_BURNIN_LIMIT:-240}" \
    "$SDC" burnin --level quick --run "$run" "${flags[@]}" 2>&1)
  sdc_ask_after "$run" "$?" "$said"
}

# Removes old results without evidence, because the prolog writes a result for each job.
tidy() {
  local folder
  while IFS= read -r -d '' folder; do
    [[ -e $folder/bundle.tar.gz ]] || grep -qs '"verdict": "corrupt"' "$folder/result.json" || rm -rf -- "$folder"
  done < <(find "$SDC_STATE" -mindepth 1 -maxdepth 1 -type d -name 'job-*' -mtime "+${SDC_KEEP_DAYS:-30}" -print0)
}

sdc_settings
case ${SDC_PROLOG:-verdict} in
  burnin)
    [[ -d $SDC_STATE ]] || install -d -m 755 -- "$SDC_STATE"
    tidy
    burn_in
    ;;
  *) sdc_ask ;;
esac
if sdc_drains; then
  sdc_log crit "the exit code of the prolog drains this node: $SDC_LINE"
  exit 1
fi
case $SDC_WORD in
  PASS) ;;
  BROKEN) sdc_log crit "this host is NOT checked: $SDC_LINE" ;;
  *) sdc_log warning "the job starts, since SDC_DRAIN_ON is \"$SDC_DRAIN_ON\": $SDC_LINE" ;;
esac
exit 0
