"""Types that describe files: the header of every file, and the fields of a record's manifest, lines and summary.

A file states its format, the version of the format, and its writer: the host, the process, and the version of jax-sdc.
The declaration of each field describes the field; the published schema and the tables of the documentation are
generated from these descriptions.
"""

import datetime
import functools
import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from . import __version__
from .verdict import Verdict

T = TypeVar("T")
PAGE = "report.html"  # name of the page beside a record or a result
# A measured number or count; `null` if not measured. NaN and infinity are strings in files, and numbers when read.
Number: TypeAlias = int | float | None
Numbers: TypeAlias = Number | list[Number]  # one number for each twin, or a single number


def about(text: str, *, ge: int | None = None, le: int | None = None) -> msgspec.Meta:
    """Describes a field in Markdown, for the published schema and the tables of the documentation."""
    return msgspec.Meta(description=text, ge=ge, le=le)


class Fields(msgspec.Struct, gc=False):  # trees without cycles; a long record has millions of them
    """A JSON object in a file. Fields that the object's type does not declare are allowed."""


def now() -> str:
    """Returns the current time in UTC, rounded down to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Host(Fields, kw_only=True):
    """A process and the machine on which it runs; none of the fields reveals a secret."""

    name: Annotated[str, about("host name")]
    machine: Annotated[
        str | None,
        about("hash of the machine's identity, which does not reveal the identity; `null` if the machine has none"),
    ] = None
    boot: Annotated[str | None, about("identifier of this boot of the system; `null` if unknown")] = None
    pid: Annotated[int | None, about("process number (PID) on that host")] = None
    process: Annotated[int | None, about("index of the process in the run, from 0")] = None


def identify() -> Host:
    """Identifies the calling process and its host.

    Returns:
        Host name, hash of the machine's identity, identifier of this boot of the system, process number, and the index
        of the process in a run of several processes. Finding the index neither imports nor starts JAX.
    """
    # Only a process that has joined others has an index other than 0, and in such a process reading the index starts no
    # devices.
    jax = sys.modules.get("jax")
    process = int(jax.process_index()) if jax is not None and jax.distributed.is_initialized() else 0
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    return Host(name=platform.node(), machine=_machine(), boot=boot, pid=os.getpid(), process=process)


@functools.cache
def package_version(package: str) -> str:
    """Returns the version of an installed distribution, or `not installed`."""
    if package == "jax-sdc":  # the metadata of an editable installation may be older than its files
        return __version__
    from importlib import metadata  # imports `email`, for which `sdc verdict` need not wait

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _machine() -> str | None:
    """Hashes the machine's identity with the application's name, because systemd asks not to expose the identity."""
    found = _first_line("/etc/machine-id") or _first_line("/var/lib/dbus/machine-id")
    return None if found is None else hashlib.sha256(f"jax-sdc {found}".encode()).hexdigest()[:16]


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").partition("\n")[0] or None
    except OSError:
        return None


class Header(Fields, kw_only=True, tag_field="format"):
    """The header of a file: its format (the `tag` of its type), the version of the format, and the writer."""

    schema: Annotated[int, about("version of this layout, 1")] = 1
    version: Annotated[str, about("version of jax-sdc that wrote the file")] = msgspec.field(
        default_factory=lambda: package_version("jax-sdc")
    )
    host: Annotated[Host, about("process and host that wrote the file")] = msgspec.field(default_factory=identify)


def stamp(format: str = "jax-sdc output", *, lasting: bool = False) -> dict[str, Any]:
    """Returns the first fields of every JSON output: format, its version, the version of jax-sdc, and the writer.

    Args:
        format: name of the format.
        lasting: whether to omit the fields that differ between processes, so that equal results give equal files.

    Returns:
        `format`, `schema`, `version` and `host`, to be merged into the output.
    """
    host: dict[str, Any] = msgspec.to_builtins(identify())
    if lasting:
        host = {key: host[key] for key in ("name", "machine")}
    return {"format": format, "schema": 1, "version": package_version("jax-sdc"), "host": host}


LAST = 10**15  # the largest number that a line can have; no run reaches it


class Counts(Fields, kw_only=True):
    """Elements compared outside sites."""

    checked: Annotated[
        Number, about("number of elements compared with the reference, not counting the reference itself")
    ] = None
    mismatched: Annotated[Number, about("number of elements with at least one bit that differs from the reference")] = (
        None
    )


class SiteCounts(Counts, kw_only=True):
    """Counts of a site's elements, summed over twins, ranks, microsteps and layers."""

    zero_reference: Annotated[
        Number, about("number of mismatched elements that are zero on the reference and finite on the suspect")
    ] = None
    nonfinite: Annotated[
        Number, about("number of mismatched elements that are NaN or infinite on the reference or the suspect")
    ] = None
    undecided: Annotated[
        Number,
        about("number of ranks on which three or more twins had no majority, so the reference was a guess"),
    ] = None
    unrepeated: Annotated[
        Number,
        about(
            "how often this site's digest was the first to differ in a microstep or step whose repetition found no "
            "mismatch; absent if digests are exchanged at each probe"
        ),
    ] = None
    injected: Annotated[Number, about("number of elements that a simulated fault changed: the ground truth")] = None
    frequency: Annotated[
        Number,
        about("mismatch frequency by equation (2), also averaged over microsteps; `null` if nothing was checked"),
    ] = None
    severity: Annotated[
        Number, about("mismatch severity by equation (4), maximum over microsteps; `null` if undefined")
    ] = None


class RankRow(Fields, kw_only=True):
    """A device that differs from the reference."""

    twin: Annotated[Number, about("number of the twin")] = None
    data: Annotated[Number, about("rank of the device on the mesh axis `data`")] = None
    model: Annotated[Number, about("rank of the device on the mesh axis `model`")] = None
    mismatched: Annotated[Number, about("number of elements with at least one bit that differs")] = None
    unrepeated: Annotated[
        Number,
        about(
            "how often the device's digest was the first to differ although the repetition found no mismatch; "
            "absent if never"
        ),
    ] = None
    relative_mean: Annotated[
        Number, about("mean relative difference of the mismatched elements; `null` if no element enters the mean")
    ] = None
    relative_max: Annotated[Number, about("largest relative difference")] = None


class TwinCounts(Counts, kw_only=True):
    """Results of comparing the twins' whole state or gradient after a step."""

    undecided: Annotated[Number, about("number of ranks on which three or more twins had no majority; absent if 0")] = (
        None
    )
    ranks: Annotated[
        list[RankRow],
        about("`twin`, `data`, `model` and `mismatched` of each device that differs; absent if there are none"),
    ] = []


class OperationPlace(Fields, kw_only=True):
    """An operation, its location in the program, and the iteration in which it ran."""

    site: Annotated[str | None, about("name of the operation")] = None
    operation: Annotated[str | None, about("primitive of the operation")] = None
    direction: Annotated[str | None, about("direction of the operation, such as `fwd`")] = None
    scope: Annotated[str | None, about("name stack of the operation")] = None
    source: Annotated[str | None, about("source line of the program")] = None
    iteration: Annotated[list[int], about("iteration of each enclosing loop, outermost first")] = []
    layer: Annotated[int | None, about("number of the layer, if the operation is in a loop over layers")] = None


class DifferencePlace(OperationPlace, kw_only=True):
    """The first difference between two traces."""

    step: Annotated[int | None, about("number of the step")] = None
    devices: Annotated[
        list[dict[str, int]], about("devices that differ at this place, each given by its index on every mesh axis")
    ] = []
    outputs: Annotated[list[int], about("numbers of the operation's outputs that differ")] = []


class OperationCounts(OperationPlace, kw_only=True):
    """Field `operations` of a step, for twins that digest each operation: counts and the first difference."""

    checked: Annotated[Number, about("number of digests compared")] = None
    mismatched: Annotated[Number, about("number of digests that differ; absent if 0")] = None
    agreeing: Annotated[Number, about("number of digests before the first difference")] = None
    undecided: Annotated[bool | None, about("whether three or more twins had no majority")] = None
    ranks: Annotated[
        list[dict[str, int]],
        about("devices on which the first difference occurs, each given by its index on every mesh axis"),
    ] = []


class ProductCounts(Fields, kw_only=True):
    """Counts of the rows of checked matrix products."""

    checked: Annotated[Number, about("number of rows checked")] = None
    examined: Annotated[Number, about("number of rows that the first tier passed on to the second")] = None
    flagged: Annotated[Number, about("number of rows flagged")] = None
    confirmed: Annotated[Number, about("number of flagged rows that were correct when recomputed")] = None
    corrected: Annotated[Number, about("number of rows corrected")] = None
    nonfinite: Annotated[Number, about("number of rows that are not finite")] = None
    margin: Annotated[Number, about("largest margin in the last tier")] = None
    first_margin: Annotated[Number, about("largest margin in the first tier")] = None


class SkippedProduct(Fields, kw_only=True):
    """A matrix product that could not be checked."""

    site: Annotated[str | None, about("name of the product")] = None
    source: Annotated[str | None, about("source line of the program")] = None
    reason: Annotated[str | None, about("reason why the product was not checked")] = None
    share: Annotated[Number, about("the product's share of the step's floating-point operations")] = None


class FlagRow(Fields, kw_only=True):
    """A matrix product with flagged rows, on one rank, in one microstep and layer."""

    site: Annotated[str | None, about("name of the product")] = None
    twin: Annotated[Number, about("number of the twin")] = None
    data: Annotated[Number, about("data-parallel rank")] = None
    model: Annotated[Number, about("tensor-parallel rank")] = None
    microstep: Annotated[Number, about("number of the microstep")] = None
    layer: Annotated[Number, about("number of the layer")] = None
    flagged: Annotated[Number, about("number of rows flagged")] = None
    confirmed: Annotated[Number, about("number of flagged rows that were correct when recomputed")] = None
    corrected: Annotated[Number, about("number of rows corrected")] = None
    margin: Annotated[Number, about("largest margin")] = None
    wrong: Annotated[Number, about("number of wrong elements that were located")] = None
    elements: Annotated[list[int] | None, about("flat indices of the first wrong elements")] = None
    errors: Annotated[list[Number] | None, about("errors of these elements")] = None


class CheckedProducts(ProductCounts, kw_only=True):
    """Counts of the checked matrix products, in total and for each product."""

    coverage: Annotated[Number, about("checked share of the products' work; the minimum over all steps")] = None
    skipped: Annotated[list[SkippedProduct], about("products that could not be checked")] = []
    sites: Annotated[dict[str, ProductCounts], about("the same counts for each product")] = {}


class ProductRow(CheckedProducts, kw_only=True):
    """Field `abft` of a step: counts, and details of the flagged rows."""

    rows: Annotated[
        list[FlagRow], about("one entry for each product, rank, microstep and layer with flagged rows")
    ] = []


class LossCost(Fields, kw_only=True):
    """The cost of losing part of the state."""

    fraction: Annotated[Number, about("share of the state that is lost")] = None
    steps: Annotated[Number, about("number of steps that the loss costs if only the lost part is restored")] = None
    one_rate: Annotated[
        Number, about("estimate of the cost by theorem 3.2, as if everything converged at one rate; `null` if unknown")
    ] = None
    perturbation: Annotated[Number, about("expected L2 norm of the change in the parameters")] = None


class SaveTimings(Fields, kw_only=True):
    """Median timings of the most recent saves."""

    held: Annotated[Number, about("seconds for which a save blocked training")] = None
    whole: Annotated[Number, about("additional seconds that a save of the whole state takes")] = None
    bandwidth: Annotated[Number, about("write bandwidth in bytes per second")] = None


class OutlookRow(Fields, kw_only=True):
    """Field `outlook` of a step: the predicted cost of losing part of the state."""

    step: Annotated[Number, about("number of steps done")] = None
    every: Annotated[Number, about("number of steps since the previous save")] = None
    c: Annotated[Number, about("factor by which the movement of the state shrinks per step; `null` if unknown")] = None
    distance: Annotated[Number, about("distance to the optimum, computed from `c`")] = None
    losses: Annotated[list[LossCost], about("cost of losing each fraction of the state")] = []
    rollback: Annotated[Number, about("mean number of steps that are lost if the whole state is rolled back")] = None
    bytes: Annotated[Number, about("total size of the blocks in bytes")] = None
    speeds: Annotated[
        list[Number], about("squared movement per step of each of 32 parts of the state, the fastest part first")
    ] = []
    timings: Annotated[
        SaveTimings | None, about("median timings of the most recent saves; `null` until three saves are done")
    ] = None


class Source(Fields, kw_only=True):
    """Shards that were restored from one source."""

    shards: Annotated[Number, about("number of shards")] = None
    bytes: Annotated[Number, about("total size of the shards in bytes")] = None


class RecoveryRow(Fields, kw_only=True):
    """Field `recovered` or `restarted` of a step: the lost part of the state, and its recovery."""

    simulated: Annotated[bool | None, about("whether the loss was simulated")] = None
    policy: Annotated[str | None, about("`partial` or `full`")] = None
    lost: Annotated[Number, about("number of blocks lost")] = None
    blocks: Annotated[Number, about("total number of blocks")] = None
    bytes: Annotated[Number, about("number of bytes lost")] = None
    read: Annotated[Number, about("number of bytes read")] = None
    behind: Annotated[Number, about("number of steps by which the oldest restored block is out of date")] = None
    initial: Annotated[Number, about("number of blocks that were never saved")] = None
    older: Annotated[Number, about("number of blocks whose newest version was damaged")] = None
    perturbation: Annotated[Number, about("L2 norm of the change in the parameters")] = None
    predicted: Annotated[LossCost | None, about("predicted cost: `steps` and `one_rate`")] = None
    step: Annotated[Number, about("the step from which a restarted run resumes")] = None
    steps_lost: Annotated[Number, about("number of steps that are repeated")] = None
    processes: Annotated[
        list[dict[str, Source]] | None,
        about(
            "for each process, the shards restored from its `own` copy, from its `peers` and from the "
            "`running` checkpoint"
        ),
    ] = None


class GuardFinding(Fields, kw_only=True):
    """Something that a guard found."""

    layer: Annotated[str | None, about("layer of evidence that found it")] = None
    step: Annotated[Number, about("number of the step")] = None
    what: Annotated[str | None, about("one sentence")] = None
    devices: Annotated[list[str], about("the devices on which it was found; empty if unknown")] = []
    proof: Annotated[bool | None, about("whether correct hardware cannot cause it; otherwise, it is a suspicion")] = (
        None
    )


class StepRow(Fields, kw_only=True):
    """A line of `steps.jsonl`: the results of one step."""

    step: Annotated[int, about("number of the step, from 0", ge=0, le=LAST)]
    loss: Annotated[Numbers, about("mean cross entropy in nats per token")] = None
    gradient_norm: Annotated[Numbers, about("L2 norm of the gradient before clipping")] = None
    learning_rate: Annotated[Numbers, about("learning rate of this step")] = None
    seconds: Annotated[
        Numbers, about("wall time of the step in seconds; the time of the first step includes compilation")
    ] = None
    sites: Annotated[
        dict[str, SiteCounts],
        about("for each site, the counts below; empty if nothing was compared or injected at probes"),
    ] = {}
    state: Annotated[
        TwinCounts | None,
        about(
            "`checked` and `mismatched` elements of parameters and optimizer state after the step, before any repair"
        ),
    ] = None
    gradient: Annotated[TwinCounts | None, about("`checked` and `mismatched` elements of the gradient")] = None
    gradient_difference: Annotated[
        Numbers, about("L2 norm of the difference from the reference's gradient, for each twin")
    ] = None
    noise_to_signal: Annotated[
        Numbers,
        about(
            "`gradient_difference` divided by the norm of the reference's gradient; equation (5) is the maximum over "
            "all steps"
        ),
    ] = None
    parameter_difference: Annotated[
        Numbers, about("L2 norm of the difference from the reference's parameters, before any repair")
    ] = None
    parameter_norm: Annotated[Numbers, about("L2 norm of the parameters")] = None
    operations: Annotated[
        OperationCounts | None,
        about(
            "for twins that digest each operation: the number of digests `checked` and, if any differ, the "
            "number `mismatched`, the place of the first difference (as in a trace) and the `ranks` that "
            "differ there"
        ),
    ] = None
    aggregation: Annotated[
        dict[str, Any] | None, about("statistics of the aggregation method; see [below](#aggregation-and-products)")
    ] = None
    abft: Annotated[
        ProductRow | None, about("counts of the checked products; see [below](#aggregation-and-products)")
    ] = None
    findings: Annotated[
        list[GuardFinding],
        about("what the guard reported during this step, which may concern an earlier `step`"),
    ] = []
    recovered: Annotated[
        RecoveryRow | None,
        about(
            "a loss after this step (`simulated`) and the recovery from it: the `policy`, the total number of "
            "`blocks` and the number `lost`, the `bytes` lost and `read`, the number of steps by which the "
            "oldest block is out of date (`behind`), the number of blocks that were never saved (`initial`) "
            "and of those whose newest version was damaged (`older`), the L2 norm of the change in the "
            "parameters (`perturbation`), and, if known, the `predicted` cost: `steps`, computed from the "
            "restored blocks, and `one_rate`, computed by theorem 3.2 (`null` if unknown)"
        ),
    ] = None
    outlook: Annotated[
        OutlookRow | None,
        about(
            "for steps that end with a save of a running checkpoint: the predicted cost of a loss just before the "
            "save; see [below](#what-a-loss-would-cost)"
        ),
    ] = None
    restarted: Annotated[
        RecoveryRow | None,
        about(
            "in the first line after all processes restarted and resumed from a running checkpoint: the "
            "fields of `recovered` for the real loss (without `perturbation`, since the lost values are "
            "unknown), the `step` from which the run resumes, `steps_lost`, and `processes`: for each "
            "process, the `shards` and `bytes` of its devices that were restored from its `own` copy, from "
            "its `peers` and from the `running` checkpoint (`processes` is absent if no host had a copy)"
        ),
    ] = None
    details: Annotated[int | None, about("number of this step's lines in the file of details; absent if 0")] = None
    discarded: Annotated[
        int | None, about("number of lines in `discarded.jsonl` when the line was written; absent if 0")
    ] = None


class MismatchRow(SiteCounts, kw_only=True):
    """A line of `mismatches.jsonl`, with the counts of one layer."""

    step: Annotated[int, about("number of the step, from 0", ge=0, le=LAST)]
    microstep: Annotated[Number, about("number of the microstep, from 0")] = None
    site: Annotated[str | None, about("name of the site")] = None
    layer: Annotated[Number, about("number of the layer, from 0")] = None
    frequency: Annotated[Number, about("mismatch frequency by equation (1); `null` if undefined")] = None
    severity: Annotated[Number, about("mismatch severity by equation (3); `null` if undefined")] = None
    relative_max: Annotated[Number, about("largest relative difference of an element")] = None
    ranks: Annotated[list[RankRow], about("one entry for each device that differs; see below")] = []


class DiscardedRow(StepRow, kw_only=True):
    """A line of `discarded.jsonl`: a line removed from `steps.jsonl`, with the mismatches of its step."""

    mismatches: Annotated[
        list[MismatchRow], about("lines that were removed from `mismatches.jsonl` with this line; absent if none were")
    ] = []


class TraceRow(Fields, kw_only=True):
    """A line of `trace.jsonl`: the digests of one step."""

    step: Annotated[int, about("number of the step, from 0", ge=0, le=LAST)]
    digests: Annotated[str, about("digests of all sites, concatenated as little-endian 32-bit words, in hexadecimal")]


class InjectionRow(Fields, kw_only=True):
    """A line of `injections.jsonl`: one injection and its outcome."""

    injection: Annotated[int, about("number of the injection, from 0", ge=0, le=LAST)]
    site: Annotated[str | None, about("name of the site that was struck")] = None
    operation: Annotated[str | None, about("primitive of that site")] = None
    phase: Annotated[
        str | None,
        about(
            "`fwd`, `bwd`, `remat`, `update` (outside the derivative, for example the optimizer) or `memory` "
            "(an argument of the step)"
        ),
    ] = None
    scope: Annotated[str | None, about("name stack of the operation, as set by `jax.named_scope`")] = None
    source: Annotated[str | None, about("source line of the operation")] = None
    dtype: Annotated[str | None, about("type of the struck value")] = None
    shape: Annotated[list[int] | None, about("shape of the struck value")] = None
    output: Annotated[int | None, about("index of the operation's output that was struck")] = None
    iteration: Annotated[list[int] | None, about("iteration of each enclosing loop, outermost first")] = None
    layer: Annotated[int | None, about("iteration of the innermost loop")] = None
    device: Annotated[dict[str, int] | None, about("index of the struck device on each mesh axis")] = None
    step: Annotated[int | None, about("the step that was struck")] = None
    fault: Annotated[str | None, about("kind of fault")] = None
    bits: Annotated[
        list[Any] | None, about("the bits that the fault changes, or `null` if the fault does not specify bits")
    ] = None
    field: Annotated[
        str | None, about("the part of the number that contains the bit: `sign`, `exponent` or `mantissa`")
    ] = None
    elements: Annotated[list[int] | None, about("flat indices of the first eight changed elements")] = None
    changed: Annotated[Number, about("number of changed elements")] = None
    old: Annotated[list[str] | None, about("bits of `elements` before the fault, in hexadecimal")] = None
    new: Annotated[list[str] | None, about("bits of `elements` after the fault, in hexadecimal")] = None
    outcome: Annotated[str | None, about("effect on training; see [campaign](campaign.md)")] = None
    followed: Annotated[Number, about("number of steps run after the struck one to observe the effect")] = None
    peak_excess: Annotated[Number, about("largest (loss − clean loss) / clean loss")] = None
    last_excess: Annotated[Number, about("(loss − clean loss) / clean loss at the last observed step")] = None
    detected: Annotated[
        dict[str, Number],
        about(
            "for each detector, the number of steps from the fault to its detection; `null` if the detector "
            "missed the fault"
        ),
    ] = {}
    visible_after: Annotated[
        Number, about("number of steps until the loss changed visibly; `null` if it never did")
    ] = None


class PartRow(Fields, kw_only=True):
    """A line of `parts.jsonl`: a finished part of a study."""

    part: Annotated[int, about("number of the part, from 0", ge=0, le=LAST)]
    what: Annotated[str, about("name of the experiment")]
    workload: Annotated[str, about("workload that the part trains; empty if it trains none")]
    start: Annotated[int | None, about("number of the initial state; `null` if the part covers all initial states")] = (
        None
    )
    seconds: Annotated[float | None, about("wall time of the part in seconds")] = None
    found: Annotated[dict[str, Any], about("results; `failed` holds the reason if there are none")]

    @property
    def failed(self) -> str | None:
        """Reason why the part has no results; None if it has results."""
        failed: str | None = self.found.get("failed")
        return failed

    def read(self, type: type[T]) -> T:
        """Returns the results, converted to the experiment's type."""
        return msgspec.convert(self.found, type)


class Perturbed(Fields, kw_only=True):
    """Costs of perturbing a run, and bounds on them: field `found` of the experiments `quadratic` and `resets`."""

    c: Annotated[float, about("factor by which errors shrink per iteration")]
    distance: Annotated[float, about("distance to the optimum at the start")]
    iterations: Annotated[float, about("number of iterations to convergence without a perturbation")]
    kappa: Annotated[float, about("upper bound on `iterations`")]
    after: Annotated[list[int], about("iterations after which training was perturbed")]
    sizes: Annotated[list[float], about("sizes of the perturbations")]
    bounds: Annotated[list[float], about("bounds of theorem 3.2")]
    costs: Annotated[list[float | None], about("number of additional iterations; `null` if training did not converge")]
    beyond: Annotated[list[float | None], about("number of iterations beyond `kappa`")]


class RecoveringRun(Fields, kw_only=True):
    """A training run that loses half of its state and recovers it."""

    losses: Annotated[list[float], about("loss after each iteration")]
    step_seconds: Annotated[float, about("median time of an iteration")]
    save_seconds: Annotated[float, about("median time of a checkpoint save")]
    saved_every: Annotated[int, about("number of iterations between saves")]
    fraction: Annotated[float, about("share of the bytes that a save writes")]
    bytes: Annotated[int, about("total size of the blocks in bytes")]


class Overhead(Fields, kw_only=True):
    """Wall time of checkpoint saves, and training with a failure: field `found` of the experiment `overhead`."""

    after: Annotated[int, about("iteration after which half of the state is lost")]
    undisturbed: Annotated[list[float], about("losses without a failure")]
    scar: Annotated[RecoveringRun, about("training with SCAR")] = msgspec.field(name="SCAR")
    traditional: Annotated[RecoveringRun, about("training with full checkpoints, which are restored as a whole")]

    @property
    def ways(self) -> dict[str, RecoveringRun]:
        return {"SCAR": self.scar, "traditional": self.traditional}


class Criterion(Fields, kw_only=True):
    """Convergence criteria: field `found` of the experiment `criterion`."""

    criteria: Annotated[list[float], about("losses at which training counts as converged")]
    iterations: Annotated[int, about("number of iterations until the last criterion is met")]
    interval: Annotated[
        int, about("number of iterations in which the partial saves together write the whole state once")
    ]
    blocks: Annotated[int, about("number of blocks")]
    source: Annotated[str, about("source of the data")]
    losses: Annotated[list[float], about("loss after each iteration, averaged over all initial states")]


class LossCosts(Fields, kw_only=True):
    """Costs of losing parts of the state."""

    costs: Annotated[
        list[float | None],
        about("number of additional iterations that each loss costs; `null` if training did not converge"),
    ]
    sizes: Annotated[list[float], about("sizes of the perturbations")]


class FailureCase(LossCosts, kw_only=True, omit_defaults=True):
    """A save policy and a kind of loss, with the costs of such losses."""

    policy: Annotated[str, about("how blocks are chosen for a save")]
    fraction: Annotated[float, about("share of the bytes that a save writes")]
    lost: Annotated[float, about("share of the blocks that a failure loses")]
    how: Annotated[str, about("how the lost blocks are chosen: `random` or `contiguous`")]
    predicted: Annotated[list[float | None], about("costs predicted before each loss; absent if not predicted")] = []
    one_rate: Annotated[
        list[float | None], about("costs predicted by theorem 3.2 before each loss; absent if not predicted")
    ] = []


class Failures(Fields, kw_only=True):
    """Costs of failures during training: field `found` of the experiment `failures`."""

    iterations: Annotated[list[float], about("number of iterations until each criterion is met without a failure")]
    after: Annotated[list[int], about("iterations after which failures occur")]
    cases: Annotated[list[FailureCase], about("save policies and kinds of losses")]
    full: Annotated[LossCosts, about("costs if the whole state is restored")]
    busiest: Annotated[
        float, about("share of the squared movement that is due to the fastest-moving eighth of the blocks")
    ]


class Environment(Fields, kw_only=True):
    """Properties that must be equal for bits to be comparable."""

    python: Annotated[str | None, about("version of Python")] = None
    packages: Annotated[dict[str, str], about("versions of the libraries that affect results")] = {}
    platform: Annotated[str | None, about("`cpu`, `gpu` or `tpu`")] = None
    platform_version: Annotated[str | None, about("version of the backend and of its driver")] = None
    device_kind: Annotated[str | None, about("model of the devices")] = None
    local_devices: Annotated[int | None, about("number of the process's local devices")] = None
    machine: Annotated[str | None, about("instruction set of the host")] = None
    processor: Annotated[str | None, about("model of the CPU, if the platform is `cpu`")] = None
    processors: Annotated[int | None, about("number of CPU cores of the host, if the platform is `cpu`")] = None
    cpu_threads: Annotated[
        str | None,
        about("number of XLA's threads, which determines how matrix products are split; only if the platform is `cpu`"),
    ] = None
    xla_flags: Annotated[str | None, about("the environment variable `XLA_FLAGS`")] = None
    options: Annotated[dict[str, str], about("options of JAX that change results")] = {}


class Data(Fields, kw_only=True):
    """The training data of a run."""

    source: Annotated[str | None, about("source of the data")] = None
    documents: Annotated[int | None, about("number of documents")] = None
    tokens: Annotated[int | None, about("number of tokens")] = None
    digest: Annotated[str | None, about("digest of the tokens")] = None
    tokenizer: Annotated[str | None, about("`bytes`, or the file of the tokenizer")] = None


class Suspect(Fields, kw_only=True):
    """The hardware under suspicion, which may be simulated."""

    name: Annotated[
        str | None,
        about("`null` for real hardware, the name of a simulated node, or `custom` for other simulated faults"),
    ] = None
    simulated: Annotated[bool | None, about("whether faults are simulated")] = None
    faults: Annotated[list[str], about("one readable line for each simulated fault")] = []


class Device(Fields, kw_only=True):
    """A device of a run, and its hardware; fields that the platform does not report are absent."""

    process: Annotated[int | None, about("index of the process that the device belongs to, from 0")] = None
    host: Annotated[str | None, about("host name")] = None
    machine: Annotated[str | None, about("hash of the machine's identity, as in `host` of the manifest")] = None
    id: Annotated[int | None, about("JAX's number for the device, which is unique across all processes")] = None
    kind: Annotated[str | None, about("model of the device")] = None
    rank: Annotated[
        dict[str, int] | None,
        about("index of the device on each mesh axis; without the axis `twin`, the device computes for all twins"),
    ] = None
    serial: Annotated[str | None, about("serial number of the board, for GPUs that have one")] = None
    uuid: Annotated[
        str | None,
        about(
            "identifier of the GPU (of the whole GPU if only a part is used): the UUID (NVIDIA) or the unique ID (AMD)"
        ),
    ] = None
    bus: Annotated[str | None, about("PCI address of the GPU: `domain:bus:device.function`, in hexadecimal")] = None
    coordinates: Annotated[list[int] | None, about("coordinates of the TPU chip in its slice")] = None
    core: Annotated[int | None, about("number of the core on the TPU chip")] = None
    slice: Annotated[int | None, about("number of the TPU slice, if there are several")] = None
    driver: Annotated[str | None, about("version of the GPU's kernel driver, or of the TPU's library")] = None
    firmware: Annotated[str | None, about("version of the GPU's video BIOS, or of the CPU's microcode")] = None
    simulated: Annotated[
        bool | None, about("`true` if the device is one of several that a process simulates on one processor")
    ] = None

    @property
    def mark(self) -> str:
        """Identifier of the individual device, such as `serial 1003`; empty if unknown."""
        marks = ((name, getattr(self, name)) for name in ("serial", "uuid", "bus"))
        return next((f"{name} {value}" for name, value in marks if value), "")


class Manifest(Header, kw_only=True, tag="jax-sdc record"):
    """`manifest.json` of any kind of record."""

    kind: Annotated[
        str,
        about(
            "`twin`, `train`, `trace`, `campaign`, `abft study`, `aggregation study`, `scar study`, `nodes study` or "
            "`estimate`; see "
            "[above](#kinds)"
        ),
    ]
    discarded: Annotated[
        int | None, about("number of lines in `discarded.jsonl` when the run last resumed; absent if 0")
    ] = None
    command: Annotated[list[str] | None, about("the command line, if a command wrote the record")] = None
    created: Annotated[str | None, about("when the run started, UTC")] = None
    resumed_at: Annotated[
        list[int] | None, about("steps or injections at which the run resumed; absent if it never did")
    ] = None
    config: Annotated[
        Any, about("the configuration: `name`, `model`, `optimizer`, `sequence_length`, `batch_size`, `microsteps`")
    ] = None
    steps: Annotated[int | None, about("number of planned steps")] = None
    seed: Annotated[int | None, about("seed for the parameters, the data order and the simulated faults")] = None
    mesh: Annotated[
        dict[str, int] | None,
        about("size of each mesh axis, such as `data`, `model` and (if `placement` is `mesh`) `twin`"),
    ] = None
    environment: Annotated[
        Environment | str | None, about("properties that must be equal for bits to be comparable; see below")
    ] = None
    digests: Annotated[
        str | None,
        about("algorithm of the digests; digests of different algorithms are never compared"),
    ] = None
    data: Annotated[Data | str | None, about("training data of the run; see below")] = None
    suspect: Annotated[Suspect | None, about("the hardware under suspicion; see below")] = None


class Arithmetic(Fields, kw_only=True):
    """Roundoff of a device's matrix products."""

    kappa: Annotated[Number, about("roundoff of the sums")] = None
    inputs: Annotated[Number, about("roundoff of the factors")] = None


class ProductSettings(Arithmetic, kw_only=True):
    """Field `abft` of a manifest: how matrix products are checked."""

    mode: Annotated[str | None, about("`detect` or `correct`")] = None
    scheme: Annotated[str | None, about("scheme of the checksums")] = None
    where: Annotated[str | None, about("selector of the products")] = None
    profile: Annotated[str | None, about("file of the profile; `null` if roundoff is assumed")] = None
    second_tier: Annotated[list[str] | None, about("sites whose checks begin with the second tier")] = None
    departs: Annotated[
        list[str] | None, about("properties in which the device differs from the one on which the profile was measured")
    ] = None
    least_coverage: Annotated[Number, about("share of the work that must be checked for the verdict clean")] = None


class GuardSettings(Fields, kw_only=True):
    """Field `guard` of a manifest: how a run is watched."""

    budget: Annotated[Number, about("share of the time of the steps that checks may take")] = None


class RunningSettings(Fields, kw_only=True):
    """Field `running` of a manifest: how a running checkpoint is saved."""

    fraction: Annotated[Number, about("share of the state that each save writes")] = None
    losses: Annotated[list[str], about("one readable line for each simulated loss")] = []


class PublishedSite(Fields, kw_only=True):
    """Figures that the study published for one submodule on one node."""

    frequency: Annotated[Number, about("mean mismatch frequency")] = None
    severity: Annotated[Number, about("largest severity")] = None


class RunManifest(Manifest, kw_only=True):
    """`manifest.json` of a twin, a training run or a trace."""

    program: Annotated[
        dict[str, str] | str | None,
        about("SHA-256 of the StableHLO text of `step` and, for twins, of `observe` (the comparison after the step)"),
    ] = None
    checkpoint_every: Annotated[int | None, about("number of steps from one checkpoint to the next")] = None
    layers: Annotated[int | None, about("number of decoder layers")] = None
    sync: Annotated[str | None, about("what twins synchronize; `null` without twins")] = None
    compare: Annotated[str | None, about("when twins compare tensors")] = None
    exchange: Annotated[
        str | None,
        about("when twins exchange digests: `probe` (also if absent), `step` (in each microstep) or `call`"),
    ] = None
    compiler_options: Annotated[dict[str, Any] | None, about("compiler options by name; absent if none were given")] = (
        None
    )
    placement: Annotated[str | None, about("placement of twins: `mesh` or `vmap`")] = None
    twins: Annotated[int | None, about("number of twins; `null` without twins")] = None
    processes: Annotated[int | None, about("number of operating-system processes")] = None
    hosts: Annotated[int | None, about("number of distinct hosts, identified by their boot identifiers")] = None
    require_processes: Annotated[int | None, about("number of hosts that the twins must span")] = None
    least_elements: Annotated[
        int | None, about("number of elements that the twins must check for the verdict clean")
    ] = None
    devices: Annotated[list[Device], about("the devices of the run, and their hardware; see below")] = []
    abft: Annotated[
        ProductSettings | None,
        about(
            "how matrix products are checked, or `null`: `mode`, `scheme`, `where`, `profile`, `kappa`, `inputs`, "
            "`second_tier`, `departs` (differences from the device on which the profile was measured), "
            "`least_coverage`"
        ),
    ] = None
    guard: Annotated[GuardSettings | None, about("how the run is watched: `budget`; absent without a guard")] = None
    running: Annotated[
        RunningSettings | None,
        about("how a running checkpoint is saved: `fraction`, `losses`; absent without a running checkpoint"),
    ] = None
    aggregate: Annotated[
        str | None, about("text of the method that aggregates gradients; absent for the plain mean")
    ] = None
    published: Annotated[
        dict[str, PublishedSite] | None,
        about(
            "for twins without checked products, the published `frequency` and `severity` of the simulated "
            "node by site; else `null`"
        ),
    ] = None
    expected: Annotated[
        dict[str, Number] | None,
        about("for twins without checked products, the expected frequency by site over the planned steps; else `null`"),
    ] = None


class TraceManifest(RunManifest, kw_only=True):
    """`manifest.json` of a trace."""

    where: Annotated[str | None, about("selector of the values whose digests are recorded")] = None
    against: Annotated[str | None, about("the golden trace with which the run is compared, or `null`")] = None


class CampaignManifest(Manifest, kw_only=True):
    """`manifest.json` of a campaign."""

    where: Annotated[str | None, about("selector of the values that are struck")] = None
    faults: Annotated[list[str], about("kinds of faults")] = []
    injections: Annotated[int | None, about("number of planned injections")] = None
    follow: Annotated[int | None, about("number of steps run after the struck one to observe the effect")] = None
    batch: Annotated[int | None, about("number of injections that run concurrently")] = None
    sites: Annotated[int | None, about("number of sites that can be struck")] = None
    devices: Annotated[list[Device], about("the devices of the run, and their hardware; see below")] = []
    thresholds: Annotated[dict[str, Number], about("thresholds of the outcomes and of the detectors")] = {}
    detectors: Annotated[list[str], about("names of the detectors")] = []
    clean: Annotated[
        dict[str, list[Any]] | None, about("`loss`, `gradient_norm` and `digest` of each step of the clean run")
    ] = None


class StudyManifest(Manifest, kw_only=True):
    """`manifest.json` of a study. Each study adds settings of its own."""

    study: Annotated[str | None, about("name of the study, if it is a study of aggregation")] = None
    seconds: Annotated[Number, about("wall time of the study in seconds")] = None
    workers: Annotated[Any, about("number of workers")] = None
    workloads: Annotated[dict[str, str] | None, about("source of the data of each workload")] = None
    parts: Annotated[int | None, about("number of parts, if the study has parts")] = None
    settings: Annotated[Any, about("settings of the study")] = None


class ProductsManifest(StudyManifest, kw_only=True):
    """`manifest.json` of a study of checked matrix products."""

    where: Annotated[str | None, about("selector of the products")] = None
    marked_steps: Annotated[list[int], about("steps in which errors are injected into matrix products")] = []
    arithmetic: Annotated[Arithmetic | None, about("roundoff from which the thresholds are computed")] = None
    profile: Annotated[str | None, about("file of the profile; `null` if roundoff is assumed")] = None
    departs: Annotated[
        list[str], about("properties in which the device differs from the one on which the profile was measured")
    ] = []
    magnitudes: Annotated[list[float], about("sizes of the errors, in units of the row's root mean square")] = []


class EstimateManifest(StudyManifest, kw_only=True):
    """`manifest.json` of an estimate."""

    subject: Annotated[str | None, about("configuration or step whose cost is estimated")] = None


class Share(Fields, kw_only=True):
    """A share of the injections, with its interval."""

    count: Annotated[int, about("number of injections in the share")]
    of: Annotated[int, about("total number of injections")]
    share: Annotated[Number, about("`count` / `of`; `null` if `of` is 0")] = None
    low: Annotated[Number, about("lower end of the 95 % interval")] = None
    high: Annotated[Number, about("upper end of the 95 % interval")] = None


class Ending(Header, kw_only=True, tag="jax-sdc record summary"):
    """`summary.json` of any kind of record."""

    verdict: Annotated[
        Verdict | None,
        about("`clean`, `corrupt` or `inconclusive`; `null` if nothing was compared, checked or shadowed"),
    ] = None
    reason: Annotated[str | None, about("reason for the verdict, in words")] = None
    simulated: Annotated[bool | None, about("whether faults were injected")] = None
    lines: Annotated[
        dict[str, tuple[int, str]],
        about("for each file of lines, the number of lines and the checksum of the last line"),
    ] = {}


class SiteTotals(SiteCounts, kw_only=True):
    """Counts of a site, summed over all steps."""

    frequency: Annotated[Number, about("mismatched / checked")] = None
    severity: Annotated[Number, about("maximum over all steps")] = None
    frequency_upper_95: Annotated[Number, about("one-sided 95 % upper bound on the frequency")] = None


class LayerTotals(Fields, kw_only=True):
    """Counts of a site by layer."""

    frequency: Annotated[list[Number], about("mismatch frequency by equation (1), over all steps")]
    severity: Annotated[list[Number], about("mismatch severity by equation (3), maximum over all steps")]
    mismatched: Annotated[list[int], about("number of mismatched elements in each layer")]
    injected: Annotated[list[int], about("number of injected elements in each layer")]


class FlaggedPlace(Fields, kw_only=True):
    """Number of rows of a matrix product that were flagged on one rank and in one layer."""

    site: Annotated[str | None, about("name of the product")] = None
    layer: Annotated[Number, about("number of the layer")] = None
    twin: Annotated[Number, about("number of the twin")] = None
    data: Annotated[Number, about("data-parallel rank")] = None
    model: Annotated[Number, about("tensor-parallel rank")] = None
    flagged: Annotated[int, about("number of rows flagged")] = 0
    confirmed: Annotated[int, about("number of flagged rows that were correct when recomputed")] = 0


class ProductTotals(CheckedProducts, kw_only=True):
    """Counts of the checked matrix products, summed over all steps."""

    first_step: Annotated[int | None, about("number of the first step with a flagged row")] = None
    places: Annotated[
        list[FlaggedPlace], about("places with flagged rows, those with the most flagged rows first")
    ] = []


class ShadowTotals(Fields, kw_only=True):
    """Results of a shadow replica."""

    shares: Annotated[list[Number], about("for each data rank, the share of its comparisons that differed")] = []
    suspects: Annotated[list[int], about("data ranks that were identified as wrong")] = []
    differences: Annotated[Number, about("number of comparisons that differed")] = None
    comparisons: Annotated[Number, about("total number of comparisons")] = None


class GuardLayer(Fields, kw_only=True):
    """What a layer of evidence of a guard did."""

    name: Annotated[str | None, about("name of the layer")] = None
    compares: Annotated[str | None, about("what it compares")] = None
    why_not: Annotated[str | None, about("why it did not run; empty if it could")] = None
    checks: Annotated[Number, about("number of checks")] = None
    coverage: Annotated[
        Number, about("share of the step on which its comparisons depend; `null` if its silence bounds nothing")
    ] = None
    most_wrong: Annotated[
        Number, about("number of wrong steps that is compatible with its silence, at most, with 95 % confidence")
    ] = None


class GuardTotals(Fields, kw_only=True):
    """What a guard did, and what it found."""

    steps: Annotated[Number, about("number of steps since the run started or resumed")] = None
    overhead: Annotated[Number, about("time of the checks as a share of the time of the steps")] = None
    start_up: Annotated[Number, about("seconds for compiling and calibrating the checks")] = None
    layers: Annotated[list[GuardLayer], about("layers of evidence")] = []
    findings: Annotated[list[GuardFinding], about("what it found, in order")] = []


class RunSummary(Ending, kw_only=True):
    """`summary.json` of a twin, a training run or a trace."""

    steps: Annotated[int | None, about("number of steps in the record")] = None
    sync: Annotated[str | None, about("as in the manifest")] = None
    submodules: Annotated[
        dict[str, SiteTotals],
        about(
            "for each of `fwd/attn`, `fwd/ffn`, `bwd/attn`, `bwd/ffn`: the counts above, summed over all steps, "
            "`frequency` (mismatched / checked), `severity` (maximum over all steps), `frequency_upper_95` (one-sided "
            "95 % upper bound)"
        ),
    ] = {}
    other_sites: Annotated[dict[str, SiteTotals], about("the same figures for each other site")] = {}
    layers: Annotated[
        dict[str, LayerTotals],
        about("for each site, lists with one entry per layer: `frequency`, `severity`, `mismatched`, `injected`"),
    ] = {}
    state: Annotated[
        Counts | None, about("`checked` and `mismatched` elements of the state, summed over all steps")
    ] = None
    gradient: Annotated[
        Counts | None, about("`checked` and `mismatched` elements of the gradient, summed over all steps")
    ] = None
    worst_noise_to_signal: Annotated[Number, about("equation (5)")] = None
    parameter_difference: Annotated[
        Number, about("L2 norm of the difference from the reference's parameters at the last step; maximum over twins")
    ] = None
    final_loss: Annotated[list[Number], about("loss of each twin at the last step")] = []
    published: Annotated[dict[str, PublishedSite] | None, about("as in the manifest")] = None
    expected: Annotated[dict[str, Number] | None, about("as in the manifest")] = None
    seconds_per_step: Annotated[Number, about("median wall time of a step")] = None
    first_mismatch_step: Annotated[
        Number, about("number of the first step with a mismatch; `null` if there is none")
    ] = None
    odd_twins: Annotated[
        list[int],
        about(
            "numbers of the twins that differ from the reference: from the majority of three or more twins, or from "
            "the first of two"
        ),
    ] = []
    twins: Annotated[int | None, about("as in the manifest")] = None
    hosts: Annotated[int | None, about("as in the manifest")] = None
    rehearsal: Annotated[
        bool | None,
        about("whether all twins ran on simulated devices of one processor, so that no hardware was tested"),
    ] = None
    first_difference: Annotated[
        DifferencePlace | None,
        about(
            "first difference between this trace and another: `step`, `site`, `layer`, `devices`, as in `sdc "
            "diff --json`"
        ),
    ] = None
    abft: Annotated[
        ProductTotals | None, about("counts of the checked products, summed over all steps, if the run checked any")
    ] = None
    shadow: Annotated[ShadowTotals | None, about("results of the shadow replica, if there was one")] = None
    guard: Annotated[GuardTotals | None, about("what the guard did, if there was one")] = None
    state_digest: Annotated[
        list[str] | None,
        about("64-bit digest of each twin's final state, in hexadecimal; equal bits give equal digests on any mesh"),
    ] = None

    @property
    def sites(self) -> dict[str, SiteTotals]:
        """Totals of all sites."""
        return {**self.submodules, **self.other_sites}


class GroupTotals(Fields, kw_only=True):
    """Outcomes of the injections in one group."""

    injections: Annotated[int, about("number of injections that reached their site")]
    outcomes: Annotated[dict[str, int], about("number of injections with each outcome")]
    vulnerability: Annotated[Share, about("share of the injections that changed training")]
    harm: Annotated[Share, about("share of the injections that harmed training")]


class DetectorTotals(Fields, kw_only=True):
    """Detections by one detector."""

    of_unmasked: Annotated[Share, about("detected share of the injections that changed training")]
    of_harmful: Annotated[Share, about("detected share of the injections that harmed training")]
    median_latency: Annotated[Number, about("median number of steps from fault to detection")] = None
    largest_latency: Annotated[Number, about("largest number of steps from fault to detection")] = None
    latencies: Annotated[dict[str, int], about("number of detections for each number of steps from fault to detection")]


class CampaignSummary(Ending, kw_only=True):
    """`summary.json` of a campaign."""

    planned: Annotated[int | None, about("number of planned injections")] = None
    done: Annotated[int | None, about("number of injections in the record")] = None
    complete: Annotated[bool | None, about("whether all planned injections are done")] = None
    reached: Annotated[int | None, about("number of injections whose step executed the struck operation")] = None
    outcomes: Annotated[
        dict[str, Share], about("for each outcome: `count`, `of`, `share`, and the 95 % interval from `low` to `high`")
    ] = {}
    vulnerability: Annotated[Share | None, about("share of the injections that changed training")] = None
    harm: Annotated[Share | None, about("share of the injections that harmed training")] = None
    groups: Annotated[
        dict[str, dict[str, GroupTotals]],
        about(
            "the same figures, grouped by `operation`, `layer`, `phase`, `scope`, `bit`, `field`, `fault` and `site`"
        ),
    ] = {}
    bits: Annotated[dict[str, dict[str, dict[str, int]]], about("number of injections by dtype, bit and outcome")] = {}
    detectors: Annotated[
        dict[str, DetectorTotals],
        about("for each detector, the share of the injections that it detected and the number of steps to detection"),
    ] = {}
    harmful_missed: Annotated[
        int | None, about("number of harmful injections missed by all detectors that need no recorded trace")
    ] = None
    visible: Annotated[Share | None, about("share of the injections whose loss changed visibly")] = None
    steps_to_visible: Annotated[Number, about("median number of steps until the loss changed visibly")] = None


class StudySummary(Ending, kw_only=True):
    """`summary.json` of a study. Each study adds its own figures."""

    study: Annotated[str | None, about("name of the study, if it is a study of aggregation")] = None
    complete: Annotated[bool | None, about("whether all parts are done, if the study has parts")] = None


class SchemeCounts(Fields, kw_only=True):
    """False alarms and detections of a checksum scheme."""

    checked: Annotated[int, about("number of rows checked in healthy training")]
    flagged: Annotated[int, about("number of rows flagged in healthy training")]
    made: Annotated[list[int], about("number of injected errors by magnitude")]
    found: Annotated[list[int], about("number of detected errors by magnitude")]
    bits_made: Annotated[list[int], about("number of injected flips by bit")]
    bits_found: Annotated[list[int], about("number of detected flips by bit")]


class SchemeShares(SchemeCounts, kw_only=True):
    """Counts of a checksum scheme, with the rates computed from these counts."""

    false_alarms_upper_95: Annotated[Number, about("95 % upper bound on false alarms per row")] = None
    half: Annotated[
        Number, about("smallest magnitude from which at least 50 % of the errors are detected; `null` if none")
    ] = None
    almost_all: Annotated[Number, about("smallest magnitude from which at least 99 % of the errors are detected")] = (
        None
    )
    flips: Annotated[Number, about("detected share of the flips")] = None
    sign_exponent: Annotated[Number, about("detected share of the flips of sign and exponent bits")] = None


class ProductsSummary(StudySummary, kw_only=True):
    """`summary.json` of a study of checked matrix products."""

    magnitudes: Annotated[list[float], about("sizes of the errors, in units of the row's root mean square")] = []
    variants: Annotated[
        dict[str, dict[str, SchemeShares]],
        about("results by variant (dtype, and unrounded sums or rounded results) and scheme"),
    ] = {}


class Collective(Fields):
    """All collectives of one kind over the same axes, in a step without mismatches."""

    kind: Annotated[str, about("kind of collective")]
    axes: Annotated[str | None, about("mesh axes, joined by `,`; empty if the groups match no set of axes")]
    crosses: Annotated[
        str | None, about("the boundary that the collective crosses: `slices` or `hosts`; empty if neither")
    ]
    blocking: Annotated[bool, about("whether the collective is a single operation, with which nothing can overlap")]
    count: Annotated[int, about("number of executions")]
    sent: Annotated[float, about("total number of bytes that a device sends")]
    seconds: Annotated[float, about("time to send these bytes at the stated bandwidth")]
    hidden: Annotated[
        float,
        about(
            "part of `seconds` that overlaps with other work: the time of the operations that the compiler "
            "placed between the start and the end of each collective, but at most the time of the collective "
            "itself. This part is not subtracted elsewhere"
        ),
    ]


class Estimate(Fields, kw_only=True):
    """Cost of a compiled program on a device, as the compiler estimates it. None of these figures was measured."""

    target: Annotated[str, about("name of the target")]
    devices: Annotated[int, about("number of devices on which the program runs")] = 0
    cycles: Annotated[int | None, about("TPU: cycles, including those of kernels and collectives; `null` for GPUs")] = (
        None
    )
    kernel_cycles: Annotated[
        int,
        about(
            "TPU: cycles of custom kernels, computed from their instructions; a matrix product counts at "
            "least as many cycles as the compiler's own product"
        ),
    ] = 0
    kernel_instructions: Annotated[int, about("TPU: cycles of custom kernels, from their instructions alone")] = 0
    kernels: Annotated[int | None, about("GPU: number of kernels; `null` for TPUs")] = None
    moved: Annotated[int, about("GPU: bytes of the kernels' operands and results")] = 0
    seconds: Annotated[
        float,
        about(
            "GPU: time to move the bytes of `moved` and of the collectives at stated bandwidths; TPU: time of the "
            "cycles at the chip's clock rate"
        ),
    ] = 0.0
    parts: Annotated[dict[str, float], about("shares of the step's most expensive operations, by name")] = {}
    collectives: Annotated[list[Collective], about("communication between devices")] = []
    arguments: Annotated[int, about("bytes of the inputs, on each device")] = 0
    outputs: Annotated[int, about("bytes of the outputs that do not reuse the memory of an input")] = 0
    temporaries: Annotated[int, about("bytes of intermediate values")] = 0
    memory: Annotated[
        int,
        about(
            "peak bytes, as reported by the compiler; if not reported, the sum of the three fields above, as a bound"
        ),
    ] = 0
    capacity: Annotated[int, about("bytes of the device's memory")] = 0
    code: Annotated[int, about("bytes of the program itself")] = 0
    compile_seconds: Annotated[float, about("compilation time, excluding lowering")] = 0.0

    @property
    def cost(self) -> float:
        """Cost by which programs on the same chips are compared: cycles, or seconds at stated bandwidths."""
        return self.seconds if self.cycles is None else float(self.cycles)


class ProgramEstimate(Estimate, kw_only=True):
    """A program in an estimate. If the program does not fit into memory, its other fields are unknown."""

    tool: Annotated[str, about("the transformation that was applied to the step")]
    does_not_fit: Annotated[str | None, about("the memory that the program lacks; absent if it fits")] = None
    ratio: Annotated[
        Number, about("cost of the program, divided by the cost of the first program for the same target")
    ] = None


class EstimateSummary(StudySummary, kw_only=True):
    """`summary.json` of an estimate."""

    programs: Annotated[list[ProgramEstimate], about("the programs, each with its `ratio`")] = []
