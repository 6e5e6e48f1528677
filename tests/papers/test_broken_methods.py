"""The claims of the studies hold for a method, and fail for the same method broken on purpose."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from sdc.aggregation import combine, lossy_zero2, select_threshold, shadow
from sdc.analysis.studies import findings_of
from sdc.train.studies import DropComputeStudy, LossyStudy, PaftStudy, ShadowStudy, Study, Task, linear, study
from sdc.train.studies.settings import KINDS, NOISES

POINTS = linear(features=64)
HELD_OUT = next(POINTS.data(1024, 9))
TEXT = dataclasses.replace(
    POINTS,
    rows=8,
    metric="perplexity",
    score=lambda params: jnp.exp(POINTS.loss(params, HELD_OUT)),
    optimizer=lambda steps: optax.sgd(0.4),
)
SETTINGS: Mapping[str, tuple[Study[Any], Task]] = {
    "paft": (PaftStudy(steps=60, seeds=5, variances=(0.01, 0.3), periods=(4,), bursts=()), POINTS),
    "lossy": (
        LossyStudy(
            steps=60, seeds=5, rates=(0.0, 0.2, 0.4), walk_rates=(0.4,), stale_rates=(), packet_rates=(),
            burst_rates=(), mended_rates=(),
        ),
        TEXT,
    ),
    "dropcompute": (
        DropComputeStudy(
            steps=400, seeds=3, workers=2, fleets=(4, 64), threads=(2,), iterations=20, drops=(0.1,), unit=0.002,
            local_periods=(1, 4),
        ),
        linear(noise=0.1),
    ),
    "shadow": (
        ShadowStudy(
            steps=12, seeds=3, rate=0.5, kinds=tuple(one for one in KINDS if one.name in ("healthy", "always wrong"))
        ),
        POINTS,
    ),
}  # fmt: skip


class Unaveraged(NamedTuple):
    state: Any
    synchronizations: Any


def never_averaged(optimizer: Any, *_: Any, **__: Any) -> optax.GradientTransformationExtraArgs:
    whole = optax.with_extra_args_support(optimizer)

    def update(gradient: Any, state: Unaveraged, params: Any = None, **more: Any) -> tuple[Any, Unaveraged]:
        updates, inner = whole.update(gradient, state.state, params, **more)
        return updates, Unaveraged(inner, state.synchronizations)

    return optax.GradientTransformationExtraArgs(lambda params: Unaveraged(whole.init(params), jnp.int32(0)), update)


def no_packet_lost(optimizer: Any, axis: str, *_: Any, seed: Any = 0, **__: Any) -> optax.GradientTransformation:
    return lossy_zero2(optimizer, axis, 0.0, 0.0, seed=seed)


def badly_normalized(optimizer: Any, axis: str, p_grad: Any, p_param: Any, **settings: Any) -> Any:
    return lossy_zero2(optax.chain(optimizer, optax.scale(1 - 4 * p_grad)), axis, p_grad, p_param, **settings)


def no_threshold(*given: Any) -> Any:
    return select_threshold(*given)._replace(threshold=math.inf, drop_rate=0.0, speedup=1.3)


def lost_if_dropped(total: Any, axis: str, completed: Any, micro_batches: int, **settings: Any) -> Any:
    found = combine(total, axis, completed, micro_batches, **settings)
    whole = lax.pmin(completed, axis) == micro_batches
    return found._replace(gradient=jax.tree.map(lambda leaf: jnp.where(whole, leaf, 0), found.gradient))


def reversed_if_dropped(total: Any, axis: str, completed: Any, micro_batches: int, **settings: Any) -> Any:
    found = combine(total, axis, completed, micro_batches, **settings)
    sign = jnp.where(lax.pmin(completed, axis) == micro_batches, 1, -10)
    return found._replace(gradient=jax.tree.map(lambda leaf: sign * leaf, found.gradient))


def never_stopped(latencies: Any, rate: float) -> float:
    return math.inf


def blind(*given: Any, **settings: Any) -> Callable[..., Any]:
    watched = shadow(*given, **settings)

    def run(*arguments: Any) -> Any:
        mean, roles, report = watched(*arguments)
        return mean, roles, report._replace(differed=jnp.zeros_like(report.differed))

    return run


QUIET = {
    name: (base, "exponential(mean=0.02)" if base else NOISES["13a, 14a"][1]) for name, (base, _) in NOISES.items()
}
BROKEN: Mapping[str, tuple[str, Mapping[str, Any], int]] = {
    "PAFT never averages": ("paft", {"_paft.paft": never_averaged, "_paft.paft_sync": never_averaged}, 2),
    "no packet is lost": ("lossy", {"lossy.lossy_zero2": no_packet_lost}, 2),
    "wrong normalization": ("lossy", {"lossy.lossy_zero2": badly_normalized}, 1),
    "a dropped micro-batch takes the step with it": (
        "dropcompute",
        {"dropcompute.select_threshold": no_threshold, "dropcompute.combine": lost_if_dropped},
        3,
    ),
    "a dropped share reverses the step": ("dropcompute", {"dropcompute.combine": reversed_if_dropped}, 2),
    "no threshold stops local SGD": ("dropcompute", {"dropcompute.threshold_at": never_stopped}, 2),
    "delays are a tenth, except normal ones": ("dropcompute", {"dropcompute.NOISES": QUIET}, 1),
    "the shadow is blind": ("shadow", {"_shadow.shadow": blind}, 1),
}


def claims(name: str) -> dict[str, str]:
    """Returns the claims of a study that do not hold, and what the study measured."""
    chosen, task = SETTINGS[name]
    found = findings_of(study(chosen, [task])).checks
    assert found
    disturbed = "the measured speedup agrees with the predicted one (once)"  # by other programs
    return {check.claim: check.seen for check in found if not check.holds and check.claim != disturbed}


@pytest.mark.parametrize("name", SETTINGS)
def test_all_claims_hold_for_the_method(name: str) -> None:
    assert not claims(name)


@pytest.mark.parametrize("how", BROKEN)
def test_claims_fail_for_a_broken_method(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, replaced, failures = BROKEN[how]
    for place, broken in replaced.items():
        monkeypatch.setattr(f"sdc.train.studies.{place}", broken)
    assert len(found := claims(name)) == failures, found
