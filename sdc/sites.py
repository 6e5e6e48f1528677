"""Sites: the named places of a step at which tools look, and the probe that a model author puts on a tensor.

A *site* is one equation of a step's program. A *probe* is a named identity. It lowers to nothing, so that a step with
probes compiles to the program without them, and its derivative probes the cotangent:

=========  ==========================================================================
direction  the value that the site sees
=========  ==========================================================================
fwd        the value in the forward pass
bwd        the cotangent (the gradient of the loss with respect to the value)
remat      the value in a forward pass that is recomputed for the backward pass
jvp        the tangent, in a program differentiated in forward mode
=========  ==========================================================================
"""

import dataclasses
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Direction: TypeAlias = Literal["fwd", "bwd", "remat", "jvp"]
Tree = TypeVar("Tree")

probe_p = Primitive("probe")


@dataclasses.dataclass(frozen=True)
class Site:
    """One place of a step.

    Attributes:
        name: the key of its report, unique in a step: `direction/probe`, or `direction/scope/primitive` for an equation
            that is no probe; a second site of the same name ends in `#2`.
        primitive: name of the JAX primitive.
        direction: see the module.
        probe: the name given to `probe`, or None.
        scope: the name stack (`jax.named_scope` and transformations), from the outermost call on.
        source: `file:line (function)` in the user's code, or an empty string.
        dims: names of the leading axes that control flow adds to a report, outermost first: a mesh axis, or `scan`.
    """

    name: str
    primitive: str
    direction: Direction
    probe: str | None
    scope: str
    source: str
    dims: tuple[str, ...] = ()


Where: TypeAlias = Callable[[Site], bool]


def probes(site: Site) -> bool:
    """Selects every probe."""
    return site.primitive == probe_p.name


def matching(pattern: str) -> Where:
    """Selects the sites whose name matches a shell-style pattern.

    Example:
        >>> from sdc.sites import Site, matching
        >>> matching("fwd/*")(Site("fwd/attn", "probe", "fwd", "attn", "", ""))
        True
    """
    return lambda site: fnmatchcase(site.name, pattern)


def probe(x: Tree, name: str, *, directions: Sequence[Literal["fwd", "bwd"]] = ("fwd", "bwd")) -> Tree:
    """Names the values of `x` as a site; returns `x`.

    Args:
        x: an array, or a pytree of arrays; each leaf becomes a site (`name/path` where `x` is a pytree).
        name: the site's name, without `#` and without glob characters.
        directions: `("fwd",)` looks only at the value, `("bwd",)` only at its cotangent.

    Returns:
        `x`, bit for bit.

    Raises:
        ValueError: the name is empty or holds one of `#*?[]`, or a direction is unknown.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> def loss(w, x):
        ...     return jnp.sum(sdc.probe(x @ w, "ffn") ** 2)
        >>> [site.name for site in sdc.sites(jax.grad(loss))(jnp.ones((2, 2)), jnp.ones((1, 2)))]
        ['fwd/ffn', 'bwd/ffn']
    """
    if not name or set(name) & set("#*?[]"):
        raise ValueError(f"probe name {name!r} is empty or holds one of '#*?[]'; choose a plain name such as 'attn'")
    if not directions or not set(directions) <= {"fwd", "bwd"}:
        raise ValueError(f"directions {tuple(directions)!r} of probe {name!r}: expected 'fwd', 'bwd' or both")

    def bind(path: tuple[Any, ...], leaf: Any) -> Any:
        suffix = jax.tree_util.keystr(path, simple=True, separator="/")
        return probe_p.bind(
            leaf, name=f"{name}/{suffix}" if suffix else name, direction="fwd", directions=frozenset(directions)
        )

    return jax.tree_util.tree_map_with_path(bind, x)


def _abstract_eval(x: Any, **_: Any) -> Any:
    return x


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


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return probe_p.bind(*args, **params), dims[0]


probe_p.def_impl(lambda x, **_: x)
probe_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(probe_p, lambda ctx, x, **_: [x])
ad.primitive_jvps[probe_p] = _jvp
ad.primitive_transposes[probe_p] = _transpose
batching.primitive_batchers[probe_p] = _batch
