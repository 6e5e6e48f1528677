"""Value numbers: which operations of a program compute a value that another operation has computed already.

Two values have one number if they are results of the same primitive with equal parameters and inputs of equal numbers
(Cocke and Schwartz 1970; Alpern, Wegman and Zadeck 1988). A number in the body of a loop denotes a function of the
loop's index, so values are followed through the residuals of differentiated loops: element i of a stack of values of
iteration i has the number of the value itself. The carried values of a loop are assumed to be those of an earlier loop
with equal initial values; the assumption is kept where the bodies compute the same next values from it.

Equal numbers alone do not mean that the device computes a value twice, since XLA merges equal operations. Each value
therefore has an *origin*: the optimization barriers and loops through which its inputs came, across which XLA does not
merge. Operations with equal numbers and different origins run separately. On CPUs, XLA removes barriers before it
merges: there, recomputations outside of loops do not run at all (jax 0.10.2, compiled programs).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax._src.lax.control_flow.solves import linear_solve_p
from jax._src.shard_map import shard_map_p
from jax._src.state.discharge import run_state_p
from jax.extend.core import primitives

from .arguments import traced
from .identities import mark_p
from .mesh import compiled_for
from .plan import Bound, Inside, bodies, enter, is_entered, live_program, open_jaxpr, plan_sites
from .selectors import Site, Skipped, Where, as_selector, everything

Order: TypeAlias = tuple[int | str, ...]
Origin: TypeAlias = frozenset[Any]

# Primitives that return their inputs, in another memory, layout or sharding.
SAME = frozenset({
    "probe", "port", "inlined", "optimization_barrier", "name", "copy", "copy_p", "device_put", "pvary", "reshard",
    "sharding_constraint", "layout_constraint", "mesh_cast", "stop_gradient", "vary_unreduced_cast_p",
    "reduced_vary_cast_p", "reduced_vary_cast",
})  # fmt: skip
# Primitives whose result is not a function of their inputs.
IMPURE = frozenset({"rng_uniform", "empty", "empty2", "create_token"})
ATTEMPTS = 4  # earlier loops with which a loop is compared


class Value(NamedTuple):
    """The number and the origin of a value."""

    number: int
    origin: Origin = frozenset()


class Computed(NamedTuple):
    """What an operation computes.

    Attributes:
        numbers: the numbers of its results.
        origin: its origin.
        reads: the numbers of its inputs.
        runs: when it runs: the numbers of the predicates around it with the branches, and of the conditions of loops.
    """

    numbers: tuple[int, ...]
    origin: Origin
    reads: tuple[int, ...]
    runs: tuple[Any, ...] = ()


class _Around(NamedTuple):
    """What is around an operation."""

    place: Inside
    level: int = 0  # number of enclosing loops
    mesh: Any = None  # key of the enclosing `shard_map`s
    runs: tuple[Any, ...] = ()

    def at(self, index: int) -> "_Around":
        return self._replace(place=self.place._replace(order=(*self.place.order, index)))

    def body(self, eqn: Any, number: int) -> "_Around":
        return self._replace(place=enter(eqn, number, self.place))

    @property
    def order(self) -> Order:
        return self.place.order


class _Loop(NamedTuple):
    """A loop that was numbered: what later loops are compared with."""

    kind: tuple[Any, ...]
    starts: tuple[int, ...]  # numbers of the initial carried values
    carries: tuple[int, ...]  # numbers of the carried values in the body
    nexts: tuple[int, ...]  # numbers of the next carried values
    condition: int | None


@dataclasses.dataclass
class _Numbers:
    """Numbers of values, each with the expression that it denotes."""

    expressions: list[Any] = dataclasses.field(default_factory=list)
    known: dict[Any, int] = dataclasses.field(default_factory=dict)
    kept: list[Any] = dataclasses.field(default_factory=list)  # objects that are compared by identity

    def of(self, *expression: Any) -> int:
        number = self.known.setdefault(expression, len(self.expressions))
        if number == len(self.expressions):
            self.expressions.append(expression)
        return number

    def new(self) -> int:
        return self.of("new", len(self.expressions))

    def element(self, array: int, level: int, length: int) -> int:
        """Returns the number of element i of an array in a loop with index i."""
        kind, *rest = self.expressions[array]
        return rest[2] if kind == "stack" and rest[:2] == [level, length] else self.of("at", level, length, array)

    def shard(self, array: int, where: Any) -> int:
        kind, *rest = self.expressions[array]
        return rest[1] if kind == "whole" and rest[0] == where else self.of("shard", where, array)

    def in_branch(self, value: int, predicate: int, branch: int) -> int:
        """Returns the number of a value in a branch, where a result of the same branch is known."""
        kind, *rest = self.expressions[value]
        return rest[1][branch] if kind == "either" and rest[0] == predicate else value

    def key(self, value: Any) -> Any:
        """Returns a parameter of an equation as a key of equal parameters."""
        if isinstance(value, tuple | list):
            return tuple(map(self.key, value))
        if isinstance(value, dict):
            return tuple((name, self.key(one)) for name, one in sorted(value.items(), key=lambda item: str(item[0])))
        if isinstance(value, core.Jaxpr) or hasattr(value, "jaxpr"):
            jaxpr, consts = open_jaxpr(value)
            self.kept.append(value)
            return "program", str(jaxpr), tuple(map(id, consts))
        if isinstance(value, np.ndarray):
            return "array", str(value.dtype), value.shape, value.tobytes()
        try:
            hash(value)
        except TypeError:
            self.kept.append(value)
            return "object", id(value)
        return type(value), value


def computed_by(live: Bound) -> dict[Order, Computed]:
    """Returns what each operation of a program computes, by the operation's place (`Site.order`)."""
    walk = _Walk()
    inputs = [Value(walk.numbers.new()) for _ in live.jaxpr.invars]
    walk.body(live.jaxpr, inputs, _Around(Inside()))
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.numbers = _Numbers()
        self.found: dict[Order, Computed] = {}
        self.loops: list[_Loop] = []
        self.barriers = compiled_for().platform != "cpu"
        self.trial = 0  # depth of bodies that are numbered on an assumption, and again afterwards

    def body(self, jaxpr: Any, inputs: Sequence[Value], here: _Around, consts: Any = ()) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=False):
            values[var] = self.constant(const)

        def read(atom: Any) -> Value:
            return self.literal(atom) if isinstance(atom, core.Literal) else values[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            outs = self.equation(eqn, list(map(read, eqn.invars)), here.at(index))
            values.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def constant(self, const: Any) -> Value:
        self.numbers.kept.append(const)
        return Value(self.numbers.of("constant", id(const)))

    def literal(self, atom: Any) -> Value:
        value = atom.val
        try:
            key = np.asarray(value).tobytes() if np.ndim(value) else (type(value).__name__, repr(value))
        except TypeError:
            return self.constant(value)
        return Value(self.numbers.of("literal", str(atom.aval), key))

    def equation(self, eqn: Any, inputs: list[Value], at: _Around) -> list[Value]:
        numbers, primitive = self.numbers, eqn.primitive
        if primitive is primitives.scan_p or primitive is primitives.while_p:
            return self.loop(eqn, inputs, at)
        if primitive is primitives.cond_p:
            return self.branches(eqn, inputs, at)
        if primitive is shard_map_p:
            return self.shard_map(eqn, inputs, at)
        if is_entered(eqn) and primitive not in (linear_solve_p, run_state_p):
            (whole,) = bodies(eqn)
            inner, consts = open_jaxpr(whole)
            if len(inner.invars) == len(eqn.invars):
                if self.barriers and primitive is primitives.remat_p and eqn.params["differentiated"]:
                    inputs = _behind(("remat", at.order), inputs, eqn.params["prevent_cse"])
                return self.body(inner, inputs, at.body(eqn, 0), consts)
        params: Any = eqn.params
        if primitive is mark_p:  # the results of a rule count as those of the equation that it replaced
            primitive, inputs = params["of"], inputs[params["outputs"] :]
            params = dict(params["params"])
        if primitive.name in SAME and len(inputs) == len(eqn.outvars):
            barrier = self.barriers and primitive.name == "optimization_barrier"
            return _behind(("barrier", at.order), inputs) if barrier else inputs
        if primitive.name == "reduce_precision" and _keeps_precision(eqn, params):
            return inputs
        origin = _union(inputs)
        if _is_function(eqn, primitive):
            key = numbers.of(primitive, numbers.key(params), tuple(one.number for one in inputs), at.mesh)
        else:
            key = numbers.new()
        outs = tuple(numbers.of("result", key, place) for place in range(len(eqn.outvars)))
        if not self.trial:
            self.found[at.order] = Computed(outs, origin, tuple(one.number for one in inputs), at.runs)
        return [Value(number, origin) for number in outs]

    def branches(self, eqn: Any, inputs: list[Value], at: _Around) -> list[Value]:
        predicate, *operands = inputs
        results = []
        for number, branch in enumerate(eqn.params["branches"]):
            given = [
                one._replace(number=self.numbers.in_branch(one.number, predicate.number, number)) for one in operands
            ]
            jaxpr, consts = open_jaxpr(branch)
            given = _behind(("branch", at.order), given)
            inside = at.body(eqn, number)._replace(runs=(*at.runs, (predicate.number, number)))
            results.append(self.body(jaxpr, given, inside, consts))
        return [
            Value(self.numbers.of("either", predicate.number, tuple(one.number for one in ones)), _union(ones))
            for ones in zip(*results, strict=True)
        ]

    def shard_map(self, eqn: Any, inputs: list[Value], at: _Around) -> list[Value]:
        params = eqn.params
        mesh = self.numbers.key((params["mesh"], tuple(sorted(map(str, params["newly_manual_axes"])))))
        given = [
            one._replace(number=self.numbers.shard(one.number, (mesh, str(spec))))
            for one, spec in zip(inputs, params["in_specs"], strict=True)
        ]
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        outs = self.body(jaxpr, given, at.body(eqn, 0)._replace(mesh=(at.mesh, mesh)), consts)
        return [
            one._replace(number=self.numbers.of("whole", (mesh, str(spec)), one.number))
            for one, spec in zip(outs, params["out_specs"], strict=True)
        ]

    def loop(self, eqn: Any, inputs: list[Value], at: _Around) -> list[Value]:
        """Numbers a `scan` or a `while`."""
        numbers, params, level = self.numbers, eqn.params, at.level
        scans = eqn.primitive is primitives.scan_p
        if scans:
            length = int(params["length"])
            if "ft_in" in params:  # jax 0.12
                num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
            else:
                num_consts, num_carry = params["num_consts"], params["num_carry"]
            kind: tuple[Any, ...] = ("scan", level, length, bool(params["reverse"]), at.mesh)
            consts, start, xs = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]
            asked: list[Value] = []
        else:
            length, kind = 0, ("while", level, at.mesh)
            asked, rest = inputs[: params["cond_nconsts"]], inputs[params["cond_nconsts"] :]
            consts, start, xs = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :], []
        # XLA removes a loop with one iteration, as an unrolled one has.
        turns = -(-length // max(int(params["unroll"]), 1)) if scans else 0
        token = frozenset([("loop", at.order)] if turns != 1 else [])
        carried = [Value(0, one.origin | _union([*consts, *xs]) | token) for one in start]
        elements = [Value(numbers.element(one.number, level, length), one.origin | token) for one in xs]

        def run(carries: Sequence[int]) -> tuple[list[Value], int | None]:
            given = [one._replace(number=number) for one, number in zip(carried, carries, strict=True)]
            condition, inside, body = None, at._replace(level=level + 1), bodies(eqn)[-1]
            if not scans:
                jaxpr, known = open_jaxpr(bodies(eqn)[0])
                asking = inside._replace(runs=(*at.runs, at.order))  # once more than the body
                (asks,) = self.body(jaxpr, [*asked, *given], asking.body(eqn, 0), known)
                condition = asks.number
                inside = inside._replace(runs=(*at.runs, ("while", condition)))
            jaxpr, known = open_jaxpr(body)
            return self.body(jaxpr, [*consts, *given, *elements], inside.body(eqn, int(not scans)), known), condition

        starts = tuple(one.number for one in start)
        fresh = [numbers.of("carry", level, at.order, place) for place in range(len(start))]
        carries = self._assumed(kind, starts, fresh, run)
        outs, condition = run(carries)
        ends, ys = outs[: len(start)], outs[len(start) :]
        if not self.trial:
            self.loops.append(_Loop(kind, starts, tuple(carries), tuple(one.number for one in ends), condition))
        return [
            *(
                Value(numbers.of("end", kind, number, end.number), end.origin | one.origin)
                for number, end, one in zip(carries, ends, carried, strict=True)
            ),
            *(Value(numbers.of("stack", level, length, one.number), one.origin) for one in ys),
        ]

    def _assumed(self, kind: Any, starts: tuple[int, ...], fresh: list[int], run: Any) -> list[int]:
        """Returns the numbers of carried values: those of an earlier loop where it computes the same, else new ones."""
        best = list(fresh)
        alike = [loop for loop in self.loops if loop.kind == kind and set(loop.starts) & set(starts)]
        self.trial += 1
        for loop in reversed(alike[-ATTEMPTS:]):
            of, taken = {}, set()
            for place, number in enumerate(starts):  # carried values of equal starts in their order
                other = next((i for i, s in enumerate(loop.starts) if s == number and i not in taken), None)
                if other is not None:
                    of[place] = other
                    taken.add(other)
            while of:
                given = [loop.carries[of[place]] if place in of else fresh[place] for place in range(len(starts))]
                outs, condition = run(given)
                wrong = [place for place, other in of.items() if outs[place].number != loop.nexts[other]]
                if condition != loop.condition:
                    wrong = list(of)
                if not wrong:
                    break
                for place in wrong:
                    del of[place]
            if sum(a != b for a, b in zip(best, fresh, strict=True)) < len(of):
                best = [loop.carries[of[place]] if place in of else fresh[place] for place in range(len(starts))]
            if len(of) == len(starts):
                break
        self.trial -= 1
        return best


def _union(values: Iterable[Value]) -> Origin:
    return frozenset().union(*(one.origin for one in values))


def _behind(barrier: Any, values: Sequence[Value], which: Any = True) -> list[Value]:
    """Returns values behind a barrier; `which` says for which of them there is one."""
    flags = [which] * len(values) if isinstance(which, bool) else list(which)
    behind = (one._replace(origin=one.origin | {barrier}) for one in values)
    return [after if flag else one for one, after, flag in zip(values, behind, flags, strict=True)]


@functools.lru_cache(256)
def _bits(dtype: Any) -> tuple[int, int]:
    info = jnp.finfo(dtype)
    return info.nexp, info.nmant


def _keeps_precision(eqn: Any, params: Any) -> bool:
    """Returns whether an equation rounds to the precision that its input has, as JAX does with residuals."""
    exponent, mantissa = _bits(eqn.outvars[0].aval.dtype)
    return params["exponent_bits"] >= exponent and params["mantissa_bits"] >= mantissa


def _is_function(eqn: Any, primitive: Any) -> bool:
    """Returns whether an equation's results depend on its inputs alone."""
    if primitive.name in IMPURE or any(not isinstance(effect, core.NamedAxisEffect) for effect in eqn.effects):
        return False
    return all(isinstance(var.aval, core.ShapedArray) for var in (*eqn.invars, *eqn.outvars))


ELSEWHERE = "it is computed once: the backward pass does not need it"
SAVED = "it is computed once: its result is saved for the backward pass, or XLA merges the two computations"
LEFT_OUT = "it is computed twice, but not selected"


class Repeated(NamedTuple):
    """Operations that compute the same value.

    Attributes:
        first: the first computation.
        again: the recomputations.
        after: names of the first computations of other groups from which this value is computed, without one between.
    """

    first: Site
    again: tuple[Site, ...]
    after: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Recomputations:
    """The operations of a step that run more than once, and the operations of its forward pass that do not.

    Attributes:
        groups: operations that are compared.
        skipped: operations of the forward pass of which no comparison depends on both computations, with the reason
            and their share of the forward pass.
        twice: floating-point operations of the forward pass that XLA runs more than once.
        covered: those of them on which a comparison depends.
    """

    groups: tuple[Repeated, ...]
    skipped: tuple[Skipped, ...]
    twice: int = 0
    covered: int = 0

    @classmethod
    def of(cls, live: Bound, selector: Where, *, last: bool = False) -> "Recomputations":
        """Finds the selected operations of a program that XLA runs more than once."""
        sites = plan_sites(live, everything).sites
        computed = computed_by(live)
        sites = tuple(site for site in sites if site.order in computed)  # without arrays that enter or leave the step
        alike: dict[Any, list[Site]] = {}
        for site in sites:
            what = computed[site.order]
            before = alike.setdefault((what.numbers, what.runs, site.dims, site.trips, site.mesh), [])
            if all(computed[one.order].origin != what.origin for one in before):  # XLA does not merge them
                before.append(site)
        twice = [(first, tuple(again)) for first, *again in alike.values() if again]
        chosen = [(first, again) for first, again in twice if as_selector(selector)(first)]
        sources = _sources(computed, {computed[first.order].numbers: first.name for first, _ in chosen})
        groups = tuple(Repeated(first, again, sources(computed[first.order].reads)) for first, again in chosen)
        if last:
            followed = {name for group in groups for name in group.after}
            groups = tuple(group for group in groups if group.first.name not in followed)
        repeated = {first.name for first, _ in twice}
        reached = {number for group in groups for number in computed[group.first.order].numbers}
        for first, _ in reversed(twice):  # from results to what they are computed from, in both passes
            if reached.intersection(computed[first.order].numbers):
                reached.update(computed[first.order].reads)
        covered = {first.name for first, _ in twice if reached.intersection(computed[first.order].numbers)}
        later = (computed[site.order].reads for site in sites if site.direction in ("bwd", "remat"))
        saved = {number for reads in later for number in reads}
        forward = [site for site in sites if site.direction == "fwd"]
        work = sum(site.work for site in forward)
        skipped = []
        for site in forward:
            if site.name not in covered and (site.work or site.products is None):
                kept = saved.intersection(computed[site.order].numbers)
                reason = LEFT_OUT if site.name in repeated else SAVED if kept else ELSEWHERE
                skipped.append(Skipped(site, reason, site.work / max(work, 1)))
        ahead = [first for first, _ in twice if first.direction == "fwd"]
        counts = (sum(site.work for site in ahead), sum(site.work for site in ahead if site.name in covered))
        return cls(groups, tuple(skipped), *counts)

    @property
    def names(self) -> frozenset[str]:
        """Names of all operations in the groups."""
        return frozenset(site.name for first, again, _ in self.groups for site in (first, *again))


def recomputations(
    step: Callable[..., Any], *args: Any, where: Where = everything, last: bool = False, **kwargs: Any
) -> Recomputations:
    """Lists the operations of a step that XLA runs more than once, without running the step.

    Args:
        step: any function that JAX can trace.
        args, kwargs: arguments of the step, which may be arrays or `jax.ShapeDtypeStruct` objects.
        where: selects operations, in the form of their first computation.
        last: whether to list only operations from which no other selected one is computed in the same loop iteration.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from sdc.program import recomputations
        >>> layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
        >>> loss = lambda w, x: jnp.sum(jax.lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0])
        >>> found = recomputations(jax.grad(loss), jnp.eye(4), jnp.ones((2, 4)), where="products")
        >>> [(group.first.name, group.again[0].direction) for group in found.groups]
        [('fwd/jvp()/dot_general', 'remat')]
    """
    with traced(step, args, kwargs) as program:
        return Recomputations.of(live_program(program.closed), where, last=last)


def _sources(
    computed: Mapping[Any, Computed], compared: Mapping[tuple[int, ...], str]
) -> Callable[[Sequence[int]], tuple[str, ...]]:
    """Returns a function that finds the nearest compared values from which values with given numbers are computed."""
    known: dict[int, frozenset[str]] = {}
    for what in computed.values():  # in program order
        name = compared.get(what.numbers)
        found = frozenset([name]) if name else frozenset().union(*(known.get(one, frozenset()) for one in what.reads))
        for number in what.numbers:
            known.setdefault(number, found)
    return lambda reads: tuple(sorted(frozenset().union(*(known.get(number, frozenset()) for number in reads))))
