"""Identity primitives that mark places in a step: probes, ports, marks and guards. All four compile to nothing.

The author of a model puts a *probe* on a tensor; the derivative of the probe is a probe of the cotangent. A *port* is
the site of an array that enters or leaves the step. A *mark* represents an equation that a rule replaced: the rule's
own computation is bound in the scope `Tags.HIDDEN`, where no transformation looks for sites, and the outputs of this
computation are bound to a mark that has the primitive, parameters and inputs of the equation. An outer transformation
that selects the equation therefore sees the values with which the step continues, such as corrupted ones. A *guard*
raises an error when it is differentiated. A step must be differentiated before it is rewritten, because rewriting
replaces a call that has a custom derivative with the body of the call, whose derivative differs.
"""

from collections.abc import Sequence
from typing import Any, Literal, NoReturn, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .selectors import PROBE, Direction, Tags

Tree = TypeVar("Tree")


def _identity(name: str) -> Primitive:
    """Creates a primitive that returns its single argument unchanged, also under `vmap`."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    batching.defvectorized(primitive)
    return primitive


probe_p, port_p, guard_p = _identity(PROBE), _identity("port"), _identity("inlined")
mark_p = Primitive("mark")
mark_p.multiple_results = True


def probe(x: Tree, name: str, *, directions: Sequence[Literal["fwd", "bwd"]] = ("fwd", "bwd")) -> Tree:
    """Makes the value of `x` a named site; returns `x`.

    Args:
        x: an array, or a pytree of arrays, each leaf of which becomes a site (`name/path`).
        name: name of the site, without `#` and without glob characters.
        directions: `("fwd",)` probes only the value, `("bwd",)` only its cotangent.

    Returns:
        `x`, bit for bit.

    Raises:
        ValueError: the name is not a string, is empty or contains one of `#*?[]`, or a direction is unknown.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> from sdc.program import probes
        >>> def loss(w, x):
        ...     return jnp.sum(sdc.probe(x @ w, "ffn") ** 2)
        >>> [site.name for site in sdc.sites(jax.grad(loss), jnp.ones((2, 2)), jnp.ones((1, 2)), where=probes)]
        ['fwd/ffn', 'bwd/ffn']
    """
    if not isinstance(name, str) or not name or set(name) & set("#*?[]"):
        raise ValueError(f"probe name {name!r}: expected a non-empty string without any of '#*?[]', such as 'attn'")
    if not directions or not set(directions) <= {"fwd", "bwd"}:
        raise ValueError(f"directions {tuple(directions)!r} of probe {name!r}: expected 'fwd', 'bwd' or both")

    def bind(path: tuple[Any, ...], leaf: Any) -> Any:
        suffix = jax.tree_util.keystr(path, simple=True, separator="/")
        return probe_p.bind(
            leaf, name=f"{name}/{suffix}" if suffix else name, direction="fwd", directions=frozenset(directions)
        )

    return jax.tree_util.tree_map_with_path(bind, x)


def _probe_jvp(primals: Any, tangents: Any, *, name: str, direction: Direction, directions: frozenset[str]) -> Any:
    (x,), (tangent,) = primals, tangents
    out = probe_p.bind(x, name=name, direction=direction, directions=directions)
    if isinstance(tangent, ad.Zero):
        return out, tangent
    return out, probe_p.bind(tangent, name=name, direction="jvp", directions=directions)


def _probe_transpose(cotangent: Any, x: Any, *, name: str, direction: Direction, directions: frozenset[str]) -> Any:
    del x, direction
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [probe_p.bind(cotangent, name=name, direction="bwd", directions=directions)]


ad.primitive_jvps[probe_p] = _probe_jvp
ad.primitive_transposes[probe_p] = _probe_transpose
ad.deflinear2(port_p, lambda cotangent, x, **_: [cotangent])


def mark(outs: Sequence[Any], inputs: Sequence[Any], primitive: Any, params: Any) -> list[Any]:
    """Marks the outputs of a rule as the outputs of the equation that it replaced."""
    return list(mark_p.bind(*outs, *inputs, outputs=len(outs), of=primitive, params=tuple(params.items())))


def _mark_jvp(primals: Any, tangents: Any, *, outputs: int, **params: Any) -> Any:
    outs = mark_p.bind(*primals, outputs=outputs, **params)
    return outs, [ad.instantiate_zeros(tangent) for tangent in tangents[:outputs]]


def _mark_batch(args: Any, dims: Any, *, outputs: int, **params: Any) -> Any:
    return mark_p.bind(*args, outputs=outputs, **params), dims[:outputs]


mark_p.def_impl(lambda *args, outputs, **_: list(args[:outputs]))
mark_p.def_abstract_eval(lambda *args, outputs, **_: list(args[:outputs]))
mlir.register_lowering(mark_p, lambda ctx, *args, outputs, **_: args[:outputs])
ad.primitive_jvps[mark_p] = _mark_jvp
batching.primitive_batchers[mark_p] = _mark_batch


def underived(arrays: Sequence[Any], why: str, instead: str = "") -> list[Any]:
    """Returns the arrays; differentiating them raises ValueError with the reason `why` and the remedy `instead`."""
    remedy = (
        "differentiate first and transform the result, as in sdc.abft(jax.grad(loss)), not jax.grad(sdc.abft(loss))"
    )
    with jax.named_scope(Tags.HIDDEN):
        return [guard_p.bind(x, why=f"{why}: {remedy}{instead}") for x in arrays]


def _refuse(primals: Any, tangents: Any, *, why: str) -> NoReturn:
    raise ValueError(why)


ad.primitive_jvps[guard_p] = _refuse
