"""Builds the wheel, installs it in a fresh environment, imports every module there and checks all types.

Type checkers do not see the mapped packages (`sdc.train` is the folder `train`) in a checkout; in the installed wheel
they do, and a package that `setup.cfg` forgot is missing there. Run by `make test`.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"sdc": "sdc", "analysis": "sdc/analysis", "train": "sdc/train", "tools": "sdc/tools"}
IMPORT_ALL = """
import importlib, pkgutil, sdc
names = [module.name for module in pkgutil.walk_packages(sdc.__path__, "sdc.")]
for name in names:
    importlib.import_module(name)
print(*names, sep="\\n")
"""


def main() -> None:
    """Exits with a message if anything is wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"{wheel}[dev]"], check=True)
        found = subprocess.run(
            [str(python), "-c", IMPORT_ALL], check=True, cwd=folder, capture_output=True, text=True
        ).stdout.split()
        expected = {
            ".".join((*package.split("/"), *path.relative_to(ROOT / top).with_suffix("").parts))
            for top, package in FOLDERS.items()
            for path in (ROOT / top).rglob("*.py")
        }
        expected = {name.removesuffix(".__init__") for name in expected} - {"sdc"}
        if missing := sorted(expected - set(found)):
            sys.exit(f"the wheel lacks {', '.join(missing)}; list their packages in setup.cfg")
        mypy = [str(python), "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--package", "sdc"]
        subprocess.run(mypy, check=True, cwd=folder)


if __name__ == "__main__":
    main()
