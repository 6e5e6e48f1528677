#!/usr/bin/env bash
# Nagios plugin: 0 OK, 2 CRITICAL, 3 UNKNOWN.
#
# `sdc verdict --format nagios` prints the same line and maps verdicts in the same way, but bad usage exits with 2
# (CRITICAL), and a Python that cannot start exits with 1 (WARNING). This wrapper reports both as UNKNOWN.
# Settings: see lib/ask.sh.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib/ask.sh
source "$here/../lib/ask.sh" || exit 3
sdc_settings
sdc_ask
line=${SDC_LINE//|//} # a bar starts performance data
case $SDC_WORD in
  PASS) printf 'SDC OK - %s\n' "$line" && exit 0 ;;
  FAIL) printf 'SDC CRITICAL - %s\n' "$line" && exit 2 ;;
  *) printf 'SDC UNKNOWN - %s\n' "$line" && exit 3 ;;
esac
