"""What the numbers of a report mean: the text at its end."""

import math
from typing import NamedTuple

from .statistics import needed_mismatches
from .waiting import burn_in_steps, probability_seen


class Definition(NamedTuple):
    """A quantity, its formula, what to know about it, and the number of its equation in the study."""

    name: str
    formula: str
    text: str
    equation: str = ""


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
