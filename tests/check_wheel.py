"""Builds the wheel, imports every module from it, and checks its requirements and all types.

Type checkers see the mapped packages (`sdc.train` is the folder `train`) in the wheel but not in a checkout, and a
package that `setup.cfg` omits is missing in the wheel. The wheel is unpacked and not installed: this environment has
its requirements already, and its metadata must name them. Run by `make test`.
"""

import ast
import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sdc._lazy import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"sdc": "sdc", "analysis": "sdc/analysis", "train": "sdc/train", "tools": "sdc/tools"}
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import sdc
assert sdc.__file__.startswith(sys.argv[1]), sdc.__file__
names = [module.name for module in pkgutil.walk_packages(sdc.__path__, "sdc.")]
for name in names:
    importlib.import_module(name)
print(*names, sep="\\n")
"""


def main() -> None:
    """Exits with a message if anything is wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # files of an earlier build would get into the wheel
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (wheel,) = folder.glob("*.whl")
        unpacked = folder / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        check_modules(unpacked)
        check_requirements(unpacked)
        mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--package", "sdc"]
        cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
        types = {**os.environ, "MYPYPATH": str(unpacked)}
        subprocess.run([*mypy, *cache], check=True, cwd=unpacked, env=types)
        script = ROOT / "tests" / "docs" / "typed_script.py"
        subprocess.run(
            [*mypy[:3], "--strict", "--follow-imports=silent", *cache, script], check=True, cwd=folder, env=types
        )
        settings = {"typeCheckingMode": "strict", "include": [str(script)], "extraPaths": [str(unpacked)]}
        (folder / "pyrightconfig.json").write_text(json.dumps(settings))
        pyright = [sys.executable, "-m", "basedpyright", "--project", str(folder), "--pythonpath", sys.executable]
        subprocess.run(pyright, check=True, cwd=folder)


def check_modules(unpacked: Path) -> None:
    """Exits with a message unless every module of the checkout is in the wheel and can be imported."""
    found = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(unpacked)], check=True, cwd=unpacked, stdout=subprocess.PIPE, text=True
    ).stdout.split()
    expected = {
        ".".join((*package.split("/"), *path.relative_to(ROOT / top).with_suffix("").parts))
        for top, package in FOLDERS.items()
        for path in (ROOT / top).rglob("*.py")
    }
    expected = {name.removesuffix(".__init__") for name in expected} - {"sdc"}
    if missing := sorted(expected - set(found)):
        sys.exit(f"the wheel lacks {', '.join(missing)}; list their packages in setup.cfg")


def check_requirements(unpacked: Path) -> None:
    """Exits with a message unless the wheel or one of its extras requires every imported package."""
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    lines = email.message_from_string(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
    required = {normal(re.split(r"[^\w.-]", line)[0]) for line in lines if "extra ==" not in line}
    extras = {(normal(re.split(r"[^\w.-]", line)[0]), line.rpartition("extra == ")[2].strip("'\" ")) for line in lines}
    known = importlib.metadata.packages_distributions()
    for path in (unpacked / "sdc").rglob("*.py"):
        for module in imported(path) - set(sys.stdlib_module_names) - {"sdc"}:
            names = {normal(name) for name in known.get(module, [module])}
            by_extra = any((name, EXTRAS.get(module)) in extras for name in names)
            if not names & required and not by_extra:
                sys.exit(f"{path.relative_to(unpacked)} imports {module}, which setup.cfg does not require")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(path: Path) -> set[str]:
    """Returns the top-level names of the modules that a file imports."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found: set[str] = set()
    for node in tree:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


if __name__ == "__main__":
    main()
