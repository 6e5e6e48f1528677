"""The study of the simulated nodes: whether they are as the study of the real ones says."""

import dataclasses
from collections.abc import Generator
from typing import ClassVar

from sdc.nodes import (
    NODES,
    Compared,
    Drifting,
    NodesMeasured,
    NoiseModel,
    compare_tables,
    compare_time,
    correlation,
    fit_bursts,
    fit_tail,
    fitted,
)

from .node_models import SmallModel, sized
from .settings import NodesSettings

SIZES = ((4, 64, 64), (16, 64, 64))
"""Layers, width and tokens of the small models; nodes train the first, both show how gradients answer to errors."""
LINE = 0.01
"""Relative difference below which two curves of losses are one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesStudy(NodesSettings):
    """Each simulated node beside each published figure of the real one; the noise model is fitted to all fifteen.

    Raises:
        SettingError: a node that does not exist, or too few runs or steps.

    Example:
        >>> from sdc.train.studies import NodesStudy
        >>> NodesStudy(nodes=("node11",), runs=20).count()
        20
    """

    name: ClassVar[str] = "nodes"

    def __post_init__(self) -> None:
        self.check()

    def count(self) -> int:
        """How many parts `run` yields."""
        return len(NODES) + 2 * len(self.nodes) + len(SIZES) + 1

    def run(self) -> Generator[str, None, NodesMeasured]:
        """Runs the study.

        Yields:
            What has just been done.

        Returns:
            What was found.
        """
        model, simulated = NoiseModel(seed=self.seed), {}
        for node in NODES:
            simulated[node] = model.simulate(node)
            yield f"noise of {node}"
        predicted = {node: model.predict(node, simulated) for node in NODES}
        few = fitted()["few"].value
        estimates = {**model.estimates(simulated), "tail": fit_tail(few, seed=self.seed)}
        bursts = {f"bursts/{node}": fit_bursts(node, few=few) for node in NODES}
        estimates |= {name: found for name, found in bursts.items() if found is not None}
        yield "fit"

        rows: list[Compared] = []
        for node in self.nodes:
            rows += compare_tables(node, runs=self.runs, seed=self.seed)
            rows += compare_time(node, runs=self.runs, seed=self.seed)
            found = predicted[node]
            rows.append(Compared(node, "noise", "", found.published, found.median, found.low, found.high, found.inside))
            yield f"tables of {node}"

        together = {node: correlation(node, seed=self.seed) for node in self.nodes}

        responses, trainings, small = [], [], None
        for size in SIZES:
            model_of_size = SmallModel(sized(*size, steps=self.steps), self.steps, self.seed)
            responses.append(model_of_size.responses())
            small = small or model_of_size
            yield f"responses of {responses[-1].model}"
        assert small is not None
        for node in self.nodes:
            trained = small.train(node)
            rows += _drift(node, trained)
            trainings += [trained] if trained is not None else []
            yield f"training on {node}"
        return NodesMeasured(
            nodes=self.nodes, seed=self.seed, rows=tuple(rows), predicted=predicted, estimates=estimates, used=fitted(),
            together=together, responses=tuple(responses), trainings=tuple(trainings),
        )  # fmt: skip


def _drift(node: str, trained: Drifting | None) -> list[Compared]:
    """Figure 6: parameters drift apart step by step, and losses stay one line."""
    words = {"drift": "figure 6: drifts away incrementally", "loss": "figure 6: identical to the healthy one"}
    if trained is None or not trained.distances.any():
        return [
            Compared(node, name, "", None, None, note=f"{said}; too short a run for a statement: no mismatch in it")  # type: ignore[arg-type]
            for name, said in words.items()
        ]
    quarter, half, last = (trained.distances[len(trained.distances) * part // 4 - 1] for part in (1, 2, 4))
    worst = float(trained.losses.max())
    return [
        Compared(node, "drift", "", None, float(last), None, None, bool(quarter <= half <= last),
                 f"{words['drift']}; here {quarter:.2g} after a quarter of the steps, {half:.2g} after half of them"),
        Compared(node, "loss", "", None, worst, None, None, worst < LINE, words["loss"]),
    ]  # fmt: skip
