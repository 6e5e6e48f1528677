"""The interpreter behind every transformation, which applies a rule to selected equations of a step.

`rewrite(step, where, rule)` traces `step` to a jaxpr, walks it, and calls `rule` in place of each selected equation.
The rule returns the equation's outputs, possibly changed, and a *report*: a pytree of arrays. Reports leave control
flow as follows:

=====================  ================================================================================
`scan`                 stacked on a new leading axis, one row per iteration, in the order of the scanned inputs
`while`                merged over the iterations with the rule's `merge`, starting from zeros
`cond`, `switch`       zeros from the branches that were not taken
`shard_map`, `pmap`    one new leading axis per mesh axis, one row per device
`jit`, `remat`         passed through; donation and shardings of an inner `jit` are kept
custom derivatives     the call is inlined, since a step is rewritten after differentiation; calls of
                       `custom_vmap`, `linear_call`, `composite` and the solver of `custom_linear_solve`
                       are inlined as well
=====================  ================================================================================

A report of zeros must therefore mean "nothing happened". Parts of the step without a selected equation are bound
unchanged, so a step without any selected equation becomes the identical program. A rule's outputs are marked as those
of the equation (`identities.py`), so transformations compose: the outer transformation sees the values that the inner
one returns.

Only this package uses the internals of JAX's programs; the package runs on jax 0.10 and 0.12.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core, source_info_util
from jax._src.interpreters import partial_eval
from jax._src.lax.control_flow.solves import linear_solve_p
from jax._src.named_sharding import UNSPECIFIED
from jax._src.shard_map import shard_map_p
from jax._src.state.discharge import run_state_p
from jax.extend.core import primitives
from jax.sharding import PartitionSpec

from .arguments import taking, traced
from .control_flow import moved, switch, traced_here, while_any, zeros
from .identities import mark, mark_p, port_p, underived
from .mesh import bound_axes, varying
from .plan import (
    DERIVED,
    Bound,
    Plan,
    Survey,
    bodies,
    live_program,
    manual_axes,
    open_jaxpr,
    out_of_reach,
    plan_sites,
    source_line,
    user_line,
)
from .regions import Around, Region, region_p, with_region
from .reports import Place, Report, Reports, Rule, Values
from .selectors import Selector, Site, Tags, Where, as_selector, everything, no_hits

# A function that takes an equation's primitive, parameters and inputs, and returns replacements for the equation's
# outputs, or None to keep the equation.
Replace: TypeAlias = Callable[[Any, Mapping[str, Any], Values], Values | None]


def rewrite(
    step: Callable[..., Any],
    where: Where,
    rule: Rule,
    *,
    required: bool = False,
    reason: Callable[[Site], str | None] = lambda site: None,
    first: tuple[Where, Replace] | None = None,
    around: Around | None = None,
    begin: Callable[[Sequence[Site]], None] = lambda sites: None,
    among: Callable[[Bound], Where] | None = None,
    underived_because: str = "",
) -> Callable[..., tuple[Any, Reports[Any]]]:
    """Transforms a step so that `rule` replaces every equation that `where` selects.

    Args:
        step: any function that JAX can trace; `arguments.py` describes its arguments.
        where: selects sites.
        rule: see `Rule`.
        required: whether a selector that matches no site is an error, for tools that must not silently do nothing.
        reason: a function that returns why the rule cannot handle a site, or None if the rule can. Sites that the rule
            cannot handle remain unchanged and are listed in `Reports.skipped`.
        first: arguments of a `substitute` to apply beforehand; if it replaces anything, the arrays that enter and leave
            the step are no longer sites.
        around: a function that runs the part of the step that holds all sites; lock-step needs it.
        begin: a function that is called before the rule is, with all sites, and again within each `shard_map` that is
            in no loop, with the sites there; what it computes, the rule can use at these sites.
        among: a function that is given the program, and returns a selector; sites that it does not select remain
            unchanged too.
        underived_because: why the selected operations must not be differentiated, if they must not.

    Returns:
        A function of the same arguments that returns `(step's output, Reports)`. Wrap this function in `jax.jit`, since
        otherwise every call traces the step again.

    Raises:
        ValueError: a selected probe is inside a primitive that cannot be entered (the probe would go unchecked), or
            `required` is set and nothing is selected. In the second case, the message lists near misses, or says why
            the rule cannot handle the sites.
    """

    selector = as_selector(where)
    if not callable(rule) or not callable(getattr(rule, "merge", None)):
        raise TypeError(
            f"{rule!r} is not a rule; expected a callable object with a method merge (see sdc.program.Rule)"
        )

    @taking(step)
    def rewritten(*args: Any, **kwargs: Any) -> tuple[Any, Reports[Any]]:
        with traced(step, args, kwargs) as program:
            closed = program.closed
            if first is not None:
                run, replaced = _substituted(closed, *first)
                closed = jax.make_jaxpr(run)(*program.inputs) if replaced.sites else closed
            live = live_program(closed, saved=selector.names_saved)
            chosen = selector if among is None else selector & among(live)
            survey = Survey(chosen, reason)
            plan = plan_sites(live, survey)
            jaxpr = live if plan.sites else closed
            if around is not None and plan.sites:
                jaxpr, plan = with_region(live, plan, whole=around.whole)
            applied = _Applied(chosen, rule, around, begin, underived_because)
            applied.begin(plan.sites)
            outs, reports = evaluate(plan, jaxpr, (), applied, program.inputs)
            values = [reports[site.name] for site in plan.sites]
            here = jax.sharding.get_abstract_mesh()
            if not here.empty:  # parts of a step may have different explicit axes
                with jax.named_scope(Tags.HIDDEN):
                    values = moved(values, here)
            out = program.finish(outs)
            found = Reports(plan.sites, values, survey.shares(), Reports.simulated_in(out))
        if required and not found and found.skipped:
            why = "; ".join(f"{one.site.name} ({one.site.source}): {one.reason}" for one in found.skipped[:4])
            raise ValueError(f"none of the selected sites can be handled: {why}; select others")
        if required and not found:
            sites(step, *args, where=selector, **kwargs)
        return out, found

    return rewritten


def substitute(step: Callable[..., Any], where: Where, replace: Replace) -> Callable[..., Any]:
    """Transforms a step so that other operations, which are sites too, replace those that `where` selects.

    Args:
        step: any function that JAX can trace.
        where: selects sites.
        replace: a function that takes an equation's primitive, parameters and inputs, and returns replacements for the
            equation's outputs, or None to keep the equation. Equations that another transformation has rewritten are
            always kept.

    Returns:
        A function of the same arguments.
    """

    @taking(step)
    def substituted(*args: Any, **kwargs: Any) -> Any:
        with traced(step, args, kwargs) as program:
            run = _substituted(program.closed, where, replace)[0]
            return program.finish(run(*program.inputs))

    return substituted


def _substituted(closed: Any, where: Where, replace: Replace) -> tuple[Callable[..., Values], Plan]:
    """Returns a program in which `replace` replaces the selected operations, and the plan of these operations."""
    live = live_program(closed)
    plan = plan_sites(live, as_selector(where))
    return lambda *inputs: evaluate(plan, live, (), _Substitute(replace), inputs)[0], plan


class _Substitute:
    def __init__(self, replace: Replace) -> None:
        self.replace = replace

    def __call__(self, eqn: Any, place: Place, operands: Values) -> tuple[Values, tuple[()]]:
        outs = None if eqn.primitive is mark_p else self.replace(eqn.primitive, eqn.params, operands)
        return bind_equation(eqn, operands) if outs is None else outs, ()

    def begin(self, sites: Sequence[Site]) -> None:
        pass

    def merge(self, total: tuple[()], new: tuple[()]) -> tuple[()]:
        return ()


def sites(step: Callable[..., Any], *args: Any, where: Where = everything, **kwargs: Any) -> list[Site]:
    """Lists the sites of a step that a selector matches, in program order, without running the step.

    `for site in sdc.sites(step, *args): print(site)` prints the sites with shapes, dtypes, operations and source lines.

    Args:
        step: any function that JAX can trace.
        args, kwargs: arguments of the step, which may be arrays or `jax.ShapeDtypeStruct` objects.
        where: selects sites; by default, all sites.

    Raises:
        ValueError: the selector matches no site; the message lists near misses.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> from sdc.program import direction, primitive
        >>> gradient = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
        >>> where = primitive("dot_general") & direction("bwd")
        >>> [site] = sdc.sites(gradient, jnp.ones((4, 2)), jnp.ones((8, 4)), where=where)
        >>> site.outputs[0].shape, site.flops
        ((2, 4), 128)
    """
    selector = as_selector(where)
    with traced(step, args, kwargs) as program:
        live = live_program(program.closed, saved=selector.names_saved)
    found = plan_sites(live, selector).sites
    if not found:
        if hidden := out_of_reach(live.jaxpr, selector):
            raise ValueError(
                f"selector {selector.text} matches only operations inside {hidden[0]}, which cannot be entered; select "
                "that operation as a whole, or operations around it"
            )
        raise ValueError(no_hits(selector, plan_sites(live, everything).sites))
    return list(found)


class _Applied:
    """A rule with the features that all rules share: selection of iterations, and marks for outer transformations."""

    def __init__(
        self,
        selector: Selector,
        rule: Rule,
        around: Around | None = None,
        begin: Callable[[Sequence[Site]], None] = lambda sites: None,
        why: str = "",
    ) -> None:
        self.selector, self.rule, self.around, self.why = selector, rule, around, why
        self.begin, self.merge = jax.named_scope(Tags.HIDDEN)(begin), rule.merge

    def __call__(self, eqn: Any, place: Place, operands: Values) -> tuple[Values, Report]:
        primitive, params, known = eqn.primitive, eqn.params, None
        if primitive is mark_p:
            outputs, primitive, params = params["outputs"], params["of"], dict(params["params"])
            known, operands = operands[:outputs], operands[outputs:]
            place = place._replace(stored=place.stored[outputs:])
        elif not all(isinstance(jax.typeof(x), core.ShapedArray) for x in operands):
            # An equation that changes arrays in place is evaluated here, once, and the rule does not see these arrays.
            with jax.named_scope(Tags.HIDDEN):
                known = bind_equation(eqn, operands)
            arrays = [isinstance(jax.typeof(x), core.ShapedArray) for x in operands]
            place = place._replace(stored=tuple(itertools.compress(place.stored, arrays)))
            operands = list(itertools.compress(operands, arrays))

        def bind(*inputs: Any) -> Values:
            return bind_equation(eqn, inputs) if known is None else list(known)

        place = place._replace(params=params, marked=known is not None)
        with jax.named_scope(Tags.HIDDEN):
            outs, report = self._act(place, bind, operands)
        return mark(outs, operands, primitive, params), report

    def _act(self, place: Place, bind: Callable[..., Values], inputs: Values) -> tuple[Values, Report]:
        inputs = underived(inputs, self.why) if self.why else inputs
        if self.selector.chosen(place.site):
            outs, report = self.rule(place, bind, *inputs)
            return outs, varying(report)

        def act(*inputs: Any) -> tuple[Values, Report]:
            outs, report = self.rule(place, bind, *inputs)
            return list(outs), varying(report)

        def rest(*inputs: Any) -> tuple[Values, Report]:
            return bind(*inputs), idle

        idle = zeros(jax.eval_shape(act, *inputs)[1])
        return lax.cond(self.selector.now(place.site, place.iteration), act, rest, *inputs)


def evaluate(
    plan: Plan, closed: Any, iteration: tuple[Any, ...], rule: Any, args: Sequence[Any], caller: Any = None
) -> tuple[Values, dict[str, Report]]:
    """Evaluates a jaxpr with the rule in place of the selected equations.

    `caller` is the traceback of the equation whose body is evaluated inline. This traceback replaces those of the
    body's equations that contain no line of the user's code, such as the equations of `jax.nn.relu` or of a library's
    layers.
    """
    jaxpr, consts = open_jaxpr(closed)
    environment: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    reports: dict[str, Report] = {}
    last_use = core.last_used(jaxpr)

    for index, eqn in enumerate(jaxpr.eqns):
        inputs = [atom.val if isinstance(atom, core.Literal) else environment[atom] for atom in eqn.invars]
        # The equation keeps its source line and scope, so that another transformation finds the same sites.
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        traceback = eqn.source_info.traceback
        if caller is not None:
            line, users = user_line(traceback)
            if not users and not (line and not user_line(caller)[1]):
                traceback = caller
        with source_info_util.user_context(traceback, name_stack=names), eqn.ctx.manager:
            if site := plan.selected.get(index):
                outs, reports[site.name] = rule(eqn, Place(site, iteration, stored=plan.stored[index]), inputs)
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


def bind_equation(eqn: Any, inputs: Sequence[Any]) -> Values:
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _stage(
    plan: Plan, body: Any, iteration: tuple[Any, ...], rule: _Applied, inputs: Values
) -> tuple[Any, Values, Callable[[Values], tuple[Values, dict[str, Report]]]]:
    """Rewrites a body into a new jaxpr.

    Returns the jaxpr without constants, the values over which it closes (its first inputs), and a function that
    unflattens its outputs.
    """
    closed, shape = jax.make_jaxpr(lambda *args: evaluate(plan, body, iteration, rule, args), return_shape=True)(
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
    caller = source_info_util.current().traceback
    outs, reports = evaluate(plans[0], bodies(eqn)[0], iteration, rule, inputs, caller)
    if eqn.primitive in DERIVED:
        source = source_line(eqn)
        why = f"{eqn.primitive.name} has a custom derivative{source and f' ({source})'}"
        outs = underived(outs, f"{why}, which a transformed function loses", "; or select nothing inside it")
    return outs, reports


def _region(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    def run(given: Rule, iteration: Any, inputs: Values) -> tuple[Values, dict[str, Report]]:
        return evaluate(plans[0], eqn.params["jaxpr"], iteration, _Applied(rule.selector, given, why=rule.why), inputs)

    assert rule.around is not None  # else there would be no region
    return rule.around(Region(plans[0].sites, plans[0].outside, run), iteration, inputs)


def _solve(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    """Evaluates only the solver of a linear solve; the equation's other bodies serve for derivatives."""
    lengths = eqn.params["const_lengths"]
    consts = inputs[lengths.matvec + lengths.vecmat :][: lengths.solve]
    return _inline(eqn, plans, iteration, rule, [*consts, *inputs[sum(lengths) :]])


def _run_state(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    """Evaluates a body that changes arrays in place; returns the final values of these arrays."""
    with jax.named_scope(Tags.HIDDEN):
        references = [jax.new_ref(x) for x in inputs]
    _, reports = _inline(eqn, plans, iteration, rule, references)
    with jax.named_scope(Tags.HIDDEN):
        return [jax.freeze(reference) for reference in references], reports


def _scan(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
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

    with jax.named_scope(Tags.HIDDEN):
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
        (go_on,), reports = evaluate(cond_plan, params["cond_jaxpr"], (*iteration, index), rule, [*cond_consts, *carry])
        return go_on, reports

    def work(index: Any, carry: Values) -> tuple[Values, dict[str, Report]]:
        return evaluate(body_plan, params["body_jaxpr"], (*iteration, index), rule, [*body_consts, *carry])

    start = jnp.int32(0)
    check, (predicate, checked_shapes) = traced_here(check, start, init)
    work, (_, worked_shapes) = traced_here(work, start, init)
    if predicate.shape:
        check, work = while_any(check, work)

    def checked_work(index: Any, carry: Values) -> tuple[Any, Values, dict[str, Report]]:
        """Evaluates the condition, which has reports too, inside the body; an idle iteration ends the loop."""
        go_on, checked = check(index, carry)
        idle = zeros(worked_shapes)
        with jax.named_scope(Tags.HIDDEN):
            chosen = go_on.astype(jnp.int32)
        carry, worked = switch(chosen, [lambda _, carry: (carry, idle), work], [index, carry])
        return go_on, carry, {**checked, **worked}

    def body(loop: tuple[Any, Any, Values, dict[str, Report]]) -> tuple[Any, Any, Values, dict[str, Report]]:
        index, _, carry, reports = loop
        go_on, carry, new = checked_work(index, carry) if cond_plan.sites else (jnp.bool_(True), *work(index, carry))
        with jax.named_scope(Tags.HIDDEN):
            merged = {name: varying(merge[name](reports[name], new[name])) for name in reports}
            return index + 1, go_on, carry, merged

    def go_on(loop: tuple[Any, Any, Values, dict[str, Report]]) -> Any:
        return loop[1] if cond_plan.sites else check(loop[0], loop[2])[0]

    shapes = {**checked_shapes, **worked_shapes}
    # Control flow inside the loop adds axes to reports, which are merged row by row.
    merge: dict[str, Callable[..., Report]] = {}
    for site in (*cond_plan.sites, *body_plan.sites):
        by_row = functools.reduce(lambda merged, _: jax.vmap(merged), site.dims[body_plan.outside :], rule.merge)
        merge[site.name] = by_row if jax.tree.leaves(shapes[site.name]) else rule.merge
    _, _, carry, reports = lax.while_loop(go_on, body, (start, jnp.bool_(True), init, zeros(shapes)))
    return carry, reports


def _cond(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    index, *operands = inputs
    branches: list[Callable[..., Any]] = []
    shapes: dict[str, Report] = {}
    for plan, body in zip(plans, eqn.params["branches"], strict=True):

        def run(*args: Any, plan: Plan = plan, body: Any = body) -> tuple[Values, dict[str, Report]]:
            return evaluate(plan, body, iteration, rule, args)

        branch, (_, reported) = traced_here(run, *operands)
        branches.append(branch)
        shapes |= reported

    def fill(branch: Callable[..., Any]) -> Callable[..., Any]:
        def filled(*args: Any) -> tuple[Values, dict[str, Report]]:
            outs, reports = branch(*args)
            return outs, {name: reports[name] if name in reports else zeros(shapes[name]) for name in shapes}

        return filled

    return switch(index, [fill(branch) for branch in branches], operands, eqn.params.get("branches_platforms"))


def _shard_map(eqn: Any, plans: tuple[Plan, ...], iteration: Any, rule: _Applied, inputs: Values) -> Any:
    params = eqn.params
    axes = manual_axes(eqn)

    def body(iteration: tuple[Any, ...], args: Values) -> tuple[tuple[Any, ...], dict[str, Report]]:
        if not iteration:
            rule.begin(plans[0].sites)
        outs, reports = evaluate(plans[0], params["jaxpr"], iteration, rule, args)
        with jax.named_scope(Tags.HIDDEN):
            rows = jax.tree.map(lambda x: lax.expand_dims(x, range(len(axes))), reports)
        return tuple(outs), rows

    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), list(params["in_specs"])),
        out_specs=(tuple(params["out_specs"]), PartitionSpec(*axes)),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    try:
        outs, reports = mapped(iteration, inputs)
    except AssertionError as error:  # JAX types what depends on an axis of `vmap` as varying over this axis
        others = sorted(set(bound_axes()).difference(params["mesh"].axis_names))
        if not params["check_vma"] or not others:
            raise
        raise ValueError(
            f"the step has a shard_map over {', '.join(map(repr, axes))} with check_vma=True, in which JAX cannot use "
            f"axis {others[0]!r} of vmap; pass check_vma=False to that shard_map, or make {others[0]!r} an axis of its "
            "mesh"
        ) from error
    return list(outs), reports


# Bodies of all other entered primitives are inlined.
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
