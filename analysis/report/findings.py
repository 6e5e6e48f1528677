"""Tables, charts and claims of a study as data, and the page that is made of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .canvas import line_figure
from .page import Action, Headline, record_page
from .sections import Chart, LeftOut, Line, Report, Table, Text, marked

SIMULATED = "simulated errors, delays and losses"
SOURCES = {
    "paft": "Capturing and Mitigating Gradient Aggregation Errors for Fault-Tolerant Distributed Training.",
    "dropcompute": "Giladi et al., DropCompute (NeurIPS 2023, arXiv:2306.10598).",
    "lossy": "Weintraub, Banner, Orda, Distributed Training under Packet Loss (2025).",
    "scar": "Qiao, Aragam, Zhang, Xing, Fault Tolerance in Iterative-Convergent Machine Learning (ICML 2019).",
    "shadow": "Ma et al. 2025 (arXiv:2502.12340), section 7.2, where a shadow replica is proposed.",
    "nodes": "Ma et al., Understanding Silent Data Corruption in LLM Training (2025, arXiv:2502.12340).",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """Something that the paper says, and whether it was seen here.

    Attributes:
        claim: one sentence.
        holds: whether it was seen.
        seen: the figures.
    """

    claim: str
    holds: bool
    seen: str


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that a study has to say."""

    grids: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    checks: tuple[Check, ...] = ()

    def __add__(self, other: "Findings") -> "Findings":
        return Findings(self.grids + other.grids, self.charts + other.charts, self.checks + other.checks)


def summarize_findings(study: str, findings: Findings) -> dict[str, Any]:
    """Contents of `summary.json`."""
    return {"study": study, **dataclasses.asdict(findings)}


def study_page(title: str, manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> Report:
    """The page of a study, ended or not."""
    study = str(summary.get("study"))
    checks = [Check(**check) for check in summary.get("checks") or ()]
    missing = [check for check in checks if not check.holds]
    tables = [marked(_table(grid), SIMULATED) for grid in summary.get("grids") or ()]
    charts = [line_figure(_chart(chart)) for chart in summary.get("charts") or ()]
    rows = tuple((check.claim, "yes" if check.holds else "NO", check.seen) for check in checks)
    claims = Table("What the paper says", ("claim", "seen here", "figures"), rows)
    seen = f"{len(checks) - len(missing)} of {len(checks)} of the paper's statements were seen at this scale"
    settings = ("workers", "steps", "seed", "settings", "workloads")
    return record_page(
        manifest,
        kind=f"study of {study}",
        title=title,
        verdict=None,
        label=f"STUDY: {study.upper()} ({SIMULATED})",
        headline=headline_of_study(
            seen if summary else "the study has not ended", "; ".join(check.claim for check in missing)
        ),
        simulated="gradients, delays, losses or faults were simulated on sound hardware",
        facts=[(name, manifest.get(name)) for name in ("workers", "steps", "seed", "parts", "created", "seconds")],
        measured=[claims, *tables],
        drawn=[chart if isinstance(chart, LeftOut) else marked(chart, SIMULATED) for chart in charts],
        settings={"Study": {key: manifest[key] for key in settings if key in manifest}},
        definitions=(),
        about=[SOURCES.get(study, "")],
        brief=[*tables, *map(_claim, checks)],
    )


def _claim(check: Check) -> Text:
    lead, tone = ("seen", "clean") if check.holds else ("not seen", "inconclusive")
    return Text(f"{check.claim}: {check.seen}", lead=lead, tone=tone)


def headline_of_study(sentence: str, missing: str = "") -> Headline:
    """The headline of a study, which is no test of a device."""
    none = "none: a study of methods, not a test of a device"
    actions = [Action("Compare with your own training", "A study is of small workloads: the tables say of which.")]
    if missing:
        actions.insert(0, Action("Look at what was not seen", f"It may need more steps, workers or trials: {missing}."))
    return Headline(sentence, none, none, "not asked", "simulated, all of it", tuple(actions))


def _table(record: Mapping[str, Any]) -> Table:
    return Table(record["caption"], tuple(record["header"]), tuple(map(tuple, record["rows"])), record["note"])


def _chart(record: Mapping[str, Any]) -> Chart:
    """A figure as it was before it went into a record."""
    return Chart(**{**record, "lines": tuple(Line(**line) for line in record["lines"])})
