#!/usr/bin/env bash
# HealthCheckProgram of Slurm: drains a node whose last result is a FAIL. Slurm ignores the exit code and kills the
# program after 60 s; this program takes half a second, and at most 50 s.
#
#   slurm.conf: HealthCheckProgram=.../deploy/slurm/health-check.sh
#               HealthCheckInterval=300
#               HealthCheckNodeState=ANY
#
# Settings as in prolog.sh, and:
#
#   SDC_RESUME   never (default), or newer-pass: when a later burn-in passes, resume a node that these scripts drained.
#                Many faults are intermittent, and one PASS does not clear a host that failed, so a person should
#                resume it. The scripts never resume a node that they did not drain.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib/ask.sh
source "$here/../lib/ask.sh" || exit 1
# shellcheck source-path=SCRIPTDIR source=node.sh
source "$here/node.sh" || exit 1

# Resumes the node if these scripts drained it for an older result.
resume() {
  local pattern='^sdc: ([0-9]{4}-[0-9T:.+-]+) '
  sdc_node
  [[ $NODE_STATE == *DRAIN* && $NODE_REASON =~ $pattern ]] || return 0
  # All times are UTC in one format, so that string comparison orders them.
  if [[ -n $SDC_ENDED && $SDC_ENDED > ${BASH_REMATCH[1]} ]]; then
    timeout --kill-after=2 10 scontrol update "nodename=$SLURMD_NODENAME" state=resume &&
      sdc_log notice "resumed $SLURMD_NODENAME, which was drained ($NODE_REASON): $SDC_LINE"
  fi
}

sdc_settings
: "${SLURMD_NODENAME:=$(hostname -s)}"
sdc_ask --max-age "$SDC_MAX_AGE" "$SDC_STATE"
if sdc_drains; then
  sdc_drain
elif [[ $SDC_WORD == BROKEN ]]; then
  sdc_log crit "this host is NOT checked: $SDC_LINE"
elif [[ $SDC_WORD == PASS && ${SDC_RESUME:-never} == newer-pass ]]; then
  resume
fi
