"""The types of files: how every one begins, and what the manifest, the lines and the summary of a record hold.

A file says its format, the version of that, and who wrote it: the host, the process, and the version of jax-sdc. Each
field is described where it is declared; the published schema and the tables of the documentation are made of that.
"""

import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from .verdict import Verdict

T = TypeVar("T")
# A measured number or count; `null` was not measured. NaN and infinity are strings in files, and numbers when read.
Number: TypeAlias = int | float | None
Numbers: TypeAlias = Number | list[Number]  # one number for each twin, or a single one


def about(text: str, *, ge: int | None = None, le: int | None = None) -> msgspec.Meta:
    """Describes a field in Markdown, for the published schema and the tables of the documentation."""
    return msgspec.Meta(description=text, ge=ge, le=le)


class Fields(msgspec.Struct, gc=False):  # trees, of which a long record has millions
    """A JSON object of a file. Fields that its type does not name are allowed."""


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Host(Fields, kw_only=True):
    """A process and the machine that it runs on. It holds no secret."""

    name: Annotated[str, about("host name")]
    machine: Annotated[
        str | None, about("hash of the machine's identity, which does not reveal it; `null` if it has none")
    ] = None
    boot: Annotated[str | None, about("identity of this boot of the system; `null` if it has none")] = None
    pid: Annotated[int | None, about("process number (PID) on that host")] = None
    process: Annotated[int | None, about("index of the process among those of the run, from 0")] = None


def identify() -> Host:
    """The process that calls, and its host.

    Returns:
        Host name, hash of the machine's identity, identity of this start of the system, number of the process, and
        its index in a run of several processes. JAX is not imported for the index, and not started.
    """
    # Only a process that has joined others has another index than 0. Asking for it starts no devices before then.
    jax = sys.modules.get("jax")
    process = int(jax.process_index()) if jax is not None and jax.distributed.is_initialized() else 0
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    return Host(name=platform.node(), machine=_machine(), boot=boot, pid=os.getpid(), process=process)


@functools.cache
def package_version(package: str) -> str:
    """Version of an installed distribution, or `not installed`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _machine() -> str | None:
    """systemd asks that the identity itself is not shown to others: it is hashed with the name of the application."""
    found = _first_line("/etc/machine-id") or _first_line("/var/lib/dbus/machine-id")
    return None if found is None else hashlib.sha256(f"jax-sdc {found}".encode()).hexdigest()[:16]


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").partition("\n")[0] or None
    except OSError:
        return None


class Header(Fields, kw_only=True, tag_field="format"):
    """How a file begins: with its format, which is the `tag` of its type, the version of that, and who wrote it."""

    schema: Annotated[int, about("version of this layout, 1")] = 1
    version: Annotated[str, about("version of jax-sdc that wrote the file")] = msgspec.field(
        default_factory=lambda: package_version("jax-sdc")
    )
    host: Annotated[Host, about("who wrote the file")] = msgspec.field(default_factory=identify)


def stamp(format: str = "jax-sdc output", *, lasting: bool = False) -> dict[str, Any]:
    """What every JSON output begins with: its format, the version of that, the version of jax-sdc, and who wrote it.

    Args:
        format: the format.
        lasting: leave out what is another one in each process, so that the same result gives the same file.

    Returns:
        `format`, `schema`, `version` and `host`, to be merged into the output.
    """
    host: dict[str, Any] = msgspec.to_builtins(identify())
    if lasting:
        host = {key: host[key] for key in ("name", "machine")}
    return {"format": format, "schema": 1, "version": package_version("jax-sdc"), "host": host}


LAST = 10**15  # the largest number of a line: no run comes so far


class Counts(Fields, kw_only=True):
    """Elements compared outside sites."""

    checked: Annotated[Number, about("elements compared with the reference (the reference itself does not count)")] = (
        None
    )
    mismatched: Annotated[Number, about("elements of which any bit differs from the reference")] = None


class SiteCounts(Counts, kw_only=True):
    """Elements of a site, added over twins, ranks, microsteps and layers."""

    zero_reference: Annotated[
        Number, about("mismatched elements whose reference is zero, while the other side is finite")
    ] = None
    nonfinite: Annotated[Number, about("mismatched elements that are NaN or infinite on either side")] = None
    undecided: Annotated[
        Number,
        about("ranks on which no majority of three or more twins agreed, so that the reference was a guess"),
    ] = None
    unrepeated: Annotated[
        Number,
        about(
            "how often a digest was the first to differ of what is repeated, a microstep or a step, and a repetition "
            "found nothing there; absent where digests are exchanged at each probe"
        ),
    ] = None
    injected: Annotated[Number, about("elements that a simulated fault changed: the ground truth")] = None
    frequency: Annotated[
        Number, about("equation (2), averaged over microsteps too; `null` where nothing was checked")
    ] = None
    severity: Annotated[Number, about("equation (4), the largest over microsteps; `null` where there is none")] = None


class RankRow(Fields, kw_only=True):
    """A device that differs from the reference."""

    twin: Annotated[Number, about("number of the twin")] = None
    data: Annotated[Number, about("its rank on the mesh axis `data`")] = None
    model: Annotated[Number, about("its rank on the mesh axis `model`")] = None
    mismatched: Annotated[Number, about("elements of which any bit differs")] = None
    unrepeated: Annotated[
        Number, about("how often its digest differed first, and not when repeated; absent where never")
    ] = None
    relative_mean: Annotated[
        Number, about("mean relative difference of the mismatched elements; `null` if the mean has no term")
    ] = None
    relative_max: Annotated[Number, about("largest relative difference")] = None


class TwinCounts(Counts, kw_only=True):
    """What a comparison of whole twins found after a step."""

    undecided: Annotated[
        Number, about("ranks on which no majority of three or more twins agreed; absent where there are none")
    ] = None
    ranks: Annotated[
        list[RankRow], about("`twin`, `data`, `model` and `mismatched` of each device that differs; absent where none")
    ] = []


class OperationPlace(Fields, kw_only=True):
    """An operation: what it is, where it stands, and in which iteration it ran."""

    site: Annotated[str | None, about("name of the operation")] = None
    operation: Annotated[str | None, about("its primitive")] = None
    direction: Annotated[str | None, about("its direction, such as `fwd`")] = None
    scope: Annotated[str | None, about("its name stack")] = None
    source: Annotated[str | None, about("line of the program")] = None
    iteration: Annotated[list[int], about("iteration of each loop around it, outermost first")] = []
    layer: Annotated[int | None, about("number of the layer, in a loop over layers")] = None


class DifferencePlace(OperationPlace, kw_only=True):
    """Where two traces part."""

    step: Annotated[int | None, about("number of the step")] = None
    devices: Annotated[list[dict[str, int]], about("devices that differ there: index on each axis of the mesh")] = []
    outputs: Annotated[list[int], about("numbers of the operation's outputs that differ")] = []


class OperationCounts(OperationPlace, kw_only=True):
    """`operations` of a step: twins that digest each operation. Where any differ, the place of the first."""

    checked: Annotated[Number, about("digests compared")] = None
    mismatched: Annotated[Number, about("digests that differ; absent where none does")] = None
    agreeing: Annotated[Number, about("digests before the first that differs")] = None
    undecided: Annotated[bool | None, about("whether no majority of three or more twins agreed")] = None
    ranks: Annotated[list[dict[str, int]], about("where it differs: index on each axis of the mesh")] = []


class ProductCounts(Fields, kw_only=True):
    """Rows of matrix products that were checked."""

    checked: Annotated[Number, about("rows checked")] = None
    examined: Annotated[Number, about("passed on by the first tier")] = None
    flagged: Annotated[Number, about("flagged")] = None
    confirmed: Annotated[Number, about("flagged, and right when computed again")] = None
    corrected: Annotated[Number, about("corrected")] = None
    nonfinite: Annotated[Number, about("not finite")] = None
    margin: Annotated[Number, about("largest margin of the last tier")] = None
    first_margin: Annotated[Number, about("largest margin of the first tier")] = None


class SkippedProduct(Fields, kw_only=True):
    """A product that could not be checked."""

    site: Annotated[str | None, about("its name")] = None
    source: Annotated[str | None, about("line of the program")] = None
    reason: Annotated[str | None, about("why")] = None
    share: Annotated[Number, about("of the step's operations")] = None


class FlagRow(Fields, kw_only=True):
    """A product, rank, microstep and layer with a flag."""

    site: Annotated[str | None, about("name of the product")] = None
    twin: Annotated[Number, about("number of the twin")] = None
    data: Annotated[Number, about("data-parallel rank")] = None
    model: Annotated[Number, about("tensor-parallel rank")] = None
    microstep: Annotated[Number, about("number of the microstep")] = None
    layer: Annotated[Number, about("number of the layer")] = None
    flagged: Annotated[Number, about("rows flagged")] = None
    confirmed: Annotated[Number, about("of them right when computed again")] = None
    corrected: Annotated[Number, about("of them corrected")] = None
    margin: Annotated[Number, about("largest margin")] = None
    wrong: Annotated[Number, about("elements that were located")] = None
    elements: Annotated[list[int] | None, about("flat indices of the first of them")] = None
    errors: Annotated[list[Number] | None, about("their errors")] = None


class CheckedProducts(ProductCounts, kw_only=True):
    """Counts of all products, and of each."""

    coverage: Annotated[Number, about("share of the products' work that was checked; of several steps the least")] = (
        None
    )
    skipped: Annotated[list[SkippedProduct], about("products that could not be checked")] = []
    sites: Annotated[dict[str, ProductCounts], about("the same counts for each product")] = {}


class ProductRow(CheckedProducts, kw_only=True):
    """`abft` of a step."""

    rows: Annotated[list[FlagRow], about("products, ranks, microsteps and layers with a flag")] = []


class LossCost(Fields, kw_only=True):
    """What a loss costs."""

    fraction: Annotated[Number, about("share of the state that is lost")] = None
    steps: Annotated[Number, about("steps that it costs if it is given back alone")] = None
    bound: Annotated[Number, about("bound of theorem 3.2; `null`: not known")] = None
    perturbation: Annotated[Number, about("expected L2 norm of the change of the parameters")] = None


class SaveTimings(Fields, kw_only=True):
    """Medians of the last saves."""

    held: Annotated[Number, about("seconds for which a save held up the training")] = None
    whole: Annotated[Number, about("seconds in addition for a whole state")] = None
    bandwidth: Annotated[Number, about("of writing, bytes a second")] = None


class OutlookRow(Fields, kw_only=True):
    """`outlook` of a step: what a loss would cost."""

    step: Annotated[Number, about("steps done")] = None
    every: Annotated[Number, about("steps since the save before")] = None
    c: Annotated[Number, about("factor by which movements shrink in a step; `null`: not known")] = None
    interval: Annotated[list[Number] | None, about("its 95 % interval")] = None
    distance: Annotated[Number, about("distance to the optimum that follows")] = None
    losses: Annotated[list[LossCost], about("for each fraction of the state what its loss would cost")] = []
    rollback: Annotated[Number, about("steps that a rollback of everything loses on average")] = None
    bytes: Annotated[Number, about("of the blocks")] = None
    speeds: Annotated[list[Number], about("squared movement in a step of 32 parts, the fastest first")] = []
    timings: Annotated[SaveTimings | None, about("medians of the last saves; `null` before three saves")] = None


class Source(Fields, kw_only=True):
    """What came from one source."""

    shards: Annotated[Number, about("how many shards")] = None
    bytes: Annotated[Number, about("their bytes")] = None


class RecoveryRow(Fields, kw_only=True):
    """`recovered` or `restarted` of a step: what was lost and given back."""

    simulated: Annotated[bool | None, about("whether it was lost on purpose")] = None
    policy: Annotated[str | None, about("`partial` or `full`")] = None
    lost: Annotated[Number, about("blocks lost")] = None
    blocks: Annotated[Number, about("of how many")] = None
    bytes: Annotated[Number, about("bytes lost")] = None
    read: Annotated[Number, about("bytes read")] = None
    behind: Annotated[Number, about("steps that the oldest block is behind")] = None
    initial: Annotated[Number, about("blocks that were never saved")] = None
    older: Annotated[Number, about("blocks with a damaged newest version")] = None
    perturbation: Annotated[Number, about("L2 norm of the change of the parameters")] = None
    predicted: Annotated[LossCost | None, about("what it was to cost: `steps` and `bound`")] = None
    step: Annotated[Number, about("the step that a restarted run goes on from")] = None
    steps_lost: Annotated[Number, about("steps that are done again")] = None
    processes: Annotated[
        list[dict[str, Source]] | None, about("for each process what came from its `own` copy, `peers`, `running`")
    ] = None


class StepRow(Fields, kw_only=True):
    """A line of `steps.jsonl`."""

    step: Annotated[int, about("number of the step, from 0", ge=0, le=LAST)]
    loss: Annotated[Numbers, about("mean cross entropy in nats per token")] = None
    gradient_norm: Annotated[Numbers, about("L2 norm of the gradient before clipping")] = None
    learning_rate: Annotated[Numbers, about("learning rate of this step")] = None
    seconds: Annotated[
        Numbers, about("wall time of the step in seconds; that of the first step includes compilation")
    ] = None
    sites: Annotated[
        dict[str, SiteCounts],
        about("for each site the counts below; empty where nothing was compared or injected at probes"),
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
            "`gradient_difference` divided by the norm of the reference's gradient; equation (5) is the largest of "
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
            "twins that digest each operation: digests `checked`; where any differ, how many are `mismatched`, and of "
            "the first what a trace says of it, with the `ranks` that differ there"
        ),
    ] = None
    aggregation: Annotated[
        dict[str, Any] | None, about("what a method of aggregation did; see [below](#aggregation-and-products)")
    ] = None
    abft: Annotated[
        ProductRow | None, about("counts of the checked products; see [below](#aggregation-and-products)")
    ] = None
    recovered: Annotated[
        RecoveryRow | None,
        about(
            "what was lost after this step (`simulated`) and given back: `policy`, blocks `lost` of `blocks`, `bytes` "
            "lost and `read`, steps that the oldest is `behind`, how many blocks were never saved (`initial`) or had a "
            "damaged newest version (`older`), the L2 norm of the `perturbation` of the parameters, and, where it was "
            "known, what that was to cost (`predicted`): `steps`, by the blocks that went back, and the `bound` of "
            "theorem 3.2 (`null`: not known)"
        ),
    ] = None
    outlook: Annotated[
        OutlookRow | None,
        about(
            "in lines of steps that end with a save of a running checkpoint, what a loss would cost just before it; "
            "see [below](#what-a-loss-would-cost)"
        ),
    ] = None
    restarted: Annotated[
        RecoveryRow | None,
        about(
            "in the first line after all processes were started again and went on from a running checkpoint: the "
            "same of a real loss (no `perturbation`: what was lost is not known), the `step` that the run goes on "
            "from, `steps_lost`, and for each of the `processes` the `shards` and `bytes` of its devices that came "
            "from its `own` copy, its `peers`', and the `running` checkpoint (no `processes` where no host had a copy)"
        ),
    ] = None
    details: Annotated[int | None, about("lines of this step in the file beside it; absent where it has none")] = None
    discarded: Annotated[
        int | None, about("lines of `discarded.jsonl` when the line was written; absent where there were none")
    ] = None


class MismatchRow(SiteCounts, kw_only=True):
    """A line of `mismatches.jsonl`. Counts are those of one layer."""

    step: Annotated[int, about("number of the step, from 0", ge=0, le=LAST)]
    microstep: Annotated[Number, about("number of the microstep, from 0")] = None
    site: Annotated[str | None, about("name of the site")] = None
    layer: Annotated[Number, about("number of the layer, from 0")] = None
    frequency: Annotated[Number, about("equation (1); `null` where it is not defined")] = None
    severity: Annotated[Number, about("equation (3); `null` where it is not defined")] = None
    relative_max: Annotated[Number, about("largest relative difference of an element")] = None
    ranks: Annotated[list[RankRow], about("one entry for each device that differs; see below")] = []


class DiscardedRow(StepRow, kw_only=True):
    """A line of `discarded.jsonl`: one that left `steps.jsonl`, and what was beside it."""

    mismatches: Annotated[
        list[MismatchRow], about("lines of `mismatches.jsonl` that left with it; absent where it had none")
    ] = []


class TraceRow(Fields, kw_only=True):
    """A line of `trace.jsonl`."""

    step: Annotated[int, about("number of the step, from 0", ge=0, le=LAST)]
    digests: Annotated[
        str, about("digests of all sites, one after the other, as 32-bit words, little-endian, hexadecimal")
    ]


class InjectionRow(Fields, kw_only=True):
    """A line of `injections.jsonl`."""

    injection: Annotated[int, about("number of the injection, from 0", ge=0, le=LAST)]
    site: Annotated[str | None, about("name of the site that was struck")] = None
    operation: Annotated[str | None, about("primitive of that site")] = None
    phase: Annotated[
        str | None,
        about(
            "`fwd`, `bwd`, `remat`, `update` (outside of the derivative, such as the optimizer) or `memory` (an "
            "argument of the step)"
        ),
    ] = None
    scope: Annotated[str | None, about("name stack of the operation, as `jax.named_scope` makes it")] = None
    source: Annotated[str | None, about("source line of the operation")] = None
    dtype: Annotated[str | None, about("type of the struck value")] = None
    shape: Annotated[list[int] | None, about("shape of the struck value")] = None
    output: Annotated[int | None, about("which output of the operation was struck")] = None
    iteration: Annotated[list[int] | None, about("iteration of each loop around the operation, outermost first")] = None
    layer: Annotated[int | None, about("iteration of the innermost loop")] = None
    device: Annotated[dict[str, int] | None, about("index of the struck device on each mesh axis")] = None
    step: Annotated[int | None, about("the step that was struck")] = None
    fault: Annotated[str | None, about("kind of fault")] = None
    bits: Annotated[
        list[Any] | None, about("the bits that the fault changes, or `null` if the fault is no change of bits")
    ] = None
    field: Annotated[
        str | None, about("the part of the number that holds the bit: `sign`, `exponent` or `mantissa`")
    ] = None
    elements: Annotated[list[int] | None, about("flat indices of the first eight changed elements")] = None
    changed: Annotated[Number, about("how many elements changed")] = None
    old: Annotated[list[str] | None, about("bits of those elements before, hexadecimal")] = None
    new: Annotated[list[str] | None, about("bits of those elements after, hexadecimal")] = None
    outcome: Annotated[str | None, about("what became of training; see [campaign](campaign.md)")] = None
    followed: Annotated[Number, about("steps that were followed after the struck one")] = None
    peak_excess: Annotated[Number, about("largest (loss − clean loss) / clean loss")] = None
    last_excess: Annotated[Number, about("the same at the last step that was followed")] = None
    detected: Annotated[
        dict[str, Number], about("for each detector the steps from the fault to the detection, or `null`")
    ] = {}
    visible_after: Annotated[Number, about("steps until the loss changed visibly; `null` if it never did")] = None


class PartRow(Fields, kw_only=True):
    """A line of `parts.jsonl`: a part of a study that is done."""

    part: Annotated[int, about("number of the part, from 0", ge=0, le=LAST)]
    what: Annotated[str, about("which experiment")]
    workload: Annotated[str, about("what it trains; empty where it trains nothing of the workloads")]
    start: Annotated[int | None, about("which of the first states; `null` where it is of all")] = None
    seconds: Annotated[float | None, about("wall time of the part")] = None
    found: Annotated[dict[str, Any], about("what was found; `failed` says why nothing was")]

    @property
    def failed(self) -> str | None:
        """Why nothing was found, if so."""
        failed: str | None = self.found.get("failed")
        return failed

    def read(self, type: type[T]) -> T:
        """What was found, as the type that its experiment has."""
        return msgspec.convert(self.found, type)


class Perturbed(Fields, kw_only=True):
    """What perturbations of a training cost, beside their bounds: `found` of `quadratic` and `resets`."""

    c: Annotated[float, about("factor by which errors shrink in an iteration")]
    distance: Annotated[float, about("distance to the optimum at the start")]
    iterations: Annotated[float, about("until it converged without a perturbation")]
    kappa: Annotated[float, about("upper bound of these")]
    after: Annotated[list[int], about("iterations after which it was perturbed")]
    sizes: Annotated[list[float], about("sizes of the perturbations")]
    bounds: Annotated[list[float], about("bounds of theorem 3.2")]
    costs: Annotated[list[float | None], about("iterations beyond those without; `null` where it did not converge")]
    beyond: Annotated[list[float | None], about("iterations beyond `kappa`")]


class RecoveringRun(Fields, kw_only=True):
    """A training that loses half of its state, and gets it back."""

    losses: Annotated[list[float], about("after each iteration")]
    step_seconds: Annotated[float, about("median time of an iteration")]
    save_seconds: Annotated[float, about("median time of a save")]
    saved_every: Annotated[int, about("iterations from one save to the next")]
    fraction: Annotated[float, about("share of the bytes that a save writes")]
    bytes: Annotated[int, about("of the blocks")]


class Overhead(Fields, kw_only=True):
    """Saves on a clock, and a training through a failure: `found` of `overhead`."""

    after: Annotated[int, about("iteration after which half is lost")]
    undisturbed: Annotated[list[float], about("losses without a failure")]
    scar: Annotated[RecoveringRun, about("with SCAR")] = msgspec.field(name="SCAR")
    traditional: Annotated[RecoveringRun, about("with full checkpoints that are restored as a whole")]

    @property
    def ways(self) -> dict[str, RecoveringRun]:
        return {"SCAR": self.scar, "traditional": self.traditional}


class Criterion(Fields, kw_only=True):
    """When a training counts as converged: `found` of `criterion`."""

    criteria: Annotated[list[float], about("losses at which it counts as converged")]
    iterations: Annotated[int, about("after which it has the last of them")]
    interval: Annotated[int, about("iterations in which a checkpoint writes everything once")]
    blocks: Annotated[int, about("number of blocks")]
    source: Annotated[str, about("where its data come from")]
    losses: Annotated[list[float], about("mean over all starts after each iteration")]


class LossCosts(Fields, kw_only=True):
    """What losses cost."""

    costs: Annotated[list[float | None], about("iterations of each; `null` where the training did not converge")]
    sizes: Annotated[list[float], about("sizes of the perturbations")]


class FailureCase(LossCosts, kw_only=True, omit_defaults=True):
    """A way of saving and a kind of loss, and what such losses cost."""

    policy: Annotated[str, about("how blocks are chosen for a save")]
    fraction: Annotated[float, about("share of the bytes that a save writes")]
    lost: Annotated[float, about("share of the blocks that a failure takes")]
    how: Annotated[str, about("which those are: `random` or `contiguous`")]
    predicted: Annotated[list[float | None], about("costs as told before; absent where nothing was told")] = []
    bound: Annotated[list[float | None], about("bounds as told before; absent where nothing was told")] = []


class Failures(Fields, kw_only=True):
    """What failures of a training cost: `found` of `failures`."""

    iterations: Annotated[list[float], about("until each criterion is met without a failure")]
    after: Annotated[list[int], about("iterations after which failures come")]
    cases: Annotated[list[FailureCase], about("ways of saving and kinds of losses")]
    full: Annotated[LossCosts, about("where everything is restored")]
    busiest: Annotated[float, about("share of the squared movement that the busiest eighth of the blocks has")]


class Environment(Fields, kw_only=True):
    """What must be equal for bits to be comparable."""

    python: Annotated[str | None, about("version of Python")] = None
    packages: Annotated[dict[str, str], about("versions of the libraries that decide what is computed")] = {}
    platform: Annotated[str | None, about("`cpu`, `gpu` or `tpu`")] = None
    platform_version: Annotated[str | None, about("version of the backend and of its driver")] = None
    device_kind: Annotated[str | None, about("model of the devices")] = None
    local_devices: Annotated[int | None, about("number of devices of the process")] = None
    machine: Annotated[str | None, about("instruction set of the host")] = None
    processor: Annotated[str | None, about("model of the CPU, if the platform is `cpu`")] = None
    processors: Annotated[int | None, about("number of cores of the host, if the platform is `cpu`")] = None
    cpu_threads: Annotated[
        str | None, about("threads of XLA, which decide how products are split, if the platform is `cpu`")
    ] = None
    xla_flags: Annotated[str | None, about("the environment variable `XLA_FLAGS`")] = None
    options: Annotated[dict[str, str], about("those options of JAX that change results")] = {}


class Data(Fields, kw_only=True):
    """What a run was trained on."""

    source: Annotated[str | None, about("where the data comes from")] = None
    documents: Annotated[int | None, about("number of documents")] = None
    tokens: Annotated[int | None, about("number of tokens")] = None
    digest: Annotated[str | None, about("digest of the tokens")] = None
    tokenizer: Annotated[str | None, about("`bytes`, or the file of the tokenizer")] = None


class Suspect(Fields, kw_only=True):
    """The hardware under suspicion, which may be simulated."""

    name: Annotated[
        str | None,
        about("`null` for real hardware, `custom` for other simulated faults, else the node of the study"),
    ] = None
    simulated: Annotated[bool | None, about("whether faults are simulated")] = None
    faults: Annotated[list[str], about("the simulated faults, one readable line each")] = []


class Device(Fields, kw_only=True):
    """A device that takes part in a run, and the hardware behind it. What the platform does not tell is absent."""

    process: Annotated[int | None, about("index of the process that the device belongs to, from 0")] = None
    host: Annotated[str | None, about("host name")] = None
    machine: Annotated[str | None, about("hash of the machine's identity, as in `host` of the manifest")] = None
    id: Annotated[int | None, about("number of the device in JAX, among those of all processes")] = None
    kind: Annotated[str | None, about("model of the device")] = None
    rank: Annotated[
        dict[str, int] | None,
        about("its place on the mesh: the index on each axis. Without `twin` among them it computes for all twins"),
    ] = None
    serial: Annotated[str | None, about("serial number of the board, for GPUs that have one")] = None
    uuid: Annotated[
        str | None,
        about("identity of the GPU, and of the whole GPU where a part of it is used: NVIDIA's UUID, AMD's unique ID"),
    ] = None
    bus: Annotated[str | None, about("PCI address of the GPU: `domain:bus:device.function`, hexadecimal")] = None
    coordinates: Annotated[list[int] | None, about("place of the TPU chip in its slice")] = None
    core: Annotated[int | None, about("number of the core on the TPU chip")] = None
    slice: Annotated[int | None, about("number of the TPU slice, where there are several")] = None
    driver: Annotated[str | None, about("version of the GPU's kernel driver, or of the TPU's library")] = None
    firmware: Annotated[str | None, about("version of the GPU's video BIOS, or of the CPU's microcode")] = None
    simulated: Annotated[
        bool | None, about("`true` for each of several devices that a process makes of one processor")
    ] = None

    @property
    def mark(self) -> str:
        """What tells it from others of its kind, such as `serial 1003`; empty where nothing does."""
        marks = ((name, getattr(self, name)) for name in ("serial", "uuid", "bus"))
        return next((f"{name} {value}" for name, value in marks if value), "")


class Manifest(Header, kw_only=True, tag="jax-sdc record"):
    """`manifest.json` of any kind."""

    kind: Annotated[
        str,
        about(
            "`twin`, `train`, `trace`, `campaign`, `abft study`, `aggregation study`, `scar study`, `nodes study` or "
            "`estimate`; see "
            "[above](#kinds)"
        ),
    ]
    discarded: Annotated[
        int | None, about("lines of `discarded.jsonl` when the run was last continued; absent where there were none")
    ] = None
    command: Annotated[list[str] | None, about("the command line, if a command wrote the record")] = None
    created: Annotated[str | None, about("when the run started, UTC")] = None
    resumed_at: Annotated[
        list[int] | None, about("steps or injections at which the run was continued; absent if it never was")
    ] = None
    config: Annotated[
        Any, about("the configuration: `name`, `model`, `optimizer`, `sequence_length`, `batch_size`, `microsteps`")
    ] = None
    steps: Annotated[int | None, about("planned steps")] = None
    seed: Annotated[int | None, about("seed of parameters, data order and simulated faults")] = None
    mesh: Annotated[
        dict[str, int] | None,
        about("size of each mesh axis, such as `twin` (with `placement` `mesh`), `data`, `model`"),
    ] = None
    environment: Annotated[Environment | str | None, about("what must be equal for bits to be comparable; below")] = (
        None
    )
    digests: Annotated[
        str | None,
        about("algorithm of the digests. Two algorithms are never compared"),
    ] = None
    data: Annotated[Data | str | None, about("what the run is trained on; below")] = None
    suspect: Annotated[Suspect | None, about("the hardware under suspicion; below")] = None


class Arithmetic(Fields, kw_only=True):
    """How a device rounds."""

    kappa: Annotated[Number, about("rounding of sums")] = None
    inputs: Annotated[Number, about("rounding of factors")] = None


class ProductSettings(Arithmetic, kw_only=True):
    """`abft` of a manifest: how products are checked."""

    mode: Annotated[str | None, about("`detect` or `correct`")] = None
    scheme: Annotated[str | None, about("scheme of the checksums")] = None
    where: Annotated[str | None, about("selector of the products")] = None
    profile: Annotated[str | None, about("file of the profile; `null` where it is assumed")] = None
    second_tier: Annotated[list[str] | None, about("sites that begin with the second tier")] = None
    departs: Annotated[list[str] | None, about("what differs from the device that the profile was measured on")] = None
    least_coverage: Annotated[Number, about("share of the work that must be checked for a verdict of clean")] = None


class RunningSettings(Fields, kw_only=True):
    """`running` of a manifest: how a running checkpoint is saved."""

    fraction: Annotated[Number, about("share of the state that each save writes")] = None
    losses: Annotated[list[str], about("simulated losses, one readable line each")] = []


class PublishedSite(Fields, kw_only=True):
    """What the study published of a submodule of a node."""

    frequency: Annotated[Number, about("mean mismatch frequency")] = None
    severity: Annotated[Number, about("largest severity")] = None


class RunManifest(Manifest, kw_only=True):
    """`manifest.json` of a twin, a training run or a trace."""

    program: Annotated[
        dict[str, str] | str | None,
        about("SHA-256 of the StableHLO text: `step`, and for twins `observe` (what is compared after the step)"),
    ] = None
    checkpoint_every: Annotated[int | None, about("steps from one checkpoint to the next")] = None
    layers: Annotated[int | None, about("number of decoder layers")] = None
    sync: Annotated[str | None, about("what twins synchronize; `null` without twins")] = None
    compare: Annotated[str | None, about("when twins compare tensors")] = None
    exchange: Annotated[
        str | None,
        about("when twins exchange digests: `probe`, also where absent, `step` (in each microstep) or `call`"),
    ] = None
    compiler_options: Annotated[
        dict[str, Any] | None, about("options that the compiler was given, by name; absent where there were none")
    ] = None
    placement: Annotated[str | None, about("where twins lie: `mesh` or `vmap`")] = None
    twins: Annotated[int | None, about("number of twins; `null` without twins")] = None
    processes: Annotated[int | None, about("number of operating-system processes")] = None
    hosts: Annotated[int | None, about("number of distinct hosts, told apart by the boot of their system")] = None
    require_processes: Annotated[int | None, about("twins: hosts that there had to be")] = None
    least_elements: Annotated[int | None, about("twins: elements that must be checked for a verdict of clean")] = None
    devices: Annotated[list[Device], about("the devices that take part, and the hardware behind them; below")] = []
    abft: Annotated[
        ProductSettings | None,
        about(
            "`null`, or how products are checked: `mode`, `scheme`, `where`, `profile`, `kappa`, `inputs`, "
            "`second_tier`, `departs` (what differs from the device that the profile was measured on), "
            "`least_coverage`"
        ),
    ] = None
    running: Annotated[
        RunningSettings | None,
        about("how a running checkpoint is saved: `fraction`, `losses`; absent where there is none"),
    ] = None
    aggregate: Annotated[
        str | None, about("text of the method by which gradients are aggregated; absent for the plain mean")
    ] = None
    published: Annotated[
        dict[str, PublishedSite] | None,
        about("twins without checked products: `frequency` and `severity` by site of the simulated node, else `null`"),
    ] = None
    expected: Annotated[
        dict[str, Number] | None,
        about("twins without checked products: expected frequency by site over the planned steps, else `null`"),
    ] = None


class TraceManifest(RunManifest, kw_only=True):
    """`manifest.json` of a trace."""

    where: Annotated[str | None, about("selector of the values whose digests are recorded")] = None
    against: Annotated[str | None, about("the golden trace that the run is compared with, or `null`")] = None


class CampaignManifest(Manifest, kw_only=True):
    """`manifest.json` of a campaign."""

    where: Annotated[str | None, about("selector of the values that are struck")] = None
    faults: Annotated[list[str], about("kinds of faults")] = []
    injections: Annotated[int | None, about("planned injections")] = None
    follow: Annotated[int | None, about("steps that are followed after the struck one")] = None
    batch: Annotated[int | None, about("injections that run at the same time")] = None
    sites: Annotated[int | None, about("number of the sites that can be struck")] = None
    devices: Annotated[list[Device], about("the devices that take part, and the hardware behind them; below")] = []
    thresholds: Annotated[dict[str, Number], about("thresholds of the outcomes and of the detectors")] = {}
    detectors: Annotated[list[str], about("names of the detectors")] = []
    clean: Annotated[
        dict[str, list[Any]] | None, about("`loss`, `gradient_norm` and `digest` of each step of the clean run")
    ] = None


class StudyManifest(Manifest, kw_only=True):
    """`manifest.json` of a study. Each study adds settings of its own."""

    study: Annotated[str | None, about("name of a study of aggregation")] = None
    seconds: Annotated[Number, about("wall time of the study in seconds")] = None
    workers: Annotated[Any, about("number of workers")] = None
    workloads: Annotated[dict[str, str] | None, about("for each workload the source of its data")] = None
    parts: Annotated[int | None, about("number of parts, of a study that has lines")] = None
    settings: Annotated[Any, about("what was asked for")] = None


class ProductsManifest(StudyManifest, kw_only=True):
    """`manifest.json` of a study of checked products."""

    where: Annotated[str | None, about("selector of the products")] = None
    marked_steps: Annotated[list[int], about("steps in whose products errors are made")] = []
    arithmetic: Annotated[Arithmetic | None, about("rounding from which thresholds follow")] = None
    profile: Annotated[str | None, about("file of the profile; `null` where it is assumed")] = None
    departs: Annotated[list[str], about("what differs from the device that the profile was measured on")] = []
    magnitudes: Annotated[list[float], about("sizes of the errors, in root mean squares of the row")] = []


class EstimateManifest(StudyManifest, kw_only=True):
    """`manifest.json` of an estimate."""

    subject: Annotated[str | None, about("configuration or step that is estimated")] = None


class Share(Fields, kw_only=True):
    """A part of the injections, with its interval."""

    count: Annotated[int, about("how many")]
    of: Annotated[int, about("of how many")]
    share: Annotated[Number, about("one divided by the other; `null` where that is 0")] = None
    low: Annotated[Number, about("lower end of the 95 % interval")] = None
    high: Annotated[Number, about("upper end of the 95 % interval")] = None


class Ending(Header, kw_only=True, tag="jax-sdc record summary"):
    """`summary.json` of any kind."""

    verdict: Annotated[
        Verdict | None,
        about("`clean`, `corrupt`, `inconclusive`; `null` where nothing was compared, checked or shadowed"),
    ] = None
    reason: Annotated[str | None, about("the reason of the verdict, in words")] = None
    simulated: Annotated[bool | None, about("whether faults were injected")] = None
    lines: Annotated[
        dict[str, tuple[int, str]],
        about("for each file of lines how many it has, and the checksum of the last one"),
    ] = {}


class SiteTotals(SiteCounts, kw_only=True):
    """Counts of a site over the steps."""

    frequency: Annotated[Number, about("mismatched / checked")] = None
    severity: Annotated[Number, about("largest of all steps")] = None
    frequency_upper_95: Annotated[Number, about("one-sided 95 % bound of the frequency")] = None


class LayerTotals(Fields, kw_only=True):
    """Counts of a site by layer."""

    frequency: Annotated[list[Number], about("equation (1), over all steps")]
    severity: Annotated[list[Number], about("equation (3), the largest of all steps")]
    mismatched: Annotated[list[int], about("mismatched elements")]
    injected: Annotated[list[int], about("injected elements")]


class FlaggedPlace(Fields, kw_only=True):
    """Rows of a product that were flagged on a rank and in a layer."""

    site: Annotated[str | None, about("name of the product")] = None
    layer: Annotated[Number, about("number of the layer")] = None
    twin: Annotated[Number, about("number of the twin")] = None
    data: Annotated[Number, about("data-parallel rank")] = None
    model: Annotated[Number, about("tensor-parallel rank")] = None
    flagged: Annotated[int, about("rows flagged")] = 0
    confirmed: Annotated[int, about("of them right when computed again")] = 0


class ProductTotals(CheckedProducts, kw_only=True):
    """Counts of the checked products over the steps."""

    first_step: Annotated[int | None, about("number of the first step with a flag")] = None
    places: Annotated[list[FlaggedPlace], about("where rows were flagged, the most often flagged first")] = []


class ShadowTotals(Fields, kw_only=True):
    """What a shadow replica found."""

    shares: Annotated[list[Number], about("for each data rank, of its comparisons the share that differed")] = []
    suspects: Annotated[list[int], about("data ranks that are wrong")] = []
    differences: Annotated[Number, about("comparisons that differed")] = None
    comparisons: Annotated[Number, about("comparisons")] = None


class RunSummary(Ending, kw_only=True):
    """`summary.json` of a twin, a training run or a trace."""

    steps: Annotated[int | None, about("number of steps in the record")] = None
    sync: Annotated[str | None, about("as in the manifest")] = None
    submodules: Annotated[
        dict[str, SiteTotals],
        about(
            "for each of `fwd/attn`, `fwd/ffn`, `bwd/attn`, `bwd/ffn`: the counts above summed over steps, "
            "`frequency` (mismatched / checked), `severity` (largest of all steps), `frequency_upper_95` (one-sided "
            "95 % bound)"
        ),
    ] = {}
    other_sites: Annotated[dict[str, SiteTotals], about("the same for any other site")] = {}
    layers: Annotated[
        dict[str, LayerTotals],
        about("for each site, lists with one entry per layer: `frequency`, `severity`, `mismatched`, `injected`"),
    ] = {}
    state: Annotated[Counts | None, about("`checked` and `mismatched` elements of the state, summed over steps")] = None
    gradient: Annotated[Counts | None, about("the same for the gradient")] = None
    worst_noise_to_signal: Annotated[Number, about("equation (5)")] = None
    parameter_difference: Annotated[Number, about("at the last step, the largest of all twins")] = None
    final_loss: Annotated[list[Number], about("loss of each twin at the last step")] = []
    published: Annotated[dict[str, PublishedSite] | None, about("as in the manifest")] = None
    expected: Annotated[dict[str, Number] | None, about("as in the manifest")] = None
    seconds_per_step: Annotated[Number, about("median wall time of a step")] = None
    first_mismatch_step: Annotated[
        Number, about("number of the first step with a mismatch; `null` if there is none")
    ] = None
    odd_twins: Annotated[
        list[int],
        about("numbers of the twins that differ from the reference: the majority of three or more, the first of two"),
    ] = []
    twins: Annotated[int | None, about("as in the manifest")] = None
    hosts: Annotated[int | None, about("as in the manifest")] = None
    rehearsal: Annotated[
        bool | None, about("whether all twins ran on simulated devices of one processor, which tests no hardware")
    ] = None
    first_difference: Annotated[
        DifferencePlace | None,
        about(
            "of a trace that parted from another: `step`, `site`, `layer`, `devices`, as `sdc diff --json` tells them"
        ),
    ] = None
    abft: Annotated[
        ProductTotals | None, about("counts of the checked products, summed over steps, if the run checked any")
    ] = None
    shadow: Annotated[ShadowTotals | None, about("what the shadow replica found, if there was one")] = None
    state_digest: Annotated[
        list[str] | None,
        about("64-bit digest of each twin's final state, in hexadecimal: equal for equal bits on any mesh"),
    ] = None

    @property
    def sites(self) -> dict[str, SiteTotals]:
        """The totals of all sites."""
        return {**self.submodules, **self.other_sites}


class GroupTotals(Fields, kw_only=True):
    """A group of injections."""

    injections: Annotated[int, about("how many reached their site")]
    outcomes: Annotated[dict[str, int], about("how many had each outcome")]
    vulnerability: Annotated[Share, about("share that changed training")]
    harm: Annotated[Share, about("share that harmed training")]


class DetectorTotals(Fields, kw_only=True):
    """What a detector found."""

    of_unmasked: Annotated[Share, about("share of the injections that changed training")]
    of_harmful: Annotated[Share, about("share of the injections that harmed training")]
    median_latency: Annotated[Number, about("median steps from the fault to the detection")] = None
    largest_latency: Annotated[Number, about("the most")] = None
    latencies: Annotated[dict[str, int], about("how many were found after each number of steps")]


class CampaignSummary(Ending, kw_only=True):
    """`summary.json` of a campaign."""

    planned: Annotated[int | None, about("planned injections")] = None
    done: Annotated[int | None, about("injections in the record")] = None
    complete: Annotated[bool | None, about("whether all are done")] = None
    reached: Annotated[int | None, about("injections whose step executed the struck operation")] = None
    outcomes: Annotated[
        dict[str, Share], about("for each outcome: `count`, `of`, `share`, and the 95 % interval from `low` to `high`")
    ] = {}
    vulnerability: Annotated[Share | None, about("share of the injections that changed training")] = None
    harm: Annotated[Share | None, about("share of the injections that harmed training")] = None
    groups: Annotated[
        dict[str, dict[str, GroupTotals]],
        about("the same, grouped by `operation`, `layer`, `phase`, `scope`, `bit`, `field`, `fault`, `site`"),
    ] = {}
    bits: Annotated[dict[str, dict[str, dict[str, int]]], about("outcomes by dtype and bit")] = {}
    detectors: Annotated[
        dict[str, DetectorTotals], about("for each detector what it found, and after how many steps")
    ] = {}
    harmful_missed: Annotated[
        int | None, about("harmful injections that no detector found without a recorded trace")
    ] = None
    visible: Annotated[Share | None, about("share of the injections whose loss changed visibly")] = None
    steps_to_visible: Annotated[Number, about("median number of steps until the loss changed visibly")] = None


class StudySummary(Ending, kw_only=True):
    """`summary.json` of a study. Each study adds its own figures."""

    study: Annotated[str | None, about("name of a study of aggregation")] = None
    complete: Annotated[bool | None, about("whether all parts are done, of a study that has parts")] = None


class SchemeCounts(Fields, kw_only=True):
    """What a scheme of checksums flagged and found."""

    checked: Annotated[int, about("rows checked in healthy training")]
    flagged: Annotated[int, about("of them flagged")]
    made: Annotated[list[int], about("errors made of each magnitude")]
    found: Annotated[list[int], about("of them found")]
    bits_made: Annotated[list[int], about("flips made of each bit")]
    bits_found: Annotated[list[int], about("of them found")]


class SchemeShares(SchemeCounts, kw_only=True):
    """The same with what follows from it."""

    false_alarms_upper_95: Annotated[Number, about("95 % bound of false alarms by row")] = None
    half: Annotated[Number, about("smallest magnitude from which on half are found; `null` for none")] = None
    almost_all: Annotated[Number, about("the same of 99 %")] = None
    flips: Annotated[Number, about("share of flips that are found")] = None
    sign_exponent: Annotated[Number, about("the same of flips of sign and exponent")] = None


class ProductsSummary(StudySummary, kw_only=True):
    """`summary.json` of a study of checked products."""

    magnitudes: Annotated[list[float], about("sizes of the errors, in root mean squares of the row")] = []
    variants: Annotated[
        dict[str, dict[str, SchemeShares]], about("by variant (type, sums or rounded) and scheme what was found")
    ] = {}


class Collective(Fields):
    """What a program does over some axes, on the way of a step in which nothing is wrong."""

    kind: Annotated[str, about("of operation")]
    axes: Annotated[str | None, about("of the mesh, joined by `,`; empty where the groups are none that axes give")]
    crosses: Annotated[str | None, about("`slices`, `hosts`, or empty for nothing")]
    blocking: Annotated[bool, about("whether it is a single operation, so that nothing else runs beside it")]
    count: Annotated[int, about("how often it runs")]
    sent: Annotated[float, about("bytes that a device sends in all")]
    seconds: Annotated[float, about("that takes, over the stated bandwidth")]
    hidden: Annotated[
        float,
        about(
            "of these, what the device does other things in: what the compiler put between beginning and end of each, "
            "and no more than it takes. Nothing is taken off for it elsewhere"
        ),
    ]


class Estimate(Fields, kw_only=True):
    """What a compiled program costs on a device, by the compiler's estimate. Nothing of it was measured."""

    target: Annotated[str, about("name of the target")]
    devices: Annotated[int, about("number of devices that the program runs on")] = 0
    cycles: Annotated[int | None, about("TPU: cycles, kernels and collectives included. `null` for GPUs")] = None
    kernel_cycles: Annotated[
        int,
        about(
            "TPU: those of custom kernels: by their instructions, and where they compute a product not less than the "
            "compiler's own product"
        ),
    ] = 0
    kernel_instructions: Annotated[int, about("TPU: the same by their instructions alone")] = 0
    kernels: Annotated[int | None, about("GPU: number of kernels. `null` for TPUs")] = None
    moved: Annotated[int, about("GPU: bytes of the kernels' operands and results")] = 0
    seconds: Annotated[
        float,
        about("GPU: moving them and the collectives take, at stated bandwidths; TPU: cycles at the chip's clock"),
    ] = 0.0
    parts: Annotated[dict[str, float], about("share of the dearest operations of the step, by name")] = {}
    collectives: Annotated[list[Collective], about("what devices say to each other")] = []
    arguments: Annotated[int, about("bytes of the inputs, on each device")] = 0
    outputs: Annotated[int, about("bytes of the outputs that do not take the place of an input")] = 0
    temporaries: Annotated[int, about("bytes of what is in between")] = 0
    memory: Annotated[int, about("bytes of all three, at most, or the compiler's peak where it reports one")] = 0
    capacity: Annotated[int, about("bytes of the device's memory")] = 0
    code: Annotated[int, about("bytes of the program itself")] = 0
    compile_seconds: Annotated[float, about("lowering aside")] = 0.0

    @property
    def cost(self) -> float:
        """What programs for the same chips are compared by: cycles, or seconds at stated bandwidths."""
        return self.seconds if self.cycles is None else float(self.cycles)


class ProgramEstimate(Estimate, kw_only=True):
    """A program of an estimate. Of one that does not fit, nothing else is known."""

    tool: Annotated[str, about("what the step is transformed by")]
    does_not_fit: Annotated[str | None, about("what memory it lacks; absent where it fits")] = None
    ratio: Annotated[Number, about("its cost over that of the first program for the same target")] = None


class EstimateSummary(StudySummary, kw_only=True):
    """`summary.json` of an estimate."""

    programs: Annotated[list[ProgramEstimate], about("the programs, each with its `ratio`")] = []
