"""One contract over a table of steps: same outputs, right reports, identical program when nothing is selected."""

import functools
import sysconfig
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.program import Place, everything, matching, probes, products, rewrite

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


class Total:
    """A rule that reports the sum of what it sees and the iterations it is in, and can change the value."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, place: Place, bind: Callable[..., list[Any]], *inputs: Any) -> tuple[list[Any], Any]:
        outs = [x * jnp.asarray(self.factor, x.dtype) for x in bind(*inputs)]
        iteration = jnp.stack(place.iteration) if place.iteration else jnp.zeros(0, jnp.int32)
        return outs, {"sum": sum(jnp.sum(x) for x in outs), "calls": jnp.int32(1), "last": iteration}

    def merge(self, total: Any, new: Any) -> Any:
        return {
            "sum": total["sum"] + new["sum"],
            "calls": total["calls"] + new["calls"],
            "last": jnp.maximum(total["last"], new["last"]),
        }


def probed(x: Any) -> Any:
    return sdc.probe(x * 2.0, "p")


def step_plain(x: Any) -> Any:
    return jnp.sum(probed(x))


def step_jit(x: Any) -> Any:
    return jax.jit(probed)(x) + jax.jit(probed)(x + 1.0)


def step_scan(x: Any) -> Any:
    return lax.scan(lambda c, y: (c + jnp.sum(probed(y)), c), jnp.float32(0.0), x.reshape(4, 2))


def step_reversed_scan(x: Any) -> Any:
    return lax.scan(lambda c, y: (c + jnp.sum(probed(y)), c), jnp.float32(0.0), x.reshape(4, 2), reverse=True)


def step_nested_scan(x: Any) -> Any:
    def outer(c: Any, rows: Any) -> Any:
        return lax.scan(lambda c, y: (c + probed(y), None), c, rows)[0], None

    return lax.scan(outer, jnp.float32(0.0), x.reshape(2, 4))[0]


def step_while(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, probed(c[1])), (jnp.int32(0), x))


def step_while_condition(x: Any) -> Any:
    return lax.while_loop(lambda c: jnp.sum(probed(c)) < 30.0, lambda c: c + 1.0, x)


def step_cond(x: Any) -> Any:
    return lax.cond(x[0] > 0, lambda x: probed(x), lambda x: sdc.probe(x, "q"), x)


def step_switch(x: Any) -> Any:
    return lax.switch(jnp.int32(2), [lambda x: x, probed, lambda x: sdc.probe(x + 3.0, "q")], x)


def loss_remat(x: Any) -> Any:
    return jnp.sum(jax.checkpoint(lambda x: jnp.sin(sdc.probe(jnp.sin(x), "p")))(x))


def loss_scan_remat(x: Any) -> Any:
    return jnp.sum(lax.scan(lambda c, _: (jax.checkpoint(lambda c: jnp.sin(probed(c)))(c), None), x, None, length=3)[0])


@jax.custom_vjp
def custom(x: Any) -> Any:
    return probed(x)


custom.defvjp(lambda x: (custom(x), None), lambda _, g: (sdc.probe(g * 2.0, "g"),))


@jax.custom_jvp
def custom_forward(x: Any) -> Any:
    return probed(x)


custom_forward.defjvp(lambda primals, tangents: (custom_forward(*primals), tangents[0] * 2.0))


def sharded(check_vma: bool) -> Callable[[Any], Any]:
    def body(x: Any) -> Any:
        return lax.psum(lax.scan(lambda c, y: (c + probed(y), None), jnp.zeros_like(x[0]), x)[0], "b")

    return jax.shard_map(body, mesh=MESH, in_specs=P("a", "b"), out_specs=P(), check_vma=check_vma)


def step_shard_map(x: Any) -> Any:
    body = lambda x: lax.psum(probed(x), "b")  # noqa: E731 - a body in one line
    return jax.shard_map(body, mesh=MESH, in_specs=P("a", "b"), out_specs=P("a"), check_vma=False)(x.reshape(2, 4))


def step_shard_map_checked(x: Any) -> Any:
    def body(x: Any) -> Any:
        y = lax.cond(jnp.sum(x) > 0, probed, lambda x: x, x)
        return lax.psum(lax.scan(lambda c, y: (c + probed(y), None), y, x[None])[0], "b")

    return jax.shard_map(body, mesh=MESH, in_specs=P("a", "b"), out_specs=P("a"))(x.reshape(2, 4))


def step_partly_manual(x: Any) -> Any:
    body = lambda x: lax.psum(probed(x), "a")  # noqa: E731 - a body in one line
    return jax.shard_map(body, mesh=MESH, in_specs=P("a"), out_specs=P(), axis_names={"a"})(x.reshape(2, 4))


def step_nested_shard_map(x: Any) -> Any:
    def outer(x: Any) -> Any:
        inner = jax.shard_map(probed, in_specs=P(None, "b"), out_specs=P(None, "b"), axis_names={"b"})
        return inner(x) + lax.psum(x, "a")

    return jax.jit(jax.shard_map(outer, mesh=MESH, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}))(
        x.reshape(2, 4)
    )


def step_pmap(x: Any) -> Any:
    return jax.pmap(lambda x: lax.psum(probed(x), "d"), axis_name="d")(x)


def step_vmap(x: Any) -> Any:
    return jax.vmap(lambda x: lax.pmean(probed(x), "v"), axis_name="v")(x)


@jax.custom_batching.custom_vmap
def mapped_otherwise(x: Any) -> Any:
    return probed(x)


mapped_otherwise.def_vmap(lambda size, batched, x: (probed(x), True))


def step_linear_call(x: Any) -> Any:
    return linear_call(lambda _, x: probed(x), lambda _, y: 2.0 * y, (), x)


def step_solve(x: Any) -> Any:
    return lax.custom_linear_solve(lambda v: 4.0 * v, x, lambda _, b: probed(b) / 8.0, symmetric=True)


def step_types(x: Any) -> Any:
    key = sdc.probe(jax.random.key(0), "key")
    return sdc.probe({"i": x.astype(jnp.int32), "h": x.astype(jnp.bfloat16)}, "tree"), jax.random.normal(key, (2,))


STEPS: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "plain": (step_plain, {"fwd/p": ()}),
    "jit": (step_jit, {"fwd/p": (), "fwd/p#2": ()}),
    "grad": (jax.grad(step_plain), {"bwd/p": ()}),
    "scan": (step_scan, {"fwd/p": (4,)}),
    "reversed scan": (step_reversed_scan, {"fwd/p": (4,)}),
    "nested scan": (step_nested_scan, {"fwd/p": (2, 4)}),
    "while": (step_while, {"fwd/p": ()}),
    "while condition": (step_while_condition, {"fwd/p": ()}),
    "cond": (step_cond, {"fwd/q": (), "fwd/p": ()}),
    "switch": (step_switch, {"fwd/p": (), "fwd/q": ()}),
    "remat": (jax.value_and_grad(loss_remat), {"fwd/p": (), "remat/p": (), "bwd/p": ()}),
    "scan of remat": (jax.value_and_grad(loss_scan_remat), {"fwd/p": (3,), "remat/p": (3,), "bwd/p": (3,)}),
    "custom_vjp": (lambda x: custom(x), {"fwd/p": ()}),
    "custom_vjp, differentiated": (
        jax.value_and_grad(lambda x: jnp.sum(custom(x))),
        {"fwd/p": (), "bwd/g": ()},
    ),
    "custom_jvp": (lambda x: custom_forward(x), {"fwd/p": ()}),
    "forward mode": (lambda x: jax.jvp(probed, (x,), (x,)), {"fwd/p": (), "jvp/p": ()}),
    "vmap": (step_vmap, {"fwd/p": ()}),
    "shard_map": (step_shard_map, {"fwd/p": (2, 2)}),
    "shard_map, checked": (step_shard_map_checked, {"fwd/p": (2, 2), "fwd/p#2": (2, 2, 1)}),
    "partly manual": (step_partly_manual, {"fwd/p": (2,)}),
    "nested shard_map": (step_nested_shard_map, {"fwd/p": (2, 2)}),
    "pmap": (step_pmap, {"fwd/p": (8,)}),
    "custom_vmap": (lambda x: mapped_otherwise(x), {"fwd/p": ()}),
    "linear_call": (step_linear_call, {"fwd/p": ()}),
    "composite": (lambda x: lax.composite(probed, "sdc.test")(x), {"fwd/p": ()}),
    "custom_linear_solve": (step_solve, {"fwd/p": ()}),
    "nothing": (lambda x: jnp.sin(x), {}),
}


@pytest.fixture(params=STEPS, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    return STEPS[request.param]


def test_outputs_and_report_shapes(case: tuple[Callable[..., Any], dict[str, tuple[int, ...]]]) -> None:
    step, expected = case
    out, reports = jax.jit(rewrite(step, probes, Total()))(X)
    chex.assert_trees_all_close(out, jax.jit(step)(X), rtol=1e-6)
    assert {name: report["calls"].shape for name, report in reports.items()} == expected
    for site, report in zip(reports.sites, reports.values(), strict=True):
        assert len(site.dims) == report["calls"].ndim


def test_identical_program_when_nothing_is_selected(case: tuple[Callable[..., Any], Any]) -> None:
    step, _ = case
    rewritten = jax.make_jaxpr(lambda x: rewrite(step, lambda _: False, Total())(x)[0])(X)
    assert str(rewritten) == str(jax.make_jaxpr(step)(X))


def test_rewriting_twice_finds_the_same_sites(case: tuple[Callable[..., Any], Any]) -> None:
    step, expected = case
    once = rewrite(step, probes, Total())
    assert [site.name for site in sdc.sites(lambda x: once(x)[0], X) if probes(site)] == list(expected)
    (_, inner), outer = jax.jit(rewrite(once, probes, Total()))(X)
    chex.assert_trees_all_equal(dict(inner), dict(outer))


def test_no_recompilation_on_the_second_call(case: tuple[Callable[..., Any], Any]) -> None:
    step, _ = case
    run = jax.jit(rewrite(step, probes, Total()))
    run(X)
    run(X + 1.0)
    assert run._cache_size() == 1


def test_stacked_rows_follow_the_scanned_inputs() -> None:
    rows = 2.0 * X.reshape(4, 2).sum(1)
    for step in (step_scan, step_reversed_scan):
        _, reports = jax.jit(rewrite(step, probes, Total()))(X)
        np.testing.assert_allclose(reports["fwd/p"]["sum"], rows, rtol=1e-6)
        np.testing.assert_array_equal(reports["fwd/p"]["last"], np.arange(4)[:, None])


def test_nested_iterations_are_known() -> None:
    _, reports = jax.jit(rewrite(step_nested_scan, probes, Total()))(X)
    np.testing.assert_array_equal(reports["fwd/p"]["last"][1, 2], [1, 2])


def test_while_merges_iterations() -> None:
    _, reports = jax.jit(rewrite(step_while, probes, Total()))(X)
    assert reports["fwd/p"]["calls"] == 3
    assert reports["fwd/p"]["last"] == 2


def test_while_condition_is_checked_once_more_than_the_body_runs() -> None:
    _, reports = jax.jit(rewrite(step_while_condition, probes, Total()))(X)
    assert reports["fwd/p"]["calls"] == 3  # sums 0, 16, 32


def test_cond_reports_zeros_for_the_other_branch() -> None:
    _, reports = jax.jit(rewrite(step_cond, probes, Total()))(X)
    assert (int(reports["fwd/p"]["calls"]), int(reports["fwd/q"]["calls"])) == (0, 1)


def test_rows_of_a_mesh_are_its_devices() -> None:
    _, reports = jax.jit(rewrite(step_shard_map, probes, Total()))(X)
    shards = 2.0 * X.reshape(2, 1, 2, 2).sum((1, 3))
    np.testing.assert_allclose(reports["fwd/p"]["sum"], shards, rtol=1e-6)


@pytest.mark.parametrize("tool", ["probe", "step", "inject", "strike", "fingerprint"])
def test_an_axis_of_vmap_around_a_mesh_whose_varying_axes_are_checked(tool: str) -> None:
    fault = sdc.Fault(sdc.faults.BitFlip(), rate=0.5)
    given = (sdc.Moment(jax.random.key(0), jnp.int32(0)), sdc.no_strike(axes=["twin"]))
    tools: dict[str, Callable[..., Any]] = {
        "inject": lambda step: functools.partial(sdc.inject(step, [fault]), given[0]),
        "strike": lambda step: functools.partial(sdc.strike(step, probes), given[1]),
        "fingerprint": sdc.fingerprint,
    }
    transform = tools.get(tool, lambda step: sdc.lockstep(step, "twin", exchange=tool))

    def run(step: Callable[[Any], Any]) -> Any:
        return jax.eval_shape(jax.vmap(transform(step), axis_name="twin"), jnp.stack([X, X]))

    run(step_shard_map)
    if tool == "fingerprint":  # needs no axis
        run(step_shard_map_checked)
    else:
        ways = "pass check_vma=False to that shard_map, or make 'twin' an axis of its mesh"
        with pytest.raises(ValueError, match=f"'a', 'b' with check_vma=True, .* axis 'twin' of vmap; {ways}"):
            run(step_shard_map_checked)


def test_a_rule_changes_the_value() -> None:
    out, _ = jax.jit(rewrite(step_plain, probes, Total(3.0)))(X + 1.0)
    np.testing.assert_allclose(out, 3.0 * step_plain(X + 1.0), rtol=1e-6)


def test_integers_half_precision_and_keys_are_sites() -> None:
    names = [site.name for site in sdc.sites(step_types, X, where=probes)]
    assert sorted(names) == ["fwd/key", "fwd/tree/h", "fwd/tree/i"]


def test_general_equations_are_sites_with_source_and_direction() -> None:
    def loss(w: Any) -> Any:
        with jax.named_scope("ffn"):
            return jnp.sum((w @ w) ** 2)

    found = sdc.sites(jax.grad(loss), jnp.ones((2, 2)), where=matching("*dot_general"))
    assert [site.direction for site in found] == ["fwd", "bwd", "bwd"]
    assert all("ffn" in site.scope and "test_interpreter.py" in site.source for site in found)
    assert len({site.name for site in found}) == 3


def test_a_probe_knows_the_line_that_calls_it() -> None:
    (site,) = sdc.sites(step_plain, X, where=probes)
    assert "test_interpreter.py" in site.source
    assert "(probed)" in site.source


def test_closed_over_tracers_are_accepted() -> None:
    def outer(x: Any, y: Any) -> Any:
        def step(x: Any) -> Any:
            return lax.scan(lambda c, z: (c + jax.jit(probed)(z * y), None), jnp.float32(0), x)[0]

        return rewrite(step, probes, Total())(x)

    out, reports = jax.jit(outer)(X, 2.0)
    np.testing.assert_allclose(reports["fwd/p"]["sum"], 4.0 * X, rtol=1e-6)
    np.testing.assert_allclose(out, 4.0 * X.sum(), atol=1e-6)


def test_inner_jit_keeps_donation_and_shardings() -> None:
    sharding = jax.sharding.NamedSharding(MESH, P("a"))
    inner = jax.jit(probed, donate_argnums=0, in_shardings=sharding, out_shardings=sharding)
    jaxpr = jax.make_jaxpr(rewrite(lambda x: inner(x), probes, Total()))(X)
    (eqn,) = (eqn for eqn in jaxpr.jaxpr.eqns if "donated_invars" in eqn.params)
    assert eqn.params["donated_invars"] == (True,)
    assert eqn.params["in_shardings"] == (sharding,)
    assert eqn.params["out_shardings"][0] == sharding


def test_effects_keep_working(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[float] = []

    def step(x: Any) -> Any:
        jax.debug.print("total {t}", t=jnp.sum(x))
        jax.experimental.io_callback(lambda v: seen.append(float(v)), None, x[0], ordered=True)

        def body(c: Any, y: Any) -> Any:
            jax.debug.print("row {y}", y=y)
            return c + probed(y), None

        return lax.scan(body, jnp.float32(0), x)[0]

    jax.block_until_ready(jax.jit(rewrite(step, probes, Total()))(X))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert "total" in printed
    assert printed.count("row") == 8
    assert seen == [-1.0]


def test_a_probe_that_cannot_be_reached_is_refused() -> None:
    partitioned = custom_partitioning(probed)
    partitioned.def_partition(
        partition=lambda mesh, args, result: (mesh, probed, result.sharding, tuple(arg.sharding for arg in args)),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i -> i",
    )

    def step(x: Any) -> Any:
        return partitioned(x)

    with pytest.raises(ValueError, match="inside the primitive 'custom_partitioning'"):
        rewrite(step, probes, Total())(X)


def test_a_probed_step_lowers_to_the_program_without_probes() -> None:
    def loss(x: Any, probe: Callable[..., Any]) -> Any:
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(probe(jnp.sin(x), "p")))(x))

    with_probes = jax.jit(jax.grad(lambda x: loss(x, sdc.probe))).lower(X).as_text()
    without = jax.jit(jax.grad(lambda x: loss(x, lambda x, _: x))).lower(X).as_text()
    assert with_probes == without


@pytest.mark.parametrize("name", ["", "a#2", "*", 3])
def test_bad_probe_names(name: Any) -> None:
    with pytest.raises(ValueError, match="probe name"):
        sdc.probe(X, name)


def test_bad_probe_directions() -> None:
    with pytest.raises(ValueError, match="expected 'fwd', 'bwd'"):
        sdc.probe(X, "p", directions=("sideways",))  # type: ignore[arg-type] # the mistake under test


def test_arrays_of_the_step_stay_one_site_through_two_transformations() -> None:
    def outer(x: Any) -> Any:
        return rewrite(step_plain, everything, Total(2.0))(x)[0]

    names = [site.name for site in sdc.sites(outer, X)]
    assert names == [site.name for site in sdc.sites(step_plain, X)]
    _, reports = rewrite(outer, everything, Total())(X + 1.0)
    assert reports["arg/0"]["sum"] == 2.0 * 8.0  # as the inner one has made it: doubled at each of five sites
    assert reports["out"]["sum"] == 2.0**6 * 8.0


def test_inputs_that_are_read_from_memory() -> None:
    """Those of loops' bodies and their parts, through calls; not what is computed, nor what enters the step."""

    def layer(x: Any, w: Any) -> Any:
        part = lax.dynamic_slice(w[0].T, (0, 0), (4, 4))
        inner = jax.checkpoint(lambda x, w: jnp.sin(x) @ w)(x, part)
        return lax.cond(x[0, 0] > 0, lambda x, w: x @ w, lambda x, w: jnp.sin(x) @ w, inner, part), None

    def step(x: Any, w: Any) -> Any:
        def loop(length: int, unroll: int = 1) -> Any:
            return lax.scan(layer, x @ w[0, 0], w[:length], unroll=unroll)[0]

        return loop(1) + loop(2, 2) + loop(2) + lax.while_loop(lambda x: x[0, 0] > 1, lambda x: x @ x, x)

    class Stored:
        def __init__(self) -> None:
            self.found: dict[str, tuple[bool, ...]] = {}

        def __call__(self, place: Place, bind: Any, *inputs: Any) -> Any:
            self.found[place.site.name] = place.stored
            return bind(*inputs), ()

        def merge(self, total: Any, new: Any) -> Any:
            return ()

    rule = Stored()
    jax.make_jaxpr(rewrite(step, products, rule))(jnp.ones((4, 4)), jnp.ones((2, 1, 4, 4)))
    computed, read = (False, False), (False, True)
    # A loop of one iteration, or one that is unrolled, may be no loop in the compiled program.
    assert list(rule.found.values()) == [*[computed] * 9, *[read] * 3, (True, True)], rule.found


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/any/ipykernel_812/2042733027.py", "notebook cell"),
        (f"{sysconfig.get_paths()['purelib']}/package/layers.py", "package/layers.py"),
        ("/home/me/train.py", "/home/me/train.py"),
    ],
)
def test_lines_are_named_without_the_folders_of_installed_packages_and_notebooks(file: str, shown: str) -> None:
    names: dict[str, Any] = {"jnp": jnp}
    exec(compile("def step(x):\n    return jnp.sin(x)", file, "exec"), names)
    found = sdc.sites(names["step"], jnp.ones(3))
    assert [site.source for site in found if site.source] == [f"{shown}:2 (step)"]
