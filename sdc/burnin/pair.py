"""What a comparison of hosts with each other found, as a file: `pair.json` of a pair, `pool.json` of three or more.

Reading and checking it does without JAX.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from ..records import Format
from ..schema import Device, Environment, Fields, Header, Number, about
from ..verdict import Verdict

PAIR, POOL = "pair.json", "pool.json"  # names of the file in the folder of a pair, and of a pool
Stage: TypeAlias = Literal["step", "probes", "operations"]
# Folders of the stages, in the order in which they are run.
FOLDERS: dict[Stage, str] = {"step": "1-step", "probes": "2-probes", "operations": "3-operations"}


class TwinRow(Fields, kw_only=True):
    """One of the hosts that are compared: a twin, with the devices of it."""

    twin: Annotated[int, about("its number among the twins, from 0")]
    host: Annotated[str, about("what the sentences call it: the host name, with the process where hosts share a name")]
    processes: Annotated[list[int], about("indices of the processes that are this twin")]
    devices: Annotated[list[Device], about("its devices, with serial numbers and the like")]


class StageRow(Fields, kw_only=True):
    """One stage: a run of the twins, recorded in a folder of its own."""

    name: Annotated[Stage, about("digests exchanged once in a microstep; at each submodule; of each operation")]
    folder: Annotated[str, about("of its record, below that of this file")]
    verdict: Annotated[Verdict, about("what follows from its record")]
    sentence: Annotated[str, about("that in words")]
    steps: Annotated[int, about("steps on record")]
    planned: Annotated[int, about("steps that were asked for; the stage of operations ends at the first difference")]
    ended: Annotated[bool, about("whether it came to its end")]
    checked: Annotated[int, about("elements compared; of the stage of operations, digests")]
    mismatched: Annotated[int, about("elements that differ; of the stage of operations, digests")]
    hits: Annotated[int, about("steps in which something differs")]
    first: Annotated[int | None, about("the first of them")] = None


class RankDifference(Fields, kw_only=True):
    """A place on the mesh that differs."""

    twin: Annotated[int, about("number of the twin; of two, by convention, the second")]
    data: Annotated[int, about("data-parallel rank in it")]
    model: Annotated[int, about("tensor-parallel rank in it")]
    mismatched: Annotated[int, about("elements that differ there")]


class OperationRow(Fields, kw_only=True):
    """The first operation of a step that differs, although everything before it agrees."""

    step: Annotated[int, about("number of the step")]
    site: Annotated[str, about("name of the operation")]
    operation: Annotated[str, about("what it computes")]
    source: Annotated[str, about("line of the program, as far as JAX knows it")]
    layer: Annotated[int | None, about("number of the layer, in a loop over layers")] = None
    agreeing: Annotated[int, about("digests before it in the step, all of which agree")] = 0
    ranks: Annotated[list[dict[str, int]], about("where it differs: index on each axis of the mesh")] = []


class PairDifference(Fields, kw_only=True):
    """Which rank, which operation, how often, how severe."""

    ranks: Annotated[list[RankDifference], about("where, the most elements first")]
    sites: Annotated[list[str], about("submodules that differ, the most often hit first")]
    layers: Annotated[list[int], about("layers of them")]
    mismatched: Annotated[int, about("elements that differ, of the stage that counts most of them")]
    checked: Annotated[int, about("elements compared there")]
    frequency: Annotated[Number, about("share of the elements that differ; `null` where none were counted")] = None
    severity: Annotated[Number, about("largest mean relative error; `null` where none was measured")] = None
    course: Annotated[
        Literal["transient", "intermittent", "persistent"] | None,
        about("whether it came again, in later steps and stages; `null` if no step followed"),
    ] = None
    operation: Annotated[OperationRow | None, about("the first operation; `null` if it was not seen")] = None


class Pair(Header, kw_only=True, tag="jax-sdc pair"):
    """`pair.json` and `pool.json`."""

    kind: Annotated[Literal["pair", "pool"], about("`pair` of two hosts, `pool` of three or more")]
    id: Annotated[str, about("random, another one for each comparison")]
    created: Annotated[str, about("when it began, UTC")]
    ended: Annotated[str, about("when the file was written, UTC")]
    seconds: Annotated[float, about("how long it took by a clock that does not jump, compilation included")]
    verdict: Annotated[Verdict, about("`clean`, `corrupt` or `inconclusive`")]
    evidence: Annotated[list[str], about("what it rests on: `twins` of two hosts, `vote` of more")]
    sentences: Annotated[list[str], about("findings and reasons, the gravest first")]
    hosts: Annotated[list[TwinRow], about("the hosts that are compared")]
    suspects: Annotated[list[str], about("hosts that a majority names; two hosts have no majority")]
    undecided: Annotated[list[str], about("hosts that differ where no majority agreed; of two, both")]
    stages: Annotated[list[StageRow], about("what was run, in order")]
    difference: Annotated[PairDifference | None, about("what differs; `null` if nothing was seen to")] = None
    lost: Annotated[str | None, about("why it ended early: a lost peer, a signal; `null` if it did not")] = None
    next: Annotated[list[str], about("what to do next, the first thing first")] = []
    faults: Annotated[list[str], about("simulated faults, one readable line each")] = []
    settings: Annotated[dict[str, Any], about("what was asked for")] = {}
    environment: Annotated[Environment | None, about("what must be equal for bits to be comparable")] = None
    command: Annotated[list[str] | None, about("the command line")] = None

    @property
    def simulated(self) -> bool:
        """Whether faults were simulated: then nothing here is about the hardware."""
        return bool(self.faults)


def contradictions(pair: Pair) -> Iterator[str]:
    """What in a result cannot be so, in words: a verdict never beats what was counted."""
    names = [row.host for row in pair.hosts]
    seen = any(stage.verdict is Verdict.CORRUPT or stage.hits for stage in pair.stages)
    if seen != (pair.verdict is Verdict.CORRUPT):
        yield f"a difference was {'' if seen else 'not '}seen, and the verdict is {pair.verdict.acceptance}"
    if seen != (pair.difference is not None):
        yield f"a difference was {'' if seen else 'not '}seen, and is {'not ' if seen else ''}described"
    if pair.verdict is Verdict.CLEAN:
        if pair.lost is not None or not all(stage.ended and stage.verdict is Verdict.CLEAN for stage in pair.stages):
            yield "the verdict is PASS although something did not run to the end"
        if not pair.stages or pair.stages[0].checked < 1 or pair.stages[0].steps < 1:
            yield "the verdict is PASS although nothing was checked"
        if len(names) < 2:
            yield "the verdict is PASS although there was nothing to compare with"
    if len(set(names)) < len(names):
        yield "a host stands there twice"
    if unknown := sorted({*pair.suspects, *pair.undecided} - set(names)):
        yield f"{unknown[0]} was not compared"
    if pair.suspects and (len(names) < 3 or not seen):
        yield f"{pair.suspects[0]} is named without a majority"


PAIR_FORMAT = Format(
    type=Pair,
    noun="result of sdc pair or sdc pool",
    remedy="compare the hosts again",
    source="give a file that sdc pair or sdc pool wrote, or its folder",
    names=(PAIR, POOL),
    contradictions=contradictions,
)
