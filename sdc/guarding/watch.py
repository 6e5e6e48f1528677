"""`guard`: evidence of corruption from a running training loop, for a given share of its time."""

import dataclasses
import functools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from sdc.results import Result, ResultTable, counted
from sdc.verdict import Judgement, Verdict, limit

from ..multihost import first_line
from ..program import Reports, compiled_for, holds_objects
from .checked_steps import Checksums, Recomputation
from .evidence import Call, Detection, Layer, call_of, settled
from .neighbours import Ring
from .recomputation import NotRepeatable
from .replays import VendorChecker
from .schedule import CheckSchedule, agreed, common, seconds_of
from .silence import CONFIDENCE, bounded, expected_delay, judge_silence, most_wrong
from .spikes import Spikes
from .state import State

PATIENCE = 100  # successive steps with arguments of another form, after which the checks are prepared for this form
# Effects that a check may repeat: on references that it makes itself (see `call_of`), and the names of mesh axes.
HARMLESS = {"InternalMutableArrayEffect", "NamedAxisEffect"}
WARM_UP = 3  # steps before the time of a step is known
MOST_PENDING = 16  # results that are not judged yet, beyond which the host waits for the oldest


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What one layer did.

    Attributes:
        name: its name.
        about: what it compares.
        why_not: why it did not run; empty if it could.
        runs: number of checks.
        cost: seconds for one check.
        steps: numbers of steps by the length of their window (see `most_wrong`).
        coverage: share of the step on which its comparisons depend; None if its silence bounds nothing.
        computations: how often a step is computed for a check.
    """

    name: str
    about: str
    why_not: str
    runs: int
    cost: float
    steps: dict[int, int]
    coverage: float | None = None
    computations: int = 1

    def most_wrong_share(self, confidence: float = CONFIDENCE) -> float:
        """Returns the share of steps that can be wrong at most, in what the layer sees, if it found nothing."""
        whole = sum(self.steps.values())
        if not whole or not self.runs or self.coverage is None:
            return 1.0
        return most_wrong(self.steps, confidence=confidence) / whole

    def delay(self, rate: float, burst: float = 1.0) -> float:
        """Returns the mean number of steps until the layer finds a fault that makes this share of the computations
        wrong, in what the layer sees; in bursts, all computations are wrong."""
        checked = sum(count / window for window, count in self.steps.items() if window)
        share = rate if burst > 1 else 1 - (1 - rate) ** self.computations
        return expected_delay(sum(self.steps.values()) / checked, share, burst=burst) if checked else math.inf


@dataclasses.dataclass(frozen=True, repr=False)
class GuardReport(Result):
    """What a guard found, or what its silence excludes.

    Attributes:
        steps: number of calls, including those that raised an error.
        findings: what was found, in order.
        layers: what each layer did.
        overhead: time of the checks as a share of the time of the steps, from the time of a check when it was compiled
            and the median time of a step.
        start_up: seconds for compiling and calibrating.
        budget: share of the time that checks may take in the long run.
        simulated: whether the step returns events of simulated faults.
    """

    steps: int
    findings: tuple[Detection, ...]
    layers: tuple[LayerReport, ...]
    overhead: float
    start_up: float
    budget: float = 0.0
    simulated: bool = False

    def verdict(self) -> Judgement:
        """Returns the verdict: corrupt if a layer has proof; inconclusive if there is only suspicion, or if the silence
        of no layer `excludes` enough."""
        found = self._judged()
        return found.marked() if self.simulated else found

    def _judged(self) -> Judgement:
        if self.findings:
            proof = [finding for finding in self.findings if finding.proof]
            more = f"; {len(self.findings):,} findings in all" if len(self.findings) > 1 else ""
            found = f"{(proof or self.findings)[0]}{more}"
            if proof:
                return Judgement(Verdict.CORRUPT, found)
            return Judgement(Verdict.INCONCLUSIVE, f"a suspicion, but no proof: {found}")
        layers = ((one.name, one.about, one.coverage, one.most_wrong_share()) for one in self.layers)
        return judge_silence(self.steps, layers)

    def table(self) -> ResultTable:
        """Returns a row for each layer, with the largest share of wrong steps that its silence does not exclude."""
        found = Counter(finding.layer for finding in self.findings)
        most = [
            None if one.coverage is None else limit(100 * one.most_wrong_share(), 3, up=True) for one in self.layers
        ]
        rows = tuple(
            (one.name, one.runs, found[one.name], share, one.why_not or one.about)
            for one, share in zip(self.layers, most, strict=True)
        )
        return ResultTable(("layer", "checks", "findings", "% of steps wrong, at most", "compares"), rows)

    def __str__(self) -> str:
        took = f"{self.overhead:.{0 if self.overhead > 0.1 else 2}%}"
        lines = [f"{self.verdict().verdict}: {counted(self.steps, 'step')}, checks took about {took} of their time"]
        if self.overhead > 1.5 * self.budget > 0:
            lines[0] += f" (the budget of {self.budget:.3g} is for long runs: the first checks are paid in advance)"
        if self.simulated:
            lines[0] += ", with simulated faults"
        lines += [f"  {finding}" for finding in self.findings[:10]]
        if len(self.findings) > 10:
            lines.append(f"  and {len(self.findings) - 10} more")
        for layer in self.layers:
            if layer.why_not:
                how = f"stopped after {layer.runs} checks" if layer.runs else "not run"
                lines.append(f"  {layer.name}: {how}: {layer.why_not}")
            elif layer.coverage is None or any(finding.layer == layer.name for finding in self.findings):
                lines.append(f"  {layer.name}: {layer.runs} checks ({layer.about})")
            elif layer.most_wrong_share() >= 1:
                lines.append(f"  {layer.name}: {layer.runs} checks, too few to exclude anything ({layer.about})")
            else:
                silence = bounded(layer.most_wrong_share())
                lines.append(f"  {layer.name}: {layer.runs} checks ({layer.about}); without a finding, {silence}")
        return "\n".join(lines)


def layers_for(mesh: Mesh | None, axis: str, seed: int = 0) -> list[Layer]:
    """Returns the layers of evidence that `guard` uses by default."""
    layers = [Recomputation(mesh=mesh), Ring(mesh, axis), Checksums(), State(seed), Spikes()]
    return [*layers, VendorChecker()] if compiled_for().platform == "tpu" else layers


Found = TypeVar("Found")
P = ParamSpec("P")  # of a step
Out = TypeVar("Out")


class Watch(Generic[P, Out]):
    """A step that is watched; see `guard`."""

    def __init__(
        self, step: Callable[P, Out], budget: float, layers: Sequence[Layer], seed: int,
        on_finding: Callable[[Detection], None], rekey: Callable[..., Sequence[Any]] | None = None,
    ) -> None:  # fmt: skip
        self._step, self._budget, self._layers, self._seed = step, budget, list(layers), seed
        self._on_finding, self._rekey = on_finding, rekey
        self._compiled: Callable[..., Any] | None = step if hasattr(step, "lower") else None
        self._schedule: CheckSchedule | None = None
        self._costs: dict[str, tuple[float, float]] = {}
        self._form: Any = None  # of the arguments for which the layers are prepared
        self._others = 0  # successive steps with arguments of another form
        self._objects = False  # whether there are Flax NNX objects among the arguments
        self._begun: dict[str, int] = {}  # steps at which the last checks began
        self._lost = Counter[str]()  # checks that were begun, but not completed or not judged
        self._covered: dict[str, float] = {}  # least coverage for earlier forms of the arguments
        self._pending: deque[tuple[Layer, int, Any]] = deque()
        self._findings: list[Detection] = []
        self._last = self._start_up = 0.0
        self._warm: list[float] = []
        self._checked = self._simulated = False
        self.steps = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Out:
        """Runs the step, and the checks that are due; returns the step's result."""
        form = _form_of(args, kwargs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            raise ValueError("a guarded step was called inside jit or another transformation; call it outside")
        self._judge(wait=False)
        self._others = 0 if form == self._form else self._others + 1
        if self._form is None or self._others > PATIENCE:
            self._prepare(form, args, kwargs)
        due = self._due(time.perf_counter())
        before = [layer for layer in self._able() if layer.name in due or layer.waiting]
        self._begun |= dict.fromkeys(due, self.steps)
        try:
            if before:
                call = self._call(args, kwargs)
                settled(call.arrays)
                for layer in before:
                    self._await(layer, functools.partial(layer.before, call))
            out = self._run(args, kwargs)
            self._simulated = self._simulated or (not self.steps and Reports.simulated_in(out))
            given = (args, kwargs) if self._objects else None
            for layer in self._able():
                if layer.name in due or not layer.share:
                    self._await(layer, functools.partial(layer.after, out, given))
        except BaseException:
            self._lost.update(due)
            raise
        finally:  # a call that raises is a step, as it is for the schedule
            self.steps += 1
        return out

    def idle(self) -> bool:
        """Completes a check that waits for idle time (see `Replay`); returns whether there was one.

        Call it while the loop waits, as for data. In several processes, all must call it after the same step.
        """
        found = [(layer, self._tried(layer, layer.idle, check=True)) for layer in self._able()]
        done = [(layer, self._begun.get(layer.name, self.steps), one) for layer, one in found if one is not None]
        self._pending += done
        return bool(done)

    def report(self) -> GuardReport:
        """Waits for the checks that are running, and returns what was found, or what silence excludes."""
        self._judge(wait=True)
        checks = self._schedule.checks if self._schedule else {}
        layers = []
        for layer in self._layers:
            check = checks.get(layer.name)
            steps, runs, cost = (dict(check.steps), check.runs, check.cost) if check else ({}, 0, 0.0)
            steps[0] = steps.get(0, 0) + self.steps - sum(steps.values())  # before the time of a step was known
            lost = min(runs, self._lost[layer.name] + (not layer.ready))
            runs = runs - lost if layer.share else self.steps
            for window in sorted(steps, reverse=True):  # a check stands for as many steps as its window has
                unchecked = min(steps[window], lost * window)
                steps[window], steps[0] = steps[window] - unchecked, steps[0] + unchecked
                lost -= math.ceil(unchecked / window) if window else 0
            covers = min(layer.coverage, self._covered.get(layer.name, 1.0)) if layer.bounds else None
            about = layer.name, layer.about, layer.why_not
            layers.append(LayerReport(*about, runs, cost, steps, covers, layer.computations))
        overhead = self._schedule.overhead() if self._schedule else 0.0
        return GuardReport(
            self.steps, tuple(self._findings), tuple(layers), overhead, self._start_up, self._budget, self._simulated
        )

    def table(self) -> ResultTable:
        """Returns the table of `report`."""
        return self.report().table()

    def __repr__(self) -> str:
        return f"Watch({counted(self.steps, 'step')}, {counted(len(self._findings), 'finding')} so far)"

    def verdict(self) -> Judgement:
        """Returns the verdict of `report`."""
        return self.report().verdict()

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self._compiled is None:
            if self._objects:
                from flax import nnx

                self._compiled = nnx.jit(self._step)
            else:
                self._compiled = jax.jit(self._step)
        return self._compiled(*args, **kwargs)

    def _call(self, args: Any, kwargs: Any) -> Call:
        return call_of(self._step, args, kwargs, objects=self._objects, rekey=self._rekey, compiled=self._compiled)

    def _able(self) -> list[Layer]:
        return [layer for layer in self._layers if not layer.why_not]

    def _prepare(self, form: Any, args: Any, kwargs: Any) -> None:
        """Compiles and calibrates the layers for a form of the step's arguments."""
        started = time.perf_counter()
        self._objects = holds_objects((args, kwargs))
        call = self._call(args, kwargs)
        if self._rekey is not None:
            _ = call.arrays  # raises an error if it returns other arrays
        for name, check in self._schedule.checks.items() if self._schedule else ():
            if check.runs:
                coverage = next(layer.coverage for layer in self._layers if layer.name == name)
                self._covered[name] = min(coverage, self._covered.get(name, 1.0))
        costs, effects = {}, _effects_of(call) if any(layer.runs_step for layer in self._layers) else ""
        for layer in self._layers:
            self._lost[layer.name] += not layer.ready
            layer.why_not = f"the step has {effects}, which a check would repeat" if layer.runs_step and effects else ""
            if not layer.why_not:
                self._calibrate(layer, call)
            if layer.share and not layer.why_not:
                seconds = self._tried(layer, functools.partial(seconds_of, functools.partial(layer.cost, call)))
                if seconds is not None:
                    costs[layer.name] = layer.share, seconds
        everywhere = common(costs)
        for layer in self._layers:
            if layer.name in costs.keys() - everywhere:
                layer.why_not = "it cannot run in another process"
                del costs[layer.name]
        whole = sum(share for share, _ in costs.values())
        self._costs = agreed({name: (share / whole, seconds) for name, (share, seconds) in costs.items()})
        if self._schedule is not None:
            self._schedule.revise(self._costs)
        self._form, self._others, self._last = form, 0, 0.0
        self._start_up += time.perf_counter() - started

    def _calibrate(self, layer: Layer, call: Call) -> None:
        """Prepares a layer. A step that repeated its bits before and no longer does is evidence, not an error."""
        try:
            self._tried(layer, functools.partial(layer.prepare, call))
        except NotRepeatable as error:
            if not self.steps:
                raise
            layer.why_not = first_line(error)
            self._found([Detection(layer.name, self.steps, first_line(error))])

    def _found(self, detections: Sequence[Detection]) -> None:
        self._findings += detections  # all of them, before the user's function is called, which may raise an error
        if self._schedule is not None and detections:
            self._schedule.suspect()
        for detection in detections:
            self._on_finding(detection)

    def _due(self, now: float) -> list[str]:
        """Returns the names of the checks of this step; the first steps show how long a step takes."""
        took, self._last = now - self._last if self._last else 0.0, now
        if self._schedule is None:
            if took:
                self._warm.append(took)
            if len(self._warm) < WARM_UP or not self._costs:
                return []
            self._schedule = CheckSchedule(self._budget, self._costs, agreed(min(self._warm)), seed=self._seed)
        elif took and not self._checked:
            self._schedule.took(took)
        ready = {layer.name for layer in self._able() if layer.ready and not self._others}
        due = self._schedule.due(can=ready.__contains__)
        self._checked = bool(due)
        return due

    def _await(self, layer: Layer, look: Callable[[], Any]) -> None:
        found = self._tried(layer, look, check=True)
        if found is not None:
            settled(found if layer.share else ())
            self._pending.append((layer, self.steps, found))

    def _judge(self, *, wait: bool) -> None:
        while self._pending:
            layer, step, found = self._pending[0]
            arrays: list[Any] = [leaf for leaf in jax.tree.leaves(found) if isinstance(leaf, jax.Array)]
            ready = all(array.is_deleted() or array.is_ready() for array in arrays)
            if not (wait or ready or len(self._pending) > MOST_PENDING):
                return
            self._pending.popleft()
            self._found(self._tried(layer, functools.partial(layer.judge, found, step), check=True) or ())

    def _tried(self, layer: Layer, action: Callable[[], Found], *, check: bool = False) -> Found | None:
        """Runs a part of a layer; if it fails, the layer stops, and training goes on; `check` if a check is then
        lost."""
        try:
            return action()
        except NotRepeatable:
            raise
        except Exception as error:  # of a layer, which may be the user's
            layer.why_not = f"it failed ({type(error).__name__}: {first_line(error)})"
            self._lost[layer.name] += check
            return None


def _effects_of(call: Call) -> str:
    """Returns the kinds of a step's side effects, such as callbacks; an empty string if it has none."""
    run = call.run
    try:
        effects = jax.make_jaxpr(lambda *arrays: run(arrays))(*call.arrays).effects
    except Exception:  # a step that cannot be traced, which the layers report
        return ""
    return ", ".join(sorted({type(effect).__name__ for effect in effects} - HARMLESS))


def _form_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Returns what a compiled check depends on: the structure of the arguments, and the types of the arrays in them."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    return structure, tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)


def guard(
    step: Callable[P, Out],
    mesh: Mesh | None = None,
    *,
    axis: str = "data",
    budget: float = 0.01,
    layers: Sequence[Layer] | None = None,
    seed: int = 0,
    on_finding: Callable[[Detection], None] = lambda finding: None,
    rekey: Callable[..., Sequence[Any]] | None = None,
) -> Watch[P, Out]:
    """Watches a training step for corruption, for a given share of its time.

    The watched step is the step: its results have the bits that they have without a guard. Checks are programs of their
    own, whose results are only compared, at random steps that depend on measured times and the seed. The first call
    compiles and calibrates them, with its arguments. The host waits only for results that are more than 16 steps old.

    Args:
        step: a `jax.jit`, `nnx.jit` or `eqx.filter_jit` of a function, which may donate its arguments; any other
            function is compiled. Flax NNX objects and Equinox modules may be among the arguments.
        mesh: mesh of the step's devices, for comparisons between devices.
        axis: axis of the mesh along which devices compute different parts of a batch.
        budget: share of the time of the steps that checks may take.
        layers: layers of evidence; by default, those of `layers_for`.
        seed: seed of the random steps; equal in all processes.
        on_finding: called on the host with each finding.
        rekey: for simulated faults, which depend on a random key among the arguments: returns the positional arguments
            with another key. Each computation of a check calls it, so that each is struck by faults of its own.

    Raises:
        ValueError: the budget is not between 0 and 1, or two layers have the same name.
        TypeError: the step is a compiled program, a layer or the mesh is something else, or a function is not callable.
        NotRepeatable: the step computes other bits from the same inputs (from the first call).

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
        >>> def loss(w, x):
        ...     return jnp.sum(jax.lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0])
        >>> @jax.jit
        ... def step(w, x):
        ...     return w - 0.1 * jax.grad(loss)(w, x), {"loss": loss(w, x)}
        >>> watch, w = sdc.guard(step, budget=0.5), jnp.eye(4)
        >>> for _ in range(20):
        ...     w, metrics = watch(w, jnp.ones((2, 4)))
        >>> watch.report().findings
        ()
    """
    if isinstance(step, jax.stages.Compiled):
        raise TypeError("guard was given a compiled program, into which checks cannot be put; pass the jitted function")
    if rekey is not None and not callable(rekey):
        raise TypeError(f"rekey={rekey!r}: expected a function that returns the arguments with another random key")
    if not 0 < budget < 1:
        raise ValueError(f"budget={budget}: expected a share of the time between 0 and 1, as in 0.01")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: expected a jax.sharding.Mesh; give the name of its axis as axis=")
    if not callable(on_finding):
        raise TypeError(f"on_finding={on_finding!r}: expected a function of a Detection, such as print")
    chosen = layers_for(mesh, axis, seed) if layers is None else list(layers)
    if odd := [each for each in chosen if not isinstance(each, Layer)]:
        raise TypeError(
            f"layers: expected layers of evidence, not {odd[0]!r}; give sdc.guarding.Checksums(), for example"
        )
    names = [layer.name for layer in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"layers {names}: expected layers with different names")
    return Watch(step, budget, chosen, seed, on_finding, rekey)
