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
#   SDC_PROLOG         verdict (default): reads the last result in 0.2 s. burnin: runs a burn-in, for nodes with exclusive jobs.
#   SDC_BURNIN_FLAGS   further flags of sdc burnin, such as "--devices gpu:8", or "--suspect node11" in a rehearsal
#   SDC_BURNIN_LIMIT   seconds after which the burn-in ends with the result so far (default 240)
#   SDC_KEEP_DAYS      days to keep results without evidence (default 30); results with a bundle are kept
#
# Exits with 1, which drains the node, after a FAIL, and after INCONCLUSIVE if SDC_DRAIN_ON contains it. Without a
# verdict (bad usage, a missing or killed command), the prolog logs a critical error and drains nothing, because
# otherwise a typo in a file that all nodes share would drain all nodes.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib/ask.sh
source "$here/../lib/ask.sh" || exit 0
# shellcheck source-path=SCRIPTDIR source=node.sh
source "$here/node.sh" || exit 0

# Runs a burn-in and sets SDC_WORD and SDC_LINE.
burn_in() {
  local run flags code said
  run=$SDC_STATE/job-${SLURM_JOB_ID:-0}-$(date -u +%Y%m%dT%H%M%S)-$$
  read -ra flags <<<"${SDC_BURNIN_FLAGS:-}"
  said=$(timeout --kill-after=10 "${SDC_BURNIN_LIMIT:-240}" \
    "$SDC" burnin --level quick --run "$run" "${flags[@]}" 2>&1)
  code=$?
  case $code in
    0 | 1 | 3 | 124) sdc_ask "$run" ;; # 124: ended by the limit, with a result
    *)
      SDC_WORD=BROKEN
      SDC_LINE="sdc burnin ended with $code: ${said##*$'\n'}"
      return
      ;;
  esac
  # The exit code and the result must agree.
  case $code:$SDC_WORD in
    0:PASS | 1:FAIL | 3:INCONCLUSIVE | 124:INCONCLUSIVE | 124:FAIL) ;;
    *)
      SDC_WORD=BROKEN
      SDC_LINE="sdc burnin ended with $code, but its result says: $SDC_LINE"
      ;;
  esac
}

# Removes old results without evidence, because the prolog writes a result for each job.
tidy() {
  local folder
  while IFS= read -r -d '' folder; do
    [[ -e $folder/bundle.tar.gz ]] || rm -rf -- "$folder"
  done < <(find "$SDC_STATE" -mindepth 1 -maxdepth 1 -type d -name 'job-*' -mtime "+${SDC_KEEP_DAYS:-30}" -print0)
}

sdc_settings
case ${SDC_PROLOG:-verdict} in
  burnin)
    mkdir -p -m 755 -- "$SDC_STATE"
    tidy
    burn_in
    ;;
  *) sdc_ask --max-age "$SDC_MAX_AGE" "$SDC_STATE" ;;
esac
if sdc_drains; then
  sdc_drain || true # the exit code drains the node in any case
  exit 1
fi
case $SDC_WORD in
  PASS) ;;
  BROKEN) sdc_log crit "this host is NOT checked: $SDC_LINE" ;;
  *) sdc_log warning "the job starts, since SDC_DRAIN_ON is \"$SDC_DRAIN_ON\": $SDC_LINE" ;;
esac
exit 0
