"""The page of a twin, a training run or a trace."""

import math
from typing import Any

from sdc.records import Contents
from sdc.schema import Number, RunManifest, RunSummary, Suspect
from sdc.verdict import Verdict

from . import aggregates, figures, outlooks, recoveries, tables
from .headline import LOSSES, excluded, headline
from .report import Definition, Figure, LeftOut, Part, Report, Table, Text, marked, record_page, show
from .series import real
from .statistics import burn_in_steps, needed_mismatches, probability_seen

SIMULATED = "simulated faults"
LABELS = {Verdict.CORRUPT: "✖ CORRUPT", Verdict.CLEAN: "✔ CLEAN", Verdict.INCONCLUSIVE: "? INCONCLUSIVE"}
KINDS = {"twin": "twin run", "train": "training run", "trace": "trace"}
SYNC = {
    "compute": "compute: submodules are compared and repaired, forward and backward",
    "params": "params: parameters and optimizer state are overwritten after every step",
    "none": "none: twins run free",
}


def build(run: Contents, summary: RunSummary) -> Report:
    """Collects the text, tables and figures."""
    manifest = run.run
    suspect = manifest.suspect or Suspect()
    simulated = _simulated(suspect) if summary.simulated or suspect.simulated else ""
    kind = KINDS[run.kind.name]
    # Where nothing is compared there is no verdict.
    label = kind.upper() if summary.verdict is None else LABELS[summary.verdict]
    if simulated and summary.verdict == "corrupt":
        label += f" ({SIMULATED})"
    if run.summary is None:
        label += ", RUN NOT ENDED"
    measured = list(_measured(run, summary))
    return record_page(
        run.manifest,
        mark=SIMULATED if simulated else "",
        kind=kind,
        title=run.path.resolve().name,
        verdict=summary.verdict,
        label=label,
        headline=headline(run, summary),
        simulated=simulated,
        faults=suspect.faults if simulated else (),
        notes=_notes(run, summary),
        facts=_facts(manifest, summary, suspect),
        measured=measured,
        drawn=_drawn(run, summary),
        settings={
            "Program and data": {key: run.manifest.get(key) for key in ("program", "data", "seed")},
            "Configuration": run.manifest.get("config"),
        },
        definitions=DEFINITIONS,
        about=(SOURCE, BURSTS),
        brief=_brief(summary, measured, SIMULATED if simulated else ""),
    )


def _drawn(run: Contents, summary: RunSummary) -> list[Figure | LeftOut]:
    """Figures, the one that shows what the headline says first."""
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
        drawn.insert(0, drawn.pop())  # lines that cover each other are what clean looks like
    if manifest.aggregate:
        drawn = [*aggregates.figures(run.steps), *drawn]
    if manifest.running is not None:
        drawn.append(outlooks.figure(run.steps))
    return drawn


def _measured(run: Contents, summary: RunSummary) -> list[Table | LeftOut]:
    manifest = run.run
    measured: list[Table | LeftOut] = []
    if manifest.kind == "twin":
        details = run.attempts.mismatches
        measured = [
            tables.submodules(summary, run.steps), tables.counts(summary), tables.whole_step(summary, run.steps),
            tables.ranks(details), tables.first_mismatches(details),
        ]  # fmt: skip
    if manifest.abft is not None:
        found = summary.abft
        measured += [tables.products(found), tables.unchecked_products(found), tables.flagged_places(found)]
    if manifest.aggregate:
        measured += aggregates.tables(run.steps, summary)
    if manifest.running is not None:
        measured += [
            recoveries.table(run.steps), outlooks.table(run.steps), outlooks.advised(manifest, summary, run.steps)
        ]  # fmt: skip
    return [*measured, tables.training(summary)]


def _brief(summary: RunSummary, measured: list[Table | LeftOut], mark: str) -> list[Part]:
    """What a terminal shows."""
    shown = (part for part in measured if isinstance(part, Table) and part.caption in tables.BRIEF)
    parts: list[Part] = [marked(part, mark) for part in shown]
    losses = ", ".join(map(_loss, summary.final_loss))
    parts.append(Text(f"{summary.steps} steps, last loss {losses or 'none'}"))
    for key, label in (
        ("worst_noise_to_signal", "worst noise-to-signal of the gradient (equation 5)"),
        ("parameter_difference", "parameter difference"),
    ):
        if (value := getattr(summary, key)) is not None and summary.sync in ("params", "none"):
            parts.append(Text(f"{label}: {value:.3g}"))
    return parts


def _loss(value: Number) -> str:
    loss = real(value)
    return "none" if loss is None else f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


def _simulated(suspect: Suspect) -> str:
    name = suspect.name
    if name == LOSSES:
        return "parts of the state were thrown away on purpose, on sound hardware"
    return f"{f'suspect {name}' if name else 'the suspect'} ran on sound hardware and was corrupted on purpose"


def _notes(run: Contents, summary: RunSummary) -> list[str]:
    notes = []
    planned = run.run.steps
    if run.summary is None:
        notes.append(
            f"This run has not ended: {summary.steps} of {show(planned)} planned steps are on record, "
            "and everything here is computed from them."
        )
    elif planned is not None and len(run.steps) < planned:
        notes.append(f"This run ended early: {summary.steps} of {planned} planned steps were done.")
    if run.discarded:
        notes.append(
            f"Run again: {_steps(len(run.discarded))}. What that showed the time before counts for the verdict, and is "
            "in the sentence, the figure of where and when and the tables of ranks and first mismatches; all else is "
            "of the steps on record."
        )
    if run.run.abft is not None and run.run.abft.departs:
        notes.append(f"The profile of the products was measured elsewhere: {'; '.join(run.run.abft.departs)}.")
    if summary.verdict == "clean":
        notes.append(
            "The bound takes elements to fail independently. Corruption is bursty: what speaks for itself is only that "
            f"{_steps(len(run.steps))} without one exclude {excluded(len(run.steps))}."
        )
    return notes


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}"


def _facts(manifest: RunManifest, summary: RunSummary, suspect: Suspect) -> list[tuple[str, Any]]:
    mesh = " × ".join(f"{axis} {size}" for axis, size in (manifest.mesh or {}).items())
    steps = f"{summary.steps} of {show(manifest.steps)} planned"
    facts: list[tuple[str, Any]] = [("verdict", summary.reason), ("steps", steps), ("started", manifest.created)]
    if manifest.kind == "twin":
        sync = summary.sync
        first = summary.first_mismatch_step
        facts += [
            ("suspect", suspect.name or "not named"),
            ("faults", "simulated" if suspect.simulated else "none injected: what is found here is real"),
            ("synchronization", SYNC.get(str(sync), sync)),
            ("first mismatch", "none" if first is None else f"step {first}"),
            ("twins", manifest.twins),
            ("comparison", manifest.compare),
            ("exchange of digests", manifest.exchange),
        ]
    if (abft := manifest.abft) is not None:
        facts.append(("products", f"{abft.where}, {abft.scheme}, mode {abft.mode}"))
        facts.append(("thresholds", f"{abft.profile} (kappa {show(abft.kappa)})"))
        if manifest.kind != "twin":
            faults = "simulated" if suspect.simulated else "none injected: what is found here is real"
            facts += [("suspect", suspect.name or "not named"), ("faults", faults)]
    if manifest.aggregate:
        facts.append(("aggregation", manifest.aggregate))
    return [*facts, ("mesh", mesh or None), ("placement", manifest.placement)]


SOURCE = (
    "Equation numbers are those of Ma, Pei, Lausen and Karypis, Understanding Silent Data Corruption in LLM Training "
    "(arXiv 2502.12340). Twin 0 is the reference f, another twin the suspect f'."
)

BURSTS = (
    "Bounds take every element to fail independently of the others. Corruption comes in bursts, in time and within a "
    "tensor, so the true uncertainty is larger: expected mismatches of "
    f"{needed_mismatches():.0f} make a clean run improbable (5 %) if elements are independent, but it takes "
    f"{needed_mismatches(shape=1):.0f} if the rate varies between runs like an exponential variable, and "
    f"{needed_mismatches(shape=0.5):.0f} if it varies like a gamma variable of shape 1/2. A burn-in of three mean "
    "intervals between bursts shows one with 95 % only if that mean is known. Where it was estimated it takes "
    f"{burn_in_steps(1, observed=1)} times the interval if one was observed, "
    f"{burn_in_steps(1000, observed=3) / 1000:.1f} times the mean of three and "
    f"{burn_in_steps(1000, observed=10) / 1000:.1f} times that of ten; three times a single one show a burst with "
    f"{100 * probability_seen(3, 1, observed=1):.0f} %. Both nodes of the study of which one event is told need as "
    "much: node 13, without synchronization without a difference before step 450, "
    f"{burn_in_steps(450, observed=1):,} steps, and node 14, with one spike in about 4,500 steps under computation "
    f"synchronization, {burn_in_steps(4500, observed=1):,}. Under parameter synchronization the same node differed at "
    "every step: keep the machine busy, besides running it for long."
)

DEFINITIONS = (
    Definition(
        "Mismatch frequency of a submodule at a microstep",
        "freq = Σ_t #(f'(x_t) ≠ f(x_t)) / (TP · MBS · L · H)",
        "Share of elements that differ in any bit, over all tensor-parallel ranks t: NaN equals the same NaN, and -0 "
        "differs from +0.",
        equation="(1)",
    ),
    Definition(
        "Mismatch frequency",
        "freq = mean over decoder layers of (1)",
        "Here also the mean over microsteps, which is mismatched / checked elements.",
        equation="(2)",
    ),
    Definition(
        "Mismatch severity of a submodule at a microstep",
        "sev = max_t mean |f' - f| / |f|",
        "The mean is over mismatched elements with a finite, non-zero reference and a finite value. The paper "
        "leaves the others open; here they stay out of the mean and are counted as zero reference and non-finite.",
        equation="(3)",
    ),
    Definition(
        "Mismatch severity", "sev = max over decoder layers of (3)", "Here also the maximum over steps.", equation="(4)"
    ),
    Definition(
        "Worst-case noise-to-signal",
        "max over steps of ‖g' - g‖₂ / ‖g‖₂",
        "g: gradient of an optimizer step before clipping, reference and suspect.",
        equation="(5)",
    ),
    Definition(
        "Upper bound of a frequency",
        f"x = 0: {-math.log(0.05):.3g} / n;  x > 0: χ²₀.₉₅(2x + 2) / (2n)",
        "One-sided 95 % bound for x mismatches in n checked elements, if elements fail independently.",
    ),
    Definition(
        "Interval of a frequency",
        "[f - q₀.₉₇₅ s, f - q₀.₀₂₅ s]",
        "Two-sided, 95 %, for mismatches that come in bursts: a block bootstrap over steps. f: measured, s: its "
        "standard error from blocks of steps, q: quantiles of (f* - f) / s* over blocks drawn with replacement. In "
        "simulations it held the true frequency in 91 to 96 % of runs. Where fewer than 8 blocks have a mismatch there "
        "is none.",
    ),
    Definition(
        "Verdict",
        "corrupt | clean | inconclusive",
        "Corrupt: any bit differed anywhere. Clean: something was checked and nothing differed. Inconclusive: too "
        "little was checked to say. What was not checked is not clean.",
    ),
    Definition(
        "Course of a fault",
        "persistent | intermittent | transient",
        "Of the steps after the first one with a finding: persistent if all of them have one too, transient if none "
        "has, intermittent otherwise. Unknown if no step followed, or if twins are not synchronized.",
    ),
)
