"""Options of the compiler: read, refused where it has no such, and in every program of a run."""

import jax
import jax.numpy as jnp
import pytest

from sdc.costs import check_options, read_options
from sdc.settings import SettingError
from sdc.train.programs import place

SPLIT = "xla_cpu_parallel_codegen_split_count"


def test_what_options_say() -> None:
    assert read_options([f"{SPLIT}=4", "a_flag=True", "a_text=a=b"]) == {SPLIT: 4, "a_flag": True, "a_text": "a=b"}
    for wrong in (["=1"], ["name"], ["a=1", "a=2"]):
        with pytest.raises(SettingError, match=r"NAME=VALUE|twice"):
            read_options(wrong)


def test_the_compiler_is_asked_first() -> None:
    check_options({})
    check_options({SPLIT: 4})
    with pytest.raises(SettingError, match="no such option"):
        check_options({"xla_cpu_nonsense": 1})
    with pytest.raises(SettingError, match="the compiler rejects this option"):
        check_options({SPLIT: "abc"})


def test_every_program_of_a_placement_has_them() -> None:
    placement = place(twins=None, data=1, model=1, devices=jax.devices()[:1], options={"xla_cpu_nonsense": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_nonsense"):
        placement.jit(lambda x: x + 1.0, donate=False)(jnp.float32(0))
