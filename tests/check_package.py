"""Builds what a release publishes into `dist/`, checks it, and installs it in fresh environments (`make package`).

The wheel and the source archive are installed with every Python that is given.
"""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from rattler_build import Stage0Recipe, VariantConfig

import sdc

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
RENAMED = {"flatbuffers": "python-flatbuffers"}  # in conda-forge
ARCHIVED = ("Makefile", "CHANGELOG.md", "CITATION.cff", "docs/index.md", "tests/conftest.py", ".ci/run", "LICENSE")
SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "readthedocs": ".readthedocs.yaml",
    "citation-file-format": "CITATION.cff",
}
SMOKE = """
import jax.numpy as jnp, sdc
out, flags = sdc.abft(lambda x: x @ x.T)(jnp.ones((4, 4)))
print(sdc.__version__, flags.verdict())
assert flags.verdict().verdict == "clean"
"""


def main(*pythons: str) -> None:
    """Exits with a message if anything is wrong."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT, quiet=True)
    (wheel,), (archive,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, archive)
    for schema, files in SCHEMAS.items():
        found = sorted(ROOT.glob(files)) or sys.exit(f"{files} is missing")
        run(Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *found)
    check_archive(archive)
    check_versions(wheel)
    for python in pythons:
        for file in (wheel, archive):
            with tempfile.TemporaryDirectory() as folder:
                run(python, "-m", "venv", f"{folder}/venv")
                own = Path(folder, "venv", "bin")
                run(own / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", file, quiet=True)
                said = run(own / "python", "-c", SMOKE, cwd=folder).strip()
                run(own / "sdc", "--help", cwd=folder)
                version = run(own / "python", "--version").strip()
                print(f"{version}, {file.name}: {said}", flush=True)


def run(*words: object, cwd: object = ROOT, quiet: bool = False) -> str:
    """Runs a command and returns what it prints; exits with its messages if it fails."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run([str(word) for word in words], cwd=str(cwd), env=environment, text=True, capture_output=True)
    if found.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{found.stdout}\n{found.stderr}")
    if found.stderr and not quiet:
        print(found.stderr, file=sys.stderr)
    return found.stdout


def check_archive(archive: Path) -> None:
    """Exits with a message unless the source archive has what tests and documentation need, and nothing that was
    built."""
    with tarfile.open(archive) as members:
        names = {name.partition("/")[2] for name in members.getnames()}
    tracked = run("git", "ls-files", "docs", "tests", "sdc", "analysis", "train", "tools", ".ci").split("\n")
    if missing := sorted({*ARCHIVED, *filter(None, tracked)} - names):
        sys.exit(f"the source archive lacks {', '.join(missing[:5])}; list them in MANIFEST.in")
    if built := sorted(name for name in names if name.startswith("docs/_build") or name.endswith(".pyc")):
        sys.exit(f"the source archive has {', '.join(built[:5])}; exclude them in MANIFEST.in")


def check_versions(wheel: Path) -> None:
    """Exits with a message unless the version and the requirements are the same everywhere."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(files.read(name))
    recipe = yaml.safe_load((ROOT / ".conda" / "recipe.yaml").read_text())
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    versions = {
        "the wheel": about["Version"],
        ".conda/recipe.yaml": recipe["context"]["version"],
        "CITATION.cff": cited,
    }
    if odd := {place: version for place, version in versions.items() if version != sdc.__version__}:
        sys.exit(f"sdc.__version__ is {sdc.__version__}, but {odd}")
    own = [Requirement(text) for text in about.get_all("Requires-Dist") or ()]
    needs = {RENAMED.get(one.name, one.name) + f" {one.specifier}" for one in own if one.marker is None}
    listed = {line for line in recipe["requirements"]["run"] if not line.startswith("python >=")}
    if needs != listed:
        sys.exit(f".conda/recipe.yaml and setup.cfg require different packages: {', '.join(sorted(needs ^ listed))}")
    lowest = re.sub(r"[^\d.]", "", about["Requires-Python"])
    variants = VariantConfig.from_yaml(f'python_min:\n  - "{lowest}"\n')
    (rendered,) = Stage0Recipe.from_file(str(ROOT / ".conda" / "recipe.yaml")).render(variants)
    print(f"conda-forge: {rendered.recipe}")


if __name__ == "__main__":
    main(*sys.argv[1:])
