"""What a compiled program sends between devices, read from its HLO text."""

import dataclasses
import math
import re
from collections.abc import Sequence

from sdc.program.rarely import RARELY
from sdc.targets.groups import groups_of

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
        groups: the devices that talk to one another, by their position in the program's device assignment; empty for
            all with all.
        conditional: whether it runs only inside a branch of a conditional, or in a loop that hardly ever runs.
    """

    kind: str
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    conditional: bool

    def crosses(self, part: Sequence[int]) -> bool:
        """Whether anything passes between devices of different parts, `part[i]` being that of device i."""
        groups = self.groups or (tuple(range(len(part))),)
        return any(len({part[device] for device in group}) > 1 for group in groups)


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
            if RARELY in line and " while(" in line:
                continue
            for one, several in _CALLS.findall(line):
                pending.extend(part.strip(" %") for part in (one or several).split(","))
    return [
        Collective(
            match["kind"],
            tuple(_bytes(*array) for array in _ARRAY.findall(match["shape"])),
            groups_of(line),
            name not in always,
        )
        for name, lines in bodies.items()
        for line in lines
        if (match := _OPCODE.search(line))
    ]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(_numbers(dims)) * bits // 8
