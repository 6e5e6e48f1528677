"""A difference is run again at once: does it come again, and what differs."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .evidence import Evidence, Persistence, Suspicion, persistence_of
from .host import Elements, compare_outputs
from .programs import Outcome, Programs
from .workload import Workload

RERUNS = 3
"""Runs right after a difference."""
Run = Callable[[int | None], "list[Outcome] | Exception"]


class Confirmation(NamedTuple):
    """What the runs right after a difference say of it; see `evidence.Finding`.

    Attributes:
        baselines: what each device is to be compared with from now on.
        errors: what the runs threw, and where.
        outputs: right and wrong ones on the host, where right ones were at hand.
    """

    devices: tuple[int, ...]
    kinds: tuple[Evidence, ...]
    persistence: Persistence | None
    expected: str | None
    elements: Elements | None
    note: str
    baselines: dict[int, str]
    errors: tuple[tuple[int | None, Exception], ...]
    outputs: tuple[Any, Any] | None


def confirm(
    workload: Workload, suspicion: Suspicion, outcomes: Sequence[Outcome], run: Run, programs: Programs
) -> Confirmation:
    """Runs a workload again where it differed.

    Args:
        workload: what differed.
        suspicion: where, and who says so.
        outcomes: of all devices, in the round of the difference.
        run: runs the workload on a device (None: on all of them together).
        programs: knows what the host computes.
    """
    first = {outcome.device: outcome for outcome in outcomes}
    again: dict[int, list[Outcome]] = {device: [] for device in suspicion.devices}
    errors: list[tuple[int | None, Exception]] = []
    places: Sequence[int | None] = [None] if workload.multi else suspicion.devices
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
    if len(devices) > 1:  # a tie: who errs but now and then gives other bits in the runs after it
        settled = set(usual.values())
        odd = tuple(device for device in devices if first[device].digest not in settled)
        if len(settled) == 1 and len(usual) == len(devices) and odd:
            devices, kinds, expected = odd, (*kinds, "repeat"), settled.pop()
        else:
            note = "a tie: the devices differ, and nothing says which of them is wrong"
    device = devices[0]
    wrong = [_wrong(outcome, first[each], expected) for each in devices for outcome in again[each]]
    persistence = persistence_of(wrong) if wrong else None
    if kinds == ("repeat",) and persistence == "persistent":
        note = "the bits changed and stayed: either the runs before were wrong or those since are"
    baselines = {each: _baseline(runs, usual[each], expected) for each, runs in again.items() if runs}
    outputs = _outputs(workload, first, again, device, devices, expected, programs)
    elements = None if outputs is None else compare_outputs(*outputs)
    if elements is None and not note:
        note = "no right outputs were at hand to compare with"
    return Confirmation(devices, kinds, persistence, expected, elements, note, baselines, tuple(errors), outputs)


def _baseline(runs: Sequence[Outcome], usual: str, expected: str | None) -> str:
    """What a device repeats from now on: what is right if it gives that as well, else what it gives again and again.

    Wrong bits that came once must not become it, or the next right ones would be told as another difference.
    """
    digests = [run.digest for run in runs]
    if expected is not None and (expected in digests or digests.count(usual) == 1):
        return expected
    return usual


def _wrong(outcome: Outcome, first: Outcome, expected: str | None) -> bool:
    if expected is None:  # checksums alone, or a tie that stays
        return outcome.digest == first.digest and (not first.checks.confirmed or outcome.checks.confirmed > 0)
    return outcome.digest != expected


def _outputs(
    workload: Workload,
    first: dict[int, Outcome],
    again: dict[int, list[Outcome]],
    device: int,
    tied: Sequence[int],
    expected: str | None,
    programs: Programs,
) -> tuple[Any, Any] | None:
    """Whatever right outputs there are, and the wrong ones; of a tie those of two of them."""
    right: Any = None
    if expected is None:
        others = [first[other] for other in tied if first[other].digest != first[device].digest]
        right = others[0].outputs if others else None
    else:
        candidates = [*first.values(), *(outcome for runs in again.values() for outcome in runs)]
        right = next((outcome.outputs for outcome in candidates if outcome.digest == expected), None)
        known = programs.reference(workload, device)
        if right is None and known is not None and known.digest == expected:
            right = programs.expected(workload, device)
    if right is None:
        return None
    return jax.device_get(right), jax.device_get(first[device].outputs)
