"""From an equation of a program to the real product that is checked in its place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from ..program import Reports, Site, Values
from .indexed import Indexed
from .products import Conv, Dot, Product
from .roundoff import known


class Task(NamedTuple):
    """A product of real numbers, and how it stands for what an equation computes.

    Attributes:
        product: the product.
        a, b: its factors.
        indices: see `Indexed`.
        read: makes the product's result of the equation's.
        write: the inverse.
        parts: numbers of the product's result that make one of the equation's.
    """

    product: Product
    a: Shaped[Array, "*a"]
    b: Shaped[Array, "*b"]
    indices: tuple[Any, ...] = ()
    read: Callable[[Any], Any] = lambda c: c
    write: Callable[[Any], Any] = lambda c: c
    parts: int = 1


def unchecked(site: Site) -> str | None:
    """Why a product cannot be checked; None for one that can, and for what computes no product."""
    kind = site.primitive
    if not site.is_product:
        if site.products == 0:
            return None
        known_work = "" if site.products else ", and computes nobody knows what"
        return f"{kind} cannot be entered{known_work}" if not kind.startswith(_SPARSE) else f"{kind} has no check"
    types = [x.dtype for x in (*_factors(kind, site.inputs), *site.outputs)]
    if all(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in types):
        return None if kind == "dot_general" else f"{kind} of complex numbers has no check"
    if strange := [dtype.name for dtype in types if not known(dtype)]:
        return f"the round-off of {strange[0]} is not known"
    return None


_SPARSE = ("bcoo", "bcsr", "coo", "csr")


def _factors(kind: str, inputs: Sequence[Any]) -> tuple[Any, Any]:
    return inputs[0], inputs[-1] if kind in ("bcoo_dot_general", "bcsr_dot_general") else inputs[1]


def task(kind: str, params: Mapping[str, Any], inputs: Values) -> Task:
    """The product that an equation computes."""
    a, b = _factors(kind, inputs)
    if kind == "dot_general":
        return _complex(params, a, b) if jnp.iscomplexobj(a) else Task(product_of(kind, params, a, b), a, b)
    if kind == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        ragged = Indexed(
            kind,
            numbers.dot_dimension_numbers,
            (a.ndim, b.ndim),
            (("lhs_ragged_dimensions", tuple(numbers.lhs_ragged_dimensions)),),
            tuple(numbers.rhs_group_dimensions),
            params["precision"],
            params["preferred_element_type"],
        )
        return Task(ragged, a, b, (inputs[2],))
    if kind == "bcoo_dot_general" or kind == "bcsr_dot_general":
        info = params["lhs_spinfo"]
        times = Indexed(
            kind,
            params["dimension_numbers"],
            (len(info.shape), b.ndim),
            (("lhs_spinfo", info),),
            dtype=params["preferred_element_type"],
        )
        return Task(times, a, b, tuple(inputs[1:-1]))
    if kind.startswith("scaled_matmul"):
        a, b = (_dequantized(x, scale) for x, scale in ((a, inputs[2]), (b, inputs[3])))
        whole = Dot((((2,), (2,)), ((0,), (0,))), (3, 3), lax.Precision.HIGHEST, params["preferred_element_type"])
        return Task(whole, a, b)
    return Task(product_of(kind, params, a, b), a, b)


def product_of(kind: str, params: Mapping[str, Any], a: Any, b: Any) -> Dot | Conv:
    """The dense product that an equation computes."""
    if kind == "dot_general":
        return Dot(
            params["dimension_numbers"],
            (a.ndim, b.ndim),
            params["precision"],
            params["preferred_element_type"],
            params.get("out_sharding"),
        )
    kept = {name: value for name, value in params.items() if name in _CONVOLUTION}
    return Conv(tuple(kept.items()), params["preferred_element_type"])


_CONVOLUTION = (
    "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count",
    "batch_group_count", "precision",
)  # fmt: skip


def _complex(params: Mapping[str, Any], a: Any, b: Any) -> Task:
    """A complex product as a real one: with parts p and q on axes of their own,

    C_q = sum_p A_p B_pq,    A = (Re A, Im A),    B = ((Re B, Im B), (-Im B, Re B)),    C = (Re C, Im C).
    """
    ((lhs, rhs), batch), parts = params["dimension_numbers"], (jnp.real, jnp.imag)
    dimensions = ((*lhs, a.ndim), (*rhs, b.ndim)), batch
    both = jnp.stack([part(a) for part in parts], -1)
    real, imaginary = (part(b) for part in parts)
    four = jnp.stack([jnp.stack([real, imaginary], -1), jnp.stack([-imaginary, real], -1)], -2)
    return Task(
        Dot(dimensions, (a.ndim + 1, b.ndim + 2), params["precision"]),
        both,
        four,
        read=lambda c: jnp.stack([part(c) for part in parts], -1),
        write=lambda c: lax.complex(c[..., 0], c[..., 1]),
        parts=2,
    )


def _dequantized(x: Any, scale: Any) -> Any:
    """Numbers of 8 bits times the scale of their block of the last axis, in float32."""
    wide = jnp.repeat(scale.astype(jnp.float32), x.shape[-1] // scale.shape[-1], axis=-1)
    return x.astype(jnp.float32) * wide


def coverage(flags: Reports) -> float:
    """Share of the known work of a step's products that was checked; products of unknown work count as the whole.

    Args:
        flags: the reports of `sdc.abft`.

    Returns:
        A number from 0 to 1. What `where` left out is not counted; rows of factors that are not finite count as left
        out. 0 where something was left out of which nobody knows how much it computes, such as a call of foreign code.

    Example:
        >>> import jax.numpy as jnp, sdc
        >>> x = jnp.ones((4, 4))
        >>> half = sdc.abft(lambda x, y: (x @ x, y @ y))(x, x.astype(jnp.int8))[1]
        >>> sdc.checksums.coverage(half), half.skipped[0].reason
        (0.5, 'the round-off of int8 is not known')

    Raises:
        ValueError: these are no reports, or it is asked inside of `jax.jit`.
    """
    if not isinstance(flags, Reports):
        raise ValueError(f"{type(flags).__name__} in the place of flags; give the second of what sdc.abft's returns")
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(flags)):
        raise ValueError("how many rows were checked is not known inside of jax.jit; return the flags, and ask outside")
    if any(one.share is None for one in flags.skipped):
        return 0.0
    work = {site.name: site.runs * (site.products or 0) for site in flags.sites}
    left = sum(one.site.runs * (one.site.products or 0) for one in flags.skipped)
    whole = sum(work.values()) + left
    return sum(work[name] * _judged(flag) for name, flag in flags.items()) / whole if whole else 0.0


def _judged(flag: Any) -> float:
    """Share of a product's rows whose factors were finite; what did not run has none that was not."""
    if isinstance(flag.checked, jax.ShapeDtypeStruct):  # of `jax.eval_shape`
        return 1.0
    checked, nonfinite = (float(np.sum(np.asarray(x), dtype=np.float64)) for x in (flag.checked, flag.nonfinite))
    return checked / (checked + nonfinite) if nonfinite else 1.0
