"""What the runs of a workload prove: three independent kinds of evidence, and what the host and checksums add.

repeat      a device gives the bits that it gave before; blind to a fault that repeats itself
vote        the devices of one kind give the same bits; the majority names the odd one
golden      a device gives the bits that were recorded; blind to nothing, where they are of the same program
reference   a device gives the bits that the host computes, where it can
checksums   the sums of a matrix product agree with those of its factors, and what did not is right when repeated
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from ..twins import ALGORITHM
from .golden import Subject
from .host import Elements
from .programs import Checks, Outcome
from .workload import Workload

Evidence: TypeAlias = Literal["repeat", "vote", "golden", "reference", "checksums"]
Persistence: TypeAlias = Literal["transient", "intermittent", "persistent"]


def golden_key(workload: Workload, fingerprint: str, kind: str, index: int, environment: str) -> str:
    """Under what the digest of a workload's outputs is recorded: everything that decides its bits and is known here.

    Args:
        workload: whose outputs they are.
        fingerprint: of its program.
        kind: of the device.
        index: of the device, which counts where each has a shard of its own.
        environment: name of what else decides bits; see `golden.mark_of` and `surroundings`.
    """
    return Subject(
        workload=workload.name,
        shard=index if workload.multi else None,
        seed=workload.seed,
        program=fingerprint,
        algorithm=ALGORITHM,
        kind=kind,
        environment=environment,
    ).key


def persistence_of(wrong: Sequence[bool]) -> Persistence:
    """What it is called that a difference came again in some of the runs right after it.

    Example:
        >>> from sdc.burnin.evidence import persistence_of
        >>> [persistence_of(wrong) for wrong in ([False, False], [True, False], [True, True])]
        ['transient', 'intermittent', 'persistent']
    """
    if not any(wrong):
        return "transient"
    return "persistent" if all(wrong) else "intermittent"


class Vote(NamedTuple):
    """What the devices say of each other.

    Attributes:
        odd: for each device that the others outvote, what these have.
        ties: groups of devices that differ without a majority.
        agreed: devices that others agree with.
    """

    odd: dict[int, str]
    ties: tuple[tuple[int, ...], ...]
    agreed: tuple[int, ...]


def vote(digests: Mapping[int, str], kinds: Mapping[int, str]) -> Vote:
    """Lets the devices of each kind vote on a digest.

    The majority is the digest that more devices have than any other, and two at the least.

    Args:
        digests: by device.
        kinds: kind of each device.

    Example:
        >>> from sdc.burnin.evidence import vote
        >>> vote({0: "a", 1: "b", 2: "a"}, dict.fromkeys(range(3), "cpu")).odd
        {1: 'a'}
        >>> vote({0: "a", 1: "b"}, dict.fromkeys(range(2), "cpu")).ties
        ((0, 1),)
    """
    odd: dict[int, str] = {}
    ties: list[tuple[int, ...]] = []
    agreed: list[int] = []
    for kind in sorted({kinds[device] for device in digests}):
        group = {device: digest for device, digest in digests.items() if kinds[device] == kind}
        if len(group) < 2:
            continue
        ranked = Counter(group.values()).most_common()
        if len(ranked) > 1 and ranked[1][1] == ranked[0][1]:
            ties.append(tuple(sorted(group)))
            continue
        for device, digest in group.items():
            if digest == ranked[0][0]:
                agreed.append(device)
            else:
                odd[device] = ranked[0][0]
    return Vote(odd, tuple(ties), tuple(agreed))


class Suspicion(NamedTuple):
    """A device whose outputs differ, or several of which nothing says which.

    Attributes:
        devices: one, or those that are tied.
        kinds: evidence that sees it.
        expected: digest of what the outputs should be; None where nobody knows.
    """

    devices: tuple[int, ...]
    kinds: tuple[Evidence, ...]
    expected: str | None


def examine(
    outcomes: Sequence[Outcome],
    *,
    alike: bool,
    kinds: Mapping[int, str],
    before: Mapping[int, str],
    golden: Mapping[int, str],
    references: Mapping[int, str],
) -> list[Suspicion]:
    """What the outcomes of one workload, run once on each device, say.

    Args:
        outcomes: one for each device.
        alike: whether all devices should have the same outputs.
        kinds: kind of each device.
        before: what each device gave before, where it did.
        golden: what is recorded, where it is.
        references: what the host computes, where it can.
    """
    digests = {outcome.device: outcome.digest for outcome in outcomes}
    voted = vote(digests, kinds) if alike else Vote({}, (), ())
    found: list[Suspicion] = []
    for outcome in outcomes:
        device = outcome.device
        sources: tuple[tuple[Evidence, Mapping[int, str]], ...] = (
            ("vote", voted.odd),
            ("reference", references),
            ("golden", golden),
            ("repeat", before),
        )
        against: list[tuple[Evidence, str]] = [
            (kind, known[device]) for kind, known in sources if known.get(device, outcome.digest) != outcome.digest
        ]
        seen: tuple[Evidence, ...] = tuple(kind for kind, _ in against)
        if outcome.checks.confirmed:
            seen = (*seen, "checksums")
        if seen:
            found.append(Suspicion((device,), seen, against[0][1] if against else None))
    named = {device for suspicion in found for device in suspicion.devices}
    for tie in voted.ties:
        # Of those that nothing else speaks against, all that are left agree with each other, or nobody knows who erred.
        if len({digests[device] for device in tie if device not in named}) != 1:
            found.append(Suspicion(tie, ("vote",), None))
    return found


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference that was seen, and run again at once.

    Attributes:
        workload: its name.
        devices: the device that differs; several where nothing says which of them does.
        round: number of the round.
        kinds: evidence that sees it.
        persistence: whether it came again in the runs right after it; None where it was not run again.
        digest: of the outputs of the first of the devices.
        expected: digest of what they should be, where that is known.
        elements: what differs; None where no right outputs were at hand.
        checks: what the checksums of the run said.
        simulated: elements that simulated faults changed; in the runs before where repetition alone tells of them.
        note: what else there is to say.
        outputs: right and wrong ones, where they were compared and are small.
        sums: SHA-256 of these, also where they are large.
    """

    workload: str
    devices: tuple[int, ...]
    round: int
    kinds: tuple[Evidence, ...]
    persistence: Persistence | None
    digest: str
    expected: str | None
    elements: Elements | None
    checks: Checks
    simulated: int
    note: str = ""
    outputs: tuple[Any, Any] | None = dataclasses.field(default=None, repr=False, compare=False)
    sums: tuple[str, str] | None = dataclasses.field(default=None, compare=False)


def devices_kinds(devices: Sequence[jax.Device]) -> dict[int, str]:
    """Kind of each device by its index, with its platform."""
    return {index: f"{device.platform} {device.device_kind}" for index, device in enumerate(devices)}
