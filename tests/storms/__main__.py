"""`python -m tests.storms`: runs all or some of the storms, and prints the outcomes of each.

Ends with 1 if any outcome is forbidden. The same seed gives the same trials, except that the progress of processes at a
given moment depends on the machine.
"""

import importlib
import os
import sys
import tempfile
import time

import tyro

from tests.flags import compile_quickly

STORMS = {
    "mutations": 1000,
    "commands": 500,
    "kills": 108,
    "flips": 60,
    "strikes": 60,
    "cuts": 20,
    "bits": 10_000,
    "saves": 100,
    "pairs": 24,
    "soak": 20_000,
    "schedules": 10_000,
    "standing": 500,
    "calls": 50_000,
    "coverage": 2000,
    "watches": 100_000,
    "detections": 20,
}
"""Number of trials of each storm; for the soak and for watches, of steps; for detections, of each subject; for calls,
more than there are."""


def main(storms: tyro.conf.Positional[tuple[str, ...]] = (), share: float = 1.0, seed: int = 0) -> None:
    """Runs storms.

    Example: python -m tests.storms kills mutations --share 0.1

    Args:
        storms: names of the storms to run: mutations, commands, kills, flips, strikes, cuts, bits, saves, pairs,
            soak, schedules, standing, calls, coverage, watches, detections; by default all.
        share: share of the trials to run; all of them take about nine hours on two cores.
        seed: seed of all random choices.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    compile_quickly()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("SDC_LEDGER", f"{folder}/ledger.sqlite")
        sys.exit(_run(storms, share, seed))


def _run(storms: tuple[str, ...], share: float, seed: int) -> int:
    bad = 0
    summary = []
    for name in storms or STORMS:
        if name not in STORMS:
            sys.exit(f"storm {name!r} is unknown; expected one or more of {', '.join(STORMS)}")
        started = time.monotonic()
        tally = importlib.import_module(f"tests.storms.{name}").run(max(1, round(STORMS[name] * share)), seed)
        lines = [*tally.lines(), f"  {time.monotonic() - started:.0f} s"]
        print("\n".join(lines), flush=True)
        summary += lines
        bad += len(tally.wrong)
    print("\n".join(["", "in all:", *summary, f"{bad} forbidden outcomes"]))
    return 1 if bad else 0


if __name__ == "__main__":  # processes that storms start import this file
    tyro.cli(main)
