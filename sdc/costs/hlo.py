"""A compiled program's text, as far as an estimate needs it: computations, instructions, shapes, and the way through.

Compilers print what they made in the form of XLA's high-level operations, one instruction a line.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from ..program import Tags

_HEAD = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_START = re.compile(r"\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" ?(?P<opcode>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(?P<dtype>pred|bf16|[suf]\d+|c\d+|f8\w+|[su]4)\[(?P<shape>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_METADATA = re.compile(r"kernel_metadata=\{[^}]*\}")
"""What a kernel says of itself, over several lines."""
_WHOLE = re.compile(r"[su](?:32|64)\[\]")
_BELOW = re.compile(r"direction=(LT|LE)\b")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: what it is called in its computation.
        shape: text of the shape of its result.
        opcode: what it does.
        arguments: text between the parentheses behind the opcode.
        line: all of it.
    """

    name: str
    shape: str
    opcode: str
    arguments: str
    line: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions that it takes."""
        return _OPERAND.findall(self.arguments)

    @property
    def label(self) -> str:
        """The operation of the step that it comes from, where the compiler tells; else its own name."""
        found = _NAME.search(self.line)
        return found[1] if found else f"%{re.sub(r'[.][0-9]+$', '', self.name)}"

    @property
    def bytes(self) -> int:
        """Size of its result."""
        return bytes_of(self.shape)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        computations: instructions by computation.
        entry: name of the computation that runs.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    def way(self, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """The instructions of the way that a step takes when nothing is wrong, and how often each runs.

        Loops run as often as the compiler knows, or once. Of this library's own conditionals the first branch runs,
        that of `lax.cond`'s false; of the step's the one that makes most bytes. What is inside of a fusion is not told.
        """
        for one in self.computations[self.entry if name is None else name]:
            yield one, times
            if one.opcode == "while":
                if turns := self.trips(one):
                    yield from self.way(_named(one.line, "body"), times * turns)
            elif one.opcode == "conditional":
                branches = _branches(one.line)
                own = Tags.HIDDEN in one.line
                yield from self.way(branches[0] if own else max(branches, key=self._weight), times)
            elif one.opcode in ("call", "async-start") and (called := _CALLED.search(one.line)):
                yield from self.way(called[1], times)

    def trips(self, loop: Instruction) -> int:
        """How often a loop runs: what the compiler tells, or the constant below which its condition holds; else once.

        What runs only if something is wrong does not run.
        """
        if Tags.RARELY in loop.line:
            return 0
        if found := _TRIPS.search(loop.line):
            return int(found[1])
        condition = self.computations[_named(loop.line, "condition")]
        whole = [*condition, *(inner for one in condition for inner in self.inside(one))]
        constants = {
            one.name: int(one.arguments)
            for one in whole
            if one.opcode == "constant" and _WHOLE.match(one.shape) and one.arguments.isdecimal()
        }
        turns = [1]
        for one in whole:
            if one.opcode == "compare" and (found := _BELOW.search(one.line)):
                # Of 64 bits a TPU compares two halves: the upper one with 0. A fused comparison has constants outside.
                known = [constants[name] for name in one.operands[1:] if name in constants]
                known = known if known or one in condition else list(constants.values())
                turns += [value + (found[1] == "LE") for value in known]
        return max(turns)

    def _weight(self, branch: str) -> int:
        return sum(times * one.bytes for one, times in self.way(branch))

    @functools.cached_property
    def shapes(self) -> dict[str, str]:
        """Shape by name of instruction; names are unique in a compiled program."""
        return {one.name: one.shape for lines in self.computations.values() for one in lines}

    def moved(self, one: Instruction) -> int:
        """Bytes of an instruction's result and of its operands."""
        return one.bytes + sum(bytes_of(self.shapes.get(name, "")) for name in one.operands)

    def inside(self, one: Instruction) -> list[Instruction]:
        """The instructions of a fusion."""
        called = _CALLED.search(one.line) if one.opcode == "fusion" else None
        return self.computations.get(called[1], []) if called else []


def parse_module(text: str) -> Module:
    """Reads a compiled program, as `compiled.as_text()` gives it.

    Raises:
        ValueError: there is no entry in it.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in _METADATA.sub(lambda found: found[0].replace("\n", " "), text).splitlines():
        if current is None:
            if head := _HEAD.match(line):
                current = computations.setdefault(head["name"], [])
                entry = head["name"] if head["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif found := _instruction(line):
            current.append(found)
    if not entry:
        raise ValueError("the compiler's text has no entry; this version of it prints programs in another form")
    return Module(computations, entry)


def sizes_of(shape: str) -> list[int]:
    """Bytes of each array in the text of a shape."""
    return [
        math.ceil(_bits(dtype) * math.prod(int(side) for side in sides.split(",") if side) / 8)
        for dtype, sides in _ARRAY.findall(shape)
    ]


def bytes_of(shape: str) -> int:
    """Bytes of all arrays in the text of a shape."""
    return sum(sizes_of(shape))


def _bits(dtype: str) -> int:
    if dtype == "pred" or dtype.startswith("f8"):
        return 8
    return int(re.sub(r"\D", "", dtype))


def _instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    rest = line[start.end() :]
    shape = rest[: _closing(rest)] if rest.startswith("(") else rest.partition(" ")[0]
    opcode = _OPCODE.match(rest, len(shape))
    if opcode is None:
        return None
    arguments = rest[opcode.end() - 1 :]
    return Instruction(start["name"], shape, opcode["opcode"], arguments[1 : _closing(arguments) - 1], line)


def _closing(text: str) -> int:
    """Index behind the parenthesis that closes the first."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _named(line: str, key: str) -> str:
    found = re.search(rf"{key}=%?([\w.\-]+)", line)
    assert found is not None, line
    return found[1]


def _branches(line: str) -> list[str]:
    if listed := re.search(r"branch_computations=\{([^}]*)\}", line):
        return [part.strip().lstrip("%") for part in listed[1].split(",")]
    return [_named(line, "false_computation"), _named(line, "true_computation")]
