"""Evidence from the runs of a workload: repetition, votes, golden digests, the host's results, and checksums.

repeat      a device reproduces its earlier bits; a fault that repeats itself remains undetected
vote        devices of one kind produce the same bits; the majority identifies a device that differs
golden      a device produces the bits recorded for its program; every fault that changes these bits is detected
reference   a device produces the bits that the host computes, for workloads that the host can compute
checksums   matrix products agree with the sums of their factors; a flagged row is wrong if its recomputation is right

After a difference, the workload runs again immediately to determine whether the difference recurs and which elements
differ.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .programs import Programs, RunOutcome, bits_of
from .results import Element, Elements, Evidence, Finding, Persistence
from .workloads import BurninWorkload

RERUNS = 3  # reruns immediately after a difference
LISTED = 8  # maximum number of differing elements to list
Place = int | None  # index of a device; None for all devices together
Run = Callable[[Place], "list[RunOutcome] | Exception"]


class Vote(NamedTuple):
    """The result of a vote among devices."""

    odd: dict[int, str]  # for each outvoted device, the digest of the majority
    ties: tuple[tuple[int, ...], ...]  # groups of devices that differ without a majority
    agreed: tuple[int, ...]  # devices in the majority


def vote(digests: Mapping[int, str], kinds: Mapping[int, str]) -> Vote:
    """Returns the result of a vote among the devices of each kind: the most frequent digest wins, except in a tie."""
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
    """A device whose outputs differ, or several devices if it is unknown which of them is wrong."""

    devices: tuple[int, ...]  # one device, or all tied devices
    kinds: tuple[Evidence, ...]  # evidence of the difference
    expected: str | None  # digest of the right outputs, if it is known


def examine(
    outcomes: Sequence[RunOutcome],
    voted: Vote,
    *,
    before: Mapping[int, str | None],
    golden: Mapping[int, str],
    references: Mapping[int, str],
) -> list[Suspicion]:
    """Returns the devices whose outcomes for one workload differ from the majority or from other known digests."""
    digests = {outcome.device: outcome.digest for outcome in outcomes}
    found: list[Suspicion] = []
    for outcome in outcomes:
        device = outcome.device
        sources: dict[Evidence, Mapping[int, str | None]] = {
            "vote": voted.odd, "reference": references, "golden": golden, "repeat": before,
        }  # fmt: skip
        against: list[tuple[Evidence, str]] = [
            (kind, known)
            for kind, each in sources.items()
            if (known := each.get(device)) is not None and known != outcome.digest
        ]
        seen: tuple[Evidence, ...] = tuple(kind for kind, _ in against)
        if outcome.checks.confirmed:
            seen = (*seen, "checksums")
        if seen:
            found.append(Suspicion((device,), seen, against[0][1] if against else None))
    named = {device for suspicion in found for device in suspicion.devices}
    for tie in voted.ties:
        # It remains unknown which device is wrong, unless the tied devices that no other evidence implicates all agree.
        if len({digests[device] for device in tie if device not in named}) != 1:
            found.append(Suspicion(tie, ("vote",), None))
    return found


class Confirmation(NamedTuple):
    """The result of the reruns after a difference."""

    finding: Finding
    baselines: dict[int, str]  # digest with which each device's later runs are compared
    errors: tuple[tuple[Place, Exception], ...]  # exceptions that runs raised, with their devices
    outputs: tuple[Any, Any] | None  # right and wrong outputs, on the host, if right outputs were available


def confirm(
    workload: BurninWorkload,
    suspicion: Suspicion,
    outcomes: Sequence[RunOutcome],
    run: Run,
    programs: Programs,
    round: int,
) -> Confirmation:
    first = {outcome.device: outcome for outcome in outcomes}
    again: dict[int, list[RunOutcome]] = {device: [] for device in suspicion.devices}
    errors: list[tuple[Place, Exception]] = []
    places: Sequence[Place] = [None] if workload.multi else suspicion.devices
    for place in places:
        for _ in range(RERUNS):
            done = run(place)
            if isinstance(done, Exception):
                errors.append((place, done))
                break
            for outcome in done:
                if outcome.device in again:
                    again[outcome.device].append(outcome)
    usual = {
        device: Counter(outcome.digest for outcome in runs).most_common(1)[0][0]
        for device, runs in again.items()
        if runs
    }
    devices, kinds, expected = suspicion.devices, suspicion.kinds, suspicion.expected
    note = ""
    if len(devices) > 1:  # after a tie, reruns of a device with an intermittent fault can produce other bits
        settled = set(usual.values())
        odd = tuple(device for device in devices if first[device].digest not in settled)
        if len(settled) == 1 and len(usual) == len(devices) and odd:
            devices, kinds, expected = odd, (*kinds, "repeat"), settled.pop()
        else:
            note = "a tie: the devices differ, and it is unknown which of them is wrong"
    wrong = []
    for before, outcome in ((first[each], outcome) for each in devices for outcome in again[each]):
        if expected is not None:
            wrong.append(outcome.digest != expected)
        else:  # only checksums show a difference, or the tie remains
            flagged = outcome.checks.confirmed > 0 or not before.checks.confirmed
            wrong.append(outcome.digest == before.digest and flagged)
    persistence: Persistence | None = None
    if wrong:
        persistence = "persistent" if all(wrong) else "intermittent" if any(wrong) else "transient"
    if kinds == ("repeat",) and persistence == "persistent":
        note = "the bits changed once, and the new bits recurred: either the earlier or the later runs are wrong"
    outputs = _outputs(workload, first, again, devices, expected, programs)
    elements = None if outputs is None else compare_outputs(*outputs)
    if elements is None and not note:
        note = "no right outputs were available for comparison"
    finding = Finding(
        workload=workload.name, devices=devices, round=round, seed=workload.seed, kinds=kinds,
        digest=first[devices[0]].digest, expected=expected, persistence=persistence, elements=elements,
        confirmed=first[devices[0]].checks.confirmed, note=note,
    )  # fmt: skip
    # From now on, a device must repeat the right digest if any of its reruns produced that digest, and otherwise its
    # most frequent digest. Wrong bits that occurred once must not become the baseline; otherwise, the next right bits
    # would count as another difference.
    baselines = {}
    for device, runs in again.items():
        if runs:
            digests = [each.digest for each in runs]
            right = expected is not None and (expected in digests or digests.count(usual[device]) == 1)
            baselines[device] = expected if right and expected is not None else usual[device]
    return Confirmation(finding, baselines, tuple(errors), outputs)


def _outputs(
    workload: BurninWorkload,
    first: Mapping[int, RunOutcome],
    again: Mapping[int, Sequence[RunOutcome]],
    devices: Sequence[int],
    expected: str | None,
    programs: Programs,
) -> tuple[Any, Any] | None:
    """Returns right and wrong outputs of the first device, or None if right outputs are unavailable.

    After a tie, it is unknown which outputs are right, so outputs of two devices that differ are returned.
    """
    wrong = first[devices[0]]
    right: Any = None
    if expected is None:
        others = [first[other] for other in devices if first[other].digest != wrong.digest]
        right = others[0].outputs if others else None
    else:
        candidates = [*first.values(), *(outcome for runs in again.values() for outcome in runs)]
        right = next((outcome.outputs for outcome in candidates if outcome.digest == expected), None)
        known = programs.reference(workload, wrong.device)
        if right is None and known is not None and known.digest == expected:
            right = programs.expected(workload, wrong.device)
    if right is None:
        return None
    return jax.device_get(right), jax.device_get(wrong.outputs)


def compare_outputs(expected: Any, found: Any) -> Elements:
    """Compares two pytrees of arrays with the same shapes and types, element by element."""
    differing, total, nonfinite = 0, 0, 0
    largest, relative = 0.0, 0.0
    first: list[Element] = []
    pairs = zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    for (path, a), b in pairs:
        x, y = np.asarray(a), np.asarray(b)
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"cannot compare {x.dtype}{list(x.shape)} with {y.dtype}{list(y.shape)}; expected outputs of the same "
                "program"
            )
        old, new = bits_of(x), bits_of(y)
        (at,) = np.nonzero(old != new)
        differing, total = differing + at.size, total + old.size
        if not at.size:
            continue
        wanted, got = x.reshape(-1)[at], y.reshape(-1)[at]
        digits = 2 * x.dtype.itemsize
        for k in range(min(at.size, LISTED - len(first))):
            first.append(
                Element(
                    output=jax.tree_util.keystr(path), index=int(at[k]), old=f"{int(old[at[k]]):0{digits}x}",
                    new=f"{int(new[at[k]]):0{digits}x}", expected=str(wanted[k]), found=str(got[k]),
                )
            )  # fmt: skip
        with np.errstate(invalid="ignore"):  # a flipped bit can produce a signaling NaN
            right, wrong = wanted.astype(np.float64), got.astype(np.float64)
        finite = np.isfinite(right) & np.isfinite(wrong)
        nonfinite += int((~finite).sum())
        off = np.abs(wrong[finite] - right[finite])
        largest = max(largest, float(off.max(initial=0.0)))
        known = right[finite] != 0
        relative = max(relative, float((off[known] / np.abs(right[finite][known])).max(initial=0.0)))
    return Elements(
        differing=differing, total=total, first=tuple(first), largest=largest, relative=relative, nonfinite=nonfinite
    )
