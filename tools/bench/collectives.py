"""What a compiled program sends between devices, read from its HLO text."""

import dataclasses
import re
from collections.abc import Sequence

from sdc.costs import groups_of, kind_of, parse_module, sizes_of
from sdc.program import Tags

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
    module = parse_module(hlo)
    always: set[str] = set()
    pending = [module.entry]
    while pending:
        name = pending.pop()
        if name in always or name not in module.computations:
            continue
        always.add(name)
        for one in module.computations[name]:
            if one.opcode == "while" and Tags.RARELY in one.line:
                continue
            for called, several in _CALLS.findall(one.line):
                pending.extend(part.strip(" %") for part in (called or several).split(","))
    return [
        Collective(kind, tuple(sizes_of(one.shape)), groups_of(one.line), name not in always)
        for name, lines in module.computations.items()
        for one in lines
        if (kind := kind_of(one))
    ]
