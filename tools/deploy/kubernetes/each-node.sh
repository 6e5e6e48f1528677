#!/usr/bin/env bash
# Starts one burn-in on each node that a selector matches. Each node has a separate Job, so a FAIL fails only that Job.
#
#   each-node.sh SELECTOR IMAGE KUBECTL_IMAGE DEVICES
#   each-node.sh pool=gpu REGISTRY/jax-sdc:TAG REGISTRY/kubectl:TAG 8
#
# IMAGE is built from container/Containerfile; KUBECTL_IMAGE has a shell and kubectl.
set -euo pipefail
if (($# != 4)); then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
kubectl get nodes --selector "$1" --output name | while IFS= read -r node; do
  sed -e "s|__NODE__|${node#node/}|g" -e "s|__IMAGE__|$2|g" -e "s|__KUBECTL_IMAGE__|$3|g" -e "s|__DEVICES__|$4|g" \
    "$here/burnin-job.yaml" | kubectl create --filename -
done
