"""A schedule as lines for Slurm, or as documents for Kubernetes."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

from sdc.settings import SettingError

from .pairing import Schedule

PORT = 4321
IMAGE = "IMAGE"
"""Stands where the image is to be named."""


def srun_lines(schedule: Schedule, folder: str) -> Iterator[str]:
    """A script: the pairs of a round at the same time, and a round after the other.

    Args:
        schedule: pairs of host names, which need no quotes.
        folder: where the runs are written.

    Example:
        >>> from sdc.analysis.fleet.launching import srun_lines
        >>> from sdc.analysis.fleet.pairing import make_schedule
        >>> print(list(srun_lines(make_schedule(["a", "b"], 1), "pairs"))[-2])
        srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=a,b sdc pair --run pairs/round-1/a-b &
    """
    yield "#!/bin/sh"
    for note in schedule.notes:
        yield f"# {note}"
    for number, pairs in enumerate(schedule.rounds, start=1):
        rest = f"; resting: {' '.join(schedule.resting[number - 1])}" if schedule.resting[number - 1] else ""
        yield f"# round {number} of {len(schedule.rounds)}{rest}"
        for first, second in pairs:
            run = shlex.quote(f"{folder}/round-{number}/{first}-{second}")
            start = f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist={first},{second}"
            yield f"{start} sdc pair --run {run} &"
        yield "wait"


def jobset_lines(schedule: Schedule, folder: str, image: str = IMAGE) -> Iterator[str]:
    """A JobSet (jobset.x-k8s.io/v1alpha2) for each pair, as YAML documents in JSON's form.

    Those of all rounds but the first are suspended: resume a round when the one before it has ended.

    Args:
        schedule: pairs of names of nodes.
        folder: where the runs are written, in the containers.
        image: that they run.

    Raises:
        SettingError: a name is none of a node.
    """
    for pairs in schedule.rounds:
        for name in (name for pair in pairs for name in pair):
            if name != name.lower() or len(name) > 63:
                raise SettingError("HOSTS", name, "expected nodes of Kubernetes: lower case, 63 letters at most")
    for note in schedule.notes:
        yield f"# {note}"
    for number, pairs in enumerate(schedule.rounds, start=1):
        label = f"jax-sdc/round={number}"
        for place, pair in enumerate(pairs, start=1):
            yield "---"
            yield json.dumps(_jobset(number, place, pair, f"{folder}/round-{number}/{'-'.join(pair)}", image), indent=1)
        yield f"# kubectl wait --for=condition=Completed --timeout=-1s jobset -l {label}"
        if number < len(schedule.rounds):
            yield (
                f"# kubectl get jobset -l jax-sdc/round={number + 1} -o name | xargs -n 1 -I NAME "
                """kubectl patch NAME --type=merge -p '{"spec":{"suspend":false}}'"""
            )


def _jobset(number: int, place: int, pair: tuple[str, str], run: str, image: str) -> dict[str, Any]:
    name = f"pair-{number}-{place}"
    coordinator = f"{name}-first-0-0.{name}:{PORT}"

    def job(role: str, process: int) -> dict[str, Any]:
        flags = ["--run", run, "--coordinator", coordinator, "--processes", "2", "--process", str(process)]
        pod = {
            "restartPolicy": "Never",
            "nodeSelector": {"kubernetes.io/hostname": pair[process]},
            "containers": [{"name": "pair", "image": image, "command": ["sdc", "pair", *flags]}],
        }
        spec = {"backoffLimit": 0, "parallelism": 1, "completions": 1, "template": {"spec": pod}}
        return {"name": role, "replicas": 1, "template": {"spec": spec}}

    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"jax-sdc/round": str(number)}},
        "spec": {
            "suspend": number > 1,
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [job("first", 0), job("second", 1)],
        },
    }
