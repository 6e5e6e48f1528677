"""The study of PAFT: accuracy and perplexity under inconsistent gradients, with and without synchronization."""

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sdc.aggregation import gradient_noise, paft, paft_sync

from ..programs import DATA
from .measurements import Burst, Drifted, NoisyTraining, PaftMeasured
from .protocol import Study
from .workloads import Method, Task, Trainer

Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaftStudy(Study[PaftMeasured]):
    """Accuracy and perplexity under inconsistent gradients and under bursts; divergence of replicas.

    Attributes:
        variances: sigma^2 of the noise, as the paper gives its degree.
        periods: periods of `paft_sync`.
        burst_every: steps from one burst to the next; the paper has one in 500 steps of a longer training.
        bursts: sigma^2 of accidental large noise on top of the smallest of the variances.
        rate: learning rate of the plain SGD whose divergence is measured.
        sigma: noise of that SGD.
        drifting_steps: most steps of it.

    Example:
        >>> from sdc.train.studies import PaftStudy, linear
        >>> study = PaftStudy(variances=(0.1,), periods=(5,), bursts=())
        >>> list(study.methods), study.count([linear()])
        (['noisy', 'paft_sync, H = 5', 'paft'], 6)
    """

    name: ClassVar[str] = "paft"
    workers: int = 4
    steps: int = 200
    variances: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    periods: tuple[int, ...] = (5, 10, 50)
    burst_every: int = 50
    bursts: tuple[float, ...] = (0.1, 1.0)
    rate: float = 0.02
    sigma: float = 0.03
    drifting_steps: int = 100

    @property
    def methods(self) -> Mapping[str, Wrap]:
        """What is put around the optimizer, by name."""
        found: dict[str, Wrap] = {"noisy": lambda optimizer: optimizer}
        for period in self.periods:
            found[f"paft_sync, H = {period}"] = functools.partial(paft_sync, period=period, axis_name=DATA)
        found["paft"] = functools.partial(paft, axis_name=DATA, initial_period=10, min_period=1, max_period=50)
        return found

    def count(self, workloads: Sequence[Task]) -> int:
        runs = 1 + len(self.methods) * len(self.variances) + 2 * len(self.bursts)
        return len(workloads) * runs + 1 + len(self.periods[:2])

    def run(self, workloads: Sequence[Task]) -> Generator[str, None, PaftMeasured]:
        trainings = []
        for workload in workloads:
            optimizers = {name: wrap(workload.optimizer(self.steps)) for name, wrap in self.methods.items()}
            trainers = {name: self._trainer(workload, around, self._noise) for name, around in optimizers.items()}
            scores, synchronizations = yield from self._by_noise(workload, trainers)
            bursts = yield from self._with_bursts(workload, trainers)
            trainings.append(NoisyTraining(workload.name, workload.metric, scores, synchronizations, bursts))
        drifts = []
        for period in (None, *self.periods[:2]):
            name = "no synchronization" if period is None else f"H = {period}"
            drifts.append(Drifted(period, self._drift(workloads[0], period)))
            yield f"divergence, {name}"
        params = jax.eval_shape(workloads[0].init, jax.random.key(0))
        return PaftMeasured(
            **self.about(workloads),
            variances=self.variances,
            burst_every=self.burst_every,
            trainings=tuple(trainings),
            drifting=workloads[0].name,
            sigma=self.sigma,
            rate=self.rate,
            dimension=sum(leaf.size for leaf in jax.tree.leaves(params)),
            drifts=tuple(drifts),
        )

    def _noise(self, setting: tuple[Any, Any]) -> optax.GradientTransformation:
        """The setting is sigma, and sigma of bursts."""
        sigma, burst = setting
        return gradient_noise(DATA, sigma, seed=self.seed, burst_period=self.burst_every, burst_sigma=burst)

    def _trainer(
        self,
        workload: Task,
        optimizer: optax.GradientTransformation,
        noise: Callable[[Any], optax.GradientTransformation],
        report: Callable[[Any, Any], Mapping[str, Any]] = lambda params, gradient: {},
    ) -> Trainer:
        """Training behind a mean to which the noise of a setting is added for each worker."""

        def init(params: Any, setting: Any) -> Any:
            return optimizer.init(params), noise(setting).init(params)

        def step(params: Any, state: Any, batch: Any, number: Any, setting: Any) -> Any:
            del number
            inner, noisy = state
            gradient = lax.pmean(jax.grad(workload.loss)(params, batch), DATA)
            gradient, noisy = noise(setting).update(gradient, noisy)
            updates, inner = optimizer.update(gradient, inner, params)
            return optax.apply_updates(params, updates), (inner, noisy), report(params, gradient)

        return Trainer(workload, Method(init, step), workers=self.workers)

    def _by_noise(
        self, workload: Task, trainers: Mapping[str, Trainer]
    ) -> Generator[str, None, tuple[Mapping[str, tuple[float, ...]], tuple[int, ...]]]:
        clean = trainers["noisy"](_degree(0.0), steps=self.steps, seed=self.seed)
        yield f"{workload.name}, clean"
        scores: dict[str, tuple[float, ...]] = {"clean": (clean.score,) * len(self.variances)}
        synchronizations: list[int] = []
        for name, trainer in trainers.items():
            for variance in self.variances:
                found = trainer(_degree(variance), steps=self.steps, seed=self.seed)
                scores[name] = (*scores.get(name, ()), found.score)
                if name == "paft":
                    synchronizations.append(int(found.state[0].synchronizations[0]))
                yield f"{workload.name}, {name}, σ² = {variance:g}"
        return scores, tuple(synchronizations)

    def _with_bursts(self, workload: Task, trainers: Mapping[str, Trainer]) -> Generator[str, None, tuple[Burst, ...]]:
        bursts = []
        for variance in self.bursts:
            for name in ("noisy", "paft"):
                degree = _degree(self.variances[0], variance)
                found = trainers[name](degree, steps=self.steps, seed=self.seed, looks=40)
                bursts.append(Burst(name, variance, found.steps, found.scores))
                yield f"{workload.name}, {name}, bursts of {variance:g}"
        return tuple(bursts)

    def _drift(self, workload: Task, period: int | None) -> np.ndarray:
        """Squared divergence under plain SGD, for which lemma 3.1 holds whatever the loss: one mean gradient, and noise
        of each worker's own."""
        around = optax.sgd(self.rate) if period is None else paft_sync(optax.sgd(self.rate), DATA, period)

        def report(params: Any, gradient: Any) -> Mapping[str, Any]:
            free = jax.tree.map(lambda p, g: p - self.rate * g, params, gradient)
            squares = [jnp.sum(jnp.square(lax.pmean(leaf, DATA) - leaf)) for leaf in jax.tree.leaves(free)]
            return {"square": lax.pmean(sum(squares), DATA)}

        trainer = self._trainer(workload, around, lambda _: gradient_noise(DATA, self.sigma, seed=self.seed), report)
        steps = min(self.steps, self.drifting_steps)
        return trainer(steps=steps, seed=self.seed, looks=1).reports["square"][:, 0]


def _degree(variance: float, burst: float | None = None) -> tuple[Any, Any]:
    return jnp.float32(math.sqrt(variance)), jnp.float32(math.sqrt(variance if burst is None else burst))
