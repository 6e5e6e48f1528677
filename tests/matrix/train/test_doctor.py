"""The doctor finds differences that were made, in real processes, and names what makes them."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc.schema import Environment
from sdc.train.doctor.diagnosis import Examination, compare_hosts, decide, examine
from sdc.train.doctor.laboratory import Laboratory, Request, ask
from sdc.train.doctor.operations import measure, standard
from sdc.train.doctor.results import Answer, Check, Examined
from sdc.train.doctor.surroundings import describe_host, settings_of
from sdc.verdict import Verdict

ROOT = Path(__file__).resolve().parents[3]
PLAIN = {
    **{key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "NPROC", "OMP_"))},
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "NPROC": "2",
}
"""An environment without what the suite sets."""
SEEDED, FLAGGED, BROKEN = (f"tests.train.doctor_suite:{name}" for name in ("seeded", "flagged", "broken"))
OTHER = "--xla_cpu_enable_fast_math=true --xla_allow_excess_precision=false"


def by_name(found: Examined) -> dict[str, Check]:
    return {check.name: check for check in found.checks}


@pytest.fixture(scope="module")
def seeded() -> Examined:
    return examine(Examination(devices=2), environ=PLAIN, suite=SEEDED)


@pytest.fixture(scope="module")
def elsewhere() -> Examined:
    """A host with more threads and with flags that change bits."""
    return examine(Examination(), environ={**PLAIN, "NPROC": "8", "XLA_FLAGS": OTHER}, suite=FLAGGED)


def test_what_differs_is_named(seeded: Examined) -> None:
    checks = by_name(seeded)
    assert checks["twice in one process"].operations == ["counter"]
    # A counter begins anew in each process: there it is like itself, which is no reason to call it steady.
    assert checks["in two processes"].operations == ["process", "unless set"]
    assert checks["order of devices"].operations == ["order"]
    assert checks["compilation cache"].outcome == "ok"
    assert (seeded.verdict.fitness, seeded.verdict.code) == ("NOT FIT", 1)
    assert "order of devices" in seeded.sentence


def test_the_setting_is_found_or_it_is_said_that_none_is(seeded: Examined) -> None:
    check = by_name(seeded)["in two processes"]
    assert check.causes == ["--xla_cpu_enable_fast_math"]
    assert check.lines == ['export XLA_FLAGS="--xla_cpu_enable_fast_math=false"']
    assert "unless set: the difference disappears with --xla_cpu_enable_fast_math=false" in check.sentence
    assert "process: the 3 settings tried do not explain the difference" in check.sentence
    for name in ("twice in one process", "order of devices"):
        found = by_name(seeded)[name]
        assert found.causes == found.lines == []
        assert "settings tried do not explain the difference" in found.sentence  # it was seen again
        assert "faulty device is a possible cause; run sdc burnin" in found.sentence


def test_settings_that_decide_bits_here_are_named(elsewhere: Examined) -> None:
    checks = by_name(elsewhere)
    assert elsewhere.verdict.fitness == "FIT"  # what is set is a property, and no failure
    assert checks["settings here"].causes == ["--xla_allow_excess_precision", "--xla_cpu_enable_fast_math"]
    assert set(checks["settings here"].operations) == {"sum", "roundings"}
    pool = checks["other thread pool"]
    assert (pool.outcome, pool.operations, pool.causes) == ("information", ["product"], ["NPROC"])
    assert "product: bits differ between 8 and 1 threads" in pool.sentence
    assert "compare only hosts with equal NPROC" in pool.sentence


def compared(answer: Answer, other: Examined, environ: dict[str, str]) -> dict[str, Check]:
    lab = Laboratory(environ, Request(suite=FLAGGED), 60)
    return {check.name: check for check in compare_hosts(lab, answer, other, describe_host())}


def test_of_two_hosts_the_deciding_settings_are_named(elsewhere: Examined) -> None:
    """Whoever wrote the file had a larger pool and two flags, and this host has an option of JAX."""
    environ = {**PLAIN, "JAX_ENABLE_X64": "1"}
    checks = compared(ask(Request(suite=FLAGGED), environ, limit=60), elsewhere, environ)
    check = checks["bits of both hosts"]
    assert check.outcome == "differs"
    assert check.operations == ["product", "sum", "roundings", "types"]
    assert set(check.causes) == {*settings_of({"XLA_FLAGS": OTHER}), "NPROC", "JAX_ENABLE_X64"}
    for said in (
        "product: caused by NPROC=8 on the other host, NPROC=2 on this host",
        "sum: caused by --xla_cpu_enable_fast_math=true on the other host, no --xla_cpu_enable_fast_math on this",
        "roundings: caused by --xla_allow_excess_precision=false on the other host",
        "types: caused by no JAX_ENABLE_X64 on the other host, JAX_ENABLE_X64=1 on this host",
    ):
        assert said in check.sentence
    flags, threads, option = sorted(check.lines, key=len, reverse=True)
    assert set(flags.partition("=")[2].strip('"').split()) == set(OTHER.split())
    assert {threads, option} == {"export NPROC=8", "unset JAX_ENABLE_X64"}
    said = "options.jax_enable_x64: this host has True, the other has False"
    assert said in checks["environments of both hosts"].sentence


def answer_of(found: Examined) -> Answer:
    """What a host gives that is like the one of these results."""
    return Answer(
        format="jax-sdc doctor child",
        environment=msgspec.convert(msgspec.to_builtins(found.environment), Environment),
        operations=[msgspec.structs.replace(row) for row in found.operations],
        hits=0,
        seconds=0.0,
    )


@pytest.mark.parametrize(
    ("changed", "gone", "verdict", "code", "said"),
    [
        ({}, (), Verdict.CLEAN, 0, "5 operations gave the same bits"),
        ({"problem": "it crashed"}, (), Verdict.CLEAN, 3, "(not compared: steady did not run on there)"),
        ({}, ("sum", "types"), Verdict.CLEAN, 3, "(not compared: sum, types did not run on there)"),
        ({"devices": 2}, (), Verdict.CLEAN, 3, "steady ran on different numbers of devices (1 devices here, 2 there"),
        ({"digests": ["0" * 16]}, (), Verdict.CLEAN, 1, "steady: the bits differ from those on there"),
        ({"permuted": "0" * 16}, (), Verdict.CLEAN, 1, "steady: the bits differed between the runs on there"),
        ({}, (), Verdict.CORRUPT, 1, "there is NOT FIT: its reason"),
        ({}, (), Verdict.INCONCLUSIVE, 3, "there is INCONCLUSIVE: its reason"),
    ],
)
def test_what_the_other_host_did_not_show_is_missed(
    elsewhere: Examined, changed: dict[str, Any], gone: tuple[str, ...], verdict: Verdict, code: int, said: str
) -> None:
    """Only operations that ran on both hosts and repeated their bits there are compared, and the others are named."""
    rows = [row for row in elsewhere.operations if row.operation not in gone]
    rows = [msgspec.structs.replace(row, **(changed if row.operation == "steady" else {})) for row in rows]
    host = msgspec.structs.replace(elsewhere.host, name="there")
    other = msgspec.structs.replace(elsewhere, operations=rows, verdict=verdict, sentence="its reason", host=host)
    checks = compared(answer_of(elsewhere), other, {**PLAIN, "NPROC": "8", "XLA_FLAGS": OTHER})
    assert decide([Check("this host", "run", "ok", ""), *checks.values()])[0].code == code
    assert said in " ".join(each.sentence for each in checks.values())


def test_what_no_setting_explains_is_left_open(elsewhere: Examined) -> None:
    """A digest that is other on a like host: no setting and no library is blamed, nor the hardware for certain."""
    answer = answer_of(elsewhere)
    environ = {**PLAIN, "NPROC": "8", "XLA_FLAGS": OTHER}
    checks = compared(answer, elsewhere, environ)
    assert {check.outcome for check in checks.values()} == {"ok"}
    answer.operations[0].digests = ["0" * 16] * 3
    check = compared(answer, elsewhere, environ)["bits of both hosts"]
    assert (check.outcome, check.operations, check.causes) == ("differs", ["steady"], [])
    assert "steady: no setting explains the difference (with equal programs), and libraries" in check.sentence
    assert "faulty device is a possible cause" in check.sentence
    answer.environment.packages["jaxlib"] = "0.11.0"
    check = compared(answer, elsewhere, environ)["bits of both hosts"]
    assert (
        "the hosts differ in properties that no setting changes: packages.jaxlib: this host has 0.11.0, "
        in check.sentence
    )
    assert "faulty" not in check.sentence


def test_an_operation_that_cannot_be_run_leaves_it_open() -> None:
    found = examine(Examination(), environ=PLAIN, suite=BROKEN)
    assert (found.verdict.fitness, found.verdict.code) == ("INCONCLUSIVE", 3)
    check = by_name(found)["all operations"]
    assert (check.operations, check.sentence) == (["refused"], "refused: RuntimeError: no such unit")


def test_what_cannot_be_imported_leaves_it_open() -> None:
    found = examine(Examination(), environ=PLAIN, suite="tests.train.doctor_suite:nothing")
    assert found.verdict.code == 3
    assert found.operations == []
    assert "AttributeError" in by_name(found)["in two processes"].sentence


def test_a_flag_that_is_unknown_ends_a_child_and_is_told() -> None:
    environ = {**PLAIN, "XLA_FLAGS": "--xla_no_such_flag=1"}
    found = examine(Examination(), environ=environ, suite=BROKEN)
    assert found.verdict.code == 3
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in by_name(found)["twice in one process"].sentence


def test_the_standard_operations_repeat_themselves_here() -> None:
    """In this process, with eight devices: all can be run, also with the devices in the opposite order."""
    import jax

    rows = measure(standard({"config": None}), jax.devices()[:2], runs=2)
    assert len(rows) == 18
    assert [row.problem for row in rows if row.problem] == []
    assert all(len(set(row.digests)) == 1 and row.permuted in (None, row.digests[0]) for row in rows)
    assert {row.operation for row in rows if row.devices == 2} == {
        "psum",
        "psum_scatter",
        "all_gather",
        "training step",
    }


def test_a_child_measures_only_what_it_is_asked_for() -> None:
    answer = ask(Request(suite=SEEDED, only=["steady"], runs=2), PLAIN, limit=60)
    [row] = answer.operations
    assert (row.operation, len(row.digests), answer.hits) == ("steady", 2, 0)
    assert answer.environment.cpu_threads == "2"
