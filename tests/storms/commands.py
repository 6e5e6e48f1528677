"""Command lines: any flag of any command with valid, invalid and absurd values."""

import contextlib
import io
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

from sdc.tools import cli, parse

from .tally import Tally

LIMIT = 20.0
"""Time limit in seconds until a command line is refused, or until devices would start."""
VALUES = (
    "", "0", "1", "2", "3", "-1", "4096", "2147483648", "1e300", "nan", "inf", "1e-9", "0x10", "٣", "true", "None", "x",
    "tiny", "mini", "bench", "compute", "params", "none", "mesh", "vmap", "gated", "float32", "bfloat16", "node11",
    "healthy", "bitflip,rate=1e-5", "bitflip,rate=2", "nan,site=", "scale,rate=1e-6,where=products", "probes",
    'primitive("tanh")', "(" * 5000, "~" * 500 + "probes", "everything & ~everything", "paft", "lossy,p=0.4", "shadow",
    "dropcompute,threshold=inf", "127.0.0.1:1", "localhost:99999", ":1", "nowhere.invalid:1", "/dev/zero", "/dev/null",
    "/proc/self/mem", ".", "..", "/", "{folder}/new", "{folder}/text", "{folder}/fifo", "{folder}/loop", "x" * 5000,
    "a\x00b", "\udcff", "--json", "--", "-", "--help", "*", "$(true)", "'", '"',
)  # fmt: skip


class Started(BaseException):
    """Raised where devices would start: the command line is valid."""


def run(count: int, seed: int) -> Tally:
    """Tries `count` command lines."""
    tally, draw = Tally("command lines"), random.Random(seed)
    commands = {name: kind for kind, name in _commands()}
    for _ in range(count):
        folder = Path(tempfile.mkdtemp())
        (folder / "text").write_text(10_000 * "x")
        os.mkfifo(folder / "fifo")
        (folder / "loop").symlink_to(folder / "loop")
        words = _words(draw, commands)
        _trial(tally, [word.replace("{folder}", str(folder)) for word in words], folder)
        tally.trials += 1
    return tally


def _commands() -> list[tuple[Any, str]]:
    found = []
    for name in parse.COMMANDS:
        below = get_type_hints(kind := parse.spec_of(name), include_extras=True).get("command")
        choices = [get_args(each)[:2] for each in get_args(get_args(below)[0])] if below else [(kind, None)]
        found += [(kind, f"{name} {about.name}" if about else name) for kind, about in choices]
    return found


def _words(draw: random.Random, commands: dict[str, Any]) -> list[str]:
    name = draw.choice([*commands, "dance"])
    words = name.split()
    offered = parse.flags(commands[name]) if name in commands else ()
    flags = [f"--{each.flag.name.replace('_', '-')}" for each in offered] or ["--steps"]
    for _ in range(draw.randrange(6)):
        flag = draw.choice([*flags, "--stpes", "--no-json"])
        words += draw.choice(
            [[flag, draw.choice(VALUES)], [flag], [draw.choice(VALUES)], [f"{flag}={draw.choice(VALUES)}"]]
        )
    return words


def _trial(tally: Tally, words: list[str], folder: Path) -> None:
    def start(*_: object, **__: object) -> None:
        raise Started

    places = (
        "sdc.records.prepare", "sdc.train.joined",
        "sdc.train.studies.chosen_tasks", "sdc.train.doctor.laboratory.Laboratory.ask",
    )  # fmt: skip
    said, out = io.StringIO(), io.StringIO()
    started = time.monotonic()
    shown = " ".join(word if len(word) < 60 else f"{word[:40]}…" for word in words)
    try:
        with contextlib.ExitStack() as stack:
            for place in places:
                stack.enter_context(mock.patch(place, start))
            stack.enter_context(contextlib.redirect_stderr(said))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.chdir(folder))
            code: int | None = cli.run(words)
    except Started:
        code = None
    except SystemExit as ended:  # from --help
        code = ended.code if isinstance(ended.code, int) else 3
    except BaseException as error:
        tally.fail("traceback", f"{shown}: {error!r}")
        return
    if time.monotonic() - started > LIMIT:
        tally.fail("hang", f"{time.monotonic() - started:.0f} s: {shown}")
    tally.read(said.getvalue(), shown)
    tally.note("in order" if code is None else f"exit {code}")
    if code not in (None, 0, 2, 3):
        tally.fail("odd exit code", f"{code}: {shown}: {said.getvalue()[-300:]}")
    if code == 2 and (said.getvalue().count("\n") != 1 or not said.getvalue().startswith("sdc: error: ")):
        tally.fail("odd exit code", f"not one line: {shown}: {said.getvalue()[-300:]}")
