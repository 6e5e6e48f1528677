"""`python -m tests.storms`: runs the storms, all of them or some, and tells what came of each.

Ends with 1 if anything happened that must not. With the same seed the trials are the same, but for the moments at which
processes are: those depend on the machine.
"""

import importlib
import os
import sys
import time

import tyro

STORMS = {
    "mutations": 1000,
    "commands": 500,
    "kills": 108,
    "flips": 60,
    "cuts": 20,
    "bits": 10_000,
    "saves": 100,
    "pairs": 24,
}
"""How many trials each of them has."""


def main(storms: tyro.conf.Positional[tuple[str, ...]] = (), share: float = 1.0, seed: int = 0) -> None:
    """Runs storms.

    Example: python -m tests.storms kills mutations --share 0.1

    Args:
        storms: names of those to run: mutations, commands, kills, flips, cuts, bits, saves, pairs; by
            default all.
        share: share of the trials that are done; the whole takes less than two hours on two cores.
        seed: seed of everything that is drawn.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    bad = 0
    told = []
    for name in storms or STORMS:
        if name not in STORMS:
            sys.exit(f"storm {name!r} is unknown; expected some of {', '.join(STORMS)}")
        started = time.monotonic()
        tally = importlib.import_module(f"tests.storms.{name}").run(max(1, round(STORMS[name] * share)), seed)
        lines = [*tally.lines(), f"  {time.monotonic() - started:.0f} s"]
        print("\n".join(lines), flush=True)
        told += lines
        bad += len(tally.wrong)
    print("\n".join(["", "in all:", *told, f"{bad} that must not be"]))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":  # processes that are started from here import this file
    tyro.cli(main)
