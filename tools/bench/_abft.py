"""`sdc bench abft`: the cost of checked matrix products, the errors that they detect, and their false alarms."""

import functools
import itertools
import math
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sdc
from sdc import checksums
from sdc.program import products, scope
from sdc.train import TrainConfig
from sdc.train.studies import DISTRIBUTIONS, errors_found, flagged

from . import harness
from .command import BenchOptions

SHAPES = ((4096, 1024, 1024), (4096, 2048, 2048))  # rows, terms and columns of the products timed on a CPU
LARGE = ((4096, 4096, 4096), (8192, 8192, 8192))  # those timed on an accelerator
LINEAR = products & ~scope("*/mix/*", "*/mix")
BARS = {
    **{f"product_{m}x{k}x{n}": bar for (m, k, n), bar in zip(SHAPES, (1.08, 1.08), strict=True)},
    "step_linear": 1.10,
    "step_every_product": 1.20,
    "false_alarms": 0.0,
}
# Rows, terms and columns of the synthetic products that are checked for false alarms.
ALARM_SHAPES = ((4096, 256, 1024), (4096, 1024, 256), (4096, 3000, 16), (512, 4096, 4096), (4096, 4096, 1))
ROUNDS = 2  # draws of each distribution of factors in each of these shapes
POWER = (1024, 4096)  # terms and columns of the products with errors, one in each of `ROWS` rows
ROWS = 512
PRODUCT = checksums.Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))
SCHEMES: tuple[checksums.SchemeName, ...] = ("two-tier", "blocks", "deterministic", "paper")


def measure(options: BenchOptions) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for dtype in options.dtypes:
        steps = _steps(harness.config_of(options, dtype), options.steps)
        result[dtype] = {**_products(dtype, options.steps), **steps, **_alarms(dtype)}
        if dtype == "float32":
            result[dtype] |= _power()
    if (timed := checksums.time_both()) is not None:
        result["bfloat16"] |= {f"kernel_{name}_seconds": value for name, value in timed.items()}
    return result


def _products(dtype: str, steps: int) -> dict[str, float]:
    """Returns the times of checked matrix products, relative to plain products and to products that return float32
    sums."""
    found = {}
    for m, k, n in LARGE if jax.default_backend() == "gpu" else SHAPES:
        keys = jax.random.split(jax.random.key(0))
        a, b = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, ((m, k), (k, n)), strict=True))
        variants = {
            "plain": lambda a, b: a @ b,
            "sums": sdc.checksums.accumulators(lambda a, b: a @ b),
            "checked": sdc.abft(lambda a, b: a @ b),
            "as_is": sdc.abft(lambda a, b: a @ b, output="as is"),
        }
        seconds = harness.take_turns(harness.compiled(variants, a, b), 2 * steps)
        name = f"product_{m}x{k}x{n}"
        found[f"{name}_seconds"] = statistics.median(seconds["plain"])
        found[name] = harness.ratio(seconds["plain"], seconds["checked"])
        if dtype != "float32":
            found[f"{name}_of_sums"] = harness.ratio(seconds["sums"], seconds["checked"])
            found[f"{name}_as_is"] = harness.ratio(seconds["plain"], seconds["as_is"])
    return found


def _steps(config: TrainConfig, steps: int) -> dict[str, float]:
    """Returns the times of steps with checked linear layers and with all products checked, relative to a plain step."""
    step, arguments = harness.reference_step(config)
    variants = {
        "plain": step,
        "sums": sdc.checksums.accumulators(step),
        "step_linear": sdc.abft(step, LINEAR),
        "step_every_product": sdc.abft(step),
    }
    seconds = harness.take_turns(harness.compiled(variants, *arguments), steps)
    sums = seconds.pop("sums")
    found = {"step_seconds": statistics.median(seconds["plain"]), **harness.ratios(seconds)}
    if config.model.dtype != "float32":
        found["step_every_product_of_sums"] = harness.ratio(sums, seconds["step_every_product"])
    return found


def _alarms(dtype: str) -> dict[str, float]:
    """Returns the numbers of checked and flagged rows in healthy synthetic products, and the largest margin."""
    settings = checksums.Settings(rounding=checksums.Profile.assumed().rounding, tier=2)

    @functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
    def look(key: Any, name: str, m: int, k: int, n: int) -> tuple[Any, Any]:
        a, b = (x.astype(dtype) for x in DISTRIBUTIONS[name](key, m, k, n))
        flags = checksums.check(PRODUCT, settings, checksums.multiply(PRODUCT, settings, a, b))[1]
        return flags.flagged, flags.margin

    rows, alarms, largest = 0, 0, 0.0
    for number, (name, (m, k, n)) in enumerate(itertools.product(DISTRIBUTIONS, ALARM_SHAPES)):
        for draw in range(ROUNDS):
            key = jax.random.fold_in(jax.random.key(draw), number)
            wrong, margin = look(key, name, m, k, n)
            rows, alarms, largest = rows + m, alarms + int(wrong), max(largest, float(margin))
    return {"synthetic_rows": rows, "false_alarms": alarms, "largest_margin": largest}


def _power() -> dict[str, Any]:
    """Returns the smallest detected error, relative to the root mean square of its row, and the share of bit flips
    detected."""
    fine = jnp.asarray([10.0 ** (x / 32) for x in range(-144, 84)])
    result: dict[str, Any] = {}

    @jax.jit
    def look(a: Any, b: Any) -> Any:
        operands = checksums.multiply(PRODUCT, checksums.Settings(), a, b)
        every = [checksums.Settings(scheme=scheme, rounding=checksums.Profile.assumed().rounding) for scheme in SCHEMES]
        expected = [checksums.expect(PRODUCT, settings, operands, 2) for settings in every]

        def judge(settings: checksums.Settings, expected: checksums.Expected, c: Any) -> Any:
            return flagged(PRODUCT, settings, operands._replace(c=c), expected)

        judges = [functools.partial(judge, *each) for each in zip(every, expected, strict=True)]
        return errors_found(jax.random.key(1), PRODUCT, operands.c, judges, fine)

    for size in POWER:
        found = jax.device_get(look(*DISTRIBUTIONS["gaussian"](jax.random.key(0), ROWS, size, size)))
        for scheme, seen, bits in zip(SCHEMES, found.found, found.bits_found, strict=True):
            shares, name = seen / np.maximum(found.made, 1), f"{scheme}_{size}"
            for figure, enough in (("smallest", shares > 0), ("half", shares >= 0.5)):
                at = np.flatnonzero(enough)
                result[f"{figure}_found_{name}"] = float(fine[at[0]]) if at.size else math.inf
            result[f"flips_found_{name}"] = float(bits.sum() / found.bits_made.sum())
            result[f"sign_exponent_flips_found_{name}"] = float(bits[23:].sum() / found.bits_made[23:].sum())
    return result


BENCHMARKS = {"abft": harness.Benchmark(measure, BARS)}
