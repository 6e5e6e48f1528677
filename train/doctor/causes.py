"""Which of many settings explain that an operation does not repeat itself, in as few trials as possible."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from .laboratory import ChildFailed, Laboratory
from .results import Answer, steady
from .surroundings import Scene, candidates, lines, shown

FEW = 8
"""Settings that are tried one by one first, if there are no more: mostly it is one, and a trial tells of all
operations."""


def minimal(names: Sequence[str], holds: Callable[[frozenset[str]], bool]) -> list[str]:
    """The fewest of some settings with which something holds, by halving (QuickXplain).

    Args:
        names: the settings; with all of them it holds.
        holds: whether it does with some of them. What holds with some is taken to hold with more.

    Returns:
        Settings with which it holds, none of which can be left out; empty if it holds without any.

    Example:
        >>> from sdc.train.doctor.causes import minimal
        >>> minimal("abcdefgh", lambda some: {"b", "g"} <= some)
        ['b', 'g']

    References:
        U. Junker, QuickXplain: Preferred explanations and relaxations for over-constrained problems, AAAI 2004.
    """

    def go(given: frozenset[str], more: bool, rest: Sequence[str]) -> list[str]:
        if more and holds(given):
            return []
        if len(rest) == 1:
            return list(rest)
        left, right = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        of_right = go(given | set(left), True, right)
        of_left = go(given | set(of_right), bool(of_right), left)
        return [*of_left, *of_right]

    if not names or holds(frozenset()):
        return []
    return go(frozenset(), False, names)


def explanations(
    names: Sequence[str], operations: Sequence[str], holding: Callable[[frozenset[str]], frozenset[str]]
) -> dict[str, list[str]]:
    """For each operation the settings that explain it."""
    ask = functools.cache(holding)
    found: dict[str, list[str]] = {}
    if not names:
        return found
    for operation in operations:
        if operation not in ask(frozenset(names)):
            continue
        alone = [[name] for name in names] if len(names) <= FEW else []
        before = next((some for some in [*found.values(), *alone] if operation in ask(frozenset(some))), None)

        def explained(some: frozenset[str], one: str = operation) -> bool:
            return one in ask(some)

        found[operation] = before or minimal(names, explained)
    return found


FAULTY = "A faulty device is one of the explanations: run sdc burnin"


@dataclasses.dataclass(frozen=True)
class Reasons:
    """What was found out.

    Attributes:
        environ: the environment that was changed.
        tried: the settings that were tried, and what they were set to; None: taken away.
        again: operations that differed again in two more processes.
        found: operations, and the settings with which they repeat themselves.
        problem: why it could not be narrowed down; None if it could.
    """

    environ: Mapping[str, str]
    tried: Mapping[str, str | None]
    again: Sequence[str] = ()
    found: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    problem: str | None = None

    def tell(self, names: Sequence[str]) -> tuple[str, list[str], list[str]]:
        """Of some operations: sentences, the settings that decide, and what to set."""
        if self.problem is not None:
            return f"It could not be narrowed down ({self.problem}). {FAULTY}", [], []
        said: list[str] = []
        causes: list[str] = []
        to_set: list[str] = []
        for settings in dict.fromkeys(tuple(self.found[name]) for name in names if name in self.found):
            changes = {name: self.tried[name] for name in settings}
            told = " and ".join(shown(name, value) for name, value in changes.items())
            those = [name for name in names if tuple(self.found.get(name, ())) == settings]
            said.append(f"{', '.join(those)}: not with {told}")
            causes += [name for name in settings if name not in causes]
            to_set += [line for line in lines(self.environ, changes) if line not in to_set]
        if once := [name for name in names if name not in self.again]:
            said.append(f"{', '.join(once)}: it did not come again in two more processes. {FAULTY}")
        if rest := [name for name in names if name in self.again and name not in self.found]:
            said.append(
                f"{', '.join(rest)}: none of the {len(self.tried)} settings that were tried explains it. The program "
                f"itself may be another each time (counters, clocks, callbacks), or a library. {FAULTY}"
            )
        return ". ".join(said), causes, to_set


def narrow_down(lab: Laboratory, scene: Scene, names: Sequence[str]) -> Reasons:
    """Runs what differed again, two processes at a time, with settings that may make it repeat itself."""
    known = candidates(scene)
    if not names:
        return Reasons(lab.environ, known)

    @functools.cache
    def holding(some: frozenset[str]) -> frozenset[str]:
        changes = {name: known[name] for name in known if name in some}
        what = f"narrowing down: {len(changes)} settings changed"
        answers = lab.together([lambda: lab.ask(what, changes, only=names)] * 2)
        for each in answers:
            if isinstance(each, ChildFailed):
                raise each
        return steady([each for each in answers if isinstance(each, Answer)], order=True)

    try:
        again = [name for name in names if name not in holding(frozenset())]
        return Reasons(lab.environ, known, again, explanations(list(known), again, holding))
    except ChildFailed as failed:
        return Reasons(lab.environ, known, problem=str(failed))
