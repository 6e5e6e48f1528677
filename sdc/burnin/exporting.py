"""What leaves a burn-in for a bundle: outputs that differ, and programs for those who have JAX alone."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from .reproduce import sum_of

SMALL = 2**24
"""Bytes of outputs that are kept whole; of larger ones the differing elements that the report lists."""


def kept_outputs(outputs: tuple[Any, Any] | None) -> tuple[tuple[Any, Any] | None, tuple[str, str] | None]:
    """What a finding keeps of right and wrong outputs: themselves where they are small, and their SHA-256."""
    if outputs is None:
        return None, None
    right, wrong = (list(map(np.asarray, jax.tree.leaves(each))) for each in outputs)
    small = sum(array.nbytes for array in right) <= SMALL
    return (right, wrong) if small else None, (sum_of(right), sum_of(wrong))


def export_flat(traceable: Any, arguments: Sequence[Any]) -> tuple[bytes, int]:
    """A program of plain arrays, as bytes, and how many of its outputs are the workload's; counts of checks follow.

    Args:
        traceable: takes the arguments and returns outputs and counts.
        arguments: placed.
    """
    leaves, structure = jax.tree.flatten(tuple(arguments))

    def flat(*leaves: Any) -> tuple[Any, ...]:
        outputs, counts = traceable(*jax.tree.unflatten(structure, leaves))
        return (*jax.tree.leaves(outputs), *jax.tree.leaves(counts))

    exported = export.export(jax.jit(flat))(*leaves)
    outputs, _ = jax.eval_shape(traceable, *arguments)
    return bytes(exported.serialize()), len(jax.tree.leaves(outputs))
