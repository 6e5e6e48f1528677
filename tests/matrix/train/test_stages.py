"""The escalation on simulated devices, and what follows from its records: one suspect, several, none, ties, losses."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import pytest

import sdc
from sdc.analysis.host_diff import Opening, explain, judge_pair, resolve_pairs, stage_differs
from sdc.burnin.pair import FOLDERS, PAIR, PAIR_FORMAT, Pair, TwinRow, contradictions
from sdc.records.storage import RecordError
from sdc.tools import cli
from sdc.train import run, stages
from sdc.train.specs import ComparedTwins, FullLoad, Operations
from sdc.verdict import SIMULATED, Verdict
from tests.train.runs import WORKLOAD, loaded

FAULT = "bitflip,rate=1e-2,site=fwd/ffn"


def opening(twins: int, processes: int = 2) -> Opening:
    kind: Literal["pair", "pool"] = "pair" if twins == 2 else "pool"
    hosts = [TwinRow(twin=twin, host=name, processes=[twin], devices=[]) for twin, name in enumerate("abcde"[:twins])]
    return Opening(kind=kind, id="1", created="now", hosts=hosts, processes=processes, steps=2, settings={})


def compared(folder: Path, *faults: str, twins: int = 2, model: int = 1) -> Pair:
    """The result of a comparison with simulated faults, which must not contradict itself; of a pool the first stage."""
    settings: dict[str, Any] = {"workload": WORKLOAD, "steps": 2, "twins": twins, "model": model, "faults": faults}
    there: dict[str, Any] = {"loaded": loaded(WORKLOAD), "devices": jax.devices()[: twins * model]}
    if twins == 2:
        stages.escalate(FullLoad(**settings, folder=folder), differs=stage_differs, **there)
    else:  # a program of half the size, whose record says the same
        run(ComparedTwins(**settings, folder=folder / FOLDERS["step"]), **there)
    pair = judge_pair(folder, opening(twins), ended="now", seconds=1.0)
    assert list(contradictions(pair)) == []
    PAIR_FORMAT.write(folder / PAIR, pair)
    assert PAIR_FORMAT.read(folder) == pair
    return pair


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pair that agrees."""
    folder = tmp_path_factory.mktemp("pairs") / "clean"
    compared(folder)
    return folder


def test_a_rank_of_a_pair_is_found_down_to_the_operation(tmp_path: Path) -> None:
    pair = compared(tmp_path / "pair", f"{FAULT},model=1", model=2)
    assert [(stage.name, stage.verdict, stage.hits) for stage in pair.stages] == [
        ("step", "corrupt", 2), ("probes", "corrupt", 2), ("operations", "corrupt", 1)
    ]  # fmt: skip
    found = pair.difference
    assert found is not None
    assert {(rank.twin, rank.data, rank.model) for rank in found.ranks} == {(1, 0, 1)}
    assert (found.sites, found.course) == (["fwd/ffn"], "persistent")
    assert found.operation is not None
    assert (found.operation.site, found.operation.ranks) == ("fwd/ffn", [{"twin": 1, "data": 0, "model": 1}])
    assert found.mismatched == pair.stages[0].mismatched > 0
    assert (pair.suspects, pair.undecided) == ([], ["a", "b"])
    assert pair.sentences[0].startswith("SIMULATED: hosts a and b differ: rank model=1, layers 0 and 1, ffn, ")
    assert "test with a third host, or swap parts, to find out which of them is wrong" in pair.sentences[0]


def test_a_fault_that_does_not_come_again_is_followed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Quiet(ComparedTwins):
        def simulated(self, layers: int) -> tuple[sdc.Fault, ...]:
            return ()

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class QuietOperations(Operations):
        def simulated(self, layers: int) -> tuple[sdc.Fault, ...]:
            return ()

    monkeypatch.setitem(stages.JOBS, "probes", Quiet)
    monkeypatch.setitem(stages.JOBS, "operations", QuietOperations)
    pair = compared(tmp_path / "pair", f"{FAULT},onset=1")
    assert [(stage.name, stage.verdict, stage.steps) for stage in pair.stages] == [
        ("step", "corrupt", 2), ("probes", "clean", 2), ("operations", "clean", 2)
    ]  # fmt: skip
    assert pair.verdict is Verdict.CORRUPT
    assert pair.difference is not None
    assert (pair.difference.course, pair.difference.operation) == ("transient", None)
    assert "not found again in the stages probes (2 steps) and operations (2 steps)" in pair.sentences[0]


def test_a_pair_that_agrees(clean: Path) -> None:
    pair = PAIR_FORMAT.read(clean)
    assert (pair.verdict, pair.evidence, len(pair.stages)) == (Verdict.CLEAN, ["twins"], 1)
    assert "no mismatch in " in pair.sentences[0]
    alone = judge_pair(clean, opening(2, processes=1), ended="now", seconds=1.0)
    assert (alone.verdict, list(contradictions(alone))) == (Verdict.INCONCLUSIVE, [])
    lost = judge_pair(clean, opening(2), ended="now", seconds=1.0, lost="process 1 was lost")
    assert (lost.verdict, list(contradictions(lost))) == (Verdict.INCONCLUSIVE, [])


def test_a_majority_names_two_suspects(tmp_path: Path) -> None:
    pool = compared(tmp_path / "pool", f"{FAULT},twin=1", f"{FAULT},twin=4", twins=5)
    assert (pool.suspects, pool.undecided) == (["b", "e"], [])
    assert "hosts b and e differ from the majority of 5 hosts" in pool.sentences[0]
    assert pool.next == [SIMULATED]  # the faults are


def test_a_tie_names_nobody(tmp_path: Path) -> None:
    """Two hosts that are wrong in the same way outvote nobody, and neither do two that are right."""
    pool = compared(
        tmp_path / "pool",
        "scale,rate=1,factor=2,site=fwd/ffn,twin=2",
        "scale,rate=1,factor=2,site=fwd/ffn,twin=3",
        twins=4,
    )
    assert (pool.verdict, pool.suspects, pool.undecided) == (Verdict.CORRUPT, [], ["a", "b", "c", "d"])
    assert "no majority among 4 hosts shows which of a, b, c and d is wrong" in pool.sentences[0]


def result(clean: Path, a: str, b: str, verdict: Verdict) -> Pair:
    """A result as two other hosts would have had it."""
    pair = PAIR_FORMAT.read(clean)
    pair.hosts = [TwinRow(twin=twin, host=host, processes=[twin], devices=[]) for twin, host in enumerate((a, b))]
    pair.verdict = verdict
    return pair


def test_pairs_together_name_a_host(clean: Path) -> None:
    pairs = [result(clean, "a", "b", Verdict.CORRUPT), result(clean, "a", "c", Verdict.CLEAN)]
    pairs.append(result(clean, "c", "b", Verdict.CORRUPT))
    found = resolve_pairs(pairs)
    assert (found.verdict, found.verdict.code, found.suspects, found.undecided) == (Verdict.CORRUPT, 1, ("b",), ())
    assert resolve_pairs(pairs[:2]).suspects == ("b",)
    assert resolve_pairs(pairs[:1]).undecided == ("a", "b")
    assert resolve_pairs(pairs[1:2]).verdict is Verdict.CLEAN
    assert resolve_pairs([result(clean, "a", "b", Verdict.INCONCLUSIVE)]).verdict.code == 3


def test_files_of_pairs_are_resolved_by_the_command(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = PAIR_FORMAT.read(clean)
    for name, hosts in (("one", "ab"), ("two", "bc")):
        pair.hosts = [TwinRow(twin=twin, host=host, processes=[twin], devices=[]) for twin, host in enumerate(hosts)]
        (tmp_path / name).mkdir()
        PAIR_FORMAT.write(tmp_path / name / PAIR, pair)
    assert cli.run(["pair", "--resolve", str(tmp_path / "one"), str(tmp_path / "two" / PAIR)]) == 0
    assert capsys.readouterr().out.splitlines() == ["PASS", "no pair differs", "a and b agree", "b and c agree"]
    (tmp_path / "two" / PAIR).write_text("{}")
    assert cli.run(["pair", "--resolve", str(tmp_path / "two")]) == 2
    assert "is not a result of sdc pair or sdc pool" in capsys.readouterr().err


def test_the_fewest_hosts_explain_differences() -> None:
    ring = {(a, b): a in "bx" or b in "bx" for a in "abcxy" for b in "abcxy" if a < b}
    assert explain(ring) == [frozenset("bx")]
    assert explain({(f"a{n}", f"b{n}"): True for n in range(20)}) == []


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("suspects", ["a"], "a is a suspect, but there is no majority"),
        ("stages", [], "PASS although nothing was checked"),
        ("lost", "process 1 was lost", "PASS although a stage did not run to the end"),
        ("undecided", ["z"], "z was not compared"),
    ],
)
def test_results_that_contradict_themselves_are_refused(
    clean: Path, tmp_path: Path, key: str, value: object, told: str
) -> None:
    pair = PAIR_FORMAT.read(clean)
    setattr(pair, key, value)
    with pytest.raises(ValueError, match=told):
        PAIR_FORMAT.write(tmp_path / PAIR, pair)
    (tmp_path / PAIR).write_bytes(PAIR_FORMAT.encode(pair))
    with pytest.raises(RecordError, match=told):
        PAIR_FORMAT.read(tmp_path)
