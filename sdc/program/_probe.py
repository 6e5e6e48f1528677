"""The probe: a named identity that a model author puts on a tensor that matters.

It lowers to nothing, so that a step with probes compiles to the program without them, and its derivative probes the
cotangent.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .selectors import PROBE
from .site import Direction

Tree = TypeVar("Tree")

probe_p = Primitive(PROBE)


def probe(x: Tree, name: str, *, directions: Sequence[Literal["fwd", "bwd"]] = ("fwd", "bwd")) -> Tree:
    """Names the values of `x` as a site; returns `x`.

    Args:
        x: an array, or a pytree of arrays; each leaf becomes a site (`name/path` where `x` is a pytree).
        name: the site's name, without `#` and without glob characters.
        directions: `("fwd",)` looks only at the value, `("bwd",)` only at its cotangent.

    Returns:
        `x`, bit for bit.

    Raises:
        ValueError: the name is no text, is empty or holds one of `#*?[]`, or a direction is unknown.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> from sdc.program import probes
        >>> def loss(w, x):
        ...     return jnp.sum(sdc.probe(x @ w, "ffn") ** 2)
        >>> [site.name for site in sdc.sites(jax.grad(loss), jnp.ones((2, 2)), jnp.ones((1, 2)), where=probes)]
        ['fwd/ffn', 'bwd/ffn']
    """
    if not isinstance(name, str) or not name or set(name) & set("#*?[]"):
        raise ValueError(f"probe name {name!r}: expected a text that is not empty and holds none of '#*?[]', as 'attn'")
    if not directions or not set(directions) <= {"fwd", "bwd"}:
        raise ValueError(f"directions {tuple(directions)!r} of probe {name!r}: expected 'fwd', 'bwd' or both")

    def bind(path: tuple[Any, ...], leaf: Any) -> Any:
        suffix = jax.tree_util.keystr(path, simple=True, separator="/")
        return probe_p.bind(
            leaf, name=f"{name}/{suffix}" if suffix else name, direction="fwd", directions=frozenset(directions)
        )

    return jax.tree_util.tree_map_with_path(bind, x)


def _jvp(primals: Any, tangents: Any, *, name: str, direction: Direction, directions: frozenset[str]) -> Any:
    (x,), (tangent,) = primals, tangents
    out = probe_p.bind(x, name=name, direction=direction, directions=directions)
    if isinstance(tangent, ad.Zero):
        return out, tangent
    return out, probe_p.bind(tangent, name=name, direction="jvp", directions=directions)


def _transpose(cotangent: Any, x: Any, *, name: str, direction: Direction, directions: frozenset[str]) -> Any:
    del x, direction
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [probe_p.bind(cotangent, name=name, direction="bwd", directions=directions)]


probe_p.def_impl(lambda x, **_: x)
probe_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(probe_p, lambda ctx, x, **_: [x])
ad.primitive_jvps[probe_p] = _jvp
ad.primitive_transposes[probe_p] = _transpose
batching.defvectorized(probe_p)
