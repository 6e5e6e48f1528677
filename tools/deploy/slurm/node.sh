# shellcheck shell=bash disable=SC2034 # variables for the scripts that source this file
# Reads and changes the state of this node in Slurm. Sourced by prolog.sh and health-check.sh.

# sdc_node: sets NODE_STATE and NODE_REASON; both are empty if slurmctld does not answer.
sdc_node() {
  local said pattern
  NODE_STATE=
  NODE_REASON=
  said=$(timeout --kill-after=2 10 scontrol --oneliner show node "$SLURMD_NODENAME" 2>/dev/null) || return 0
  pattern=' State=([^ ]+)'
  [[ $said =~ $pattern ]] && NODE_STATE=${BASH_REMATCH[1]}
  pattern=' Reason=(.*) \[[^]]*\]'
  [[ $said =~ $pattern ]] && NODE_REASON=${BASH_REMATCH[1]}
  return 0
}

# sdc_drain: drains this node because of SDC_WORD and SDC_LINE, unless it is already drained; the first reason is kept.
#
# The reason begins with the time of the result, so that a newer result can be recognized.
sdc_drain() {
  local reason
  sdc_node
  if [[ $NODE_STATE == *DRAIN* ]]; then
    sdc_log warning "$SLURMD_NODENAME is already drained: $NODE_REASON"
    return 0
  fi
  reason="sdc: ${SDC_ENDED:-unknown} ${SDC_LINE//[$'"\n']/ }"
  if timeout --kill-after=2 10 scontrol update "nodename=$SLURMD_NODENAME" state=drain "reason=${reason:0:400}"; then
    sdc_log crit "drained $SLURMD_NODENAME: $SDC_LINE"
  else
    sdc_log crit "$SLURMD_NODENAME must be drained, but scontrol failed: $SDC_LINE"
    return 1
  fi
}
