"""Outputs on the host: their digest as NumPy computes it, and what two of them differ in, element by element."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped, UInt, UInt32

from ..twins import GOLDEN, MIX
from .results import Element, Elements
from .workloads import murmur

BLOCK = 2**20
"""Elements whose digest is computed at a time."""
LISTED = 8
"""Differing elements that are listed one by one."""


def host_digest(tree: Any) -> str:
    """The digest of a pytree of NumPy arrays of 8 to 64 bits, as text: that of `tree_digest`, by other arithmetic."""
    total = np.zeros(2, np.uint32)
    for position, leaf in enumerate(jax.tree.leaves(tree)):
        total += murmur(_digest(np.asarray(leaf)) + np.uint32(position * GOLDEN % 2**32), np.uint32)
    return digest_text(total)


def digest_text(words: UInt32[np.ndarray, "2"]) -> str:
    """A digest as text."""
    return f"{int(words[0]):08x}{int(words[1]):08x}"


def _digest(x: Shaped[np.ndarray, "*shape"]) -> UInt32[np.ndarray, "2"]:
    bits = bits_of(x)
    total = np.zeros(2, np.uint32)
    for start in range(0, bits.size, BLOCK):
        block = bits[start : start + BLOCK]
        at = np.arange(start, start + block.size, dtype=np.uint32)
        wide = bits.dtype.itemsize == 8
        words = [block.astype(np.uint32), (block >> 32).astype(np.uint32)] if wide else [block.astype(np.uint32)]
        for number, word in enumerate(words):
            v = word + at * np.uint32(GOLDEN * len(words) % 2**32) + np.uint32(number * GOLDEN % 2**32)
            p = (v if bits.dtype.itemsize <= 2 else v ^ (v >> np.uint32(16))) * np.uint32(MIX)
            h = p ^ (p >> np.uint32(15))
            total += np.asarray([h.sum(dtype=np.uint32), (h * h).sum(dtype=np.uint32)])
    return total


def bits_of(x: Shaped[np.ndarray, "*shape"]) -> UInt[np.ndarray, "n"]:
    """The bits of the elements, row-major, as unsigned integers of their width."""
    return np.ascontiguousarray(x).reshape(-1).view(f"uint{8 * x.dtype.itemsize}")


def equal_bits(a: Any, b: Any) -> bool:
    """Whether two pytrees of arrays have the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(bits_of(np.asarray(x)), bits_of(np.asarray(y))) for x, y in pairs)


def compare_outputs(expected: Any, found: Any) -> Elements:
    """Compares pytrees of arrays of the same shapes and types element by element."""
    differing, total, nonfinite = 0, 0, 0
    largest, relative = 0.0, 0.0
    first: list[Element] = []
    pairs = zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    for (path, a), b in pairs:
        x, y = np.asarray(a), np.asarray(b)
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(f"{x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}: expected outputs of one program")
        old, new = bits_of(x), bits_of(y)
        (at,) = np.nonzero(old != new)
        differing, total = differing + at.size, total + old.size
        if not at.size:
            continue
        wanted, got = x.reshape(-1)[at], y.reshape(-1)[at]
        digits = 2 * x.dtype.itemsize
        for k in range(min(at.size, LISTED - len(first))):
            first.append(
                Element(
                    output=jax.tree_util.keystr(path), index=int(at[k]), old=f"{int(old[at[k]]):0{digits}x}",
                    new=f"{int(new[at[k]]):0{digits}x}", expected=str(wanted[k]), found=str(got[k]),
                )
            )  # fmt: skip
        with np.errstate(invalid="ignore"):  # a flipped bit may well make a signalling NaN
            right, wrong = wanted.astype(np.float64), got.astype(np.float64)
        finite = np.isfinite(right) & np.isfinite(wrong)
        nonfinite += int((~finite).sum())
        off = np.abs(wrong[finite] - right[finite])
        largest = max(largest, float(off.max(initial=0.0)))
        known = right[finite] != 0
        relative = max(relative, float((off[known] / np.abs(right[finite][known])).max(initial=0.0)))
    return Elements(
        differing=differing, total=total, first=tuple(first), largest=largest, relative=relative, nonfinite=nonfinite
    )
