"""Products of other forms than dense real ones: ragged, sparse, complex, scaled; what cannot be checked is reported."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import api_util, core, linear_util as lu
from jax._src.cudnn.scaled_matmul_stablehlo import _scaled_matmul_p
from jax._src.state.discharge import run_state
from jax.experimental import hijax, pallas as pl, sparse
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir

import sdc
from sdc.checksums import coverage
from sdc.checksums.roundoff import Mode
from sdc.program import primitive, products
from sdc.program.interpreter import rewrite

RNG = np.random.default_rng(12)
X = RNG.normal(size=(12, 8)).astype(np.float32)
EXPERTS = RNG.normal(size=(3, 8, 5)).astype(np.float32)
GROUPS = np.asarray([2, 7, 3], np.int32)
SPARSE = np.where(X > 0.5, X, 0)


def ragged(x: Any, w: Any) -> Any:
    return jnp.sum(jnp.sin(lax.ragged_dot(x, w, jnp.asarray(GROUPS))))


_BCOO = sparse.BCOO.fromdense(SPARSE)
Case = tuple[Callable[..., Any], tuple[Any, ...], int]
"""A step, its arguments, and how many of its products are checked."""
FORMS: dict[str, Case] = {
    "experts, forward and backward": (jax.grad(ragged, (0, 1)), (X, EXPERTS), 3),
    "bfloat16 experts": (
        jax.grad(lambda x, w: ragged(x, w).astype(jnp.float32), (0, 1)),
        (jnp.asarray(X, jnp.bfloat16), jnp.asarray(EXPERTS, jnp.bfloat16)), 3,
    ),
    "complex": (lambda z: z @ z.T, ((X + 1j * X[::-1]).astype(np.complex64),), 1),
    "real times complex": (lambda z: lax.dot(z.real, z.T), ((X + 1j * X[::-1]).astype(np.complex64),), 1),
    "real with a complex result": (lambda x: lax.dot(x, x.T, preferred_element_type=np.complex64), (X,), 1),
    "complex times real": (lambda z: lax.dot(z, z.imag.T), ((X + 1j * X[::-1]).astype(np.complex64),), 1),
    "complex, in batches": (
        lambda z: jnp.einsum("bij,bjk->bik", z, z), ((EXPERTS[:, :5] - 1j * EXPERTS[:, 3:]).astype(np.complex64),), 1,
    ),
    "BCOO": (lambda a, y: a @ y, (_BCOO, X.T[:, :6]), 1),
    "BCOO on the right": (lambda a, y: y @ a, (_BCOO, X[:4].T @ X[:4, :1] * np.ones((1, 12), np.float32)), 1),
    "BCOO and a vector": (lambda a, y: a @ y, (_BCOO, X[0]), 1),
    "BCOO, mapped": (jax.vmap(lambda a, y: a @ y, (None, 0)), (_BCOO, EXPERTS), 1),
    "BCSR": (lambda a, y: a @ y, (sparse.BCSR.fromdense(SPARSE), X.T[:, :6]), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_no_false_alarm_and_the_same_result(name: str, scale: float) -> None:
    step, arguments, number = FORMS[name]
    first, *others = arguments
    first = jax.tree.map(lambda x: (x * scale).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x, first)
    out, flags = jax.jit(sdc.abft(step, mode="correct"))(first, *others)
    assert all(map(np.array_equal, jax.tree.leaves(out), jax.tree.leaves(jax.jit(step)(first, *others))))
    assert len(flags) == number
    assert all(int(jnp.sum(flag.checked)) > 0 for flag in flags.values())
    assert not any(jnp.any(flag.flagged) for flag in flags.values())


class Struck:
    """Adds to the first element."""

    def __call__(self, place: Any, bind: Any, *inputs: Any) -> Any:
        (out,) = bind(*inputs)
        return [out.at[(0,) * out.ndim].add(jnp.asarray(3, out.dtype))], jnp.uint32(1)

    def merge(self, total: Any, new: Any) -> Any:
        return total + new


@pytest.mark.parametrize("name", FORMS)
def test_a_struck_product_is_flagged_and_corrected(name: str) -> None:
    """Where faults cannot hit a form by themselves (complex numbers), an addition stands for the hardware."""
    step, arguments, _ = FORMS[name]
    expected = jax.jit(step)(*arguments)
    target = next(site for site in sdc.sites(step, *arguments, where=products))
    kinds = {target.primitive}

    def struck(*args: Any) -> Any:
        return rewrite(step, lambda site: site.name == target.name, Struck())(*args)[0]

    out, flags = jax.jit(sdc.abft(struck, primitive(*kinds), mode="correct"))(*arguments)
    flag = flags[target.name]
    assert int(jnp.sum(flag.flagged)) == int(jnp.sum(flag.confirmed)) == int(jnp.sum(flag.corrected)) == 1
    assert flag.wrong is not None
    assert int(jnp.sum(flag.wrong.found)) == 1
    assert not jnp.any(flag.wrong.element)
    for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0.02, atol=1e-5)


def test_a_scaled_product_by_trace_and_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule of CPUs computes it: the reference is what the primitive is lowered to here."""

    def reference(a: Any, b: Any, a_scales: Any, b_scales: Any, *, preferred_element_type: Any) -> Any:
        wide = [
            x.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), x.shape[-1] // s.shape[-1], axis=-1)
            for x, s in ((a, a_scales), (b, b_scales))
        ]
        out = jnp.einsum("bmk,bnk->bmn", *wide, precision="highest").at[0, 1, 2].add(wrong)
        return [out.astype(preferred_element_type)]

    mlir.register_lowering(_scaled_matmul_p, mlir.lower_fun(reference), platform="cpu")
    a = jnp.asarray(RNG.normal(size=(2, 16, 64)), jnp.float8_e4m3fn)
    scales = jnp.asarray(2.0 ** RNG.integers(-6, 6, size=(2, 16, 2)), jnp.float8_e8m0fnu)

    def step(a: Any, b: Any, a_scales: Any, b_scales: Any) -> Any:
        return _scaled_matmul_p.bind(a, b, a_scales, b_scales, preferred_element_type=jnp.dtype(jnp.float32))[0]

    clean = None
    for wrong in (0.0, 300.0):
        out, flags = jax.jit(sdc.abft(step, mode="correct"))(a, a[:, ::-1], scales, scales)
        (flag,) = flags.values()
        assert int(flag.checked) == 32
        assert int(flag.flagged) == int(flag.corrected) == (1 if wrong else 0)
        assert coverage(flags) == 1
        clean = np.asarray(out) if clean is None else clean
        np.testing.assert_allclose(out, clean, rtol=1e-5, atol=1e-3)
    [site] = sdc.sites(lambda *args: jax.nn.scaled_matmul(*args), a, a, scales, scales, where=products)
    assert site.primitive == "scaled_matmul_wrapper"
    assert site.products == 2 * 2 * 16 * 16 * 64


def kernel(x: Any) -> Any:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...] @ x[...]

    return pl.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(2,), interpret=True)(x)


def elementwise_kernel(x: Any) -> Any:
    def body(x: Any, out: Any) -> None:
        out[...] = jnp.tanh(x[...])

    return pl.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@custom_partitioning
def partitioned(x: Any) -> Any:
    return x @ x


partitioned.def_partition(
    infer_sharding_from_operands=lambda *_: None, partition=lambda *_: None, sharding_rule="i j -> i j"
)
foreign_p = Primitive("foreign")
foreign_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(foreign_p, lambda ctx, x: [x])


def looped(x: Any) -> Any:
    return lax.while_loop(lambda x: jnp.sum(x) < 9.0, lambda x: kernel(x) + 10.0, x)


HiPrimitive: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # newer and older JAX


class Squared(HiPrimitive):
    """A product that JAX enters only when it lowers the program."""

    def __init__(self, aval: Any) -> None:
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x: Any) -> Any:
        return x @ x


LEFT: dict[str, tuple[Callable[[Any], Any], str, int | None]] = {
    "pallas_call": (kernel, r"pallas_call cannot be entered$", 2 * 2 * 4**3),
    "pallas_call in a while": (looped, r"pallas_call cannot be entered$", None),
    "custom_partitioning": (partitioned, r"custom_partitioning cannot be entered$", 2 * 4**3),
    "ffi_call": (
        lambda x: jax.ffi.ffi_call("anything", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
        r"ffi_call cannot be entered, and its work is unknown$", None,
    ),
    "a callback": (
        lambda x: jax.pure_callback(lambda x: np.asarray(x) @ x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        r"pure_callback cannot be entered, and its work is unknown$", None,
    ),
    "a callback on buffers": (
        lambda x: buffer_callback(lambda *_: None, jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
        r"buffer_callback cannot be entered, and its work is unknown$", None,
    ),
    "a primitive of hijax": (
        lambda x: Squared(jax.typeof(x))(x), r"call_hi_primitive cannot be entered, and its work is unknown$", None,
    ),
    "a primitive of another library": (lambda x: foreign_p.bind(x), r"foreign cannot be entered, and", None),
    "a call of an export": (
        lambda x: jax.export.export(jax.jit(lambda x: x @ x))(jnp.ones((4, 4))).call(x), r"call_exported cannot", None,
    ),
    "integers": (lambda x: x.astype(jnp.int8) @ x.astype(jnp.int8), "roundoff of int8 is unknown", 2 * 4**3),
    "integers times floats": (
        lambda x: lax.dot(x.astype(jnp.int8), x, preferred_element_type=jnp.float32), "roundoff of int8", 2 * 4**3,
    ),
    "four bits": (lambda x: x.astype(jnp.int4) @ x.astype(jnp.int4), "roundoff of int4 is unknown", 2 * 4**3),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_checked_is_listed(name: str) -> None:
    """With its line, the reason and its share; and nothing about it is refused."""
    step, reason, work = LEFT[name]
    square = jnp.eye(4) + 0.1
    both = sdc.abft(lambda x: (x @ x, step(x)))
    flags = jax.eval_shape(both, square)[1]
    assert list(flags) == ["fwd/dot_general"]
    [one] = flags.skipped
    assert one.share == (None if work is None else pytest.approx(work / (128 + work), rel=0.2))
    assert re.search(reason, one.reason)
    assert "test_forms.py" in one.site.source
    assert coverage(flags) == (0.0 if work is None else 128 / (128 + work))
    with pytest.raises(ValueError, match=f"none of the selected sites can be handled.*{reason.rstrip('$')}"):
        jax.eval_shape(sdc.abft(step), square)


def test_what_computes_no_product_is_not_listed() -> None:
    def step(x: Any) -> Any:
        called = jax.export.export(jax.jit(jnp.sin))(jnp.ones((4, 4))).call(x)
        jax.debug.callback(print, x)
        return x @ elementwise_kernel(called) + jnp.linalg.inv(x) + jax.random.normal(jax.random.key(0), (4, 4))

    flags = jax.eval_shape(sdc.abft(step), jnp.eye(4))[1]
    assert "fwd/dot_general" in flags
    assert flags.skipped == ()
    assert coverage(flags) == 1


def test_only_what_is_asked_for_counts() -> None:
    def step(x: Any) -> Any:
        with jax.named_scope("kernels"):
            y = kernel(x)
        return jnp.dot(x, y) @ x

    x = jnp.eye(4)
    [one] = jax.eval_shape(sdc.abft(step), x)[1].skipped
    assert one.site.primitive == "pallas_call"
    assert coverage(jax.eval_shape(sdc.abft(step, 'products & ~scope("kernels")'), x)[1]) == 1
    with pytest.raises(ValueError, match="pallas_call"):
        jax.eval_shape(sdc.abft(step, 'products & scope("kernels")'), x)


their_call_p: Any = core.CallPrimitive("their_call") if hasattr(core, "CallPrimitive") else None  # not in jax 0.12


def called(x: Any) -> Any:
    body = lu.wrap_init(lambda x: [x @ x], debug_info=api_util.debug_info("their_call", lambda x: x, (x,), {}))
    return their_call_p.bind(x, subfuns=(body,))[0]


def in_place(x: Any) -> Any:
    def body(ref: Any) -> None:
        ref[...] = ref[...] @ ref[...]

    return run_state(body)(x)


@pytest.mark.parametrize("step", [in_place, *([called] if their_call_p else [])])
def test_products_in_state_and_in_calls_of_other_libraries_are_checked(step: Callable[[Any], Any]) -> None:
    x = jnp.asarray(X[:8])
    out, flags = jax.jit(sdc.abft(step))(x)
    assert int(flags["fwd/dot_general"].checked) == 8
    assert flags.skipped == ()
    assert jnp.array_equal(out, x @ x)
    _, events = jax.jit(sdc.inject(step, [sdc.Fault(sdc.faults.BitFlip(), 1.0, products)]))(
        sdc.Moment(jax.random.key(0), jnp.int32(0)), x
    )
    assert int(events["fwd/dot_general"].changed) == 64


@pytest.mark.parametrize("body", [kernel, looped])
def test_what_lies_only_inside_of_a_kernel_is_out_of_reach(body: Callable[[Any], Any]) -> None:
    where, said = primitive("dot_general"), r"matches only operations inside pallas_call \(.*test_forms\.py:\d+"
    fault = sdc.Fault(sdc.faults.BitFlip(), 0.1, where)
    for transformed in (sdc.fingerprint(body, where), lambda x: sdc.strike(body, where)(sdc.no_strike(), x)):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(transformed, jnp.eye(4))
    with pytest.raises(ValueError, match=said):
        sdc.inject(body, [fault])(sdc.Moment(jax.random.key(0), jnp.int32(0)), jnp.eye(4))


@pytest.mark.parametrize("mode", ["detect", "correct"])
def test_an_empty_product_has_no_row(mode: Mode) -> None:
    """Beside another one, which is checked."""
    for empty in (((0, 4), (4, 3)), ((3, 4), (4, 0)), ((3, 0), (0, 2))):
        a, b = map(jnp.zeros, empty)
        (out, _), flags = jax.jit(sdc.abft(lambda a, b, x: (a @ b, x @ x), mode=mode))(a, b, jnp.ones((5, 5)))
        assert out.shape == (a.shape[0], b.shape[1])
        assert not out.any()
        assert [int(flag.checked) for flag in flags.values()] == [0, 5]
        assert coverage(flags) == 1


def test_rows_of_what_is_not_finite_are_not_covered() -> None:
    x = jnp.ones((6, 4)).at[:3, 0].set(jnp.nan)
    step = jax.jit(sdc.abft(lambda w, x: (x @ w, x[3:] @ w)))
    _, flags = step(jnp.ones((4, 4)), x)
    assert [int(flag.nonfinite) for flag in flags.values()] == [3, 0]
    assert coverage(flags) == pytest.approx(2 / 3)
    assert coverage(step(jnp.full((4, 4), jnp.inf), x)[1]) == 0
    with pytest.raises(ValueError, match=r"unknown inside jax\.jit; return the flags"):
        jax.jit(lambda w, x: coverage(step(w, x)[1]))(jnp.ones((4, 4)), x)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_checked_product_is_not_differentiated(mapped: bool) -> None:
    def loss(w: Any) -> Any:
        return sdc.abft(lambda w: jnp.sum(jnp.tanh(w @ w)))(w)[0]

    w = jnp.ones((2, 3, 3))
    with pytest.raises(ValueError, match=r"would not be checked.*as in sdc\.abft\(jax\.grad\(loss\)\)"):
        (jax.vmap(jax.grad(loss)) if mapped else jax.jit(jax.grad(lambda w: loss(w[0]))))(w)
    # What does not depend on the parameters may be.
    assert jax.grad(lambda x: x * loss(w[0]))(2.0) == loss(w[0])
