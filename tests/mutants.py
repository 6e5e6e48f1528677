"""Forty mutants of the source: each changes the logic in one place, and the suite should detect it.

    python -m tests.mutants list
    python -m tests.mutants apply 7    # changes the tree; undo with `git checkout`

The commit that added this file (c403ccc) drew tests/mutants.json with the seed 20,261,125, before the tests changed.
A mutant is located by its lines and the lines around them, even if the code has moved.
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
SOURCES = ("sdc", "train", "analysis", "tools")  # folders to search for a mutant
# Least number of characters in a mutant's lines if no line around them is unchanged.
DISTINCTIVE = 30


class Mutant(NamedTuple):
    """A change of the source.

    Attributes:
        file, function, line: its location when it was drawn.
        kind: kind of change.
        original, mutated: the expression before and after the change.
        lines, instead: whole lines before and after the change, without indentation.
        before, after: the lines above and below, without indentation.
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
    """Yields where a text has the lines of a mutant, and how many of the two lines around them are unchanged."""
    lines = stripped(text.splitlines())
    for at in range(len(lines) - len(mutant.lines) + 1):
        if lines[at : at + len(mutant.lines)] == mutant.lines:
            before = lines[at - 1] if at else ""
            after = lines[at + len(mutant.lines)] if at + len(mutant.lines) < len(lines) else ""
            yield at, (before == mutant.before) + (after == mutant.after)


def apply(mutant: Mutant) -> str:
    """Makes the change at the place that best matches the original one, and returns that place.

    Raises:
        LookupError: no place matches, or several match equally well.
    """
    found: dict[tuple[int, bool, bool], list[tuple[Path, int]]] = {}
    for path in source_files():
        for at, same in places(path.read_text(encoding="utf-8"), mutant):
            kept, alike = path == REPOSITORY / mutant.file, path.name == Path(mutant.file).name
            found.setdefault((same, kept, alike), []).append((path, at))
    about = f"{mutant.file}:{mutant.line} ({mutant.function}): {' '.join(mutant.lines)}"
    distinctive = len("".join(mutant.lines)) >= DISTINCTIVE
    best = max((key for key in found if key[0] or distinctive), default=None)
    if best is None:
        raise LookupError(f"no longer found in the source: {about}")
    if len(found[best]) > 1:
        shown = ", ".join(f"{path.relative_to(REPOSITORY)}:{at + 1}" for path, at in found[best])
        raise LookupError(f"found in several places ({shown}): {about}")
    [(path, at)] = found[best]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    old = lines[at : at + len(mutant.lines)]
    indents = [line[: len(line) - len(line.lstrip())] for line in old]
    # If the mutant has fewer lines, each takes the indentation of the line that it replaces.
    lines[at : at + len(old)] = [f"{indent}{line}\n" for indent, line in zip(indents, mutant.instead, strict=False)]
    text = "".join(lines)
    ast.parse(text)
    path.write_text(text, encoding="utf-8")
    around = "" if best[0] == 2 else f" ({best[0]} of 2 lines around it are unchanged)"
    return f"{path.relative_to(REPOSITORY)}:{at + 1}{around}"


def read() -> list[Mutant]:
    return [Mutant(**row) for row in json.loads(LIST.read_text(encoding="utf-8"))["mutants"]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Mutants of the source.")
    parser.add_argument("what", choices=("list", "apply"))
    parser.add_argument("number", type=int, nargs="?", help="number of the mutant to apply, from 0")
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
