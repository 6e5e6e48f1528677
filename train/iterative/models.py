"""Iterative-convergent training algorithms: their common interface for perturbations, and six algorithms."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int, Int32

from sdc.checkpoints import Distance, squared_distance, total_variation

from .. import ByteTokenizer, make_dataset, read_corpus
from ..programs import MODEL, ModelConfig, cross_entropy, init_params, logits
from .corpora import Documents, Ratings
from .images import Images

# Arrays by name: the complete state, except for values that follow from the iteration number.
State: TypeAlias = dict[str, Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Iterative:
    """A training algorithm in the form of Qiao et al. (ICML 2019, section 2): x_{k+1} = f(x_k).

    Attributes:
        name: name of the algorithm in the record.
        source: origin of the data.
        init: function that makes the initial state from a random key.
        step: pure function `(state, k) -> state` that runs iteration k, counted from 0; it is compiled once for all k.
        loss: function that returns the loss of a state over fixed data; this loss determines convergence.
        blocks: for each array, by name, the block numbers of its rows, from 0. Rows of several arrays may share a
            block; such rows are lost and saved together.
        moving: names of the arrays whose movement is measured, that is, the parameters.
        distance: function that measures the movement of the rows of these arrays.
    """

    name: str
    source: str
    init: Callable[[Array], State]
    step: Callable[[State, Int32[Array, ""]], State]
    loss: Callable[[State], Float32[Array, ""]]
    blocks: Mapping[str, Int[np.ndarray, "rows"]]
    moving: tuple[str, ...]
    distance: Distance = squared_distance

    def check(self) -> None:
        """Checks arrays and blocks before anything is computed.

        Raises:
            ValueError: an array does not have exactly one block number per row, block numbers have gaps, no array
                moves, the step returns a different structure, or the loss is not a single number.
        """
        state = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        if set(self.blocks) != set(state) or not self.moving or not set(self.moving) <= set(state):
            raise ValueError(
                f"{self.name}: the state has {sorted(state)}, blocks are given for {sorted(self.blocks)}, and the "
                f"moving arrays are {list(self.moving)}; expected blocks for each array, and at least one moving array"
            )
        numbers = set[int]()
        for name, ids in self.blocks.items():
            rows = state[name].shape[:1]
            if ids.shape != rows or not rows or not np.issubdtype(ids.dtype, np.integer):
                raise ValueError(
                    f"{self.name}: {name} has shape {state[name].shape}, but its block numbers are {ids.dtype} of "
                    f"shape {ids.shape}; expected a whole number for each row"
                )
            numbers |= set(ids.tolist())
        if numbers != set(range(len(numbers))):
            raise ValueError(f"{self.name}: block numbers are {sorted(numbers)[:8]}...; expected 0, 1, 2, ...")
        after = jax.eval_shape(self.step, state, jax.ShapeDtypeStruct((), np.int32))
        kinds, expected = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (after, state))
        if kinds != expected:
            raise ValueError(f"{self.name}: step returns {after}; expected the same structure as {state}")
        loss = jax.eval_shape(self.loss, state)
        if getattr(loss, "shape", None) != ():
            raise ValueError(f"{self.name}: loss returns {loss}; expected a single number")

    @property
    def count(self) -> int:
        """Number of blocks."""
        return 1 + max(int(ids.max()) for ids in self.blocks.values())

    def sizes(self, state: State) -> Int[np.ndarray, "blocks"]:
        """Returns the size in bytes of the parameters in each block; saving a block writes at least this many bytes."""
        found = np.zeros(self.count, np.int64)
        for name in self.moving:
            leaf = state[name]
            np.add.at(found, self.blocks[name], leaf.size // leaf.shape[0] * leaf.dtype.itemsize)
        return found

    def moved(self, new: State, old: State) -> Float32[Array, "blocks"]:
        """Returns the movement of each block: the sum of its rows' distances."""
        total = jnp.zeros(self.count, jnp.float32)
        for name in self.moving:
            rows = self.distance(new[name], old[name])
            total += jax.ops.segment_sum(rows, jnp.asarray(self.blocks[name]), self.count)
        return total


def rows_of(*counts: int) -> list[Int[np.ndarray, "rows"]]:
    """Returns block numbers for the rows of several arrays: each row is a separate block, numbered consecutively across
    arrays."""
    starts = np.cumsum([0, *counts])
    return [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts, strict=False)]


def logistic_regression(
    features: Float32[np.ndarray, "n M"],
    labels: Int32[np.ndarray, "n"],
    *,
    source: str,
    batch: int,
    rate: float,
    decay: float = 1e-3,
    seed: int = 0,
) -> Iterative:
    """Returns an algorithm that minimizes the multinomial logistic loss over an M x N matrix, whose rows are the
    blocks.

    Qiao et al., ICML 2019, section 5.1 and appendix C:

        l(W) = 1/n sum_i -log softmax(x_i W)_{y_i} + decay/2 ||W||^2,   W_{k+1} = W_k - rate * grad l_batch(W_k)

    The weight decay, which the paper does not mention, makes the loss strongly convex; the loss therefore has the
    unique optimum from which theorem 3.2 measures distances.

    Args:
        features: one row for each example.
        labels: classes, from 0.
        source: origin of the examples.
        batch: examples per iteration; the examples are put in one fixed order and divided into consecutive batches, and
            a remainder at the end is omitted from training and from the loss.
        rate: learning rate.
        decay: weight decay.
        seed: seed of the order of the examples.

    Raises:
        ValueError: `batch` exceeds the number of examples.
    """
    if not 1 <= batch <= len(labels):
        raise ValueError(f"batch={batch}: expected 1 to {len(labels)}, the number of examples")
    order = np.random.default_rng(seed).permutation(len(labels))[: len(labels) // batch * batch]
    x, y = features[order], labels[order]
    classes = int(labels.max()) + 1
    batches = len(order) // batch

    def loss(weights: Array, x: Any, y: Any) -> Float32[Array, ""]:
        logits = x @ weights
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=-1)
        return -jnp.mean(chosen) + decay / 2 * jnp.sum(jnp.square(weights))

    def step(state: State, k: Any) -> State:
        start = jnp.asarray(k, jnp.int32) % batches * batch
        examples = jax.lax.dynamic_slice_in_dim(x, start, batch), jax.lax.dynamic_slice_in_dim(y, start, batch)
        return {"weights": state["weights"] - rate * jax.grad(loss)(state["weights"], *examples)}

    (rows,) = rows_of(features.shape[1])
    return Iterative(
        name="regression",
        source=source,
        init=lambda key: {"weights": 0.01 * jax.random.normal(key, (features.shape[1], classes))},
        step=step,
        loss=lambda state: loss(state["weights"], x, y),
        blocks={"weights": rows},
        moving=("weights",),
    )


def matrix_factorization(ratings: Ratings, *, factors: int = 20, decay: float = 0.1) -> Iterative:
    """Returns an algorithm that factors a matrix of which some entries are known; the rows of L and the columns of R
    are the blocks.

    Qiao et al., ICML 2019, section 5.1 and appendix C; L and R start with uniform random numbers in [0, 1]:

        l(L, R) = sum over known (u, i) of (r_ui - L_u . R_i)^2 + decay (||L||^2 + ||R||^2)

    An iteration solves for L with R fixed, and then for R with L fixed: (sum_i R_i R_i^T + decay 1) L_u = sum_i r_ui
    R_i. The reported loss is l divided by the number of ratings.

    Args:
        ratings: the known entries.
        factors: p, the number of columns of L.
        decay: weight of the squared norms.
    """
    users, items = ratings.shape
    r, mask = np.zeros((users, items), np.float32), np.zeros((users, items), np.float32)
    r[ratings.users, ratings.items] = ratings.values
    mask[ratings.users, ratings.items] = 1
    upper = np.triu_indices(factors)

    def half(others: Float32[Array, "m p"], r: Any, mask: Any) -> Array:
        """Solves the least-squares problem for one factor: each row is computed from the rows of the other factor with
        which it shares a known entry."""
        squares = others[:, upper[0]] * others[:, upper[1]]
        packed = mask @ squares
        normal = jnp.zeros((r.shape[0], factors, factors)).at[:, upper[0], upper[1]].set(packed)
        normal = normal.at[:, upper[1], upper[0]].set(packed) + decay * jnp.eye(factors)
        return solve(normal, r @ others)

    def step(state: State, k: Any) -> State:
        left = half(state["items"], r, mask)
        return {"users": left, "items": half(left, r.T, mask.T)}

    def loss(state: State) -> Float32[Array, ""]:
        left, right = state["users"], state["items"]
        squares = jnp.sum(mask * jnp.square(r - left @ right.T))
        return (squares + decay * (jnp.sum(jnp.square(left)) + jnp.sum(jnp.square(right)))) / len(ratings.values)

    def init(key: Array) -> State:
        one, two = jax.random.split(key)
        return {"users": jax.random.uniform(one, (users, factors)), "items": jax.random.uniform(two, (items, factors))}

    rows = rows_of(users, items)
    return Iterative(
        name="factorization",
        source=ratings.source,
        init=init,
        step=step,
        loss=loss,
        blocks={"users": rows[0], "items": rows[1]},
        moving=("users", "items"),
    )


def solve(a: Float32[Array, "*n p p"], b: Float32[Array, "*n p"]) -> Float32[Array, "*n p"]:
    """Solves many small symmetric positive definite systems simultaneously, by Cholesky factorization.

    `jnp.linalg.cholesky` factors matrices sequentially on CPUs, which takes several times as long as this function for
    thousands of systems.
    """
    size = a.shape[-1]
    columns: list[Array] = []
    for j in range(size):
        column = a[..., j:, j]
        for i, other in enumerate(columns):
            column = column - other[..., j - i :] * other[..., j - i, None]
        columns.append(column / jnp.sqrt(column[..., :1]))
    known: list[Array] = []
    for j, column in enumerate(columns):
        rest = b[..., j] - sum((columns[i][..., j - i] * known[i] for i in range(j)), jnp.float32(0))
        known.append(rest / column[..., 0])
    found: list[Array] = []
    for j in reversed(range(size)):
        rest = known[j] - sum((columns[j][..., i] * found[-i] for i in range(1, size - j)), jnp.float32(0))
        found.append(rest / columns[j][..., 0])
    return jnp.stack(found[::-1], axis=-1)


# Number of parts of the longest document, which are sampled one after another (shorter documents have fewer parts);
# maximum number of topics.
PARTS, MOST_TOPICS = 8, 128


def topic_model(
    documents: Documents, *, topics: int = 20, alpha: float = 1.0, beta: float = 1.0, seed: int = 0
) -> Iterative:
    """Returns an algorithm that samples the topic of each token given the topics of all other tokens; documents are the
    blocks.

    Griffiths and Steyvers, PNAS 2004, equation 5, with symmetric priors as in Qiao et al., ICML 2019, appendix C:

        p(z = t | others) ~ (n_dt + alpha) (n_wt + beta) / (n_t + V beta)

    A token's own topic is excluded from all counts. Word counts are those at the start of the iteration, as in
    distributed samplers (Newman et al., JMLR 2009); the counts of a document are updated after each of its `PARTS`
    parts. The random numbers of an iteration depend only on the seed and the iteration number. A document's block
    consists of its topic counts and its tokens' topics; word counts follow from these topics and cannot be lost. The
    distance between two states of a document is the total variation between their topic distributions, times the
    document's length.

    Args:
        documents: words of each document.
        topics: number of topics.
        alpha: Dirichlet prior of the topics of a document.
        beta: Dirichlet prior of the words of a topic.
        seed: seed of the sampling.

    Raises:
        ValueError: `topics` is below 1, or so large that the numbers of the topics do not fit into 8 bits.
    """
    if not 1 <= topics <= MOST_TOPICS:
        raise ValueError(f"topics={topics}: expected 1 to {MOST_TOPICS}")
    count, vocabulary = documents.shape
    lengths = documents.lengths.astype(np.float32)
    longest = -(-int(documents.lengths.max()) // PARTS) * PARTS
    words, mask = (np.zeros((count, longest), kind) for kind in (np.int32, np.float32))
    starts = np.cumsum(documents.lengths) - documents.lengths
    place = np.arange(len(documents.words)) - starts[documents.documents]
    words[documents.documents, place], mask[documents.documents, place] = documents.words, 1

    def of_documents(assigned: Array) -> Float32[Array, "documents topics"]:
        return jnp.sum(one_hot(assigned) * mask[..., None], axis=1)

    def one_hot(assigned: Array) -> Array:
        return (assigned[..., None] == jnp.arange(topics)).astype(jnp.float32)

    def of_words(assigned: Array) -> Float32[Array, "words topics"]:
        flat = words * topics + assigned
        total = jnp.zeros(vocabulary * topics, jnp.float32).at[flat.reshape(-1)].add(mask.reshape(-1))
        return total.reshape(vocabulary, topics)

    def step(state: State, k: Any) -> State:
        by_word = of_words(state["assigned"].astype(jnp.int32))
        key = jax.random.fold_in(jax.random.key(seed), k)
        uniform = jax.random.uniform(key, words.shape)

        def part(counts: Array, inputs: Any) -> tuple[Array, Array]:
            """Samples the topics of the tokens in one part of every document."""
            word, weight, old, drawn = inputs
            own = one_hot(old) * weight[..., None]
            document = counts[:, None, :] - own + alpha
            odds = document * (by_word[word] - own + beta) / (jnp.sum(by_word, axis=0) - own + vocabulary * beta)
            cumulative = jnp.cumsum(odds, axis=-1)
            new = jnp.sum(cumulative < drawn[..., None] * cumulative[..., -1:], axis=-1).astype(jnp.int32)
            return counts + jnp.sum((one_hot(new) - one_hot(old)) * weight[..., None], axis=1), new

        arrays: tuple[Any, ...] = (words, mask, state["assigned"].astype(jnp.int32), uniform)
        inputs = tuple(jnp.moveaxis(array.reshape(count, PARTS, -1), 1, 0) for array in arrays)  # for all documents
        counts, found = jax.lax.scan(part, state["counts"], inputs)
        return {"counts": counts, "assigned": jnp.moveaxis(found, 0, 1).reshape(words.shape).astype(jnp.int8)}

    def loss(state: State) -> Float32[Array, ""]:
        """Returns the mean negative log-likelihood of a token under the estimated topic and word distributions, in
        nats."""
        theta = (state["counts"] + alpha) / (lengths + topics * alpha)[:, None]
        by_word = of_words(state["assigned"].astype(jnp.int32)) + beta
        phi = by_word / jnp.sum(by_word, axis=0)
        likelihood = jnp.einsum("dt,dlt->dl", theta, phi[words])
        return -jnp.sum(jnp.log(likelihood) * mask) / jnp.sum(mask)

    def init(key: Array) -> State:
        assigned = jax.random.randint(key, words.shape, 0, topics, jnp.int32)
        return {"counts": of_documents(assigned), "assigned": assigned.astype(jnp.int8)}

    (rows,) = rows_of(count)
    return Iterative(
        name="topics",
        source=documents.source,
        init=init,
        step=step,
        loss=loss,
        blocks={"counts": rows, "assigned": rows},
        moving=("counts",),
        distance=total_variation(lengths),
    )


By: TypeAlias = Literal["layers", "shards"]
KINDS = ("params", "mu", "nu")


def by_adam(
    *,
    name: str,
    source: str,
    params_of: Callable[[Array], State],
    loss: Callable[..., Float32[Array, ""]],
    data: tuple[np.ndarray, ...],
    samples: int,
    rate: float,
    batch: int,
    batches: int,
    by: By,
    seed: int,
) -> Iterative:
    """Returns an algorithm that trains parameters, in a dictionary of arrays, with Adam."""
    if not 1 <= batch <= len(data[0]):
        raise ValueError(f"batch={batch}: expected 1 to {len(data[0])}, the number of examples")
    shapes = jax.eval_shape(lambda: params_of(jax.random.key(0)))
    order = np.random.default_rng(seed).permutation(len(data[0]))
    shuffled = tuple(array[order] for array in data)
    steps = len(order) // batch
    optimizer = optax.adam(rate)

    def step(state: State, k: Any) -> State:
        """Runs an iteration. Adam's step count follows from the iteration number and cannot be lost."""
        params, mu, nu = ({name: state[f"{kind}/{name}"] for name in shapes} for kind in KINDS)

        def one(number: Any, carry: Any) -> Any:
            params, mu, nu = carry
            count = jnp.asarray(k, jnp.int32) * batches + number
            start = count % steps * batch
            grads = jax.grad(loss)(params, *(jax.lax.dynamic_slice_in_dim(array, start, batch) for array in shuffled))
            state = (optax.ScaleByAdamState(count, mu, nu), optax.EmptyState())
            with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
                updates, ((_, mu, nu), _) = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), mu, nu

        found = jax.lax.fori_loop(0, batches, one, (params, mu, nu))
        return {f"{kind}/{name}": part[name] for kind, part in zip(KINDS, found, strict=True) for name in shapes}

    def init(key: Array) -> State:
        params = params_of(key)
        zeros = {name: jnp.zeros_like(leaf) for name, leaf in params.items()}
        parts = zip(KINDS, (params, zeros, zeros), strict=True)
        return {f"{kind}/{name}": part[name] for kind, part in parts for name in shapes}

    ids: dict[str, np.ndarray] = {}
    first = 0
    for leaf, shape in shapes.items():
        rows = shape.shape[0]
        own = first + (np.arange(rows) if by == "shards" else np.zeros(rows, int))
        first = int(own[-1]) + 1
        ids |= {f"{kind}/{leaf}": own.astype(np.int32) for kind in KINDS}
    return Iterative(
        name=name,
        source=source,
        init=init,
        step=step,
        loss=lambda state: loss(
            {leaf: state[f"params/{leaf}"] for leaf in shapes}, *(array[:samples] for array in shuffled)
        ),
        blocks=ids,
        moving=tuple(f"params/{leaf}" for leaf in shapes),
    )


CHANNELS, HIDDEN = (8, 16), (64, 32)


def patches(x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B H W 9*C"]:
    """Returns the 3x3 neighborhood of every pixel, row by row, with zeros beyond the border."""
    _, height, width, _ = x_BHWC.shape
    padded = jnp.pad(x_BHWC, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, row : row + height, column : column + width] for row in range(3) for column in range(3)]
    return jnp.concatenate(shifted, axis=-1)


def pool(x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B H/2 W/2 C"]:
    """Returns the maximum of every block of 2x2 pixels."""
    batch, height, width, channels = x_BHWC.shape
    return x_BHWC.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def pooled_pixels(height: int, width: int) -> int:
    """Returns the number of pixels of an image after two poolings."""
    if min(height, width) < 4 or height % 4 or width % 4:
        raise ValueError(
            f"images of {height}x{width} cannot be halved twice; expected multiples of 4, so pad or crop the images"
        )
    return height // 4 * (width // 4)


def convolutional_network(
    images: Images, *, by: By = "layers", batch: int = 64, batches: int = 8, samples: int = 256, seed: int = 0
) -> Iterative:
    """Returns an algorithm that trains a network of two convolutional layers with max pooling and three dense layers.

    Qiao et al., ICML 2019, section 5.1 and appendix C: ReLU, batches of 64, and Adam with its recommended settings
    (0.001, 0.9, 0.999, 1e-8). Adam's moments belong to the blocks of their parameters.

    Args:
        images: training images; height and width are multiples of 4.
        by: `layers`: each weight matrix and each bias is a block; `shards`: each index of the first axis of these
            arrays is a block.
        batch: images per batch.
        batches: batches per iteration; blocks are saved and losses are computed only between iterations.
        samples: number of images in the loss that determines convergence.
        seed: seed of the order of the images.

    Raises:
        ValueError: a batch has more images than the data set, or height or width is not a multiple of 4.
    """
    height, width, channels = images.shape
    flat = pooled_pixels(height, width) * CHANNELS[1]
    sides = [(9 * channels, CHANNELS[0]), (9 * CHANNELS[0], CHANNELS[1]), (flat, HIDDEN[0]), HIDDEN]
    sides.append((HIDDEN[1], images.classes))

    def params_of(key: Array) -> State:
        keys = jax.random.split(key, len(sides))
        found: State = {}
        for number, ((rows, columns), one) in enumerate(zip(sides, keys, strict=True)):
            # The small head makes the first loss ln(classes).
            scale = 0.02 if number == len(sides) - 1 else np.sqrt(2 / rows)
            found[f"weight{number}"] = scale * jax.random.normal(one, (rows, columns))
            found[f"bias{number}"] = jnp.zeros(columns)
        return found

    def loss(params: State, x: Array, y: Array) -> Float32[Array, ""]:
        for number in range(len(sides)):
            if number < 2:
                x = patches(x)
            x = x @ params[f"weight{number}"] + params[f"bias{number}"]
            if number < len(sides) - 1:
                x = jax.nn.relu(x)
            if number < 2:
                x = pool(x)
            if number == 1:
                x = x.reshape(len(x), -1)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x, y))

    return by_adam(
        name=f"convolution by {by}",
        source=images.source,
        params_of=params_of,
        loss=loss,
        data=(images.train_images, images.train_labels),
        samples=samples,
        rate=0.001,
        batch=batch,
        batches=batches,
        by=by,
        seed=seed,
    )


DECODER = ModelConfig(vocab_size=320, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=64)
LENGTH, MOST_CHUNKS = 64, 4096  # tokens per chunk of text, and maximum number of chunks


def decoder_loss(params: Any, tokens_BS: Any) -> Float32[Array, ""]:
    """Returns the mean cross entropy of the decoder, in nats."""

    def share(_: Array) -> Any:
        return jnp.mean(cross_entropy(logits(DECODER, params, tokens_BS[:, :-1]), tokens_BS[:, 1:]))

    # The model's collectives need their axis, which has one rank here.
    return jax.vmap(share, axis_name=MODEL)(jnp.zeros(1))[0]


def transformer_decoder(
    corpus: tuple[str, ...] = ("python",), *, batch: int = 8, batches: int = 4, samples: int = 8, seed: int = 0
) -> Iterative:
    """Returns an algorithm that trains a small byte-level decoder on text with Adam. Each index of the first axis of a
    parameter is a block, together with Adam's moments.

    Args:
        corpus: see `sdc.train.data.read_corpus`.
        batch: chunks of 64 bytes per batch.
        batches: batches per iteration; blocks are saved and losses are computed only between iterations.
        samples: number of chunks in the loss that determines convergence.
        seed: seed of the order of the chunks.

    Raises:
        CorpusError: a part of the corpus is missing or unreadable.
        ValueError: a batch has more chunks than the data set.
    """
    dataset = make_dataset(read_corpus(corpus), ByteTokenizer(), LENGTH, seed=seed)
    chunks = np.asarray(dataset.chunks)[np.random.default_rng(seed).permutation(len(dataset.chunks))[:MOST_CHUNKS]]
    shapes = jax.eval_shape(lambda: init_params(DECODER, jax.random.key(0)))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(shapes)]
    structure = jax.tree.structure(shapes)

    def loss(params: State, tokens_BS: Array) -> Float32[Array, ""]:
        return decoder_loss(jax.tree.unflatten(structure, [params[name] for name in names]), tokens_BS)

    return by_adam(
        name="transformer",
        source=dataset.source,
        params_of=lambda key: dict(zip(names, jax.tree.leaves(init_params(DECODER, key)), strict=True)),
        loss=loss,
        data=(chunks,),
        samples=samples,
        rate=3e-3,
        batch=batch,
        batches=batches,
        by="shards",
        seed=seed,
    )
