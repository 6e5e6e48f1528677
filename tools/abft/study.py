"""`sdc abft study`: false alarms and detection of every scheme, on the products of real training."""

import dataclasses
import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sdc
from sdc.analysis.report import write_report
from sdc.analysis.study import STUDY, summarize_study
from sdc.checksums._check import Operands, expect, rounded_off
from sdc.checksums.power import MAGNITUDES, errors_found, flagged
from sdc.checksums.products import Dot
from sdc.checksums.profile import Profile
from sdc.checksums.schemes import Expected, make_scheme
from sdc.checksums.settings import SchemeName, Settings
from sdc.checksums.transform import product_of
from sdc.program.reports import Place, Reports, Values
from sdc.program.selectors import Selector, parse_selector, primitive
from sdc.record.determinism import environment
from sdc.record.records import MANIFEST, RunWriter
from sdc.train.config import get_config

from ..errors import CommandError, Exit, run_errors, usage_errors
from ..output import show
from ..progress import CountProgress
from .options import StudyOptions
from .training import start, train

DOTS = primitive("dot_general")
EVERY: tuple[SchemeName, ...] = get_args(SchemeName)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is checked.

    Attributes:
        name: for the record.
        output: type of the result that is checked, that of the sums or a narrower one.
        scheme: by which it is judged.
    """

    name: str
    output: str
    scheme: SchemeName

    def operands(self, product: Dot, a: Any, b: Any, sums: Any) -> Operands:
        """What the scheme is given of a product: its sums, or what they were rounded to."""
        if self.output == "float32":
            return Operands(a, b, sums)
        rounded = lax.optimization_barrier(sums.astype(self.output))
        if self.scheme != "residual":
            return Operands(a, b, rounded)
        scheme = make_scheme(self.scheme, a.dtype, b.dtype)
        return Operands(a, b, rounded, rounded_off(product, scheme, (a, b), sums, rounded))


def variants(dtype: str) -> list[Variant]:
    """Everything that is studied for one type; without rounding there is no residual to carry."""
    sums = [Variant(f"{dtype}, sums", "float32", scheme) for scheme in EVERY if scheme != "residual"]
    if dtype == "float32":
        return [dataclasses.replace(variant, name=dtype) for variant in sums]
    return sums + [Variant(f"{dtype}, rounded", dtype, scheme) for scheme in EVERY]


def study(options: StudyOptions) -> int:
    """Runs the study and returns the exit code."""
    with usage_errors():
        get_config(options.config)
        selector = DOTS & parse_selector(options.where)
    start(options)
    with usage_errors():
        profile = Profile.load(options.profile) if options.profile else Profile.assumed()
    folder = (options.run or Path("runs") / f"study-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}").absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"run folder {folder} exists already; name another with --run")
    counts: dict[str, dict[str, dict[str, Any]]] = {}
    marked = sorted({0, options.steps - 1})
    with CountProgress("study", (options.steps + len(marked)) * len(options.dtypes)) as progress:
        for dtype in options.dtypes:
            for name, scheme, found in _study_type(options, dtype, selector, profile, marked, progress):
                total = counts.setdefault(name, {}).setdefault(scheme, {})
                for key, values in found.items():
                    total[key] = total.get(key, 0) + np.asarray(values, np.int64)
    manifest = {
        "kind": STUDY,
        "command": ["sdc", *sys.argv[1:]],
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": dataclasses.asdict(get_config(options.config)),
        "steps": options.steps,
        "marked_steps": marked,
        "where": options.where,
        "seed": options.seed,
        "profile": str(options.profile) if options.profile else "assumed of the platform",
        "arithmetic": dataclasses.asdict(profile.rounding),
        "departs": profile.departs(),
        "environment": environment(),
        "magnitudes": MAGNITUDES,
    }
    summary = summarize_study(counts, MAGNITUDES)
    with run_errors(folder):
        with RunWriter.create(folder, manifest) as writer:
            writer.summary(summary)
        assert (folder / MANIFEST).is_file()
        report = write_report(folder)
    show(STUDY, {**summary, "run": str(folder), "report": str(report)}, as_json=options.json)
    return int(Exit.CLEAN)


def _study_type(
    options: StudyOptions,
    dtype: Any,
    selector: Selector,
    profile: Profile,
    marked: list[int],
    progress: CountProgress,
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Counts by variant and scheme."""
    every = tuple((variant, Settings(scheme=variant.scheme, rounding=profile.rounding)) for variant in variants(dtype))
    judged = _Judged(every)

    def transform(step: Callable[..., Any]) -> Callable[..., Any]:
        return sdc.rewrite(sdc.checksums.accumulators(step), selector, judged)

    capture: Any = None
    for step, (reports, program, arguments) in enumerate(train(options, dtype, transform)):
        capture = capture or jax.jit(sdc.rewrite(sdc.checksums.accumulators(program), selector, _Factors()))
        if not reports:
            raise CommandError(f"--where {options.where!r} selects no matrix product of {options.config}")
        for found in jax.device_get(reports).values():
            for (variant, _), (checked, wrong) in zip(every, found, strict=True):
                yield variant.name, variant.scheme, {"checked": np.sum(checked), "flagged": np.sum(wrong)}
        progress.advance(f"{dtype}, step {step}")
        if step in marked:
            _, factors = capture(*arguments)
            key = jax.random.fold_in(jax.random.key(options.seed), step)
            for site, product, a, b in _choose(factors, judged.products, step):
                own = jax.random.fold_in(key, site)
                for (variant, _), counts in zip(every, _errors(own, product, every, a, b), strict=True):
                    yield variant.name, variant.scheme, counts
            progress.advance(f"{dtype}, errors in step {step}")


def _choose(factors: Reports, products: Mapping[str, Dot], step: int) -> Iterator[tuple[int, Dot, Any, Any]]:
    """One iteration of every product: another layer and microstep for each."""
    for number, (site, (a, b)) in enumerate(zip(factors.sites, factors.values(), strict=True)):
        index = tuple((number + step) % size for size in a.shape[: len(site.dims)])
        yield number, products[site.name], a[index], b[index]


Judges: TypeAlias = tuple[tuple[Variant, Settings], ...]


def _expected(product: Dot, every: Judges, a: Any, b: Any, c: Any) -> Iterator[tuple[Variant, Settings, Any, Any]]:
    """What every variant is given, and what it expects; variants of one scheme expect the same of the same factors."""
    known: dict[str, Expected] = {}
    for variant, settings in every:
        operands = variant.operands(product, a, b, c)
        kind = "two-tier" if variant.scheme == "residual" else variant.scheme
        if kind not in known:
            known[kind] = expect(product, settings, operands, 2)
        yield variant, settings, operands, known[kind]


def _judge(product: Dot, settings: Settings, operands: Operands, expected: Expected, c: Any) -> Any:
    return flagged(product, settings, operands._replace(c=c), expected)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _errors(key: Any, product: Dot, every: Judges, a: Any, b: Any) -> list[dict[str, Any]]:
    a, b = lax.optimization_barrier((a, b))
    c = lax.optimization_barrier(product(a, b))
    judges: dict[str, list[Callable[[Any], Any]]] = {}
    products = {}
    for variant, *given in _expected(product, every, a, b, c):
        judges.setdefault(variant.output, []).append(functools.partial(_judge, product, *given))
        products[variant.output] = given[1].c
    found = {
        output: errors_found(key, product, products[output], judges[output], jnp.asarray(MAGNITUDES, jnp.float32))
        for output in judges
    }
    # Variants of one output stand together.
    return [
        {"found": seen, "made": counts.made, "bits_found": bits, "bits_made": counts.bits_made}
        for counts in found.values()
        for seen, bits in zip(counts.found, counts.bits_found, strict=True)
    ]


class _Judged:
    """A rule that judges a product by every variant, and reports rows checked and flagged."""

    def __init__(self, every: Judges) -> None:
        self.every = every
        self.products: dict[str, Dot] = {}

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Any]:
        a, b = lax.optimization_barrier(inputs)
        a, b, c = lax.optimization_barrier((a, b, *bind(a, b)))
        product = product_of(place.site.primitive, place.params, a, b)
        assert isinstance(product, Dot)
        self.products[place.site.name] = product
        report = []
        for _, settings, operands, expected in _expected(product, self.every, a, b, c):
            wrong = flagged(product, settings, operands, expected)
            report.append((jnp.uint32(wrong.size), jnp.sum(wrong, dtype=jnp.uint32)))
        return [c], tuple(report)

    def merge(self, total: Any, new: Any) -> Any:
        return jax.tree.map(jnp.add, total, new)


class _Factors:
    """A rule that reports the factors of a product."""

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Any]:
        return bind(*inputs), tuple(inputs)

    def merge(self, total: Any, new: Any) -> Any:
        return new
