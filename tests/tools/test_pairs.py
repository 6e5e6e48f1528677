"""Results of pairs together: nothing inconclusive passes, simulations count for nothing, and nothing seen is
replaced."""

from pathlib import Path

import pytest

from sdc.analysis.host_diff import Opening, combine_results, resolve_pairs
from sdc.burnin.pair import PAIR, PAIR_FORMAT
from sdc.tools.commands.burnin import LedgerAccount
from sdc.tools.commands.pairs import SharedResult
from sdc.verdict import Verdict
from tests.reports import make_pair, put_pair

PASS, FAIL, UNKNOWN = Verdict.CLEAN, Verdict.CORRUPT, Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("pairs", "verdict", "simulated"),
    [
        ([("ab", PASS, False), ("bc", PASS, False)], PASS, False),
        ([("ab", PASS, False), ("bc", UNKNOWN, False)], UNKNOWN, False),
        ([("ab", PASS, False), ("bc", PASS, True)], UNKNOWN, False),
        ([("ab", FAIL, False), ("bc", FAIL, False), ("ac", PASS, True)], FAIL, False),
        ([("ab", PASS, False), ("bc", FAIL, True)], UNKNOWN, False),
        ([("ab", PASS, True), ("bc", FAIL, True)], FAIL, True),
    ],
)
def test_pairs_that_do_not_count_do_not_pass(
    pairs: list[tuple[str, Verdict, bool]], verdict: Verdict, simulated: bool
) -> None:
    found = resolve_pairs([make_pair(each, tuple(hosts), simulated=fault) for hosts, each, fault in pairs])
    assert (found.verdict, found.simulated) == (verdict, simulated)
    assert found.sentences[0].startswith("SIMULATED") == simulated


def test_a_ledger_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ledger").write_text("no database")
    account = LedgerAccount(tmp_path / "ledger")
    opening = Opening(kind="pair", id="1", created="", hosts=[], processes=2, steps=3, settings={})
    SharedResult(opening, tmp_path / PAIR, account).enter(make_pair(PASS))
    assert "the ledger does not contain this result" in capsys.readouterr().err


def test_a_process_that_goes_on_replaces_nothing(tmp_path: Path) -> None:
    """Process 0 was suspended and knows of no difference; process 1 has seen one and written its file."""
    seen = make_pair(FAIL)
    put_pair(tmp_path, seen).rename(tmp_path / "pair-1.json")
    (tmp_path / "pair-2.json").write_text("{}")  # damaged
    opening = Opening(
        kind="pair", id=seen.id, created=seen.created, hosts=seen.hosts, processes=2, steps=3, settings={}
    )
    result = SharedResult(opening, tmp_path / PAIR, None)
    for why in ("this process was suspended", "interrupted by SIGTERM"):
        written = result.write(why)
        assert PAIR_FORMAT.read(tmp_path) == written
        assert (written.verdict, written.sentences[1:]) == (FAIL, [f"process 0: {why}"])
        assert PAIR_FORMAT.read(tmp_path / "pair-0.json").verdict is UNKNOWN
    assert result.last_words("interrupted by SIGINT")[0] == 1
    several = [make_pair(UNKNOWN), make_pair(PASS), seen]
    assert combine_results(several).verdict is FAIL
    assert combine_results(several[:2]).verdict is UNKNOWN
