"""Ratios by the compilers' estimate. A copy or a relayout of the tensors that a tool touches raises them far above."""

import pytest

from sdc.tools.bench._targets import BARS, digest_costs, step_costs

pytestmark = pytest.mark.targets

REACHED = {
    ("v5p:2x2x1", "bfloat16"): {"lockstep": 1.39, "fingerprint_products": 1.55, "inject": 1.26},
    ("v5p:2x2x1", "float32"): {"lockstep": 1.18},
    ("v5e:2x2", "bfloat16"): {"lockstep": 1.6},
    ("h100x2", "bfloat16"): {"lockstep": 1.36, "fingerprint_products": 1.1, "inject": 1.2},
}
"""Where a bar is not reached: what is, and two or three hundredths more."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["v5p:2x2x1", "v5e:2x2"])
def test_a_digest_is_one_read(target: str, dtype: str) -> None:
    found = digest_costs(target, dtype)
    assert found["digest"] <= BARS["digest"]
    assert found["digest_temporary_mib"] <= BARS["digest_temporary_mib"]


@pytest.mark.parametrize(("target", "dtype"), REACHED, ids=str)
def test_tools_around_a_step(target: str, dtype: str) -> None:
    most = REACHED[target, dtype]
    found = step_costs(target, dtype, list(most))
    assert {name: ratio for name, ratio in found.items() if ratio > most.get(name, ratio)} == {}
