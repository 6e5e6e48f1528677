"""What a compiled program sends between devices, read from its HLO text."""

import dataclasses
import math
import re

KINDS = ("all-reduce", "all-gather", "collective-permute", "reduce-scatter", "all-to-all", "collective-broadcast")
_OPCODE = re.compile(rf" = (?P<shape>.*?) (?P<kind>{'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b(?P<type>[a-z]+\d+\w*|pred)\[(?P<dims>[\d,]*)\]")
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_CALLS = re.compile(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)|called_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: opcode.
        sizes: bytes of each array that it returns on a device (XLA joins several into one instruction).
        conditional: whether it runs only inside a branch of a conditional.
    """

    kind: str
    sizes: tuple[int, ...]
    conditional: bool


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a compiled program, from `jax.stages.Compiled.as_text()`."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            name = header["name"]
            bodies[name] = []
            entry = name if header["entry"] else entry
        elif name:
            bodies[name].append(line)

    always: set[str] = set()
    pending = [entry]
    while pending:
        name = pending.pop()
        if name in always or name not in bodies:
            continue
        always.add(name)
        for line in bodies[name]:
            for one, several in _CALLS.findall(line):
                pending.extend(part.strip(" %") for part in (one or several).split(","))
    return [
        Collective(match["kind"], tuple(_bytes(*array) for array in _ARRAY.findall(match["shape"])), name not in always)
        for name, lines in bodies.items()
        for line in lines
        if (match := _OPCODE.search(line))
    ]


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(dim) for dim in dims.split(",") if dim) * bits // 8
