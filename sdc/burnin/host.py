"""Outputs on the host: their digest as NumPy computes it, and what two of them differ in, element by element."""

import dataclasses
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Shaped, UInt, UInt32

from ..twins import GOLDEN, MIX

BLOCK = 2**20
"""Elements whose digest is computed at a time."""
LISTED = 8
"""Differing elements that are told one by one."""
Words: TypeAlias = "UInt32[np.ndarray, 'n']"


def host_digest(tree: Any) -> str:
    """The digest of a pytree of NumPy arrays: what `sdc.twins.tree_digest` gives on a device, by other arithmetic.

    Args:
        tree: real numbers of 8 to 64 bits, or truth values.

    Returns:
        16 hexadecimal digits.

    Example:
        >>> import numpy as np
        >>> from sdc.burnin.host import digest_text, host_digest
        >>> from sdc.twins import tree_digest
        >>> x = np.arange(5, dtype=np.float32)
        >>> host_digest(x) == digest_text(np.asarray(tree_digest(x)))
        True
    """
    total = np.zeros(2, np.uint32)
    for position, leaf in enumerate(jax.tree.leaves(tree)):
        total += _finalized(_digest(np.asarray(leaf)) + np.uint32(position * GOLDEN % 2**32))
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


def _finalized(h: UInt32[np.ndarray, "2"]) -> UInt32[np.ndarray, "2"]:
    """The finalizer of MurmurHash3."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def bits_of(x: Shaped[np.ndarray, "*shape"]) -> UInt[np.ndarray, "n"]:
    """The bits of the elements, row-major, as unsigned integers of their width."""
    return np.ascontiguousarray(x).reshape(-1).view(f"uint{8 * x.dtype.itemsize}")


def equal_bits(a: Any, b: Any) -> bool:
    """Whether two pytrees of arrays have the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(bits_of(np.asarray(x)), bits_of(np.asarray(y))) for x, y in pairs)


@dataclasses.dataclass(frozen=True)
class Element:
    """One element that differs.

    Attributes:
        output: path of the output in the pytree, empty where there is only one.
        index: flat index in it, row-major.
        old, new: bits as they should be and as they are, in hexadecimal digits.
        expected, found: the numbers, as text.
    """

    output: str
    index: int
    old: str
    new: str
    expected: str
    found: str


@dataclasses.dataclass(frozen=True)
class Elements:
    """What outputs differ in.

    Attributes:
        differing: number of elements that differ in any bit.
        total: elements compared.
        first: the first of those that differ.
        largest: largest difference in size, of the elements that are finite in both.
        relative: largest difference relative to the element as it should be, where that is finite and not zero.
        nonfinite: differing elements that are not finite in one of the two.
    """

    differing: int
    total: int
    first: tuple[Element, ...]
    largest: float
    relative: float
    nonfinite: int


def compare_outputs(expected: Any, found: Any) -> Elements:
    """Compares outputs element by element.

    Args:
        expected: a pytree of arrays, as they should be.
        found: the same as they are, of the same shapes and types.

    Raises:
        ValueError: shapes or types differ.

    Example:
        >>> import numpy as np
        >>> from sdc.burnin.host import compare_outputs
        >>> seen = compare_outputs(np.float32([1, 2]), np.float32([1, 3]))
        >>> seen.differing, seen.first[0].old, seen.first[0].new, seen.largest, seen.relative
        (1, '40000000', '40400000', 1.0, 0.5)
    """
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
            texts = f"{int(old[at[k]]):0{digits}x}", f"{int(new[at[k]]):0{digits}x}"
            first.append(Element(jax.tree_util.keystr(path), int(at[k]), *texts, str(wanted[k]), str(got[k])))
        with np.errstate(invalid="ignore"):  # a flipped bit may well make a signalling NaN
            right, wrong = wanted.astype(np.float64), got.astype(np.float64)
        finite = np.isfinite(right) & np.isfinite(wrong)
        nonfinite += int((~finite).sum())
        off = np.abs(wrong[finite] - right[finite])
        largest = max(largest, float(off.max(initial=0.0)))
        known = right[finite] != 0
        relative = max(relative, float((off[known] / np.abs(right[finite][known])).max(initial=0.0)))
    return Elements(differing, total, tuple(first), largest, relative, nonfinite)
