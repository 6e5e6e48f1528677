"""Kernels in the place of the compiler's own products: like is compared with like.

The compiler's estimate of a product is larger than the instructions that it makes of it (1.1 to 1.3 times on a
v5p), while a kernel is charged by its instructions: a step would seem to get faster by having its products checked. So
a kernel that computes a product is charged with what the compiler estimates of its own product of the same factors, and
with as much more as the kernel's instructions exceed that product's at most.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from sdc.program.marks import KERNEL, PRODUCT

from .hlo import Instruction, Module, parse_module

EXCESS = 1.07
"""The largest ratio of the instructions of the kernel to those of the compiler's own product of 4096 x 4096 x 4096, of
the three forms on v5e, v5p and v6e (0.95 the smallest)."""
_FORM = re.compile(rf'"?{PRODUCT}"?[=:]"?([01])([01])')
_SHAPE = re.compile(r"bf16\[(\d+),(\d+)\]")
_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')
_BYTES = re.compile(r'"bytes_accessed":"(\d+)"')


def replaced_products(module: Module, device: Any) -> Mapping[str, int]:
    """By name of each kernel that computes a product, the cycles that it is charged with at least.

    Args:
        module: the program.
        device: what it is compiled for.
    """
    found = {}
    for one in (one for lines in module.computations.values() for one in lines):
        if one.name.startswith(KERNEL) and (form := _FORM.search(one.line)):
            shapes = [_SHAPE.match(module.shapes.get(name, "")) for name in one.operands[:2]]
            sides = [(int(shape[1]), int(shape[2])) for shape in shapes if shape]
            if len(sides) == 2:  # else a vmapped one, of which nothing is known but its instructions
                found[one.name] = round(EXCESS * _plain(*sides, (int(form[1]), int(form[2])), device))
    return found


def bytes_told(one: Instruction) -> int:
    """Bytes that a kernel says that it moves, more than once what it reads more than once; 0 where it says nothing."""
    found = _BYTES.search(one.line)
    return int(found[1]) if found else 0


@functools.lru_cache(maxsize=256)
def _plain(a: tuple[int, int], b: tuple[int, int], over: tuple[int, int], device: Any) -> int:
    """What the compiler estimates of its own product."""
    where = SingleDeviceSharding(device)
    given = [jax.ShapeDtypeStruct(sides, jnp.bfloat16, sharding=where) for sides in (a, b)]
    dimensions = ((over[0],), (over[1],)), ((), ())

    def product(a: Any, b: Any) -> Any:
        return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)

    module = parse_module(jax.jit(product).lower(*given).compile().as_text() or "")
    return sum(int(found[1]) for one, _ in module.way() if (found := _CYCLES.search(one.line)))
