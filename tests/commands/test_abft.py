"""Checked products from the command line: clean if healthy, flagged where faults hit, corrected on request."""

import json
from pathlib import Path
from typing import Any

import pytest

from sdc import records
from sdc.checksums.roundoff import Profile, Rounding, hardware
from sdc.tools.cli import run
from tests.tools.command import lines, sdc, summary

TRAIN = ("train", "--config", "mini", "--abft", "--dtype", "bfloat16")


# Rows of the products of one step of `mini`: two microsteps of 4 sequences of 32 tokens, 2 layers.
ROWS = 17_024


# Rows of the products of all layers of `tiny`, and of its feed-forward networks.
TINY_ROWS = 173_696


FFN_ROWS = 24_064


def test_a_healthy_run_has_no_flag(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = summary(*TRAIN, "--steps", 3, "--run", folder, code=0)
    assert result["verdict"] == "clean"
    assert result["abft"]["checked"] == 3 * ROWS
    assert result["abft"]["flagged"] == result["abft"]["nonfinite"] == 0
    assert 0 <= result["abft"]["margin"] <= 1
    assert result["abft"]["first_margin"] > 0
    assert result["abft"]["coverage"] == 1
    assert result["abft"]["skipped"] == []
    assert sum(line["abft"]["checked"] for line in lines(folder)) == 3 * ROWS
    report = (folder / "report.md").read_text()
    assert "No flag in 51,072 checked rows" in report
    assert "Checked matrix products" in report


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Trains with faults in forward attention products and backward feed-forward products, on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "struck"
    places = ('scope("*/attn/*") & direction("fwd")', 'scope("*/ffn/*") & direction("bwd")')
    faults = [word for place in places for word in ("--fault", f"scale,factor=-3,rate=4e-3,where=products & {place}")]
    flags = ("--model", 2, "--abft-mode", "locate", "--steps", 2)
    return folder, summary(*TRAIN, *flags, *faults, "--run", folder, code=1)


def test_flags_are_where_the_faults_were(struck: tuple[Path, dict[str, Any]]) -> None:
    """By step, microstep, product and layer, no healthy row is flagged, and few hits are missed."""
    folder, result = struck
    assert result["verdict"] == "corrupt"
    assert result["simulated"] is True
    assert result["abft"]["flagged"] == result["abft"]["confirmed"] > 1000
    injected = {
        (row["step"], row["microstep"], row["site"], row["layer"]): row["injected"]
        for row in lines(folder, "mismatches.jsonl")
    }
    flagged: dict[tuple[Any, ...], int] = {}
    for line in lines(folder):
        for row in line["abft"]["rows"]:
            place = line["step"], row["microstep"], row["site"], row["layer"]
            flagged[place] = flagged.get(place, 0) + row["flagged"]
            assert len(row["elements"]) == len(row["errors"]) == min(row["wrong"], 8) > 0
    assert set(flagged) <= set(injected)
    assert len(flagged) > 0.95 * len(injected)
    assert all(count <= injected[place] for place, count in flagged.items())
    assert {row["model"] for line in lines(folder) for row in line["abft"]["rows"]} == {0, 1}
    assert {row["layer"] for line in lines(folder) for row in line["abft"]["rows"]} == {0, 1}
    assert {direction for _, _, site, _ in flagged for direction in [site.partition("/")[0]]} == {"fwd", "bwd"}


def test_its_report_shows_where_and_when(struck: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = struck
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert "Flagged rows over time" in page
    assert "Flagged rows by product, layer and rank" in text
    assert "(simulated faults)" in text


def test_corrected_twins_do_not_part(tmp_path: Path) -> None:
    """Every fault is corrected before the twins are compared, and the verdict still reports the faults."""
    products = 'products & scope("*/ffn/*")'
    faults = ("--fault", f"scale,factor=-3,rate=1e-4,where={products}")
    folder = tmp_path / "run"
    flags = ("--steps", 2, "--placement", "vmap", "--abft", "--abft-mode", "correct", "--abft-where", products)
    result = summary("twin", "--config", "mini", *flags, *faults, "--run", folder, code=1)
    assert result["verdict"] == "corrupt"
    assert "were replaced" in result["reason"]
    assert sum(site["mismatched"] for site in result["submodules"].values()) == 0
    assert result["state"]["mismatched"] == 0
    assert result["abft"]["corrected"] == result["abft"]["flagged"] > 0
    assert {row["twin"] for line in lines(folder) for row in line["abft"]["rows"]} == {1}


def test_a_profile_of_another_device_is_used_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    # So large a kappa changes no bound, and so nothing is compiled again.
    Profile(Rounding(kappa=1e30), measured_on={**hardware(), "device_kind": "another"}).save(path)
    folder = tmp_path / "run"
    code, _, err = sdc(*TRAIN, "--steps", 1, "--abft-profile", path, "--run", folder)
    assert code == 0, err
    assert "was measured on another setup" in err
    assert json.loads((folder / "manifest.json").read_text())["abft"]["kappa"] == 1e30
    assert "measured on another setup: device\\_kind: measured on another" in (folder / "report.md").read_text()


def test_study_and_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes one step of each: no false alarm, the expected order of schemes, and a profile that `sdc train` accepts.

    Both run in this process, whose devices have started already, and on `tiny`: with shorter sums, the schemes would
    be too close to each other.
    """
    monkeypatch.setattr(records, "prepare", lambda **_: None)
    flags = ("--steps", "1", "--dtypes", "bfloat16")
    ffn = ("--where", 'scope("*/ffn/*")', "--run", str(tmp_path / "study"), "--json")
    assert run(["abft", "study", *flags, *ffn]) == 0
    result = json.loads(capsys.readouterr().out)
    sums, rounded = result["variants"]["bfloat16, sums"], result["variants"]["bfloat16, rounded"]
    for schemes in (sums, rounded):
        assert all(found["checked"] == FFN_ROWS and found["flagged"] == 0 for found in schemes.values())
        assert all(sum(found["made"]) > 10_000 for found in schemes.values())
    assert sums["blocks"]["half"] <= sums["two-tier"]["half"] < 1e-2 < sums["deterministic"]["almost_all"]
    assert rounded["residual"]["almost_all"] < 1e-2 < rounded["two-tier"]["half"]
    assert sums["paper"]["almost_all"] is None or sums["paper"]["almost_all"] > 10
    manifest = json.loads((tmp_path / "study" / "manifest.json").read_text())
    assert (manifest["kind"], manifest["marked_steps"]) == ("abft study", [0])
    assert manifest["config"]["name"] == "tiny"
    assert "Flips found by bit" in (tmp_path / "study" / "report.html").read_text()
    assert run(["report", str(tmp_path / "study"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["variants"] == result["variants"]

    out = tmp_path / "profile.json"
    assert run(["abft", "calibrate", *flags, "--out", str(out)]) == 0
    assert "none flagged" in capsys.readouterr().out
    profile = Profile.load(out)
    assert profile.rounding == Rounding()
    assert profile.measured_on == hardware()
    assert profile.measurements["checked"] == TINY_ROWS
    assert run(["abft", "calibrate", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
