"""Registers of golden digests made one: where hosts disagree, none is believed, and each is named."""

from collections.abc import Iterable, Iterator, Mapping

from sdc.records import RecordError

from .golden import Disputed, Entry, Recording, Register, Seen, Subject


def merge(registers: Iterable[Register]) -> Register:
    """One register with what all of them have.

    The order does not matter, nor that some of them were merged before, or stand there twice. What is disputed stays
    so, whoever joins later: leave out the register that is wrong, and merge the others.

    Args:
        registers: at least one.

    Returns:
        Entries where all agree; where they do not, all digests with those who saw them, in `disputed`.

    Raises:
        RecordError: two registers describe one burn-in differently.

    Example:
        >>> from sdc.burnin.golden import Register
        >>> from sdc.burnin.golden_merging import merge
        >>> empty = Register(environments={}, recordings={}, entries=[])
        >>> merge([empty, empty]) == empty
        True
    """
    environments: dict[str, dict[str, str]] = {}
    recordings: dict[str, Recording] = {}
    heard: dict[Subject, dict[str, set[Seen]]] = {}
    for register in registers:
        environments |= register.environments  # their names say what is in them
        for name, recording in register.recordings.items():
            if recordings.setdefault(name, recording) != recording:
                raise RecordError(
                    f"burn-in {name} is described differently in two of these files; one of them is wrong"
                )
        for subject, claims in _claims(register):
            known = heard.setdefault(subject, {})
            for digest, seen in claims.items():
                known.setdefault(digest, set()).update(seen)
    found = {
        subject: {digest: tuple(sorted(seen, key=_order)) for digest, seen in sorted(known.items())}
        for subject, known in heard.items()
    }
    subjects = sorted(found, key=lambda subject: subject.key)
    return Register(
        environments=dict(sorted(environments.items())),
        recordings=dict(sorted(recordings.items())),
        entries=[
            Entry(subject=subject, digest=next(iter(found[subject])), seen=next(iter(found[subject].values())))
            for subject in subjects
            if len(found[subject]) == 1
        ],
        disputed=[Disputed(subject=subject, claims=found[subject]) for subject in subjects if len(found[subject]) > 1],
    )


def _claims(register: Register) -> Iterator[tuple[Subject, Mapping[str, tuple[Seen, ...]]]]:
    yield from ((entry.subject, {entry.digest: entry.seen}) for entry in register.entries)
    yield from ((disputed.subject, disputed.claims) for disputed in register.disputed)


def _order(seen: Seen) -> tuple[str, tuple[int, ...], int]:
    return seen.recording, seen.devices, seen.runs


def describe_dispute(register: Register, disputed: Disputed) -> str:
    """Who recorded which digest, in a sentence."""
    claims = "; ".join(f"{digest} by {_who(register, seen)}" for digest, seen in disputed.claims.items())
    return f"{disputed.subject.key}: {claims}"


def _who(register: Register, seen: Iterable[Seen]) -> str:
    parts = []
    for each in seen:
        recording = register.recordings[each.recording]
        devices = ", ".join(describe_device(recording, device) for device in each.devices)
        parts.append(f"{recording.host.name} ({devices}; {each.runs} runs, {recording.created})")
    return " and ".join(parts)


def describe_device(recording: Recording, place: int) -> str:
    """A device of a burn-in by its number and what identifies it.

    Args:
        recording: the burn-in.
        place: of the device among its devices.
    """
    device = recording.devices[place]
    marks = ((name, getattr(device, name)) for name in ("serial", "uuid", "bus"))
    mark = next((f" {name} {value}" for name, value in marks if value), "")
    return f"device {place}{mark}{' (simulated)' if device.simulated else ''}"
