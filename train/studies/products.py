"""The study of checked products: false alarms, detection by every scheme, and how the devices round."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
    EXACT,
    SIGMAS,
    SPREAD,
    Dot,
    Expected,
    Factors,
    Operands,
    Probabilistic,
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
    residual,
    rounded_off,
    row_margins,
    time_both,
)
from sdc.program import Place, Reports, Values, as_selector, primitive
from sdc.settings import SettingError

from .. import Dataset, TrainConfig, batches
from ..programs import DType, check, initial_state, place, place_batch, plain, sharded
from .measurements import ProductsMeasured
from .settings import CalibrationSettings, ProductsSettings

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
    """Trains, and hands over what a transformation of the step reports."""
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


def _gaussian(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    first, second = jax.random.split(key)
    return jax.random.normal(first, (m, k)), jax.random.normal(second, (k, n)) / jnp.sqrt(k)


def _outliers(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    a, b = _gaussian(key, m, k, n)
    return a * jnp.where(jnp.arange(k) % 97 == 5, 60.0, 1.0), b


def _mean(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    a, b = _gaussian(key, m, k, n)
    return a + 2.0, b + 0.5 / jnp.sqrt(k)


def _relu_squared(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    a, b = _gaussian(key, m, k, n)
    return jnp.square(jax.nn.relu(a)), b


def _positive(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    first, second = jax.random.split(key)
    return jax.random.uniform(first, (m, k)), jax.random.uniform(second, (k, n))


def _softmax(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    a, b = _gaussian(key, m, k, n)
    return jax.nn.softmax(3.0 * a, axis=-1), b


def _tiny_heavy_tailed(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    first, second, third = jax.random.split(key, 3)
    a = 1e-6 * jax.random.normal(first, (m, k)) * jnp.exp(2.0 * jax.random.normal(third, (m, k)))
    return a, jax.random.normal(second, (k, n)) * jnp.exp(jax.random.normal(third, (k, 1)))


DISTRIBUTIONS: Mapping[str, Callable[[PRNGKeyArray, int, int, int], tuple[Any, Any]]] = {
    "gaussian": _gaussian,
    "outlier channels": _outliers,
    "non-zero mean": _mean,
    "relu squared": _relu_squared,
    "positive": _positive,
    "softmax times values": _softmax,
    "tiny heavy-tailed gradients": _tiny_heavy_tailed,
}
"""Factors m×k and k×n of seven kinds, as layers have them."""

DEPTHS = (64, 256, 1024, 4096, 16384)
"""Numbers of terms of the sums that are measured."""
ROWS, COLUMNS = 512, 128
HALF = 0.5
"""Share of its bound that the largest measured error may reach."""


@dataclasses.dataclass(frozen=True)
class RoundingErrors:
    """Largest errors of rows of products of one type."""

    dtype: str  # type of the factors
    relative: Mapping[int, float]  # by number of terms k, the largest `|r| / (q + |cs|)`, q the second tier's scale


def measure(dtype: str, *, seed: int = 0, depths: Sequence[int] = DEPTHS) -> RoundingErrors:
    """Measures the rounding errors of products of a type on the default device, over all `DISTRIBUTIONS`.

    Args:
        dtype: type of the factors; sums are returned in float32.
        seed: decides the factors.
        depths: numbers of terms.
    """
    product = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))

    @jax.jit
    def largest(a: Any, b: Any) -> Any:
        a, b, c = multiply(product, Settings(), a, b)[:3]
        units = Units.of(a.dtype, b.dtype, c.dtype, EXACT)
        wide = Factors(a.astype(jnp.float32), b.astype(jnp.float32), c, units)
        scheme = Probabilistic()
        expected = scheme.expect(product, wide, 1)
        ones = jnp.ones(product.width(a, b))
        scale = jnp.sqrt(product.apply(jnp.square(wide.a), product.fold(jnp.square(wide.b), ones, 1)))
        return jnp.max(jnp.abs(residual(scheme, product, wide, expected)) / (scale + jnp.abs(expected.sums)))

    relative = {}
    for depth in depths:
        found = []
        for number, make in enumerate(DISTRIBUTIONS.values()):
            key = jax.random.fold_in(jax.random.key(seed), 1000 * depth + number)
            found.append(float(largest(*(x.astype(dtype) for x in make(key, ROWS, depth, COLUMNS)))))
        relative[depth] = max(found)
    return RoundingErrors(dtype, relative)


def fit(narrow: RoundingErrors | None, wide: RoundingErrors | None) -> Rounding:
    """How a device rounds, from its errors.

    Products of bfloat16 factors are exact in float32, so that their errors are those of the sums: they give kappa. What
    errors of float32 factors exceed that is due to the rounding of the factors.

    Args:
        narrow: measured with bfloat16 factors; None where that was not measured, to take kappa from float32.
        wide: measured with float32 factors; None where that was not measured.
    """
    sums = narrow or wide
    assert sums is not None, "something was measured"
    # Where the shortest sums err so much, it must be their factors that are rounded.
    rounds = narrow is None and sums.relative[min(sums.relative)] > 2.0**-16
    kappa = math.inf if rounds else kappa_of(sums.relative)
    inputs = 0.0
    if wide is not None:
        left = max(
            relative - HALF * Units(2.0**-24, 0.0, 0.0, 0.0, kappa).relative(depth, COLUMNS)
            for depth, relative in wide.relative.items()
        )
        if left > 0:
            inputs = 2.0 ** math.ceil(math.log2(left / (HALF * SIGMAS)))
    return Rounding(kappa, inputs)


def kappa_of(relative: Mapping[int, float]) -> float:
    """The largest kappa that keeps each of the errors of `RoundingErrors` at half of its bound or less.

    It is infinite where sums need no such term.

    Example:
        >>> from sdc.train.studies.products import kappa_of
        >>> kappa_of({64: 1e-8}), kappa_of({1024: 1e-4}) < 1.0
        (inf, True)
    """
    needed = [
        depth / excess
        for depth, largest in relative.items()
        if (excess := largest / (HALF * 2.0**-24) - SPREAD * math.sqrt(depth + COLUMNS)) > 0
    ]
    return min(needed, default=math.inf)


def begin_with_second(
    examined: Mapping[str, int], checked: Mapping[str, int], *, share: float = 0.01
) -> tuple[str, ...]:
    """The sites of which the first tier passes on so many rows that the second one is cheaper from the start.

    Args:
        examined, checked: rows that the first tier passed on, and all rows that it judged, by site.
        share: share of the rows above which it is.
    """
    return tuple(name for name, count in examined.items() if checked[name] and count / checked[name] > share)


class CalibrationError(RuntimeError):
    """A device whose errors are too large to be rounding; one line says what was found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration(CalibrationSettings):
    """Measures how a device rounds.

    Raises:
        SettingError: there is no step or no type.
    """

    def __post_init__(self) -> None:
        self.check()

    def count(self) -> int:
        """How many parts `run` yields."""
        return 1 + 2 * len(self.dtypes)

    def run(self, config: TrainConfig, dataset: Dataset) -> Generator[str, None, Profile]:
        """Measures this machine's first device.

        Args:
            config: whose step is measured; its type is replaced by each of `dtypes`.
            dataset: its text.

        Yields:
            What has just been done.

        Returns:
            The profile, for `sdc.abft(step, profile=...)`.

        Raises:
            CalibrationError: errors are too large to be rounding, or real products are flagged: this device may compute
                wrong numbers.
            ValueError: the configuration or the data set does not fit.
        """
        errors: dict[str, RoundingErrors] = {}
        for dtype in self.dtypes:
            errors[dtype] = measure(dtype, seed=self.seed)
            yield f"{dtype}, sums"
        try:
            rounding = fit(errors.get("bfloat16"), errors.get("float32"))
        except ValueError as error:
            raise CalibrationError(
                f"the errors of synthetic products are too large to be rounding ({error}): this device may compute "
                "wrong numbers. No profile was made; compare with another device"
            ) from error
        profile = Profile(rounding, measured_on=hardware())
        checked, examined, flagged = Counter[str](), Counter[str](), Counter[str]()
        margin = first_margin = 0.0
        for dtype in self.dtypes:
            checked_step = functools.partial(sdc.abft, profile=profile)
            trained = reference_steps(config, dataset, dtype, checked_step, steps=self.steps, seed=self.seed)
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
                f"{flagged.total():,} of {checked.total():,} rows of real products are flagged under the thresholds "
                "that the synthetic products ask for: this device may compute wrong numbers. No profile was made; "
                "compare with another device"
            )
        kernel = time_both()
        yield "fused kernel"
        return msgspec.structs.replace(
            profile,
            second_tier=begin_with_second(examined, checked),
            fused=kernel is not None and kernel["fused"] < kernel["separate"],
            measurements={
                "largest_error": {
                    dtype: {str(depth): error for depth, error in found.relative.items()}
                    for dtype, found in errors.items()
                },
                "config": config.name,
                "steps": self.steps,
                "checked": checked.total(),
                "examined": examined.total(),
                "flagged": flagged.total(),
                "largest_margin": margin,
                "largest_first_margin": first_margin,
                "kernel_seconds": kernel,
            },
        )


MAGNITUDES = tuple(float(10.0 ** (x / 2)) for x in range(-10, 7))
"""Errors, in units of the root mean square of the row, that a study tries: 1e-5 to 1e3."""


def flagged(
    product: Dot, settings: Settings, operands: Operands, expected: Expected | None = None
) -> Bool[Array, "*rows"]:
    """The rows that a scheme finds wrong, in its last tier; `expected` of that tier, where it is known."""
    if expected is None:
        expected = expect(product, settings, operands, 2)
    return ~(row_margins(product, settings, operands, expected) <= 1)


def one_per_row(
    key: PRNGKeyArray, product: Dot, c: Shaped[Array, "*c"], change: Callable[[Any, Any], Any]
) -> tuple[Shaped[Array, "*c"], Bool[Array, "rows"]]:
    """Changes one random element of each row: rows are judged one by one, so each is an experiment of its own.

    Args:
        key: decides the columns.
        product: how `c` was computed.
        c: its result.
        change: told the elements and the root mean squares of their rows; returns what becomes of them.

    Returns:
        The changed product, and which rows did change.
    """
    rows = product.matrix(c)
    columns = jax.random.randint(key, rows.shape[:1], 0, rows.shape[1])
    at = jnp.arange(rows.shape[0]), columns
    rms = jnp.sqrt(jnp.mean(jnp.square(rows.astype(jnp.float32)), axis=1))
    old = rows[at]
    new = change(old, rms)
    return rows.at[at].set(new).reshape(c.shape), as_bits(new) != as_bits(old)


class Found(NamedTuple):
    """Errors that were made, and how many of them each of several judges found."""

    found: Int[Array, "judges n"]  # by judge and magnitude
    made: Int[Array, "n"]  # by magnitude
    bits_found: Int[Array, "judges bits"]  # by judge and number of the flipped bit in the product's type
    bits_made: Int[Array, "bits"]  # by bit


def errors_found(
    key: PRNGKeyArray,
    product: Dot,
    c: Shaped[Array, "*c"],
    judges: Sequence[Callable[[Any], Bool[Array, "*rows"]]],
    magnitudes: Float[Array, "n"],
) -> Found:
    """Puts errors into a product, one in each row, and asks judges which rows are wrong.

    Args:
        key: decides columns and signs.
        product, c: see `one_per_row`.
        judges: told the changed product, they return the rows that they find wrong.
        magnitudes: errors to add or subtract, in root mean squares of their row. Besides, every bit is flipped.
    """
    bits = jax.dtypes.itemsize_bits(c.dtype)
    rows = product.matrix(c)
    # A row of zeros has no scale, and an error that is no change is none.
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
    """What is checked.

    Attributes:
        name: name for the record.
        output: type of the result that is checked, that of the sums or a narrower one.
        scheme: scheme by which it is judged.
    """

    name: str
    output: str
    scheme: SchemeName

    def operands(self, product: Dot, a: Any, b: Any, sums: Any) -> Operands:
        """What the scheme is given of a product: its sums, or what they were rounded to."""
        if self.output == "float32":
            return Operands(a, b, sums)
        rounded = lax.optimization_barrier(sums.astype(self.output))
        if self.scheme != "residual":
            return Operands(a, b, rounded)
        scheme = make_scheme(self.scheme, a.dtype, b.dtype)
        return Operands(a, b, rounded, rounded_off(product, scheme, (a, b), sums, rounded))


def variants(dtype: str) -> list[Variant]:
    """Everything that is studied for one type; without rounding there is no residual to carry."""
    sums = [Variant(f"{dtype}, sums", "float32", scheme) for scheme in EVERY if scheme != "residual"]
    if dtype == "float32":
        return [dataclasses.replace(variant, name=dtype) for variant in sums]
    return sums + [Variant(f"{dtype}, rounded", dtype, scheme) for scheme in EVERY]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsStudy(ProductsSettings):
    """What each scheme of checking finds and what it flags by mistake, on the products of real training.

    Raises:
        SettingError: there is no step or no type, or `where` is no selector.
    """

    def __post_init__(self) -> None:
        self.check()

    @property
    def marked(self) -> tuple[int, ...]:
        """The steps whose products get errors: the first and the last."""
        return tuple(sorted({0, self.steps - 1}))

    def count(self) -> int:
        """How many parts `run` yields."""
        return (self.steps + len(self.marked)) * len(self.dtypes)

    def run(
        self, config: TrainConfig, dataset: Dataset, profile: Profile | None = None
    ) -> Generator[str, None, ProductsMeasured]:
        """Runs the study, on this machine's first device.

        Args:
            config: what is trained; its type is replaced by each of `dtypes`.
            dataset: its text.
            profile: profile of the device, for thresholds; by default what is assumed of the platform.

        Yields:
            What has just been done.

        Returns:
            Counts by variant and scheme; `sdc.analysis.studies.write_products_study` makes a report of them.

        Raises:
            SettingError: `where` selects no product.
            ValueError: the configuration or the data set does not fit.
        """
        profile = profile or Profile.assumed()
        counts: dict[str, dict[str, dict[str, Any]]] = {}
        for dtype in self.dtypes:
            for done, found in self._of_type(config, dataset, dtype, profile.rounding):
                for variant, values in found:
                    total = counts.setdefault(variant.name, {}).setdefault(variant.scheme, {})
                    for key, value in values.items():
                        total[key] = total.get(key, 0) + np.asarray(value, np.int64)
                yield done
        return ProductsMeasured(
            config=dataclasses.asdict(config),
            steps=self.steps,
            seed=self.seed,
            where=self.where,
            marked=self.marked,
            rounding=profile.rounding,
            departs=tuple(profile.departs()),
            counts=counts,
            magnitudes=MAGNITUDES,
        )

    def _of_type(
        self, config: TrainConfig, dataset: Dataset, dtype: DType, rounding: Rounding
    ) -> Iterator[tuple[str, list[tuple[Variant, Mapping[str, Any]]]]]:
        """What was done, and counts of it."""
        every = tuple((variant, Settings(scheme=variant.scheme, rounding=rounding)) for variant in variants(dtype))
        selector, judged = DOTS & as_selector(self.where), _Judged(every)

        def transform(step: Callable[..., Any]) -> Callable[..., Any]:
            return sdc.rewrite(sdc.checksums.accumulators(step), selector, judged)

        capture: Any = None
        trained = reference_steps(config, dataset, dtype, transform, steps=self.steps, seed=self.seed)
        for step, (reports, program, arguments) in enumerate(trained):
            capture = capture or jax.jit(sdc.rewrite(sdc.checksums.accumulators(program), selector, _Factors()))
            if not reports:
                raise SettingError("where", self.where, f"this selects no matrix product of {config.name}")
            yield (
                f"{dtype}, step {step}",
                [
                    (variant, {"checked": np.sum(checked), "flagged": np.sum(wrong)})
                    for found in jax.device_get(reports).values()
                    for (variant, _), (checked, wrong) in zip(every, found, strict=True)
                ],
            )
            if step in self.marked:
                _, factors = capture(*arguments)
                key = jax.random.fold_in(jax.random.key(self.seed), step)
                yield (
                    f"{dtype}, errors in step {step}",
                    [
                        (variant, counts)
                        for site, product, a, b in _choose(factors, judged.products, step)
                        for (variant, _), counts in zip(
                            every, _errors(jax.random.fold_in(key, site), product, every, a, b), strict=True
                        )
                    ],
                )


def _choose(factors: Reports, products: Mapping[str, Dot], step: int) -> Iterator[tuple[int, Dot, Any, Any]]:
    """One iteration of every product: another layer and microstep for each."""
    for number, (site, (a, b)) in enumerate(zip(factors.sites, factors.values(), strict=True)):
        index = tuple((number + step) % size for size in a.shape[: len(site.dims)])
        yield number, products[site.name], a[index], b[index]


Judges: TypeAlias = tuple[tuple[Variant, Settings], ...]


def _expected(product: Dot, every: Judges, a: Any, b: Any, c: Any) -> Iterator[tuple[Variant, Settings, Any, Any]]:
    """What every variant is given, and what it expects; variants of one scheme expect the same of the same factors."""
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
    # Variants of one output stand together.
    return [
        {"found": seen, "made": counts.made, "bits_found": bits, "bits_made": counts.bits_made}
        for counts in found.values()
        for seen, bits in zip(counts.found, counts.bits_found, strict=True)
    ]


class _Judged:
    """A rule that judges a product by every variant, and reports rows checked and flagged."""

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
    """A rule that reports the factors of a product."""

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Any]:
        return bind(*inputs), tuple(inputs)

    def merge(self, total: Any, new: Any) -> Any:
        return new
