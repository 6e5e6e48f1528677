"""Parses the text of a compiled program for estimates: instructions and executed paths, collectives and traffic.

Compilers print programs as XLA's high-level operations, one instruction per line.

For each collective, the parser determines the mesh axes, the bytes, and whether the collective crosses hosts or slices.
The compiler's cost model omits collectives. Here, a collective is charged for the bytes that a ring sends, at a stated
bandwidth. For groups of n devices, and a largest array of s bytes on each device, these are (Patarasu and Yuan,
*Bandwidth optimal all-reduce algorithms*, 2009, section 3) 2 (n - 1) / n * s for an all-reduce, (n - 1) / n * s for an
all-gather, a reduce-scatter and an all-to-all, and s for a permutation. A stated latency is added for each collective.

For GPUs, whose compiler estimates no cycles, a roofline is computed from the traffic: the kernels of a program, and the
bytes that they move. Each kernel reads its operands and writes its results at least once. Matrix products are also
charged for these bytes, but not for their arithmetic, so the ratio between two programs with the same products shows
the cost of the operations around these products.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..program import Tags
from ..schema import Collective
from .targets import Chip

_HEAD = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_START = re.compile(r"\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" ?(?P<opcode>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(?P<dtype>pred|bf16|[suf]\d+|c\d+|f8\w+|[su]4)\[(?P<shape>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_METADATA = re.compile(r"kernel_metadata=\{[^}]*\}")  # metadata of a kernel, over several lines
_WHOLE = re.compile(r"[su](?:32|64)\[\]")
_BELOW = re.compile(r"direction=(LT|LE)\b")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(?:\{(?P<lists>(?:\{[\d,]*\},?)*)\}"
    r"|(?P<other>[^\]]*\]\S*(?: device_ids=\(\S*\))?(?: \{[^}]*\})?))"
)
_IOTA = re.compile(r"\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_MESH = re.compile(r"mesh\[(?P<mesh>[^\]]*)\],?\s*(?:device_ids=\((?P<devices>\S*)\)\s*)?\{(?P<axes>[^}]*)\}")
_DEVICES = re.compile(r"\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?$")
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_BODIES = re.compile(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)|called_computations=\{([^}]*)\}")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
# Opcodes that launch no kernel.
FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
     "partition-id", "replica-id", "optimization-barrier", "async-start", "async-done", "async-update")
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str  # text of the result's shape
    opcode: str
    arguments: str  # text between the parentheses after the opcode
    line: str  # the whole line

    @property
    def operands(self) -> list[str]:
        return _OPERAND.findall(self.arguments)

    @property
    def label(self) -> str:
        """Operation of the step to which the instruction belongs, if the compiler states it; otherwise the
        instruction's name."""
        found = _NAME.search(self.line)
        return found[1] if found else f"%{re.sub(r'[.][0-9]+$', '', self.name)}"

    @property
    def bytes(self) -> int:
        return bytes_of(self.shape)


@dataclasses.dataclass(frozen=True)
class Module:
    computations: dict[str, list[Instruction]]  # instructions by computation
    entry: str  # name of the computation with which the program starts

    def way(self, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yields the instructions on the path of a step without mismatches, each with the number of times that it runs.

        A loop is assumed to run as often as the compiler states, or once if the compiler states nothing. This library's
        own conditionals take the first branch, which is the false branch of `lax.cond`; conditionals of the step take
        the branch that produces the most bytes. Instructions inside a fusion are omitted.
        """
        for one in self.computations[self.entry if name is None else name]:
            yield one, times
            if one.opcode == "while":
                if turns := self.trips(one):
                    yield from self.way(_named(one.line, "body"), times * turns)
            elif one.opcode == "conditional":
                if listed := re.search(r"branch_computations=\{([^}]*)\}", one.line):
                    branches = [part.strip().lstrip("%") for part in listed[1].split(",")]
                else:
                    branches = [_named(one.line, "false_computation"), _named(one.line, "true_computation")]
                own = Tags.HIDDEN in one.line
                yield from self.way(branches[0] if own else max(branches, key=self._weight), times)
            elif one.opcode in ("call", "async-start") and (called := _CALLED.search(one.line)):
                yield from self.way(called[1], times)

    def trips(self, loop: Instruction) -> int:
        """Returns the trip count of a loop: the compiler's count, else the constant bound in the condition, else 1.

        Loops that run only after a mismatch have a trip count of 0.
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
                # A TPU compares 64 bits in two halves, the upper half with 0. The constants of a fused comparison are
                # outside the fusion.
                known = [constants[name] for name in one.operands[1:] if name in constants]
                known = known if known or one in condition else list(constants.values())
                turns += [value + (found[1] == "LE") for value in known]
        return max(turns)

    def _weight(self, branch: str) -> int:
        return sum(times * one.bytes for one, times in self.way(branch))

    @functools.cached_property
    def shapes(self) -> dict[str, str]:
        """Shapes of results by instruction name; names are unique in a compiled program."""
        return {one.name: one.shape for lines in self.computations.values() for one in lines}

    def read(self, one: Instruction) -> int:
        return sum(bytes_of(self.shapes.get(name, "")) for name in one.operands)

    def moved(self, one: Instruction) -> int:
        """Returns the bytes of an instruction's result and operands."""
        return one.bytes + self.read(one)

    def inside(self, one: Instruction) -> list[Instruction]:
        """Returns the instructions inside a fusion."""
        called = _CALLED.search(one.line) if one.opcode == "fusion" else None
        return self.computations.get(called[1], []) if called else []


def parse_module(text: str) -> Module:
    """Parses a compiled program, as returned by `compiled.as_text()`."""
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
        raise ValueError(
            "the compiler's text has no ENTRY computation; this version of the compiler uses another format"
        )
    return Module(computations, entry)


def sizes_of(shape: str) -> list[int]:
    """Returns the size in bytes of each array in the text of a shape."""
    found = []
    for dtype, sides in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" or dtype.startswith("f8") else int(re.sub(r"\D", "", dtype))
        found.append(math.ceil(bits * math.prod(_numbers(sides)) / 8))
    return found


def bytes_of(shape: str) -> int:
    return sum(sizes_of(shape))


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
    """Returns the index after the parenthesis that closes the first opening parenthesis."""
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


def groups_of(line: str) -> tuple[tuple[int, ...], ...]:
    """Returns groups of communicating devices, by position in the device assignment; an empty result means that all
    devices form one group."""
    match = _GROUPS.search(line)
    if match is None:
        return ()
    if match["lists"] is not None:
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match["lists"]))
    if mesh := _MESH.match(match["other"]):  # XLA of jax 0.12
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh["mesh"])}
        talking = re.findall(r"'([^']+)'", mesh["axes"])
        order = [*(axis for axis in sizes if axis not in talking), *talking]
        devices = np.arange(math.prod(sizes.values()))
        if (order_of := _DEVICES.match(mesh["devices"] or "")) is not None:
            devices = _iota(order_of["dims"], order_of["order"])
        elif mesh["devices"]:
            devices = np.asarray(_numbers(mesh["devices"]))
        grid = devices.reshape(tuple(sizes.values()))
        grid = grid.transpose([list(sizes).index(axis) for axis in order])
        return tuple(tuple(group) for group in grid.reshape(-1, math.prod(sizes[a] for a in talking)).tolist())
    iota = _IOTA.match(match["other"])
    if iota is None:
        raise ValueError(f"cannot parse the replica groups of {line.strip()[:200]!r}")
    devices = _iota(iota["dims"], iota["order"])
    return tuple(tuple(group) for group in devices.reshape(_numbers(iota["shape"])).tolist())


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Returns consecutive numbers in these dimensions, transposed if an order is given."""
    numbers = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return numbers.transpose(_numbers(order)) if order else numbers


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


@dataclasses.dataclass
class _Begun:
    """A collective that has started: its duration, and the part of the duration that other work hides."""

    key: tuple[str, str, str, bool]
    seconds: float
    hidden: float = 0.0


def kind_of(one: Instruction) -> str | None:
    """Returns the kind of collective that an instruction performs or starts, or None for other instructions.

    Hosts send data between TPU slices; an attribute of the send identifies the collective to which the send belongs.
    """
    if one.opcode == "send" and (between := _BETWEEN.search(one.line)):
        return between[1].lower().replace("_", "-")
    kind = one.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


class CollectiveCall(NamedTuple):
    """One collective instruction of a program."""

    kind: str  # opcode of the collective
    sizes: tuple[int, ...]  # bytes of each array that it returns on a device; XLA combines several collectives into one
    # Groups of communicating devices, by position in the program's device assignment; empty for one group of all
    groups: tuple[tuple[int, ...], ...]
    conditional: bool  # whether it is inside a branch of a conditional, or in a loop that rarely runs

    def crosses(self, part: Sequence[int]) -> bool:
        """Returns whether devices of different parts communicate, where `part[i]` is the part of device i."""
        groups = self.groups or (tuple(range(len(part))),)
        return any(len({part[device] for device in group}) > 1 for group in groups)


def collective_calls(text: str) -> list[CollectiveCall]:
    """Returns all collectives of a compiled program, from `compiled.as_text()`, whether or not a step executes them."""
    module = parse_module(text)
    always: set[str] = set()
    pending = [module.entry]
    while pending:
        name = pending.pop()
        if name in always or name not in module.computations:
            continue
        always.add(name)
        for one in module.computations[name]:
            if not (one.opcode == "while" and Tags.RARELY in one.line):
                for called, several in _BODIES.findall(one.line):
                    pending.extend(part.strip(" %") for part in (called or several).split(","))
    return [
        CollectiveCall(kind, tuple(sizes_of(one.shape)), groups_of(one.line), name not in always)
        for name, lines in module.computations.items()
        for one in lines
        if (kind := kind_of(one))
    ]


def collectives_of(
    module: Module, chip: Chip, devices: Sequence[Any], mesh: Mapping[str, int], takes: Callable[[Instruction], float]
) -> list[Collective]:
    """Returns the collectives of a program, grouped by kind and axes."""
    found: dict[tuple[str, str, str, bool], tuple[int, float, float]] = {}
    hidden: dict[tuple[str, str, str, bool], float] = collections.defaultdict(float)
    begun: dict[str, _Begun] = {}
    for one, times in module.way():
        if done := next((begun.pop(name) for name in one.operands if name in begun and "-done" in one.opcode), None):
            hidden[done.key] += times * done.hidden
        elif begun and not kind_of(one):
            # The instruction's duration hides collectives that have started, the earliest first and never two at once.
            left = takes(one)
            for other in begun.values():
                used = min(left, other.seconds - other.hidden)
                other.hidden, left = other.hidden + used, left - used
        for each in [one, *module.inside(one)]:
            kind = kind_of(each)
            if kind is None:
                continue
            groups = groups_of(each.line) or (tuple(range(len(devices))),)
            if each.opcode == "send":
                slices: dict[Any, list[int]] = {}
                for number, device in enumerate(devices):
                    slices.setdefault(getattr(device, "slice_index", 0), []).append(number)
                groups = tuple(zip(*slices.values(), strict=True))  # devices at the same position in each slice
            size = max(len(group) for group in groups)
            if size < 2:
                continue
            crosses, far = _crosses(groups, devices, chip)
            # The results of a `-start` operation include the operands.
            held = max(0 if "-start" in each.opcode else each.bytes, module.read(each))
            turns = {"collective-permute": 1, "collective-broadcast": 1, "all-reduce": 2 * (size - 1) / size}
            sent = turns.get(kind, (size - 1) / size) * held
            key = kind, ",".join(_axes(groups, mesh)), crosses, each is one and each.opcode == kind
            count, bytes_, seconds = found.get(key, (0, 0.0, 0.0))
            took = sent / (chip.network if far else chip.link) + chip.latency[far]
            found[key] = count + times, bytes_ + times * sent, seconds + times * took
            if each is one and not key[-1]:
                begun[one.name] = _Begun(key, took)
    return [Collective(*key, count, sent, seconds, hidden[key]) for key, (count, sent, seconds) in found.items()]


def _axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> list[str]:
    """Returns the axes along which the members of a group differ."""
    shape = tuple(mesh.values())
    if not shape or math.prod(shape) <= max(max(group) for group in groups):
        return []
    places = np.stack(np.unravel_index(np.asarray(groups[0]), shape))
    return [axis for axis, row in zip(mesh, places, strict=True) if (row != row[0]).any()]


def _crosses(groups: Sequence[Sequence[int]], devices: Sequence[Any], chip: Chip) -> tuple[str, bool]:
    """Returns the boundary that a collective crosses, if any, and whether the collective uses the data-center
    network."""
    for place, what in (("slice_index", "slices"), ("process_index", "hosts")):
        if any(len({getattr(devices[one], place, None) for one in group}) > 1 for group in groups):
            return what, what == "slices" or chip.platform == "gpu"
    return "", False


class Traffic(NamedTuple):
    kernels: int  # number of kernels
    moved: int  # bytes of the kernels' operands and results
    seconds: float  # time to move these bytes at the memory's bandwidth
    parts: collections.Counter[str]  # bytes by operation of the step


def is_kernel(one: Instruction) -> bool:
    """Returns whether an instruction launches a kernel and is not a collective."""
    return not (one.opcode in FREE or one.opcode.endswith("-done") or kind_of(one))


def traffic_of(module: Module, chip: Chip) -> Traffic:
    """Counts the kernels of a program, other than collectives, and the bytes that they move."""
    kernels = moved = 0
    parts: collections.Counter[str] = collections.Counter()
    for one, times in module.way():
        if not is_kernel(one):
            continue
        own = module.moved(one)
        kernels += times
        moved += times * own
        parts[one.label] += times * own
    return Traffic(kernels, moved, moved / chip.bandwidth, parts)
