"""The study of checked products: false alarms, detection by every scheme, and how the devices round."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax

import sdc
from sdc.checksums import (
    MAGNITUDES,
    Dot,
    Expected,
    Measured,
    Operands,
    ProductsMeasured,
    Profile,
    Rounding,
    SchemeName,
    Settings,
    begin_with_second,
    errors_found,
    expect,
    fit,
    flagged,
    hardware,
    make_scheme,
    measure,
    product_of,
    rounded_off,
    time_both,
)
from sdc.program import Place, Reports, Values, as_selector, primitive
from sdc.settings import SettingError

from .. import Dataset, TrainConfig, batches
from ..programs import DType, check, initial_state, place, place_batch, plain, sharded
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
        errors: dict[str, Measured] = {}
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
