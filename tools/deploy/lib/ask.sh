# shellcheck shell=bash disable=SC2034 # variables for those who source it
# What the scripts of deploy/ have in common: settings, log, and the last verdict. Sourced, not run.

# Reads the settings of this host: a file of shell assignments, since Slurm gives its scripts no environment. Where
# slurm.conf is not where scontrol looks for it, `export SLURM_CONF=...` belongs there: health checks are not told it.
sdc_settings() {
  local file=${SDC_SETTINGS:-/etc/default/sdc}
  PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
  export PATH
  if [[ -r $file ]]; then
    # shellcheck disable=SC1090 # it is the host's own
    source "$file"
  fi
  SDC=${SDC:-sdc}                        # the command, with its path where it is in an environment of its own
  SDC_STATE=${SDC_STATE:-/var/lib/sdc}   # results of this host, a folder of run folders on its own disk
  SDC_MAX_AGE=${SDC_MAX_AGE:-7d}         # an older result says nothing
  SDC_DRAIN_ON=${SDC_DRAIN_ON:-FAIL}     # or "FAIL INCONCLUSIVE": verdicts that take a node out of service
  SDC_ASK_LIMIT=${SDC_ASK_LIMIT:-20}     # seconds that the last verdict may take to read
}

# sdc_log PRIORITY TEXT: to standard error, and to the system's log where there is one.
sdc_log() {
  printf 'sdc[%s]: %s\n' "$1" "$2" >&2
  if [[ -S /dev/log ]]; then
    logger -t sdc -p "daemon.$1" -- "$2" || true
  fi
}

# sdc_ask WORDS...: runs `sdc verdict WORDS...` and sets SDC_WORD to PASS, FAIL, INCONCLUSIVE or BROKEN, SDC_LINE to the
# line that it printed, and SDC_ENDED to the time of the result.
#
# The exit code alone is not believed: a Python that cannot start ends with 1 too, and a bad upgrade would drain a whole
# cluster. BROKEN is everything that is no verdict: usage (2), a missing command (127), a killed or late one.
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

# sdc_drains: whether the verdict in SDC_WORD takes a node out of service. What is broken never does.
sdc_drains() {
  [[ $SDC_WORD != BROKEN && $SDC_WORD != PASS && " $SDC_DRAIN_ON " == *" $SDC_WORD "* ]]
}
