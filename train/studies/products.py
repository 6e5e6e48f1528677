"""The study of checked matrix products: false alarms, detection by every scheme, and the rounding of devices."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

import sdc
from sdc.bits import as_bits, from_bits, select
from sdc.checksums import (
    SIGMAS,
    SPREAD,
    Dot,
    Expected,
    Operands,
    Profile,
    Rounding,
    SchemeName,
    Settings,
    Units,
    expect,
    hardware,
    make_scheme,
    multiply,
    product_of,
    rounded_off,
    row_margins,
    time_both,
)
from sdc.program import Place, Selector, Values, as_selector, primitive
from sdc.schema import SchemeCounts
from sdc.settings import SettingError

from .. import Dataset, TrainConfig, batches
from ..programs import DType, check, initial_state, place, place_batch, plain, sharded
from .measurements import ProductsMeasured
from .settings import Calibration, ProductsStudy

Step = Callable[..., Any]


def reference_steps(
    config: TrainConfig,
    dataset: Dataset,
    dtype: DType,
    transform: Callable[[Step], Step],
    *,
    steps: int,
    seed: int,
) -> Iterator[tuple[Any, Step, tuple[Any, Any]]]:
    """Trains a model; for each step, yields the reports of a transformation, the step function and its arguments."""
    config = config.of_type(dtype)
    check(config, 1, 1)
    placement = place(twins=None, data=1, model=1, devices=jax.devices()[:1])
    source = batches(dataset, batch_size=config.batch_size, microsteps=config.microsteps)
    work = sharded(config)
    step = plain(work, placement)
    run = jax.jit(transform(step))
    state = initial_state(work, placement, seed)
    for _ in range(steps):
        arguments = state, place_batch(next(source), placement)
        (state, _), reports = run(*arguments)
        yield reports, step, arguments


Draw: TypeAlias = Callable[[PRNGKeyArray, int, int, int], tuple[Any, Any]]


def _gaussian(change: Callable[[Any, Any], tuple[Any, Any]]) -> Draw:
    """Returns a function that draws normal factors and modifies them with `change`; the matrix product of the
    unmodified factors has elements of variance 1."""

    def draw(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
        first, second = jax.random.split(key)
        return change(jax.random.normal(first, (m, k)), jax.random.normal(second, (k, n)) / jnp.sqrt(k))

    return draw


def _positive(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    first, second = jax.random.split(key)
    return jax.random.uniform(first, (m, k)), jax.random.uniform(second, (k, n))


def _tiny_heavy_tailed(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    first, second, third = jax.random.split(key, 3)
    a = 1e-6 * jax.random.normal(first, (m, k)) * jnp.exp(2.0 * jax.random.normal(third, (m, k)))
    return a, jax.random.normal(second, (k, n)) * jnp.exp(jax.random.normal(third, (k, 1)))


# Seven kinds of factors (m×k and k×n), as they occur in layers.
DISTRIBUTIONS: Mapping[str, Draw] = {
    "gaussian": _gaussian(lambda a, b: (a, b)),
    "outlier channels": _gaussian(lambda a, b: (a * jnp.where(jnp.arange(len(b)) % 97 == 5, 60.0, 1.0), b)),
    "non-zero mean": _gaussian(lambda a, b: (a + 2.0, b + 0.5 / jnp.sqrt(len(b)))),
    "relu squared": _gaussian(lambda a, b: (jnp.square(jax.nn.relu(a)), b)),
    "positive": _positive,
    "softmax times values": _gaussian(lambda a, b: (jax.nn.softmax(3.0 * a, axis=-1), b)),
    "tiny heavy-tailed gradients": _tiny_heavy_tailed,
}

DEPTHS = (64, 256, 1024, 4096, 16384)  # numbers of terms of the measured sums
ROWS, COLUMNS = 512, 128
HALF = 0.5  # maximum ratio of a measured error to its bound
SHARE = 0.01  # share of a site's rows that the first tier passes on, above which the site starts with the second tier


def measure(dtype: str, *, seed: int = 0, depths: Sequence[int] = DEPTHS) -> dict[int, float]:
    """Measures the rounding errors of matrix products of one data type, on the default device, over all
    `DISTRIBUTIONS`.

    Returns, by number of terms, the largest value of `|r| / (q + |cs|)` over all rows; q is the second tier's scale.
    """
    product = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))

    @jax.jit
    def largest(a: Any, b: Any) -> Any:
        given = multiply(product, Settings(), a, b)
        scheme, wide = make_scheme(product, Settings(), given), given.wide()
        expected = scheme.expect(wide, 1)
        ones = jnp.ones(product.width(a, b))
        scale = jnp.sqrt(product.apply(jnp.square(wide.a), product.fold(jnp.square(wide.b), ones, 1)))
        return jnp.max(jnp.abs(scheme.residual(wide, expected)) / (scale + jnp.abs(expected.sums)))

    relative = {}
    for depth in depths:
        found = []
        for number, make in enumerate(DISTRIBUTIONS.values()):
            key = jax.random.fold_in(jax.random.key(seed), 1000 * depth + number)
            found.append(float(largest(*(x.astype(dtype) for x in make(key, ROWS, depth, COLUMNS)))))
        relative[depth] = max(found)
    return relative


def fit(narrow: Mapping[int, float] | None, wide: Mapping[int, float] | None) -> Rounding:
    """Fits the rounding of a device to its errors with bfloat16 (`narrow`) and float32 (`wide`) factors; an argument is
    None if the corresponding errors were not measured.

    Elementwise products of bfloat16 factors are exact in float32, so all errors arise in the sums. These errors
    determine kappa: the largest value that keeps each error within half of its bound, or infinity if the sums do not
    need the term with kappa. If errors with float32 factors are larger, the factors are rounded.
    """
    sums = narrow or wide
    assert sums is not None, "something was measured"
    kappa, inputs = math.inf, 0.0
    # If the shortest sums have such large errors, their factors must be rounded.
    if not (narrow is None and sums[min(sums)] > 2.0**-16):
        excesses = {k: error / (HALF * 2.0**-24) - SPREAD * math.sqrt(k + COLUMNS) for k, error in sums.items()}
        kappa = min((depth / excess for depth, excess in excesses.items() if excess > 0), default=math.inf)
    if wide is not None:
        units = Units(2.0**-24, 0.0, 0.0, 0.0, kappa)
        left = max(relative - HALF * units.relative(depth, COLUMNS) for depth, relative in wide.items())
        if left > 0:
            inputs = 2.0 ** math.ceil(math.log2(left / (HALF * SIGMAS)))
    return Rounding(kappa, inputs)


def begin_with_second(examined: Mapping[str, int], checked: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the sites at which the first tier passes so many rows to the second tier that starting with the second
    tier is cheaper."""
    return tuple(name for name, count in examined.items() if checked[name] and count / checked[name] > SHARE)


class CalibrationError(RuntimeError):
    """The errors of a device are too large to be rounding errors."""


def calibrate(study: Calibration, config: TrainConfig, dataset: Dataset) -> Generator[str, None, Profile]:
    """Measures the first device of this host."""
    errors: dict[str, dict[int, float]] = {}
    for dtype in study.dtypes:
        errors[dtype] = measure(dtype, seed=study.seed)
        yield f"{dtype}, sums"
    try:
        rounding = fit(errors.get("bfloat16"), errors.get("float32"))
    except ValueError as error:
        raise CalibrationError(
            f"the errors of synthetic matrix products are too large to be rounding errors ({error}), so this device "
            "may compute wrong numbers, and no profile was written; compare this device with another one"
        ) from error
    profile = Profile(rounding, measured_on=hardware())
    checked, examined, flagged = Counter[str](), Counter[str](), Counter[str]()
    margin = first_margin = 0.0
    for dtype in study.dtypes:
        checked_step = functools.partial(sdc.abft, profile=profile)
        trained = reference_steps(config, dataset, dtype, checked_step, steps=study.steps, seed=study.seed)
        for flags, _, _ in trained:
            for name, flag in jax.device_get(flags).items():
                checked[name] += int(np.sum(flag.checked))
                examined[name] += int(np.sum(flag.examined))
                flagged[name] += int(np.sum(flag.flagged))
                margin = max(margin, float(np.max(flag.margin)))
                first_margin = max(first_margin, float(np.max(flag.first_margin)))
        yield f"{dtype}, {config.name}"
    if flagged.total():
        raise CalibrationError(
            f"{flagged.total():,} of {checked.total():,} rows of real matrix products exceed the thresholds derived "
            "from synthetic matrix products, so this device may compute wrong numbers, and no profile was written; "
            "compare this device with another one"
        )
    kernel = time_both()
    yield "fused kernel"
    return msgspec.structs.replace(
        profile,
        second_tier=begin_with_second(examined, checked),
        fused=kernel is not None and kernel["fused"] < kernel["separate"],
        measurements={
            "largest_error": {
                dtype: {str(depth): error for depth, error in found.items()} for dtype, found in errors.items()
            },
            "config": config.name,
            "steps": study.steps,
            "checked": checked.total(),
            "examined": examined.total(),
            "flagged": flagged.total(),
            "largest_margin": margin,
            "largest_first_margin": first_margin,
            "kernel_seconds": kernel,
        },
    )


# Magnitudes of the injected errors, in units of the root mean square of the row: 1e-5 to 1e3.
MAGNITUDES = tuple(float(10.0 ** (x / 2)) for x in range(-10, 7))


def flagged(
    product: Dot, settings: Settings, operands: Operands, expected: Expected | None = None
) -> Bool[Array, "*rows"]:
    """Returns a mask of the rows that the last tier of a scheme flags; `expected` is the checksum expected by that
    tier, if known."""
    if expected is None:
        expected = expect(product, settings, operands, 2)
    return ~(row_margins(product, settings, operands, expected) <= 1)


def one_per_row(
    key: PRNGKeyArray, product: Dot, c: Shaped[Array, "*c"], change: Callable[[Any, Any], Any]
) -> tuple[Shaped[Array, "*c"], Bool[Array, "rows"]]:
    """Changes one random element of each row. Rows are checked individually, so each row is an independent experiment.

    `change` maps the elements and the root mean squares of their rows to new elements. Returns the changed matrix
    product, and a mask of the rows that changed.
    """
    rows = product.matrix(c)
    columns = jax.random.randint(key, rows.shape[:1], 0, rows.shape[1])
    at = jnp.arange(rows.shape[0]), columns
    rms = jnp.sqrt(jnp.mean(jnp.square(rows.astype(jnp.float32)), axis=1))
    old = rows[at]
    new = change(old, rms)
    return rows.at[at].set(new).reshape(c.shape), as_bits(new) != as_bits(old)


class Found(NamedTuple):
    """Counts of injected errors, and of the errors that each judge (a variant of a scheme) detected."""

    found: Int[Array, "judges n"]  # detected errors by judge and magnitude
    made: Int[Array, "n"]  # injected errors by magnitude
    bits_found: Int[Array, "judges bits"]  # detected bit flips by judge and bit position
    bits_made: Int[Array, "bits"]  # injected bit flips by bit position


def errors_found(
    key: PRNGKeyArray,
    product: Dot,
    c: Shaped[Array, "*c"],
    judges: Sequence[Callable[[Any], Bool[Array, "*rows"]]],
    magnitudes: Float[Array, "n"],
) -> Found:
    """Injects one error into each row of a matrix product, and counts the rows that each judge flags.

    Errors of each magnitude, in units of the root mean square of the row, are added or subtracted; in further trials,
    each bit is flipped. Judges receive the changed matrix product and return a mask of the rows that they flag.
    """
    bits = jax.dtypes.itemsize_bits(c.dtype)
    rows = product.matrix(c)
    # A row of zeros has no scale, and an error that changes nothing does not count.
    alive = jnp.any(rows != 0, axis=1)

    def trial(numbered: tuple[Any, Any]) -> tuple[Any, Any]:
        number, magnitude = numbered
        own = jax.random.fold_in(key, number)
        signs = jax.random.rademacher(own, rows.shape[:1], jnp.float32)

        def change(old: Any, rms: Any) -> Any:
            shifted = (old.astype(jnp.float32) + signs * magnitude * rms).astype(old.dtype)
            one = jnp.ones((), as_bits(old).dtype)
            flipped = as_bits(old) ^ (one << jnp.maximum(number - magnitudes.size, 0).astype(one.dtype))
            return select(jnp.broadcast_to(number < magnitudes.size, old.shape), shifted, from_bits(flipped, old))

        changed, made = one_per_row(own, product, c, change)
        made &= alive
        seen = jnp.stack([judge(changed).reshape(-1) & made for judge in judges])
        return jnp.sum(seen, axis=1, dtype=jnp.int32), jnp.sum(made, dtype=jnp.int32)

    trials = jnp.arange(magnitudes.size + bits), jnp.concatenate([magnitudes, jnp.zeros(bits, magnitudes.dtype)])
    found, made = jax.lax.map(trial, trials)
    last = magnitudes.size
    return Found(found[:last].T, made[:last], found[last:].T, made[last:])


DOTS = primitive("dot_general")
EVERY: tuple[SchemeName, ...] = get_args(SchemeName)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A scheme and the form of the matrix products that it checks."""

    name: str  # name for the record
    output: str  # type of the result that is checked, that of the sums or a narrower one
    scheme: SchemeName  # scheme that checks it

    def operands(self, product: Dot, a: Any, b: Any, sums: Any) -> Operands:
        """Returns the scheme's input: the sums of a matrix product, or their rounded values."""
        if self.output == "float32":
            return Operands(a, b, sums)
        rounded = lax.optimization_barrier(sums.astype(self.output))
        if self.scheme != "residual":
            return Operands(a, b, rounded)
        return Operands(a, b, rounded, rounded_off(product, b, sums, rounded))


def variants(dtype: str) -> list[Variant]:
    """Returns all variants for one data type. A result that is not rounded has no residual, so its variants omit the
    scheme `residual`."""
    sums = [Variant(f"{dtype}, sums", "float32", scheme) for scheme in EVERY if scheme != "residual"]
    if dtype == "float32":
        return [dataclasses.replace(variant, name=dtype) for variant in sums]
    return sums + [Variant(f"{dtype}, rounded", dtype, scheme) for scheme in EVERY]


def experiment(
    study: ProductsStudy, config: TrainConfig, dataset: Dataset, profile: Profile | None
) -> Generator[str, None, ProductsMeasured]:
    """Counts the false alarms of every scheme in healthy training, and the errors that each scheme detects."""
    profile = profile or Profile.assumed()
    counts: dict[str, dict[str, dict[str, Any]]] = {}

    def add(every: Judges, found: Iterable[Mapping[str, Any]]) -> None:
        for (variant, _), values in zip(every, found, strict=True):
            total = counts.setdefault(variant.name, {}).setdefault(variant.scheme, {})
            for key, value in values.items():
                total[key] = total.get(key, 0) + np.asarray(value, np.int64)

    for dtype in study.dtypes:
        every = tuple((one, Settings(scheme=one.scheme, rounding=profile.rounding)) for one in variants(dtype))
        selector, judged = DOTS & as_selector(study.where), _Judged(every)
        capture: Any = None

        def transform(step: Step, selector: Selector = selector, judged: _Judged = judged) -> Step:
            return sdc.rewrite(sdc.checksums.accumulators(step), selector, judged)

        trained = reference_steps(config, dataset, dtype, transform, steps=study.steps, seed=study.seed)
        for step, (reports, program, arguments) in enumerate(trained):
            capture = capture or jax.jit(sdc.rewrite(sdc.checksums.accumulators(program), selector, _Factors()))
            if not reports:
                raise SettingError(
                    "where", study.where, f"selects no matrix product of {config.name}; choose another selector"
                )
            for found in jax.device_get(reports).values():
                add(every, ({"checked": np.sum(checked), "flagged": np.sum(wrong)} for checked, wrong in found))
            yield f"{dtype}, step {step}"
            if step in study.marked:
                _, factors = capture(*arguments)
                key = jax.random.fold_in(jax.random.key(study.seed), step)
                # Use one iteration of every product, with a different layer and microstep for each.
                for number, (site, (a, b)) in enumerate(zip(factors.sites, factors.values(), strict=True)):
                    index = tuple((number + step) % size for size in a.shape[: len(site.dims)])
                    own, product = jax.random.fold_in(key, number), judged.products[site.name]
                    add(every, _errors(own, product, every, a[index], b[index]))
                yield f"{dtype}, errors in step {step}"
    return ProductsMeasured(
        study=study,
        config=dataclasses.asdict(config),
        rounding=profile.rounding,
        departs=tuple(profile.departs()),
        counts={
            variant: {
                scheme: SchemeCounts(**{key: value.tolist() for key, value in found.items()})
                for scheme, found in schemes.items()
            }
            for variant, schemes in counts.items()
        },
        magnitudes=MAGNITUDES,
    )


Judges: TypeAlias = tuple[tuple[Variant, Settings], ...]


def _expected(product: Dot, every: Judges, a: Any, b: Any, c: Any) -> Iterator[tuple[Variant, Settings, Any, Any]]:
    """Yields every variant with its settings, input and expected checksum. Variants of one scheme share the expected
    checksum if their factors are equal."""
    known: dict[str, Expected] = {}
    for variant, settings in every:
        operands = variant.operands(product, a, b, c)
        kind = "two-tier" if variant.scheme == "residual" else variant.scheme
        if kind not in known:
            known[kind] = expect(product, settings, operands, 2)
        yield variant, settings, operands, known[kind]


def _judge(product: Dot, settings: Settings, operands: Operands, expected: Expected, c: Any) -> Any:
    return flagged(product, settings, operands._replace(c=c), expected)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _errors(key: Any, product: Dot, every: Judges, a: Any, b: Any) -> list[dict[str, Any]]:
    a, b = lax.optimization_barrier((a, b))
    c = lax.optimization_barrier(product(a, b))
    judges: dict[str, list[Callable[[Any], Any]]] = {}
    products = {}
    for variant, *given in _expected(product, every, a, b, c):
        judges.setdefault(variant.output, []).append(functools.partial(_judge, product, *given))
        products[variant.output] = given[1].c
    found = {
        output: errors_found(key, product, products[output], judges[output], jnp.asarray(MAGNITUDES, jnp.float32))
        for output in judges
    }
    # Variants with the same output are grouped.
    return [
        {"found": seen, "made": counts.made, "bits_found": bits, "bits_made": counts.bits_made}
        for counts in found.values()
        for seen, bits in zip(counts.found, counts.bits_found, strict=True)
    ]


class _Judged:
    """A rule that checks a matrix product with every variant, and reports the numbers of rows checked and flagged."""

    def __init__(self, every: Judges) -> None:
        self.every = every
        self.products: dict[str, Dot] = {}

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Any]:
        a, b = lax.optimization_barrier(inputs)
        a, b, c = lax.optimization_barrier((a, b, *bind(a, b)))
        product = product_of(place.site.primitive, place.params, a, b)
        assert isinstance(product, Dot)
        self.products[place.site.name] = product
        report = []
        for _, settings, operands, expected in _expected(product, self.every, a, b, c):
            wrong = flagged(product, settings, operands, expected)
            report.append((jnp.uint32(wrong.size), jnp.sum(wrong, dtype=jnp.uint32)))
        return [c], tuple(report)

    def merge(self, total: Any, new: Any) -> Any:
        return jax.tree.map(jnp.add, total, new)


class _Factors:
    """A rule that reports the factors of a matrix product."""

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Any]:
        return bind(*inputs), tuple(inputs)

    def merge(self, total: Any, new: Any) -> Any:
        return new
