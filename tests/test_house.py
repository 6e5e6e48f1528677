"""The structure of the code: modules, facades, directions of imports, and no slow import before it is needed."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"sdc": "sdc", "train": "sdc.train", "analysis": "sdc.analysis", "tools": "sdc.tools"}
MODULES = {
    ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__"): path
    for folder, package in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
}
FACADES = [name for name, path in MODULES.items() if path.name == "__init__.py" and "facade(" in path.read_text()]
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}
FLOORS = ("sdc", "sdc.train", "sdc.analysis", "sdc.tools")

# Limits; see CONTRIBUTING.md.
MOST_FILES, MOST_NAMES, SHORT = 22, 50, 60
MOST_CRUMBS, MOST_REPEATED_CLASSES, MOST_REPEATED_FILES = 12, 8, 8
MOST_FORMATS, MOST_TABLES_OF_CODES = 1, 1


def public(facade: str) -> Iterator[tuple[str, object]]:
    module = importlib.import_module(facade)
    return ((name, getattr(module, name)) for name in module.__all__)


def exports(facade: str) -> list[str]:
    """Returns all names of a facade: public ones, and those for the other packages of this project."""
    return [
        alias.asname or alias.name
        for block in TREES[facade].body
        if isinstance(block, ast.If)
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    ]


def offered(facade: str) -> Iterator[tuple[str, object]]:
    module = importlib.import_module(facade)
    return ((name, getattr(module, name)) for name in exports(facade))


def package(name: str) -> str:
    """Returns the package of a module; a package is its own package."""
    while name not in PACKAGES:
        name = name.rpartition(".")[0]
    return name


def top(name: str) -> int:
    """Returns the layer of a module."""
    return max(floor for floor, base in enumerate(FLOORS) if f"{name}.".startswith(f"{base}."))


def imports(name: str) -> Iterator[str]:
    """Yields the modules of this project that a module imports, also in functions and under `if TYPE_CHECKING`."""
    base = name if name in PACKAGES else name.rpartition(".")[0]
    for node in ast.walk(TREES[name]):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = base.split(".")[: len(base.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{source}.{alias.name}" for alias in node.names]
            targets = [target if target in MODULES else source for target in targets]
        yield from (target for target in targets if target in MODULES)


def test_importing_a_module_gives_the_module() -> None:
    """`import a.b as m` binds the attribute `b` of `a`, which must not be a function."""
    for name in MODULES:
        importlib.import_module(name)
    for facade in FACADES:
        dict(offered(facade))  # names that a facade loads must not change that
    namespace: dict[str, object] = {}
    wrong = []
    for name in MODULES:
        exec(f"import {name} as m", namespace)
        if namespace["m"] is not sys.modules[name] or not isinstance(namespace["m"], types.ModuleType):
            wrong.append(name)
    assert not wrong


def test_no_module_has_the_name_of_a_public_function() -> None:
    functions = {name for facade in FACADES for name, value in public(facade) if inspect.isfunction(value)}
    assert len(functions) > 50
    rooms = {f"{facade}.{name}" for facade in FACADES for name, value in public(facade) if inspect.ismodule(value)}
    assert rooms <= set(FACADES)  # a function hidden by its module would be a module here
    assert not functions & {name.rpartition(".")[2] for name in MODULES}


def test_a_facade_offers_what_it_lists() -> None:
    for facade in FACADES:
        module = importlib.import_module(facade)
        assert set(module.__all__) <= set(dir(module))
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.nothing
        assert all(value is not None for _, value in offered(facade))


def test_a_facade_is_no_warehouse() -> None:
    """If other packages need many names of a package, these belong elsewhere."""
    assert {name: n for name in FACADES if (n := len(exports(name))) > MOST_NAMES} == {}


def test_arrows_run_one_way() -> None:
    """`tools` may import `analysis`, which may import `train`, which may import `sdc`."""
    wrong = [(name, target) for name in MODULES for target in imports(name) if top(target) > top(name)]
    assert not wrong


def test_imports_from_another_package_come_through_its_facade() -> None:
    """A module at the root of the library is its own facade."""
    deep = [
        (name, target)
        for name in MODULES
        for target in imports(name)
        if target not in PACKAGES and package(target) not in ("sdc", package(name))
    ]
    assert not deep


def test_no_packages_in_a_circle() -> None:
    arrows: dict[str, set[str]] = {}
    for name in MODULES:
        arrows.setdefault(package(name), set()).update(map(package, imports(name)))

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = arrows.get(ahead.pop(), set()) - seen - {"sdc"}
            seen |= new
            ahead.extend(new)
        return seen

    # A package may import from itself: a cycle has at least two packages.
    circles = [name for name in arrows for other in reached(name) - {name} if name in reached(other)]
    assert sorted(set(circles) - {"sdc"}) == []


def test_names_say_one_thing() -> None:
    """A name that is defined in two places makes a reader open both."""
    classes = Counter(
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    again = sorted(name for name, count in classes.items() if count > 1)
    assert len(again) <= MOST_REPEATED_CLASSES, again
    alike = {"studies", "commands", "bench"}  # one file for each study, in three folders
    files = Counter(
        path.stem for path in MODULES.values() if path.name != "__init__.py" and not alike & set(path.parts)
    )
    repeated = sorted(name for name, count in files.items() if count > 1)
    assert len(repeated) <= MOST_REPEATED_FILES, repeated


def test_rooms_are_of_a_size_to_be_held_in_the_head() -> None:
    """A file holds one idea, however long: neither many tiny files nor crowded folders."""
    rooms = Counter(path.parent for path in MODULES.values())
    assert {str(room): n for room, n in rooms.items() if n > MOST_FILES} == {}
    crumbs = sorted(
        str(path)
        for path in MODULES.values()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < SHORT
    )
    assert len(crumbs) <= MOST_CRUMBS, crumbs


def test_formats_and_exit_codes_have_one_owner() -> None:
    formats = [name for name, path in MODULES.items() if re.search(r"^(FORMAT|SCHEMA)\b", path.read_text(), re.M)]
    assert len(formats) <= MOST_FORMATS, formats
    codes = [
        name
        for name, path in MODULES.items()
        if re.search(r"^(CODES|VERDICTS|EXIT_CODES)\b|\bIntEnum\)", path.read_text(), re.M)
    ]
    assert len(codes) <= MOST_TABLES_OF_CODES, codes


def test_flags_are_checked_without_jax() -> None:
    """Importing JAX would delay the error message for a mistyped flag too long."""
    wrong = [
        "train --config huge",
        "twin --suspect node99",
        "twin --fault meteor",
        "train --aggregate foo",
        "train --aggregate noise,sigma=0.1",
        "train --data 2 --aggregate noise,sigma=nan",
        "train --steps 0",
        "train --data 3",
        "trace x --where dot_general",
        "trace x --fault meteor,step=1,site=*",
        "campaign --fault bitflip,rate=1",
        "train --corpus nowhere",
        "train --tokenizer nowhere",
        "train --abft --abft-mode locate --abft-scheme paper",
        "twin --coordinator a:1 --processes 2 --process 2",
        "report nowhere",
        "diff nowhere nowhere",
        "trace x --against nowhere",
        "burnin --minutes 0",
        "burnin --devices gpus",
        "burnin --suspect node99",
        "burnin --fault meteor",
        "burnin --run . --resume",
        "verdict --max-age 1x",
    ]
    code = (
        "import sys\nfrom sdc.tools.cli import run\n"
        f"for words in {wrong!r}:\n"
        "    assert run(words.split()) == 2, words\n"
        "    assert 'jax' not in sys.modules, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(wrong)


def test_analysis_imports_of_train_only_what_needs_no_jax() -> None:
    """Reports can be made on a laptop without JAX."""
    names = [
        (target, alias.name)
        for name, tree in TREES.items()
        if top(name) == FLOORS.index("sdc.analysis")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
        for target in [node.module or ""]
        if f"{target}.".startswith("sdc.train.")
        for alias in node.names
    ]
    assert names
    code = (
        "import importlib, sys\nsys.modules.update(dict.fromkeys(('jax', 'flax', 'grain')))\n"
        f"for module, name in {names!r}:\n    getattr(importlib.import_module(module), name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_but_a_comparison_ends_with_one(tmp_path: Path) -> None:
    """A failing import, or an exit from within a command, must not look like corruption."""
    broken = "import sys\nsys.modules['tyro'] = None\nfrom sdc.tools.cli import main\nmain(['train'])"
    assert subprocess.run([sys.executable, "-c", broken], capture_output=True, check=False).returncode == 3
    leaving = (
        "import sys\nfrom sdc.tools import cli, parse\n"
        "parse.command_of = lambda options: lambda options: sys.exit(1)\ncli.main(['train'])"
    )
    assert subprocess.run([sys.executable, "-c", leaving], capture_output=True, check=False).returncode == 3
