"""`sdc bench abft`: what checked products cost, which errors they find, and whether healthy rows are flagged."""

import functools
import itertools
import math
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sdc
from sdc.checksums import (
    Dot,
    Expected,
    Profile,
    SchemeName,
    Settings,
    check,
    expect,
    multiply,
    time_both,
)
from sdc.program import products, scope
from sdc.train import TrainConfig, get_config
from sdc.train.studies import DISTRIBUTIONS, Found, errors_found, flagged

from .command import BenchOptions
from .timing import compiled, ratio, reference_step, take_turns

SHAPES = ((4096, 1024, 1024), (4096, 2048, 2048))
"""Rows, terms and columns of the products that are timed on a CPU."""
LARGE = ((4096, 4096, 4096), (8192, 8192, 8192))
"""The same on an accelerator."""
LINEAR = products & ~scope("*/mix/*", "*/mix")
BARS = {
    **{f"product_{m}x{k}x{n}": bar for (m, k, n), bar in zip(SHAPES, (1.08, 1.08), strict=True)},
    "step_linear": 1.10,
    "step_every_product": 1.20,
    "false_alarms": 0.0,
}
ALARM_SHAPES = ((4096, 256, 1024), (4096, 1024, 256), (4096, 3000, 16), (512, 4096, 4096), (4096, 4096, 1))
"""Rows, terms and columns of the synthetic products that are looked at for false alarms."""
ROUNDS = 2
"""Draws of each kind of factors in each of these shapes."""
POWER = (1024, 4096)
"""Terms and columns of the products that get errors, one in each of so many rows."""
ROWS = 512
SCHEMES: tuple[SchemeName, ...] = ("two-tier", "blocks", "deterministic", "paper")


def measure(options: BenchOptions) -> dict[str, Any]:
    """Measures each type."""
    config = get_config(options.config or "bench")
    result: dict[str, Any] = {}
    for dtype in options.dtypes:
        steps = _steps(config.of_type(dtype), options.steps)
        result[dtype] = {**_products(dtype, options.steps), **steps, **_alarms(dtype)}
        if dtype == "float32":
            result[dtype] |= _power()
    if (timed := time_both()) is not None:
        result["bfloat16"] |= {f"kernel_{name}_seconds": value for name, value in timed.items()}
    return result


def _products(dtype: str, steps: int) -> dict[str, float]:
    """A checked product against a plain one, and against one that returns its sums in float32."""
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
        seconds = take_turns(compiled(variants, a, b), 2 * steps)
        name = f"product_{m}x{k}x{n}"
        found[f"{name}_seconds"] = statistics.median(seconds["plain"])
        found[name] = ratio(seconds["plain"], seconds["checked"])
        if dtype != "float32":
            found[f"{name}_of_sums"] = ratio(seconds["sums"], seconds["checked"])
            found[f"{name}_as_is"] = ratio(seconds["plain"], seconds["as_is"])
    return found


def _steps(config: TrainConfig, steps: int) -> dict[str, float]:
    """A training step with its linear layers checked, and with every product, against the plain step."""
    step, arguments = reference_step(config)
    variants = {
        "plain": step,
        "sums": sdc.checksums.accumulators(step),
        "linear": sdc.abft(step, LINEAR),
        "every": sdc.abft(step),
    }
    seconds = take_turns(compiled(variants, *arguments), steps)
    found = {
        "step_seconds": statistics.median(seconds["plain"]),
        "step_linear": ratio(seconds["plain"], seconds["linear"]),
        "step_every_product": ratio(seconds["plain"], seconds["every"]),
    }
    if config.model.dtype != "float32":
        found["step_every_product_of_sums"] = ratio(seconds["sums"], seconds["every"])
    return found


def _alarms(dtype: str) -> dict[str, float]:
    """Rows of healthy synthetic products, how many of them are flagged, and the largest margin."""
    product = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))
    rounding = Profile.assumed().rounding
    settings = Settings(rounding=rounding, tier=2)

    @functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
    def look(key: Any, name: str, m: int, k: int, n: int) -> tuple[Any, Any]:
        a, b = (x.astype(dtype) for x in DISTRIBUTIONS[name](key, m, k, n))
        operands = multiply(product, settings, a, b)
        flags = check(product, settings, operands)[1]
        return flags.flagged, flags.margin

    rows, alarms, largest = 0, 0, 0.0
    for number, (name, (m, k, n)) in enumerate(itertools.product(DISTRIBUTIONS, ALARM_SHAPES)):
        for draw in range(ROUNDS):
            key = jax.random.fold_in(jax.random.key(draw), number)
            wrong, margin = look(key, name, m, k, n)
            rows, alarms, largest = rows + m, alarms + int(wrong), max(largest, float(margin))
    return {"synthetic_rows": rows, "false_alarms": alarms, "largest_margin": largest}


def _power() -> dict[str, Any]:
    """The smallest error found, in root mean squares of its row, and the share of random flips found."""
    product = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))
    fine = jnp.asarray([10.0 ** (x / 32) for x in range(-144, 84)])
    result: dict[str, Any] = {}

    @jax.jit
    def look(a: Any, b: Any) -> Found:
        operands = multiply(product, Settings(), a, b)
        every = [Settings(scheme=scheme, rounding=Profile.assumed().rounding) for scheme in SCHEMES]
        expected = [expect(product, settings, operands, 2) for settings in every]

        def judge(settings: Settings, expected: Expected, c: Any) -> Any:
            return flagged(product, settings, operands._replace(c=c), expected)

        judges = [functools.partial(judge, *each) for each in zip(every, expected, strict=True)]
        return errors_found(jax.random.key(1), product, operands.c, judges, fine)

    for size in POWER:
        found = jax.device_get(look(*DISTRIBUTIONS["gaussian"](jax.random.key(0), ROWS, size, size)))
        for scheme, seen, bits in zip(SCHEMES, found.found, found.bits_found, strict=True):
            shares, name = seen / np.maximum(found.made, 1), f"{scheme}_{size}"
            result[f"smallest_found_{name}"] = _first(fine, shares > 0)
            result[f"half_found_{name}"] = _first(fine, shares >= 0.5)
            result[f"flips_found_{name}"] = float(bits.sum() / found.bits_made.sum())
            result[f"sign_exponent_flips_found_{name}"] = float(bits[23:].sum() / found.bits_made[23:].sum())
    return result


def _first(values: Any, enough: Any) -> float:
    at = np.flatnonzero(enough)
    return float(values[at[0]]) if at.size else math.inf
