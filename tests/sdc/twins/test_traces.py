"""First differences, traces on disk, bisection: the right place, or a clear refusal."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sdc
from sdc.faults import BitFlip
from sdc.program import arithmetic, operations, primitive
from sdc.records.format import RecordError, write_sealed
from sdc.records.record import read_manifest
from sdc.twins import NotComparable, TraceWriter, diff, read_trace
from sdc.twins.first_differences import FEW

X = np.linspace(0.1, 1.0, 4, dtype=np.float32)


def layered(x: Any) -> Any:
    """Many scopes: three layers, each with two blocks of several operations, forward and backward."""

    def loss(x: Any) -> Any:
        def layer(x: Any, _: None) -> tuple[Any, None]:
            with jax.named_scope("attn"):
                with jax.named_scope("scores"):
                    y = jnp.exp(jnp.sin(x) * jnp.cos(x) + 0.5) - 0.25
                with jax.named_scope("mix"):
                    x = x + jnp.tanh(y * 2.0) * jnp.sqrt(jnp.abs(y) + 1.0)
            with jax.named_scope("ffn"):
                return x - jnp.log1p(jnp.exp(x * 0.3) + jnp.square(x)) / 3.0, None

        x, _ = lax.scan(layer, x, None, length=3)
        return jnp.sum(x**2)

    with jax.named_scope("gradient"):
        gradient = jax.grad(loss)(x)
    with jax.named_scope("update"):
        return x - 0.1 * gradient


WHERE = operations & arithmetic
SITES = sdc.sites(layered, X, where=WHERE)


def trace(strike: Any, where: Any = WHERE) -> Any:
    return sdc.fingerprint(lambda x: sdc.strike(layered, WHERE)(strike, x)[0], where)(X)[1]


run = jax.jit(trace)
CLEAN = jax.device_get(run(sdc.no_strike()))


def test_order_of_execution_not_of_the_alphabet() -> None:
    """In a backward loop the last layer comes first; iterations come before the sites after them."""
    backward = [site for site in SITES if site.direction == "bwd" and site.loops]
    for site, other in [(backward[0], backward[-1]), (backward[-1], backward[0])]:
        early, late = (
            jax.device_get(run(sdc.strike_on(s, BitFlip(bits=(22,)), 0, iteration=(layer,))))
            for s, layer in ((site, 2), (other, 0))
        )
        both = sdc.Reports(CLEAN.sites, [np.where(a != c, a, b) for a, b, c in zip(early.values(), late.values(),
                                         CLEAN.values(), strict=True)])  # fmt: skip
        found = sdc.first_difference(CLEAN, both)
        assert found is not None
        assert (found.site.name, found.iteration) == (site.name, (2,))
    assert sdc.first_difference(CLEAN, CLEAN) is None


def test_what_agrees_before_is_counted_and_named() -> None:
    site = SITES[-1]
    found = sdc.first_difference(CLEAN, jax.device_get(run(sdc.strike_on(site, BitFlip(bits=(22,)), 1))))
    assert found is not None
    assert found.site.name == site.name
    total = sum(int(np.prod(np.shape(value)[:-2])) for value in CLEAN.values())
    assert found.agreeing == total - 1
    assert [before.name for before, _ in found.before] == [s.name for s in SITES[-6:-1]]
    assert "test_traces.py" in str(found)


def test_a_while_loop_is_named_without_its_iteration() -> None:
    step = lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]  # noqa: E731
    where = primitive("sin")
    (site,) = sdc.sites(step, X, where=where)
    digests = jax.jit(lambda s: sdc.fingerprint(lambda x: sdc.strike(step, where)(s, x)[0], where)(X)[1])
    found = sdc.first_difference(digests(sdc.no_strike()), digests(sdc.strike_on(site, BitFlip(bits=(22,)), 0)))
    assert found is not None
    assert (found.site.name, found.iteration) == ("fwd/sin", ())
    assert "or another operation of the same while loop" in str(found)


def test_fingerprints_of_other_programs_are_refused() -> None:
    other = sdc.fingerprint(layered, primitive("sin"))(X)[1]
    with pytest.raises(ValueError, match=r"fingerprints of different programs: only one of them has '.*'"):
        sdc.first_difference(CLEAN, other)
    longer = sdc.Reports(CLEAN.sites, [np.concatenate([v, v]) for v in CLEAN.values()])
    with pytest.raises(ValueError, match=r"different programs: .* has digests of shape"):
        sdc.first_difference(CLEAN, longer)


@pytest.mark.parametrize("number", range(0, len(SITES), 7))
def test_bisection_ends_at_the_operation(number: int) -> None:
    """With a digest for few operations in each round."""
    site = SITES[number]
    iteration = (1,) if site.loops else ()
    strike = sdc.strike_on(site, BitFlip(bits=(22,)), 2, iteration=iteration)

    def both(where: Any) -> Any:
        # Digests of all sites are at hand; only those that are asked for may be used.
        full = jax.device_get(run(strike))
        chosen = [n for n, s in enumerate(CLEAN.sites) if where(s)]
        pick = lambda r: sdc.Reports([r.sites[n] for n in chosen], [list(r.values())[n] for n in chosen])  # noqa: E731
        return pick(CLEAN), pick(full)

    found = sdc.bisect(CLEAN.sites, both)
    assert found.exact
    assert found.first is not None
    assert (found.first.site.name, found.first.iteration) == (site.name, iteration)
    assert len(found.rounds) > 1
    assert all(round_.sites < len(SITES) / 2 for round_ in found.rounds)
    assert len(SITES) > FEW


def test_bisection_of_nothing_and_of_a_fault_that_does_not_come_back() -> None:
    assert sdc.bisect(CLEAN.sites, lambda where: (CLEAN, CLEAN)).first is None
    struck = jax.device_get(run(sdc.strike_on(SITES[0], BitFlip(bits=(22,)), 0)))
    answers = iter([(CLEAN, struck), (CLEAN, CLEAN)])
    found = sdc.bisect(CLEAN.sites, lambda where: next(answers))
    assert found.first is not None
    assert not found.exact


def written(path: Path, digests: Any, *, steps: int = 3, **manifest: Any) -> Path:
    with TraceWriter(path, {"program": "p", "seed": 0, **manifest}) as writer:
        for step in range(steps):
            writer.add(step, digests if step == steps - 1 else CLEAN, loss=[1.0])
    return path


def test_a_trace_reads_back(tmp_path: Path) -> None:
    golden = read_trace(written(tmp_path / "a", CLEAN))
    assert golden.ended
    assert list(golden.lines) == [0, 1, 2]
    assert golden.sites == CLEAN.sites
    for mine, theirs in zip(golden[1].values(), CLEAN.values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    struck = written(tmp_path / "b", run(sdc.strike_on(SITES[5], BitFlip(bits=(22,)), 0)))
    found = diff(golden, read_trace(struck))
    assert (found.steps, found.step) == ((0, 1, 2), 2)
    assert found.first is not None
    assert found.first.site.name == SITES[5].name
    shorter = read_trace(written(tmp_path / "c", CLEAN, steps=2))
    assert diff(golden, shorter).steps == (0, 1)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"program": "q"}, "program: one has p, the other q"),
        ({"seed": 1}, "seed: one has 0, the other 1"),
    ],
)
def test_traces_that_mean_nothing_together(tmp_path: Path, manifest: dict[str, Any], message: str) -> None:
    a, b = written(tmp_path / "a", CLEAN), written(tmp_path / "b", CLEAN, **manifest)
    with pytest.raises(NotComparable, match=message):
        diff(read_trace(a), read_trace(b))


def damage_digit(path: Path) -> None:
    lines = (path / "trace.jsonl").read_text().splitlines()
    row = json.loads(lines[1])
    row["digests"] = ("0" if row["digests"][0] != "0" else "1") + row["digests"][1:]
    (path / "trace.jsonl").write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]) + "\n")


def cut_off(path: Path) -> None:
    text = (path / "trace.jsonl").read_text()
    (path / "trace.jsonl").write_text(text[:-20])


def drop_line(path: Path) -> None:
    lines = (path / "trace.jsonl").read_text().splitlines(keepends=True)
    (path / "trace.jsonl").write_text("".join([lines[0], *lines[2:]]))


def other_schema(path: Path) -> None:
    write_sealed(path / "manifest.json", {**read_manifest(path), "schema": 9})


def no_sites(path: Path) -> None:
    (path / "sites.json").unlink()


def broken_sites(path: Path) -> None:
    (path / "sites.json").write_text('{"sites": [{"name": 3}]}')


def other_source(path: Path) -> None:
    (path / "sites.json").write_text((path / "sites.json").read_text().replace("test_traces.py", "wrong.py"))


def cut_consistently(path: Path) -> None:
    for name in ("steps.jsonl", "trace.jsonl"):
        (path / name).write_text((path / name).read_text().partition("\n")[0] + "\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_digit, "trace.jsonl line 2 does not match its checksum"),
        (cut_off, "trace.jsonl is cut off after line 2"),
        (drop_line, "trace.jsonl line 2 does not match its checksum"),
        (other_schema, "has layout 9, but this version of jax-sdc reads layout 1"),
        (no_sites, "lacks sites.json; trace that run again"),
        (other_source, r"sites.json is damaged \(its checksum is wrong\)"),
        (cut_consistently, r"steps.jsonl has 1 lines .*, but the run ended with 3"),
        (broken_sites, "sites.json is damaged"),
    ],
)
def test_damaged_traces_are_errors_not_differences(tmp_path: Path, damage: Any, message: str) -> None:
    a, b = written(tmp_path / "a", CLEAN), written(tmp_path / "b", CLEAN)
    damage(b)
    with pytest.raises(RecordError, match=message):
        diff(read_trace(a), read_trace(b))


def test_an_interrupted_trace_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", CLEAN), written(tmp_path / "b", CLEAN)
    (b / "summary.json").unlink()
    cut_off(b)
    steps = (b / "steps.jsonl").read_text().splitlines(keepends=True)
    (b / "steps.jsonl").write_text("".join(steps[:2]))
    half = read_trace(b)
    assert not half.ended
    assert diff(read_trace(a), half).steps == (0, 1)


def test_a_trace_is_continued_and_rolled_back(tmp_path: Path) -> None:
    path = written(tmp_path / "a", CLEAN)
    with TraceWriter(path, {"program": "p", "seed": 0}, at=1) as writer:
        for step in (1, 2):
            writer.add(step, run(sdc.strike_on(SITES[5], BitFlip(bits=(22,)), 0)))
        writer.record.rewind(2)
        writer.add(2, CLEAN)
        writer.add(3, CLEAN)
    continued = read_trace(path)
    assert list(continued.lines) == [0, 1, 2, 3]
    assert diff(read_trace(written(tmp_path / "b", CLEAN)), continued).step == 1
    assert continued.ended


def test_a_trace_of_version_1_is_read() -> None:
    golden = read_trace(Path(__file__).parents[1] / "records" / "records_1" / "trace")
    assert list(golden.lines) == [0, 1]
    assert [site.primitive for site in golden.sites] == ["exp", "exp"]
    assert golden[0]["fwd/jvp()/attn/mix/exp"].ravel()[:2].tolist() == [2292888628, 1245403532]


def test_a_trace_needs_its_program(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the fingerprint of its program"):
        TraceWriter(tmp_path / "a", {})
