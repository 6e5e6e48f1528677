"""Four properties of every tool on steps of other packages, unmodified.

(a) A transformed step computes what the plain one does, to the bit where nothing is selected. (b) One struck bit is
named at its operation, with a line of this project's user: `subjects.py`. (c) No check raises a false alarm, whatever
the scale, and a struck product is flagged and corrected. (d) Lock-step twins find exactly what was injected.
"""

import functools
import importlib.util
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdc
from sdc.guarding import witnessed_share
from sdc.program import arithmetic, named, operations
from sdc.program.interpreter import rewrite

from .subjects import SUBJECTS, Made

CASES = [
    pytest.param(name, marks=() if subject.fast else pytest.mark.conformance) for name, subject in SUBJECTS.items()
]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of other packages
MOMENT = sdc.Moment(jax.random.key(3), jnp.int32(0))


@functools.cache
def made(name: str) -> Made:
    """The step, and what its package asks of JAX: all of them promote types."""
    assert importlib.util.find_spec(SUBJECTS[name].package), f"{name} needs {SUBJECTS[name].package}: see setup.cfg"
    with jax.numpy_dtype_promotion("standard"):
        return SUBJECTS[name].make()


@functools.cache
def plain(name: str) -> Any:
    step, arguments = made(name)
    return jax.device_get(run(step, *arguments))


def run(step: Any, *arguments: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(step)(*arguments)


def sites_of(name: str, where: Any) -> list[sdc.Site]:
    step, arguments = made(name)
    with jax.numpy_dtype_promotion("standard"):
        return sdc.sites(step, *arguments, where=where)


def strikable(name: str) -> list[sdc.Site]:
    """Operations that compute float32, which faults can hit."""
    found = sites_of(name, operations & arithmetic)
    return [site for site in found if site.outputs[0].size and site.outputs[0].dtype == jnp.float32]


def checkable(name: str) -> list[sdc.Site]:
    """Dense products of real numbers, which faults can hit."""
    found = (site for site in sites_of(name, operations) if site.primitive == "dot_general")
    return [site for site in found if site.outputs[0].dtype == jnp.float32]


def once(site: sdc.Site, bit: int) -> sdc.Strike:
    """One bit of the first element, in the first iteration of every loop."""
    return sdc.strike_on(site, f"bitflip,bits={bit}", 0, iteration=(0,) * site.loops)


def assert_same(ours: Any, theirs: Any, *, bits: bool = True, rtol: float = 1e-4) -> None:
    for a, b in zip(jax.tree.leaves(jax.device_get(ours)), jax.tree.leaves(theirs), strict=True):
        if bits or not np.issubdtype(np.asarray(a).dtype, np.floating):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        else:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5)


class Never:
    def __call__(self, place: Any, bind: Any, *inputs: Any) -> Any:
        raise AssertionError("nothing is selected")

    def merge(self, total: Any, new: Any) -> Any:
        raise AssertionError("nothing is selected")


@pytest.mark.parametrize("name", CASES)
def test_transformed_is_plain(name: str) -> None:
    step, arguments = made(name)
    out, reports = run(rewrite(step, lambda site: False, Never()), *arguments)
    assert len(reports) == 0
    assert_same(out, plain(name))
    out, digests = run(sdc.fingerprint(step, operations & arithmetic), *arguments)
    assert len(digests) == len(sites_of(name, operations & arithmetic))
    assert_same(out, plain(name), bits=False)
    out, witnessed = run(sdc.witness(step), *arguments)
    assert 0 <= witnessed_share(witnessed) <= 1
    assert_same(out, plain(name), bits=False)


@pytest.mark.parametrize("name", CASES)
def test_a_struck_bit_is_named_at_the_line_of_the_user(name: str) -> None:
    """The operation in the middle of the program that a fault can hit."""
    step, arguments = made(name)
    sites = strikable(name)
    site = sites[len(sites) // 2]
    assert os.path.basename(site.source.partition(":")[0]) == "subjects.py"
    where = named(site.name)
    struck = sdc.fingerprint(sdc.strike(step, where), operations & arithmetic)
    hit = once(site, 22)
    compiled = jax.jit(struck)
    with jax.numpy_dtype_promotion("standard"):
        healthy, found = (compiled(given, *arguments)[1] for given in (sdc.no_strike(), hit))
    first = sdc.first_difference(healthy, found)
    assert first is not None
    assert first.site.name == site.name
    assert first.site.source == site.source


@pytest.mark.parametrize("name", [case for case in CASES if SUBJECTS[str(case.values[0])].products])
def test_products_raise_no_alarm_and_are_corrected(name: str) -> None:
    """A healthy step has the first tier alone; of every second package, so has a struck one."""
    step, arguments = made(name)
    checked: Any = sdc.abft(step, examine="again")
    for scale in (1e-4, 1.0, 1e3):
        scaled = jax.tree.map(lambda x, by=scale: x * x.dtype.type(by) if x.dtype == np.float32 else x, arguments)
        with jax.numpy_dtype_promotion("standard"):
            out, flags = checked(*(scaled if scale != 1 else arguments))
        assert sum(int(jnp.sum(flag.checked)) for flag in flags.values()) > 0
        assert not any(jnp.any(flag.flagged) for flag in flags.values()), scale
        if scale == 1:
            assert_same(out, plain(name), bits=False)
    for site in reversed(checkable(name)):
        where = named(site.name)
        struck = _examined(sdc.strike(step, where), where, again=bool(list(SUBJECTS).index(name) % 2))
        with jax.numpy_dtype_promotion("standard"):
            (healthy, _), _ = struck(sdc.no_strike(), *arguments)
            (mended, events), flags = struck(once(site, 30), *arguments)
        if sum(int(jnp.sum(event.changed)) for event in events.values()):  # the first iteration may not reach it
            break
    else:
        raise AssertionError("no product was struck")
    [flag] = flags.values()
    assert int(jnp.sum(flag.flagged)) == int(jnp.sum(flag.confirmed)) == int(jnp.sum(flag.corrected)) == 1
    # XLA may compute a small product another way the second time.
    assert_same(mended, jax.device_get(healthy), bits=False)


def _examined(step: Any, where: Any, *, again: bool) -> Any:
    within = sdc.abft(step, where, mode="correct")
    return sdc.abft(step, where, mode="correct", examine="again") if again else jax.jit(within)


@pytest.mark.parametrize("name", CASES)
def test_twins_find_what_was_injected(name: str) -> None:
    step, arguments = made(name)
    sites = [site for site in strikable(name) if len(site.outputs) == 1]
    where = named(*{sites[number * len(sites) // 4].name for number in range(1, 4)})
    fault = sdc.Fault(sdc.faults.BitFlip(bits=(20,)), 0.2, where, at={"twin": 1})
    twins = sdc.lockstep(sdc.inject(step, [fault]), "twin", where=where)
    (_, events), mismatches = run(jax.vmap(twins, in_axes=None, axis_name="twin", axis_size=2), MOMENT, *arguments)
    injected = {site: int(np.sum(event.changed[1])) for site, event in events.items()}
    found = {site: int(np.sum(report.difference.mismatched[0][..., 1])) for site, report in mismatches.items()}
    assert found == injected
    assert all(int(np.sum(event.changed[0])) == 0 for event in events.values())
    assert sum(int(np.sum(report.difference.checked[0])) for report in mismatches.values()) > 0
