"""`abft`: checksums for every matrix product of a step, forward and backward."""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from .. import program
from ._check import (
    LARGEST_TOGETHER,
    Deferred,
    Flags,
    Stack,
    check,
    merge_flags,
    merge_screened,
    rounded_off,
    screen,
    screen_together,
    unexamined,
)
from .examination import TRACED, ScreenedStep, Screening
from .fused_products import multiply, over_explicit_axes, sums_columns
from .products import Conv, Dot, Indexed, Product, arranged
from .roundoff import Examine, Mode, Output, Profile, SchemeName, Settings, check_choice, known, unit, work_type
from .schemes import Operands

P = ParamSpec("P")  # of a step
Out = TypeVar("Out")


def abft(
    step: Callable[P, Out],
    where: program.Where = program.products,
    *,
    mode: Mode = "detect",
    output: Output = "float32 accumulator",
    scheme: SchemeName = "two-tier",
    profile: Profile | None = None,
    examine: Examine = "within",
) -> Callable[P, tuple[Out, program.Reports[Flags]]]:
    """Transforms a step so that checksums check its matrix products (algorithm-based fault tolerance).

    The check compares weighted sums over the rows of each product with their expected values (Huang and Abraham 1984);
    BENCHMARKS.md lists the cost of the check. Products that look wrong are recomputed in a branch that healthy runs do
    not take. To simulate hardware faults, inject them into the accumulators, before rounding:
    `sdc.abft(sdc.inject(sdc.checksums.accumulators(step), faults))`.

    Args:
        step: any function that JAX can trace; it is transformed after differentiation, so that the backward pass is
            checked too.
        where: selects the products; by default, all matrix products and convolutions, including ragged and sparse ones.
        mode: `"detect"` flags rows, `"locate"` also locates wrong elements, and `"correct"` also replaces wrong rows.
        output: `"float32 accumulator"` makes products of narrow types return their sums unrounded, checks these sums,
            and then rounds them; even errors near the roundoff of float32 are thus detected. `"as is"` does not change
            the products; in bfloat16, only errors above 0.4 to 0.9 times a row's root mean square are then detected.
        scheme: see `schemes`.
        profile: measured profile of the device; by default, the profile assumed for the platform.
        examine: `"within"` examines suspicious products within the step, which may be part of a larger program. With
            `"again"`, the function is compiled and must not be wrapped in `jax.jit`: it runs the step with the first
            tier of the check alone, and runs a suspicious step again with the full check (see `examination`). It
            compiles in a fraction of the time, keeps its inputs in memory during the step, and waits for its result.

    Returns:
        A function that returns `(out, flags)`, with `Flags` for each product. `flags.skipped` lists the selected
        products that could not be checked, with the reason and their share of the step's operations: products of
        integers, and products inside primitives that cannot be entered. `sdc.checksums.coverage(flags)` returns the
        checked share of the operations.

    Raises:
        ValueError: a setting is unknown, no product is selected, or no selected product can be checked.
        TypeError: `profile` is not a `Profile`.
    """
    check_choice("examine", examine, get_args(Examine))
    settings = Settings(mode, scheme)
    whole = _transformed(step, where, output, _Abft(settings, profile))
    if examine == "within":
        return whole
    return _again(step, where, settings, output, profile, whole)


def screened(
    step: Callable[..., Any], where: program.Where, settings: Settings, profile: Profile | None = None
) -> Callable[..., tuple[Any, program.Reports[Flags]]]:
    """Transforms a step as `abft` does, with the first tier of the check alone: the flags show which products would be
    examined."""
    run, finish = _screening(step, where, settings, "float32 accumulator", profile)

    @program.taking(step)
    def flagged(*args: Any, **kwargs: Any) -> tuple[Any, program.Reports[Flags]]:
        out, found = run(*args, **kwargs)
        return out, finish(found)

    return flagged


class _Found(NamedTuple):
    """Results of the first tier, before they become flags."""

    stacks: list[Stack]
    sites: program.Reports[Any]  # without values


def _screening(
    step: Callable[..., Any], where: program.Where, settings: Settings, output: Output, profile: Profile | None
) -> tuple[Callable[..., tuple[Any, _Found]], Callable[..., program.Reports[Flags]]]:
    """Returns the step with the first tier alone, and a function that makes flags of what it finds."""
    transformed = _transformed(step, where, output, _Screen(settings, profile))

    @program.taking(step)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, _Found]:
        out, found = transformed(*args, **kwargs)
        return out, _Found(
            screen_together(found), program.Reports(found.sites, [()] * len(found), found.skipped, found.simulated)
        )

    def finish(found: _Found, xp: Any = jnp) -> program.Reports[Flags]:
        flags = {}
        for stack in found.stacks:
            whole = jax.tree.map(xp.asarray, stack.screened)
            for row, name in enumerate(stack.names):
                flags[name] = unexamined(settings, jax.tree.map(lambda x, row=row: x[row], whole), xp)
        return program.Reports(
            found.sites.sites, [flags[name] for name in found.sites], found.sites.skipped, found.sites.simulated
        )

    return run, finish


def _again(
    step: Callable[..., Any],
    where: program.Where,
    settings: Settings,
    output: Output,
    profile: Profile | None,
    whole: Callable[..., Any],
) -> Callable[..., tuple[Any, program.Reports[Flags]]]:
    run, finish = _screening(step, where, settings, output, profile)

    def alone() -> bool:
        return jax.process_count() == 1  # the results of several processes are not all on this host

    @jax.jit
    def compiled(*args: Any, **kwargs: Any) -> Screening:
        out, found = run(*args, **kwargs)
        most = [jnp.max(stack.screened.margin, initial=0.0) for stack in found.stacks]
        suspicious = ~(jnp.max(jnp.stack(most)) <= 1)
        flags: Any = found if alone() else finish(found)
        return Screening(out, flags, suspicious)

    def screen(*args: Any, **kwargs: Any) -> Screening:
        found = compiled(*args, **kwargs)
        return found._replace(flags=finish(found.flags, np)) if alone() else found

    examination = ScreenedStep(screen, jax.jit(whole), settings.mode == "correct")

    @functools.wraps(whole)
    def examined(*args: Any, **kwargs: Any) -> tuple[Any, program.Reports[Flags]]:
        _check_arguments(args, kwargs)
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            # A step that closes over traced arrays has no result whose value is known.
            with contextlib.suppress(jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
                return examination(*args, **kwargs)
        warnings.warn(TRACED, stacklevel=2)
        return whole(*args, **kwargs)

    examined.lower = compiled.lower  # type: ignore[attr-defined] # functions can have attributes
    return examined


def _check_arguments(*trees: Any) -> None:
    """Raises ValueError for arguments with which a step cannot run again."""
    problem = None
    if program.holds_objects(trees):
        problem = "a Flax NNX object, which each run would change; pass its state (nnx.split)"
    for leaf in jax.tree.leaves(trees):
        if not program.is_array(leaf, numbers=True):
            problem = f"{leaf!r:.40}, which is not an array; bind it with functools.partial, or a closure"
        elif not isinstance(jax.typeof(leaf), jax.core.ShapedArray):
            problem = f"{jax.typeof(leaf)}, which each run would change; pass an array"
    if problem:
        raise ValueError(f"sdc.abft(examine='again') was given {problem}, or choose examine='within'")


def _transformed(
    step: Callable[..., Any], where: program.Where, output: Output, rule: "_Abft"
) -> Callable[..., tuple[Any, program.Reports[Any]]]:
    check_choice("output", output, get_args(Output))
    if rule.profile is not None:
        Profile.given(rule.profile)
    wanted = program.as_selector(where)
    selector = wanted & program.Selector("any product", lambda site: site.is_product)
    # The scheme `residual` requires rounded outputs.
    wide = output == "float32 accumulator" and rule.settings.scheme != "residual"
    first = _widening(selector, pins=False) if wide else None  # the rule does

    def reason(site: program.Site) -> str | None:
        """Returns why a selected site cannot be checked; primitives that cannot be entered count as products."""
        why, scalar = unchecked(site), jax.ShapeDtypeStruct((), jnp.float32)
        as_product = dataclasses.replace(site, primitive="dot_general", outputs=(scalar,))
        return why if why and (wanted(site) or wanted(as_product)) else None

    why = "the derivative of a checked product would not be checked"
    return program.rewrite(step, selector, rule, required=True, reason=reason, first=first, underived_because=why)


# Products that can return their sums in float32 on all platforms.
WIDENED = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def accumulators(step: Callable[..., Any], where: program.Where = program.products) -> Callable[..., Any]:
    """Transforms a step so that products of narrow types return their sums in float32, which are rounded afterwards.

    The products are then float32 sites; faults that `inject` applies to these sites simulate faults in the
    accumulators. If the backend might be unable to return the sums of narrow factors, the factors are transposed first
    (see the site's `inputs`).

    Args:
        step: any function that JAX can trace.
        where: selects the products.
    """
    return program.substitute(step, *_widening(where))


def _widening(where: program.Where, *, pins: bool = True) -> tuple[program.Where, Callable[..., program.Values]]:
    """Returns arguments of `substitute`; `pins` says whether XLA must not compute an input twice."""

    def widen(primitive: Any, params: Mapping[str, Any], inputs: program.Values) -> program.Values:
        def bind(*inputs: Any, **changed: Any) -> Any:
            return primitive.bind(*inputs, **{**params, **changed})

        dtype = jax.eval_shape(bind, *inputs).dtype
        work = jnp.dtype(work_type(dtype, *(x.dtype for x in inputs[:2])))
        changed: dict[str, Any] = {"preferred_element_type": work}
        # XLA may omit the rounding of an input to bfloat16 if a product converts it to float32 again.
        with jax.named_scope(program.Tags.HIDDEN):
            inputs = list(lax.optimization_barrier(inputs) if pins else inputs)
            if primitive.name == "dot_general":
                changed["dimension_numbers"], *inputs = arranged(params["dimension_numbers"], inputs[0], inputs[1])
        full = bind(*inputs, **changed)
        with jax.named_scope(program.Tags.HIDDEN):
            return [lax.convert_element_type(full, dtype)]

    def rounds(site: program.Site) -> bool:
        """Returns whether a product rounds its sums to a narrower type."""
        out, factors = site.outputs[0].dtype, [x.dtype for x in site.inputs[:2]]
        return all(map(known, (out, *factors))) and unit(out) > unit(work_type(out, *factors))

    return program.primitive(*WIDENED) & rounds & where, widen


class _Abft:
    def __init__(self, settings: Settings, profile: Profile | None) -> None:
        self.settings, self.profile = settings, profile

    def __call__(self, place: program.Place, bind: Callable[..., program.Values], *inputs: Any) -> tuple[Any, Any]:
        kind, out = place.site.primitive, place.site.outputs[0].dtype
        given = task(kind, place.params, list(inputs))
        profile = Profile.given(self.profile)  # here, the platform for which the program is compiled is known
        settings = self.settings_for(place.site, given, profile)
        dense = isinstance(given.product, Dot | Conv) and given.a is inputs[0]  # not another form of the equation
        if settings.scheme == "residual" and dense and unit(out) > unit(work_type(given.a.dtype, given.b.dtype)):
            if place.marked:
                raise ValueError(
                    f"site {place.site.name!r}: scheme='residual' needs the sums before they are rounded, but another "
                    "transformation has changed the product; apply sdc.abft first, or choose another scheme"
                )
            product, operands = carried(given.product, given.a, given.b, out)
            rounded, flags = self.judge(place.site, product, settings, operands)
            return [rounded], flags
        if place.marked or not dense:
            inputs = lax.optimization_barrier(inputs)
            (c,) = bind(*inputs)
            given = task(kind, place.params, list(inputs))
            a, b, c, indices = lax.optimization_barrier((given.a, given.b, given.read(c), given.indices))
            operands = Operands(a, b, c, indices=indices)
            if given.a is not inputs[0]:  # recomputed in this form, it rounds differently, as after a fused kernel
                settings = dataclasses.replace(settings, fused=True)
        else:
            operands = multiply(given.product, settings, given.a, given.b, place.stored)
        checked, flags = self.judge(place.site, given.product, settings, operands)
        if isinstance(flags, Flags) and flags.wrong is not None:
            flags = flags._replace(wrong=flags.wrong._replace(element=flags.wrong.element // given.parts))
        return [given.write(checked)], flags

    def settings_for(self, site: program.Site, given: "ProductTask", profile: Profile) -> Settings:
        return profile.settings(self.settings, site.name)

    def judge(self, site: program.Site, product: Product, settings: Settings, given: Operands) -> tuple[Any, Any]:
        """Returns the product and the report on it."""
        return check(product, settings, given)

    def merge(self, total: Any, new: Any) -> Any:
        return merge_flags(total, new)


class _Screen(_Abft):
    """Checks with the first tier alone; small products are checked together, by `screen_together`.

    In backward products, terms cancel so often that the first tier would pass on rows in many steps. It therefore takes
    the norm of the terms. Products of attention (with batch axes) also lose terms of long sums: they begin with the
    second tier, or, where the device truncates sums, with a first tier that allows for such losses.
    """

    def settings_for(self, site: program.Site, given: "ProductTask", profile: Profile) -> Settings:
        settings = super().settings_for(site, given, profile)
        if site.direction == "bwd":
            batched = isinstance(given.product, Dot) and bool(given.product.dimensions[1][0])
            loses = batched and settings.tier == 1 and math.isfinite(settings.rounding.kappa)
            tier = 2 if batched and not loses else settings.tier
            settings = dataclasses.replace(settings, tier=tier, cancels=True, lenient=loses)
        return dataclasses.replace(settings, columns=sums_columns(given.product, settings, given.a, given.b))

    def judge(self, site: program.Site, product: Product, settings: Settings, given: Operands) -> tuple[Any, Any]:
        alone = bool(site.trips or site.dims or program.bound_axes()) or not jax.sharding.get_abstract_mesh().empty
        sizes = [x.size for x in given[:3]]
        alone = alone or given.carried is not None or given.totals is not None or 0 in sizes
        alone = alone or over_explicit_axes(*given[:3])
        if alone or not isinstance(product, Dot) or sum(sizes) > LARGEST_TOGETHER:
            return screen(product, settings, given)
        return given.c, Deferred.of(product, settings, given)

    def merge(self, total: Any, new: Any) -> Any:
        return merge_screened(total, new)


def carried(product: Dot | Conv | Indexed, a: Any, b: Any, dtype: Any) -> tuple[Dot | Conv | Indexed, Operands]:
    """Rounds a product to a type; returns what to check, with the sum of the rounding errors of each row."""
    wide = dataclasses.replace(product, dtype=jnp.dtype(work_type(a.dtype, b.dtype)))
    a, b = lax.optimization_barrier((a, b))
    if isinstance(wide, Dot):
        dimensions, a, b = arranged(wide.dimensions, a, b)
        wide = dataclasses.replace(wide, dimensions=dimensions)
    full = wide(a, b)
    rounded = full.astype(dtype)
    lost = rounded_off(wide, b, full, rounded)
    rounded, lost = lax.optimization_barrier((rounded, lost))
    return wide, Operands(a, b, rounded, lost)


class ProductTask(NamedTuple):
    """A product of real numbers that represents a jaxpr equation, with conversions of the result."""

    product: Dot | Conv | Indexed  # the product
    a: Shaped[Array, "*a"]  # first factor of the product
    b: Shaped[Array, "*b"]
    indices: tuple[Any, ...] = ()  # see `Indexed`
    read: Callable[[Any], Any] = lambda c: c  # converts the equation's result to the product's result
    write: Callable[[Any], Any] = lambda c: c  # the inverse of `read`
    parts: int = 1  # elements of the product's result per element of the equation's result


def unchecked(site: program.Site) -> str | None:
    """Returns why a product cannot be checked, or None if it can be checked or the site computes no product."""
    kind = site.primitive
    if not site.is_product:
        if site.products == 0:
            return None
        known_work = "" if site.products else ", and its work is unknown"
        return f"{kind} cannot be entered{known_work}" if not kind.startswith(_SPARSE) else f"{kind} has no check"
    types = [x.dtype for x in (*_factors(kind, site.inputs), *site.outputs)]
    real = [dtype for dtype in types if not jnp.issubdtype(dtype, jnp.complexfloating)]
    if len(real) < len(types) and kind != "dot_general":
        return f"{kind} of complex numbers has no check"
    if strange := [dtype.name for dtype in real if not known(dtype)]:
        return f"the roundoff of {strange[0]} is unknown"
    return None


_SPARSE, _SPARSE_DOTS = ("bcoo", "bcsr", "coo", "csr"), ("bcoo_dot_general", "bcsr_dot_general")


def _factors(kind: str, inputs: Sequence[Any]) -> tuple[Any, Any]:
    return inputs[0], inputs[-1] if kind in _SPARSE_DOTS else inputs[1]


def task(kind: str, params: Mapping[str, Any], inputs: program.Values) -> ProductTask:
    """Returns the product that an equation computes."""
    a, b = _factors(kind, inputs)
    if kind == "dot_general":
        types = (a.dtype, b.dtype, params["preferred_element_type"] or a.dtype)
        mixed = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in types)
        return _complex(params, a, b) if mixed else ProductTask(product_of(kind, params, a, b), a, b)
    if kind == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        ragged = (("lhs_ragged_dimensions", tuple(numbers.lhs_ragged_dimensions)),)
        groups, precision = tuple(numbers.rhs_group_dimensions), params["precision"]
        dimensions, dtype = numbers.dot_dimension_numbers, params["preferred_element_type"]
        product = Indexed(kind, dimensions, (a.ndim, b.ndim), ragged, groups, precision, dtype)
        return ProductTask(product, a, b, (inputs[2],))
    if kind in _SPARSE_DOTS:
        info, dtype = params["lhs_spinfo"], params["preferred_element_type"]
        axes = len(info.shape), b.ndim
        times = Indexed(kind, params["dimension_numbers"], axes, (("lhs_spinfo", info),), dtype=dtype)
        return ProductTask(times, a, b, tuple(inputs[1:-1]))
    if kind.startswith("scaled_matmul"):
        # Factors are 8-bit numbers times the scale of their block along the last axis, in float32.
        a, b = (
            x.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), x.shape[-1] // scale.shape[-1], axis=-1)
            for x, scale in ((a, inputs[2]), (b, inputs[3]))
        )
        whole = Dot((((2,), (2,)), ((0,), (0,))), (3, 3), lax.Precision.HIGHEST, params["preferred_element_type"])
        return ProductTask(whole, a, b)
    return ProductTask(product_of(kind, params, a, b), a, b)


def product_of(kind: str, params: Mapping[str, Any], a: Any, b: Any) -> Dot | Conv:
    """Returns the dense product that an equation computes."""
    if kind == "dot_general":
        precision, dtype, sharding = params["precision"], params["preferred_element_type"], params.get("out_sharding")
        return Dot(params["dimension_numbers"], (a.ndim, b.ndim), precision, dtype, sharding)
    kept = tuple((name, value) for name, value in params.items() if name in _CONVOLUTION)
    return Conv(kept, params["preferred_element_type"])


_CONVOLUTION = (
    "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count",
    "batch_group_count", "precision",
)  # fmt: skip


def _complex(params: Mapping[str, Any], a: Any, b: Any) -> ProductTask:
    """Converts a product with a complex factor or result to a real one, with real and imaginary parts p and q on
    separate axes:

    C_q = sum_p A_p B_pq,    A = (Re A, Im A),    B = ((Re B, Im B), (-Im B, Re B)),    C = (Re C, Im C).
    """
    ((lhs, rhs), batch), parts = params["dimension_numbers"], (jnp.real, jnp.imag)
    dimensions = ((*lhs, a.ndim), (*rhs, b.ndim)), batch
    both = jnp.stack([part(a) for part in parts], -1)
    real, imaginary = (part(b) for part in parts)
    four = jnp.stack([jnp.stack([real, imaginary], -1), jnp.stack([-imaginary, real], -1)], -2)
    product = Dot(dimensions, (a.ndim + 1, b.ndim + 2), params["precision"])

    def read(c: Any) -> Any:
        return jnp.stack([part(c) for part in parts], -1)

    return ProductTask(product, both, four, (), read, lambda c: lax.complex(c[..., 0], c[..., 1]), 2)
