"""The bundle for the vendor: `bundle.tar.gz`, with evidence, environment and a standalone program that shows the fault.

README.txt         the finding in words, and how to see it again
report.html        the page of the burn-in, if there is one
manifest.json      contents, checksums and cases; sealed by a checksum of its own
result.json        the result; its findings hold the first differing elements of every workload
events.jsonl       the log of the burn-in
environment.json   versions, flags, devices
programs/ inputs/ expected/    for each case: the program as StableHLO, its inputs, and the right outputs
found/             for each case: flat indices (i0, i1, ...) and values (a0, a1, ...) of the wrong elements
reproduce.py       reruns the cases; needs the packages in requirements.txt, but not jax-sdc

A bundle is small: of the workloads of a family that differed on a device, it has a few.
"""

import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..records import AnyPath, package_version, to_json, write_bytes
from ..results import counted
from ..schema import PAGE
from . import reproduce
from .programs import Programs, bits_of
from .results import EVENTS, RESULT, BurninResult, Finding
from .rounds import Kept
from .workloads import BurninWorkload

LARGEST = 2**28  # maximum size of the inputs of a case, in bytes
# Packages that let JAX use an accelerator.
PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-rocm7-plugin")
RETENTION = 1.0  # seconds between writing a buffer and reading it, in cases that test retention
WITNESSES = 3  # cases of a family of workloads on a device
RECUR = ("persistent", "intermittent", "transient", None)
MOST = 19 * 10**6  # bytes of all files, except that the first case is never left out


def write_bundle(
    path: AnyPath,
    result: BurninResult,
    programs: Programs,
    workloads: Sequence[BurninWorkload],
    kept: Mapping[str, Kept],
) -> list[str]:
    """Writes the bundle of a burn-in with findings, atomically; returns the names of the cases that can be rerun.

    The folder of `path` holds the result and the log of the burn-in; `kept` holds the outputs of the first finding of
    each workload.
    """
    files: dict[str, bytes] = {}
    folder = Path(path).parent
    for name in (RESULT, EVENTS, PAGE):
        if (folder / name).exists():
            files[name] = (folder / name).read_bytes()
    variables = {name: os.environ[name] for name in reproduce.FLAGS if name in os.environ}
    files["environment.json"] = _json({"environment": result.environment, "variables": variables})
    # Packages that the reproducer needs, with their versions on this host: the versions of JAX determine the bits.
    accelerators = [name for name in PLUGINS if package_version(name) != "not installed"]
    needed = ["jax", "jaxlib", *accelerators, "numpy", "flatbuffers"]
    files["requirements.txt"] = "".join(f"{name}=={package_version(name)}\n" for name in needed).encode()
    files["reproduce.py"] = Path(reproduce.__file__).read_bytes()
    known = {workload.name: workload for workload in workloads}
    cases: list[dict[str, Any]] = []
    for finding in _witnesses(result.findings, known, programs):
        workload = dataclasses.replace(known[finding.workload], seed=finding.seed)
        case, its = _case(workload, finding, kept.get(workload.name, Kept(finding, None, None)), programs)
        if not cases or sum(map(len, [*files.values(), *its.values()])) <= MOST:
            files |= its
            cases.append(case)
    files["README.txt"] = _readme(result, [case["name"] for case in cases]).encode()
    manifest: dict[str, Any] = {
        "format": "jax-sdc bundle",
        "schema": 1,
        "id": result.id,
        "host": result.host,
        "simulated": result.simulated,
        "platform": programs.devices[0].platform,
        "kind": programs.devices[0].device_kind,
        "devices": len(programs.devices),
        "versions": {name: package_version(name) for name in ("jax-sdc", "jax", "jaxlib", "numpy")},
        "variables": variables,
        "cases": cases,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())},
    }
    manifest = to_json(manifest)
    manifest["seal"] = reproduce.seal(manifest)
    plain = io.BytesIO()
    # Archives contain no times or users, so equal files yield equal archives.
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, content in {"manifest.json": _json(manifest), **files}.items():
            entry = tarfile.TarInfo(f"bundle/{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    write_bytes(path, gzip.compress(plain.getvalue(), mtime=0))
    return [case["name"] for case in cases if case["program"]]


def _witnesses(
    findings: Sequence[Finding], known: Mapping[str, BurninWorkload], programs: Programs
) -> Iterator[Finding]:
    """Yields the first findings of a few workloads of each family on each device: of those that recur most, the ones
    with the least data."""

    def size(finding: Finding) -> int:
        return sum(np.asarray(each).nbytes for each in jax.tree.leaves(programs.host(known[finding.workload])))

    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.workload, finding)
    groups: dict[Any, list[Finding]] = {}
    for finding in sorted(first.values(), key=lambda one: RECUR.index(one.persistence)):
        groups.setdefault((finding.devices, known[finding.workload].family), []).append(finding)
    chosen = [sorted(group[: 2 * WITNESSES], key=size)[:WITNESSES] for group in groups.values()]
    for group in itertools.zip_longest(*chosen):
        yield from filter(None, group)


def _readme(result: BurninResult, cases: Sequence[str]) -> str:
    workloads = len({finding.workload for finding in result.findings})
    lines = [
        "SIMULATION: the faults were simulated; this hardware is not known to be faulty.\n" if result.simulated else "",
        f"{result.headline}: {result.host.name}, {result.created}\n",
        *(f"- {sentence}" for sentence in result.sentences),
        f"\n{counted(workloads, 'workload')} differed. Programs and data of {len(cases)} of them are in this bundle:\n",
        *(f"- {name}" for name in cases),
        "\nTo see whether a device computes them right:\n",
        "    python -m venv v && v/bin/pip install -r requirements.txt",
        "    v/bin/python reproduce.py --runs 100        # 0: all bits right, 1: some wrong, 3: not comparable\n",
        "report.html shows what was checked; result.json has the first wrong elements of every workload.",
    ]
    return "\n".join(filter(None, lines)) + "\n"


def _case(
    workload: BurninWorkload, first: Finding, kept: Kept, programs: Programs
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns a case, and its files by name."""
    files: dict[str, bytes] = {}
    slug = "".join(c if c.isalnum() else "-" for c in workload.name)
    finding = kept.finding
    case: dict[str, Any] = {
        "name": slug, "workload": workload.name, "sentence": first.sentence, "devices": list(finding.devices),
        "multi": workload.multi, "way": workload.way, "wait": RETENTION if workload.way == "retention" else 0.0,
        "program": None, "missing": "", "right": {}, "expected": None, "expected_types": [], "inputs": None,
        "types": [], "outputs": 0,
    }  # fmt: skip
    # The right outputs of one device apply to other devices only if all devices should have equal outputs.
    if kept.sums is not None and finding.expected is not None:
        case["right"] = {"all" if workload.alike else str(finding.devices[0]): kept.sums[0]}
    if kept.outputs is not None:
        files[f"found/{slug}.npz"] = _wrong(*kept.outputs)
        if case["right"]:
            files[f"expected/{slug}.npz"] = _arrays({"a": kept.outputs[0]})
            case["expected"] = f"expected/{slug}.npz"
            case["expected_types"] = [str(array.dtype) for array in kept.outputs[0]]
    inputs = list(map(np.asarray, jax.tree.leaves(programs.host(workload))))
    if (size := sum(array.nbytes for array in inputs)) > LARGEST:
        case["missing"] = (
            f"its inputs have {size:,} bytes, more than a bundle can hold; run sdc burnin on the same host"
        )
        return case, files
    try:
        program, outputs = programs.exported(workload)
    except Exception as error:  # the program cannot be serialized
        case["missing"] = f"the program cannot be exported ({type(error).__name__}: {str(error)[:200]})"
        return case, files
    files[f"programs/{slug}.bin"] = program
    files[f"inputs/{slug}.npz"] = _arrays({"a": inputs})
    more = {
        "program": f"programs/{slug}.bin",
        "inputs": f"inputs/{slug}.npz",
        "types": [str(array.dtype) for array in inputs],
        "outputs": outputs,
    }
    return case | more, files


def _wrong(right: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> bytes:
    places = [np.flatnonzero(bits_of(x) != bits_of(y)) for x, y in zip(right, found, strict=True)]
    values = [y.reshape(-1)[at] for y, at in zip(found, places, strict=True)]
    return _arrays({"i": places, "a": values})


def _arrays(arrays: Mapping[str, Sequence[np.ndarray]]) -> bytes:
    """Serializes arrays by the beginning of their names; types unknown to NumPy are stored as integers of the same
    width."""
    file = io.BytesIO()
    plain = {
        f"{name}{k}": x if x.dtype.isbuiltin else x.view(f"u{x.dtype.itemsize}")
        for name, each in arrays.items()
        for k, x in enumerate(each)
    }
    np.savez_compressed(file, allow_pickle=False, **plain)
    return file.getvalue()


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(to_json(value), indent=1, allow_nan=False).encode() + b"\n"
