"""Digests by NumPy are those of the devices, and comparisons name the elements that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.burnin.examination import compare_outputs
from sdc.burnin.programs import digest_text, equal_bits, host_digest
from sdc.twins import tree_digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_the_digest_is_that_of_the_device(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdc.burnin.programs.BLOCK", 11)
    x = np.random.default_rng(0).normal(size=(3, 17)).astype(jnp.dtype(dtype))
    tree = {"b": x, "a": (x[1], np.float32(3))}
    assert host_digest(tree) == digest_text(np.asarray(jax.jit(tree_digest)(tree)))
    changed = x.copy()
    changed[2, 5] = 1 - changed[2, 5] if dtype != "bool" else ~changed[2, 5]
    assert host_digest({**tree, "b": changed}) != host_digest(tree)


def test_elements_that_differ_are_named() -> None:
    old = {"x": np.float32([1, 2, 0, np.nan, 5]), "y": np.int32([[7, 8]])}
    new = {"x": np.float32([1, 2.5, 4, 1, 5]), "y": np.int32([[7, 8 ^ 4]])}
    found = compare_outputs(old, new)
    assert (found.differing, found.total, found.nonfinite) == (4, 7, 1)
    assert [(e.output, e.index) for e in found.first] == [("['x']", 1), ("['x']", 2), ("['x']", 3), ("['y']", 1)]
    assert (found.first[0].old, found.first[0].new) == ("40000000", "40200000")
    assert (found.first[3].old, found.first[3].new, found.first[3].expected) == ("00000008", "0000000c", "8")
    assert (found.largest, found.relative) == (4.0, 0.5)
    assert not equal_bits(old, new)


def test_bits_count_and_not_values() -> None:
    zeros, minus = np.float32([0.0]), np.float32([-0.0])
    assert compare_outputs(zeros, minus).differing == 1
    assert not equal_bits(zeros, minus)
    nan = np.float32([np.nan])
    assert compare_outputs(nan, nan).differing == 0
    assert equal_bits(nan, nan)


def test_the_first_ones_are_listed() -> None:
    found = compare_outputs(np.zeros(100, np.uint32), np.ones(100, np.uint32))
    assert (found.differing, len(found.first)) == (100, 8)


def test_outputs_of_two_programs_are_refused() -> None:
    with pytest.raises(ValueError, match="expected outputs of the same program"):
        compare_outputs(np.zeros(3, np.float32), np.zeros(4, np.float32))
