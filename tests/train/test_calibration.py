"""What a calibration finds of a device, and what a calibrated check finds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sdc
from sdc.checksums.fused_products import multiply
from sdc.checksums.products import Dot
from sdc.checksums.roundoff import Rounding, Units
from sdc.train.studies.products import (
    DEPTHS,
    DISTRIBUTIONS,
    begin_with_second,
    fit,
    flagged,
    measure,
    one_per_row,
)


def test_calibration_finds_the_arithmetic_of_a_device() -> None:
    """Made-up devices: exact ones, ones that truncate long sums, and ones that round float32 factors."""

    def errors(kappa: float, inputs: float) -> dict[int, float]:
        unit = 2.0**-24
        return {k: unit * (0.8 * np.sqrt(k + 128) + 0.45 * k / kappa) + inputs for k in DEPTHS}

    exact = fit(errors(np.inf, 0), errors(np.inf, 0))
    assert exact == Rounding()
    assert fit(None, errors(np.inf, 0)) == fit(errors(np.inf, 0), None) == Rounding()
    truncating = fit(errors(16, 0), errors(16, 0))
    assert 8 <= truncating.kappa <= 32
    assert truncating.inputs == 0
    tensor_cores = fit(errors(16, 0), errors(16, 0.6 * 2.0**-11))
    assert 8 <= tensor_cores.kappa <= 32
    assert 2.0**-12 <= tensor_cores.inputs <= 2.0**-10
    only_wide = fit(None, errors(16, 0.6 * 2.0**-11))
    assert 2.0**-12 <= only_wide.inputs <= 2.0**-10
    for k, error in errors(16, 0.6 * 2.0**-11).items():
        for found in (tensor_cores, only_wide):
            bound = Units(2.0**-24, found.inputs, 0, 0, found.kappa).relative(k, 128)
            assert error <= 0.6 * bound
    assert begin_with_second({"a": 3, "b": 1}, {"a": 100, "b": 100}) == ("a",)


def test_this_machine_rounds_to_nearest() -> None:
    measured = measure("bfloat16", depths=(64,))
    assert fit(measured, None) == Rounding()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_large_sign_or_exponent_flip_is_found_and_no_healthy_row(dtype: str) -> None:
    """Flips that change an element by 1 % of its row's rms or more, before rounding, on all kinds of factors."""
    product = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))
    settings = sdc.checksums.Settings()

    @jax.jit
    def run(key: Any, a: Any, b: Any) -> Any:
        operands = multiply(product, settings, a, b)

        def trial(bit: Any) -> Any:
            changed, made = one_per_row(
                jax.random.fold_in(key, bit),
                product,
                operands.c,
                lambda old, rms: jnp.where(jnp.abs(flipped(old, bit) - old) >= 0.01 * rms, flipped(old, bit), old),
            )
            seen = flagged(product, settings, operands._replace(c=changed))
            return jnp.sum(made, dtype=jnp.int32), jnp.sum(made & ~seen, dtype=jnp.int32)

        return lax.map(trial, jnp.arange(23, 32, dtype=jnp.uint32)), jnp.sum(flagged(product, settings, operands))

    def flipped(x: Any, bit: Any) -> Any:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ (jnp.uint32(1) << bit), jnp.float32)

    for number, make in enumerate(DISTRIBUTIONS.values()):
        a, b = (x.astype(dtype) for x in make(jax.random.key(number), 512, 1024, 256))
        (made, missed), alarms = run(jax.random.key(number), a, b)
        assert int(made.sum()) > 1000
        assert int(missed.sum()) == int(alarms) == 0
