#!/bin/sh
# Sets the label and the taint of a node from a verdict; runs in any image that has kubectl and a shell.
#
#   node-verdict.sh begin    before the burn-in: the verdict is INCONCLUSIVE until the burn-in ends
#   node-verdict.sh FILE     after the burn-in: FILE is what burnin.sh wrote
#
# The label sdc.verdict holds the last verdict, and annotations hold its details. A FAIL sets the taint
# sdc.verdict=FAIL:NoSchedule, which stays until a person removes it or, if SDC_UNTAINT is yes, until a PASS, for which a
# person must have acknowledged the FAIL. NODE_NAME is the name of the node.
# Exit codes: 0 PASS, 1 FAIL, 2 no verdict, 3 INCONCLUSIVE, 4 refused by the API server.
word=INCONCLUSIVE
simulated=false
ended=
line='a burn-in has begun but not ended'
if [ "$1" != begin ]; then
  if [ -r "$1" ]; then
    {
      read -r word
      read -r simulated
      read -r ended
      read -r line
    } <"$1"
  else
    word=BROKEN
    line="the burn-in wrote no result ($1 is missing)"
  fi
fi
label=$word
[ "$word" = BROKEN ] && label=INCONCLUSIVE # an unchecked node is not clean
if [ "$word" = FAIL ]; then
  kubectl taint node "$NODE_NAME" sdc.verdict=FAIL:NoSchedule --overwrite || exit 4
fi
kubectl annotate node "$NODE_NAME" --overwrite "sdc.reason=$line" "sdc.ended=$ended" || exit 4
kubectl label node "$NODE_NAME" --overwrite "sdc.verdict=$label" "sdc.simulated=$simulated" || exit 4
if [ "$word" = PASS ] && [ "$simulated" = false ] && [ "${SDC_UNTAINT:-no}" = yes ]; then
  kubectl taint node "$NODE_NAME" sdc.verdict:NoSchedule- || true # the node may have no taint
fi
echo "$word: $line"
[ "$1" = begin ] && exit 0
case $word in
  PASS) exit 0 ;;
  FAIL) exit 1 ;;
  INCONCLUSIVE) exit 3 ;;
  *) exit 2 ;;
esac
