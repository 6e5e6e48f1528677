"""Forty mutants of the source: one change of logic each, which the suite should find.

    python -m tests.mutants draw       # writes tests/mutants.json: the same list each time, at the same commit
    python -m tests.mutants list
    python -m tests.mutants apply 7    # changes the tree; `git checkout` takes it back

A mutant is found again by its lines and those around them, wherever the code has moved since it was drawn.
"""

import argparse
import ast
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".json")
SEED = 20_261_125
COUNT = 40
FROM = (
    "sdc/burnin/**/*.py", "sdc/record/**/*.py", "sdc/checkpoints/**/*.py", "sdc/targets/**/*.py",
    *(f"train/{name}.py" for name in (
        "checkpoints", "sealed", "seals", "running", "retention", "jobs", "_run", "loop", "methods", "replicas",
    )),
    "analysis/*.py", "analysis/fleet/*.py", "tools/*.py",
)  # fmt: skip
"""Files that mutants are drawn from."""
SOURCES = ("sdc", "train", "analysis", "tools")
"""Folders in which a mutant is looked for."""
TELLING = 30
"""Characters that lines must have to be taken for those of a mutant where nothing around them is as it was."""
OPPOSITE = {
    "<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "==", "is not": "is", "is": "is not",
    "not in": "in", "in": "not in", "and": "or", "or": "and", "+": "-", "-": "+", "break": "continue",
    "continue": "break", "True": "False", "False": "True",
}  # fmt: skip
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or", ast.Add: "+", ast.Sub: "-",
}  # fmt: skip


class Mutant(NamedTuple):
    """A change.

    Attributes:
        file, function, line: where it was, when it was drawn.
        kind: what is changed.
        original, mutated: the source that is changed, and what it becomes.
        lines, instead: the whole lines of it without indentation, as they are and as they become.
        before, after: the lines around these, without indentation.
    """

    file: str
    function: str
    line: int
    kind: str
    original: str
    mutated: str
    lines: list[str]
    instead: list[str]
    before: str
    after: str


class Source:
    """A file, whose columns are counted in bytes, as the parser does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self._bytes = self.text.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def begin(self, node: ast.AST) -> int:
        return int(self._starts[node.lineno - 1] + node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return int(self._starts[node.end_lineno - 1] + node.end_col_offset)  # type: ignore[attr-defined]

    def between(self, start: int, end: int) -> str:
        return self._bytes[start:end].decode()

    def mutant(self, node: ast.AST, function: str, kind: str, mutated: str) -> Mutant:
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        start, end = self.begin(node), self.end(node)
        whole = self.between(self._starts[first - 1], start) + mutated + self.between(end, self._starts[last])
        return Mutant(
            self.path.relative_to(REPOSITORY).as_posix(), function, first, kind, self.between(start, end), mutated,
            stripped(self.lines[first - 1 : last]), stripped(whole.splitlines()),
            self._line(first - 1), self._line(last + 1),
        )  # fmt: skip

    def _line(self, number: int) -> str:
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""


def stripped(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines]


def candidates(source: Source) -> Iterator[Mutant]:
    """Each change that could be made in the functions of a file."""
    yield from _below(source, ast.parse(source.text), "", inside=False)


def _below(source: Source, node: ast.AST, name: str, *, inside: bool) -> Iterator[Mutant]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        name = f"{name}.{node.name}" if name else node.name
        for part in node.body:
            yield from _below(source, part, name, inside=not isinstance(node, ast.ClassDef))
        return
    if inside:
        if _is_told(node):
            return
        for kind, mutated in _changes(source, node):
            yield source.mutant(node, name, kind, mutated)
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.UnaryOp):
            text = source.between(source.begin(node.test), source.end(node.test))
            bare = isinstance(node.test, ast.Name | ast.Attribute | ast.Call)
            yield source.mutant(node.test, name, "condition", f"not {text}" if bare else f"not ({text})")
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _below(source, part, name, inside=inside)


def _is_told(node: ast.AST) -> bool:
    """Whether a node only says something, as messages and docstrings do, or nothing at all."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in ("strict", "encoding", "errors", "prefix", "help", "label", "parents", "exist_ok")
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Return):
        return node.value is not None and _is_text(node.value)
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return called.endswith("Error") or called in ("print", "warn", "warning", "info", "debug")
    return False


def _changes(source: Source, node: ast.AST) -> Iterator[tuple[str, str]]:
    """What a node could become, and what kind of change that is."""

    def swapped(parts: list[ast.expr], sign: str) -> str:
        """The source of a node with another sign between its parts."""
        text, at = "", source.begin(node)
        for left, right in itertools.pairwise(parts):
            gap = source.between(source.end(left), source.begin(right))
            pattern = rf"\b{sign}\b".replace(" ", r"\s+") if sign.isalpha() or " " in sign else re.escape(sign)
            text += source.between(at, source.end(left)) + re.sub(pattern, OPPOSITE[sign], gap, count=1)
            at = source.begin(right)
        return text + source.between(at, source.end(node))

    match node:
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            yield "comparison", swapped([left, right], SIGNS[type(sign)])
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right):
            lists = (ast.List, ast.Tuple, ast.ListComp)
            if not any(isinstance(side, lists) or _is_text(side) for side in (left, right)):
                yield "sign", swapped([left, right], SIGNS[type(sign)])
        case ast.BoolOp(op=sign, values=values):
            yield "and, or", swapped(values, SIGNS[type(sign)])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", source.between(source.begin(operand), source.end(operand))
        case ast.Constant(value=bool() as value):
            yield "constant", OPPOSITE[str(value)]
        case ast.Constant(value=int() | float() as value):
            yield "constant", str(value + 1)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", "return None"
        case ast.Break() | ast.Continue():
            word = source.between(source.begin(node), source.end(node))
            yield "loop", OPPOSITE[word]
        case _:
            pass


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def draw() -> list[Mutant]:
    """The list: as many of each kind, each possible change of a kind as likely as any other, one in a function at most.

    What stands in the same lines with the same lines around it twice in all of the source cannot be told apart, and is
    left out.
    """
    paths = sorted({path for pattern in FROM for path in REPOSITORY.glob(pattern)})
    found = [mutant for path in paths for mutant in candidates(Source(path))]
    random.Random(SEED).shuffle(found)
    texts = [path.read_text(encoding="utf-8") for path in source_files()]
    kinds = {
        kind: iter([each for each in found if each.kind == kind]) for kind in sorted({each.kind for each in found})
    }
    chosen: dict[tuple[str, str], Mutant] = {}
    for each in itertools.cycle(kinds.values()):
        if len(chosen) == COUNT:
            return list(chosen.values())
        for mutant in each:
            alike = sum(same == 2 for text in texts for _, same in places(text, mutant))
            if alike == 1 and (mutant.file, mutant.function) not in chosen:
                chosen[mutant.file, mutant.function] = mutant
                break
    return []


def source_files() -> list[Path]:
    return sorted(path for folder in SOURCES for path in (REPOSITORY / folder).rglob("*.py"))


def places(text: str, mutant: Mutant) -> Iterator[tuple[int, int]]:
    """Lines at which a text has those of a mutant, and how many of the two lines around them are the same."""
    lines = stripped(text.splitlines())
    for at in range(len(lines) - len(mutant.lines) + 1):
        if lines[at : at + len(mutant.lines)] == mutant.lines:
            before = lines[at - 1] if at else ""
            after = lines[at + len(mutant.lines)] if at + len(mutant.lines) < len(lines) else ""
            yield at, (before == mutant.before) + (after == mutant.after)


def apply(mutant: Mutant) -> str:
    """Makes the change, at the one place that is most like where it was drawn. Returns where that is.

    Raises:
        LookupError: there is no such place, or there are several.
    """
    found: dict[tuple[int, bool, bool], list[tuple[Path, int]]] = {}
    for path in source_files():
        for at, same in places(path.read_text(encoding="utf-8"), mutant):
            kept, alike = path == REPOSITORY / mutant.file, path.name == Path(mutant.file).name
            found.setdefault((same, kept, alike), []).append((path, at))
    about = f"{mutant.file}:{mutant.line} ({mutant.function}): {' '.join(mutant.lines)}"
    telling = len("".join(mutant.lines)) >= TELLING
    best = max((key for key in found if key[0] or telling), default=None)
    if best is None:
        raise LookupError(f"not found in the source any more: {about}")
    if len(found[best]) > 1:
        shown = ", ".join(f"{path.relative_to(REPOSITORY)}:{at + 1}" for path, at in found[best])
        raise LookupError(f"found at several places ({shown}): {about}")
    [(path, at)] = found[best]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    old = lines[at : at + len(mutant.lines)]
    indents = [line[: len(line) - len(line.lstrip())] for line in old]
    # Of a mutant with fewer lines, each has the indentation of the line in its place.
    lines[at : at + len(old)] = [f"{indent}{line}\n" for indent, line in zip(indents, mutant.instead, strict=False)]
    text = "".join(lines)
    ast.parse(text)
    path.write_text(text, encoding="utf-8")
    around = "" if best[0] == 2 else f" ({best[0]} of 2 lines around it are as they were)"
    return f"{path.relative_to(REPOSITORY)}:{at + 1}{around}"


def read() -> list[Mutant]:
    return [Mutant(**row) for row in json.loads(LIST.read_text(encoding="utf-8"))["mutants"]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Mutants of the source.")
    parser.add_argument("what", choices=("draw", "list", "apply"))
    parser.add_argument("number", type=int, nargs="?", help="of the mutant to apply, from 0")
    options = parser.parse_args()
    if options.what == "draw":
        rows = [mutant._asdict() for mutant in draw()]
        content = json.dumps({"seed": SEED, "mutants": rows}, indent=1, ensure_ascii=False)
        LIST.write_text(content + "\n", encoding="utf-8")
        return 0
    mutants = read()
    if options.what == "list":
        for number, each in enumerate(mutants):
            print(f"{number:2}  {each.file}:{each.line}  {each.function}  [{each.kind}]")
            print(f"      - {' '.join(each.lines)}\n      + {' '.join(each.instead)}")
        return 0
    if options.number is None or not 0 <= options.number < len(mutants):
        parser.error(f"give a number from 0 to {len(mutants) - 1}")
    try:
        print(apply(mutants[options.number]))
    except LookupError as error:
        print(f"mutant {options.number}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
