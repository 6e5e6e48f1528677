# shellcheck shell=bash disable=SC2034 # variables for the scripts that source this file
# Shared functions of the scripts in deploy/: settings, log and standing of this host. This file is sourced, not run.

# Reads the settings of this host from a file of shell assignments, since Slurm gives its scripts no environment. If
# scontrol does not find slurm.conf by default, put `export SLURM_CONF=...` into that file, because Slurm does not pass
# this variable to health checks.
sdc_settings() {
  local file=${SDC_SETTINGS:-/etc/default/sdc}
  PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
  export PATH
  unset SDC_LEDGER                       # only the file may choose another ledger
  if [[ -r $file ]]; then
    # shellcheck disable=SC1090 # the host's own file
    source "$file"
  fi
  SDC=${SDC:-sdc}                        # the command, with its path if it is installed in a virtual environment
  SDC_STATE=${SDC_STATE:-/var/lib/sdc}   # folder of this host's ledger and run folders, on the host's own disk
  SDC_MAX_AGE=${SDC_MAX_AGE:-7d}         # an older result is INCONCLUSIVE
  SDC_DRAIN_ON=${SDC_DRAIN_ON:-FAIL}     # or "FAIL INCONCLUSIVE": verdicts that take a node out of service
  SDC_ASK_LIMIT=${SDC_ASK_LIMIT:-20}     # time limit in seconds for reading a verdict
  export SDC_STATE                       # sdc finds the ledger there
}

# sdc_log PRIORITY TEXT: logs to standard error, and to the system log if there is one.
sdc_log() {
  printf 'sdc[%s]: %s\n' "$1" "$2" >&2
  if [[ -S /dev/log ]]; then
    logger -t sdc -p "daemon.$1" -- "$2" || true
  fi
}

# sdc_ask [RUN]: runs `sdc verdict`, for the standing of this host by its ledger or for the result in RUN, and sets
# SDC_WORD to PASS, FAIL, INCONCLUSIVE or BROKEN, SDC_LINE to the line that it printed, and SDC_ENDED to the time of the
# result.
#
# The exit code alone is not enough: a Python that cannot start also ends with 1, so a bad upgrade would drain a whole
# cluster. BROKEN means that there is no verdict because of bad usage (2), or a missing (127), killed or late command.
sdc_ask() {
  local said code
  said=$(timeout --kill-after=2 "$SDC_ASK_LIMIT" "$SDC" verdict --max-age "$SDC_MAX_AGE" "$@" 2>&1)
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
        pattern='\(([0-9]{4}-[0-9T:.+-]+)(, [^()]*)?\)$'
        [[ $line =~ $pattern ]] && SDC_ENDED=${BASH_REMATCH[1]}
        ;;
    esac
  fi
}

# sdc_ask_after RUN CODE SAID: sets the same variables after a burn-in in RUN that ended with CODE and printed SAID: the
# gravest of what its result, the ledger and, if a full disk kept it from both, its output say counts, whatever the code.
# A rehearsal is in no ledger.
sdc_ask_after() {
  local run=$1 code=$2 said=$3 word line ended pattern=$'(^|\n)((SIMULATION  )?FAIL  host [^\n]*)'
  sdc_ask "$run"
  word=$SDC_WORD line=$SDC_LINE ended=$SDC_ENDED
  sdc_ask
  if [[ $SDC_WORD != FAIL ]] && [[ $word == FAIL || $word == INCONCLUSIVE && $SDC_WORD != BROKEN ]]; then
    SDC_WORD=$word SDC_LINE=$line SDC_ENDED=$ended
  fi
  if [[ $SDC_WORD != FAIL && $said =~ $pattern && " 1 124 137 143 " == *" $code "* ]]; then  # or ended at the limit
    SDC_WORD=FAIL SDC_LINE=${BASH_REMATCH[2]} SDC_ENDED=
  fi
  case $code:$SDC_WORD in
    *:FAIL | 0:* | 3:INCONCLUSIVE) ;;
    124:INCONCLUSIVE | 134:INCONCLUSIVE | 137:INCONCLUSIVE | 139:INCONCLUSIVE | 143:INCONCLUSIVE) ;; # killed
    *)
      SDC_WORD=BROKEN
      SDC_LINE="sdc burnin ended with $code: ${said##*$'\n'}"
      ;;
  esac
}

# sdc_drains: succeeds if the verdict in SDC_WORD takes a node out of service. BROKEN never does, and a burn-in does not
# drain its own node while it is under way.
sdc_drains() {
  [[ $SDC_WORD == INCONCLUSIVE && $SDC_LINE == *" is under way (PID "* ]] && return 1
  [[ $SDC_WORD != BROKEN && $SDC_WORD != PASS && " $SDC_DRAIN_ON " == *" $SDC_WORD "* ]]
}
