"""Models and steps of packages that nobody here wrote, used as their own pages use them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(jax.random.key(1), (8, 6)), np.float32)
Y = np.sin(X[:, :2]).astype(np.float32)
Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A step of another package.

    Attributes:
        package: what has to be installed.
        make: makes the step and its arguments, a tree of arrays each.
        fast: whether it belongs to the third that `make test` runs.
        products: whether it has matrix products that can be checked.
    """

    package: str
    make: Callable[[], Made]
    fast: bool = False
    products: bool = True


def descend(loss: Callable[..., Any], params: Any, *given: Any) -> Made:
    """A step of gradient descent."""

    def step(params: Any, *given: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, *given)
        return jax.tree.map(lambda p, g: p - jnp.asarray(0.1, p.dtype) * g, params, gradient), value

    return step, (params, *given)


def equinox() -> Made:
    import equinox as eqx

    attention, mlp = (
        eqx.nn.MultiheadAttention(2, 6, key=KEY),
        eqx.nn.MLP(6, 2, 8, 1, activation=jax.nn.gelu, key=KEY),
    )
    arrays, static = eqx.partition((attention, mlp), eqx.is_inexact_array)

    def loss(arrays: Any, x: Any, y: Any) -> Any:
        attention, mlp = eqx.combine(arrays, static)
        return jnp.mean((jax.vmap(mlp)(attention(x, x, x)) - y) ** 2)

    return descend(loss, arrays, X, Y)


def haiku() -> Made:
    import haiku as hk

    def forward(x: Any) -> Any:
        core = hk.LSTM(8)
        out, _ = hk.dynamic_unroll(core, x[:, None], core.initial_state(1))
        return hk.Linear(2)(hk.LayerNorm(-1, True, True)(out[:, 0]))

    model = hk.without_apply_rng(hk.transform(forward))
    return descend(lambda p, x, y: jnp.mean((model.apply(p, x) - y) ** 2), model.init(KEY, X), X, Y)


def flax_nnx() -> Made:
    from flax import nnx

    model = nnx.Sequential(nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.LayerNorm(8, rngs=nnx.Rngs(0)), jax.nn.relu,
                           nnx.Linear(8, 2, rngs=nnx.Rngs(1)))  # fmt: skip
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, rest: Any, x: Any, y: Any) -> Any:
        return jnp.mean((nnx.merge(graph, params, rest)(x) - y) ** 2)

    return descend(loss, params, rest, X, Y)


def jraph() -> Made:
    import jraph

    edges = jnp.asarray([0, 1, 2, 3, 4, 5, 6, 0]), jnp.asarray([1, 2, 3, 4, 5, 6, 7, 4])
    graph = jraph.GraphsTuple(X, None, edges[1], edges[0], jnp.asarray([8]), jnp.asarray([8]), None)

    def loss(w: Any, x: Any, y: Any) -> Any:
        layer = jraph.GraphConvolution(lambda nodes: nodes @ w, add_self_edges=True)
        return jnp.mean((layer(graph._replace(nodes=x)).nodes - y) ** 2)

    return descend(loss, 0.1 * jnp.ones((6, 2)), X, Y)


def e3nn() -> Made:
    import e3nn_jax as e3nn

    weights = jax.random.normal(KEY, (3, 3))

    def loss(weights: Any, x: Any) -> Any:
        vectors = e3nn.IrrepsArray("1o", x[:, :3])
        harmonics = e3nn.spherical_harmonics([0, 1, 2], vectors, normalize=True)
        mixed = e3nn.tensor_product(harmonics, e3nn.IrrepsArray("1o", x[:, 3:] @ weights))
        return jnp.mean(mixed.array**2)

    return descend(loss, weights, X)


def diffrax() -> Made:
    import diffrax

    def loss(w: Any, y: Any) -> Any:
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y)), diffrax.Tsit5(), 0.0, 1.0, 0.25, y, w, max_steps=8
        )
        return jnp.sum(found.ys**2)

    return descend(loss, 0.3 * jnp.eye(6) + 0.1, X[0])


def optimistix() -> Made:
    import lineax
    import optimistix

    def residuals(theta: Any, given: Any) -> Any:
        x, y = given
        return jnp.tanh(x @ theta) - 0.5 * y  # far from saturation, where rounding decides the steps

    def step(theta: Any, x: Any, y: Any) -> Any:
        linear = lineax.Normal(lineax.Cholesky())  # not by QR, whose digests race with LAPACK (docs/fingerprint.md)
        solver = optimistix.LevenbergMarquardt(rtol=1e-3, atol=1e-3, linear_solver=linear)
        return optimistix.least_squares(residuals, solver, theta, (x, y), max_steps=8, throw=False).value

    return step, (0.1 * jnp.ones((6, 2)), X, Y)


def lineax() -> Made:
    import lineax

    def step(a: Any, b: Any) -> Any:
        operator = lineax.MatrixLinearOperator(a @ a.T + 8.0 * jnp.eye(8), lineax.positive_semidefinite_tag)
        return lineax.linear_solve(operator, b, lineax.CG(rtol=1e-5, atol=1e-5)).value

    return step, (X, X[:, 0])


def blackjax() -> Made:
    import blackjax

    def density(theta: Any) -> Any:
        return -jnp.mean((jnp.tanh(X @ theta) - Y) ** 2) - jnp.sum(theta**2)

    kernel = blackjax.hmc(density, 0.1, jnp.ones(12), 3)

    def step(state: Any, bits: Any) -> Any:
        state, info = kernel.step(jax.random.wrap_key_data(bits), state)
        return state.position, info.acceptance_rate

    return step, (kernel.init(0.1 * jnp.ones((6, 2))), jax.random.key_data(KEY))


def numpyro() -> Made:
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO, autoguide

    def model(x: Any, y: Any) -> Any:
        w = numpyro.sample("w", dist.Normal(jnp.zeros((6, 2)), 1.0).to_event(2))
        numpyro.sample("y", dist.Normal(x @ w, 0.5).to_event(2), obs=y)

    svi = SVI(model, autoguide.AutoNormal(model), numpyro.optim.SGD(1e-3), Trace_ELBO())
    with numpyro.handlers.seed(rng_seed=0), jax.numpy_dtype_promotion("standard"):
        state = svi.init(jax.random.PRNGKey(0), X, Y)
    return lambda state, x, y: svi.update(state, x, y), (state, X, Y)


def distrax() -> Made:
    import distrax

    def loss(w: Any, x: Any) -> Any:
        flow = distrax.UnconstrainedAffine(w, jnp.zeros(6))
        base = distrax.MultivariateNormalDiag(jnp.zeros(6), jnp.ones(6))
        return -jnp.mean(distrax.Transformed(base, distrax.Inverse(flow)).log_prob(x))

    return descend(loss, 2.0 * jnp.eye(6) + 0.1, X)


def rlax() -> Made:
    import rlax

    def loss(w: Any, x: Any, next_x: Any) -> Any:
        errors = jax.vmap(rlax.double_q_learning, in_axes=(0, 0, 0, 0, 0, 0))(
            x @ w, jnp.arange(8) % 2, x[:, 0], jnp.full(8, 0.9), next_x @ w, next_x @ w
        )
        return jnp.mean(rlax.l2_loss(errors))

    return descend(loss, 0.1 * jnp.ones((6, 2)), X, X[::-1].copy())


def jax_md() -> Made:
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(4.0)
    init, apply = simulate.nve(energy.soft_sphere_pair(displacement), shift, 1e-2)
    state = init(KEY, 2.0 + X[:, :2], kT=0.1)
    return functools.partial(jax.lax.fori_loop, 0, 3, lambda i, state: apply(state)), (state,)


def tinygp() -> Made:
    import tinygp

    def loss(theta: Any, x: Any, y: Any) -> Any:
        kernel = jnp.exp(theta[0]) * tinygp.kernels.ExpSquared(jnp.exp(theta[1]))
        return -tinygp.GaussianProcess(kernel, x, diag=0.1).log_probability(y)

    return descend(loss, jnp.zeros(2), X, Y[:, 0])


def flowjax() -> Made:
    import equinox as eqx
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    flow = masked_autoregressive_flow(KEY, base_dist=Normal(jnp.zeros(6)), flow_layers=1, nn_width=8, nn_depth=1)
    arrays, static = eqx.partition(flow, eqx.is_inexact_array)
    return descend(lambda arrays, x: -jnp.mean(eqx.combine(arrays, static).log_prob(x)), arrays, X)


def qwix() -> Made:
    import qwix
    from flax import nnx

    model = nnx.Sequential(nnx.Linear(6, 8, rngs=nnx.Rngs(0)), jax.nn.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8)]
    with jax.numpy_dtype_promotion("standard"):
        graph, state = nnx.split(qwix.quantize_model(model, qwix.PtqProvider(rules), X))
    return lambda state, x: nnx.merge(graph, state)(x), (state, X)


def aqt() -> Made:
    from aqt.jax.v2 import config

    dot = config.dot_general_make(8, 8)

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ w + dot(x, w, (((1,), (0,)), ((), ()))) - y) ** 2)

    return descend(loss, 0.1 * jnp.ones((6, 2)), X, Y)


def muon() -> Made:
    from optax import contrib

    optimizer = contrib.muon(1e-2)
    params = {"up": 0.1 * jax.random.normal(KEY, (6, 8)), "down": 0.1 * jax.random.normal(KEY, (8, 2))}

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, optimizer.init(params), X, Y)


def evosax() -> Made:
    from evosax.algorithms import CMA_ES

    strategy = CMA_ES(population_size=8, solution=jnp.zeros(6))
    settings = strategy.default_params
    start = strategy.init(KEY, jnp.zeros(6), settings)

    def step(state: Any, bits: Any) -> Any:
        keys = jax.random.split(jax.random.wrap_key_data(bits))
        population, state = strategy.ask(keys[0], state, settings)
        state, _ = strategy.tell(keys[1], population, jnp.sum(population**2, 1), state, settings)
        return state.mean, state.C

    return step, (start, jax.random.key_data(KEY))


def matfree() -> Made:
    from matfree import decomp, funm

    problem = funm.funm_lanczos_sym(funm.dense_funm_sym_eigh(jnp.log), decomp.tridiag_sym(3))

    def step(a: Any, v: Any) -> Any:
        return problem(lambda v: a @ (a.T @ v) + 4.0 * v, v / jnp.linalg.norm(v))

    return step, (X, X[:, 0])


def ott() -> Made:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    def step(x: Any, y: Any) -> Any:
        geometry = pointcloud.PointCloud(x, y, epsilon=1.0)
        out = sinkhorn.Sinkhorn(max_iterations=10, min_iterations=10)(linear_problem.LinearProblem(geometry))
        return out.apply(y.T, axis=1)

    return step, (X, X[::-1] + np.float32(0.3))


SUBJECTS: dict[str, Subject] = {
    "layers (equinox)": Subject("equinox", equinox, fast=True),
    "layers (haiku)": Subject("haiku", haiku, fast=True),
    "layers (flax)": Subject("flax", flax_nnx, fast=True),
    "optimizer with products (optax.contrib.muon)": Subject("optax", muon, fast=True),
    "differential equations (diffrax)": Subject("diffrax", diffrax),
    "linear systems (lineax)": Subject("lineax", lineax, fast=True),
    "least squares (optimistix)": Subject("optimistix", optimistix, fast=True),
    "graphs (jraph)": Subject("jraph", jraph, fast=True),
    "equivariant products (e3nn)": Subject("e3nn_jax", e3nn),
    "sampling (blackjax)": Subject("blackjax", blackjax),
    "variational inference (numpyro)": Subject("numpyro", numpyro),
    "distributions (distrax)": Subject("distrax", distrax),
    "reinforcement learning (rlax)": Subject("rlax", rlax),
    "molecular dynamics (jax_md)": Subject("jax_md", jax_md, products=False),
    "Gaussian processes (tinygp)": Subject("tinygp", tinygp),
    "flows (flowjax)": Subject("flowjax", flowjax),
    "quantization (qwix)": Subject("qwix", qwix),
    "quantization in training (aqt)": Subject("aqt", aqt),
    "evolution (evosax)": Subject("evosax", evosax),
    "matrix functions (matfree)": Subject("matfree", matfree),
    "optimal transport (ott)": Subject("ott", ott),
}
