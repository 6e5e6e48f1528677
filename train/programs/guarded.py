"""A program whose step is watched by a guard."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec

import sdc
from sdc.guarding import Checksums, Detection, GuardReport, Layer, NotRepeatable, Spikes, State, Watch, layers_for
from sdc.schema import GuardLayer, GuardTotals

from .device import StepRows
from .instrumented import SingleProgram
from .model import DATA


@dataclasses.dataclass(frozen=True, eq=False)
class GuardedProgram(SingleProgram):
    """A program that trains one copy, with evidence from a guard; the state has the bits that it has without it.

    Attributes:
        screens, corrects: see `SingleProgram`, and for other attributes, `Instrumented`.
        budget: share of the time that the guard's checks may take.
    """

    _: dataclasses.KW_ONLY
    budget: float = 0.01

    @functools.cached_property
    def _watching(self) -> "Watching":
        return Watching(self)

    def run(self, *given: Any) -> Any:
        return self._watching.run(*given) if self._watching.begin() else super().run(*given)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        self._watching.next = number
        return super().step(state, batch, number)

    def rows(self, number: int, out: Any, seen: Any) -> StepRows:
        rows = super().rows(number, out, seen)
        findings = self._watching.take()
        return StepRows({**rows.row, **({"findings": findings} if findings else {})}, rows.details)

    def conclude(self, state: Any) -> Mapping[str, Any]:
        return {**super().conclude(state), "guard": self._watching.totals()}


def after_end(earlier: GuardTotals, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the totals of a guard after a run that had ended was resumed: all findings, and the earlier totals if no
    step was left."""
    known = msgspec.to_builtins(earlier)
    return {**(found if found["steps"] else known), "findings": [*known["findings"], *found["findings"]]}


class Watching:
    """The guard of a program, and its findings by the numbers of the run's steps."""

    def __init__(self, program: GuardedProgram) -> None:
        self.program = program
        self.next: int | None = None  # number of the step that begins
        self.numbers: list[int] = []
        self.findings: list[Detection] = []
        layers = layers_for(program.placement.mesh, DATA, program.seed)
        if program.checks is not None:  # the step has checksums of its own
            layers = [layer for layer in layers if not isinstance(layer, Checksums)]
        self.layers, self.stopped = layers, list[str]()
        self.watch = self._watch(layers)

    def _watch(self, layers: Sequence[Layer]) -> Watch[..., Any]:
        program = self.program
        draws = iter(range(1, 2**31))

        def rekey(state: Any, shared: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
            tokens, key = shared
            return state, (tokens, jax.random.fold_in(key, next(draws)))

        return sdc.guard(
            program.compiled, program.placement.mesh, axis=DATA, budget=program.budget, layers=layers,
            seed=program.seed, on_finding=self.findings.append, rekey=rekey if program.faults else None,
        )  # fmt: skip

    def begin(self) -> bool:
        """Returns whether this call is the first one in a step; checksums run suspicious steps again."""
        number, self.next = self.next, None
        self.numbers += [] if number is None else [number]
        return number is not None

    def run(self, *given: Any) -> Any:
        try:
            return self.watch(*given)
        except NotRepeatable as error:  # this step is deterministic, so the hardware is not
            self.findings.append(Detection("repetition", len(self.numbers) - 1, str(error).partition(", so ")[0]))
            kept = [State(self.program.seed), Spikes()]
            names = {layer.name for layer in kept}
            self.stopped = [layer.name for layer in self.layers if layer.name not in names]
            self.watch = self._watch(kept)
            return self.watch(*given)

    def take(self) -> list[dict[str, Any]]:
        """Waits for the checks that are running, and returns the findings since the last call."""
        self.watch.report()
        taken = [{**dataclasses.asdict(one), "step": self.numbers[one.step]} for one in self.findings]
        self.findings.clear()
        return taken

    def totals(self) -> dict[str, Any]:
        report: GuardReport = self.watch.report()
        layers = [
            GuardLayer(
                name=layer.name, compares=layer.about, why_not=layer.why_not, checks=layer.runs,
                coverage=layer.coverage,
                most_wrong=None if layer.coverage is None else layer.most_wrong_share() * report.steps,
            )
            for layer in report.layers
        ]  # fmt: skip
        layers += [GuardLayer(name=name, why_not="the step did not repeat itself", checks=0) for name in self.stopped]
        found = GuardTotals(steps=report.steps, overhead=report.overhead, start_up=report.start_up, layers=layers)
        return {**msgspec.to_builtins(found), "findings": self.take()}
