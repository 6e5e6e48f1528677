"""Which operations differ: within an answer, and between two."""

from collections.abc import Iterable, Sequence

from .layout import Answer, Measured


def by_name(answer: Answer) -> dict[str, Measured]:
    """What was measured of each operation that could be run."""
    return {row.operation: row for row in answer.operations if row.digests and row.problem is None}


def unsteady(answers: Sequence[Answer]) -> list[str]:
    """Operations whose runs in one process differ, in any of the answers."""
    return _ordered(row.operation for each in answers for row in by_name(each).values() if len(set(row.digests)) > 1)


def between(one: Answer, other: Answer) -> list[str]:
    """Operations that both ran, and whose first runs differ."""
    here, there = by_name(one), by_name(other)
    return [name for name in here if name in there and here[name].digests[0] != there[name].digests[0]]


def turned(answers: Sequence[Answer]) -> list[str]:
    """Operations that differ with the devices in the opposite order."""
    rows = (row for each in answers for row in by_name(each).values())
    return _ordered(row.operation for row in rows if row.permuted not in (None, row.digests[0]))


def steady(answers: Sequence[Answer], *, order: bool) -> frozenset[str]:
    """Operations of which all runs of all answers gave one digest.

    Args:
        answers: of several processes.
        order: count the runs with the devices in the opposite order too.
    """
    digests: dict[str, set[str]] = {}
    for each in answers:
        for name, row in by_name(each).items():
            found = digests.setdefault(name, set())
            found.update(row.digests)
            if order and row.permuted is not None:
                found.add(row.permuted)
    return frozenset(name for name, found in digests.items() if len(found) == 1)


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
