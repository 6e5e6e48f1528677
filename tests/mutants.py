"""Forty mutants of the source: one change of logic each, which the suite should find.

    python -m tests.mutants list
    python -m tests.mutants apply 7    # changes the tree; `git checkout` takes it back

tests/mutants.json was drawn with the seed 20,261,125, by this file as of the commit that added it (c403ccc), before the
tests changed. A mutant is found again by its lines and those around them, wherever the code has moved since.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".json")
SOURCES = ("sdc", "train", "analysis", "tools")  # folders in which a mutant is looked for
# Characters that lines must have to be taken for those of a mutant where nothing around them is as it was.
TELLING = 30


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


def stripped(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines]


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
    parser.add_argument("what", choices=("list", "apply"))
    parser.add_argument("number", type=int, nargs="?", help="of the mutant to apply, from 0")
    options = parser.parse_args()
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
