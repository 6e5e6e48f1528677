"""The house: modules are modules, facades offer what they name, arrows run one way, nothing heavy comes in early."""

import ast
import importlib
import inspect
import subprocess
import sys
import types
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
ALLOWED = {"sdc": {"sdc"}, "train": {"sdc", "train"}, "analysis": {"sdc", "analysis"}, "tools": set(FOLDERS)}


def public(facade: str) -> Iterator[tuple[str, object]]:
    module = importlib.import_module(facade)
    return ((name, getattr(module, name)) for name in module.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_importing_a_module_gives_the_module(name: str) -> None:
    """`import a.b as m` takes the attribute `b` of `a`, which must not be a function of that name."""
    importlib.import_module(name)
    for facade in FACADES:
        dict(public(facade))  # whatever a facade loads must not change that
    namespace: dict[str, object] = {}
    exec(f"import {name} as m", namespace)
    assert namespace["m"] is sys.modules[name]
    assert isinstance(namespace["m"], types.ModuleType)


def test_no_module_has_the_name_of_a_public_function() -> None:
    functions = {name for facade in FACADES for name, value in public(facade) if inspect.isfunction(value)}
    assert len(functions) > 50
    rooms = {f"{facade}.{name}" for facade in FACADES for name, value in public(facade) if inspect.ismodule(value)}
    assert rooms <= set(FACADES)  # a function that its module hides would be a module here
    assert not functions & {name.rpartition(".")[2] for name in MODULES}


@pytest.mark.parametrize("facade", FACADES)
def test_a_facade_lists_what_it_offers(facade: str) -> None:
    module = importlib.import_module(facade)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
    for _, value in public(facade):
        assert value is not None


def imports(path: Path, package: str) -> Iterator[str]:
    """Full names of what a file imports of this project, below `if TYPE_CHECKING` too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "sdc")
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            if name.partition(".")[0] == "sdc":
                yield from (f"{name}.{alias.name}" for alias in node.names)


def folder(name: str) -> str:
    return next(
        (top for top, package in FOLDERS.items() if top != "sdc" and f"{name}.".startswith(f"{package}.")), "sdc"
    )


@pytest.mark.parametrize("name", MODULES)
def test_arrows_run_one_way(name: str) -> None:
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    wrong = [target for target in imports(path, package) if folder(target) not in ALLOWED[folder(name)]]
    assert not wrong


@pytest.mark.parametrize("path", sorted(MODULES.values()), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_room_is_too_large(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_flags_are_checked_without_jax() -> None:
    """Importing JAX alone takes longer than a person waits for a mistyped flag."""
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
        "trace x --simulate meteor,step=1,site=*",
        "campaign --faults bitflip,rate=1",
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


def test_nothing_but_a_comparison_ends_with_one(tmp_path: Path) -> None:
    """A failing import, or an exit from within a command, must not look like corruption."""
    broken = "import sys\nsys.modules['tyro'] = None\nfrom sdc.tools.cli import main\nmain(['train'])"
    assert subprocess.run([sys.executable, "-c", broken], capture_output=True, check=False).returncode == 3
    leaving = (
        "import sys\nfrom sdc.tools import cli, parse\n"
        "parse.command_of = lambda options: lambda options: sys.exit(1)\ncli.main(['train'])"
    )
    assert subprocess.run([sys.executable, "-c", leaving], capture_output=True, check=False).returncode == 3
