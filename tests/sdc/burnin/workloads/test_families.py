"""Every family runs on every device, repeats itself, and gives what a plain version of it gives."""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from sdc.burnin.examination import compare_outputs
from sdc.burnin.judgement import judge
from sdc.burnin.programs import Programs
from sdc.burnin.rounds import burn_in
from sdc.burnin.workloads.movement import COLLECTIVES
from sdc.burnin.workloads.workload import SMALLEST, BurninWorkload, workloads
from sdc.faults import BitFlip, Fault
from sdc.settings import SettingError

from ..conftest import changed


def outputs_of(programs: Programs, workload: BurninWorkload) -> list[Any]:
    """Outputs on each device."""
    places: list[int | None] = [None] if workload.multi else list(range(len(programs.devices)))
    return [jax.device_get(outcome.outputs) for place in places for outcome in programs.run(workload, place)]


def test_elements_are_those_of_the_outputs(programs: Programs, every: list[BurninWorkload]) -> None:
    for workload in every:
        for outputs in outputs_of(programs, workload):
            assert sum(leaf.size for leaf in jax.tree.leaves(outputs)) == workload.elements, workload.name


def test_products_are_products(programs: Programs, every: list[BurninWorkload]) -> None:
    for workload in (each for each in every if each.family == "matrix" and each.data != "subnormal"):
        a, b = (x.astype(np.float64) for x in programs.host(workload))
        for out in outputs_of(programs, workload):
            assert out.shape == (workload.sizes[0], workload.sizes[2])
            # Sums of up to 32 terms in float32.
            np.testing.assert_allclose(out, a @ b, atol=32 * 2**-24 * (np.abs(a) @ np.abs(b)).max(), rtol=0)


def test_attention_is_attention(programs: Programs, every: list[BurninWorkload]) -> None:
    for workload in (each for each in every if each.family == "attention"):
        q, k, v = (x.astype(np.float64) for x in programs.host(workload))
        length = q.shape[1]
        expected = np.zeros_like(q)
        for head in range(q.shape[0]):
            for t in range(length):
                weights = np.exp(k[head, : t + 1] @ q[head, t] / math.sqrt(q.shape[2]))
                expected[head, t] = weights @ v[head, : t + 1] / weights.sum()
        # Weights are rounded to the type of the data.
        tolerance = {"float32": 1e-5, "bfloat16": 2**-7}[workload.dtype]
        for out in outputs_of(programs, workload):
            np.testing.assert_allclose(out, expected, atol=tolerance * 4)


def test_functions_are_those_of_their_names(programs: Programs, every: list[BurninWorkload]) -> None:
    plain: dict[str, Any] = {
        "exp": np.exp,
        "exp2": np.exp2,
        "expm1": np.expm1,
        "log": lambda x: np.log(np.abs(x) + 0.25),
        "log1p": lambda x: np.log1p(np.abs(x) + 0.25),
        "logistic": lambda x: 1 / (1 + np.exp(-x)),
        "sin": np.sin,
        "cos": np.cos,
        "tan": np.tan,
        "tanh": np.tanh,
        "atan2": lambda x: np.arctan2(x, np.abs(x) + 0.25),
        "sqrt": lambda x: np.sqrt(np.abs(x) + 0.25),
        "rsqrt": lambda x: 1 / np.sqrt(np.abs(x) + 0.25),
        "cbrt": np.cbrt,
        "pow": lambda x: (np.abs(x) + 0.25) ** x,
        "divide": lambda x: x / (np.abs(x) + 0.25),
        "erf": scipy.special.erf,
        "erf_inv": lambda x: scipy.special.erfinv(x / (np.abs(x) + 1)),
        "lgamma": lambda x: scipy.special.gammaln(np.abs(x) + 0.25),
        "digamma": lambda x: scipy.special.digamma(np.abs(x) + 0.25),
    }
    seen = set()
    for workload in (each for each in every if each.family == "functions" and each.dtype == "float32"):
        if workload.data == "normal":
            x = programs.host(workload)[0].astype(np.float64)
            for name, out in outputs_of(programs, workload)[0].items():
                seen.add(name)
                # A few units in the last place, and cancellation near zeros.
                np.testing.assert_allclose(out, plain[name](x), rtol=2e-5, atol=2e-5, err_msg=name)
    assert seen == set(plain)


def test_rounded_reductions(programs: Programs, every: list[BurninWorkload]) -> None:
    for workload in (each for each in every if each.family == "reductions" and each.data == "normal"):
        x = programs.host(workload)[0].astype(np.float64)
        expected = {
            "sum": x.sum(axis=1),
            "columns": x.sum(axis=0),
            "squares": (x * x).sum(axis=1),
            "cumsum": x.cumsum(axis=1),
            "logsumexp": np.log(np.exp(x).sum(axis=1)),
        }
        for out in outputs_of(programs, workload):
            assert out.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(out[name], value, rtol=1e-5, atol=1e-5)


def test_ordering_by_plain_loops(programs: Programs, every: list[BurninWorkload]) -> None:
    (workload,) = (each for each in every if each.family == "ordering")
    keys, at = (x.tolist() for x in programs.host(workload))
    n = len(keys)
    assert len(set(keys)) < n  # some are equal
    scattered = [0] * n
    for key, place in zip(keys, at, strict=True):
        scattered[place % n] += key
    by_size = sorted(range(n), key=lambda i: (-keys[i], i))[:8]
    for out in outputs_of(programs, workload):
        assert out["sort"].tolist() == sorted(keys)
        assert out["argsort"].tolist() == sorted(range(n), key=lambda i: (keys[i], i))
        assert out["gather"].tolist() == [keys[place % n] for place in at]
        assert out["scatter"].tolist() == scattered
        assert out["where"].tolist() == by_size
        assert out["top"].tolist() == [keys[i] for i in by_size]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_by_plain_loops(name: str, programs: Programs, every: list[BurninWorkload]) -> None:
    (workload,) = (each for each in every if each.name.startswith(f"collectives/{name}/"))
    shards = dict(zip(("int32", "float32"), programs.host(workload), strict=True))
    n = len(programs.devices)
    for device, outputs in enumerate(outputs_of(programs, workload)):
        for dtype, x in shards.items():
            total = x[0].copy()
            most = x[0].copy()
            for other in x[1:]:
                total, most = total + other, np.maximum(most, other)
            expected = {
                "psum": total,
                "pmax": most,
                "all_gather": np.stack(list(x)),
                "psum_scatter": total[device],
                "all_to_all": np.stack([x[source, device] for source in range(n)]),
                "ppermute": x[(device - 1) % n],
            }[name]
            assert outputs[dtype].dtype == x.dtype
            np.testing.assert_array_equal(outputs[dtype], expected[None])


@pytest.mark.parametrize(
    "name", ["walking-ones", "walking-zeros", "address", "address-inverted", "random", "retention"]
)
def test_each_memory_pattern_sees_one_bit(name: str, programs: Programs, every: list[BurninWorkload]) -> None:
    (workload,) = (each for each in every if each.name.startswith(f"memory/{name}/"))
    fault = Fault(BitFlip(bits=(13,)), rate=0.02, site=workload.name, at={"device": 1})
    outcome = next(
        found
        for moment in range(100)
        for found in programs.run(workload, 1, faults=[fault], moment=moment)
        if found.simulated == 1
    )
    assert outcome.right is False
    assert outcome.digest != programs.run(workload, 1)[0].digest
    assert programs.run(workload, 1)[0].right is True
    found = compare_outputs(programs.expected(workload, 1), jax.device_get(outcome.outputs))
    assert found.differing == 1
    assert int(found.first[0].old, 16) ^ int(found.first[0].new, 16) == 1 << 13


def test_patterns_say_what_they_are_called(programs: Programs, every: list[BurninWorkload]) -> None:
    words = {
        each.data: outputs_of(programs, each)[0].tolist()
        for each in every
        if each.family == "memory" and "retention" not in each.name
    }
    assert all(word.bit_count() == 1 for word in words["walking-ones"])
    assert all(word.bit_count() == 31 for word in words["walking-zeros"])
    assert words["address"] == list(range(64))
    assert words["address-inverted"] == [2**32 - 1 - i for i in range(64)]
    assert len(set(words["random"])) == 64


def test_retention_waits_and_its_wait_is_no_load(devices: list[jax.Device]) -> None:
    level = dataclasses.replace(SMALLEST, retention=60.0)
    workload = next(each for each in workloads(level, devices, only=["memory"]) if "retention" in each.name)
    waits: list[float] = []

    def rest(seconds: float) -> None:
        waits.append(seconds)
        time.sleep(0.2)

    (outcome,) = Programs(devices).run(workload, 2, rest=rest)
    assert waits == [60.0]
    assert outcome.seconds < 0.2
    assert outcome.right


def test_copies_go_by_way_of_the_others(programs: Programs, every: list[BurninWorkload]) -> None:
    both = [each for each in every if each.family == "transfers"]
    assert [each.name.split("/")[1] for each in both] == ["host-device-host", "device-device"]
    for workload in both:
        assert workload.on_host
        for out in outputs_of(programs, workload):
            assert isinstance(out, np.ndarray)
            np.testing.assert_array_equal(out, programs.host(workload)[0] + np.uint32(1))
        fault = Fault(BitFlip(bits=(0,)), rate=1.0, site=workload.name, at={"device": 3})
        (outcome,) = programs.run(workload, 3, faults=[fault])
        assert (outcome.right, outcome.simulated) == (False, 64)


def test_checksums_see_what_goes_wrong_inside_of_a_product(
    devices: list[jax.Device], few: list[BurninWorkload]
) -> None:
    """What corrupts the product before its check is flagged; a program of its own stands for the faulty unit."""
    from sdc import Moment, inject
    from sdc.burnin.workloads.arithmetic import MatrixProduct
    from sdc.program import primitive

    fault = Fault(BitFlip(bits=(30,)), rate=0.1, site=primitive("dot_general"))
    assert isinstance(few[0], MatrixProduct)
    faulty = inject(few[0].run, [fault])

    def run(a: Any, b: Any) -> Any:
        return faulty(Moment(jax.random.key(0), jnp.int32(0)), a, b)[0]

    workload = changed(few[0], run=run, program="faulty")
    (outcome,) = Programs(devices[:1]).run(workload, 0)
    assert outcome.checks.checked == 8
    assert 0 < outcome.checks.confirmed <= outcome.checks.flagged
    found = burn_in([workload], devices[:1], rounds=2).findings
    assert found[0].kinds == ("checksums",)
    assert judge(burn_in([workload], devices[:1], rounds=1)).verdict.acceptance == "FAIL"


def test_half_precision(devices: list[jax.Device]) -> None:
    found = workloads(SMALLEST, devices[:1], ["float16"], only=["matrix", "reductions"])
    chosen = [each for each in found if each.data == "normal" and each.dtype == "float16"]
    assert len(chosen) == 4
    programs = Programs(devices[:1])
    result = burn_in(chosen, devices[:1], rounds=2, programs=programs)
    assert (result.findings, result.unfinished) == ([], [])
    a, b = (x.astype(np.float64) for x in programs.host(chosen[0]))
    np.testing.assert_allclose(outputs_of(programs, chosen[0])[0], a @ b, atol=1e-5)


def test_programs_are_compiled_once(few: list[BurninWorkload], devices: list[jax.Device]) -> None:
    traced: list[str] = []

    def run(x: Any) -> Any:
        traced.append("traced")
        return x + jnp.uint32(1)

    workload = changed(next(each for each in few if each.family == "transfers"), run=run, program="mine")
    programs = Programs(devices)
    for _ in range(2):
        result = burn_in([workload], devices, rounds=3, programs=programs)
        assert result.rounds == 3
    assert traced == ["traced"]
    other = dataclasses.replace(workload, name="other data")
    assert programs.prepare(other, 1).call is programs.prepare(workload, 1).call


def test_impossible_workloads_are_refused(few: list[BurninWorkload]) -> None:
    for change, message in (
        ({"family": "dancing"}, "family=dancing"),
        ({"unit": "stone"}, "unit=stone"),
        ({"elements": 0}, "elements=0"),
        ({"multi": True}, "multi=True"),
        ({"alike": False}, "alike=False"),
    ):
        with pytest.raises(SettingError, match=message):
            dataclasses.replace(few[0], **change)
