"""The bundle for the vendor: `bundle.tar.gz`, with evidence, environment and a standalone program that shows the fault.

manifest.json      contents, checksums and cases; sealed by a checksum of its own
result.json        the result; its findings hold the differing elements
events.jsonl       the log of the burn-in
environment.json   versions, flags, devices
programs/ inputs/ expected/ found/    for each case: the program as StableHLO, its inputs, right and wrong outputs
reproduce.py       reruns the cases; needs the packages in requirements.txt, but not jax-sdc
"""

import dataclasses
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..records import AnyPath, package_version, to_json, write_bytes
from . import reproduce
from .programs import Programs
from .results import EVENTS, RESULT, BurninResult, Finding
from .rounds import Kept
from .workloads import BurninWorkload

LARGEST = 2**28  # maximum size of the inputs of a case, in bytes
# Packages that let JAX use an accelerator.
PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-rocm7-plugin")
RETENTION = 1.0  # seconds between writing a buffer and reading it, in cases that test retention
CASES = 16  # maximum number of cases; a bundle has one for each workload with a difference


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
    for name in (RESULT, EVENTS):
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
    first: dict[str, Finding] = {}
    for finding in result.findings:
        first.setdefault(finding.workload, finding)
    cases = [
        _case(
            dataclasses.replace(known[name], seed=finding.seed),
            finding,
            kept.get(name, Kept(finding, None, None)),
            programs,
            files,
        )
        for name, finding in list(first.items())[:CASES]
    ]
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


def _case(
    workload: BurninWorkload, first: Finding, kept: Kept, programs: Programs, files: dict[str, bytes]
) -> dict[str, Any]:
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
        for name, arrays in zip(("expected", "found"), kept.outputs, strict=True):
            files[f"{name}/{slug}.npz"] = _arrays(arrays)
        if case["right"]:
            case["expected"] = f"expected/{slug}.npz"
            case["expected_types"] = [str(array.dtype) for array in kept.outputs[0]]
    inputs = list(map(np.asarray, jax.tree.leaves(programs.host(workload))))
    if (size := sum(array.nbytes for array in inputs)) > LARGEST:
        case["missing"] = (
            f"its inputs have {size:,} bytes, more than a bundle can hold; run sdc burnin on the same host"
        )
        return case
    try:
        program, outputs = programs.exported(workload)
    except Exception as error:  # the program cannot be serialized
        case["missing"] = f"the program cannot be exported ({type(error).__name__}: {str(error)[:200]})"
        return case
    files[f"programs/{slug}.bin"] = program
    files[f"inputs/{slug}.npz"] = _arrays(inputs)
    return case | {
        "program": f"programs/{slug}.bin",
        "inputs": f"inputs/{slug}.npz",
        "types": [str(array.dtype) for array in inputs],
        "outputs": outputs,
    }


def _arrays(arrays: Sequence[np.ndarray]) -> bytes:
    """Serializes arrays; types unknown to NumPy are stored as integers of the same width."""
    file = io.BytesIO()
    plain = {f"a{k}": x if x.dtype.isbuiltin else x.view(f"u{x.dtype.itemsize}") for k, x in enumerate(arrays)}
    np.savez_compressed(file, allow_pickle=False, **plain)
    return file.getvalue()


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(to_json(value), indent=1, allow_nan=False).encode() + b"\n"
