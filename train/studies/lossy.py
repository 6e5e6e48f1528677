"""The study of lost packets: perplexity and accuracy against loss rates, and the drift between copies."""

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sdc.aggregation import Channel, GilbertElliott, Independent, lossy_zero2

from ..programs import DATA
from .measurements import LossyMeasured, LossyTraining
from .protocol import Study
from .workloads import Method, Task, Trained, Trainer

Losses = tuple[tuple[float, ...], Callable[[float], Mapping[str, Any]]]
"""Loss rates, and the settings of `lossy_zero2` for one of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyStudy(Study[LossyMeasured]):
    """Perplexity and accuracy against loss rates; drift of copies in training and in a random walk.

    Attributes:
        rates: shares of the shards that get lost, of gradients and of parameters; the first is 0.
        packet_rates, burst_rates, mended_rates: the same where losses are per packet, come in bursts, or are mended by
            parity or by reliable packets.
        packet: elements of a packet.
        burst: mean length of a burst, in packets.
        perplexity_seeds, accuracy_seeds: trainings of which a score is the mean; single perplexities differ by one or
            two percent.
        walk_rates: loss rates of the random walk.
        walk, settled: steps of the walk, and how many of them are not counted.

    Example:
        >>> from sdc.train.studies import LossyStudy, finish, linear
        >>> nothing = dict(packet_rates=(), burst_rates=(), mended_rates=(), walk_rates=())
        >>> study = LossyStudy(steps=20, rates=(0.0, 0.3), **nothing)
        >>> list(finish(study.run([linear()])).trainings[0].scores["per shard"])
        [0.0, 0.3]
    """

    name: ClassVar[str] = "lossy"
    workers: int = 8
    steps: int = 600
    rates: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4)
    packet_rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)
    burst_rates: tuple[float, ...] = (0.1, 0.2)
    mended_rates: tuple[float, ...] = (0.2,)
    packet: int = 64
    burst: float = 8.0
    perplexity_seeds: int = 2
    accuracy_seeds: int = 1
    walk_rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    walk: int = 200
    settled: int = 40

    @property
    def losses(self) -> Mapping[str, Losses]:
        """The ways in which packets get lost, besides losses per shard."""

        def independent(rate: float) -> Mapping[str, Any]:
            return {**_both(Independent(rate)), "packet": self.packet}

        return {
            "per packet": (
                self.packet_rates,
                lambda rate: {"p_grad": rate, "p_param": rate, "packet": self.packet},
            ),
            "in bursts": (
                self.burst_rates,
                lambda rate: {**_both(GilbertElliott(rate, self.burst)), "packet": self.packet},
            ),
            "per packet, parity 1 in 4": (self.mended_rates, lambda rate: {**independent(rate), "parity": 4}),
            "per packet, largest 25 % reliable": (
                self.mended_rates,
                lambda rate: {**independent(rate), "reliable": 0.25},
            ),
        }

    def count(self, workloads: Sequence[Task]) -> int:
        runs = len(self.rates) + sum(len(rates) for rates, _ in self.losses.values())
        return sum(map(self._seeds, workloads)) * runs + len(self.walk_rates)

    def run(self, workloads: Sequence[Task]) -> Generator[str, None, LossyMeasured]:
        trainings = []
        for workload in workloads:
            trainings.append((yield from self._by_rate(workload)))
        walks = {}
        for rate in self.walk_rates:
            walks[rate] = self._walk(rate)
            yield f"drift at {rate:.0%}"
        return LossyMeasured(
            **self.about(workloads),
            rates=self.rates,
            packet=self.packet,
            burst=self.burst,
            trainings=tuple(trainings),
            walks=walks,
        )

    def _seeds(self, workload: Task) -> int:
        return self.perplexity_seeds if workload.metric == "perplexity" else self.accuracy_seeds

    def _by_rate(self, workload: Task) -> Generator[str, None, LossyTraining]:
        # Images are learned sooner than text.
        steps = self.steps if workload.metric == "perplexity" else self.steps // 2
        scores: dict[str, dict[float, float]] = {"per shard": {}}
        drifts: dict[float, float] = {}
        for rate in self.rates:
            found = self._runs(workload, steps, p_grad=rate, p_param=rate)
            scores["per shard"][rate] = _mean_score(found)
            reports = found[0].reports
            middle = slice(steps // 4, steps // 2)
            drifts[rate] = float(np.mean(reports["pair_drift"][middle, 0]) / np.mean(reports["move"][middle, 0]))
            for _ in found:
                yield f"{workload.name}, {rate:.0%} of the shards lost"
        for name, (rates, settings) in self.losses.items():
            if not rates:
                continue
            scores[name] = {0.0: scores["per shard"][self.rates[0]]}
            for rate in rates:
                found = self._runs(workload, steps, **settings(rate))
                scores[name][rate] = _mean_score(found)
                for _ in found:
                    yield f"{workload.name}, {rate:.0%} lost {name}"
        return LossyTraining(workload.name, workload.metric, steps, self._seeds(workload), scores, drifts)

    def _runs(self, workload: Task, steps: int, **settings: Any) -> list[Trained]:
        """Trainings that differ by their seeds, through one program."""
        optimizer = lossy_zero2(workload.optimizer(steps), DATA, seed=self.seed, **settings)

        def step(params: Any, state: Any, batch: Any, number: Any, setting: Any) -> Any:
            gradient = jax.grad(workload.loss)(params, batch)
            updates, state = optimizer.update(gradient, state, params)
            report = {name: getattr(state.report, name) for name in ("move", "pair_drift")}
            return optax.apply_updates(params, updates), state, report

        trainer = Trainer(workload, Method(lambda params, setting: optimizer.init(params), step), workers=self.workers)
        return [trainer(steps=steps, seed=self.seed + number) for number in range(self._seeds(workload))]

    def _walk(self, rate: float) -> float:
        """Owners that move by independent steps of variance 1: the gradient is noise without losses, the rate is 1."""
        optimizer = lossy_zero2(optax.sgd(1.0), DATA, 0.0, rate, packet=4, seed=self.seed)

        def run(theta: Any) -> Any:
            def step(carry: Any, number: Any) -> Any:
                theta, state = carry
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), number), lax.axis_index(DATA))
                gradient = jax.random.normal(key, theta.shape) * self.workers**0.5
                updates, state = optimizer.update(gradient, state, theta)
                return (optax.apply_updates(theta, updates), state), state.report.pair_drift / state.report.move

            return lax.scan(step, (theta, optimizer.init(theta)), jnp.arange(self.walk))[1]

        found = jax.jit(jax.vmap(run, axis_name=DATA))(jnp.zeros((self.workers, 4096)))
        return float(np.mean(np.asarray(found)[0, self.settled :]))


def _both(channel: Channel) -> Mapping[str, Any]:
    return {"p_grad": channel, "p_param": channel}


def _mean_score(found: Sequence[Trained]) -> float:
    return float(np.mean([one.score for one in found]))
