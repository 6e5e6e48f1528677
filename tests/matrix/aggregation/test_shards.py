"""Every method on a mesh without a data axis, where parameters are sharded over the workers, against plain NumPy."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import sdc
from sdc import aggregation
from sdc.aggregation import Dropped, Mean, Own, Shadowed, data_parallel
from sdc.costs import collective_calls

AXIS, STEPS, ROWS, RATE, MOMENTUM = "fsdp", 5, 8, 0.1, 0.9
# One dimension is divided among all three axes, so the workers' shards are divided further.
SPECS = {"bias": P(), "down": P("tensor", ("fsdp", "sequence")), "up": P("fsdp", "tensor")}
DIMS = {"bias": None, "down": 1, "up": 0}
SGD = optax.sgd(RATE, momentum=MOMENTUM)
COMPLETED = np.asarray([[4, 2], [0, 3], [4, 4], [0, 0], [1, 0]], np.int32)

Arrays = dict[str, Any]


def mesh_of(workers: int = 2) -> jax.sharding.Mesh:
    return jax.make_mesh((workers, 2, 4 // workers), ("fsdp", "tensor", "sequence"))


def params() -> Arrays:
    generator = np.random.default_rng(0)
    shapes = {"bias": 4, "down": (16, 4), "up": (8, 16)}
    return {name: (0.5 * generator.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def rows(workers: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(step + 1)
    x, y = generator.standard_normal((workers * ROWS, 8)), generator.standard_normal((workers * ROWS, 4))
    return x.astype(np.float32), y.astype(np.float32)


def loss(theta: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean(jnp.square(jnp.tanh(x @ theta["up"]) @ theta["down"] + theta["bias"] - y))


def by_hand(theta: Arrays, x: np.ndarray, y: np.ndarray) -> Arrays:
    """The gradient of `loss`."""
    hidden = np.tanh(x @ theta["up"])
    out = hidden @ theta["down"] + theta["bias"]
    error = 2 * (out - y) / y.size
    inner = (error @ theta["down"].T) * (1 - hidden**2)
    return {"bias": error.sum(0), "down": hidden.T @ error, "up": x.T @ inner}


def own_gradients(theta: Arrays, workers: int, step: int) -> list[Arrays]:
    x, y = (part.reshape(workers, ROWS, -1) for part in rows(workers, step))
    return [by_hand(theta, x[worker], y[worker]) for worker in range(workers)]


def mean(theta: Arrays, workers: int, step: int) -> Arrays:
    own = own_gradients(theta, workers, step)
    return {name: np.mean([each[name] for each in own], axis=0) for name in theta}


def noisy(theta: Arrays, workers: int, step: int) -> Arrays:
    """Every shard of the mean has its own errors, drawn as documented; what all workers hold has those of the first."""
    found, errors = mean(theta, workers, step), []
    for worker in range(workers):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), step), worker)
        shard = {
            name: x if DIMS[name] is None else np.split(x, workers, DIMS[name])[worker] for name, x in found.items()
        }
        keys = jax.random.split(key, len(shard))
        errors.append({
            name: 0.05 * np.asarray(jax.random.normal(k, shard[name].shape, jnp.float32))
            for name, k in zip(sorted(shard), keys, strict=True)
        })  # fmt: skip
    for name, dim in DIMS.items():
        parts = [error[name] for error in errors]
        found[name] = found[name] + (parts[0] if dim is None else np.concatenate(parts, dim))
    return found


def dropped(correction: str) -> Callable[..., Arrays | None]:
    def found(theta: Arrays, workers: int, step: int) -> Arrays | None:
        x, y = (part.reshape(workers, 4, ROWS // 4, -1) for part in rows(workers, step))
        done = [(worker, batch) for worker in range(workers) for batch in range(COMPLETED[step, worker])]
        if not done:
            return None
        parts = [by_hand(theta, x[which], y[which]) for which in done]
        divisor = len(done) if correction == "count" else 4 * workers
        return {name: sum(part[name] for part in parts) / divisor for name in theta}

    return found


def working(theta: Arrays, workers: int, step: int) -> Arrays:
    own = own_gradients(theta, workers, step)[:-1]  # the last rank is the spare, whose rows are ignored
    return {name: np.mean([each[name] for each in own], axis=0) for name in theta}


METHODS: dict[str, tuple[Any, Any, int, Any]] = {
    "mean": (SGD, Mean(), 2, mean),
    "noise": (SGD, Mean(aggregation.gradient_noise(AXIS, 0.05, seed=3)), 2, noisy),
    "DropCompute": (aggregation.skip_empty(SGD), Dropped(4, "none"), 2, dropped("none")),
    "DropCompute, corrected": (aggregation.skip_empty(SGD), Dropped(4, "count"), 2, dropped("count")),
    "shadow": (SGD, Shadowed(1), 4, working),  # needs two working ranks
}


def start(name: str, has_aux: bool = False) -> tuple[Any, Any, Callable[[int], Any]]:
    """Returns the trainer of a method, its workers, and the batch of each step."""
    optimizer, combining, count, _ = METHODS[name]
    mesh = mesh_of(count)

    def with_aux(theta: Any, batch: Any) -> Any:
        return loss(theta, batch), {"rows": batch[0].shape[0], "x": batch[0]}

    gradient = jax.value_and_grad(with_aux if has_aux else loss, has_aux=has_aux)
    trainer = data_parallel(gradient, optimizer, mesh, AXIS, combining=combining, has_aux=has_aux)
    placed = {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in params().items()}

    def batch(step: int) -> Any:
        found = rows(count, step)
        return trainer.place((found, COMPLETED[step]) if isinstance(combining, Dropped) else found)

    return trainer, trainer.init(placed), batch


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_that_of_numpy(name: str) -> None:
    """To rounding; parameters and momentum stay sharded as they were given."""
    _, _, count, reference = METHODS[name]
    trainer, workers, batch = start(name)
    before = jax.tree.map(lambda x: x.sharding, workers)
    run = jax.jit(trainer.step, donate_argnums=0)
    theta = {name: x.astype(np.float64) for name, x in params().items()}
    momentum = {name: np.zeros_like(x) for name, x in theta.items()}
    for step in range(STEPS):
        gradient = reference(theta, count, step)
        if gradient is not None:
            momentum = {name: MOMENTUM * momentum[name] + gradient[name] for name in theta}
            theta = {name: theta[name] - RATE * momentum[name] for name in theta}
        workers, report = run(workers, batch(step))
    assert run._cache_size() == 1
    assert jax.tree.map(lambda x: x.sharding, workers) == before
    assert {name: x.sharding.spec for name, x in workers.params.items()} == {
        name: P("tensor", "fsdp") if count == 4 and name == "down" else spec for name, spec in SPECS.items()
    }  # XLA omits axes of one device
    trace = optax.tree.get(workers.optimizer, "trace")
    assert {leaf: x.sharding for leaf, x in trace.items()} == {leaf: x.sharding for leaf, x in workers.params.items()}
    for leaf, x in theta.items():
        np.testing.assert_allclose(workers.params[leaf], x, rtol=1e-5, atol=1e-6, err_msg=leaf)
    if name == "shadow":
        assert not bool(report.shadow.differed)


def test_lossy_gives_each_worker_a_replica() -> None:
    """What arrived is taken from the log; a packet of gradients is the mean of those that arrived, and parameters that
    did not arrive are stale (section 3 of the paper)."""
    packet, count = 5, 2
    optimizer = aggregation.lossy_zero2(SGD, AXIS, 0.4, 0.4, packet=packet, seed=2)
    mesh = mesh_of()
    trainer = data_parallel(jax.value_and_grad(loss), optimizer, mesh, AXIS, combining=Own())
    workers = trainer.init({name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in params().items()})
    assert workers.params["up"].shape == (2, 8, 16)
    run = jax.jit(trainer.step)

    def cut(tree: Arrays) -> list[np.ndarray]:
        flat = [np.ravel(tree[name]).astype(np.float64) for name in sorted(tree)]
        return [np.pad(x, (0, -len(x) % count)).reshape(count, -1) for x in flat]

    def join(leaves: list[np.ndarray]) -> Arrays:
        like = params()
        parts = zip(sorted(like), leaves, strict=True)
        return {name: x.ravel()[: like[name].size].reshape(like[name].shape) for name, x in parts}

    def spread(arrived: np.ndarray, leaves: list[np.ndarray]) -> list[np.ndarray]:
        """The packets of each leaf, repeated for their elements: [..., packets] to [..., shard]."""
        found, first = [], 0
        for leaf in leaves:
            packets = -(-leaf.shape[1] // packet)
            found.append(np.repeat(arrived[..., first : first + packets], packet, -1)[..., : leaf.shape[1]])
            first += packets
        return found

    copies = [{name: x.astype(np.float64) for name, x in params().items()} for _ in range(count)]
    momentum = [np.zeros_like(leaf) for leaf in cut(copies[0])]
    lost = 0
    for step in range(STEPS):
        workers, _ = run(workers, trainer.place(rows(count, step)))
        size = sum(-(-leaf.shape[1] // packet) for leaf in momentum)
        log = workers.optimizer.log
        sent, delivered = (np.unpackbits(np.asarray(x), axis=-1)[..., :size] > 0 for x in (log.gradient, log.parameter))
        lost += int((~sent).sum() + (~delivered).sum())
        own = [cut(own_gradients(copies[worker], count, step)[worker]) for worker in range(count)]
        new = [[leaf.copy() for leaf in cut(copy)] for copy in copies]
        for owner in range(count):
            masks = spread(sent[:, owner], momentum)  # [senders, shard] for each leaf
            for number, mask in enumerate(masks):
                values = np.stack([each[number][owner] for each in own])
                gradient = (mask * values).sum(0) / mask.sum(0)
                momentum[number][owner] = MOMENTUM * momentum[number][owner] + gradient
                moved = cut(copies[owner])[number][owner] - RATE * momentum[number][owner]
                for worker in range(count):
                    arrived = spread(delivered[owner, worker], momentum)[number]
                    new[worker][number][owner] = np.where(arrived, moved, new[worker][number][owner])
        copies = [join(leaves) for leaves in new]
    assert lost > 10
    for worker, copy in enumerate(copies):
        for name, x in copy.items():
            np.testing.assert_allclose(workers.params[name][worker], x, rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_optimizer_sees_all_shards() -> None:
    """The norm for clipping is that of the whole gradient."""
    mesh, optimizer = mesh_of(), optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))
    trainer = data_parallel(jax.value_and_grad(loss), optimizer, mesh, AXIS)
    workers = trainer.init({name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in params().items()})
    theta: Any = jax.tree.map(jnp.asarray, params())
    state = optimizer.init(theta)
    run = jax.jit(trainer.step)
    with jax.numpy_dtype_promotion("standard"):
        for step in range(STEPS):
            workers, _ = run(workers, trainer.place(rows(2, step)))
            updates, state = optimizer.update(jax.grad(loss)(theta, rows(2, step)), state, theta)
            theta = optax.apply_updates(theta, updates)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), workers.params, theta)


@pytest.mark.parametrize("name", ["mean", "DropCompute", "shadow"])
def test_values_beside_the_loss(name: str) -> None:
    _, _, count, _ = METHODS[name]
    trainer, workers, batch = start(name, has_aux=True)
    _, (report, aux) = jax.jit(trainer.step)(workers, batch(0))
    assert np.isfinite(float(report.loss))
    x = rows(count, 0)[0]
    if name == "DropCompute":
        assert aux["rows"].tolist() == [[2, 2, 2, 2], [2, 2, 0, 0]]  # the last two were not completed
        whole = x.reshape(2, 4, 2, 8)
        np.testing.assert_array_equal(aux["x"], whole * np.asarray([[1, 1, 1, 1], [1, 1, 0, 0]])[..., None, None])
    else:
        assert aux["rows"].tolist() == [ROWS] * count
        own = x.reshape(count, ROWS, 8)
        seen = np.asarray(aux["x"])
        if name == "mean":
            np.testing.assert_array_equal(seen, own)
        else:  # the rank in the role of the spare works on the rows of the rank that it checks
            np.testing.assert_array_equal(seen[int(report.shadow.spares[0])], own[int(report.shadow.watched)])


def test_a_fault_in_one_worker_is_found_by_the_shadow() -> None:
    mesh = mesh_of(4)

    def struck(theta: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(theta, batch)
        wrong = jnp.where(jax.lax.axis_index(AXIS) == 1, 1e-3, 0.0).astype(jnp.float32)
        return value, {**gradient, "up": gradient["up"].at[3, 5].add(wrong)}

    trainer = data_parallel(struck, SGD, mesh, AXIS, combining=Shadowed(1))
    workers = trainer.init({name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in params().items()})
    run = jax.jit(trainer.step)
    for step in range(12):
        workers, _ = run(workers, trainer.place(rows(4, step)))
    found = aggregation.judge(jax.tree.map(lambda leaf: leaf[0], workers.combining))
    assert found.suspects == (1,)


def test_states_are_saved_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    trainer, workers, batch = start("noise")
    run = jax.jit(trainer.step)
    for step in range(2):
        workers, _ = run(workers, batch(step))
    ocp.save(tmp_path / "state", workers)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), workers)
    again = ocp.load(tmp_path / "state", like)
    for step in range(2, STEPS):
        workers, _ = run(workers, batch(step))
        again, _ = run(again, batch(step))
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(workers), strict=True):
        assert ours.sharding == theirs.sharding
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_the_step_can_be_transformed() -> None:
    """Products are checked on every worker."""
    trainer, workers, batch = start("mean")
    with jax.numpy_dtype_promotion("standard"):
        (_, report), flags = jax.jit(sdc.abft(trainer.step))(workers, batch(0))
    assert float(report.loss) > 0
    assert sdc.checksums.coverage(flags) == 1
    assert all(flag.checked.shape == (2,) for flag in flags.values())
    assert not any(flag.flagged.any() for flag in flags.values())


@pytest.mark.parametrize(
    ("optimizer", "combining", "said"),
    [
        (aggregation.paft(SGD, AXIS, 2), None, "paft synchronizes replicas, but the parameters are sharded over 'fsd"),
        (aggregation.paft_sync(SGD, AXIS, 2), None, "paft synchronizes replicas"),
        (
            optax.chain(aggregation.gradient_noise(AXIS, 0.1), SGD), None,
            r"give gradient_noise as combining=Mean\(gradient_noise\(...\)\)",
        ),
        (aggregation.lossy_zero2(SGD, AXIS), None, r"lossy_zero2 reduces .* give combining=Own\(\)"),
        (SGD, Own(), r"combining=Own\(\) leaves gradients unreduced"),
        (SGD, Shadowed(1), "ranks=2: expected at least three"),
        (SGD, Mean(optax.clip_by_global_norm(1.0)), r"expected gradient_noise\(...\); put other transforms in the opt"),
        (SGD, Mean(0.1), "noise=0.1: expected gradient_noise"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_one_clear_line(optimizer: Any, combining: Any, said: str) -> None:
    mesh = mesh_of()
    placed = {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in params().items()}
    with pytest.raises(ValueError, match=said):
        data_parallel(jax.value_and_grad(loss), optimizer, mesh, AXIS, combining=combining).init(placed)


def test_each_device_sends_its_part() -> None:
    """Nothing is gathered over other axes: every gather and every scatter is between two devices."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"))
    trainer = data_parallel(jax.value_and_grad(lambda w, x: jnp.mean(x @ w)), SGD, mesh, AXIS)
    workers = trainer.init(jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("fsdp", "tensor"))))
    text = jax.jit(trainer.step).lower(workers, trainer.place(np.ones((4, 8), np.float32))).compile().as_text()
    calls = [call for call in collective_calls(text) if call.kind in ("all-gather", "reduce-scatter")]
    assert {call.kind for call in calls} == {"all-gather", "reduce-scatter"}
    assert {len(group) for call in calls for group in call.groups} == {2}
    assert max(size for call in calls for size in call.sizes) == 8 * 16 // 4 * 4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_and_empty_parameters(dtype: Any) -> None:
    mesh = mesh_of()
    trainer = data_parallel(
        jax.value_and_grad(lambda w, x: jnp.mean((x.astype(dtype) @ w["w"]) ** 2)), optax.sgd(0.1), mesh, AXIS
    )
    place = NamedSharding(mesh, P("fsdp"))
    workers = trainer.init({"w": jax.device_put(jnp.ones((8, 4), dtype), place), "none": jnp.zeros((0, 4), dtype)})
    run = jax.jit(trainer.step)
    for _ in range(2):
        workers, report = run(workers, trainer.place(np.ones((4, 8), np.float32)))
    assert run._cache_size() == 1
    assert workers.params["w"].dtype == report.loss.dtype == dtype
    np.testing.assert_allclose(np.asarray(workers.params["w"], np.float32), 0.6**2, rtol=0.01)


def test_wrong_gradients_and_states() -> None:
    mesh = mesh_of()
    batch = rows(2, 0)

    def run(gradient: Any, mesh: Any = mesh, state: Any = None) -> None:
        trainer = data_parallel(gradient, SGD, mesh, AXIS)
        trainer.step(trainer.init(params()) if state is None else state, batch)

    def turned(theta: Any, batch: Any) -> Any:
        value, found = jax.value_and_grad(loss)(theta, batch)
        return value, {**found, "up": found["up"].T}

    def constrained(theta: Any, batch: Any) -> Any:
        return loss(theta, (jax.lax.with_sharding_constraint(batch[0], P("fsdp")), batch[1]))

    with pytest.raises(ValueError, match=r"the gradient of params\['up'\] has shape \(16, 8\); expected \(8, 16\)"):
        run(turned)
    with pytest.raises(ValueError, match="a sharding constraint in the gradient function names 'fsdp'"):
        run(jax.value_and_grad(constrained))
    trainer = data_parallel(jax.value_and_grad(loss, allow_int=True), SGD, mesh, AXIS)
    with pytest.raises(ValueError, match=r"params\['count'\] is int32, which has no gradient"):
        trainer.step(trainer.init({**params(), "count": jnp.zeros(4, jnp.int32)}), batch)
    other = data_parallel(jax.value_and_grad(loss), SGD, jax.make_mesh((4, 2), ("fsdp", "tensor")), AXIS)
    with pytest.raises(ValueError, match=r"the state is of a mesh {'fsdp': 4, 'tensor': 2}, this step of {'fsdp': 2"):
        run(jax.value_and_grad(loss), state=other.init(params()))
