"""Digest traces on disk: the fingerprint of every step of a run, for comparison with another run.

A trace is a run folder with two additional files:

    sites.json    the sites, in program order, with shapes and source lines
    trace.jsonl   one line per step: digests of all sites in hexadecimal, and the CRC-32 of these digests

The checksum distinguishes a damaged trace from a real difference. A trace belongs to its program: the manifest holds
the program's fingerprint, and traces of different programs are not compared, since instrumentation alone changes
low-order bits. Traces with digests of different algorithms are not compared either.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jaxtyping import UInt32

from sdc.records import RecordError

from ..program import Reports, Site
from ..records import STEPS, TRACE, AnyPath, Record, differences, names, read_json, read_record
from .digests import ALGORITHM
from .first_differences import FirstDifference, first_difference

SITES = "sites.json"
# Fields of the manifest that must be equal for two traces to be compared.
COMPARABLE = ("program", "digests", "environment", "data", "seed", "config", "mesh", "compiler_options")


class NotComparable(ValueError):
    """An error for two traces whose comparison would be meaningless."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace, read from its folder.

    Attributes:
        path: the run folder.
        manifest: contents of `manifest.json`.
        sites: the sites, in program order.
        shapes: shape of each site's digests.
        lines: encoded digests of each step.
        ended: whether the run that wrote the trace has ended.
    """

    path: epath.Path
    manifest: dict[str, Any]
    sites: tuple[Site, ...]
    shapes: tuple[tuple[int, ...], ...]
    lines: Mapping[int, Mapping[str, Any]]
    ended: bool

    def __getitem__(self, step: int) -> Reports[Any]:
        """Returns the digests of a step, as `fingerprint` returned them."""
        sizes = [math.prod(shape) for shape in self.shapes]
        try:
            words = decode(self.lines[step], sum(sizes))
        except ValueError as error:
            raise RecordError(
                f"{self.path / TRACE}: the digests of step {step} are damaged ({error}); trace that run again"
            ) from error
        parts = np.split(words, np.cumsum(sizes)[:-1])
        return Reports(self.sites, [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)])


@dataclasses.dataclass(frozen=True)
class TraceDifference:
    """The result of comparing two traces.

    Attributes:
        steps: the steps that both traces have, in order, up to the first one that differs.
        step: the first step that differs, or None.
        first: the first difference in that step, or None.
    """

    steps: tuple[int, ...]
    step: int | None
    first: FirstDifference | None


class TraceWriter:
    """Writes the trace of any step function; use it as a context manager."""

    def __init__(self, path: AnyPath, manifest: Mapping[str, Any], *, at: int | None = None) -> None:
        """Creates a run folder, or resumes the trace in an existing one.

        Args:
            path: folder, which must not contain a run unless `at` is given.
            manifest: description of the run. Two traces can be compared only if they have the same `program` (the
                program's fingerprint) and, where given, the same `environment`, `data`, `seed`, `config` and `mesh`.
            at: step at which to resume the trace in that folder; later steps are dropped.

        Raises:
            RecordError: the folder contains a run although `at` is not given, contains none although `at` is given, or
                cannot be written.
            ValueError: the manifest has no `program`.
        """
        if not manifest.get("program"):
            raise ValueError(
                "a manifest needs the fingerprint of its program; add {'program': program_fingerprint(...)}"
            )
        whole = {**manifest, "kind": "trace", "digests": ALGORITHM}
        self.record = Record.create(path, whole) if at is None else Record.resume(path, whole, at=at)
        self._listed = False

    def add(self, step: int, digests: Reports[Any], **row: Any) -> None:
        """Appends the digests of a step, and adds the values in `row`, such as the loss, to the step's line in
        `steps.jsonl`."""
        if not self._listed:
            self.record.file(SITES, sites_table(digests))
            self._listed = True
        self.record.line({"step": step, **row}, [encode(step, digests)])

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self.record:
            if kind is None:
                reason = "a trace alone contains no comparison"
                self.record.finish({"verdict": None, "reason": reason, "steps": self.record.count})


def sites_table(digests: Reports[Any]) -> dict[str, Any]:
    """Computes the contents of `sites.json` from digests, or from the shapes of digests; `Record.file` writes the
    file."""
    rows = [
        {
            **{name: value for name, value in vars(site).items() if name not in ("outputs", "inputs", "products")},
            "outputs": [{"shape": x.shape, "dtype": str(x.dtype)} for x in site.outputs],
            "digests": np.shape(value),
        }
        for site, value in zip(digests.sites, digests.values(), strict=True)
    ]
    return {"sites": rows}


def encode(step: int, digests: Reports[Any]) -> dict[str, Any]:
    words = (np.asarray(value, "<u4").tobytes() for value in digests.values())
    return {"step": step, "digests": b"".join(words).hex()}


def decode(line: Mapping[str, Any], size: int) -> UInt32[np.ndarray, "size"]:
    payload = bytes.fromhex(str(line.get("digests")))
    if len(payload) != 4 * size:
        raise ValueError(f"{len(payload) // 4} words, expected {size}")
    return np.frombuffer(payload, "<u4").astype(np.uint32)


def read_trace(path: AnyPath) -> Trace:
    """Reads the trace in a run folder, whether or not the run has ended; digests are decoded on access.

    Raises:
        RecordError: the folder contains no trace, or a damaged one.
    """
    run = read_record(path, "trace")
    if run.summary is not None and run.summary.get("steps") != len(run.lines):
        raise RecordError(
            f"{run.path} has {len(run.lines)} steps, but its summary states {run.summary.get('steps')}; "
            "trace that run again"
        )
    if SITES not in names(run.path):
        what = f"lacks {SITES}; trace that run again" if run.lines else "contains no steps yet; wait for the first step"
        raise RecordError(f"{run.path} {what}")
    known = {row["step"] for row in run.lines}  # a crash can leave behind digests of a step without a row
    lines = {line["step"]: line for line in run.details if line["step"] in known}
    if missing := sorted(known - lines.keys()):
        raise RecordError(f"{run.path / TRACE} lacks step {missing[0]}, although {STEPS} has it; trace that run again")
    sites, shapes = _read_sites(run.path / SITES)
    return Trace(run.path, run.manifest, sites, shapes, dict(sorted(lines.items())), run.ended)


def _read_sites(path: epath.Path) -> tuple[tuple[Site, ...], tuple[tuple[int, ...], ...]]:
    try:
        rows = read_json(path)["sites"]
        sites = tuple(_read_site(row) for row in rows)
        return sites, tuple(tuple(map(int, row["digests"])) for row in rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path} is damaged ({error!r}); trace that run again") from error


def _read_site(row: Mapping[str, Any]) -> Site:
    values: dict[str, Any] = {key: value for key, value in row.items() if key not in ("outputs", "digests")}
    values |= {key: tuple(values[key]) for key in ("dims", "trips", "order")}
    values["mesh"] = tuple((str(axis), int(size)) for axis, size in values["mesh"])
    # PRNG keys have no dtype that can be parsed; the dtype of their data is used instead.
    dtypes = (np.uint32 if x["dtype"].startswith("key<") else jax.numpy.dtype(x["dtype"]) for x in row["outputs"])
    shapes = (tuple(x["shape"]) for x in row["outputs"])
    return Site(**values, outputs=tuple(map(jax.ShapeDtypeStruct, shapes, dtypes)))


def check_comparable(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Checks that the manifests of two traces permit a comparison of the traces.

    Raises:
        NotComparable: the manifests differ in a field that must be equal.
    """
    found = differences([{key: manifest.get(key) for key in COMPARABLE} for manifest in (a, b)])
    if found:
        raise NotComparable(
            "these traces cannot be compared, since a difference between them would be meaningless:\n  "
            + "\n  ".join(each.describe(("one has", "the other")) for each in found)
            + "\ntrace both runs with the same program, versions, data and seed"
        )


def diff(a: Trace, b: Trace) -> TraceDifference:
    """Compares two traces step by step, up to the first difference.

    Raises:
        NotComparable: programs, environments, data or seeds differ, the traces have no common step, or both are the
            same trace.
        RecordError: a line is damaged.
    """
    if a.path.resolve() == b.path.resolve():
        raise NotComparable(f"{a.path} would be compared with itself; give two different traces")
    check_comparable(a.manifest, b.manifest)
    steps = [step for step in a.lines if step in b.lines]
    if not steps:
        raise NotComparable(f"{a.path} and {b.path} have no step in common; trace the same steps in both")
    done: list[int] = []
    for step in steps:
        done.append(step)
        first = first_difference(a[step], b[step])
        if first is not None:
            return TraceDifference(tuple(done), step, first)
    return TraceDifference(tuple(done), None, None)
