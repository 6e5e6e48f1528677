"""The study of the simulated nodes: are they as published, and in which step does a pair or a pool see them?"""

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import sdc
from sdc.faults import Fault, Relative, When
from sdc.nodes import (
    ELEMENTS,
    LAST_BIT,
    NODES,
    SUBMODULES,
    behaviour,
    expected_frequency,
    fitted,
    node_faults,
    published_layers,
)

from .. import FullLoad, TrainConfig, Workload, batches, get_config
from ..programs import DATA, MODEL, TrainState, device_step, init_state, place, place_batch
from .measurements import Compared, Drifting, NodesMeasured, Response
from .node_comparisons import NoiseModel, compare_tables, compare_time, correlation, fit_bursts, fit_tail
from .settings import WINDOW, NodesSettings

SEVERE = 10.0
"""Mean relative change of the elements hit, where the response to severity is measured."""
SHARE = 1e-3
"""Share of the elements that are hit then."""
LAST_BITS = 64
"""Last bits that are wrong in a microstep, where the answer to them is measured; it hardly depends on how many."""
ENOUGH = 3.0
"""Hits of a microstep beyond which more would hit no more microsteps: 95 % of them are hit."""


def sized(layers: int, width: int, length: int, *, steps: int) -> TrainConfig:
    """A small configuration in bfloat16, with four microsteps of one sequence.

    The learning rate rises for as large a part of the steps as in the study: 2,000 of 2,500 steps (appendix B.3).
    """
    config = get_config("tiny").of_type("bfloat16")
    model = dataclasses.replace(
        config.model, layers=layers, width=width, ffn_width=4 * width, heads=4, kv_heads=2, head_dim=width // 4
    )
    optimizer = dataclasses.replace(
        config.optimizer, learning_rate=3e-4, warmup_steps=steps * 4 // 5, total_steps=steps * 40
    )
    return dataclasses.replace(
        config, model=model, optimizer=optimizer, sequence_length=length, batch_size=1, microsteps=4
    )


class SmallModel:
    """A small model, its data, and its healthy training.

    Attributes:
        config: the configuration.
        steps: steps of a training.
        states: the healthy states before each step, and after the last.
        gradients: the healthy gradients.
        losses: the healthy losses.
    """

    def __init__(self, config: TrainConfig, steps: int, seed: int) -> None:
        self.config, dataset = Workload(config=config, seed=seed).load()
        rows = dataset.chunks[: steps * self.config.microsteps]
        self.tokens = jnp.asarray(rows.reshape(steps, self.config.microsteps, 1, -1), jnp.int32)
        self.steps, self.key = steps, jax.random.key(seed + 1)
        healthy = self._compile([])
        self.states = [init_state(self.config, jax.random.key(seed))]
        self.gradients, self.losses = [], []
        for number in range(steps):
            state, loss, gradient = healthy(self.states[-1], self.tokens[number])
            self.states.append(state)
            self.gradients.append(gradient)
            self.losses.append(float(loss))

    def _compile(self, faults: Sequence[Fault]) -> Callable[[TrainState, Array], tuple[TrainState, Array, Any]]:
        step = functools.partial(device_step, config=self.config)

        def run(state: TrainState, tokens: Int[Array, "microsteps batch length"]) -> tuple[TrainState, Array, Any]:
            def device(state: TrainState, tokens: Any) -> Any:
                if not faults:
                    return step(state, tokens)
                return sdc.inject(step, faults)(sdc.Moment(self.key, state.step), state, tokens)[0]

            over_model = jax.vmap(device, (None, None), axis_name=MODEL, axis_size=1)
            over_data = jax.vmap(over_model, (None, None), axis_name=DATA, axis_size=1)
            new, metrics = jax.tree.map(lambda leaf: leaf[0, 0], over_data(state, tokens))
            return new, metrics.loss, metrics.gradient

        return jax.jit(run)

    def responses(self) -> Response:
        """How gradients answer to errors: to last bits in a few elements, and to severe errors at each submodule."""
        if self.steps < WINDOW * (len(SUBMODULES) + 1):
            raise ValueError(f"steps={self.steps}: expected at least {WINDOW * (len(SUBMODULES) + 1)}")
        windows = [When(onset=k * WINDOW, end=(k + 1) * WINDOW) for k in range(len(SUBMODULES) + 1)]
        few = LAST_BITS / (self._elements * len(SUBMODULES))
        faults = [Fault(Relative(2 * LAST_BIT), few, site, when=windows[0]) for site in SUBMODULES]
        faults += [
            Fault(Relative(2 * SEVERE), SHARE, site, when=when)
            for site, when in zip(SUBMODULES, windows[1:], strict=True)
        ]
        noise = self._noise(self._compile(faults)).reshape(-1)[: WINDOW * len(windows)].reshape(-1, WINDOW)
        middle = np.median(noise, axis=1)
        linear = {
            site: float(ratio**2 / (SHARE * 4 / 3 * SEVERE**2))
            for site, ratio in zip(SUBMODULES, middle[1:], strict=True)
        }
        return Response(self._name, float(middle[0]), linear)

    def train(self, node: str) -> Drifting | None:
        """Trains on a node, with synchronized parameters and without; None where the study left no rate to speak of."""
        if not published_layers(node):
            return None
        step = self._compile(self._scaled(node))
        noise = self._noise(step)
        state, distances, losses = self.states[0], [], []
        if behaviour(node, "none").onset >= self.steps:  # clean as long as this, where nothing is synchronized
            nothing = np.zeros(self.steps)
            return Drifting(node, self._name, noise, nothing, nothing)
        for number in range(self.steps):
            state, loss, _ = step(state, self.tokens[number])
            distances.append(_norm(_minus(state.params, self.states[number + 1].params)))
            losses.append(abs(float(loss) - self.losses[number]) / self.losses[number])
        return Drifting(node, self._name, noise, np.asarray(distances), np.asarray(losses))

    @property
    def _name(self) -> str:
        model = self.config.model
        return f"{model.layers} layers of width {model.width}, {self.config.sequence_length} tokens"

    @property
    def _elements(self) -> int:
        """Elements of a submodule's outputs in a microstep."""
        return self.config.model.layers * self.config.model.width * self.config.sequence_length

    def _scaled(self, node: str) -> list[Fault]:
        """The node's faults with as many of the microsteps hit as in the study's model of 32 layers."""
        faults = node_faults(node, layers=self.config.model.layers, sync="params")
        theirs = sum(2 * figures.frequency.sum() for figures in published_layers(node).values()) * ELEMENTS
        ours = sum(float(np.mean(fault.rate)) for fault in faults if fault.rate is not None) * self._elements
        times = max(1.0, min(theirs, ENOUGH) / ours)
        return [dataclasses.replace(f, rate=tuple(np.minimum(np.asarray(f.rate) * times, 1).tolist())) for f in faults]

    def _noise(self, step: Callable[..., Any]) -> Float[np.ndarray, "steps"]:
        """Noise-to-signal ratios of the gradients from the healthy states (equation 5 before the maximum)."""
        found = []
        for number in range(self.steps):
            gradient = step(self.states[number], self.tokens[number])[2]
            found.append(_norm(_minus(gradient, self.gradients[number])) / _norm(self.gradients[number]))
        return np.asarray(found)


def _minus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.subtract, a, b)


def _norm(tree: Any) -> float:
    return math.sqrt(sum(float(jnp.sum(jnp.square(leaf.astype(jnp.float32)))) for leaf in jax.tree.leaves(tree)))


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


PARTS = ("state", "gradient")


@dataclasses.dataclass(frozen=True)
class NodeFound:
    """A simulated node in a pair or a pool.

    Attributes:
        node: its name, as it was given.
        steps: steps that were run: up to the first with a difference, or all.
        found: whether a difference was seen.
        first: the step in which it was, from 0.
        sites: submodules at which it was then; empty where only gradient or state tell of it.
        twins: hosts that differ from the reference; the node is the last one. Of three or more a majority names them.
        mismatched: elements that differ at submodules in that step.
        checked: elements of submodules compared in a step.
        expected: wrong elements that the model of the node predicts for the steps that were asked for.
    """

    node: str
    steps: int
    found: bool
    first: int | None
    sites: tuple[str, ...]
    twins: tuple[int, ...]
    mismatched: int
    checked: int
    expected: float


def find_node(node: str, steps: int, *, twins: int = 2, config: str | TrainConfig = "tiny", seed: int = 0) -> NodeFound:
    """Runs the first stage of a pair or a pool of which the last host is a simulated node, until it is found.

    All twins lie on one device. The program is compiled once for a node, which takes seconds, whatever the steps.

    Args:
        node: see `sdc.nodes.simulated_nodes.parse_suspect`; `node4,times=1e6` has a million times the rates.
        steps: optimizer steps at most.
        twins: hosts: 2 for a pair, more for a pool.
        config: what is trained.
        seed: of parameters, data order and faults.

    Raises:
        ValueError: there is no such node, or a number makes no sense.

    Example:
        >>> from sdc.train.studies._nodes import find_node
        >>> found = find_node("node11", 2)
        >>> found.found, found.first, found.twins, found.expected > 1000
        (True, 0, (1,), True)
    """
    workload = Workload(config=config, seed=seed)
    job = FullLoad(workload=workload, steps=steps, twins=twins, placement="vmap", suspect=node)
    chosen, dataset = job.load()
    placement = place(twins=twins, data=1, model=1, kind="vmap", devices=jax.devices()[:1])
    program = job.program(chosen, placement, donate=True)
    source = batches(dataset, batch_size=chosen.batch_size, microsteps=chosen.microsteps)
    state, each = program.init(seed), 0
    frequencies = expected_frequency(node, steps, sync="params")

    def end(number: int, found: bool, sites: tuple[str, ...], odd: tuple[int, ...], mismatched: int) -> NodeFound:
        # Twins beside the reference are compared with it: the node is one of them.
        own = each / (twins - 1) / max(len(checked), 1)
        expected = sum(frequency * own for frequency in frequencies.values()) * steps
        return NodeFound(node, number + 1, found, number if found else None, sites, odd, mismatched, each, expected)

    checked: list[str] = []
    for number in range(steps):
        state, out = program.step(state, place_batch(next(source), placement), number)
        state, seen = program.observe(state, out)
        row, details = program.rows(number, out, seen)
        checked = list(row["sites"])
        each = sum(site["checked"] for site in row["sites"].values())
        hits = {
            name: site["mismatched"] + site.get("unrepeated", 0)
            for name, site in row["sites"].items()
            if site["mismatched"] or site.get("unrepeated")
        }
        if hits or any(row[part]["mismatched"] for part in PARTS):
            ranks = [*(rank for line in details for rank in line["ranks"])]
            ranks += [rank for part in PARTS for rank in row[part].get("ranks", ())]
            odd = tuple(sorted({int(rank["twin"]) for rank in ranks}))
            return end(number, True, tuple(hits), odd, sum(hits.values()))
    return end(steps - 1, False, (), (), 0)
