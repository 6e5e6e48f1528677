"""Summaries as types: what is known when a run has ended."""

from typing import Annotated, Any, Literal

import msgspec

from .fields import Fields, Number, about
from .identity import Stamp
from .rows import Counts, SiteCounts


class Share(Fields, kw_only=True):
    """A part of the injections, with its interval."""

    count: Annotated[int, about("how many")]
    of: Annotated[int, about("of how many")]
    share: Annotated[Number, about("one divided by the other; `null` where that is 0")] = None
    low: Annotated[Number, about("lower end of the 95 % interval")] = None
    high: Annotated[Number, about("upper end of the 95 % interval")] = None


class Ending(Stamp, kw_only=True):
    """`summary.json` of any kind."""

    # A summary of schema 1 carries no schema of its own: that of its manifest holds.
    schema: Annotated[int, about("version of the layout, 3; see [Versions](#versions)")] = 1
    verdict: Annotated[
        Literal["clean", "corrupt", "inconclusive"] | None,
        about("`clean`, `corrupt`, `inconclusive`; `null` where nothing was compared, checked or shadowed"),
    ] = None
    reason: Annotated[str | None, about("the reason of the verdict, in words")] = None
    simulated: Annotated[bool | None, about("whether faults were injected")] = None
    lines: Annotated[
        dict[str, tuple[int, str]],
        about("for each file of lines how many it has, and the checksum of the last one; since schema 3"),
    ] = msgspec.field(default_factory=dict)


class SiteTotals(SiteCounts, kw_only=True):
    """Counts of a site over the steps."""

    frequency: Annotated[Number, about("mismatched / checked")] = None
    severity: Annotated[Number, about("largest of all steps")] = None
    frequency_upper_95: Annotated[Number, about("one-sided 95 % bound of the frequency")] = None


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
    ] = msgspec.field(default_factory=dict)
    other_sites: Annotated[dict[str, SiteTotals], about("the same for any other site")] = msgspec.field(
        default_factory=dict
    )
    layers: Annotated[
        dict[str, dict[str, list[Number]]],
        about("for each site, lists with one entry per layer: `frequency`, `severity`, `mismatched`, `injected`"),
    ] = msgspec.field(default_factory=dict)
    state: Annotated[Counts | None, about("`checked` and `mismatched` elements of the state, summed over steps")] = None
    gradient: Annotated[Counts | None, about("the same for the gradient")] = None
    worst_noise_to_signal: Annotated[Number, about("equation (5)")] = None
    parameter_difference: Annotated[Number, about("at the last step, the largest of all twins")] = None
    final_loss: Annotated[list[Number], about("loss of each twin at the last step")] = msgspec.field(
        default_factory=list
    )
    published: Annotated[dict[str, Any] | None, about("as in the manifest")] = None
    expected: Annotated[dict[str, Number] | None, about("as in the manifest")] = None
    seconds_per_step: Annotated[Number, about("median wall time of a step")] = None
    first_mismatch_step: Annotated[
        Number, about("number of the first step with a mismatch; `null` if there is none")
    ] = None
    odd_twins: Annotated[
        list[int],
        about("numbers of the twins that differ from the reference: the majority of three or more, the first of two"),
    ] = msgspec.field(default_factory=list)
    twins: Annotated[int | None, about("as in the manifest")] = None
    hosts: Annotated[int | None, about("as in the manifest")] = None
    rehearsal: Annotated[
        bool | None, about("whether all twins ran on simulated devices of one processor, which tests no hardware")
    ] = None
    first_difference: Annotated[
        dict[str, Any] | None,
        about(
            "of a trace that parted from another: `step`, `site`, `layer`, `devices`, as `sdc diff --json` tells them"
        ),
    ] = None
    abft: Annotated[
        dict[str, Any] | None, about("counts of the checked products, summed over steps, if the run checked any")
    ] = None
    state_digest: Annotated[
        list[str] | None,
        about("64-bit digest of each twin's final state, in hexadecimal: equal for equal bits on any mesh"),
    ] = None


class CampaignSummary(Ending, kw_only=True):
    """`summary.json` of a campaign."""

    planned: Annotated[int | None, about("planned injections")] = None
    done: Annotated[int | None, about("injections in the record")] = None
    complete: Annotated[bool | None, about("whether all are done")] = None
    reached: Annotated[int | None, about("injections whose step executed the struck operation")] = None
    outcomes: Annotated[
        dict[str, Share], about("for each outcome: `count`, `of`, `share`, and the 95 % interval from `low` to `high`")
    ] = msgspec.field(default_factory=dict)
    vulnerability: Annotated[Share | None, about("share of the injections that changed training")] = None
    harm: Annotated[Share | None, about("share of the injections that harmed training")] = None
    groups: Annotated[
        dict[str, dict[str, Any]],
        about("the same, grouped by `operation`, `layer`, `phase`, `scope`, `bit`, `field`, `fault`, `site`"),
    ] = msgspec.field(default_factory=dict)
    bits: Annotated[dict[str, dict[str, Any]], about("outcomes by dtype and bit")] = msgspec.field(default_factory=dict)
    detectors: Annotated[dict[str, Any], about("for each detector what it found, and after how many steps")] = (
        msgspec.field(default_factory=dict)
    )
    harmful_missed: Annotated[
        int | None, about("harmful injections that no detector found without a recorded trace")
    ] = None
    visible: Annotated[Share | None, about("share of the injections whose loss changed visibly")] = None
    steps_to_visible: Annotated[Number, about("median number of steps until the loss changed visibly")] = None


class StudySummary(Ending, kw_only=True):
    """`summary.json` of a study. Each study adds its own figures."""

    study: Annotated[str | None, about("name of a study of aggregation")] = None
