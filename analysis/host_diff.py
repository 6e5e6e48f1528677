"""Determines which hosts differ, from the stages of a comparison and from several pairs together.

Each stage is the record of a twin run; see `sdc.burnin.pair` for the result.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from sdc import records, schema
from sdc.burnin import FOLDERS, OperationRow, Pair, PairDifference, RankDifference, Stage, StageRow, TwinRow
from sdc.records import Contents, RecordError, read_record
from sdc.schema import RunSummary
from sdc.verdict import SIMULATED, Verdict, gravest

from .headline import Course, Evidence, amount, hardware, headline, listed, of_twins, spot
from .run_verdict import odd_digests
from .series import whole, worst
from .summary import summary_of

MOST_WRONG = 12
"""Maximum number of hosts that are identified as wrong; a larger number would indicate a common cause rather than
individual faults."""
Edge = tuple[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
    """The facts about a comparison that are known before its first stage."""

    kind: Literal["pair", "pool"]
    id: str
    created: str
    hosts: Sequence[TwinRow]
    processes: int
    steps: int
    settings: Mapping[str, Any]
    faults: Sequence[str] = ()
    command: Sequence[str] = ()
    on_record: Sequence[str] = ()  # differences in the ledgers of the hosts that nobody has acknowledged


class Read(NamedTuple):
    """A stage as read from its folder."""

    row: StageRow
    run: Contents | None  # None if the record cannot be read
    summary: RunSummary
    evidence: Evidence | None

    @property
    def seen(self) -> bool:
        """Whether the stage found a difference."""
        return self.row.verdict == "corrupt"


def combine_results(results: Sequence[Pair]) -> Pair:
    """Returns the result of a comparison of hosts from those that several of its processes wrote: the gravest, and
    among those the one with most steps, with the first sentences of the others."""
    worst = gravest(each.verdict for each in results)
    chosen = max(
        (each for each in results if each.verdict is worst), key=lambda each: sum(stage.steps for stage in each.stages)
    )
    others = (f"process {each.host.process}: {each.sentences[0]}" for each in results if each.sentences)
    said = chosen.sentences[:1]
    more = [text for text in others if text.partition(": ")[2] not in said]
    return msgspec.structs.replace(chosen, sentences=[*chosen.sentences, *more])


def stage_differs(folder: Path) -> bool:
    """Returns whether the record of a stage shows a difference, in which case the next stage has to run."""
    return summary_of(read_record(folder, "twin")).verdict == "corrupt"


def judge_pair(run: Path, opening: Opening, *, ended: str, seconds: float, lost: str | None = None) -> Pair:
    """Derives the result of a comparison of hosts from the records of its stages; `lost` states why the comparison is
    incomplete, and is None if it is complete."""
    stages = [stage for name in FOLDERS if (stage := _read(run, name, opening.steps)) is not None]
    manifests = [stage.run.run for stage in stages if stage.run is not None]
    faults = next((one.suspect.faults if one.suspect else [] for one in manifests), list(opening.faults))
    environment = next((one.environment for one in manifests), None)
    named, open_ = _odd(stages, opening)
    found = _difference(stages)
    verdict, sentences = _verdict(stages, opening, named, open_, found, lost, "SIMULATED: " if faults else "")
    kinds = ["twins" if opening.kind == "pair" else "vote"] if stages and stages[0].row.checked else []
    return Pair(
        kind=opening.kind, id=opening.id, created=opening.created, ended=ended, seconds=seconds,
        verdict=verdict, evidence=kinds, sentences=[*sentences, *opening.on_record],
        hosts=list(opening.hosts), suspects=named, undecided=open_, stages=[stage.row for stage in stages],
        difference=found, lost=lost, next=_next(verdict, opening, named, run, simulated=bool(faults)), faults=faults,
        settings=dict(opening.settings),
        environment=environment if isinstance(environment, schema.Environment) else None,
        command=list(opening.command) or None,
    )  # fmt: skip


def _read(run: Path, name: Stage, planned: int) -> Read | None:
    """Reads a complete or incomplete stage from its folder; returns None if the stage has not started."""
    folder = run / FOLDERS[name]
    if not (folder / records.MANIFEST).is_file():
        return None
    try:
        record = read_record(folder, "twin")
    except RecordError as error:
        row = StageRow(
            name=name, folder=FOLDERS[name], verdict=Verdict.INCONCLUSIVE, sentence=str(error), steps=0,
            planned=planned, ended=False, checked=0, mismatched=0, hits=0,
        )  # fmt: skip
        return Read(row, None, RunSummary(), None)
    summary, evidence = summary_of(record), of_twins(record)
    sentence = headline(record, summary).sentence
    rows: Sequence[schema.Counts | schema.OperationCounts] = list(summary.sites.values())
    if name == "operations":
        rows = [line.operations for line in record.steps if line.operations]
    checked, mismatched = (sum(whole(getattr(row, key)) or 0 for row in rows) for key in ("checked", "mismatched"))
    if name == "operations" and (place := _first_operation(record)) is not None:
        sentence = f"{_operation_words(place)}, first at step {place.step}; {mismatched:,} of {checked:,} digests"
    row = StageRow(
        name=name, folder=FOLDERS[name], verdict=Verdict(summary.verdict or "inconclusive"), sentence=sentence,
        steps=len(record.steps), planned=planned, ended=record.ended, checked=checked, mismatched=mismatched,
        hits=len(evidence.steps), first=min(evidence.steps, default=None),
    )  # fmt: skip
    return Read(row, record, summary, evidence)


def _odd(stages: Sequence[Read], opening: Opening) -> tuple[list[str], list[str]]:
    """Returns the hosts that a majority identifies as wrong, and the hosts that remain undecided."""
    names = {row.twin: row.host for row in opening.hosts}
    if not any(stage.seen for stage in stages):
        return [], []
    if opening.kind == "pair":
        return [], list(names.values())
    sure, unsure, nobody = set[int](), set[int](), False
    for stage in stages:
        lines = stage.run.steps if stage.run else []
        rows: list[schema.MismatchRow | schema.TwinCounts | schema.OperationCounts] = []
        rows += stage.run.mismatches if stage.run else []
        rows += [part for line in lines for part in (line.state, line.gradient, line.operations) if part is not None]
        for row in rows:
            ranks = (rank.get("twin") if isinstance(rank, dict) else rank.twin for rank in row.ranks)
            twins = {twin for rank in ranks if (twin := whole(rank)) is not None}
            (unsure if row.undecided else sure).update(twins)
        digests = stage.summary.state_digest or ()
        sure.update(odd_digests(digests))
        nobody |= len(set(digests)) > 1 and not odd_digests(digests)
    certain = unsure <= sure and not nobody and bool(sure)
    open_ = [] if certain else [name for twin, name in names.items() if twin not in sure]
    return [names[twin] for twin in sorted(sure)], open_


def _difference(stages: Sequence[Read]) -> PairDifference | None:
    seen = [stage for stage in stages if stage.seen]
    if not seen:
        return None
    counted = max(seen, key=lambda stage: (stage.row.name != "operations", stage.row.mismatched))
    evidence, row = counted.evidence, counted.row
    assert evidence is not None
    ranks = [
        RankDifference(twin=twin or 0, data=data or 0, model=model or 0, mismatched=number)
        for (twin, data, model), number in evidence.ranks.most_common()
    ]
    located = row.name != "operations" and row.mismatched
    operations = (_first_operation(stage.run) for stage in stages if stage.run is not None)
    return PairDifference(
        ranks=ranks, sites=list(evidence.sites), layers=list(evidence.layers), mismatched=row.mismatched,
        checked=row.checked, frequency=row.mismatched / row.checked if located else None,
        severity=worst(site.severity for site in counted.summary.sites.values()), course=_course(stages),
        operation=next(filter(None, operations), None),
    )  # fmt: skip


def _first_operation(run: Contents) -> OperationRow | None:
    for line in run.steps:
        found = line.operations
        if found is not None and found.site is not None:
            return OperationRow(
                step=line.step, site=found.site, operation=str(found.operation), source=found.source or "",
                layer=found.layer, agreeing=whole(found.agreeing) or 0, ranks=found.ranks,
            )  # fmt: skip
    return None


def _operation_words(one: OperationRow) -> str:
    layer = "" if one.layer is None else f" of layer {one.layer}"
    return f"{one.site}{layer}" + (f", at {one.source}" if one.source else "")


def _course(stages: Sequence[Read]) -> Course | None:
    """Derives the course of the fault from the steps after the first difference and from the later stages, which repeat
    those steps."""
    first, later = stages[0], [stage for stage in stages[1:] if stage.row.steps]
    course = None if first.evidence is None else first.evidence.course
    if not later:
        return course
    again = [stage.row for stage in later if stage.row.hits]
    if not again and course in (None, "transient"):
        return "transient"
    always = all(stage.row.hits == stage.row.steps for stage in later)
    return "persistent" if always and course in (None, "persistent") else "intermittent"


def _verdict(
    stages: Sequence[Read],
    opening: Opening,
    named: Sequence[str],
    open_: Sequence[str],
    found: PairDifference | None,
    lost: str | None,
    mark: str,
) -> tuple[Verdict, list[str]]:
    lines = [f"{stage.row.name}: {stage.row.sentence}" for stage in stages]
    if found is not None:
        said = [f"{_who(opening, named, open_)}: {_what(stages, found, opening)}"]
        quiet = [stage.row for stage in stages if not stage.seen and stage.row.ended]
        if quiet:
            names = listed([f"{row.name} ({row.steps} steps)" for row in quiet])
            said.append(f"not found again in the stage{'s' * (len(quiet) > 1)} {names}")
        if open_:
            more = "a third host, or swap parts," if opening.kind == "pair" else "more hosts"
            said.append(f"test with {more} to find out which of them is wrong")
        ended = [f"ended early: {lost}"] if lost is not None else []
        return Verdict.CORRUPT, [mark + "; ".join(said), *ended, *lines]
    if not stages:
        return Verdict.INCONCLUSIVE, [mark + (lost or "nothing was checked")]
    first = stages[0]
    clean = first.row.verdict is Verdict.CLEAN and first.row.ended
    if lost is None and clean and opening.processes == 1 and not mark:
        reason = "all twins belong to one process, so no hosts are compared; start a process on each host"
        return Verdict.INCONCLUSIVE, [reason, *lines]
    if lost is None and clean:
        hosts = f"{len(opening.hosts)} hosts agree ({listed([row.host for row in opening.hosts])})"
        return Verdict.CLEAN, [f"{mark}{hosts}: {first.summary.reason}"]
    so_far = f"; until then, the hosts agreed in {first.row.steps} steps ({amount(first.row.checked)} elements)"
    return Verdict.INCONCLUSIVE, [mark + (lost + so_far if lost else first.row.sentence), *lines]


def _who(opening: Opening, named: Sequence[str], open_: Sequence[str]) -> str:
    if opening.kind == "pair":
        return f"hosts {listed(open_)} differ"
    hosts, several = f"{len(opening.hosts)} hosts", len(named) > 1
    who = f"host{'s' * several} {listed(named)} differ{'' if several else 's'} from the majority of {hosts}"
    if not open_:
        return who
    tie = f"no majority among {hosts} shows which of {listed(open_)} is wrong"
    return f"{who}; elsewhere {tie}" if named else tie


def _what(stages: Sequence[Read], found: PairDifference, opening: Opening) -> str:
    """Describes place, frequency and severity: `rank model=1, layer 2, ffn, forward, 4 of 9.0e9 elements, relative
    3e-3`."""
    counted = next(stage for stage in stages if stage.seen and stage.row.checked == found.checked)
    evidence, run = counted.evidence, counted.run
    assert evidence is not None
    assert run is not None
    axes = [axis for axis in ("data", "model") if (run.run.mesh or {}).get(axis, 1) > 1]
    places = list(dict.fromkeys(" ".join(f"{axis}={getattr(rank, axis)}" for axis in axes) for rank in found.ranks))
    parts = [spot(evidence)]
    if axes and places:
        few = f"rank{'s' * (len(places) > 1)} {listed(places)}"
        parts.insert(0, few if len(places) <= 4 else f"{len(places)} ranks")
    if found.mismatched and counted.row.name != "operations":
        parts.append(f"{amount(found.mismatched)} of {amount(found.checked)} elements")
    elif not evidence.sites:
        parts.append(str(counted.summary.reason).partition(";")[0])
    if found.severity is not None:
        parts.append(f"relative {float(found.severity):.2g}")
    parts.append(found.course or "no step followed, so recurrence is unknown")
    said = ", ".join(filter(None, parts))
    if found.operation is not None:
        said += f"; the first operation that differs is {_operation_words(found.operation)}"
    # In a pair, either host may be wrong.
    twins = {rank.twin for rank in found.ranks} if opening.kind == "pool" else {row.twin for row in opening.hosts}
    wanted = dict.fromkeys((twin, rank.data, rank.model) for rank in found.ranks for twin in sorted(twins))
    devices = hardware(run.run, wanted, limit=4) if found.ranks else ""
    return said + (f" ({devices})" if devices else "")


def _next(verdict: Verdict, opening: Opening, named: Sequence[str], run: Path, *, simulated: bool) -> list[str]:
    """Returns the next actions, with the commands."""
    flags = " ".join(str(flag) for flag in opening.settings.get("flags", ()))
    flags = f"{flags} " if flags else ""
    if verdict is Verdict.INCONCLUSIVE:
        return ["fix the cause that the verdict states, and run the comparison again in a new folder"]
    if verdict is Verdict.CLEAN:
        return []
    if opening.kind == "pool" and named:
        if simulated:
            return [SIMULATED]
        report = "keep the run folder for the vendor"
        return [f"take {listed(named)} out of service and run sdc burnin on it; {report}"]
    places = [row.host for row in opening.hosts]
    if opening.kind == "pool":
        return [
            f"add hosts until a majority agrees: sdc pool {flags}--run {run}-more --coordinator HOST:PORT "
            f"--processes {len(places) + 1} --process N"
        ]
    a, b = places
    return [
        f"compare both with a third host in a single run: sdc pool {flags}--run {run}-third --coordinator HOST:PORT "
        "--processes 3 --process N",
        *(
            f"or pair {host} with a third host: sdc pair {flags}--run {run}-{letter} --coordinator HOST:PORT "
            "--processes 2 --process N"
            for host, letter in ((a, "a"), (b, "b"))
        ),
        f"then: sdc pair --resolve {run} {run}-a {run}-b",
    ]


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The combined result of several pairs."""

    verdict: Verdict  # corrupt if any pair differs, clean if all agree
    suspects: tuple[str, ...]  # hosts that are wrong in all of the most likely explanations
    undecided: tuple[str, ...]  # hosts that are wrong in some of them
    sentences: tuple[str, ...]
    simulated: bool


def resolve_pairs(pairs: Sequence[Pair]) -> Resolution:
    """Determines which hosts are wrong from pairs that differ and pairs that agree.

    Each pair that differs contains a wrong host. The most likely explanation has the fewest wrong hosts and, among such
    explanations, the fewest wrong hosts that agreed with a healthy host. Simulated pairs count only if all pairs are
    simulated.
    """
    edges: dict[Edge, bool] = {}
    void = []
    simulated = all(pair.simulated for pair in pairs)
    for pair in pairs:
        if len(pair.hosts) != 2:
            raise ValueError(f"a {pair.kind} of {len(pair.hosts)} hosts is not a pair; pass results of sdc pair")
        a, b = sorted(row.host for row in pair.hosts)
        if any(row.devices and row.host != row.devices[0].host for row in pair.hosts):
            raise ValueError(f"{a} and {b} are the same host; pass pairs of different hosts")
        if pair.simulated and not simulated:
            void.append(f"{a} and {b}: simulated, so this pair is not counted")
        elif pair.verdict is Verdict.INCONCLUSIVE:
            void.append(f"{a} and {b}: inconclusive, so this pair is not counted")
        else:
            edges[a, b] = edges.get((a, b), False) or pair.verdict is Verdict.CORRUPT
    mark = "SIMULATED: " if simulated else ""
    lines = [f"{a} and {b} {'differ' if differ else 'agree'}" for (a, b), differ in edges.items()] + void
    if not any(edges.values()):
        said = "differs" if edges else "has a conclusive result"
        if edges and void:
            said = f"differs, but {len(void)} of {len(pairs)} have no conclusive result"
        verdict = Verdict.INCONCLUSIVE if void or not edges else Verdict.CLEAN
        return Resolution(verdict, (), (), (f"{mark}no pair {said}", *lines), simulated)
    found = explain(edges)
    sure = frozenset.intersection(*found) if found else frozenset()
    open_ = frozenset.union(*found) - sure if found else frozenset(host for edge in edges for host in edge)
    first = f"{listed(sorted(sure))} {'is' if len(sure) == 1 else 'are'} wrong, assuming as few wrong hosts as possible"
    parts = [first] * bool(sure)
    parts += [f"the pairs do not show which of {listed(sorted(open_))} is wrong; pair each with another host"] * bool(
        open_
    )
    return Resolution(
        Verdict.CORRUPT, tuple(sorted(sure)), tuple(sorted(open_)), (mark + "; ".join(parts), *lines), simulated
    )


def explain(edges: Mapping[Edge, bool]) -> list[frozenset[str]]:
    """Returns the most likely sets of wrong hosts, given which edges differ and which agree; an empty list if more than
    `MOST_WRONG` hosts would have to be wrong."""
    differing = [edge for edge, differ in edges.items() if differ]
    for size in range(1, MOST_WRONG + 1):
        if found := set(_covers(differing, size)):
            odd = {
                each: sum(not differ and (a in each) != (b in each) for (a, b), differ in edges.items())
                for each in found
            }
            return [each for each in found if odd[each] == min(odd.values())]
    return []


def _covers(edges: Sequence[Edge], size: int) -> Iterator[frozenset[str]]:
    """Yields sets of at most `size` hosts that contain a host of every edge."""
    if not edges:
        yield frozenset()
    elif size:
        for host in edges[0]:
            for rest in _covers([edge for edge in edges if host not in edge], size - 1):
                yield rest | {host}
