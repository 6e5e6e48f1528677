"""Findings of the study of checked matrix products: shares computed from the counts, and the report."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from sdc.records import Contents
from sdc.schema import ProductsManifest, ProductsSummary, SchemeCounts, SchemeShares

from ..report import (
    Chart,
    Definition,
    Figure,
    LeftOut,
    Line,
    Report,
    Table,
    Text,
    headline_of_study,
    line_figure,
    marked,
    moment,
    record_page,
    show,
)
from ..statistics import frequency_upper_bound

STUDY = "abft study"
SIMULATED = "simulated errors"
MANTISSA = {32: 23, 16: 7}  # bits of the mantissa of float32 and bfloat16


def summarize_products(
    counts: Mapping[str, Mapping[str, SchemeCounts]], magnitudes: Sequence[float]
) -> ProductsSummary:
    """Computes the shares of false alarms and detected errors from the counts of a study.

    Args:
        counts: counts by variant and scheme.
        magnitudes: magnitudes of the errors, in root mean squares of the row.

    Returns:
        By variant and scheme: the counts; the upper bound `false_alarms_upper_95` of the rate per row; the smallest
        magnitudes at which `half` and `almost_all` (99 %) of the errors are detected, or None; the detected shares of
        all bit flips (`flips`), and of flips of the sign and the exponent (`sign_exponent`).
    """
    return ProductsSummary(
        magnitudes=list(magnitudes),
        variants={
            variant: {scheme: _shares(found, magnitudes) for scheme, found in schemes.items()}
            for variant, schemes in counts.items()
        },
    )


def _shares(found: SchemeCounts, magnitudes: Sequence[float]) -> SchemeShares:
    mantissa = MANTISSA[len(found.bits_made)]
    shares = np.asarray(found.found) / np.maximum(np.asarray(found.made), 1)

    def smallest(share: float) -> float | None:
        """Returns the smallest magnitude at and above which at least this share of the errors is detected."""
        enough = np.append(np.flatnonzero(shares < share), -1).max() + 1
        return float(magnitudes[enough]) if enough < len(magnitudes) else None

    def share(bits: slice) -> float | None:
        made = sum(found.bits_made[bits])
        return sum(found.bits_found[bits]) / made if made else None

    return SchemeShares(
        **msgspec.structs.asdict(found),
        false_alarms_upper_95=frequency_upper_bound(found.flagged, found.checked) if found.checked else None,
        half=smallest(0.5),
        almost_all=smallest(0.99),
        flips=share(slice(None)),
        sign_exponent=share(slice(mantissa, None)),
    )


def build(record: Contents, summary: ProductsSummary) -> Report:
    """Collects the text, tables and figures of the study's report."""
    manifest = msgspec.convert(record.manifest, ProductsManifest)
    defaults = [schemes["two-tier"] for schemes in summary.variants.values() if "two-tier" in schemes]
    alarms, rows = (sum(getattr(found, key) for found in defaults) for key in ("flagged", "checked"))
    kappa = show(manifest.arithmetic.kappa if manifest.arithmetic else None)
    tables = [_table(variant, schemes) for variant, schemes in summary.variants.items()]
    figures = (_drawn(variant, schemes, summary.magnitudes) for variant, schemes in summary.variants.items())
    return record_page(
        command=manifest.command,
        mark=SIMULATED,
        kind="study of checked products",
        title=record.path.resolve().name,
        verdict=None,
        label="STUDY OF CHECKSUMMED PRODUCTS",
        headline=headline_of_study(
            f"the default scheme flagged {alarms:,} of {rows:,} rows of healthy matrix products"
        ),
        simulated="errors and bit flips were injected into matrix products on healthy hardware to measure detection",
        notes=[f"The profile was measured on another setup: {'; '.join(manifest.departs)}."]
        if manifest.departs
        else [],
        facts=[
            ("steps", manifest.steps),
            ("products", manifest.where or "products"),
            ("steps with injected errors", ", ".join(map(str, manifest.marked_steps))),
            ("started", moment(manifest.created)),
            ("thresholds", f"{manifest.profile} (kappa {kappa})"),
        ],
        measured=tables,
        drawn=itertools.chain.from_iterable(figures),
        settings=[
            ("Environment", record.manifest.get("environment")),
            ("Configuration", record.manifest.get("config")),
        ],
        definitions=DEFINITIONS,
        about=[
            "The scheme paper is that of appendix D of Ma et al. 2025 (arXiv:2502.12340); the other schemes are from "
            "this project.",
            "Each row contains one error in a random column; rows are checked individually.",
        ],
        brief=[*(marked(table, SIMULATED) for table in tables), Text(FOUND)],
    )


FOUND = (
    "half found, 99 % found: the smallest error, in root mean squares of its row, at which this share of the errors is "
    "detected"
)
DEFINITIONS = (
    Definition(
        "False alarm",
        "flagged / checked",
        "Share of rows that are flagged in the matrix products that training computes.",
    ),
    Definition("Magnitude", "|error| / rms(row)", "Error of one element divided by the root mean square of its row."),
    Definition(
        "Half, almost all found",
        "50 %, 99 %",
        "Smallest magnitude at and above which this share of the errors is detected.",
    ),
    Definition("Flips found", "found / made", "All bits of the type have equal weight; rows of zeros are omitted."),
    Definition(
        "Sums, rounded", "float32, bfloat16", "Whether the check precedes or follows rounding to the output's type."
    ),
)


def _table(variant: str, schemes: Mapping[str, SchemeShares]) -> Table:
    rows = []
    for scheme, found in schemes.items():
        values = (found.half, found.almost_all, found.flips, found.sign_exponent)
        counts, bound = (show(found.checked), show(found.flagged)), show(found.false_alarms_upper_95, digits=2)
        rows.append((scheme, *counts, bound, *("never" if v is None else show(v) for v in values)))
    shares = ("half found", "99 % found", "flips", "sign, exponent")
    header = ("scheme", "rows", "false alarms", "upper bound per row (95 %)", *shares)
    return Table(f"Schemes on {variant}", header, tuple(rows))


def _drawn(
    variant: str, schemes: Mapping[str, SchemeShares], magnitudes: Sequence[float]
) -> Iterator[Figure | LeftOut]:
    """Yields figures of the share of errors found, by magnitude, and of the share of bit flips found, by bit."""
    sizes, bits = [], []
    for scheme, found in schemes.items():
        sizes.append(Line(scheme, magnitudes, np.asarray(found.found) / np.maximum(np.asarray(found.made), 1)))
        made = np.asarray(found.bits_made)
        share = np.where(made > 0, np.asarray(found.bits_found) / np.maximum(made, 1), np.nan)
        bits.append(Line(scheme, range(len(share)), share))
    caption = "Share of errors of this size (one error per row) that the scheme flags."
    title = f"Errors found by magnitude: {variant}"
    yield line_figure(Chart(title, caption, "error / rms of the row", "share found", tuple(sizes), log="x"))
    caption = "Share of flips of this bit (one flip per row) that the scheme flags."
    x = "bit (0: lowest of the mantissa; last: sign)"
    yield line_figure(Chart(f"Flips found by bit: {variant}", caption, x, "share found", tuple(bits)))
