"""Cycles of a program for a TPU, from the compiler's own estimate of each operation.

The text of a compiled program states `estimated_cycles` for most operations. These estimates are summed along the path
that a step without mismatches takes. Operations without an estimate are charged with a bound. A kernel is charged for
its instructions, but at least for the time to move its inputs and outputs and, if the kernel computes a matrix product,
for the compiler's own product. A collective is charged for the time to send its bytes at a stated bandwidth. Overlap is
not modeled. The sum is meant for comparing programs for the same chips; it does not predict a time.

The compiler's estimate of a matrix product exceeds the number of the product's instructions (1.1 to 1.5 times on a
v5p). For a kernel, only the instructions are known; if these alone were charged, replacing the compiler's products with
checked kernels would seem to speed up a step. A kernel that computes a product is therefore charged with the compiler's
estimate for the compiler's own product of the same factors, multiplied by the ratio of the kernel's instructions to
those of that product. Both the estimate and the instructions of the compiler's product come from a separate process, in
which the compiler dumps all instructions.
"""

import collections
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from sdc.text import NOTHING

from ..program import Tags
from .hlo import Instruction, Module, kind_of
from .targets import Chip, Uncharged, prepare_compilers, schedules

_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
_SPACE = re.compile(r"S\(\d+\)")  # memory space of an array, which does not affect the instructions
_BODY = re.compile(r'"body":"([^"]+)"')
Sides: TypeAlias = tuple[int, int]
Form: TypeAlias = tuple[Sides, Sides, tuple[int, int]]  # shapes of both factors, and the contracted axis of each
_FORM = re.compile(rf'"?{Tags.PRODUCT}"?[=:]"?([01])([01])')
_SHAPE = re.compile(r"bf16\[((?:\d+,)*)(\d+),(\d+)\]")
_BYTES = re.compile(r'"bytes_accessed":"(\d+)"')


class Plain(NamedTuple):
    """The compiler's own matrix product."""

    estimate: int  # cycles of the product as the compiler estimates them
    instructions: int  # number of instructions that the compiler generates for the product

    def charged(self, instructions: int) -> int:
        """Returns the cycles charged for a kernel with this number of instructions, which are at least the cycles of
        the product."""
        return round(self.estimate * max(1.0, instructions / self.instructions))


class Cycles(NamedTuple):
    operations: int  # cycles of operations for which the compiler has estimates
    kernels: int  # cycles charged for custom kernels
    scheduled: int  # number of the custom kernels' instructions
    parts: collections.Counter[str]  # cycles by operation of the step


def cycles_of(
    module: Module, chip: Chip, schedules: Mapping[str, int] = NOTHING, products: Mapping[str, Plain] = NOTHING
) -> Cycles:
    """Returns the total cycles of a program, without its collectives."""
    # Keyed by the kernel's body, since the compiler dumps the instructions of equal kernels only once.
    lines = (one for computation in module.computations.values() for one in computation if _KERNEL in one.line)
    known = {_body(one): schedules[one.name] for one in lines if one.name in schedules}
    operations = kernels = scheduled = 0
    parts: collections.Counter[str] = collections.Counter()
    for one, times in module.way():
        if one.opcode in ("while", "conditional", "call") or kind_of(one):
            continue
        if _KERNEL in one.line:
            if (alone := known.get(_body(one))) is None:
                raise Uncharged(
                    f"the kernel %{one.name} has no estimate, and its instructions were not dumped; call "
                    "prepare_compilers(kernel=None) before anything is compiled"
                )
            # The figure that the kernel states counts repeatedly read data each time.
            said = int(found[1]) if (found := _BYTES.search(one.line)) else 0
            moving = round(max(module.moved(one), said) / chip.bandwidth * chip.clock)
            own = max(products[one.name].charged(alone) if one.name in products else alone, moving)
            kernels, scheduled = kernels + times * own, scheduled + times * alone
        elif found := _CYCLES.search(one.line):
            own = int(found[1])
            operations += times * own
        else:
            continue
        parts[one.label] += times * own
    return Cycles(operations, kernels, scheduled, parts)


def estimated(one: Instruction) -> int:
    """Returns the compiler's estimate of an operation's cycles, or 0 if the compiler gives no estimate."""
    found = _CYCLES.search(one.line)
    return int(found[1]) if found else 0


def _body(one: Instruction) -> str:
    found = _BODY.search(one.line)
    return f"{_SPACE.sub('', one.shape)} {found[1]}" if found else one.name


def replaced_products(module: Module, target: str) -> Mapping[str, Plain]:
    """Returns the compiler's own product for each kernel that computes a matrix product, by the kernel's name."""
    forms = {}
    for one in (one for lines in module.computations.values() for one in lines):
        if one.opcode == "custom-call" and (axes := _FORM.search(one.line)):
            shapes = [_SHAPE.match(module.shapes.get(name, "")) for name in one.operands]
            factors = [shape for shape in shapes if shape][:2]  # under vmap, the shapes have leading axes
            a, b = ((int(factor[2]), int(factor[3])) for factor in factors)
            times = max(math.prod(map(int, re.findall(r"\d+", factor[1]))) for factor in factors)
            forms[one.name] = times, (a, b, (int(axes[1]), int(axes[2])))
    known = _plain(target, tuple(sorted({form for _, form in forms.values()})))
    return {name: Plain(*(times * each for each in known[form])) for name, (times, form) in forms.items()}


@functools.lru_cache(maxsize=256)
def _plain(target: str, forms: Sequence[Form]) -> Mapping[Form, Plain]:
    if not forms:
        return {}
    with tempfile.TemporaryDirectory(prefix="sdc-products-") as folder:
        result = Path(folder) / "result.json"
        run = f"import sys, {__name__} as cycles; cycles.write_products(*sys.argv[1:])"
        words = [sys.executable, "-c", run, str(result), target, json.dumps(forms)]
        ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if ended.returncode or not result.exists():
            last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise Uncharged(f"the compiler of {target} did not report the cost of its own products ({last})")
        found = json.loads(result.read_text(encoding="utf-8"))
    return {form: Plain(*each) for form, each in zip(forms, found, strict=True)}


def write_products(result: str, target: str, forms: str) -> None:
    """Writes the estimates and numbers of instructions of the compiler's own matrix products as JSON, in the process
    that `_plain` starts.

    In this process, the compiler dumps all instructions.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    from ._estimate import estimate

    prepare_compilers(kernel=None)
    found = []
    for *factors, over in json.loads(forms):
        numbers = (((over[0],), (over[1],)), ((), ()))
        product = functools.partial(lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.float32)
        shapes = (jax.ShapeDtypeStruct(tuple(sides), jnp.bfloat16) for sides in factors)
        cost = estimate(product, *shapes, target=target).cost
        # The program contains little besides the matrix product.
        found.append(Plain(int(cost), max(schedules().values())))
    Path(result).write_text(json.dumps(found), encoding="utf-8")
