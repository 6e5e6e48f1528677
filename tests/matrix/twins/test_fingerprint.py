"""Digests against a NumPy reference, over types, shapes, shardings and transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

from sdc.twins import digest
from tests.sdc.test_bits import random_array


@settings(max_examples=60)
@given(st.sampled_from(["float32", "bfloat16", "int8", "float64"]), st.data())
def test_no_change_in_one_word_is_missed(dtype: str, data: Any) -> None:
    with jax.enable_x64():
        x = random_array(dtype, (64,), data.draw(st.integers(0, 1000)))
        y = x.copy()
        words = y.view(f"u{min(x.itemsize, 4)}")
        words[data.draw(st.integers(0, len(words) - 1))] ^= data.draw(st.integers(1, 2 ** (8 * words.itemsize) - 1))
        before, after = np.asarray(digest(jnp.asarray(x))), np.asarray(digest(jnp.asarray(y)))
    assert before[0] != after[0]  # a bijection of one word: the first half alone tells
