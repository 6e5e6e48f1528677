"""A result that leaves no doubt is decoded at once, and says what a close look at it says."""

import re
from pathlib import Path

import msgspec
import pytest

from sdc.burnin.judgement import BURN_IN
from sdc.burnin.results import BurninResult, Elements
from sdc.records import Format
from sdc.records.format import seal
from sdc.records.storage import RecordError
from tests.reports import make_finding, make_report, put_report

PARTS = Elements(differing=1, total=9, first=(), largest=float("inf"), relative=0.5, nonfinite=1)
RESULTS = {
    "clean": make_report(),
    "found": make_report(findings=[make_finding(note="[[{ of a text")]),
    "infinite": make_report(findings=[make_finding(elements=PARTS)]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_both_ways_of_reading_give_the_same(name: str, tmp_path: Path) -> None:
    path = put_report(tmp_path, RESULTS[name])
    looked_at = msgspec.convert(BURN_IN.fields(path), BurninResult)
    assert BURN_IN.read(path) == RESULTS[name] == looked_at


def test_what_leaves_no_doubt_is_decoded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Format, "_fields", slow)
    assert BURN_IN.read(put_report(tmp_path, RESULTS["clean"])) == RESULTS["clean"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"schema": 1', '"schema": 7', "has layout 7"),
        ('"format": "jax-sdc burn-in"', '"format": "other"', "not a result of sdc burnin"),
        ('"runs": 3', '"runs": "three"', "has different fields"),
        ('"runs": 3', '"runs": NaN', "has different fields"),
        ('"notes": [', '"deep": ' + 101 * "[" + 101 * "]" + ', "notes": [', "nested deeper than 100 levels"),
        ('"verdict": "clean"', '"verdict": "corrupt"', "contradicts itself"),
    ],
)
def test_what_is_wrong_is_told_in_the_words_of_a_close_look(old: str, new: str, problem: str, tmp_path: Path) -> None:
    path = put_report(tmp_path, RESULTS["clean"])
    text = path.read_text().rpartition(',\n "checksum"')[0] + "\n}\n"
    assert old in text
    path.write_bytes(seal(text.replace(old, new, 1).encode()))
    with pytest.raises(RecordError, match=re.escape(problem)):
        BURN_IN.read(path)
    path.write_text(text)
    with pytest.raises(RecordError, match="no checksum"):
        BURN_IN.read(path)
