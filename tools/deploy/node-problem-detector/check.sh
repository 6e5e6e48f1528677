#!/usr/bin/env bash
# Plugin of node-problem-detector: 0 no problem, 1 problem, 2 unknown; one short line for the condition's message.
#
# Ours are 0 PASS, 1 FAIL, 2 usage, 3 INCONCLUSIVE. All that is neither PASS nor FAIL is unknown here, a broken
# installation too. Settings: see lib/ask.sh. Copy lib/ along: it is looked for beside this file's folder.
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib/ask.sh
source "$here/../lib/ask.sh" || exit 2
sdc_settings
sdc_ask --max-age "$SDC_MAX_AGE" "$SDC_STATE"
printf '%s\n' "${SDC_LINE:0:300}"
case $SDC_WORD in
  PASS) exit 0 ;;
  FAIL) exit 1 ;;
  *) exit 2 ;;
esac
