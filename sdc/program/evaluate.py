"""Evaluates a program with a rule in place of the selected equations: the second half of `rewrite`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core, source_info_util
from jax._src.interpreters import partial_eval
from jax._src.lax.control_flow.conditionals import _switch_internal
from jax._src.lax.control_flow.solves import linear_solve_p
from jax._src.named_sharding import UNSPECIFIED
from jax._src.shard_map import shard_map_p
from jax._src.state.discharge import run_state_p
from jax.extend.core import jaxpr_as_fun, primitives
from jax.sharding import PartitionSpec

from .axes import varying
from .inlined import guard
from .marks import HIDDEN, mark, mark_p, port_p
from .plan import DERIVED, Plan, bodies, manual_axes, open_jaxpr, source_line, user_line
from .regions import Around, Region, region_p
from .reports import Place, Report, Rule, Values
from .selectors import Selector


class Applied:
    """A rule, and what every rule needs: the choice of iterations, and marks for the transformations outside."""

    def __init__(self, selector: Selector, rule: Rule, around: Around | None = None) -> None:
        self.selector, self.rule, self.around = selector, rule, around
        self.merge = rule.merge

    def __call__(self, eqn: Any, place: Place, operands: Values) -> tuple[Values, Report]:
        primitive, params, known = eqn.primitive, eqn.params, None
        if primitive is mark_p:
            outputs, primitive, params = params["outputs"], params["of"], dict(params["params"])
            known, operands = operands[:outputs], operands[outputs:]
        elif not all(isinstance(jax.typeof(x), core.ShapedArray) for x in operands):
            # An array that is changed in place is changed once, here, and no business of the rule.
            with jax.named_scope(HIDDEN):
                known = bind_equation(eqn, operands)
            operands = [x for x in operands if isinstance(jax.typeof(x), core.ShapedArray)]

        def bind(*inputs: Any) -> Values:
            return bind_equation(eqn, inputs) if known is None else list(known)

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


def evaluate(
    plan: Plan, closed: Any, iteration: tuple[Any, ...], rule: Applied, args: Sequence[Any], caller: Any = None
) -> tuple[Values, dict[str, Report]]:
    """Evaluates a jaxpr with the rule in place of the selected equations.

    `caller` is the traceback of the equation in whose place its body is evaluated; it stands for equations of the body
    that have no line of the user's, such as those of `jax.nn.relu` or of a library's layers.
    """
    jaxpr, consts = open_jaxpr(closed)
    environment: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    reports: dict[str, Report] = {}
    last_use = core.last_used(jaxpr)

    for index, eqn in enumerate(jaxpr.eqns):
        inputs = [atom.val if isinstance(atom, core.Literal) else environment[atom] for atom in eqn.invars]
        # The equation keeps its source line and scope, so that a further transformation finds the same sites.
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        traceback = eqn.source_info.traceback
        if caller is not None and not _says_more(traceback, caller):
            traceback = caller
        with source_info_util.user_context(traceback, name_stack=names), eqn.ctx.manager:
            if site := plan.selected.get(index):
                outs, reports[site.name] = rule(eqn, Place(site, iteration), inputs)
            elif index in plan.inner:
                outs, inside = _RULES.get(eqn.primitive, _inline)(eqn, plan.inner[index], iteration, rule, inputs)
                reports.update(inside)
            elif eqn.primitive is port_p:
                outs = inputs
            else:
                outs = bind_equation(eqn, inputs)
        environment.update(zip(eqn.outvars, outs, strict=True))
        core.clean_up_dead_vars(eqn, environment, last_use)
    outs = [atom.val if isinstance(atom, core.Literal) else environment[atom] for atom in jaxpr.outvars]
    return outs, reports


def _says_more(traceback: Any, caller: Any) -> bool:
    """Whether an equation of a body has a better line than its caller: the user's, or any where the caller has none."""
    line, users = user_line(traceback)
    return users or (bool(line) and not user_line(caller)[1])


def bind_equation(eqn: Any, inputs: Sequence[Any]) -> Values:
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _stage(
    plan: Plan, body: Any, iteration: tuple[Any, ...], rule: Applied, inputs: Values
) -> tuple[Any, Values, Callable[[Values], tuple[Values, dict[str, Report]]]]:
    """Rewrites a body into a new jaxpr.

    Returns the jaxpr without constants, the values it closes over (they come first among its inputs), and a function
    that takes its flat outputs apart.
    """
    closed, shape = jax.make_jaxpr(lambda *args: evaluate(plan, body, iteration, rule, args), return_shape=True)(
        *inputs
    )
    structure = jax.tree.structure(shape)
    jaxpr, consts = open_jaxpr(closed)
    return partial_eval.convert_constvars_jaxpr(jaxpr), list(consts), lambda outs: jax.tree.unflatten(structure, outs)


def _traced(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """A function that is traced here and not again, and the shapes of what it returns.

    JAX traces bodies of control flow several times over; where they are nested, the innermost one that often squared.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(structure, jaxpr_as_fun(closed)(*jax.tree.leaves(args)))

    return call, shapes


def _jit(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
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


def _remat(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
    jaxpr, consts, unflatten = _stage(plans[0], eqn.params["jaxpr"], iteration, rule, inputs)
    return unflatten(eqn.primitive.bind(*consts, *inputs, **{**eqn.params, "jaxpr": jaxpr}))


def _inline(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
    caller = source_info_util.current().traceback
    outs, reports = evaluate(plans[0], bodies(eqn)[0], iteration, rule, inputs, caller)
    return guard(outs, eqn.primitive.name, source_line(eqn)) if eqn.primitive in DERIVED else outs, reports


def _region(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
    def run(given: Rule, iteration: Any, inputs: Values) -> tuple[Values, dict[str, Report]]:
        return evaluate(plans[0], eqn.params["jaxpr"], iteration, Applied(rule.selector, given), inputs)

    assert rule.around is not None  # without it nobody made a region
    return rule.around(Region(plans[0].sites, plans[0].outside, run), iteration, inputs)


def _solve(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
    """Only the solution itself runs; the other bodies are for derivatives."""
    lengths = eqn.params["const_lengths"]
    consts = inputs[lengths.matvec + lengths.vecmat :][: lengths.solve]
    return _inline(eqn, plans, iteration, rule, [*consts, *inputs[sum(lengths) :]])


def _run_state(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
    """The body changes arrays in place; what they are in the end is what the equation returns."""
    with jax.named_scope(HIDDEN):
        references = [jax.new_ref(x) for x in inputs]
    _, reports = _inline(eqn, plans, iteration, rule, references)
    with jax.named_scope(HIDDEN):
        return [jax.freeze(reference) for reference in references], reports


def _scan(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
    params = eqn.params
    if "ft_in" in params:  # jax 0.12
        num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]

    def body(carry: Values, indexed: tuple[Any, Values]) -> tuple[Values, tuple[Values, dict[str, Report]]]:
        index, x = indexed
        outs, reports = evaluate(plans[0], params["jaxpr"], (*iteration, index), rule, [*consts, *carry, *x])
        return outs[:num_carry], (outs[num_carry:], reports)

    with jax.named_scope(HIDDEN):
        indices = jnp.arange(params["length"], dtype=jnp.int32)
    carry, (ys, reports) = lax.scan(
        body, carry, (indices, xs), params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys], reports


def _while(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
    params = eqn.params
    cond_plan, body_plan = plans
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = inputs[:num_cond], inputs[num_cond:][:num_body], inputs[num_cond + num_body :]

    def check(index: Any, carry: Values) -> tuple[Any, dict[str, Report]]:
        (go_on,), reports = evaluate(cond_plan, params["cond_jaxpr"], (*iteration, index), rule, [*cond_consts, *carry])
        return go_on, reports

    def work(index: Any, carry: Values) -> tuple[Values, dict[str, Report]]:
        return evaluate(body_plan, params["body_jaxpr"], (*iteration, index), rule, [*body_consts, *carry])

    start = jnp.int32(0)
    check, (predicate, checked_shapes) = _traced(check, start, init)
    work, (_, worked_shapes) = _traced(work, start, init)
    if predicate.shape:
        check, work = _while_any(check, work)

    def checked_work(index: Any, carry: Values) -> tuple[Any, Values, dict[str, Report]]:
        """The condition reports too, so it moves into the body: one iteration more, whose work is left out."""
        go_on, checked = check(index, carry)
        idle = _zeros(worked_shapes)
        with jax.named_scope(HIDDEN):
            chosen = go_on.astype(jnp.int32)
        carry, worked = _switch(chosen, [lambda _, carry: (carry, idle), work], [index, carry])
        return go_on, carry, {**checked, **worked}

    def body(loop: tuple[Any, Any, Values, dict[str, Report]]) -> tuple[Any, Any, Values, dict[str, Report]]:
        index, _, carry, reports = loop
        go_on, carry, new = checked_work(index, carry) if cond_plan.sites else (jnp.bool_(True), *work(index, carry))
        with jax.named_scope(HIDDEN):
            merged = {name: varying(merge[name](reports[name], new[name])) for name in reports}
            return index + 1, go_on, carry, merged

    def go_on(loop: tuple[Any, Any, Values, dict[str, Report]]) -> Any:
        return loop[1] if cond_plan.sites else check(loop[0], loop[2])[0]

    shapes = {**checked_shapes, **worked_shapes}
    # What is inside the loop has added axes to reports, row by row of which they are merged.
    merge: dict[str, Callable[..., Report]] = {
        site.name: functools.reduce(_by_row, site.dims[plan.outside :], rule.merge)
        for plan in plans
        for site in plan.sites
    }
    _, _, carry, reports = lax.while_loop(go_on, body, (start, jnp.bool_(True), init, _zeros(shapes)))
    return carry, reports


def _while_any(check: Callable[..., Any], work: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Condition and body of a loop under `vmap`: it runs while any row goes on, and the others stay as they are."""

    def check_any(index: Any, carry: Values) -> tuple[Any, dict[str, Report]]:
        go_on, reports = check(index, carry)
        with jax.named_scope(HIDDEN):
            return jnp.any(go_on), reports

    def work_chosen(index: Any, carry: Values) -> tuple[Values, dict[str, Report]]:
        new, reports = work(index, carry)
        with jax.named_scope(HIDDEN):
            go_on, _ = check(index, carry)
            rows = [lax.expand_dims(go_on, range(go_on.ndim, x.ndim)) for x in carry]
            return [jnp.where(row, b, a) for row, a, b in zip(rows, carry, new, strict=True)], reports

    return check_any, work_chosen


def _by_row(merge: Callable[..., Report], axis: str) -> Callable[..., Report]:
    """Merges reports that have one more leading axis."""
    mapped = jax.vmap(merge)
    return lambda total, new: mapped(total, new) if jax.tree.leaves(total) else merge(total, new)


def _cond(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
    index, *operands = inputs
    branches: list[Callable[..., Any]] = []
    shapes: dict[str, Report] = {}
    for plan, body in zip(plans, eqn.params["branches"], strict=True):

        def run(*args: Any, plan: Plan = plan, body: Any = body) -> tuple[Values, dict[str, Report]]:
            return evaluate(plan, body, iteration, rule, args)

        branch, (_, reported) = _traced(run, *operands)
        branches.append(branch)
        shapes |= reported

    def fill(branch: Callable[..., Any]) -> Callable[..., Any]:
        def filled(*args: Any) -> tuple[Values, dict[str, Report]]:
            outs, reports = branch(*args)
            return outs, {name: reports[name] if name in reports else _zeros(shapes[name]) for name in shapes}

        return filled

    return _switch(index, [fill(branch) for branch in branches], operands, eqn.params.get("branches_platforms"))


def _shard_map(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: Applied, inputs: Values) -> Any:
    params = eqn.params
    axes = manual_axes(eqn)

    def body(iteration: tuple[Any, ...], args: Values) -> tuple[tuple[Any, ...], dict[str, Report]]:
        outs, reports = evaluate(plans[0], params["jaxpr"], iteration, rule, args)
        with jax.named_scope(HIDDEN):
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


def _switch(index: Any, branches: Sequence[Callable[..., Any]], operands: Values, platforms: Any = None) -> Any:
    """As `lax.switch`, which would limit the index first: a number of a branch needs no limits, and they are sites."""
    return _switch_internal(index, branches, operands, branches_platforms=platforms)


@jax.named_scope(HIDDEN)
def _zeros(shapes: Any) -> Any:
    return varying(jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes))


_RULES: dict[Any, Callable[..., tuple[Values, dict[str, Report]]]] = {
    primitives.jit_p: _jit,
    primitives.remat_p: _remat,
    primitives.scan_p: _scan,
    primitives.while_p: _while,
    primitives.cond_p: _cond,
    shard_map_p: _shard_map,
    linear_solve_p: _solve,
    run_state_p: _run_state,
    region_p: _region,
}
"""Bodies of all others that are entered are evaluated in the place of the equation."""
