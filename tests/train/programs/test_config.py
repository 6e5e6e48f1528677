import dataclasses
import math
from typing import Any

import jax
import pytest
from hypothesis import given, strategies as st

from sdc.settings import SettingError
from sdc.train import Training, Workload
from sdc.train.programs.config import PRESETS, check, get_config, tiny
from sdc.train.programs.model import init_params


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "mini"])  # which tests added
def test_presets_are_named_documented_and_run_on_one_device(name: str) -> None:
    config = get_config(name)
    assert config.name == name
    docstring = PRESETS[name].__doc__ or ""
    assert all(word in docstring for word in ("Command:", "Time:", "Expected:"))
    check(config, data=1, model=1)


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"config=huge: unknown; choose one of tiny, bench, .*llama3_8b"):
        get_config("huge")


@pytest.mark.parametrize(("name", "global_batch", "layers"), [("llama3_8b_16l", 16, 16), ("llama3_8b", 256, 32)])
def test_the_8b_presets_are_those_of_the_study(name: str, global_batch: int, layers: int) -> None:
    config = get_config(name)
    model, optimizer = config.model, config.optimizer
    assert (model.heads, model.kv_heads, model.head_dim, model.width) == (32, 8, 128, 4096)
    assert (model.layers, model.ffn_width, model.dtype, config.sequence_length) == (layers, 16384, "bfloat16", 4096)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip) == (0.9, 0.99, 0.01, 1.0)
    assert (optimizer.warmup_steps, optimizer.total_steps) == (2_000, 100_000)
    assert (config.batch_size, config.batch_size * config.microsteps) == (1, global_batch)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (1, 3, "model=3: heads 8 of config tiny is not divisible by 3; choose 1 or 2 or 4"),
        (1, 8, "model=8: kv_heads 4 of config tiny is not divisible by 8; choose 1 or 2 or 4"),
        (3, 1, "data=3: width 64 of config tiny is not divisible by 3; choose 1 or 2 or 4"),
        (8, 1, "data=8: batch_size 4 of config tiny is not divisible by 8; choose 1 or 2 or 4"),
        (0, 1, "data=0: expected at least 1 rank"),
        (1, -2, "model=-2: expected at least 1 rank"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(data: int, model: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check(tiny(), data, model)
    assert "\n" not in str(error.value)


def test_query_heads_must_divide_over_key_heads() -> None:
    uneven = dataclasses.replace(tiny(), model=dataclasses.replace(tiny().model, heads=6))
    with pytest.raises(ValueError, match="heads=6 is not divisible by kv_heads=4"):
        check(uneven, 1, 1)


def test_parameters_are_counted_before_anything_is_allocated() -> None:
    published = {"smollm2_135m": 134_515_008, "llama3_8b_16l": 4_943_122_432, "llama3_8b": 8_835_567_616}
    assert {name: get_config(name).model.parameters for name in published} == published
    for model in (tiny().model, dataclasses.replace(tiny().model, tied=True)):
        params = jax.eval_shape(lambda model=model: init_params(model, jax.random.key(0)))
        assert model.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width is 0; expected a whole number of at least 1"),
        ({"layers": -1}, "layers is -1; expected a whole number"),
        ({"head_dim": 1.5}, "head_dim is 1.5; expected a whole number"),
        ({"layers": 10**9}, "49,280,000,041,024 parameters"),
        (
            {"width": 10**18, "vocab_size": 2**60},
            "TiB per device; expected at most 16 TiB; choose",
        ),
    ],
)
def test_a_size_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    config = dataclasses.replace(tiny(), model=dataclasses.replace(tiny().model, **change))
    with pytest.raises(SettingError, match=f"config=tiny: .*{message}"):
        check(config, 1, 1)
    with pytest.raises(SettingError, match="config=tiny: "):
        Training(workload=Workload(config=config)).check()


def test_a_large_common_divisor_is_not_searched() -> None:
    sizes = dict.fromkeys(("vocab_size", "heads", "kv_heads", "ffn_width"), 2**62)
    config = dataclasses.replace(tiny(), model=dataclasses.replace(tiny().model, **sizes), sequence_length=2**62)
    with pytest.raises(SettingError, match=r"model=3: .*; choose 1 or 2 or 4 or "):
        check(config, 1, 3)


@given(data=st.integers(1, 12), model=st.integers(1, 12))
def test_exactly_the_divisors_are_accepted(data: int, model: int) -> None:
    config = tiny()
    sizes = config.model
    over_model = math.gcd(sizes.heads, sizes.kv_heads, sizes.ffn_width, sizes.vocab_size, config.sequence_length)
    fits = over_model % model == 0 and math.gcd(sizes.width, config.batch_size) % data == 0
    try:
        check(config, data, model)
    except ValueError:
        assert not fits
    else:
        assert fits
