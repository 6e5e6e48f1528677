#!/usr/bin/env bash
# Plugin for node-problem-detector: 0 no problem, 1 problem, 2 unknown; prints one line for the condition's message.
#
# INCONCLUSIVE and a broken installation are unknown. Settings: see lib/ask.sh; also copy lib/, beside this folder.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib/ask.sh
source "$here/../lib/ask.sh" || exit 2
sdc_settings
sdc_ask
printf '%s\n' "${SDC_LINE:0:300}"
case $SDC_WORD in
  PASS) exit 0 ;;
  FAIL) exit 1 ;;
  *) exit 2 ;;
esac
