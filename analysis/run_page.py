"""Builds the page of a twin run, a training run or a trace."""

import math
from collections.abc import Iterator
from typing import Any

from sdc.records import Contents
from sdc.schema import RunManifest, RunSummary, Suspect
from sdc.verdict import Verdict, limit

from . import figures, state_losses, tables
from .headline import LOSSES, excluded, headline
from .report import Definition, Figure, LeftOut, Part, Report, Table, Text, marked, moment, record_page, show
from .series import real
from .statistics import burn_in_steps, needed_mismatches, probability_seen

SIMULATED = "simulated faults"
LABELS = {Verdict.CORRUPT: "✖ CORRUPT", Verdict.CLEAN: "✔ CLEAN", Verdict.INCONCLUSIVE: "? INCONCLUSIVE"}
KINDS = {"twin": "twin run", "train": "training run", "trace": "trace"}
SYNC = {
    "compute": "compute: submodules are compared and repaired in the forward and backward passes",
    "params": "params: parameters and optimizer state are overwritten after every step",
    "none": "none: twins are not synchronized",
}


def build(run: Contents, summary: RunSummary) -> Report:
    """Builds the page from the text, tables and figures of a run."""
    suspect, kind = run.run.suspect or Suspect(), KINDS[run.kind.name]
    simulated = ""
    if summary.simulated or suspect.simulated:
        named = f"suspect {suspect.name}" if suspect.name else "the suspect"
        simulated = f"{named} ran on healthy hardware and was deliberately corrupted"
        if suspect.name == LOSSES:
            simulated = "parts of the state were deliberately discarded on healthy hardware"
    # There is no verdict if nothing is compared.
    label = kind.upper() if summary.verdict is None else LABELS[summary.verdict]
    if simulated and summary.verdict == "corrupt":
        label += f" ({SIMULATED})"
    if run.summary is None:
        label += ", RUN NOT ENDED"
    measured, mark = list(_measured(run, summary)), SIMULATED if simulated else ""
    shown = (part for part in measured if isinstance(part, Table) and part.caption in tables.BRIEF)
    brief: list[Part] = [marked(part, mark) for part in shown]
    known = (real(value) for value in summary.final_loss)
    losses = ("none" if one is None else f"{one:.4f}" if abs(one) < 1e6 else f"{one:.4g}" for one in known)
    brief.append(Text(f"{summary.steps} steps, last loss {', '.join(losses) or 'none'}"))
    if summary.sync in ("params", "none"):
        noise, difference = summary.worst_noise_to_signal, summary.parameter_difference
        if noise is not None:
            brief.append(Text(f"worst noise-to-signal of the gradient (equation 5): {noise:.3g}"))
        if difference is not None:
            brief.append(Text(f"parameter difference: {difference:.3g}"))
    return record_page(
        command=run.run.command,
        mark=mark,
        kind=kind,
        title=run.path.resolve().name,
        verdict=summary.verdict,
        label=label,
        headline=headline(run, summary),
        simulated=simulated,
        faults=suspect.faults if simulated else (),
        notes=_notes(run, summary),
        facts=_facts(run.run, summary, suspect),
        measured=measured,
        drawn=_drawn(run, summary),
        settings=[
            ("Environment", run.manifest.get("environment")),
            ("Program and data", {key: run.manifest.get(key) for key in ("program", "data", "seed")}),
            ("Configuration", run.manifest.get("config")),
        ],
        definitions=DEFINITIONS,
        about=(SOURCE, BURSTS),
        brief=brief,
    )


def _drawn(run: Contents, summary: RunSummary) -> list[Figure | LeftOut]:
    """Returns the figures, starting with the one that shows the headline's finding."""
    manifest, every = run.run, run.attempts
    drawn = [figures.losses(run.steps), figures.gradients(run.steps)]
    if manifest.kind == "twin":
        drawn = [
            figures.where_and_when(every.steps, every.mismatches, manifest.layers or 0),
            figures.frequency_over_time(summary, run.steps),
            figures.layers_heat_map(summary),
            drawn[1],
            figures.parameter_difference(run.steps),
            drawn[0],
        ]
    if manifest.abft is not None:
        drawn.insert(0, figures.flags_over_time(run.steps))
    if summary.verdict == "clean" and manifest.kind == "twin":
        drawn.insert(0, drawn.pop())  # overlapping lines show a clean run
    if manifest.aggregate:
        drawn = [*figures.aggregation(run.steps), *drawn]
    if manifest.running is not None:
        drawn.append(state_losses.outlook_figure(run.steps))
    return drawn


def _measured(run: Contents, summary: RunSummary) -> Iterator[Table | LeftOut]:
    manifest = run.run
    if manifest.kind == "twin":
        details = run.attempts.mismatches
        yield from (
            tables.submodules(summary, run.steps),
            tables.counts(summary),
            tables.whole_step(summary, run.steps),
        )
        yield from (tables.ranks(details), tables.first_mismatches(details))
    if manifest.abft is not None:
        yield from tables.products(summary.abft)
    if manifest.guard is not None:
        yield from tables.guard(summary.guard, len(run.steps))
    if manifest.aggregate:
        yield from tables.aggregation(run.steps, summary)
    if manifest.running is not None:
        yield state_losses.losses_table(run.steps)
        yield state_losses.outlook_table(run.steps)
        yield state_losses.advice_table(manifest, summary, run.steps)
    yield tables.training(summary)


def _notes(run: Contents, summary: RunSummary) -> Iterator[str]:
    planned = run.run.steps
    if run.summary is None:
        yield (
            f"This run is incomplete: {summary.steps} of {show(planned)} planned steps are recorded, and everything on "
            "this page is computed from these steps."
        )
    elif planned is not None and len(run.steps) < planned:
        yield f"This run ended early: {summary.steps} of {planned} planned steps were completed."
    if run.discarded:
        yield (
            f"Repeated: {_steps(len(run.discarded))}. Findings from the discarded attempts at these steps count toward "
            "the verdict and appear in the headline, in the figure “Where and when”, and in the tables of ranks and "
            "first mismatches. Everything else on this page refers to the recorded steps."
        )
    if run.run.abft is not None and run.run.abft.departs:
        yield f"The profile of the matrix products was measured on another setup: {'; '.join(run.run.abft.departs)}."
    if summary.verdict == "clean" and (run.run.kind == "twin" or run.run.abft is not None):
        yield (
            "The bound assumes that elements fail independently, but corruption comes in bursts. Without that "
            f"assumption, {_steps(len(run.steps))} without a mismatch exclude only {excluded(len(run.steps))}."
        )


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}"


def _facts(manifest: RunManifest, summary: RunSummary, suspect: Suspect) -> Iterator[tuple[str, Any]]:
    twins, abft = manifest.kind == "twin", manifest.abft
    yield "verdict", summary.reason
    yield "steps", f"{summary.steps} of {show(manifest.steps)} planned"
    yield "started", moment(manifest.created)
    if twins or abft is not None or manifest.guard is not None:
        yield "suspect", suspect.name or "not named"
        yield "faults", "simulated" if suspect.simulated else "none injected, so any findings are real"
    if twins:
        first = summary.first_mismatch_step
        yield "synchronization", SYNC.get(str(summary.sync), summary.sync)
        yield "first mismatch", "none" if first is None else f"step {first}"
        yield "twins", manifest.twins
        yield "comparison", manifest.compare
        yield "exchange of digests", manifest.exchange
    if abft is not None:
        yield "products", f"{abft.where}, {abft.scheme}, mode {abft.mode}"
        yield "thresholds", f"{abft.profile} (kappa {show(abft.kappa)})"
    if manifest.guard is not None:
        yield "guard", f"budget {show(manifest.guard.budget)} of the time of the steps"
    if manifest.aggregate:
        yield "aggregation", manifest.aggregate
    yield "mesh", " × ".join(f"{axis} {size}" for axis, size in (manifest.mesh or {}).items()) or None
    yield "placement", manifest.placement


SOURCE = (
    "Equation numbers are those of Ma, Pei, Lausen and Karypis, Understanding Silent Data Corruption in LLM Training "
    "(arXiv 2502.12340). Twin 0 is the reference f, and another twin is the suspect f'."
)

BURSTS = (
    "The bounds assume that every element fails independently. In fact, corruption comes in bursts, in time and "
    "within a tensor, so the true uncertainty is larger. The probability that a run is clean falls to 5 % at "
    f"{limit(needed_mismatches(), 3, up=True)} expected mismatches if elements are independent. If the rate is "
    f"exponentially distributed over the runs, it falls to 5 % only at {limit(needed_mismatches(shape=1), 3, up=True)} "
    "expected mismatches, and if the rate has a gamma distribution of shape 1/2, only at "
    f"{limit(needed_mismatches(shape=0.5), 3, up=True)}. A burn-in that lasts three times the mean interval between "
    "bursts shows a burst with 95 % probability only if this mean is known. If it was estimated, the burn-in must "
    f"last {burn_in_steps(1, observed=1)} times a single observed interval, "
    f"{limit(burn_in_steps(1000, observed=3) / 1000, 2, up=True)} times the mean of three intervals, or "
    f"{limit(burn_in_steps(1000, observed=10) / 1000, 2, up=True)} times the mean of ten. A burn-in that lasts only "
    "three times a single observed interval shows a burst with "
    f"{limit(100 * probability_seen(3, 1, observed=1), 2, up=False)} % probability. The study reports a single event "
    "for each of two nodes. Without synchronization, node 13 had no difference before step 450, so by this rule its "
    f"burn-in must last {burn_in_steps(450, observed=1):,} steps. Under computation synchronization, node 14 had one "
    f"spike in about 4,500 steps, so its burn-in must last {burn_in_steps(4500, observed=1):,} steps. Under parameter "
    "synchronization, however, which does not interrupt the computation within a step, node 14 differed at every "
    "step. Faults may therefore depend on the load, so a long run should also keep the machine busy."
)

DEFINITIONS = (
    Definition(
        "Mismatch frequency of a submodule at a microstep",
        "freq = Σ_t #(f'(x_t) ≠ f(x_t)) / (TP · MBS · L · H)",
        "Share of elements that differ in any bit, over all tensor-parallel ranks t. NaNs with the same bits are "
        "equal; -0 and +0 differ.",
        equation="(1)",
    ),
    Definition(
        "Mismatch frequency",
        "freq = mean over decoder layers of (1)",
        "Here the mean also extends over microsteps, so it equals the number of mismatched elements divided by the "
        "number of checked elements.",
        equation="(2)",
    ),
    Definition(
        "Mismatch severity of a submodule at a microstep",
        "sev = max_t mean |f' - f| / |f|",
        "The mean is taken over the mismatched elements that have a finite, non-zero reference and a finite value. The "
        "paper does not define the other cases. Here they are excluded from the mean and counted separately, as zero "
        "reference or non-finite.",
        equation="(3)",
    ),
    Definition(
        "Mismatch severity",
        "sev = max over decoder layers of (3)",
        "Here the maximum is also taken over steps.",
        equation="(4)",
    ),
    Definition(
        "Worst-case noise-to-signal",
        "max over steps of ‖g' - g‖₂ / ‖g‖₂",
        "g and g' are the gradients of the reference and of the suspect in an optimizer step, before clipping.",
        equation="(5)",
    ),
    Definition(
        "Upper bound on a frequency",
        f"x = 0: {-math.log(0.05):.3g} / n;  x > 0: χ²₀.₉₅(2x + 2) / (2n)",
        "One-sided 95 % bound for x mismatches in n checked elements, assuming that elements fail independently.",
    ),
    Definition(
        "Interval of a frequency",
        "[f - q₀.₉₇₅ s, f - q₀.₀₂₅ s]",
        "Two-sided 95 % confidence interval for mismatches that come in bursts, from a block bootstrap over steps. f "
        "is the measured frequency, s is the standard error of f from blocks of steps, and q is a quantile of (f* - "
        "f) / s* over blocks drawn with replacement. In simulations, the interval contained the true frequency in 91 "
        "to 96 % of runs. There is no interval if fewer than 8 blocks have a mismatch.",
    ),
    Definition(
        "Verdict",
        "corrupt | clean | inconclusive",
        "Corrupt: at least one bit differed. Clean: enough was checked and nothing differed. Inconclusive: too little "
        "was checked for a verdict. Unchecked values do not count as clean.",
    ),
    Definition(
        "Course of a fault",
        "persistent | intermittent | transient",
        "The course follows from the steps after the first finding: it is persistent if all of these steps have a "
        "finding, transient if none of them has one, and intermittent otherwise. The course is unknown if no step "
        "followed, or if the twins are not synchronized.",
    ),
)
