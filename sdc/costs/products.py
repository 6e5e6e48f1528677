"""Kernels in the place of the compiler's own products: like is compared with like.

The compiler's estimate of a product is larger than the instructions that it makes of it (1.1 to 1.5 times on a v5p),
while a kernel is known by its instructions alone: a step would seem to get faster by having its products checked. So a
kernel that computes a product is charged with what the compiler estimates of its own product of the same factors, times
the ratio of the kernel's instructions to those of that product. These are written by a process of their own, in which
the compiler writes the instructions of everything.
"""

import functools
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..program import Tags
from .hlo import Instruction, Module
from .schedules import Uncharged

Sides: TypeAlias = tuple[int, int]
Form: TypeAlias = tuple[Sides, Sides, tuple[int, int]]
"""Sides of both factors, and of each the axis that is contracted."""
_FORM = re.compile(rf'"?{Tags.PRODUCT}"?[=:]"?([01])([01])')
_SHAPE = re.compile(r"bf16\[((?:\d+,)*)(\d+),(\d+)\]")
_BYTES = re.compile(r'"bytes_accessed":"(\d+)"')


class Plain(NamedTuple):
    """The compiler's own product.

    Attributes:
        estimate: cycles that the compiler estimates.
        instructions: that it makes of it.
    """

    estimate: int
    instructions: int

    def charged(self, instructions: int) -> int:
        """Cycles of a kernel of so many instructions; no less than of the product."""
        return round(self.estimate * max(1.0, instructions / self.instructions))


def replaced_products(module: Module, target: str) -> Mapping[str, Plain]:
    """By name of each kernel that computes a product, the compiler's own.

    Args:
        module: the program.
        target: name of what it is compiled for.

    Raises:
        Uncharged: the compiler tells nothing of its own product.
    """
    forms = {}
    for one in (one for lines in module.computations.values() for one in lines):
        if one.opcode == "custom-call" and (axes := _FORM.search(one.line)):
            shapes = [_SHAPE.match(module.shapes.get(name, "")) for name in one.operands]
            factors = [shape for shape in shapes if shape][:2]  # vmapped, they have leading axes
            a, b = ((int(factor[2]), int(factor[3])) for factor in factors)
            times = max(math.prod(map(int, re.findall(r"\d+", factor[1]))) for factor in factors)
            forms[one.name] = times, (a, b, (int(axes[1]), int(axes[2])))
    known = _plain(target, tuple(sorted({form for _, form in forms.values()})))
    return {name: Plain(*(times * each for each in known[form])) for name, (times, form) in forms.items()}


def bytes_told(one: Instruction) -> int:
    """Bytes that a kernel says that it moves, more than once what it reads more than once; 0 where it says nothing."""
    found = _BYTES.search(one.line)
    return int(found[1]) if found else 0


@functools.lru_cache(maxsize=256)
def _plain(target: str, forms: Sequence[Form]) -> Mapping[Form, Plain]:
    if not forms:
        return {}
    with tempfile.TemporaryDirectory(prefix="sdc-products-") as folder:
        result = Path(folder) / "result.json"
        words = [sys.executable, "-m", __name__, str(result), target, json.dumps(forms)]
        ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if ended.returncode or not result.exists():
            last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise Uncharged(f"the compiler of {target} tells nothing of its own products ({last})")
        found = json.loads(result.read_text(encoding="utf-8"))
    return {form: Plain(*each) for form, each in zip(forms, found, strict=True)}


def _compiled(target: str, a: Sides, b: Sides, over: tuple[int, int]) -> Plain:
    """One product, in a process that has the compiler write the instructions of everything."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from ._estimate import estimate
    from .schedules import schedules

    def product(a: Any, b: Any) -> Any:
        return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)

    found = estimate(product, *(jax.ShapeDtypeStruct(tuple(sides), jnp.bfloat16) for sides in (a, b)), target=target)
    # Next to it there is but the little that starts and ends a program.
    return Plain(int(found.cost), max(schedules().values()))


if __name__ == "__main__":
    from .compilers import prepare_compilers

    prepare_compilers(kernel=None)
    told = [_compiled(sys.argv[2], *form) for form in json.loads(sys.argv[3])]
    Path(sys.argv[1]).write_text(json.dumps(told), encoding="utf-8")
