"""Recording and verification of golden digests on the devices of this host."""

import dataclasses
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import msgspec

from sdc.records import describe_devices

from ..records import identify, package_version
from ..schema import Device, now
from ..verdict import Verdict, gravest
from .golden_register import Agreed, GoldenEntry, Recording, Register, Seen, foreign, lookup, mark_of, parse_key
from .host import surroundings
from .judgement import judge
from .results import BurninResult, BurninSettings, Tally
from .rounds import Listener, burn_in, planned_result
from .sensors import Monitor, driver_errors
from .workloads import BurninWorkload, find_level, workloads

DOUBT = "checksums flag rows that recomputation reproduces"


@dataclasses.dataclass
class Confirmed:
    """The result of recording or verifying digests."""

    verdict: Verdict = Verdict.CLEAN  # inconclusive if there is a reason not to rely on the digests
    sentences: list[str] = dataclasses.field(default_factory=list)  # the most severe first
    confirmed: int = 0  # number of digests that this host also computed
    elsewhere: int = 0  # number of digests of programs that did not run on this host
    repeated_only: int = 0  # number of recorded digests that only repetition on one device confirms

    def add(self, verdict: Verdict, *sentences: str) -> None:
        """Adds sentences, and keeps the most severe verdict."""
        self.verdict = gravest([self.verdict, verdict]) or verdict
        self.sentences += sentences


def record(
    settings: BurninSettings, devices: Sequence[jax.Device], *, on_event: Listener = lambda event: None
) -> tuple[Register | None, Confirmed]:
    """Runs the workloads of a level, and records the digests on which runs or devices agree.

    Returns None instead of a register if any outputs differed, any workload did not run to the end, or no outputs
    agreed.
    """
    result, summary = _run(settings, settings.chosen(devices), devices, on_event)
    summary.sentences += [f"not recorded: {name}: {DOUBT}" for name in doubtful(result)]
    if summary.verdict is not Verdict.CLEAN:
        return None, summary
    register = register_of(result, surroundings(devices))
    if not register.entries:
        summary.add(Verdict.INCONCLUSIVE, "no workload ran twice on one device, or on two devices of one kind")
        return None, summary
    confirmed = {tally.key for tally in result.workloads if tally.voted or tally.referred}
    summary.repeated_only = sum(entry.subject.key not in confirmed for entry in register.entries)
    if summary.repeated_only:
        summary.sentences.append(
            f"warning: {summary.repeated_only} of {len(register.entries)} digests are confirmed only by repetition on "
            "one device, so a fault that repeats itself would affect them too; record digests on other hosts, and "
            "merge the registers"
        )
    return register, summary


def verify(
    register: Register,
    devices: Sequence[jax.Device],
    *,
    rounds: int = 2,
    on_event: Listener = lambda event: None,
) -> Confirmed:
    """Runs the workloads of a register, and compares their digests with the recorded ones.

    The verdict is inconclusive if no digest applies to this host, or if the register lacks digests of workloads that
    ran.
    """
    golden = lookup(register)
    summary, used, wrong, missing = Confirmed(), set[str | None](), set[str | None](), set[str]()
    # Workloads of the recorded burn-ins, by their level, types and seed.
    kinds: dict[tuple[str, tuple[str, ...], int], set[str]] = defaultdict(set)
    for entry in register.entries:
        for seen in entry.seen:
            recording = register.recordings[seen.recording]
            kinds[recording.level, tuple(recording.dtypes), entry.subject.seed].add(entry.subject.workload)
    for (level, dtypes, seed), names in kinds.items():
        settings = BurninSettings(level=level, dtypes=dtypes, rounds=rounds)
        every = workloads(level, devices, dtypes, seed=seed)
        found = [workload for workload in every if workload.name in names]
        if not found:
            continue
        result, part = _run(settings, found, devices, on_event, golden)
        summary.add(part.verdict, *part.sentences)
        used |= {tally.key for tally in result.workloads if tally.golden}
        wrong |= {tally.key for tally in result.workloads if tally.differences}
        missing |= {tally.key for tally in result.workloads if tally.key is not None and tally.key not in golden}
    if missing or not used:
        summary.add(Verdict.INCONCLUSIVE, *foreign(register, missing, surroundings(devices)))
    if not used and not missing:
        summary.sentences.append("the devices of this host can run none of the register's workloads")
    summary.confirmed, summary.elsewhere = len(used - wrong), len(golden) - len(used)
    return summary


def _run(
    settings: BurninSettings,
    found: Sequence[BurninWorkload],
    devices: Sequence[jax.Device],
    on_event: Listener,
    golden: Mapping[str, str] | None = None,
) -> tuple[BurninResult, Confirmed]:
    """Runs a burn-in, and evaluates its result without regard to throughput."""
    described = describe_devices(devices)
    with Monitor(described) as monitor:
        result = burn_in(
            found, devices, minutes=settings.minutes, rounds=settings.rounds, golden=golden, on_event=on_event,
            pauses=find_level(settings.level).pauses,
            result=planned_result(found, devices, described, settings=settings),
        )  # fmt: skip
    judged, summary = judge(result), Confirmed()
    if judged.verdict is Verdict.CORRUPT:
        summary.add(Verdict.CORRUPT, *judged.sentences)
    problems = [f"{end.where} did not run to the end: {end.reason}" for end in result.unfinished]
    courses = enumerate(monitor.courses())
    problems += [f"device {index}: {each}" for index, course in courses if course for each in driver_errors(course)]
    if problems or result.stopped is not None:
        summary.add(Verdict.INCONCLUSIVE, *problems)
    return result, summary


def doubtful(result: BurninResult) -> list[str]:
    """Returns the names of workloads whose digests must not be recorded, although all of their runs agree.

    Flagged rows that recomputation reproduces indicate either a false alarm or a fault that repeats itself.
    """
    return sorted({tally.workload for tally in result.workloads if tally.flagged > tally.confirmed})


def recorded(result: BurninResult) -> dict[str, str]:
    """Returns the digests, by key, of workloads whose runs or devices all agreed; returns none for a simulation."""
    if result.simulated:
        return {}
    bad = {tally.workload for tally in result.workloads if tally.differences}
    return {
        tally.key: tally.digest
        for tally in result.workloads
        if tally.workload not in bad
        and tally.key is not None
        and tally.digest is not None
        and (tally.repeated or tally.voted)
    }


def register_of(result: BurninResult, environment: Mapping[str, str]) -> Register:
    """Returns a register of the digests on which runs or devices agreed, for an environment from `surroundings`."""
    name, mark = uuid.uuid4().hex, mark_of(environment)
    doubts = doubtful(result)
    rows: dict[str | None, list[Tally]] = defaultdict(list)
    for tally in result.workloads:
        rows[tally.key].append(tally)
    entries = []
    for key, digest in sorted(recorded(result).items()):
        subject = parse_key(key)
        if subject.environment != mark:
            raise ValueError(f"the burn-in ran in environment {subject.environment}; expected environment {mark}")
        if subject.workload in doubts:
            continue
        tallies = [tally for tally in rows[key] if tally.digest == digest]
        agreed: dict[Agreed, bool] = {
            "repeat": any(tally.repeated for tally in tallies), "vote": any(tally.voted for tally in tallies),
        }  # fmt: skip
        seen = Seen(
            recording=name,
            devices=tuple(sorted(tally.device for tally in tallies)),
            runs=sum(tally.runs for tally in tallies),
            agreed=tuple(kind for kind, known in agreed.items() if known),
        )
        entries.append(GoldenEntry(subject=subject, digest=digest, seen=(seen,)))
    recording = Recording(
        host=identify(),
        devices=[msgspec.convert(device, Device, from_attributes=True) for device in result.devices],
        created=now(),
        version=package_version("jax-sdc"),
        level=result.settings.level,
        dtypes=list(result.settings.dtypes),
        rounds=result.rounds,
    )
    return Register(environments={mark: dict(environment)}, recordings={name: recording}, entries=entries)
