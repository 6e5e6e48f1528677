"""The interpreter under every transformation: it shows selected equations of a step to a rule.

`rewrite(step, where, rule)` traces `step` to a jaxpr, walks it, and calls `rule` in place of each selected equation.
The rule returns the equation's outputs, perhaps changed, and a *report*: a pytree of arrays. Reports leave control
flow so:

=====================  ================================================================================
`scan`                 stacked on a new leading axis, one row per iteration, in the order of the scanned inputs
`while`                merged over the iterations with the rule's `merge`, starting from zeros
`cond`, `switch`       zeros from the branches that were not taken
`shard_map`, `pmap`    one new leading axis per mesh axis, one row per device
`jit`, `remat`         handed on; donation and shardings of an inner `jit` are kept
custom derivatives     the call is inlined: a step is rewritten after it was differentiated
=====================  ================================================================================

All zeros must therefore mean "nothing happened" in a report. A part of the step without a selected equation is bound as
it was, so that a step without any comes out as the identical program. What a rule returns as an equation's outputs
stands for that equation from then on (`mark.py`), so that transformations compose: the outer one sees what the inner
one made of it. This file, `plan.py` and `mark.py` are the only ones that know the internals of JAX; they run on jax
0.10 and 0.12.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core, source_info_util
from jax._src.interpreters import partial_eval
from jax._src.named_sharding import UNSPECIFIED
from jax._src.shard_map import shard_map_p
from jax.extend.core import primitives
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped

from .mark import HIDDEN, mark, mark_p, port_p
from .plan import ENTERED, Plan, bodies, live_program, manual_axes, open_jaxpr, plan_sites
from .sites import Site, Where, as_selector, check_hits, everything

Report: TypeAlias = Any
Values: TypeAlias = list[Any]


class Place(NamedTuple):
    """Where in the step, and in which iteration, a rule is called.

    Attributes:
        site: the site.
        iteration: index of each enclosing `scan` and `while`, outermost first; an array of no dimension each.
        params: parameters of the site's primitive.
        marked: whether another transformation has been at work on the equation before.
    """

    site: Site
    iteration: tuple[Int[Array, ""], ...]
    params: Mapping[str, Any] = MappingProxyType({})
    marked: bool = False


class Rule(Protocol):
    """What a transformation does at a site."""

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Report]:
        """Returns the equation's outputs and a report; `bind(*inputs)` evaluates the equation itself.

        A rule changes outputs, not inputs: where another transformation has been at work on the equation before, its
        outputs are given.
        """

    def merge(self, total: Report, new: Report) -> Report:
        """Merges the reports of two iterations of a `while`; zeros are neutral."""


@jax.tree_util.register_pytree_with_keys_class
class Reports(Mapping[str, Any]):
    """Reports by site name, in program order; a pytree that passes through `jit` and keeps its sites.

    Attributes:
        sites: the sites, static; `sites[i].dims` names the leading axes of each leaf of report `i`.
    """

    def __init__(self, sites: Sequence[Site], values: Sequence[Any]) -> None:
        self.sites = tuple(sites)
        self._values = tuple(values)

    def __getitem__(self, name: str) -> Any:
        for site, value in zip(self.sites, self._values, strict=True):
            if site.name == name:
                return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (site.name for site in self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"Reports({dict(self)!r})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Site, ...]]:
        keys = (jax.tree_util.DictKey(site.name) for site in self.sites)
        return list(zip(keys, self._values, strict=True)), self.sites

    @classmethod
    def tree_unflatten(cls, sites: tuple[Site, ...], values: Sequence[Any]) -> "Reports":
        return cls(sites, values)


def rewrite(step: Callable[..., Any], where: Where, rule: Rule) -> Callable[..., tuple[Any, Reports]]:
    """Transforms a step: `rule` stands in for every equation that `where` selects.

    Args:
        step: any function of pytrees of arrays that JAX can trace.
        where: selects sites.
        rule: see `Rule`.

    Returns:
        A function of the same arguments that returns `(step's output, Reports)`. Wrap it in `jax.jit`: it is traced
        anew at each call.

    Raises:
        ValueError: a selected probe lies inside a primitive that cannot be entered (it would go unchecked), or a rule
            with a `custom_vmap` stands in a branch that an outer `vmap` chooses for each row.
    """

    def rewritten(*args: Any, **kwargs: Any) -> tuple[Any, Reports]:
        closed, shape = _trace(step, args, kwargs)
        live = live_program(closed)
        plan = plan_sites(live, where)
        program = live if plan.sites else closed
        try:
            outs, reports = _evaluate(plan, program, (), _Applied(where, rule), jax.tree.leaves((args, kwargs)))
        except AssertionError as error:
            _check_mapped_branch(error)
            raise
        out = jax.tree.unflatten(jax.tree.structure(shape), outs)
        return out, Reports(plan.sites, [reports[site.name] for site in plan.sites])

    return rewritten


def substitute(
    step: Callable[..., Any], where: Where, replace: Callable[[Any, Mapping[str, Any], Values], Values | None]
) -> Callable[..., Any]:
    """Transforms a step: other operations stand where `where` selects some, and are sites themselves.

    Args:
        step: any function of pytrees of arrays that JAX can trace.
        where: selects sites.
        replace: told an equation's primitive, parameters and inputs; returns what stands for its outputs, or None to
            leave it. What another transformation has been at work on is left.

    Returns:
        A function of the same arguments.
    """

    def substituted(*args: Any, **kwargs: Any) -> Any:
        closed, shape = _trace(step, args, kwargs)
        plan = plan_sites(live_program(closed), where)
        rule: Any = _Substituted(replace)
        outs, _ = _evaluate(plan, live_program(closed), (), rule, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return substituted


class _Substituted:
    def __init__(self, replace: Callable[[Any, Mapping[str, Any], Values], Values | None]) -> None:
        self.replace = replace

    def __call__(self, eqn: Any, place: Place, operands: Values) -> tuple[Values, tuple[()]]:
        outs = None if eqn.primitive is mark_p else self.replace(eqn.primitive, eqn.params, operands)
        return _bind(eqn, operands) if outs is None else outs, ()

    def merge(self, total: tuple[()], new: tuple[()]) -> tuple[()]:
        return ()


def sites(step: Callable[..., Any], *args: Any, where: Where | str = everything, **kwargs: Any) -> list[Site]:
    """Lists the sites of a step that a selector hits, in program order, without running the step.

    `print(*sdc.sites(step, *args), sep="\n")` shows them with shapes, dtypes, operations and source lines.

    Args:
        step: any function that JAX can trace.
        args: of the step, arrays or `jax.ShapeDtypeStruct`s.
        where: selects sites; by default all.
        kwargs: of the step.

    Raises:
        ValueError: the selector hits nothing; the message lists near misses.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> from sdc.sites import direction, primitive
        >>> gradient = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
        >>> where = primitive("dot_general") & direction("bwd")
        >>> [site] = sdc.sites(gradient, jnp.ones((4, 2)), jnp.ones((8, 4)), where=where)
        >>> site.outputs[0].shape, site.flops
        ((2, 4), 128)
    """
    where = as_selector(where)
    live = live_program(_trace(step, args, kwargs)[0])
    found = plan_sites(live, where).sites
    if not found:
        check_hits(where, plan_sites(live, everything).sites, found)
    return list(found)


def required(step: Callable[..., Any], where: Where, rule: Rule) -> Callable[..., tuple[Any, Reports]]:
    """As `rewrite`, but a selector that hits nothing is an error: a tool must not pass over what it was asked to do.

    Raises:
        ValueError: see `rewrite`, and when nothing is selected; the message lists near misses.
    """

    def rewritten(*args: Any, **kwargs: Any) -> tuple[Any, Reports]:
        out, reports = rewrite(step, where, rule)(*args, **kwargs)
        if not reports:
            sites(step, *args, where=where, **kwargs)
        return out, reports

    return rewritten


def _trace(step: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The program of a step, with a site at every array that goes into it and comes out of it; shapes of its outputs.

    Raises:
        ValueError: JAX cannot trace the step.
    """

    def port(direction: str, tree: Any) -> Any:
        def bind(path: Any, leaf: Any) -> Any:
            if not isinstance(jax.typeof(leaf), core.ShapedArray):
                return leaf
            return port_p.bind(leaf, direction=direction, path=jax.tree_util.keystr(path, simple=True, separator="/"))

        return jax.tree_util.tree_map_with_path(bind, tree)

    def ported(*args: Any, **kwargs: Any) -> Any:
        return port("out", step(*port("arg", args), **port("arg", kwargs)))

    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, str | bytes):
            raise ValueError(
                f"the step is given {leaf!r}, which is no array; bind what is static with functools.partial"
            )
    try:
        return jax.make_jaxpr(ported, return_shape=True)(*args, **kwargs)
    except jax.errors.JAXTypeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the step cannot be traced, and so not transformed ({reason}); it must run under jax.jit: bind what is "
            "static with functools.partial, and branch with jax.lax.cond"
        ) from error


def _check_mapped_branch(error: AssertionError) -> None:
    """Of a branch that is chosen row by row JAX maps the constants too, which a `custom_vmap` in it does not take."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace and trace.tb_frame.f_globals.get("__name__") == "jax._src.custom_batching":
        raise ValueError(
            "a vmap around the transformed step chooses a branch for each row, and the rule cannot stand in it; put "
            "the vmap inside: transform jax.vmap(step)"
        ) from error


def bound_axes() -> dict[str, int]:
    """Names and sizes of the axes that collectives can use here: `shard_map`, `pmap` and named `vmap` axes."""
    return {str(name): size for name, size in core.get_axis_env().axis_sizes.items()}


def varying(tree: Any) -> Any:
    """Casts arrays to vary over every manual mesh axis, which `shard_map` with `check_vma=True` wants of reports."""
    manual = jax.sharding.get_abstract_mesh().manual_axes

    def cast(x: Any) -> Any:
        missing = tuple(axis for axis in manual if axis not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def typed_as(x: Shaped[Array, "*shape"], like: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Casts an array to vary over the axes over which `shard_map`'s type checker takes another one to vary."""
    missing = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


class _Applied:
    """A rule, and what every rule needs: the choice of iterations, and marks for the transformations outside."""

    def __init__(self, where: Where, rule: Rule) -> None:
        self.selector, self.rule = as_selector(where), rule
        self.merge = rule.merge

    def __call__(self, eqn: Any, place: Place, operands: Values) -> tuple[Values, Report]:
        primitive, params, known = eqn.primitive, eqn.params, None
        if primitive is mark_p:
            outputs, primitive, params = params["outputs"], params["of"], dict(params["params"])
            known, operands = operands[:outputs], operands[outputs:]

        def bind(*inputs: Any) -> Values:
            return _bind(eqn, inputs) if known is None else list(known)

        place = place._replace(params=params, marked=known is not None)
        with jax.named_scope(HIDDEN):
            outs, report = self._act(place, bind, operands)
        return mark(outs, operands, primitive, params), report

    def _act(self, place: Place, bind: Callable[..., Values], inputs: Values) -> tuple[Values, Report]:
        if self.selector.chosen(place.site):
            outs, report = self.rule(place, bind, *inputs)
            return outs, varying(report)

        def act(*inputs: Any) -> tuple[Values, Report]:
            outs, report = self.rule(place, bind, *inputs)
            return list(outs), varying(report)

        def rest(*inputs: Any) -> tuple[Values, Report]:
            return bind(*inputs), idle

        idle = _zeros(jax.eval_shape(act, *inputs)[1])
        return lax.cond(self.selector.now(place.site, place.iteration), act, rest, *inputs)


def _evaluate(
    plan: Plan, closed: Any, iteration: tuple[Any, ...], rule: _Applied, args: Sequence[Any]
) -> tuple[Values, dict[str, Report]]:
    """Evaluates a jaxpr with the rule in place of the selected equations."""
    jaxpr, consts = open_jaxpr(closed)
    environment: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    reports: dict[str, Report] = {}
    last_use = core.last_used(jaxpr)

    for index, eqn in enumerate(jaxpr.eqns):
        inputs = [atom.val if isinstance(atom, core.Literal) else environment[atom] for atom in eqn.invars]
        # The equation keeps its source line and scope, so that a further transformation finds the same sites.
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
            if site := plan.selected.get(index):
                outs, reports[site.name] = rule(eqn, Place(site, iteration), inputs)
            elif index in plan.inner:
                outs, inside = _RULES[eqn.primitive](eqn, plan.inner[index], iteration, rule, inputs)
                reports.update(inside)
            elif eqn.primitive is port_p:
                outs = inputs
            else:
                outs = _bind(eqn, inputs)
        environment.update(zip(eqn.outvars, outs, strict=True))
        core.clean_up_dead_vars(eqn, environment, last_use)
    outs = [atom.val if isinstance(atom, core.Literal) else environment[atom] for atom in jaxpr.outvars]
    return outs, reports


def _bind(eqn: Any, inputs: Sequence[Any]) -> Values:
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _stage(
    plan: Plan, body: Any, iteration: tuple[Any, ...], rule: _Applied, inputs: Values
) -> tuple[Any, Values, Callable[[Values], tuple[Values, dict[str, Report]]]]:
    """Rewrites a body into a new jaxpr.

    Returns the jaxpr without constants, the values it closes over (they come first among its inputs), and a function
    that takes its flat outputs apart.
    """
    closed, shape = jax.make_jaxpr(lambda *args: _evaluate(plan, body, iteration, rule, args), return_shape=True)(
        *inputs
    )
    structure = jax.tree.structure(shape)
    jaxpr, consts = open_jaxpr(closed)
    return partial_eval.convert_constvars_jaxpr(jaxpr), list(consts), lambda outs: jax.tree.unflatten(structure, outs)


def _jit(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    params = eqn.params
    jaxpr, consts, unflatten = _stage(plans[0], params["jaxpr"], iteration, rule, inputs)
    extra = len(jaxpr.outvars) - len(eqn.outvars)
    outs = eqn.primitive.bind(
        *consts,
        *inputs,
        **{
            **params,
            "jaxpr": partial_eval.close_jaxpr(jaxpr),
            "donated_invars": (False,) * len(consts) + params["donated_invars"],
            "in_shardings": (UNSPECIFIED,) * len(consts) + params["in_shardings"],
            "in_layouts": (None,) * len(consts) + params["in_layouts"],
            "out_shardings": params["out_shardings"] + (UNSPECIFIED,) * extra,
            "out_layouts": params["out_layouts"] + (None,) * extra,
        },
    )
    return unflatten(outs)


def _remat(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    jaxpr, consts, unflatten = _stage(plans[0], eqn.params["jaxpr"], iteration, rule, inputs)
    return unflatten(eqn.primitive.bind(*consts, *inputs, **{**eqn.params, "jaxpr": jaxpr}))


def _inline(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    return _evaluate(plans[0], bodies(eqn)[0], iteration, rule, inputs)


def _scan(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    params = eqn.params
    if "ft_in" in params:  # jax 0.12
        num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]

    def body(carry: Values, indexed: tuple[Any, Values]) -> tuple[Values, tuple[Values, dict[str, Report]]]:
        index, x = indexed
        outs, reports = _evaluate(plans[0], params["jaxpr"], (*iteration, index), rule, [*consts, *carry, *x])
        return outs[:num_carry], (outs[num_carry:], reports)

    indices = jnp.arange(params["length"], dtype=jnp.int32)
    carry, (ys, reports) = lax.scan(
        body, carry, (indices, xs), params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys], reports


def _while(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    params = eqn.params
    cond_plan, body_plan = plans
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = inputs[:num_cond], inputs[num_cond:][:num_body], inputs[num_cond + num_body :]

    def check(index: Any, carry: Values) -> tuple[Any, dict[str, Report]]:
        (go_on,), reports = _evaluate(
            cond_plan, params["cond_jaxpr"], (*iteration, index), rule, [*cond_consts, *carry]
        )
        return go_on, reports

    def work(index: Any, carry: Values) -> tuple[Values, dict[str, Report]]:
        return _evaluate(body_plan, params["body_jaxpr"], (*iteration, index), rule, [*body_consts, *carry])

    def checked_work(index: Any, carry: Values) -> tuple[Any, Values, dict[str, Report]]:
        """The condition reports too, so it moves into the body: one iteration more, whose work is left out."""
        go_on, checked = check(index, carry)
        idle = _zeros(jax.eval_shape(work, index, carry)[1])
        carry, worked = lax.cond(go_on, work, lambda _, carry: (carry, idle), index, carry)
        return go_on, carry, {**checked, **worked}

    def body(loop: tuple[Any, Any, Values, dict[str, Report]]) -> tuple[Any, Any, Values, dict[str, Report]]:
        index, _, carry, reports = loop
        go_on, carry, new = checked_work(index, carry) if cond_plan.sites else (jnp.bool_(True), *work(index, carry))
        return index + 1, go_on, carry, {name: varying(rule.merge(reports[name], new[name])) for name in reports}

    def go_on(loop: tuple[Any, Any, Values, dict[str, Report]]) -> Any:
        return loop[1] if cond_plan.sites else check(loop[0], loop[2])[0]

    start = jnp.int32(0)
    shapes = jax.eval_shape(checked_work, start, init)[2]
    _, _, carry, reports = lax.while_loop(go_on, body, (start, jnp.bool_(True), init, _zeros(shapes)))
    return carry, reports


def _cond(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    index, *operands = inputs
    branches = [
        lambda *args, plan=plan, body=body: _evaluate(plan, body, iteration, rule, args)
        for plan, body in zip(plans, eqn.params["branches"], strict=True)
    ]
    shapes = {name: shape for branch in branches for name, shape in jax.eval_shape(branch, *operands)[1].items()}

    def fill(branch: Callable[..., Any]) -> Callable[..., Any]:
        def filled(*args: Any) -> tuple[Values, dict[str, Report]]:
            outs, reports = branch(*args)
            return outs, {name: reports[name] if name in reports else _zeros(shapes[name]) for name in shapes}

        return filled

    return lax.switch(index, [fill(branch) for branch in branches], *operands)


def _shard_map(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    params = eqn.params
    axes = manual_axes(eqn)

    def body(iteration: tuple[Any, ...], args: Values) -> tuple[tuple[Any, ...], dict[str, Report]]:
        outs, reports = _evaluate(plans[0], params["jaxpr"], iteration, rule, args)
        rows = jax.tree.map(lambda x: lax.expand_dims(x, range(len(axes))), reports)
        return tuple(outs), rows

    outs, reports = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), list(params["in_specs"])),
        out_specs=(tuple(params["out_specs"]), PartitionSpec(*axes)),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )(iteration, inputs)
    return list(outs), reports


def _zeros(shapes: Any) -> Any:
    return varying(jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes))


_RULES: dict[Any, Callable[..., tuple[Values, dict[str, Report]]]] = {
    primitives.jit_p: _jit,
    primitives.remat_p: _remat,
    primitives.scan_p: _scan,
    primitives.while_p: _while,
    primitives.cond_p: _cond,
    shard_map_p: _shard_map,
    primitives.custom_jvp_call_p: _inline,
    primitives.custom_vjp_call_p: _inline,
    primitives.closed_call_p: _inline,
}

assert set(_RULES) == set(ENTERED)
