"""Why operations do not repeat themselves: settings that are known are tried, in new processes, until it is clear."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from .children import ChildFailed
from .comparing import steady
from .laboratory import Laboratory
from .layout import Answer
from .narrowing import explanations
from .settings import lines, shown
from .surroundings import Scene, candidates

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
    """Runs operations that differed again, two processes at a time, with settings that may make them repeat themselves.

    Args:
        lab: where.
        scene: what is known of the environment.
        names: the operations; without any, nothing is run.
    """
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
