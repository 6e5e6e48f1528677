"""What to do next, as a record has it: one to three things, the first first."""

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from .series import Row, mapping, sequence
from .waiting import burn_in_steps, count_bursts, excluded_interval, mean_interval_limits


@dataclasses.dataclass(frozen=True)
class Action:
    """Something to do.

    Attributes:
        what: the thing to do, in a few words.
        how: how, and why.
    """

    what: str
    how: str


LISTED = "docs/fleet.md, “Which host is it”"
HOLD = "Keep this folder: it is the evidence."


def actions(
    manifest: Row,
    summary: Row,
    *,
    ended: bool,
    course: str | None,
    first: int | None,
    named: str,
    hits: Sequence[int] = (),
) -> list[Action]:
    """What follows from a run.

    Args:
        manifest: its manifest.
        summary: its summary.
        ended: whether it wrote its summary.
        course: how the fault went on, if there was one and that is known.
        first: the first step with a finding.
        named: the hardware that was found to differ; may be empty.
        hits: numbers of the steps with a finding.
    """
    verdict = summary.get("verdict")
    if verdict == "corrupt":
        simulated = summary.get("simulated") or mapping(manifest.get("suspect")).get("simulated")
        found = _simulated(manifest) if simulated else _corrupt(manifest, summary, course, first, named, hits)
    elif verdict == "clean":
        found = _rehearsed() if summary.get("rehearsal") else _clean(summary)
    elif not ended:
        found = _unfinished(manifest, summary)
    elif verdict is None:
        found = _unjudged(manifest)
    else:
        found = _inconclusive(summary)
    return list(found)[:3]


def _simulated(manifest: Row) -> Iterator[Action]:
    yield Action("Nothing to mend: the detection works", "The fault was made on purpose, and it was found.")
    if manifest.get("kind") == "twin":
        yield Action("Test the real hosts", "Run it again without --suspect and --fault: what is found then is real.")


def _corrupt(
    manifest: Row, summary: Row, course: str | None, first: int | None, named: str, hits: Sequence[int]
) -> Iterator[Action]:
    kind = manifest.get("kind")
    if summary.get("rehearsal"):
        yield Action(
            "Suspect this machine or its libraries",
            "All twins ran on one processor, so no host stands out. Run it again; if it differs again, test the memory "
            "and compare with another machine by sdc trace.",
        )
    elif kind == "trace":
        yield Action(
            "Trace again on a third machine",
            "Of two traces one is wrong; sdc diff with a third tells which. Then narrow the operation down with the "
            "selector that sdc diff prints.",
        )
    elif kind == "twin" and manifest.get("twins") in (2, None):
        yield Action(
            "Find out which twin is wrong",
            "Run again with a third host (--twins 3 --processes 3), or swap the hosts of the twins: the fault goes "
            f"with its host ({LISTED}).",
        )
    else:
        what = "Set aside until tested" if course == "transient" else "Take out of service"
        yield Action(f"{what}: {named or 'the host that differs'}", HOLD)
    yield from _course(course, summary, hits)
    if first is not None:
        before = f"from before step {first}" if first else "of the start"
        yield Action(
            "Distrust what was trained there", f"Weights that it made are in doubt; go back to a checkpoint {before}."
        )


def _course(course: str | None, summary: Row, hits: Sequence[int]) -> Iterator[Action]:
    if course == "persistent":
        yield Action(
            "Reproduce it and report it to the vendor",
            "It comes back at each step, so a few steps show it again: sdc trace on it and on a sound host names the "
            "operation.",
        )
    elif course is not None:
        yield Action("Watch it for longer", f"It was not there at every step. {again(hits, summary['steps'])}")


def again(hits: Sequence[int], steps: int) -> str:
    """How many steps show a fault again that was there at some of a run's steps, and what that rests on, as words."""
    bursts = max(1, count_bursts(hits, steps))
    few, many = mean_interval_limits(steps, bursts)
    plan = burn_in_steps(steps / bursts, observed=bursts)
    return (
        f"Plan {plan:,} more steps on the same hosts to see it again (95 %). This rests on {bursts:,} "
        f"burst{'s' * (bursts > 1)} in {steps:,} steps, from which the mean interval of bursts at random times is "
        f"known as {few:,.0f} to {many:,.0f} steps."
    )


def excluded(steps: int) -> str:
    """Which bursts a run of so many steps excludes that showed none, as words."""
    interval = excluded_interval(steps)
    if interval < 1:
        return "no bursts at all, so short is it"
    often = "at every step" if interval < 2 else f"every {interval:.3g} steps or oftener"
    return f"(95 %) bursts that come, on average, {often}"


def _clean(summary: Row) -> Iterator[Action]:
    yield Action("Nothing to mend", "These hosts, as far as this run goes, can stay in service.")
    yield Action(
        "Run longer against rare bursts", f"This run excludes {excluded(summary['steps'])}; for more give more --steps."
    )


def _rehearsed() -> Iterator[Action]:
    yield Action(
        "Run it on the hosts that you want to test",
        "This was a rehearsal on one processor. Start one process on each host, with --coordinator, --processes and "
        "--process (docs/fleet.md).",
    )


def _unfinished(manifest: Row, summary: Row) -> Iterator[Action]:
    words = [str(word) for word in sequence(manifest.get("command"))]
    named = {"--run", "trace"} & set(words)  # else the command that goes on has a further flag
    again = shlex.join([*(word for word in words if word != "--resume"), "--resume"])
    yield Action(
        "Let it go on, or resume it",
        f"{summary['steps']:,} of {manifest.get('steps', '?')} planned steps are on record. If it was stopped, start "
        f"it again {f'by: {again}' if named else 'with --resume'}; then there will be a verdict.",
    )


def _unjudged(manifest: Row) -> Iterator[Action]:
    if manifest.get("kind") == "trace":
        yield Action(
            "Compare it with another trace", "sdc diff GOLDEN THIS, or sdc trace --against GOLDEN on the next machine."
        )
    else:
        yield Action(
            "Nothing: no verdict was asked for",
            "For one, check the products (sdc train --abft) or train twins (sdc twin).",
        )


def _inconclusive(summary: Row) -> Iterator[Action]:
    found: Any = mapping(summary.get("abft"))
    if found.get("flagged"):
        yield Action(
            "Run the same steps on another device",
            "Rows that are as wrong when computed again are a permanent fault or a false alarm; another device tells.",
        )
    elif sequence(found.get("skipped")):
        yield Action(
            "Check more of the products", "The table of products that were not checked says why; --least-coverage sets "
            "how much is enough."
        )  # fmt: skip
    elif summary.get("simulated"):
        yield Action(
            "Aim the fault at what is checked",
            "It struck where no check looks, or after all was NaN: choose a site, a smaller rate or other bits.",
        )
    else:
        yield Action("Mend what the reason names, and run again", "This says nothing about the hardware.")
