"""Lines of a record as types: what a step, a mismatch, a trace and an injection leave behind."""

from typing import Annotated, Any

import msgspec

from .header import Fields, Number, Numbers, about

LAST = 10**15
"""The largest number of a line: no run comes so far."""


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
    ] = msgspec.field(default_factory=list)


class OperationCounts(Fields, kw_only=True):
    """`operations` of a step: twins that digest each operation. Where any differ, the place of the first."""

    checked: Annotated[Number, about("digests compared")] = None
    mismatched: Annotated[Number, about("digests that differ; absent where none does")] = None
    agreeing: Annotated[Number, about("digests before the first that differs")] = None
    site: Annotated[str | None, about("name of the first operation that differs")] = None
    operation: Annotated[str | None, about("its primitive")] = None
    source: Annotated[str | None, about("line of the program")] = None
    direction: Annotated[str | None, about("its direction, such as `fwd`")] = None
    scope: Annotated[str | None, about("its name stack")] = None
    layer: Annotated[int | None, about("number of the layer, in a loop over layers")] = None
    iteration: Annotated[list[int] | None, about("iteration of each loop around it, outermost first")] = None
    ranks: Annotated[list[dict[str, int]], about("where it differs: index on each axis of the mesh")] = msgspec.field(
        default_factory=list
    )


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


class ProductRow(ProductCounts, kw_only=True):
    """`abft` of a step."""

    coverage: Annotated[Number, about("share of the products' work that was checked")] = None
    skipped: Annotated[list[SkippedProduct], about("products that could not be checked")] = msgspec.field(
        default_factory=list
    )
    sites: Annotated[dict[str, ProductCounts], about("the same counts for each product")] = msgspec.field(
        default_factory=dict
    )
    rows: Annotated[list[FlagRow], about("products, ranks, microsteps and layers with a flag")] = msgspec.field(
        default_factory=list
    )


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
    losses: Annotated[list[LossCost], about("for each fraction of the state what its loss would cost")] = msgspec.field(
        default_factory=list
    )
    rollback: Annotated[Number, about("steps that a rollback of everything loses on average")] = None
    bytes: Annotated[Number, about("of the blocks")] = None
    speeds: Annotated[list[Number], about("squared movement in a step of 32 parts, the fastest first")] = msgspec.field(
        default_factory=list
    )
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
    ] = msgspec.field(default_factory=dict)
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
    ranks: Annotated[list[RankRow], about("one entry for each device that differs; see below")] = msgspec.field(
        default_factory=list
    )


class DiscardedRow(StepRow, kw_only=True):
    """A line of `discarded.jsonl`: one that left `steps.jsonl`, and what was beside it."""

    mismatches: Annotated[
        list[MismatchRow], about("lines of `mismatches.jsonl` that left with it; absent where it had none")
    ] = msgspec.field(default_factory=list)


class TraceRow(Fields, kw_only=True):
    """A line of `trace.jsonl`."""

    step: Annotated[int, about("number of the step, from 0", ge=0, le=LAST)]
    digests: Annotated[
        str, about("digests of all sites, one after the other, as 32-bit words, little-endian, hexadecimal")
    ]
    crc32: Annotated[int, about("checksum of the bytes of `digests`")]


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
    ] = msgspec.field(default_factory=dict)
    visible_after: Annotated[Number, about("steps until the loss changed visibly; `null` if it never did")] = None


class PartRow(Fields, kw_only=True):
    """A line of `parts.jsonl`: a part of a study that is done."""

    part: Annotated[int, about("number of the part, from 0", ge=0, le=LAST)]
    what: Annotated[str, about("which experiment")]
    workload: Annotated[str, about("what it trains; empty where it trains nothing of the workloads")]
    start: Annotated[int | None, about("which of the first states; `null` where it is of all")] = None
    seconds: Annotated[float | None, about("wall time of the part")] = None
    found: Annotated[dict[str, Any], about("what was found; `failed` says why nothing was")]
