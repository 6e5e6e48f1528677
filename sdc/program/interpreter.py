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
custom derivatives     the call is inlined: a step is rewritten after it was differentiated. So are those of
                       `custom_vmap`, `linear_call`, `composite`, and the solver of `custom_linear_solve`
=====================  ================================================================================

All zeros must therefore mean "nothing happened" in a report. A part of the step without a selected equation is bound as
it was, so that a step without any comes out as the identical program. What a rule returns as an equation's outputs
stands for that equation from then on (`marks.py`), so that transformations compose: the outer one sees what the inner
one made of it. This file, `arguments.py`, `evaluate.py`, `plan.py`, `regions.py`, `turned.py`, `work.py`, `marks.py`
and `inlined.py` are the only ones that know the internals of JAX; they run on jax 0.10 and 0.12.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .arguments import taking, traced
from .evaluate import Applied, bind_equation, evaluate
from .marks import HIDDEN, mark_p
from .once import moved
from .plan import Bound, Plan, Survey, live_program, out_of_reach, plan_sites, survey_sites
from .regions import Around, with_region
from .reports import Place, Reports, Rule, Values
from .selectors import as_selector, check_hits, everything
from .site import Site, Where


class Substitution(NamedTuple):
    """Other operations in the place of some.

    Attributes:
        where: selects sites.
        replace: told an equation's primitive, parameters and inputs; returns what stands for its outputs, or None to
            leave it. What another transformation has been at work on is left.
    """

    where: Where
    replace: Callable[[Any, Mapping[str, Any], Values], Values | None]

    def program(self, closed: Any, inputs: Values) -> Any:
        """A program with these operations; itself if it has none of those."""
        live = live_program(closed)
        plan = self.plan(live)
        return jax.make_jaxpr(lambda *inputs: self.outs(live, plan, inputs))(*inputs) if plan.sites else closed

    def plan(self, live: Bound) -> Plan:
        """Where they stand."""
        return plan_sites(live, as_selector(self.where))

    def outs(self, live: Bound, plan: Plan, inputs: Sequence[Any]) -> Values:
        """What a program with these operations returns."""
        rule: Any = _Substituted(self.replace)
        return evaluate(plan, live, (), rule, inputs)[0]


def rewrite(
    step: Callable[..., Any],
    where: Where,
    rule: Rule,
    reason: Callable[[Site], str | None] = lambda site: None,
    first: Substitution | None = None,
    around: Around | None = None,
) -> Callable[..., tuple[Any, Reports]]:
    """Transforms a step: `rule` stands in for every equation that `where` selects.

    Args:
        step: any function that JAX can trace; for its arguments see `arguments.py`.
        where: selects sites.
        rule: see `Rule`.
        reason: why the rule cannot work on a site, or None; such sites are left as they are, and listed in
            `Reports.skipped`.
        first: what is put into the step beforehand; where it puts something, arrays that go in and come out are no
            sites any more.

    Returns:
        A function of the same arguments that returns `(step's output, Reports)`. Wrap it in `jax.jit`: it is traced
        anew at each call.

    Raises:
        ValueError: a selected probe lies inside a primitive that cannot be entered (it would go unchecked).
    """

    selector = as_selector(where)
    if not callable(rule) or not callable(getattr(rule, "merge", None)):
        raise TypeError(f"{rule!r} is no rule; expected a callable object with a method merge, see sdc.program.Rule")

    @taking(step)
    def rewritten(*args: Any, **kwargs: Any) -> tuple[Any, Reports]:
        with traced(step, args, kwargs) as program:
            closed = program.closed if first is None else first.program(program.closed, program.inputs)
            live = live_program(closed)
            survey = Survey(selector, reason)
            plan = survey_sites(live, survey)
            jaxpr = live if plan.sites else closed
            if around is not None and plan.sites:
                jaxpr, plan = with_region(live, plan, whole=around.whole)
            outs, reports = evaluate(plan, jaxpr, (), Applied(selector, rule, around), program.inputs)
            values = [reports[site.name] for site in plan.sites]
            here = jax.sharding.get_abstract_mesh()
            if not here.empty:  # a step may have parts in which other axes are explicit
                with jax.named_scope(HIDDEN):
                    values = moved(values, here)
            return program.finish(outs), Reports(plan.sites, values, survey.shares())

    return rewritten


def substitute(
    step: Callable[..., Any], where: Where, replace: Callable[[Any, Mapping[str, Any], Values], Values | None]
) -> Callable[..., Any]:
    """Transforms a step: other operations stand where `where` selects some, and are sites themselves.

    Args:
        step: any function that JAX can trace.
        where: selects sites.
        replace: see `Substitution`.

    Returns:
        A function of the same arguments.
    """

    substitution = Substitution(where, replace)

    @taking(step)
    def substituted(*args: Any, **kwargs: Any) -> Any:
        with traced(step, args, kwargs) as program:
            live = live_program(program.closed)
            return program.finish(substitution.outs(live, substitution.plan(live), program.inputs))

    return substituted


class _Substituted:
    def __init__(self, replace: Callable[[Any, Mapping[str, Any], Values], Values | None]) -> None:
        self.replace = replace

    def __call__(self, eqn: Any, place: Place, operands: Values) -> tuple[Values, tuple[()]]:
        outs = None if eqn.primitive is mark_p else self.replace(eqn.primitive, eqn.params, operands)
        return bind_equation(eqn, operands) if outs is None else outs, ()

    def merge(self, total: tuple[()], new: tuple[()]) -> tuple[()]:
        return ()


def sites(step: Callable[..., Any], *args: Any, where: Where = everything, **kwargs: Any) -> list[Site]:
    """Lists the sites of a step that a selector hits, in program order, without running the step.

    `for site in sdc.sites(step, *args): print(site)` shows them with shapes, dtypes, operations and source lines.

    Args:
        step: any function that JAX can trace.
        args, kwargs: arguments of the step, arrays or `jax.ShapeDtypeStruct` objects.
        where: selects sites; by default all.

    Raises:
        ValueError: the selector hits nothing; the message lists near misses.

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
        live = live_program(program.closed)
    found = plan_sites(live, selector).sites
    if not found:
        if hidden := out_of_reach(live.jaxpr, selector):
            raise ValueError(
                f"selector {selector.text} hits only what lies inside of {hidden[0]}, which cannot be entered; select "
                "that operation as a whole, or what is around it"
            )
        check_hits(selector, plan_sites(live, everything).sites, found)
    return list(found)


def required(
    step: Callable[..., Any],
    where: Where,
    rule: Rule,
    reason: Callable[[Site], str | None] = lambda site: None,
    first: Substitution | None = None,
    around: Around | None = None,
) -> Callable[..., tuple[Any, Reports]]:
    """As `rewrite`, but a selector that hits nothing is an error: a tool must not pass over what it was asked to do.

    Raises:
        ValueError: see `rewrite`, and when nothing is selected; the message lists near misses, or says why the rule
            cannot work on what is selected.
    """
    selector = as_selector(where)
    rewritten = rewrite(step, selector, rule, reason, first, around)

    @taking(step)
    def some(*args: Any, **kwargs: Any) -> tuple[Any, Reports]:
        out, reports = rewritten(*args, **kwargs)
        if not reports and reports.skipped:
            told = "; ".join(f"{one.site.name} ({one.site.source}): {one.reason}" for one in reports.skipped[:4])
            raise ValueError(f"all that is selected cannot be worked on: {told}")
        if not reports:
            sites(step, *args, where=selector, **kwargs)
        return out, reports

    return some
