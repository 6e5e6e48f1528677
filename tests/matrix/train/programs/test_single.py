"""The main job's step under `abft`: every product is checked, and any fault worth mentioning is undone, bit for bit."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import sdc
from sdc.faults.kinds import BitFlip
from sdc.program.reports import Place, Values
from sdc.program.selectors import products
from sdc.train.programs.config import tiny
from sdc.train.programs.device import described_batch, initial_state, plain, sharded
from sdc.train.programs.placement import place


class Outputs:
    """A rule that reports the products, and notes how many columns each has."""

    def __init__(self) -> None:
        self.columns: dict[str, int] = {}

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Any]:
        [out] = bind(*inputs)
        (_, contracted), (_, batch) = place.params["dimension_numbers"]
        b = inputs[1]
        self.columns[place.site.name] = math.prod(
            size for axis, size in enumerate(b.shape) if axis not in (*contracted, *batch)
        )
        return [out], out

    def merge(self, total: Any, new: Any) -> Any:
        raise AssertionError("no product of the step lies in a while loop")


class Prepared(NamedTuple):
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    sites: list[sdc.Site]
    values: dict[str, np.ndarray]
    columns: dict[str, int]


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    config = tiny()
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, layers=2), sequence_length=32, batch_size=2
    )
    work, placement = sharded(config), place(twins=None, data=1, model=1, devices=jax.devices()[:1])
    step, batch = plain(work, placement), described_batch(config, placement)
    tokens = np.random.default_rng(0).integers(0, 320, batch.shape).astype(np.int32)
    arguments = initial_state(work, placement, 0), jax.device_put(tokens, batch.sharding)
    run = jax.jit(sdc.abft(sdc.strike(step, products), mode="correct"))
    rule = Outputs()
    _, values = jax.jit(sdc.rewrite(step, products, rule))(*arguments)
    sites = sdc.sites(step, *arguments, where=products)
    return Prepared(run, arguments, sites, {name: np.asarray(value) for name, value in values.items()}, rule.columns)


def test_eighty_random_faults_leave_the_same_bits(prepared: Prepared) -> None:
    """Flips of random bits that change an element by 1 % of its row's rms or more, in any product and layer."""
    run, arguments, sites, values, columns = prepared
    (clean, _), flags = run(sdc.no_strike(axes=["data", "model"]), *arguments)
    assert sum(int(flag.checked.sum()) for flag in flags.values()) > 5_000
    assert not any(int(flag.flagged.sum()) for flag in flags.values())

    rng = np.random.default_rng(0)
    struck = 0
    while struck < 80:
        site = sites[rng.integers(len(sites))]
        value = values[site.name]
        # Mesh axes of size one, and the iterations.
        where = tuple(int(rng.integers(size)) for size in value.shape[: len(site.dims)])
        rows = value[where].reshape(-1, columns[site.name])
        element, bit = int(rng.integers(rows.size)), int(rng.integers(32))
        row = rows[element // rows.shape[1]]
        old = rows.reshape(-1)[element : element + 1]
        new = (old.view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32)
        with np.errstate(invalid="ignore"):
            changed = abs(float(new[0]) - float(old[0]))
        rms = np.sqrt(np.mean(row.astype(np.float64) ** 2))
        if rms == 0 or changed < 0.01 * rms:
            continue
        struck += 1
        iteration = where[len(site.mesh) :]
        strike = sdc.strike_on(site, BitFlip(bits=(bit,)), element, iteration=iteration, axes=["data", "model"])
        (mended, events), flags = run(strike, *arguments)
        found = flags[site.name]
        assert int(events[site.name].changed.sum()) == 1
        assert int(found.corrected[where]) == int(found.corrected.sum()) == 1, (site.name, bit, old, new)
        assert int(found.wrong.element[where][0]) == element
        for a, b in zip(jax.tree.leaves(mended), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))
