"""Differences between two tensors and between twins at a site, and the metrics of the study.

The study (Ma et al. 2025, arXiv:2502.12340, sections 4 and 5) does not define the severity (equation 3) of elements
whose reference is zero, or of elements that are NaN or infinite on at least one side. Here, such elements count as
mismatched, are also counted separately, and are excluded from the relative difference.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Shaped, UInt32

from sdc.bits import as_bits
from sdc.results import counted, total
from sdc.verdict import Judgement, Verdict

from ..program import Reports, Site

LARGEST = float(np.finfo(np.float32).max)


class Difference(NamedTuple):
    """Measures of how a suspect tensor differs from its reference; all zeros if nothing was checked.

    Attributes:
        checked: number of elements compared.
        mismatched: number of elements whose bits differ (NaN equals NaN with the same payload, and 0.0 differs from
            -0.0).
        zero_reference: number of mismatched elements whose reference is zero and whose suspect is finite.
        nonfinite: number of mismatched elements that are NaN or infinite on at least one side.
        relative_sum: sum of `|suspect - reference| / |reference|` over the other mismatched elements, in float32; the
            sum and each of its terms saturate at the largest float32.
        relative_max: largest term of this sum.
    """

    checked: UInt32[Array, "*rows"]
    mismatched: UInt32[Array, "*rows"]
    zero_reference: UInt32[Array, "*rows"]
    nonfinite: UInt32[Array, "*rows"]
    relative_sum: Float32[Array, "*rows"]
    relative_max: Float32[Array, "*rows"]


def difference(reference: Shaped[Array, "*shape"], suspect: Shaped[Array, "*shape"]) -> Difference:
    """Compares two tensors of equal shape and dtype, bit for bit and, where it is defined, by relative difference."""
    differs = as_bits(reference) != as_bits(suspect)
    differs = jnp.any(differs, axis=tuple(range(reference.ndim, differs.ndim)))  # over a key's words or complex parts
    ref, sus = _as_numbers(reference), _as_numbers(suspect)
    finite = jnp.isfinite(ref) & jnp.isfinite(sus)
    zero = ref == 0
    counted = differs & finite & ~zero
    term = jnp.where(counted, jnp.abs(sus - ref) / jnp.where(counted, jnp.abs(ref), 1), 0)
    term = jnp.minimum(term, LARGEST).astype(jnp.float32)

    def count(mask: Bool[Array, "*shape"]) -> UInt32[Array, ""]:
        return jnp.sum(mask, dtype=jnp.uint32)

    return Difference(
        checked=jnp.uint32(differs.size),
        mismatched=count(differs),
        zero_reference=count(differs & finite & zero),
        nonfinite=count(differs & ~finite),
        relative_sum=jnp.minimum(jnp.sum(term), LARGEST),
        relative_max=jnp.max(term, initial=0.0),
    )


def no_difference(checked: UInt32[Array, "*rows"]) -> Difference:
    """Returns the result of `difference` for `checked` elements whose bits are all equal."""
    counts, sums = jnp.zeros(checked.shape, jnp.uint32), jnp.zeros(checked.shape, jnp.float32)
    return Difference(checked, counts, counts, counts, sums, sums)


def _as_numbers(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Converts an array to float32 or wider; PRNG keys, which have no magnitude, become zeros."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.zeros(x.shape, jnp.float32)
    if x.dtype == jnp.float64 or jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return x.astype(jnp.float32)


def merge(total: Difference, new: Difference) -> Difference:
    """Combines the differences of two tensors."""
    return Difference(
        checked=total.checked + new.checked,
        mismatched=total.mismatched + new.mismatched,
        zero_reference=total.zero_reference + new.zero_reference,
        nonfinite=total.nonfinite + new.nonfinite,
        relative_sum=jnp.minimum(total.relative_sum + new.relative_sum, LARGEST),
        relative_max=jnp.maximum(total.relative_max, new.relative_max),
    )


class Mismatch(NamedTuple):
    """The differences between twins at one site.

    Attributes:
        difference: one row per twin, with its difference from the reference (whose own row is zero); equal on all
            twins.
        undecided: how often three or more twins had no majority, so that the reference was a guess.
        unrepeated: for each twin, how often its digest was the first to differ although the repetition found no
            mismatch; None except in optimistic lock-step (`exchange="step"` or `"call"`). Such a difference was real,
            but its size is unknown, and `difference` does not count it.
    """

    difference: Difference
    undecided: UInt32[Array, "*rows"]
    unrepeated: UInt32[Array, "*rows twins"] | None = None

    def summary(self, site: Site | None = None) -> dict[str, Any]:
        """Returns the totals over all iterations and twins; waits for them.

        Under `vmap`, each twin returns a copy of the same counts. With the site, whose axes are known, one is counted.
        """
        fields = {name: np.asarray(value) for name, value in self.difference._asdict().items()}
        fields["undecided"] = np.asarray(self.undecided)
        if self.unrepeated is not None:
            fields["unrepeated"] = np.asarray(self.unrepeated)
        counts, twins = fields["checked"], fields["checked"].shape[-1:]
        mapped = site is not None and counts.ndim > 1 + len(site.dims) and counts.shape[:1] == twins
        if mapped and all((value == value[:1]).all() for value in fields.values()):
            fields = {name: value[0] for name, value in fields.items()}
        return {
            "checked": total(fields["checked"]),
            "mismatched": total(fields["mismatched"]),
            "largest relative difference": float(np.max(fields["relative_max"], initial=0.0)),
            "without a majority": total(fields["undecided"]),
            "not repeated": total(fields.get("unrepeated", 0)),
        }

    def verdict(self) -> Judgement:
        """Returns the verdict on this site; waits for the counts."""
        return _judged({"this site": self.summary()})

    @staticmethod
    def judge(reports: Reports["Mismatch"]) -> Judgement:
        """Returns the verdict on the twins of a step; waits for the counts."""
        return _judged({site.name: reports[site.name].summary(site) for site in reports.sites})


def _judged(totals: Mapping[str, Mapping[str, Any]]) -> Judgement:
    whole = {key: sum(each[key] for each in totals.values())
             for key in ("checked", "mismatched", "without a majority", "not repeated")}  # fmt: skip
    ran = [name for name, each in totals.items() if each["checked"]]
    keys = ("mismatched", "without a majority", "not repeated")
    wrong = [name for name, each in totals.items() if any(each[key] for key in keys)]
    if wrong:
        said = f"the twins differ in {whole['mismatched']:,} of {counted(whole['checked'], 'element')}"
        more = f" and {counted(len(wrong) - 1, 'more site')}" if len(wrong) > 1 else ""
        once, guessed = whole["not repeated"], whole["without a majority"]
        again = f"; {counted(once, 'digest')} differed, but not in the repetition" if once else ""
        guess = f"; {counted(guessed, 'comparison')} had no majority, so the reference is a guess" if guessed else ""
        return Judgement(Verdict.CORRUPT, f"{said}, at {wrong[0]}{more}{again}{guess}")
    if not ran:
        return Judgement(Verdict.INCONCLUSIVE, "no element was checked")
    return Judgement(
        Verdict.CLEAN, f"the twins agree in {counted(whole['checked'], 'element')}, at {counted(len(ran), 'site')}"
    )


def merge_mismatches(total: Mismatch, new: Mismatch) -> Mismatch:
    """Combines the mismatches of two iterations."""
    unrepeated = None
    if total.unrepeated is not None and new.unrepeated is not None:
        unrepeated = total.unrepeated + new.unrepeated
    return Mismatch(merge(total.difference, new.difference), total.undecided + new.undecided, unrepeated)


def mismatch_frequency(mismatched: Any, checked: Any) -> float:
    """Computes equation (1): mismatched elements per element checked, over all tensor-parallel ranks.

    Args:
        mismatched: number of a submodule's mismatched elements in a microstep, one entry per rank.
        checked: number of elements compared, one entry per rank (the sum over all ranks is TP * MBS * L * H).

    Returns:
        The share of elements that are mismatched; NaN if nothing was checked.
    """
    total = float(np.sum(np.asarray(checked, np.float64)))
    return float(np.sum(np.asarray(mismatched, np.float64))) / total if total else float("nan")


def mean_frequency(frequencies: Sequence[float]) -> float:
    """Computes equation (2): the mean of equation (1) over the decoder layers."""
    return float(np.mean(frequencies))


def mismatch_severity(relative_sum: Any, counted: Any) -> float:
    """Computes equation (3): the maximum, over tensor-parallel ranks, of the mean relative difference `|f' - f| / |f|`.

    Args:
        relative_sum: sum of a submodule's relative differences in a microstep, one entry per rank.
        counted: number of terms in each sum: mismatched elements minus zero references and non-finite values.

    Returns:
        The severity; NaN if the sums of all ranks are empty.
    """
    sums, counts = np.asarray(relative_sum, np.float64), np.asarray(counted, np.float64)
    means = sums[counts > 0] / counts[counts > 0]
    return float(means.max()) if means.size else float("nan")


def largest_severity(severities: Sequence[float]) -> float:
    """Computes equation (4): the maximum of equation (3) over the decoder layers; NaN if it is defined for no layer."""
    known = [severity for severity in severities if not np.isnan(severity)]
    return max(known, default=float("nan"))


def noise_to_signal(difference_norm: Any, reference_norm: Any) -> float:
    """Computes equation (5): the worst-case noise-to-signal ||g' - g||_2 / ||g||_2, the maximum over optimizer steps.

    Args:
        difference_norm: L2 norm of the difference between the gradients at each step.
        reference_norm: L2 norm of the reference's gradient at each step.

    Returns:
        The ratio, where 0/0 counts as 0 (nothing differs) and any other division by zero as infinity; NaN if there are
        no steps.
    """
    noise, signal = np.atleast_1d(np.asarray(difference_norm, np.float64)), np.atleast_1d(np.asarray(reference_norm))
    ratios = np.where(noise == 0, 0.0, noise / np.where(signal == 0, 1.0, signal))
    ratios = np.where((signal == 0) & (noise != 0), np.inf, ratios)
    return float(np.max(ratios)) if ratios.size else float("nan")
