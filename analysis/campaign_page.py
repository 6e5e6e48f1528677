"""The page of a campaign with its tables and figures, all of which are made from the campaign's summary."""

import contextlib
from collections.abc import Mapping

import numpy as np

from sdc.campaigns import LEAST_FACTOR, LEAST_RISE, OUTCOMES
from sdc.faults import field_bits
from sdc.records import Contents
from sdc.schema import CampaignSummary, Number, Share

from . import report
from .campaigns import GROUPS
from .report import (
    NOT_MEASURED,
    Action,
    Definition,
    Drawing,
    Figure,
    Headline,
    LeftOut,
    Report,
    Table,
    marked,
    moment,
    show,
)

SIMULATED = "simulated faults"
LONGEST = 25
"""Maximum number of rows in a table; `summary.json` has every row."""

REACHED = OUTCOMES[1:]
FILL = dict(zip(REACHED, (report.ZERO, *(report.COLOURS[place] for place in (4, 5, 1)), report.FULL), strict=True))
HATCH = dict(zip(REACHED, ("", "..", "//", "\\\\", "xx"), strict=True))
SOURCE = "L and state denote values of the clean run at the same step; primed symbols denote values of the struck run."


def build(campaign: Contents, summary: CampaignSummary) -> Report:
    """Collects the text, tables and figures of a campaign's report."""
    manifest, visible = campaign.campaign, "none was visible"
    if (hits := summary.visible) is not None and summary.steps_to_visible is not None:
        visible = (
            f"{show(summary.steps_to_visible)} ({hits.count:,} of the {hits.of:,} unmasked injections changed the "
            "loss visibly)"
        )
    outcomes, detectors = _outcomes(summary), _detectors(summary)
    names = [name for name in GROUPS if name != "site"]
    return report.record_page(
        command=manifest.command,
        mark=SIMULATED,
        kind="campaign",
        title=campaign.path.resolve().name,
        verdict=None,
        label="CAMPAIGN" + ("" if summary.complete else ", NOT ENDED"),
        headline=_headline(summary, visible),
        simulated="every injection is a deliberate fault on healthy hardware",
        faults=manifest.faults,
        notes=[f"This campaign is incomplete: {summary.done:,} of {summary.planned:,} injections are recorded."]
        * (not summary.complete),
        facts=[
            ("injections", f"{summary.done:,} of {summary.planned:,}"),
            ("sites", manifest.sites),
            ("selector", manifest.where),
            ("faults", ", ".join(manifest.faults)),
            ("clean run", f"{show(manifest.steps)} steps"),
            ("followed", f"{show(manifest.follow)} steps"),
            ("started", moment(manifest.created)),
            ("median steps to a visible loss change", visible),
        ],
        measured=[outcomes, detectors, *(_group(summary, name) for name in (*names, "site"))],
        drawn=[
            _bits(summary), _by_group(summary, "layer"), _operations(summary), _by_group(summary, "phase"),
            _latency(summary),
        ],
        settings=[
            ("Environment", campaign.manifest.get("environment")),
            ("Data and thresholds", {key: campaign.manifest.get(key) for key in ("data", "seed", "thresholds")}),
            ("Configuration", campaign.manifest.get("config")),
        ],
        definitions=definitions(manifest.thresholds),
        about=(SOURCE, "Intervals assume independent injections; the actual injections are spread more evenly."),
        brief=[marked(outcomes, SIMULATED), marked(detectors, SIMULATED)],
    )  # fmt: skip


def _headline(summary: CampaignSummary, visible: str) -> Headline:
    operations = summary.groups["operation"].items()
    worst = max(operations, key=lambda item: (item[1].harm.share or 0, item[1].harm.count), default=None)
    operation, actions = "no operation was harmed", []
    if not summary.complete:
        actions.append(
            Action(
                "Let the campaign continue, or resume it",
                "Shares refer to the injections recorded so far; --resume runs the rest.",
            )
        )
    if worst and (harmful := worst[1].harm.count):
        operation = f"most harmed: {worst[0]} ({show(harmful)} of its {show(worst[1].injections)} injections)"
        actions.append(
            Action(
                "Protect the operation that is harmed most",
                "Use checked matrix products (--abft), twins, or higher precision.",
            )
        )
    found = {name: entry.of_harmful for name, entry in summary.detectors.items() if name != "fingerprint"}
    best = max(found, key=lambda name: found[name].count, default=None)
    if best is not None and found[best].count:
        times = f"{show(found[best].count)} of the {show(found[best].of)} harmful injections"
        how = f"It detected {times} without a recorded trace."
        actions.append(Action(f"Watch the {best.replace('_', ' ')}", how))
    return Headline(
        str(summary.reason),
        operation=operation,
        since=f"median number of steps until the loss changed visibly: {visible}",
        real="all faults are simulated on healthy hardware",
        actions=tuple(actions)
        or (Action("Inject more faults, or strike other sites", "These injections did not harm training."),),
    )


def definitions(thresholds: Mapping[str, Number]) -> tuple[Definition, ...]:
    """Returns definitions of outcomes, quantities and detectors, with the thresholds of the record."""
    spike, visible, rise, factor = (show(thresholds.get(name)) for name in ("spike", "visible", "rise", "factor"))
    return (
        Definition(
            "Outcome: masked",
            "state' = state, bit for bit",
            "The state after the struck step equals that of the clean run.",
        ),
        Definition(
            "Outcome: benign drift",
            f"(L' - L) / L ≤ {spike} at every followed step",
            "The state differs, but no loss in the followed steps exceeds the clean loss by more than this limit. "
            "Slower "
            "degradation counts as benign.",
        ),
        Definition(
            "Outcome: loss spike",
            f"some (L' - L) / L > {spike}, but not the last one",
            "The loss exceeded the clean loss by more than this limit, but was below the limit again at the last "
            "followed "
            "step.",
        ),
        Definition(
            "Outcome: divergence",
            f"the last (L' - L) / L > {spike}",
            "The loss is still above the limit at the last followed step.",
        ),
        Definition(
            "Outcome: NaN or infinity", "not finite", "A loss, a gradient norm or the state became NaN or infinite."
        ),
        Definition(
            "Outcome: not reached",
            "not executed",
            "The struck operation is in a branch that was not taken. All other shares refer to injections that reached "
            "their site.",
        ),
        Definition("Vulnerability", "1 - masked / reached", "The 95 % intervals are exact (Clopper-Pearson)."),
        Definition("Harm", "(spike + divergence + NaN or infinity) / reached", "The intervals are computed as above."),
        Definition(
            "Visible loss change",
            f"|L' - L| / L > {visible}",
            "Latencies are counted in steps since the struck step, which is step 0.",
        ),
        Definition(
            "Phase",
            "fwd | bwd | remat | jvp | update | memory",
            "Forward pass; backward pass; forward pass recomputed for the backward pass; tangents of forward-mode "
            "derivatives; operations outside derivatives, such as the optimizer; an array that the step takes or "
            "returns.",
        ),
        Definition("Detector: fingerprint", "digest' ≠ digest", "Needs a recorded trace of the same program."),
        Definition(
            "Detector: ABFT",
            "|r| / bound > 1",
            "Tests the rows of matrix products of the struck step; only with --abft.",
        ),
        Definition("Detector: non-finite", "NaN or infinity", "Tests losses, gradient norms and the state."),
        Definition(
            "Detector: loss spike",
            f"L'_t - L'_(t-1) > {rise}",
            f"The limit is twice the largest rise in the clean run, at least {LEAST_RISE:g} of its mean loss, so the "
            "clean run raises no alarm.",
        ),
        Definition(
            "Detector: gradient-norm spike",
            f"‖g'_t‖ / ‖g'_(t-1)‖ > {factor}",
            f"The limit is twice the largest factor in the clean run, at least {LEAST_FACTOR:g}, so the clean run "
            "raises no alarm.",
        ),
        Definition(
            "Detector: history bound",
            "|m| ≤ c (1 - β₁ᵗ), v ≤ c² (1 - β₂ᵗ)",
            "Fires if the bound is exceeded; no correct step with gradients clipped to norm c can exceed it (after He "
            "et al., "
            "ISCA 2023).",
        ),
    )


def _outcomes(summary: CampaignSummary) -> Table:
    rows = [(name.replace("_", " "), *_share(summary.outcomes[name])) for name in OUTCOMES]
    rows += [(name, *_share(getattr(summary, name))) for name in ("vulnerability", "harm")]
    note = (
        f"Shares of the {summary.reached:,} injections that reached their site; “not reached” is a share of all "
        "injections. All tables have exact intervals (Clopper-Pearson)."
    )
    return Table("Outcomes", ("outcome", "injections", "share", "95 % interval"), tuple(rows), note)


def _detectors(summary: CampaignSummary) -> Table:
    rows = []
    for name, entry in summary.detectors.items():
        shares = *_share(entry.of_unmasked)[:2], *_share(entry.of_harmful)[:2]
        rows.append((name.replace("_", " "), *shares, show(entry.median_latency), show(entry.largest_latency)))
    header = ("detector", "found", "share", "harmful found", "share of harmful", "median latency", "largest latency")
    note = (
        "Shares of the injections that were not masked; latencies are in steps since the struck step, up to the "
        "last followed step."
    )
    return Table("Detectors", header, tuple(rows), note)


def _group(summary: CampaignSummary, name: str) -> Table | LeftOut:
    group, note = list(summary.groups[name].items()), ""
    if not group:
        return LeftOut(f"By {name}", "no injection belongs to such a group")
    if name == "site":
        group.sort(key=lambda item: (-item[1].harm.count, -(item[1].harm.share or 0), item[0]))
        shown = min(len(group), LONGEST)
        note = f"{shown:,} of {len(group):,} sites, ordered by harm; summary.json contains all sites."
        group = group[:shown]
    rows = (
        (key, show(entry.injections), *_share(entry.vulnerability)[1:], *_share(entry.harm)[1:]) for key, entry in group
    )
    header = (name, "injections", "vulnerability", "95 % interval", "harm", "95 % interval")
    return Table(f"By {name}", header, tuple(rows), note)


def _share(entry: Share | None) -> tuple[str, str, str]:
    """Returns the count, share and interval of an outcome."""
    if entry is None:
        return NOT_MEASURED, NOT_MEASURED, NOT_MEASURED
    if entry.share is None:
        return show(entry.count), NOT_MEASURED, NOT_MEASURED
    return show(entry.count), show(entry.share), f"{show(entry.low)} to {show(entry.high)}"


def _bits(summary: CampaignSummary) -> Figure | LeftOut:
    """Draws one heat map per dtype, which shows, for each bit position, the share of its injections with each
    outcome."""
    title = "Outcome by bit position"
    table = summary.bits
    if not table:
        return LeftOut(title, "no injection flipped a single chosen bit")

    def draw(drawing: Drawing) -> None:
        from matplotlib.colors import ListedColormap

        panels = np.atleast_1d(drawing.figure.subplots(len(table), 1))
        for axes, (dtype, by_bit) in zip(panels, table.items(), strict=True):
            width = len(field_bits(dtype))
            share = np.full((len(REACHED), width), np.nan)
            for bit, outcomes in by_bit.items():
                for place, outcome in enumerate(REACHED):
                    share[place, int(bit)] = outcomes.get(outcome, 0) / sum(outcomes.values())
            axes.grid(visible=False)
            style = {"edgecolors": report.PAPER, "linewidth": 0.6}
            axes.pcolormesh(np.where(share == 0, 0.0, np.nan), cmap=ListedColormap([report.ZERO]), **style)
            colours = ListedColormap(report.HEAT)
            mesh = axes.pcolormesh(np.where(share > 0, share, np.nan), cmap=colours, vmin=0, vmax=1, **style)
            drawing.figure.colorbar(mesh, ax=axes, pad=0.02, ticks=(0, 0.5, 1))
            with contextlib.suppress(ValueError):  # a dtype without an exponent
                exponent = field_bits(dtype, "exponent")
                for edge in (exponent[0], exponent[-1] + 1):  # the end of the mantissa and the start of the sign
                    if edge < width:
                        axes.axvline(edge, color=report.INK, linewidth=0.9)
            axes.set_yticks(np.arange(len(REACHED)) + 0.5, REACHED)
            axes.set_xticks(np.arange(0, width, 4 if width > 16 else 1) + 0.5, range(0, width, 4 if width > 16 else 1))
            axes.set(xlabel="bit (0 is the least significant)", title=dtype)
            axes.invert_xaxis()
            axes.tick_params(length=0)

    caption = (
        "For each bit, the share of its injections with each outcome. Lines separate sign, exponent and mantissa. A "
        "gray cell means that no injection had this outcome; an empty column means that no injection struck the bit."
    )
    return Figure(title, caption, draw, height=1.0 + 1.7 * len(table))


def _by_group(summary: CampaignSummary, name: str) -> Figure | LeftOut:
    """Draws vulnerability and harm with their intervals, by layer or by another group."""
    title = f"Sensitivity by {name}"
    group = summary.groups[name]
    if not group:
        return LeftOut(title, f"no injection belongs to a {name}")

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        for place, quantity in enumerate(("vulnerability", "harm")):
            shares = [getattr(entry, quantity) for entry in group.values()]
            middle = np.asarray([share.share for share in shares])
            low, high = (np.asarray([getattr(share, end) for share in shares]) for end in ("low", "high"))
            x = np.arange(len(group)) + 0.12 * (2 * place - 1)
            axes.errorbar(
                x, middle, yerr=np.clip([middle - low, high - middle], 0, None), label=quantity, capsize=2,
                linestyle="", color=report.COLOURS[place], marker=report.MARKERS[place], markersize=4, linewidth=1,
            )  # fmt: skip
        every = 1 + len(group) // 40  # more names would overlap
        names = [report.short(str(key), 18) for key in group]
        axes.set_xticks(range(0, len(group), every), names[::every])
        if len(group) > 8:
            axes.tick_params(axis="x", rotation=60)
        axes.set(xlabel=name, ylabel="share of injections", ylim=(-0.02, 1.02))
        drawing.legend()

    caption = "Shares of the injections that reached their site, with exact 95 % intervals."
    return Figure(title, caption, draw, height=2.9)


def _operations(summary: CampaignSummary) -> Figure | LeftOut:
    """Draws the outcomes of each operation as stacked bars, starting with the operation that was harmed most often."""
    title = "Outcomes by operation"
    group = summary.groups["operation"]
    if not group:
        return LeftOut(title, "no injection is assigned to an operation")
    ordered = sorted(group.items(), key=lambda item: (-(item[1].harm.share or 0), -(item[1].vulnerability.share or 0)))
    ordered = ordered[:24]

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        left = np.zeros(len(ordered))
        for outcome in reversed(REACHED):
            shares = np.asarray([entry.outcomes.get(outcome, 0) / entry.injections for _, entry in ordered])
            axes.barh(range(len(ordered)), shares, left=left, label=outcome, color=FILL[outcome], hatch=HATCH[outcome],
                      edgecolor=report.PAPER, linewidth=0.4)  # fmt: skip
            left += shares
        axes.set_yticks(range(len(ordered)), [f"{name} ({show(entry.injections)})" for name, entry in ordered])
        axes.set(xlabel="share of injections", xlim=(0, 1), ylim=(len(ordered) - 0.5, -0.5))
        drawing.legend()

    drawn = (
        ""
        if len(ordered) == len(group)
        else f" {len(ordered)} of {len(group)} operations are shown; the table has all."
    )
    caption = (
        f"Operations ordered by harm, with the most harmed first; the number of injections is in parentheses.{drawn}"
    )
    return Figure(title, caption, draw, height=1.0 + 0.22 * len(ordered))


def _latency(summary: CampaignSummary) -> Figure | LeftOut:
    """Draws, for each detector, the share of the unmasked injections that it had detected by each step."""
    title = "Detection over time"
    found = summary.detectors
    if not any(entry.latencies for entry in found.values()):
        return LeftOut(title, "no detector fired")
    last = max(int(steps) for entry in found.values() for steps in entry.latencies)

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        for place, (name, entry) in enumerate(found.items()):
            counts = {0: 0, last: 0} | {int(steps): hits for steps, hits in entry.latencies.items()}
            steps = sorted(counts)
            share = np.cumsum([counts[step] for step in steps]) / max(entry.of_unmasked.of, 1)
            axes.plot(
                steps, share, label=name.replace("_", " "), color=report.COLOURS[place],
                linestyle=report.DASHES[place % 4], drawstyle="steps-post", marker=report.MARKERS[place], markersize=4,
            )  # fmt: skip
        axes.set(xlabel="steps since the fault", ylabel="share found", ylim=(-0.02, 1.02))
        report.whole_numbers(axes.xaxis)
        drawing.legend()

    caption = "Detected share of the injections that were not masked. The fingerprint needs a recorded trace."
    return Figure(title, caption, draw)
