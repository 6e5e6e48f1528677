"""Writes the results of all commands into one file of keys and values, to compare versions of the code.

    python -m tests.reference OUT.json [--against BEFORE.json] [--compilers FOLDER] [--only twin fleet]

Runs the commands of this environment in a temporary folder, on the CPU, and writes what they printed with `--json`, the
rows of their records, their exit codes and verdicts. Rows are recognized by their fields in any file, so that the
layout of files does not matter. `IGNORED`, `IGNORED_TEXTS` and `REPLACED` list everything that is left out because it
depends on the run, the host or the layout.

With `--against`, lists differing, missing and new keys by command, and ends with 1 if any differ or are missing.
`--compilers` names a folder with the package libtpu; without it `sdc estimate` only reports that it is missing. A
result is valid for one machine, one Python and one jax.
"""

import argparse
import builtins
import contextlib
import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import pkgutil
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT = 900.0  # time limit for a command, in seconds; most take ten
# A decoder that compiles within seconds; importing tests.train.runs registers it.
MINI = ("--config", "mini")
NAMED = (
    "import importlib.metadata, tests.train.runs; "
    "[sdc] = importlib.metadata.entry_points(group='console_scripts', name='sdc'); sdc.load()()"
)
LONGEST = 500  # characters; a longer text is replaced by its SHA-256

# Fields to leave out everywhere.
IGNORED = {
    # Formats, authors and times.
    "schema", "version", "format", "created", "resumed_at", "command", "boot", "pid", "machine", "firmware",
    "environment", "environments", "checksum", "crc32", "lines", "run", "report", "file",
    # Durations, and values derived from them.
    "seconds", "seconds_per_step", "compile_seconds", "rate", "best", "excluded_interval", "sensors", "timings",
}  # fmt: skip
# Fields to leave out if they are text or an object; numbers and booleans are kept.
IGNORED_TEXTS = {"id", "ended", "since", "host", "source", "recording"}
# Replacements in texts.
REPLACED = (
    (r"(?:[\w.<>-]*/)*[\w<>-]+\.py:\d+(?: \([\w.<>]+\))?", "SOURCE"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|\+00:00)?", "TIME"),
    (r"\b\d[\d,.]*(?:e[+-]?\d+)? (?:ms|s|seconds?|min|minutes?|h|hours?|days?)\b", "DURATION"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
    (r"\b[0-9a-f]{32}\b", "ID"),
    (r" \| [0-9a-f]{12}$", " | ENVIRONMENT"),
    (r"\([0-9a-f]{8}\)", "(MACHINE)"),
    (r"(?:/[\w.-]+)+\.jsonl?\b", "FILE"),
    (r"127\.0\.0\.1:\d+", "COORDINATOR"),
)
# Rows of records: their name here, the fields that identify them, and those that number them.
ROWS = (
    ("injections", {"injection", "outcome", "site"}, ("injection",)),
    ("traces", {"step", "digests"}, ("step",)),
    ("mismatches", {"step", "microstep", "site", "layer", "frequency"}, ("step", "microstep", "site", "layer")),
    ("steps", {"step", "loss"}, ("step",)),
    ("parts", {"part", "what", "found"}, ("part",)),
    ("events", {"event"}, ("event", "workload", "device")),
    ("sites", {"name", "primitive", "direction"}, ("name",)),
    ("clean", {"loss", "gradient_norm", "digest"}, ()),
)
VERDICT = re.compile(r"^[A-Z]{4}")  # start of a line with a verdict

HOSTS = [f"gpu-{number:02}" for number in range(30)]
# Hosts that compute from other data on all of their devices, which only a comparison with other hosts reveals.
WRONG = {"gpu-04", "gpu-17", "gpu-29"}
STRUCK = {"gpu-11"}  # hosts with a simulated fault
OTHER = {"gpu-22"}  # hosts that ran something else

Found: TypeAlias = dict[str, Any]
Words: TypeAlias = tuple[object, ...]


class Place:
    """A temporary folder in which commands run, and their results."""

    def __init__(self, folder: Path, compilers: Path | None) -> None:
        self.folder, self.compilers = folder, compilers
        self.found: dict[str, Found] = {}
        self.corpus = folder / "corpus.txt"
        self.corpus.write_text("\n".join(f"{n} squared is {n * n}, and cubed {n**3}." for n in range(20_000)))

    def start(self, *words: object, **environment: str) -> subprocess.Popen[str]:
        """Starts a command in a process."""
        if set(MINI) <= set(words):
            command = [sys.executable, "-c", NAMED]
            environment |= {"PYTHONPATH": str(REPOSITORY)}
        else:
            command = [str(Path(sys.executable).with_name("sdc"))]
        return self._start([*command, *map(str, words)], environment)

    def hosts(self, folder: Path) -> None:
        """Runs burn-ins of thirty hosts, one after another."""
        _, err, code = end(
            self._start(
                [sys.executable, "-m", "tests.reference", "--hosts", str(folder)], {"PYTHONPATH": str(REPOSITORY)}
            )
        )
        assert code == 0, err

    def _start(self, words: Sequence[str], more: dict[str, str]) -> subprocess.Popen[str]:
        left_out = ("NPROC", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "SDC_OPTIMIZED")
        environment = {key: value for key, value in os.environ.items() if key not in left_out}
        environment |= {
            "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2", "COLUMNS": "400",
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".jax_cache")),
            "TMPDIR": str(self.folder),
        }  # fmt: skip
        pipe = subprocess.PIPE
        return subprocess.Popen(
            words,
            env=environment | more,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def run(self, name: str, *words: object, folder: Path | None = None, **environment: str) -> None:
        """Runs a command, and keeps its output and files under a name."""
        self.keep(name, *end(self.start(*words, **environment)), folder=folder)

    def several(self, name: str, *words: object, folder: Path) -> None:
        """Runs a command in two processes, over Gloo."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = ("--coordinator", f"127.0.0.1:{port}", "--processes", 2)
        processes = [self.start(*words, *shared, "--process", number) for number in range(2)]
        first, second = [end(process) for process in processes]
        self.keep(name, *first, folder=folder)
        self.found[f"{name}: the other process"] = {"exit code": second[2]}

    def keep(self, name: str, out: str, err: str, code: int, *, folder: Path | None) -> None:
        """Keeps the exit code, the output, and the rows of a record."""
        found: Found = {"exit code": code}
        try:
            found["printed"] = json.loads(out)
        except ValueError:
            found["verdict"] = [" ".join(line.split()) for line in out.splitlines() if VERDICT.match(line)]
        if code and not out:
            found["error"] = err.splitlines()[-1:]
        if folder is not None:
            found |= rows_below(folder)
        self.found[name] = dict(flat(self._normal(found)))

    def _normal(self, value: Any) -> Any:
        """Returns a value without ignored fields."""
        if isinstance(value, dict):
            kept = {key: part for key, part in value.items() if not ignored(key, part)}
            return {
                self._text(key): digest(part) if key == "digests" else self._normal(part) for key, part in kept.items()
            }
        if isinstance(value, list):
            return [self._normal(part) for part in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        for path in (self.folder, self.folder.resolve(), REPOSITORY):
            text = text.replace(str(path), "")
        text = re.sub(rf"(?<![\w.-]){re.escape(platform.node())}(?![\w.-])", "HOST", text)
        for pattern, instead in REPLACED:
            text = re.sub(pattern, instead, text)
        if len(text) > LONGEST:
            text = digest(text)
        return text


def end(process: subprocess.Popen[str]) -> tuple[str, str, int]:
    """Returns the standard output, standard error and exit code of a command."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return out, err, process.returncode


def digest(value: Any) -> str:
    """Returns the replacement of a value that is too long."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}"


def ignored(key: str, value: Any) -> bool:
    """Returns whether a field is left out."""
    return key in IGNORED or (key in IGNORED_TEXTS and isinstance(value, str | dict) and value not in HOSTS)


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each number and text in a value with its path."""
    if isinstance(value, dict | list) and value:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            yield from flat(part, f"{key}/{name}" if key else str(name))
    else:
        yield key, value


def rows_below(folder: Path) -> Found:
    """Returns the rows of records in all JSON files of a folder, and the digests of programs."""
    found: Found = {}
    for path in sorted(folder.rglob("*.json*")):
        if "checkpoints" in path.relative_to(folder).parts:
            continue
        text = path.read_text()
        with contextlib.suppress(ValueError):
            values = map(json.loads, text.splitlines()) if path.suffix == ".jsonl" else [json.loads(text)]
            counts: Counter[str] = Counter()
            for name, row in (each for value in values for each in rows_in(value)):
                counts[name] += 1
                twice = f"{name}, {counts[name]}" if counts[name] > 1 else name
                while twice in found:  # in another file
                    twice += "'"
                found[twice] = row
    return found


def rows_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the rows in a value at any depth, each with a name; rows within a row belong to it."""
    if isinstance(value, list):
        for part in value:
            yield from rows_in(part)
    elif isinstance(value, dict):
        for name, fields, numbers in ROWS:
            if fields <= set(value):
                yield " ".join([name, *(str(value[each]) for each in numbers if each in value)]), value
                return
        for key, part in value.items():
            if key == "program" and isinstance(part, dict):
                yield "program", part
            yield from rows_in(part)


def twins(place: Place) -> None:
    """Runs twins: float32, bfloat16, a healthy pair that is resumed, and two processes."""
    twin = ("twin", "--corpus", place.corpus)
    folder = place.folder / "twin"
    words: Words = (*twin, "--suspect", "node11", "--steps", 3, "--run", folder)
    place.run("twin, float32", *words, "--json", folder=folder)
    place.run("twin, float32: report", "report", folder)
    place.run("twin, float32: report, JSON", "report", folder, "--json")
    folder = place.folder / "twin-bfloat16"
    words = ("--dtype", "bfloat16", "--exchange", "step", "--suspect", "node11", "--steps", 3)
    place.run("twin, bfloat16", *twin, *words, "--run", folder, "--json", folder=folder)
    folder = place.folder / "twin-resumed"
    place.run("twin, healthy", *twin, "--steps", 2, "--run", folder)
    place.run("twin, healthy, resumed", *twin, "--steps", 3, "--run", folder, "--resume", "--json", folder=folder)
    folder = place.folder / "twin-processes"
    words = (*MINI, "--devices", 4, "--model", 2, "--steps", 3, "--suspect", "node11", "--run", folder, "--json")
    place.several("twin, two processes", *twin, *words, folder=folder)


def training(place: Place) -> None:
    """Trains with checked products, with other aggregations, and with a running checkpoint that loses half."""
    train = ("train", "--corpus", place.corpus, "--json")
    folder = place.folder / "abft"
    fault = 'scale,factor=-3,rate=4e-3,where=products & scope("*/ffn/*") & direction("bwd")'
    words: Words = ("--abft", "--abft-mode", "locate", "--dtype", "bfloat16", "--fault", fault, "--steps", 2)
    place.run("train, abft", *train, *words, "--run", folder, folder=folder)
    for name, method, more in (
        ("noise and paft", "noise,sigma=0.01+paft,initial_period=2,max_period=4", ()),
        ("lossy", "lossy,p=0.1,packet=375,parity=4", ()),
        ("shadow", "shadow", ("--fault", "bitflip,rate=1e-4,site=bwd/ffn,data=1")),
    ):
        folder = place.folder / name.replace(" ", "-")
        words = (*MINI, "--data", 4, "--aggregate", method, *more, "--steps", 6, "--run", folder)
        place.run(f"train, aggregate {name}", *train, *words, folder=folder)
    folder = place.folder / "scar"
    words = (*MINI, "--checkpoint", "scar", "--checkpoint-every", 8, "--lose-shards", "shards,step=9,fraction=0.5")
    place.run("train, scar", *train, *words, "--steps", 12, "--run", folder, folder=folder)


def traces(place: Place) -> None:
    """Records a trace, the same again, and one with a fault, and compares them."""
    where = (*MINI, "--corpus", place.corpus, "--model", 2, "--steps", 2, "--where", 'probes | primitive("tanh")')
    golden, again, struck = (place.folder / name for name in ("golden", "again", "struck"))
    place.run("trace", "trace", golden, *where, "--fault", "none", "--json", folder=golden)
    place.run("trace, again", "trace", again, *where, "--fault", "none", "--against", golden, "--json", folder=again)
    fault = "bitflip,bits=30,step=1,site=bwd/ffn,iteration=1+1,element=7,model=1"
    place.run("trace, struck", "trace", struck, *where, "--fault", fault, "--json", folder=struck)
    place.run("diff", "diff", golden, struck, "--json")
    place.run("diff: text", "diff", golden, struck)
    place.run("diff of equals", "diff", golden, again, "--json")


def campaign(place: Place) -> None:
    """Runs a campaign of two kinds of faults."""
    folder = place.folder / "campaign"
    words: Words = ("--injections", 32, "--steps", 5, "--follow", 2, "--fault", "bitflip", "nan")
    place.run("campaign", "campaign", *MINI, "--corpus", place.corpus, *words, "--run", folder, "--json", folder=folder)


def burnin(place: Place) -> None:
    """Runs a clean burn-in, and one that finds a simulated fault."""
    burn = ("burnin", "--devices", 4, "--rounds", 2, "--dtypes", "float32")
    folder = place.folder / "burnin"
    place.run("burnin", *burn, "--run", folder, "--json", folder=folder)
    place.run("burnin: verdict", "verdict", folder)
    folder = place.folder / "burnin-fault"
    words: Words = ("--only", "matrix", "--only", "transfers", "--fault", "bitflip,rate=1e-5", "--run", folder)
    place.run("burnin, fault", *burn, *words, "--json", folder=folder)
    place.run("burnin, fault: verdict", "verdict", folder)


def golden(place: Place) -> None:
    """Records and verifies a golden register, and runs a burn-in that uses it."""
    register = place.folder / "here.golden"
    load = ("--devices", 2, "--rounds", 1, "--only", "ordering", "--only", "reductions", "--only", "matrix")
    place.run("golden record", "golden", "record", register, *load, "--json")
    place.run("golden list", "golden", "list", register, "--json")
    place.run("golden verify", "golden", "verify", register, "--json")
    folder = place.folder / "burnin-golden"
    words: Words = ("--devices", 2, "--rounds", 1, "--only", "ordering", "--golden", register, "--run", folder)
    place.run("burnin, golden", "burnin", *words, "--json", folder=folder)


def pair(place: Place) -> None:
    """Compares two hosts, one with a simulated fault."""
    folder = place.folder / "pair"
    words: Words = ("--steps", 2, "--fault", "bitflip,rate=1e-3,site=fwd/ffn", "--run", folder, "--json")
    place.several("pair", "pair", *MINI, "--corpus", place.corpus, *words, folder=folder)
    place.run("pair: verdict", "verdict", folder)


def fleet(place: Place) -> None:
    """Summarizes thirty hosts, three of which are outvoted, and a damaged file."""
    folder = place.folder / "hosts"
    place.hosts(folder)
    codes = {host: folder / f"{host}.code" for host in HOSTS}
    place.found["fleet, burn-ins"] = {f"exit code of {host}": int(file.read_text()) for host, file in codes.items()}
    for file in codes.values():
        file.unlink()
    words: Words = ("fleet", "summarize", folder, "--ledger", place.folder / "ledger.json")
    place.run("fleet summarize", *words, "--output", place.folder / "page", "--json")
    place.run("fleet summarize, again", *words)
    damaged = place.folder / "damaged"
    for host in HOSTS[:3]:
        shutil.copytree(folder / host, damaged / host)
    for path in (damaged / HOSTS[0]).glob("*.json"):
        path.write_text(path.read_text().replace("ordering", "orderinq", 1))
    place.run("fleet summarize, damaged", "fleet", "summarize", damaged, "--json")


def studies(place: Place) -> None:
    """Studies the cost of losing parts of a regression, and the errors that checking schemes find."""
    folder = place.folder / "study"
    words: Words = ("--workload", "regression", "--images", "digits", "--trials", 5, "--starts", 5)
    place.run("study scar", "study", "scar", *words, "--run", folder, "--json", folder=folder)
    folder = place.folder / "abft-study"
    words = ("--steps", 1, "--dtypes", "bfloat16", "--where", 'scope("*/ffn/*")')
    place.run("abft study", "abft", "study", "--corpus", place.corpus, *words, "--run", folder, "--json", folder=folder)


def estimate(place: Place) -> None:
    """Estimates the cost of a step on chips that this machine lacks."""
    folder = place.folder / "estimate"
    words: Words = ("--target", "v5e:2x2", "--config", "tiny", "--tool", "plain", "lockstep", "--run", folder)
    path = "" if place.compilers is None else str(place.compilers)
    place.run("estimate", "estimate", *words, "--json", PYTHONPATH=path)


GROUPS: dict[str, Callable[[Place], None]] = {
    "twin": twins, "train": training, "trace": traces, "campaign": campaign, "burnin": burnin, "golden": golden,
    "pair": pair, "fleet": fleet, "study": studies, "estimate": estimate,
}  # fmt: skip


def burn_hosts(folder: Path) -> None:
    """Runs the burn-in of each host in a forked process with that host's name; this process has started no devices.

    Only the names that the system reports are changed, and the random number generator of `WRONG` hosts: the files are
    what real burn-ins write.
    """
    folder.mkdir()
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="sdc")
    main = script.load()
    package = importlib.import_module("sdc.burnin")
    for module in pkgutil.iter_modules(package.__path__, "sdc.burnin."):
        with contextlib.suppress(Exception):  # a requirement is not installed
            importlib.import_module(module.name)
    for host in HOSTS:
        child = os.fork()
        if child == 0:
            _burn_host(host, folder / host, main)
        _, status = os.waitpid(child, 0)
        (folder / f"{host}.code").write_text(str(os.waitstatus_to_exitcode(status)))


def _burn_host(host: str, folder: Path, main: Callable[[], Any]) -> None:
    """Runs the process of a host, which ends with the exit code of its burn-in."""
    import numpy as np

    vars(platform)["node"] = vars(socket)["gethostname"] = lambda: host
    opened = io.open

    def identified(file: Any, *arguments: Any, **named: Any) -> Any:
        there = str(file).endswith("/machine-id")
        return io.StringIO(f"machine of {host}\n") if there else opened(file, *arguments, **named)

    vars(io)["open"] = vars(builtins)["open"] = identified
    if host in WRONG:
        philox = np.random.Philox
        vars(np.random)["Philox"] = lambda key: philox(key=np.asarray(key) + np.uint64(int(host[-2:])))
    more = ["--fault", "bitflip,rate=1e-4"] if host in STRUCK else ["--seed", "7"] if host in OTHER else []
    flags = ["--devices", "2", "--rounds", "1", "--only", "ordering"]
    sys.argv = ["sdc", "burnin", *flags, *more, "--run", str(folder), "--json"]
    code: Any = 70
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        os._exit(int(code or 0))


def compare(before: dict[str, Found], now: dict[str, Found], show: int = 20) -> bool:
    """Prints differing, missing and new keys by command; returns whether none differ or are missing."""
    same = True
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            print(f"{name}: {'new' if old is None else 'missing'}")
            same &= old is None
            continue
        differing = [f"{key}: {old[key]!r}, now {new[key]!r}" for key in old if key in new and old[key] != new[key]]
        missing = [f"{key}: {old[key]!r}" for key in old if key not in new]
        fresh = [f"{key}: {new[key]!r}" for key in new if key not in old]
        same &= not differing and not missing
        counts = f"{len(old) - len(differing) - len(missing)} equal"
        print(f"{name}: {counts}, {len(differing)} differ, {len(missing)} missing, {len(fresh)} new")
        for word, lines in (("differs", differing), ("missing", missing), ("new", fresh)):
            for line in lines[:show]:
                print(f"  {word}  {line}")
            if len(lines) > show:
                print(f"  {word}  ... and {len(lines) - show} more")
    return same


def main() -> int:
    """Runs the commands, writes their results, and compares them if asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference", description="Writes the commands' results.")
    parser.add_argument("out", type=Path, nargs="?", help="file to write, or to compare with --no-run")
    parser.add_argument("--against", type=Path, help="file of another version")
    parser.add_argument("--compilers", type=Path, help="folder with the package libtpu, for sdc estimate")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="run only these commands; the others stay in OUT")
    parser.add_argument("--no-run", action="store_true", help="run nothing, and compare two files")
    parser.add_argument("--show", type=int, default=20, help="number of keys to show for each kind and command")
    parser.add_argument("--hosts", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hosts is not None:
        burn_hosts(options.hosts)
        return 0
    if options.out is None:
        parser.error("expected OUT, the file to write")
    if not options.no_run:
        with tempfile.TemporaryDirectory(prefix="sdc-reference-") as folder:
            place = Place(Path(folder), options.compilers and options.compilers.resolve())
            if options.only and options.out.exists():
                place.found = json.loads(options.out.read_text())
            for name in options.only or GROUPS:
                began = time.monotonic()
                GROUPS[name](place)
                print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
                options.out.write_text(json.dumps(place.found, indent=1, sort_keys=True) + "\n")
    if options.against is None:
        return 0
    before, now = (json.loads(path.read_text()) for path in (options.against, options.out))
    return 0 if compare(before, now, options.show) else 1


if __name__ == "__main__":
    sys.exit(main())
