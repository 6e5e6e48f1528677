"""Figures of a campaign, all drawn from its summary."""

import numpy as np

from sdc.campaigns import OUTCOMES
from sdc.faults import field_bits
from sdc.schema import CampaignSummary

from .report import (
    COLOURS,
    DASHES,
    FULL,
    HEAT,
    INK,
    MARKERS,
    PAPER,
    ZERO,
    Drawing,
    Figure,
    LeftOut,
    short,
    show,
    whole_numbers,
)

REACHED = OUTCOMES[1:]
FILL = dict(zip(REACHED, (ZERO, COLOURS[4], COLOURS[5], COLOURS[1], FULL), strict=True))
HATCH = dict(zip(REACHED, ("", "..", "//", "\\\\", "xx"), strict=True))


def bits(summary: CampaignSummary) -> Figure | LeftOut:
    """Bit position × outcome, one panel per dtype: the share of the injections into a bit that ended so."""
    title = "Outcome by bit position"
    table = summary.bits
    if not table:
        return LeftOut(title, "no injection changed one chosen bit")

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
            style = {"edgecolors": PAPER, "linewidth": 0.6}
            axes.pcolormesh(np.where(share == 0, 0.0, np.nan), cmap=ListedColormap([ZERO]), **style)
            colours = ListedColormap(HEAT)
            mesh = axes.pcolormesh(np.where(share > 0, share, np.nan), cmap=colours, vmin=0, vmax=1, **style)
            drawing.figure.colorbar(mesh, ax=axes, pad=0.02, ticks=(0, 0.5, 1))
            for edge in _fields(dtype, width):
                axes.axvline(edge, color=INK, linewidth=0.9)
            axes.set_yticks(np.arange(len(REACHED)) + 0.5, REACHED)
            axes.set_xticks(np.arange(0, width, 4 if width > 16 else 1) + 0.5, range(0, width, 4 if width > 16 else 1))
            axes.set(xlabel="bit, 0 is the least significant", title=dtype)
            axes.invert_xaxis()
            axes.tick_params(length=0)

    caption = (
        "Share of the injections into each bit that had each outcome. Lines part sign, exponent and mantissa. Grey: "
        "none; empty columns: no injection."
    )
    return Figure(title, caption, draw, height=1.0 + 1.7 * len(table))


def by_group(summary: CampaignSummary, name: str) -> Figure | LeftOut:
    """Vulnerability and harm by layer, or any other group, with their intervals."""
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
                linestyle="", color=COLOURS[place], marker=MARKERS[place], markersize=4, linewidth=1,
            )  # fmt: skip
        every = 1 + len(group) // 40  # more names than these would cover each other
        names = [short(str(key), 18) for key in group]
        axes.set_xticks(range(0, len(group), every), names[::every])
        if len(group) > 8:
            axes.tick_params(axis="x", rotation=60)
        axes.set(xlabel=name, ylabel="share of injections", ylim=(-0.02, 1.02))
        drawing.legend()

    caption = "Shares of the injections that reached their site, with exact 95 % intervals."
    return Figure(title, caption, draw, height=2.9)


def operations(summary: CampaignSummary, *, limit: int = 24) -> Figure | LeftOut:
    """Outcomes by operation, stacked, the most harmed first."""
    title = "Outcomes by operation"
    group = summary.groups["operation"]
    if not group:
        return LeftOut(title, "no injection names its operation")
    ordered = sorted(group.items(), key=lambda item: (-(item[1].harm.share or 0), -(item[1].vulnerability.share or 0)))
    ordered = ordered[:limit]

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        left = np.zeros(len(ordered))
        for outcome in reversed(REACHED):
            shares = np.asarray([entry.outcomes.get(outcome, 0) / entry.injections for _, entry in ordered])
            axes.barh(range(len(ordered)), shares, left=left, label=outcome, color=FILL[outcome], hatch=HATCH[outcome],
                      edgecolor=PAPER, linewidth=0.4)  # fmt: skip
            left += shares
        axes.set_yticks(range(len(ordered)), [f"{name} ({show(entry.injections)})" for name, entry in ordered])
        axes.set(xlabel="share of injections", xlim=(0, 1), ylim=(len(ordered) - 0.5, -0.5))
        drawing.legend()

    drawn = "" if len(ordered) == len(group) else f" {len(ordered)} of {len(group)} operations; the table has all."
    caption = f"In brackets the number of injections. The most harmed first.{drawn}"
    return Figure(title, caption, draw, height=1.0 + 0.22 * len(ordered))


def latency(summary: CampaignSummary) -> Figure | LeftOut:
    """Share of the injections that changed training which each detector had found after so many steps."""
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
            axes.plot(steps, share, label=name.replace("_", " "), color=COLOURS[place], linestyle=DASHES[place % 4],
                      drawstyle="steps-post", marker=MARKERS[place], markersize=4)  # fmt: skip
        axes.set(xlabel="steps since the fault", ylabel="share found", ylim=(-0.02, 1.02))
        whole_numbers(axes.xaxis)
        drawing.legend()

    return Figure(title, "Of the injections that were not masked. The fingerprint needs a recorded trace.", draw)


def _fields(dtype: str, width: int) -> list[int]:
    """Where the mantissa ends and where the sign begins."""
    try:
        exponent = field_bits(dtype, "exponent")
    except ValueError:
        return []
    return [edge for edge in (exponent[0], exponent[-1] + 1) if edge < width]
