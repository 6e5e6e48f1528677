"""Results of tools state their verdict and their details, in terminals, notebooks and Treescope."""

import html
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import treescope

import sdc
from sdc.checkpoints import FromState, differing, repair
from sdc.results import Result, ResultTable
from sdc.verdict import Verdict

# Treescope 0.1.10 looks at a class that NumPy 2.5 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The chararray class is deprecated:DeprecationWarning")
SHAPE = (3, 8, 8)
Step = Callable[..., Any]


@jax.checkpoint
def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


W, X = 0.3 * jnp.ones(SHAPE), jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
MOMENT = sdc.Moment(jax.random.key(0), jnp.int32(0))
OFTEN = ["bitflip,rate=0.05,bits=22,where=products"]


def struck(step: Step) -> Step:
    """Returns the step with simulated faults, without its events."""
    injected = sdc.inject(step, OFTEN)
    return lambda w, x: injected(MOMENT, w, x)[0]


def twins(step: Step) -> Step:
    stepped = sdc.lockstep(step, "twin", where="products")
    return jax.vmap(stepped, in_axes=None, axis_name="twin", axis_size=2)


def unequal_twins(step: Step) -> Step:
    injected = sdc.inject(step, [f"{OFTEN[0]},twin=1"])
    stepped = sdc.lockstep(lambda w, x: injected(MOMENT, w, x)[0], "twin", where="products")
    return jax.vmap(stepped, in_axes=None, axis_name="twin", axis_size=2)


class Case(NamedTuple):
    tool: Callable[[Step], Step]
    verdict: Verdict | None
    said: str
    column: str


CASES = {
    "abft": Case(sdc.abft, Verdict.CLEAN, "no flag in 60 checked rows", "flagged"),
    "abft, struck": Case(
        lambda step: sdc.abft(struck(sdc.checksums.accumulators(step))),
        Verdict.CORRUPT, "correct when recomputed", "flagged",
    ),
    "lockstep": Case(twins, Verdict.CLEAN, "the twins agree in", "mismatched"),
    "lockstep, struck": Case(unequal_twins, Verdict.CORRUPT, "the twins differ in", "mismatched"),
    "witness": Case(sdc.witness, Verdict.CLEAN, "agree with the first computation", "mismatched"),
    "witness, struck": Case(
        lambda step: sdc.witness(struck(step)), Verdict.INCONCLUSIVE, "run the step again", "mismatched"
    ),
    "witness, nothing twice": Case(
        lambda step: sdc.witness(lambda w, x: jnp.tanh(x @ w[0])), Verdict.INCONCLUSIVE, "no operation was checked", ""
    ),
    "fingerprint": Case(lambda step: sdc.fingerprint(step, "products"), None, "state no verdict", ""),
    "inject": Case(
        lambda step: lambda w, x: sdc.inject(step, OFTEN)(MOMENT, w, x), None, "simulated faults", "changed"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return {name: jax.jit(case.tool(step))(W, X)[1] for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_reports_state_their_verdict(reports: dict[str, Any], name: str) -> None:
    found, case = reports[name], CASES[name]
    assert found.verdict().verdict is case.verdict
    assert case.said in found.verdict().reason
    table = found.table()
    assert [row[0] for row in table.rows] == list(found)
    assert not case.column or case.column in table.header
    if case.verdict is Verdict.CORRUPT:
        worst = [row["site"] for row in table.records() if row[case.column]]
        assert str(table).splitlines()[1].startswith(worst[0])
        assert [table.rows[number][0] for number in table.first] == worst


@pytest.mark.parametrize("name", CASES)
def test_reports_are_short_and_show_their_verdict_in_notebooks(reports: dict[str, Any], name: str) -> None:
    found = reports[name]
    assert repr(found).startswith("Reports[")
    assert len(repr(found)) < 300
    assert html.escape(str(found.verdict())) in found._repr_html_()
    assert f"# {str(found.verdict())[:30]}" in treescope.render_to_text(found)


def test_reports_pass_through_jit_with_the_same_verdict(reports: dict[str, Any]) -> None:
    for name, found in reports.items():
        again = jax.jit(lambda reports: reports)(found)
        assert again.verdict() == found.verdict(), name
        assert again.table() == found.table(), name


def test_one_flag_and_one_mismatch_state_their_verdict(reports: dict[str, Any]) -> None:
    for name in ("abft", "lockstep"):
        assert all(one.verdict().verdict is Verdict.CLEAN for one in reports[name].values())
        assert any(one.verdict().verdict is Verdict.CORRUPT for one in reports[f"{name}, struck"].values())


def test_rows_that_are_reproduced_are_no_proof(reports: dict[str, Any]) -> None:
    found = reports["abft, struck"]
    values = [one._replace(confirmed=jnp.zeros_like(one.confirmed)) for one in found.values()]
    assert sdc.Reports(found.sites, values).verdict().verdict is Verdict.INCONCLUSIVE
    unchecked = [one._replace(checked=0 * one.checked, flagged=0 * one.flagged) for one in values]
    said = sdc.Reports(found.sites, unchecked).verdict()
    assert said.verdict is Verdict.INCONCLUSIVE
    assert "no row" in said.reason


@pytest.mark.parametrize(("size", "verdict"), [(2, Verdict.CLEAN), (8, Verdict.INCONCLUSIVE)])
def test_products_that_were_not_checked_count(size: int, verdict: Verdict) -> None:
    def integers(w: Any, x: Any) -> Any:
        whole = jnp.ones((size, size), jnp.int32)
        return x @ w[0], whole @ whole

    said = sdc.abft(integers)(W, X)[1].verdict()
    assert said.verdict is verdict
    assert {2: "96.96 % of the work", 8: "33.3 % of the work"}[size] in said.reason  # rounded down
    assert ("fwd/dot_general#2" in said.reason) == (verdict is Verdict.INCONCLUSIVE)


def test_a_missing_name_names_near_ones(reports: dict[str, Any]) -> None:
    found = reports["abft"]
    name = next(iter(found))
    with pytest.raises(KeyError, match=r"near it: .*dot_general"):
        found[name.replace("()", "")]
    assert name in found
    assert "nothing" not in found


def test_verdicts_are_refused_inside_jit() -> None:
    def asks(w: Any, x: Any) -> Any:
        return sdc.abft(step)(w, x)[1].verdict()

    with pytest.raises(ValueError, match="inside jit, the values of reports are unknown"):
        jax.jit(asks)(W, X)


def test_verdicts_beside_events_of_simulated_faults_say_so(reports: dict[str, Any]) -> None:
    injected = sdc.inject(step, OFTEN)
    _, flags = jax.jit(sdc.abft(injected))(MOMENT, W, X)
    assert flags.simulated
    assert flags.verdict().reason.startswith("with simulated faults, ")
    runs = [sdc.fingerprint(each, "products") for each in (injected, lambda _, *args: injected(MOMENT, *args)[0])]
    marked, plain = (run(MOMENT, W, X)[1] for run in runs)
    assert (marked.simulated, plain.simulated) == (True, False)
    other = runs[0](MOMENT, 2 * W, X)[1]
    found = sdc.first_difference(marked, other)
    assert found is not None
    assert found.simulated
    assert found.verdict().reason.startswith("with simulated faults, the runs differ first at ")
    for name in ("abft", "inject", "lockstep"):
        with pytest.raises(ValueError, match=r"not reports of \w+, which have their own verdict"):
            sdc.first_difference(reports[name], reports[name])


def test_a_first_difference_shows_what_was_compared_before_it() -> None:
    run = jax.jit(sdc.fingerprint(step, "operations"))
    found = sdc.first_difference(run(W, X)[1], run(W.at[1, 2, 3].set(0.5), X)[1])
    assert found is not None
    assert found.verdict().verdict is Verdict.CORRUPT
    assert found.verdict().reason.startswith(f"the runs differ first at {found.site.name}")
    assert [row[2] for row in found.table().rows] == ["equal"] * len(found.before) + ["differs"]
    assert repr(found) == f"FirstDifference({found})"
    assert "Site(" in repr(found.site)
    assert found.site.name in found.site._repr_html_()


def test_a_repair_states_what_was_wrong() -> None:
    good = {"w": jnp.zeros((4, 2))}
    bad = {"w": good["w"].at[1, 1].set(1.0)}
    wrong = differing(bad, good)
    mended = repair(bad, wrong, [FromState(good, 7, "the healthy twin")])
    assert mended.verdict().verdict is Verdict.CORRUPT
    assert mended.table().rows == (("w", "0:4", "the healthy twin", 7),)
    assert repair(bad, wrong, []).table().rows[0][2] == "still wrong"
    assert repair(good, [], []).verdict().verdict is None
    assert isinstance(mended, Result)


def test_tables_show_findings_first_and_say_what_is_left_out() -> None:
    rows = tuple((f"site {number}", number, number == 30) for number in range(40))
    text = str(ResultTable(("site", "checked", "found"), rows, first=(30,)))
    assert text.splitlines()[1].startswith("site 30")
    assert text.endswith("and 20 more rows")
    shown = ResultTable(("<a>", "b"), (("<x>", 1_000_000), ("y", None), ("z", float("inf")), ("u", 0.12345)))
    assert str(shown).splitlines()[1:] == ["<x>  1,000,000", "y            –", "z          inf", "u        0.123"]
    assert "<x>" not in shown._repr_html_()
    assert "&lt;x&gt;" in shown._repr_html_()


def test_counts_do_not_overflow(reports: dict[str, Any]) -> None:
    """Counts are 32-bit numbers on the device; their sum is not."""
    half = jnp.uint32(2**31)
    flags = reports["abft"]
    one = next(iter(flags.values()))
    many = one._replace(**{name: jnp.stack([half, half]) for name in ("checked", "flagged", "confirmed")})
    found = sdc.Reports(flags.sites[:1], [many])
    assert found.verdict().verdict is many.verdict().verdict is Verdict.CORRUPT
    assert found.table().rows[0][1:3] == (2**32, 2**32)
    mismatches = reports["lockstep, struck"]
    whole = jax.tree.map(lambda x: x, next(iter(mismatches.values())))
    difference = whole.difference._replace(checked=jnp.stack([half, half]), mismatched=jnp.stack([half, half]))
    apart = sdc.Reports(mismatches.sites[:1], [whole._replace(difference=difference)])
    assert apart.verdict().verdict is Verdict.CORRUPT


def test_twins_are_counted_once_under_vmap(reports: dict[str, Any]) -> None:
    found = reports["lockstep, struck"]
    events = jax.vmap(
        lambda twin: sdc.inject(step, [f"{OFTEN[0]},twin=1"])(MOMENT, W, X)[1], axis_name="twin", axis_size=2
    )(jnp.arange(2))
    injected = sum(int(one.changed.sum()) for one in events.values())
    assert sum(row["mismatched"] for row in found.table().records()) == injected > 0


def test_differences_without_a_size_are_in_the_sentence(reports: dict[str, Any]) -> None:
    found = reports["lockstep"]
    first, *rest = found.values()
    once = jnp.zeros(first.difference.checked.shape, jnp.uint32).at[..., 1].set(1)
    said = sdc.Reports(found.sites, [first._replace(unrepeated=once), *rest]).verdict()
    assert said.verdict is Verdict.CORRUPT
    assert "differed, but not in the repetition" in said.reason
    guess = jnp.ones(first.undecided.shape, jnp.uint32)
    said = sdc.Reports(found.sites, [first._replace(undecided=guess), *rest]).verdict()
    assert said.verdict is Verdict.CORRUPT
    assert "the reference is a guess" in said.reason


def test_recomputations_of_little_of_the_step_are_inconclusive() -> None:
    def mostly_once(w: Any, x: Any) -> Any:
        value, gradient = step(w, x)
        return value, gradient, jnp.ones((64, 64)) @ jnp.ones((64, 64))

    said = jax.jit(sdc.witness(mostly_once))(W, X)[1].verdict()
    assert said.verdict is Verdict.INCONCLUSIVE
    assert "too few" in said.reason


class Named(NamedTuple):
    """A report of a user's rule."""

    judge: Any
    summary: Any


@pytest.mark.parametrize("value", [Named(1, 2), {"a": 1}, 3.5, None])
def test_reports_of_others_state_no_verdict(reports: dict[str, Any], value: Any) -> None:
    found = sdc.Reports(reports["abft"].sites[:1], [value])
    assert found.verdict().verdict is None
    assert "verdict" in found._repr_html_()
    mixed = sdc.Reports(reports["abft"].sites[:2], [value, next(iter(reports["abft"].values()))])
    assert mixed.verdict().verdict is None


def test_shapes_have_no_verdict_but_can_be_shown() -> None:
    found = jax.eval_shape(sdc.abft(step), W, X)[1]
    with pytest.raises(ValueError, match="the reports hold a ShapeDtypeStruct"):
        found.verdict()
    assert "ShapeDtypeStruct" in found._repr_html_()
    assert "ShapeDtypeStruct" in treescope.render_to_text(found)
    with pytest.raises(KeyError, match="no report is named 0"):
        found[0]
    assert found.get(0) is None
