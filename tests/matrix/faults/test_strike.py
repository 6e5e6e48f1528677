"""One program serves every fault; what is hit is what was asked for, and is found where it is."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdc
from sdc.faults import BitFlip
from sdc.program import primitive, scope
from sdc.records import encode
from sdc.tools.commands.reports import DiffCommand, diff
from sdc.twins import TraceWriter
from tests.sdc.faults.test_strike import CLEAN, PARAMS, SITES, WHERE, X, loss, struck_and_traced


def random_strike(rng: np.random.Generator, sites: list[sdc.Site]) -> tuple[sdc.Site, dict[str, Any], Any]:
    """A site, and where in it; a flip of the highest mantissa bit changes any number."""
    site = sites[rng.integers(len(sites))]
    place = {
        "iteration": (int(rng.integers(3)),) if site.loops else (),
        "device": {"model": int(rng.integers(2))},
    }
    element = int(rng.integers(np.prod(site.outputs[0].shape)))
    return site, place, sdc.strike_on(site, BitFlip(bits=(22,)), element, axes=["model"], **place)


def test_a_hundred_flips_in_the_backward_pass_are_located(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At exactly the operation, layer, device and line, by `sdc diff`, and no program is compiled again."""
    manifest = {"program": "of this test", "where": WHERE.text}

    def trace(name: str, digests: Any) -> Path:
        with TraceWriter(tmp_path / name, manifest) as writer:
            writer.add(0, CLEAN[2])
            writer.add(1, digests)
        return tmp_path / name

    golden = trace("golden", CLEAN[2])
    rng = np.random.default_rng(7)
    backward = [site for site in SITES if site.direction == "bwd"]
    assert len(backward) > 5
    for number in range(100):
        site, place, strike = random_strike(rng, backward)
        _, changed, digests = struck_and_traced(strike, PARAMS, X)
        assert {name: int(count) for name, count in changed.items() if count} == {site.name: 1}
        assert diff(DiffCommand(golden, trace(str(number), digests), json=True)) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["first"] == json.loads(
            encode(
                {
                    "step": 1,
                    "site": site.name,
                    "operation": site.primitive,
                    "direction": "bwd",
                    "scope": site.scope,
                    "source": site.source,
                    "iteration": list(place["iteration"]),
                    "layer": place["iteration"][0] if site.loops else None,
                    "devices": [place["device"]],
                    "outputs": [0],
                }
            )
        )
        assert "test_strike.py" in found["first"]["source"]
    assert struck_and_traced._cache_size() == 1


def test_lockstep_and_fingerprint_see_what_was_injected() -> None:
    """Two transformations of one operation, probe or not: the outer one sees what the inner one made of it."""
    where = primitive("dot_general") | scope("*ffn*") & primitive("add", "mul", "psum")
    fault = sdc.Fault(BitFlip(), 0.02, where, at={"twin": 1})
    twins = sdc.lockstep(sdc.inject(loss_and_gradient, [fault]), "twin", where=where)
    moment = sdc.Moment(jax.random.key(3), jnp.int32(0))
    mapped = jax.vmap(twins, (None, None, None), axis_name="twin", axis_size=2)
    run = jax.jit(jax.vmap(mapped, (None, 0, None), axis_name="model"))
    (_, events), mismatches = run(moment, SHARDS, X)
    hit = 0
    for name, event in events.items():  # [model, twin, layer]
        found = np.asarray(mismatches[name].difference.mismatched)[:, 0]  # [model, layer, twin], as twin 0 sees it
        np.testing.assert_array_equal(event.changed, np.moveaxis(found, -1, 1))
        hit += int(event.changed.sum())
    assert hit > 20


SHARDS = {"up": np.stack(np.split(PARAMS["up"], 2, 2)), "down": np.stack(np.split(PARAMS["down"], 2, 1))}


def loss_and_gradient(params: Any, x: Any) -> Any:
    return jax.value_and_grad(loss)(params, x)
