# shellcheck shell=bash disable=SC2034 # variables for the scripts that source this file
# Shared functions of the scripts in deploy/: settings, log and last verdict. This file is sourced, not run.

# Reads the settings of this host from a file of shell assignments, since Slurm gives its scripts no environment. If
# scontrol does not find slurm.conf by default, put `export SLURM_CONF=...` into that file, because Slurm does not pass
# this variable to health checks.
sdc_settings() {
  local file=${SDC_SETTINGS:-/etc/default/sdc}
  PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
  export PATH
  if [[ -r $file ]]; then
    # shellcheck disable=SC1090 # the host's own file
    source "$file"
  fi
  SDC=${SDC:-sdc}                        # the command, with its path if it is installed in a virtual environment
  SDC_STATE=${SDC_STATE:-/var/lib/sdc}   # folder of this host's run folders, on the host's own disk
  SDC_MAX_AGE=${SDC_MAX_AGE:-7d}         # an older result is INCONCLUSIVE
  SDC_DRAIN_ON=${SDC_DRAIN_ON:-FAIL}     # or "FAIL INCONCLUSIVE": verdicts that take a node out of service
  SDC_ASK_LIMIT=${SDC_ASK_LIMIT:-20}     # time limit in seconds for reading the last verdict
}

# sdc_log PRIORITY TEXT: logs to standard error, and to the system log if there is one.
sdc_log() {
  printf 'sdc[%s]: %s\n' "$1" "$2" >&2
  if [[ -S /dev/log ]]; then
    logger -t sdc -p "daemon.$1" -- "$2" || true
  fi
}

# sdc_ask WORDS...: runs `sdc verdict WORDS...` and sets SDC_WORD to PASS, FAIL, INCONCLUSIVE or BROKEN, SDC_LINE to the
# line that it printed, and SDC_ENDED to the time of the result.
#
# The exit code alone is not enough: a Python that cannot start also ends with 1, so a bad upgrade would drain a whole
# cluster. BROKEN means that there is no verdict because of bad usage (2), or a missing (127), killed or late command.
sdc_ask() {
  local said code
  said=$(timeout --kill-after=2 "$SDC_ASK_LIMIT" "$SDC" verdict "$@" 2>&1)
  code=$?
  SDC_WORD=BROKEN
  SDC_ENDED=
  SDC_LINE="sdc verdict ended with $code: ${said##*$'\n'}"
  local pattern=$'(^|\n)((SIMULATION  )?(PASS|FAIL|INCONCLUSIVE)  [^\n]*)'
  if [[ $said =~ $pattern ]]; then
    local line=${BASH_REMATCH[2]} word=${BASH_REMATCH[4]}
    case $code:$word in
      0:PASS | 1:FAIL | 3:INCONCLUSIVE)
        SDC_WORD=$word
        SDC_LINE=$line
        pattern='\(([0-9]{4}-[0-9T:.+-]+), [^()]*\)$'
        [[ $line =~ $pattern ]] && SDC_ENDED=${BASH_REMATCH[1]}
        ;;
    esac
  fi
}

# sdc_drains: succeeds if the verdict in SDC_WORD takes a node out of service. BROKEN never does.
sdc_drains() {
  [[ $SDC_WORD != BROKEN && $SDC_WORD != PASS && " $SDC_DRAIN_ON " == *" $SDC_WORD "* ]]
}
