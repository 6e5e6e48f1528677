"""The result of comparing hosts, as a file: `pair.json` for a pair, `pool.json` for three or more.

Reading and checking this file does not need JAX.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from ..records import Format
from ..schema import Device, Environment, Fields, Header, Number, about
from ..verdict import Verdict

PAIR, POOL = "pair.json", "pool.json"  # names of the result files of a pair and of a pool
Stage: TypeAlias = Literal["step", "probes", "operations"]
# Folders of the stages, in the order in which they run.
FOLDERS: dict[Stage, str] = {"step": "1-step", "probes": "2-probes", "operations": "3-operations"}


class TwinRow(Fields, kw_only=True):
    """A host of the comparison, which is one twin, with its devices."""

    twin: Annotated[int, about("number of the twin, from 0")]
    host: Annotated[
        str, about("name used in sentences: the host name, with the process if several hosts have this name")
    ]
    processes: Annotated[list[int], about("indices of the processes of this twin")]
    devices: Annotated[list[Device], about("devices of the host, and their hardware")]


class StageRow(Fields, kw_only=True):
    """One stage: a run of the twins, recorded in its own folder."""

    name: Annotated[
        Stage, about("how often twins exchange digests: once per microstep, at each submodule, or at each operation")
    ]
    folder: Annotated[str, about("folder of the stage's record, relative to the folder of this file")]
    verdict: Annotated[Verdict, about("verdict of the stage's record")]
    sentence: Annotated[str, about("the verdict in words")]
    steps: Annotated[int, about("number of steps in the record")]
    planned: Annotated[int, about("number of planned steps; the stage of operations ends at the first difference")]
    ended: Annotated[bool, about("whether the stage ran to the end")]
    checked: Annotated[int, about("number of elements compared (of digests, in the stage of operations)")]
    mismatched: Annotated[int, about("number of elements that differ (of digests, in the stage of operations)")]
    hits: Annotated[int, about("number of steps with a difference")]
    first: Annotated[int | None, about("number of the first step with a difference")] = None


class RankDifference(Fields, kw_only=True):
    """A device on the mesh whose results differ."""

    twin: Annotated[int, about("number of the differing twin; by convention, the second of two twins")]
    data: Annotated[int, about("its data-parallel rank")]
    model: Annotated[int, about("its tensor-parallel rank")]
    mismatched: Annotated[int, about("number of elements that differ on this device")]


class OperationRow(Fields, kw_only=True):
    """The first operation of a step whose digest differs although all earlier digests agree."""

    step: Annotated[int, about("number of the step")]
    site: Annotated[str, about("name of the operation")]
    operation: Annotated[str, about("JAX primitive of the operation")]
    source: Annotated[str, about("source line of the program, if JAX knows it")]
    layer: Annotated[int | None, about("number of the layer, in a loop over layers")] = None
    agreeing: Annotated[int, about("number of earlier digests in the step, all of which agree")] = 0
    ranks: Annotated[list[dict[str, int]], about("ranks on which the operation differs, as indices on mesh axes")] = []


class PairDifference(Fields, kw_only=True):
    """A difference between hosts: ranks, operation, frequency and severity."""

    ranks: Annotated[list[RankDifference], about("devices that differ, in descending order of `mismatched`")]
    sites: Annotated[list[str], about("submodules that differ, in descending order of frequency")]
    layers: Annotated[list[int], about("layers that differ")]
    mismatched: Annotated[int, about("number of elements that differ, in the stage where this number is largest")]
    checked: Annotated[int, about("number of elements compared in that stage")]
    frequency: Annotated[Number, about("share of elements that differ; `null` if none were counted")] = None
    severity: Annotated[Number, about("largest mean relative error; `null` if none was measured")] = None
    course: Annotated[
        Literal["transient", "intermittent", "persistent"] | None,
        about("whether the difference recurred in later steps and stages; `null` if no step followed"),
    ] = None
    operation: Annotated[OperationRow | None, about("the first operation that differs; `null` if unknown")] = None


class Pair(Header, kw_only=True, tag="jax-sdc pair"):
    """`pair.json` and `pool.json`."""

    kind: Annotated[Literal["pair", "pool"], about("`pair` for two hosts, `pool` for three or more")]
    id: Annotated[str, about("random identifier of the comparison")]
    created: Annotated[str, about("when the comparison began, UTC")]
    ended: Annotated[str, about("when the file was written, UTC")]
    seconds: Annotated[float, about("duration by a monotonic clock, including compilation")]
    verdict: Annotated[Verdict, about("`clean`, `corrupt` or `inconclusive`")]
    evidence: Annotated[list[str], about("kind of evidence: `twins` for two hosts, `vote` for more")]
    sentences: Annotated[list[str], about("findings and reasons, the most severe first")]
    hosts: Annotated[list[TwinRow], about("the compared hosts")]
    suspects: Annotated[list[str], about("hosts that differ from a majority; two hosts have no majority")]
    undecided: Annotated[list[str], about("hosts that differ without a majority; in a pair, both hosts")]
    stages: Annotated[list[StageRow], about("stages, in the order in which they ran")]
    difference: Annotated[PairDifference | None, about("difference between the hosts; `null` if none was found")] = None
    lost: Annotated[str | None, about("why the comparison ended early: a lost peer or a signal; otherwise `null`")] = (
        None
    )
    next: Annotated[list[str], about("next steps, in order")] = []
    faults: Annotated[list[str], about("one readable line for each simulated fault")] = []
    settings: Annotated[dict[str, Any], about("settings of the comparison")] = {}
    environment: Annotated[Environment | None, about("properties that must be equal for bits to be comparable")] = None
    command: Annotated[list[str] | None, about("the command line")] = None

    @property
    def simulated(self) -> bool:
        """Whether faults were simulated, in which case the result says nothing about the hardware."""
        return bool(self.faults)


def contradictions(pair: Pair) -> Iterator[str]:
    """Yields descriptions of the contradictions in a result; its counts take precedence over its stated verdict."""
    names = [row.host for row in pair.hosts]
    seen = any(stage.verdict is Verdict.CORRUPT or stage.hits for stage in pair.stages)
    if seen != (pair.verdict is Verdict.CORRUPT):
        yield f"{'a' if seen else 'no'} difference was found, but the verdict is {pair.verdict.acceptance}"
    if seen != (pair.difference is not None):
        yield f"{'a' if seen else 'no'} difference was found, but {'none' if seen else 'one'} is described"
    if pair.verdict is Verdict.CLEAN:
        if pair.lost is not None or not all(stage.ended and stage.verdict is Verdict.CLEAN for stage in pair.stages):
            yield "the verdict is PASS although a stage did not run to the end"
        if not pair.stages or pair.stages[0].checked < 1 or pair.stages[0].steps < 1:
            yield "the verdict is PASS although nothing was checked"
        if len(names) < 2:
            yield "the verdict is PASS although there was no other host to compare with"
    if len(set(names)) < len(names):
        yield "a host is listed twice"
    if unknown := sorted({*pair.suspects, *pair.undecided} - set(names)):
        yield f"{unknown[0]} was not compared"
    if pair.suspects and (len(names) < 3 or not seen):
        yield f"{pair.suspects[0]} is a suspect, but there is no majority"


PAIR_FORMAT = Format(
    type=Pair,
    noun="result of sdc pair or sdc pool",
    remedy="compare the hosts again",
    source="give a file that sdc pair or sdc pool wrote, or the folder of that file",
    names=(PAIR, POOL),
    contradictions=contradictions,
)
