"""Figures of a campaign, all drawn from its summary."""

import jax.numpy as jnp
import numpy as np
from matplotlib.colors import ListedColormap

from sdc.campaigns import OUTCOMES
from sdc.faults import field_bits

from .canvas import (
    COLOURS,
    DASHES,
    FULL,
    HEAT,
    INK,
    MARKERS,
    PAPER,
    ZERO,
    LeftOut,
    Picture,
    canvas,
    short,
    whole_numbers,
)
from .series import Row, mapping
from .tables import show

REACHED = OUTCOMES[1:]
FILL = dict(zip(REACHED, (ZERO, COLOURS[4], COLOURS[5], COLOURS[1], FULL), strict=True))
HATCH = dict(zip(REACHED, ("", "..", "//", "\\\\", "xx"), strict=True))


def bits(summary: Row, *, mark: str) -> Picture | LeftOut:
    """Bit position × outcome, one panel per dtype: the share of the injections into a bit that ended so."""
    title = "Outcome by bit position"
    table = mapping(summary.get("bits"))
    if not table:
        return LeftOut(title, "no injection changed one chosen bit")
    with canvas("bits", mark, height=1.0 + 1.7 * len(table)) as drawing:
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
    return drawing.picture(title, caption)


def by_group(summary: Row, name: str, *, mark: str) -> Picture | LeftOut:
    """Vulnerability and harm by layer, or any other group, with their intervals."""
    title = f"Sensitivity by {name}"
    group = mapping(mapping(summary.get("groups")).get(name))
    if not group:
        return LeftOut(title, f"no injection belongs to a {name}")
    with canvas(f"by-{name}", mark, height=2.9) as drawing:
        axes = drawing.figure.subplots()
        for place, quantity in enumerate(("vulnerability", "harm")):
            shares = [entry[quantity] for entry in group.values()]
            middle = np.asarray([share["share"] for share in shares])
            low, high = (np.asarray([share[end] for share in shares]) for end in ("low", "high"))
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
        drawing.legend(axes)
    return drawing.picture(title, "Shares of the injections that reached their site, with exact 95 % intervals.")


def operations(summary: Row, *, mark: str, limit: int = 24) -> Picture | LeftOut:
    """Outcomes by operation, stacked, the most harmed first."""
    title = "Outcomes by operation"
    group = mapping(mapping(summary.get("groups")).get("operation"))
    if not group:
        return LeftOut(title, "no injection names its operation")
    ordered = sorted(group.items(), key=lambda item: (-item[1]["harm"]["share"], -item[1]["vulnerability"]["share"]))
    ordered = ordered[:limit]
    with canvas("operations", mark, height=1.0 + 0.22 * len(ordered)) as drawing:
        axes = drawing.figure.subplots()
        left = np.zeros(len(ordered))
        for outcome in reversed(REACHED):
            shares = np.asarray([entry["outcomes"].get(outcome, 0) / entry["injections"] for _, entry in ordered])
            axes.barh(range(len(ordered)), shares, left=left, label=outcome, color=FILL[outcome], hatch=HATCH[outcome],
                      edgecolor=PAPER, linewidth=0.4)  # fmt: skip
            left += shares
        axes.set_yticks(range(len(ordered)), [f"{name} ({show(entry['injections'])})" for name, entry in ordered])
        axes.set(xlabel="share of injections", xlim=(0, 1), ylim=(len(ordered) - 0.5, -0.5))
        drawing.legend(axes)
    drawn = "" if len(ordered) == len(group) else f" {len(ordered)} of {len(group)} operations; the table has all."
    return drawing.picture(title, f"In brackets the number of injections. The most harmed first.{drawn}")


def latency(summary: Row, *, mark: str) -> Picture | LeftOut:
    """Share of the injections that changed training which each detector had found after so many steps."""
    title = "Detection over time"
    detectors = mapping(summary.get("detectors"))
    found = {name: mapping(entry) for name, entry in detectors.items()}
    if not any(entry.get("latencies") for entry in found.values()):
        return LeftOut(title, "no detector fired")
    last = max(int(steps) for entry in found.values() for steps in entry["latencies"])
    with canvas("latency", mark) as drawing:
        axes = drawing.figure.subplots()
        for place, (name, entry) in enumerate(found.items()):
            counts = {0: 0, last: 0} | {int(steps): hits for steps, hits in entry["latencies"].items()}
            steps = sorted(counts)
            share = np.cumsum([counts[step] for step in steps]) / max(entry["of_unmasked"]["of"], 1)
            axes.plot(steps, share, label=name.replace("_", " "), color=COLOURS[place], linestyle=DASHES[place % 4],
                      drawstyle="steps-post", marker=MARKERS[place], markersize=4)  # fmt: skip
        axes.set(xlabel="steps since the fault", ylabel="share found", ylim=(-0.02, 1.02))
        whole_numbers(axes.xaxis)
        drawing.legend(axes)
    return drawing.picture(title, "Of the injections that were not masked. The fingerprint needs a recorded trace.")


def _fields(dtype: str, width: int) -> list[int]:
    """Where the mantissa ends and where the sign begins."""
    try:
        info = jnp.finfo(dtype)
    except (TypeError, ValueError):
        return []
    return [edge for edge in (info.nmant, info.nmant + info.nexp) if edge < width]
