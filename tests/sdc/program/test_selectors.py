"""Selectors choose what they say, combine as sets do, and never hit nothing in silence."""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.program.selectors import (
    Selector,
    Site,
    argument,
    arithmetic,
    as_selector,
    boundary,
    collectives,
    direction,
    everything,
    inside,
    iteration,
    matching,
    named,
    operations,
    primitive,
    probed,
    probes,
    result,
    scope,
    source,
)

MESH = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))


def loss(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        with jax.named_scope("attn"):
            x = sdc.probe(jnp.tanh(x @ w), "attn")
        with jax.named_scope("ffn"):
            return x + jax.checkpoint(lambda x: jnp.sin(x) * x)(x), None

    x, _ = lax.scan(layer, x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def step(params: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(params, x)
    with jax.named_scope("optimizer"):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


PARAMS = {"layers": np.full((3, 4, 4), 0.1, np.float32), "head": np.ones((4, 1), np.float32)}
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
SITES = sdc.sites(step, PARAMS, X)


def hits(where: Callable[[Site], bool]) -> set[str]:
    return {site.name for site in SITES if where(site)}


TERMS: dict[str, tuple[Selector, Callable[[Site], bool]]] = {
    "everything": (everything, lambda site: True),
    "probes": (probes, lambda site: site.primitive == "probe"),
    "operations": (operations, lambda site: site.direction in ("fwd", "bwd", "remat")),
    "arithmetic": (arithmetic, lambda site: site.flops > 0),
    "primitive": (primitive("dot_general", "ta*"), lambda site: site.primitive in ("dot_general", "tanh")),
    "scope": (scope("*ffn*"), lambda site: "ffn" in site.scope),
    "inside": (inside("jvp()/attn"), lambda site: site.scope in ("jvp()/attn", "jvp()/attn/probe")),
    "probed": (probed("attn"), lambda site: site.probe == "attn"),
    "direction": (direction("bwd", "remat"), lambda site: site.direction in ("bwd", "remat")),
    "source": (source("*layer)"), lambda site: site.source.endswith("layer)")),
    "argument": (argument("0/*"), lambda site: site.name in ("arg/0/layers", "arg/0/head")),
    "result": (result("0/head", "1"), lambda site: site.name in ("out/0/head", "out/1")),
    "matching": (matching("bwd/*tanh"), lambda site: site.name.split("#")[0].endswith("tanh") and "bwd/" in site.name),
    "iteration": (iteration(1), lambda site: site.loops == 1),
}


@pytest.mark.parametrize(("selector", "expected"), TERMS.values(), ids=TERMS)
def test_terms_choose_what_they_say(selector: Selector, expected: Callable[[Site], bool]) -> None:
    chosen = hits(selector)
    assert chosen == hits(expected)
    assert chosen or selector.text.startswith("matching")
    assert hits(as_selector(repr(selector))) == chosen


def expressions() -> st.SearchStrategy[tuple[Selector, frozenset[str]]]:
    """A selector beside the set of sites that it should hit."""
    whole = frozenset(site.name for site in SITES)
    leaf = st.sampled_from([term for name, term in TERMS.items() if name != "iteration"]).map(
        lambda term: (term[0], frozenset(hits(term[1])))
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: (pair[0][0] & pair[1][0], pair[0][1] & pair[1][1])),
            st.tuples(inner, inner).map(lambda pair: (pair[0][0] | pair[1][0], pair[0][1] | pair[1][1])),
            inner.map(lambda one: (~one[0], whole - one[1])),
        ),
        max_leaves=6,
    )


@given(expressions())
def test_combinations_are_those_of_sets(case: tuple[Selector, frozenset[str]]) -> None:
    selector, expected = case
    assert hits(selector) == expected
    assert hits(as_selector(selector.text)) == expected
    assert as_selector(selector.text).text == selector.text


def test_sites_know_shapes_operations_and_lines() -> None:
    (product,) = sdc.sites(step, PARAMS, X, where=primitive("dot_general") & direction("fwd") & scope("*attn*"))
    assert [(x.shape, x.dtype) for x in product.outputs] == [((2, 4), np.float32)]
    assert product.flops == 2 * 2 * 4 * 4
    assert product.dims == ("scan",)
    assert "test_selectors.py" in product.source
    assert "float32[2,4] by scan 3  64 FLOP" in str(product)
    assert {site.name: site.outputs[0].shape for site in sdc.sites(step, PARAMS, X, where=argument("*"))} == {
        "arg/0/head": (4, 1),
        "arg/0/layers": (3, 4, 4),
        "arg/1": (2, 4),
    }


def test_keyword_arguments_are_sites() -> None:
    names = [
        site.name for site in sdc.sites(lambda x, *, rate: {"y": x * rate}, X, rate=jnp.float32(2.0), where=~operations)
    ]
    assert names == ["arg/0", "arg/rate", "out/y"]


def test_order_tells_loops() -> None:
    """The forward scan runs first and onwards, the backward one last and backwards."""
    by_direction = {site.direction: site.order for site in SITES if site.loops and site.primitive == "dot_general"}
    assert "scan" in by_direction["fwd"]
    assert "reversed" in by_direction["bwd"]
    places = [tuple(part for part in site.order if isinstance(part, int)) for site in SITES]
    assert len(set(places)) == len(places)


def test_a_chosen_iteration_is_the_only_one_reported() -> None:
    everywhere = jax.jit(sdc.fingerprint(step))(PARAMS, X)[1]["fwd/attn"]
    _, some = jax.jit(sdc.fingerprint(step, where=probes & (iteration(1) | direction("bwd"))))(PARAMS, X)
    np.testing.assert_array_equal(some["fwd/attn"], np.where(np.arange(3)[:, None, None] == 1, everywhere, 0))
    assert (np.asarray(some["bwd/attn"]) != 0).all()
    _, rest = jax.jit(sdc.fingerprint(step, where=probes & ~iteration(0, 2, loop=0)))(PARAMS, X)
    np.testing.assert_array_equal(rest["fwd/attn"], some["fwd/attn"])


@pytest.mark.parametrize("check_vma", [False, True])
def test_iterations_on_a_mesh(check_vma: bool) -> None:
    def body(x: Any) -> Any:
        return lax.scan(lambda c, row: (c + lax.psum(sdc.probe(2.0 * row, "p"), "d"), None), jnp.float32(0), x)[0]

    mapped = jax.shard_map(body, mesh=MESH, in_specs=P("d"), out_specs=P(), check_vma=check_vma)
    out, digests = jax.jit(sdc.fingerprint(mapped, where=probes & iteration(1)))(X.reshape(-1))
    assert out == pytest.approx(2.0 * X.sum(), abs=1e-5)
    assert np.asarray(digests["fwd/p"]).any((2, 3)).tolist() == [[False, True, False, False]] * 2


def test_boundaries_are_what_leaves_a_scope() -> None:
    """Depth 1 cuts between the outermost scopes; each depth more adds what passes between scopes inside."""
    cuts = [hits(boundary(depth)) for depth in range(1, 6)]
    assert all(a <= b for a, b in itertools.pairwise(cuts))
    assert len(cuts[0]) < len(SITES) / 2
    assert {"arg/1", "out/1"} <= cuts[0]
    (product,) = sdc.sites(step, PARAMS, X, where=primitive("dot_general") & direction("fwd") & scope("*attn"))
    assert product.leaves == 3  # only the tanh beside it reads it


def test_collectives() -> None:
    mapped = jax.shard_map(lambda x: lax.psum(x, "d") + lax.all_gather(x, "d").sum(), mesh=MESH, in_specs=P("d"),
                           out_specs=P(), check_vma=False)  # fmt: skip
    assert [site.primitive for site in sdc.sites(mapped, jnp.ones(2), where=collectives)] == ["psum", "all_gather"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (primitive("dot_genral"), r"matches none of the step's \d+ sites; near misses: dot_general; the step has"),
        (
            primitive("exp") & direction("bwd"),
            r'primitive\("exp"\) alone matches 0; direction\("bwd"\) alone matches \d+',
        ),
        (scope("*atn*"), r"near misses: .*attn"),
        (scope("attn"), r"near misses: .*attn"),
        (argument("0/Head"), "near misses: 0/head"),
        (probed("atn"), "near misses: attn"),
        (iteration(0, loop=3), "matches none"),
    ],
)
def test_near_misses(where: Selector, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sdc.sites(step, PARAMS, X, where=where)
    for tool in (
        sdc.fingerprint(step, where),
        jax.vmap(sdc.lockstep(step, "twin", where=where), None, axis_name="twin", axis_size=2),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(tool, PARAMS, X)


LEVELS = (101, 1_000, 100_000)  # one too many, about as many as Python allows calls, and more than its parser takes
DEEP = {
    f"{name} {levels}": text(levels)
    for name, text in {
        "brackets": lambda n: n * "(" + "probes" + n * ")",
        "not": lambda n: n * "~" + "probes",
        "both": lambda n: n * "~(" + "probes" + n * ")",
        "and": lambda n: " & ".join(["probes"] * (n + 1)),
        "or": lambda n: "|".join(["probes"] * (n + 1)),
        "words": lambda n: n * "not " + "probes",
        "numbers": lambda n: f"boundary({n * '-'}1)",
        "sums": lambda n: f"boundary({'+'.join('1' * (n + 1))})",
        "lists": lambda n: f"named({n * '['}{n * ']'})",
        "attributes": lambda n: "probes" + n * ".a",
        "calls": lambda n: "probes" + n * "()",
    }.items()
    for levels in LEVELS
    if (name, levels) != ("brackets", 101)  # which lead nowhere, as in Python
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_selectors_nested_too_deeply_are_told_so(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested deeper than 100 levels|cannot be parsed; use Python syntax"):
        as_selector(text)


def test_selectors_may_be_long_but_not_deep() -> None:
    names = [f"a{number}" for number in range(10_000)]
    assert as_selector(f"named({', '.join(map(repr, names))})").text.endswith('"a9999")')
    assert len(as_selector(" | ".join(100 * ["probes"])).leaves()) == 100
    with pytest.raises(ValueError, match=r'nested deeper than 100 levels.*as in named\("a", "b"\)'):
        functools.reduce(operator.or_, map(named, names))
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        functools.reduce(lambda selector, _: ~selector, names, probes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be parsed"),
        ("primitive(", "cannot be parsed"),
        ("dot_general", "'dot_general' is not a selector; expected everything, probes"),
        ("primitive()", "expected at least one pattern"),
        ("primitive(3)", "expected at least one pattern"),
        ("direction('sideways')", "expected one or more of fwd, bwd"),
        ("iteration(-1)", "expected one or more numbers of at least 0"),
        ("boundary(0)", "at least 1"),
        ("iteration(1, step=2)", "unexpected keyword"),
        ("primitive('a') and probes", "is not a selector"),
        ("__import__('os')", "is not a selector"),
        ("named(['a'])", "expected at least one name"),
        ("inside(3)", "expected the name of a scope"),
    ],
)
def test_selectors_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_selector(text)


def test_a_step_that_cannot_be_traced() -> None:
    with pytest.raises(ValueError, match=r"cannot be traced.*jax\.lax\.cond"):
        sdc.sites(lambda x: x if x.sum() > 0 else -x, X)
