"""Run folders with known contents, for the tests of the reports."""

import math
import random
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sdc import analysis
from sdc.analysis.report import Figure, LeftOut, Table
from sdc.analysis.summary import SUBMODULES, contents_of
from sdc.records.record import Record
from sdc.schema import MismatchRow, RunManifest, RunSummary, StepRow

Shown = TypeVar("Shown", Table, Figure)
ELEMENTS = 262_144  # per microstep, layer and site
PUBLISHED = {
    "fwd/attn": {"frequency": 0.0289, "severity": 318.0},
    "fwd/ffn": {"frequency": 0.00225, "severity": 976.0},
    "bwd/attn": {"frequency": 0.00671, "severity": 2208.0},
    "bwd/ffn": {"frequency": 0.000108, "severity": 7680.0},
}


def manifest(**changes: Any) -> dict[str, Any]:
    """A manifest as `sdc twin` writes it."""
    return {
        "kind": "twin",
        "command": ["sdc", "twin", "--devices", "4", "--model", "2", "--suspect", "node11", "--steps", "20"],
        "created": "2026-01-02T03:04:05+00:00",
        "config": {"name": "tiny", "model": {"width": 64, "layers": 4}, "optimizer": {"rate": 3e-4}},
        "sync": "compute",
        "compare": "gated",
        "placement": "mesh",
        "twins": 2,
        "mesh": {"twin": 2, "data": 1, "model": 2},
        "layers": 4,
        "steps": 20,
        "suspect": {"name": "node11", "simulated": True, "faults": ["profile node11, start-up burst that decays"]},
        "published": PUBLISHED,
        "environment": {"python": "3.11.11", "jax": "0.10.2", "device": "cpu"},
        "program": {"step": "0f" * 32},
        "data": {"corpus": "python", "sha256": "ab" * 32},
        "seed": 0,
        **changes,
    }


def about_of(about: dict[str, Any]) -> RunManifest:
    return msgspec.convert(about, RunManifest)


def lines_of(rows: list[dict[str, Any]]) -> list[StepRow]:
    return msgspec.convert(rows, list[StepRow])


def details_of(rows: list[dict[str, Any]]) -> list[MismatchRow]:
    return msgspec.convert(rows, list[MismatchRow])


def summarize(about: dict[str, Any], rows: list[dict[str, Any]], mismatches: list[dict[str, Any]]) -> RunSummary:
    """The summary of lines that are not typed yet."""
    return analysis.summarize(about_of(about), lines_of(rows), details_of(mismatches))


def shown(part: Shown | LeftOut | None) -> Shown:
    """A table or a figure that a record can give."""
    assert part is not None
    assert not isinstance(part, LeftOut)
    return part


def steps(
    count: int = 20, layers: int = 4, *, rates: dict[str, float] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of `steps.jsonl` and `mismatches.jsonl` of a run with computation synchronization.

    Args:
        count: number of steps.
        layers: number of layers.
        rates: mismatch frequency of each site, scaled by a burst that decays; none means a clean run.
    """
    draw = random.Random(0)
    rows, mismatches = [], []
    for step in range(count):
        sites: dict[str, dict[str, Any]] = {}
        for site in SUBMODULES:
            hits = []
            for layer in range(layers):
                level = (rates or {}).get(site, 0.0) * (0.5 + 3 * math.exp(-step / 4)) * (0.7 + 0.2 * layer)
                found = int(level * ELEMENTS * draw.uniform(0.8, 1.2))
                if found:
                    severity = draw.lognormvariate(2, 2)
                    hits.append(
                        {
                            "step": step,
                            "microstep": 0,
                            "site": site,
                            "layer": layer,
                            "checked": ELEMENTS,
                            "mismatched": found,
                            "zero_reference": 0,
                            "nonfinite": 1 if layer == 0 else 0,
                            "injected": found,
                            "frequency": found / ELEMENTS,
                            "severity": severity,
                            "relative_max": severity * 40,
                            "ranks": [
                                {
                                    "twin": 1,
                                    "data": 0,
                                    "model": 1,
                                    "mismatched": found,
                                    "relative_mean": severity,
                                    "relative_max": severity * 40,
                                }
                            ],
                        }
                    )
            mismatches += hits
            total = sum(hit["mismatched"] for hit in hits)
            sites[site] = {
                "checked": ELEMENTS * layers,
                "mismatched": total,
                "injected": total,
                "zero_reference": 0,
                "nonfinite": sum(hit["nonfinite"] for hit in hits),
                "frequency": total / (ELEMENTS * layers),
                "severity": max((hit["severity"] for hit in hits), default=None),
            }
        rows.append(
            {
                **step_row(step),
                "sites": sites,
                "state": {"checked": 100_000, "mismatched": 0},
                "gradient": {"checked": 100_000, "mismatched": 0},
                "gradient_difference": [0.0, 0.0],
                "noise_to_signal": [0.0, 0.0],
                "parameter_difference": [0.0, 0.0],
                "parameter_norm": [40.0, 40.0],
            }
        )
    return rows, mismatches


def step_row(step: int, twins: int = 2) -> dict[str, Any]:
    """What the line of a step holds in every run."""
    loss, norm = 2.5 + 3 * math.exp(-step / 8), 1.0 + 2 * math.exp(-step / 5)
    return {
        "step": step,
        "loss": [loss] * twins,
        "gradient_norm": [norm] * twins,
        "learning_rate": 1e-3,
        "seconds": 0.5 if step else 30.0,
    }


def free_steps(count: int = 60) -> list[dict[str, Any]]:
    """Lines of a run without synchronization whose twins drift apart."""
    rows = []
    for step in range(count):
        row = step_row(step)
        drift = 1e-6 * 1.12**step if step > 4 else 0.0
        spike = 0.5 if step == 30 else 0.0
        rows.append(
            {
                **row,
                "loss": [row["loss"][0], row["loss"][0] + 3 * drift + spike],
                "gradient_norm": [row["gradient_norm"][0], row["gradient_norm"][0] + drift],
                "sites": {site: {"checked": 0, "mismatched": 0, "injected": 3} for site in SUBMODULES},
                "state": {"checked": 100_000, "mismatched": 90_000 if drift else 0},
                "gradient": {"checked": 100_000, "mismatched": 95_000 if drift else 0},
                "gradient_difference": [0.0, drift * 2 + spike],
                "noise_to_signal": [0.0, (drift * 2 + spike) / row["gradient_norm"][0]],
                "parameter_difference": [0.0, drift * 10],
                "parameter_norm": [40.0, 40.0],
            }
        )
    return rows


def write_run(
    path: Path,
    about: dict[str, Any],
    rows: list[dict[str, Any]],
    mismatches: list[dict[str, Any]] | None = None,
    *,
    ended: bool = True,
) -> Path:
    """Writes a run folder through the writer that the tools use."""
    with Record.create(path, about) as record:
        for row in rows:
            record.line(row, [hit for hit in mismatches or [] if hit["step"] == row["step"]])
        if ended:
            digests = ["0f" * 8] * (about["twins"] or 1)
            record.finish({"state_digest": digests, **contents_of(summarize(about, rows, mismatches or []), None)})
    return path
