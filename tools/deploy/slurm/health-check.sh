#!/usr/bin/env bash
# HealthCheckProgram of Slurm: drains a node with a FAIL in its ledger. Slurm ignores the exit code and kills the
# program after 60 s; this program takes half a second, and at most 50 s.
#
#   slurm.conf: HealthCheckProgram=.../deploy/slurm/health-check.sh
#               HealthCheckInterval=300
#               HealthCheckNodeState=ANY
#
# Settings as in prolog.sh, and:
#
#   SDC_RESUME   never (default), or acknowledged: when a person has acknowledged the failure (sdc fleet acknowledge) and
#                the device has passed since, resume a node that these scripts drained, and no other.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib/ask.sh
source "$here/../lib/ask.sh" || exit 1

# read_node: sets NODE_STATE and NODE_REASON; both are empty if slurmctld does not answer.
read_node() {
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

# drain: drains this node because of SDC_LINE, unless it is already drained; the first reason is kept, except Slurm's for
# a node that the prolog drained.
drain() {
  local reason
  read_node
  if [[ $NODE_STATE == *DRAIN* && $NODE_REASON != "Prolog error" ]]; then
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

# Resumes the node if these scripts drained it.
resume() {
  read_node
  [[ $NODE_STATE == *DRAIN* && $NODE_REASON == "sdc: "* ]] || return 0
  timeout --kill-after=2 10 scontrol update "nodename=$SLURMD_NODENAME" state=resume &&
    sdc_log notice "resumed $SLURMD_NODENAME, which was drained ($NODE_REASON): $SDC_LINE"
}

sdc_settings
: "${SLURMD_NODENAME:=$(hostname -s)}"
sdc_ask
if sdc_drains; then
  drain
elif [[ $SDC_WORD == BROKEN ]]; then
  sdc_log crit "this host is NOT checked: $SDC_LINE"
elif [[ $SDC_WORD == PASS && ${SDC_RESUME:-never} == acknowledged ]]; then
  resume
fi
