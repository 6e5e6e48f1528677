"""Every transformation of steps whose arrays are sharded by type: explicit axes, alone and beside automatic ones."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sdc
from sdc.faults import BitFlip
from sdc.program import arithmetic, everything, operations, products

Step = Callable[..., Any]
EXPLICIT = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
MIXED = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto), devices=jax.devices()[:4]
)
MOMENT = sdc.Moment(jax.random.key(0), jnp.int32(0))
RATE = 0.05


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def tensor_parallel(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(loss)(w, x)


def fully_sharded(w: Any, x: Any) -> Any:
    """Weights are gathered before they are used, and gradients scattered: FSDP."""

    def gathered(w: Any, x: Any) -> Any:
        return loss(jax.reshard(w, P(None, None)), x)

    return w - 0.1 * jax.reshard(jax.grad(gathered)(w, x), P("data", None))


def partly_automatic(w: Any, x: Any) -> Any:
    flat = jax.sharding.auto_axes(lambda x: jnp.sin(x).reshape(-1).reshape(x.shape), out_sharding=P("data", None))
    return jnp.sum(w) + flat(x)


def partly_manual(w: Any, x: Any) -> Any:
    mapped = jax.shard_map(averaged, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}, check_vma=False)
    return w - 0.1 * mapped(w, x)


def fully_manual(w: Any, x: Any) -> Any:
    """A `shard_map` over all axes, as in Qwen 3 MoE and gpt_oss of jax-llm-examples."""
    return w - 0.1 * jax.shard_map(averaged, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)(w, x)


def averaged(w: Any, x: Any) -> Any:
    return jax.lax.pmean(jax.grad(loss)(w, x), "data")


def on_no_mesh(w: Any, x: Any) -> Any:
    return jnp.sum(w) + x * jnp.asarray(0.5), jnp.asarray(0.5)


STEPS: dict[str, tuple[Step, Any, P, P]] = {
    "tensor parallel": (tensor_parallel, EXPLICIT, P(None, "model"), P("data", None)),
    "fully sharded": (fully_sharded, EXPLICIT, P("data", None), P("data", None)),
    "auto_axes": (partly_automatic, EXPLICIT, P(None, "model"), P("data", None)),
    "partly manual": (partly_manual, EXPLICIT, P(None, "model"), P("data", None)),
    "fully manual": (fully_manual, EXPLICIT, P(None, None), P("data", None)),
    "explicit beside automatic": (tensor_parallel, MIXED, P(None, None), P("data", None)),
}


def corrected(step: Step) -> Step:
    """Products are struck and made good."""
    wide = sdc.inject(sdc.checksums.accumulators(step), [sdc.Fault(BitFlip(bits=(30,)), RATE, products)])
    return sdc.abft(lambda *args: wide(MOMENT, *args), mode="correct")


def twins(step: Step) -> Step:
    return lambda *args: jax.tree.map(
        lambda x: x[0], jax.vmap(sdc.lockstep(step, "twin", where=few), None, axis_name="twin", axis_size=2)(*args)
    )


few = operations & arithmetic
TOOLS: dict[str, Callable[[Step], Step]] = {
    "fingerprint": lambda step: sdc.fingerprint(step, everything),
    "inject": lambda step: lambda *args: sdc.inject(step, [sdc.Fault(BitFlip(), 0.0, few)], record=2)(MOMENT, *args),
    "strike": lambda step: lambda *args: sdc.strike(step, few)(sdc.no_strike(), *args),
    "lockstep": twins,
    "abft": sdc.abft,
    "abft, struck and corrected": corrected,
}


# The step "auto_axes" has no products.
CELLS = [(name, tool) for name in STEPS for tool in TOOLS if name != "auto_axes" or not tool.startswith("abft")]


@pytest.mark.parametrize(("name", "tool"), CELLS)
def test_explicit_sharding(name: str, tool: str) -> None:
    step, mesh, *specs = STEPS[name]
    shapes = ((4, 8), (16, 4))
    args = [
        jax.device_put(np.linspace(-1.0, 1.0, 32 * (n + 1), dtype=np.float32).reshape(shape), NamedSharding(mesh, spec))
        for n, (shape, spec) in enumerate(zip(shapes, specs, strict=True))
    ]
    # A mesh need not be set where all arrays have one.
    context = jax.set_mesh(mesh) if name != "tensor parallel" else contextlib.nullcontext()
    with context:
        expected = jax.jit(step)(*args)
        out, reports = jax.jit(TOOLS[tool](step))(*args)
    assert len(reports) > 0
    if tool.startswith("abft, "):
        out, events = out
        struck = sum(int(np.asarray(event.changed).sum()) for event in events.values())
        assert struck > 0
        assert sum(int(np.asarray(flag.corrected).sum()) for flag in reports.values()) > 0
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert jax.typeof(out) == jax.typeof(expected)


def test_twins_find_what_was_injected_in_sharded_arrays() -> None:
    step, mesh, *specs = STEPS["tensor parallel"]
    args = [
        jax.device_put(np.linspace(-1.0, 1.0, size, dtype=np.float32).reshape(shape), NamedSharding(mesh, spec))
        for size, shape, spec in zip((32, 64), ((4, 8), (16, 4)), specs, strict=True)
    ]
    fault = sdc.Fault(BitFlip(bits=(20,)), RATE, products, at={"twin": 1})
    tool = sdc.lockstep(sdc.inject(step, [fault]), "twin", where=products)
    run = jax.jit(jax.vmap(tool, None, axis_name="twin", axis_size=2))
    (_, events), mismatches = run(MOMENT, *args)
    found = {name: int(mismatch.difference.mismatched[0, 1]) for name, mismatch in mismatches.items()}
    assert found == {name: int(event.changed[1]) for name, event in events.items()}
    assert sum(found.values()) > 0


def test_faults_of_a_manual_step_whose_varying_axes_are_checked() -> None:
    def step(w: Any, x: Any) -> Any:
        rows = P(("data", "model"))
        return jax.shard_map(lambda w, x: jnp.tanh(x @ w), in_specs=(P(), rows), out_specs=rows)(w, x)

    w, x, moment, none = (
        jax.device_put(given, NamedSharding(EXPLICIT, spec))
        for given, spec in ((np.eye(4, dtype=np.float32), P()), (np.ones((8, 4), np.float32), P(("data", "model"))),
                            (MOMENT, P()), (sdc.no_strike(), P()))
    )  # fmt: skip
    fault = sdc.Fault(BitFlip(bits=(30,)), 1.0, products, at={"data": 1})
    with jax.set_mesh(EXPLICIT):
        out, events = jax.jit(sdc.inject(step, [fault]))(moment, w, x)
        clean, _ = jax.jit(sdc.strike(step, products))(none, w, x)
    assert events["fwd/dot_general"].changed.tolist() == [[0, 0], [8, 8]]  # two rows of four on each device
    np.testing.assert_array_equal(clean, np.tanh(np.ones((8, 4), np.float32)))
    np.testing.assert_array_equal(np.any(np.asarray(out != clean), axis=1), [False] * 4 + [True] * 4)


def test_values_that_lie_on_no_mesh() -> None:
    args = [jax.device_put(jnp.ones((4, 4)), NamedSharding(EXPLICIT, P("data"))) for _ in range(2)]
    fault = sdc.Fault(BitFlip(), 0.0, everything)
    with jax.set_mesh(EXPLICIT):
        out, events = jax.jit(sdc.inject(on_no_mesh, [fault]))(MOMENT, *args)
        expected = jax.jit(on_no_mesh)(*args)
    np.testing.assert_array_equal(out[0], expected[0])
    np.testing.assert_array_equal(out[1], expected[1])
    assert "out/1" in events


def test_faults_leave_the_sharding_that_xla_chooses() -> None:
    """Two arrays of one shape that are sharded each in its own way, and one in a loop."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = [P("data", "model"), P("model", "data"), P(None, "data", "model")]
    shapes = [(16, 16), (16, 16), (2, 16, 16)]
    a, b, c = (
        jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec)) for shape, spec in zip(shapes, specs, strict=True)
    )

    def step(a: Any, b: Any, c: Any) -> Any:
        def loss(given: Any) -> Any:
            a, b, c = given
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), a @ b, c)[0] ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, (a, b, c), jax.grad(loss)((a, b, c)))

    for rate in (1e-4, 0.5):  # sparse faults, and dense ones
        out, _ = jax.jit(sdc.inject(step, [sdc.Fault(BitFlip(bits=(3,)), rate, arithmetic)]))(MOMENT, a, b, c)
        assert [x.sharding.spec for x in out] == specs
