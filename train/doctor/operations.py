"""The doctor's operations and their digests: a small training step, and operations known to give different bits in
different environments."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from sdc.burnin.workloads import normal, random_words
from sdc.records import program_fingerprint

from ..programs import ModelConfig, OptimizerConfig, TrainConfig, check, get_config, place, plain, sharded
from .results import TRAINING, Measured

AXIS = "devices"


class Built(NamedTuple):
    """A jittable function of arrays, and its arguments, placed on devices."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation to run."""

    name: str
    # makes the function and its arguments for devices in a given order; a single-device operation uses the first device
    build: Callable[[Sequence[jax.Device]], Built]
    several: bool = False  # whether it runs on all devices


def single(name: str, fn: Callable[..., Any], *inputs: Callable[[], np.ndarray]) -> Operation:
    return Operation(name, lambda devices: Built(fn, tuple(jax.device_put(make(), devices[0]) for make in inputs)))


def collective(name: str, fn: Callable[..., Any], elements: int) -> Operation:
    """Returns an operation over all devices, each of which holds a row of `elements` numbers; `fn` receives one row,
    with the axis `AXIS` bound."""

    def build(devices: Sequence[jax.Device]) -> Built:
        mesh = Mesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))
        rows = normal((len(devices), elements), "float32", 31)
        placed = jax.device_put(rows, NamedSharding(mesh, P(AXIS)))
        mapped = jax.shard_map(
            lambda row: fn(row[0])[None], mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
        )
        return Built(mapped, (placed,))

    return Operation(name, build, several=True)


STEPS = 3
# Compiles within seconds
SMALL = TrainConfig(
    name="doctor",
    model=ModelConfig(vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=64),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, total_steps=1_000),
    sequence_length=32,
    batch_size=8,
)


def training(config: TrainConfig) -> Operation:
    """Returns an operation that runs a few steps of the reference workload from its initial state. The steps are
    data-parallel over the largest number of ranks that divides the devices, the batch and the width evenly."""

    def build(devices: Sequence[jax.Device]) -> Built:
        ranks = math.gcd(len(devices), config.batch_size, config.model.width)
        placement = place(twins=None, data=ranks, model=1, devices=list(devices)[:ranks])
        work = sharded(config)
        step = plain(work, placement)
        shardings = placement.sharding(placement.spec(work.state_specs))

        def steps(seed: Any, batches: Any) -> Any:
            state = lax.with_sharding_constraint(work.init(jax.random.key(seed)), shardings)
            return lax.scan(step, state, batches)

        shape = (STEPS, config.microsteps, config.batch_size, config.sequence_length + 1)
        tokens = (random_words(shape, 37) % np.uint32(config.model.vocab_size)).astype(np.int32)
        here = NamedSharding(placement.mesh, P())
        return Built(steps, (jax.device_put(np.uint32(1), here), jax.device_put(tokens, here)))

    return Operation(TRAINING, build, several=True)


def standard(options: Mapping[str, Any]) -> list[Operation]:
    config = get_config(options["config"]) if options.get("config") else SMALL
    check(config, 1, 1)

    def floats(*shape: int, seed: int, dtype: str = "float32") -> Callable[[], np.ndarray]:
        return lambda: normal(shape, dtype, seed)

    def words(count: int, rows: int, seed: int, dtype: Any) -> Callable[[], np.ndarray]:
        return lambda: (random_words((rows,), seed) % np.uint32(count)).astype(dtype)

    def narrow(a: Any, b: Any) -> Any:
        return jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))

    left, right = floats(128, 96, seed=1), floats(96, 160, seed=2)
    return [
        single("matmul", jnp.matmul, left, right),
        single("matmul bfloat16", narrow, left, right),
        # The product has few outputs with long sums, which libraries split over threads or blocks (split-k).
        single("matmul split-k", lambda x, g: jnp.matmul(x.T, g), floats(4096, 64, seed=3), floats(4096, 64, seed=4)),
        single("reductions", _reductions, floats(257, 513, seed=6)),
        single("scatter-add", _scatter_add, floats(20_000, seed=7), words(64, 20_000, 8, np.int32)),
        single("cumsum", functools.partial(jnp.cumsum, axis=1), floats(4, 4097, seed=9)),
        single("sort with ties", _sorted, words(9, 4096, 5, np.float32)),
        single("softmax attention", _attention, *(floats(4, 64, 32, seed=seed) for seed in (10, 11, 12))),
        single("convolution", _convolution, floats(4, 16, 16, 8, seed=13), floats(3, 3, 8, 16, seed=14)),
        single("special functions", _special, floats(4099, seed=15)),
        single("chain in bfloat16", _chain, floats(4099, seed=16)),
        single("chain in float32", _associations, floats(4099, seed=17), floats(4099, seed=18)),
        single("random numbers", _random, lambda: np.asarray([3, 5], np.uint32)),
        single("types", _types, floats(257, seed=19, dtype="float64")),
        collective("psum", lambda row: lax.psum(row, AXIS), 5003),
        collective("psum_scatter", _scattered, 4096),
        collective("all_gather", lambda row: jnp.sum(lax.all_gather(row, AXIS), axis=0), 1025),
        training(config),
    ]


def _reductions(x: Any) -> Any:
    return {"sum": jnp.sum(x), "columns": jnp.sum(x, axis=0), "rows": jnp.mean(x, axis=1), "squares": jnp.sum(x * x, 1)}


def _scatter_add(x: Any, at: Any) -> Any:
    return jnp.zeros((64,), x.dtype).at[at].add(x)


def _sorted(x: Any) -> Any:
    """Sorts values with ties, whose order may vary in an unstable sort."""
    return {"order": jnp.argsort(x, stable=False), "largest": lax.top_k(x, 16)}


def _attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqd,bkd->bqk", q, k) * np.float32(0.125)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores, axis=-1), v)


def _convolution(x: Any, w: Any) -> Any:
    """Computes a convolution and the gradient of its weights; no other operation gives libraries as many algorithms to
    choose from."""

    def convolve(w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    y, pull = jax.vjp(convolve, w)
    return {"forward": y, "gradient": pull(y)}


def _special(x: Any) -> Any:
    big = x * np.float32(50)
    return [
        jnp.exp(x),
        jnp.tanh(x),
        lax.erf(x),
        lax.rsqrt(jnp.abs(x) + 1),
        jnp.sin(big),
        jnp.log1p(x * x),
        x / (1 + x * x),
    ]


def _chain(x: Any) -> Any:
    """Chains operations whose intermediate rounding compilers may omit."""
    y = x.astype(jnp.bfloat16)
    return ((y * jnp.bfloat16(1.1) + jnp.bfloat16(0.3)) * jnp.bfloat16(0.7)).astype(jnp.float32)


def _associations(x: Any, y: Any) -> Any:
    """Computes expressions that compilers simplify if they assume associativity or the absence of NaN."""
    far = x * np.float32(1e3)
    return [(far + y) - far, x * np.float32(0.1) * np.float32(0.3) / np.float32(7), jnp.isnan(y / (x - x))]


def _random(words: Any) -> Any:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    own = jax.random.key(0)  # a key of the implementation that JAX's options select
    return {
        "bits": jax.random.bits(key, (1001,)),
        "normal": jax.random.normal(key, (1001,), np.float32),
        "order": jax.random.permutation(key, 100),
        "default": jax.random.uniform(own, (7,), np.float32),
    }


def _types(x: Any) -> Any:
    return {"floats": x * 2, "integers": jnp.arange(7), "sum": jnp.sum(x)}


def _scattered(row: Any) -> Any:
    """Returns a device's share of the sum; the remainder of a row that does not divide evenly is cut off."""
    count = lax.axis_size(AXIS)
    return lax.psum_scatter(row[: row.shape[0] // count * count], AXIS, tiled=True)


DIGITS = 16


def measure(operations: Sequence[Operation], devices: Sequence[jax.Device], *, runs: int) -> list[Measured]:
    """Returns the digests of each operation from several runs, and from one run with the devices in reverse order."""
    rows = []
    for operation in operations:
        row = Measured(operation=operation.name, devices=len(devices) if operation.several else 1)
        rows.append(row)
        try:
            fn, arguments = operation.build(devices)
            row.inputs = digest_of(arguments)
            lowered = jax.jit(fn).lower(*arguments)
            row.program = program_fingerprint(lowered)[:DIGITS]
            compiled = lowered.compile()
            row.digests = [digest_of(compiled(*arguments)) for _ in range(runs)]
            if row.devices > 1:
                turned, placed = operation.build(devices[::-1])
                row.permuted = digest_of(jax.jit(turned)(*placed))
        except Exception as error:  # any exception of an operation is reported, and the other operations still run
            row.problem = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return rows


def digest_of(tree: Any) -> str:
    """Returns the first digits of the SHA-256 over the types, shapes and bytes of all leaves, computed on the host."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.ascontiguousarray(jax.device_get(leaf))
        total.update(f"{array.dtype} {array.shape};".encode())
        total.update(array.tobytes())
    return total.hexdigest()[:DIGITS]
