"""Three lines in the training loops of other packages: the same training, and a verdict."""

import functools
import importlib.resources
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sdc.integrations import guard_maxtext, guard_trainer
from sdc.verdict import Verdict

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.usefixtures("free_checks"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Tunix uses names that Flax has deprecated
]
BATCH, LENGTH, STEPS = 4, 16, 30


@pytest.fixture(autouse=True)
def promoted() -> Iterator[None]:
    """Packages of others rely on JAX's default for operations of several types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def tunix() -> Any:
    from tunix.models.llama3 import model
    from tunix.sft import peft_trainer

    return model, peft_trainer


def trainer() -> Any:
    """Returns a trainer of a tiny Llama, with its own loop."""
    model, peft_trainer = tunix()
    config = model.ModelConfig(
        num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-5, remat_config=model.RematConfig.DECODER,
    )  # fmt: skip
    settings = peft_trainer.TrainingConfig(eval_every_n_steps=1_000, max_steps=STEPS)
    found = peft_trainer.PeftTrainer(model.Llama3(config, rngs=nnx.Rngs(0)), optax.adam(1e-3), settings)
    return found.with_gen_model_input_fn(
        lambda given: {
            "input_tokens": given.input_tokens,
            "input_mask": given.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH)),
            "attention_mask": jnp.tril(jnp.ones((BATCH, LENGTH, LENGTH), bool)),
        }
    )


def batches() -> list[Any]:
    draw, given = np.random.default_rng(0), tunix()[1].TrainingInput
    ones = np.ones((BATCH, LENGTH), bool)
    return [given(input_tokens=draw.integers(0, 64, ones.shape), input_mask=ones) for _ in range(STEPS)]


def state_of(found: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(found.model))]


def test_a_guard_in_tunix() -> None:
    plain, guarded = trainer(), trainer()
    plain.train(batches())
    watch = guard_trainer(guarded, budget=0.9)
    guarded.train(batches())
    assert watch.steps == STEPS
    assert watch.verdict().verdict is Verdict.CLEAN, str(watch.report())
    assert all(map(np.array_equal, state_of(plain), state_of(guarded)))
    with pytest.raises(ValueError, match="guard it before train is called"):
        guard_trainer(plain)
    with pytest.raises(ValueError, match="guarded already"):
        guard_trainer(guarded)
    guarded.with_loss_fn(lambda model, **_: sum(jnp.sum(x) for x in jax.tree.leaves(nnx.state(model))))
    with pytest.raises(ValueError, match="call guard_trainer again"):
        guarded.train(batches())
    assert guard_trainer(guarded).steps == 0


TINY = {
    "run_name": "tiny", "dataset_type": "synthetic", "hardware": "cpu", "steps": 12, "per_device_batch_size": 1,
    "attention": "dot_product", "base_emb_dim": 32, "base_num_query_heads": 2, "base_num_kv_heads": 2, "head_dim": 16,
    "base_mlp_dim": 64, "base_num_decoder_layers": 2, "max_target_length": 32, "vocab_size": 128,
    "enable_checkpointing": False, "enable_goodput_recording": False, "log_config": False,
    "skip_jax_distributed_system": True,
}  # fmt: skip


@pytest.mark.skipif(sys.version_info < (3, 12), reason="MaxText needs Python 3.12 and the newest JAX")
@pytest.mark.filterwarnings("ignore")
def test_a_guard_in_maxtext(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from maxtext.trainers.pre_train import train

    losses: list[float] = []
    logger = train.metric_logger.MetricLogger
    write = logger.buffer_and_write_metrics

    def recorded(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        losses.append(float(metrics["scalar"]["learning/loss"]))
        return write(self, metrics, *args, **kwargs)

    monkeypatch.setattr(logger, "buffer_and_write_metrics", recorded)
    base = importlib.resources.files("maxtext").joinpath("configs", "base.yml")
    settings = TINY | {"base_output_directory": tmp_path}
    words = ["train.py", str(base), *(f"{name}={value}" for name, value in settings.items())]
    train.main(words)
    plain, compiles = losses.copy(), train.train_utils.jit_train_and_eval_step
    losses.clear()
    with guard_maxtext(train, budget=0.9) as watches:
        train.main(words)
    assert losses == plain
    (watch,) = watches
    assert watch.steps == len(plain) == 12
    report = watch.report()
    assert not report.findings, str(report)
    assert {layer.name for layer in report.layers if layer.runs} >= {"witness", "ring", "abft"}, str(report)
    assert train.train_utils.jit_train_and_eval_step is compiles
