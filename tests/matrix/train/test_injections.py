"""Campaigns on the reference workload: one that is cut off ends with the same table."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sdc.analysis import conclude
from sdc.settings import SettingError
from sdc.train import CampaignJob, run_campaign
from tests.train.runs import WORKLOAD, loaded

JOB = CampaignJob(
    workload=WORKLOAD, injections=60, steps=5, follow=1, where='primitive("dot_general")', faults=("bitflip", "nan")
)


class Crash(Exception):
    """What a crash is in this process."""


def test_a_campaign_that_is_cut_off_ends_with_the_same_table(tmp_path: Path) -> None:
    through, cut = (dataclasses.replace(JOB, folder=tmp_path / name) for name in ("through", "cut"))

    def crash(row: Any) -> None:
        if row["injection"] == 20:
            raise Crash

    with pytest.raises(Crash):
        run_campaign(cut, loaded=loaded(WORKLOAD), on_row=crash)
    folder = tmp_path / "cut"
    with (folder / "injections.jsonl").open("a") as file:
        file.write('{"injection": 59, "cut o')  # what a crash can leave
    assert not conclude(folder)["complete"]
    assert not (folder / "summary.json").exists()
    seen: list[int] = []
    resumed = dataclasses.replace(cut, resume=True)
    record = run_campaign(resumed, loaded=loaded(WORKLOAD), on_row=lambda row: seen.append(row["injection"]))
    assert seen == list(range(21, 60))
    assert [row["injection"] for row in record.lines] == list(range(60))
    run_campaign(through, loaded=loaded(WORKLOAD))
    found, other = conclude(folder), conclude(tmp_path / "through")
    assert {**found, "run": "", "report": ""} == {**other, "run": "", "report": ""}
    for name in ("injections.jsonl", "summary.json"):
        assert (folder / name).read_bytes() == (tmp_path / "through" / name).read_bytes()
    assert found["complete"]
    assert found["done"] == found["reached"] == 60
    assert found["groups"]["fault"]["nan"]["harm"]["share"] > 0.5
    assert (folder / "report.md").read_text().count("SIMULATED FAULTS") == 1
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["where"] == JOB.where
    assert [device["rank"] for device in manifest["devices"]] == [{"data": 0, "model": 0}]

    with pytest.raises(ValueError, match="contains another campaign"):
        run_campaign(dataclasses.replace(resumed, follow=2), loaded=loaded(WORKLOAD))
    with pytest.raises(SettingError, match="already holds 60 injections"):
        run_campaign(dataclasses.replace(resumed, injections=9), loaded=loaded(WORKLOAD))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"injections": 0}, "injections=0: expected a whole number from 1 to 2,147,483,647"),
        ({"follow": 5}, "follow=5: expected an integer from 0 to 4"),
        ({"faults": ()}, "at least one kind"),
        ({"resume": True}, "needs the folder of the run to resume"),
        ({"faults": ("bitflip,rate=1",)}, "unknown key 'rate'"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(JOB, **changes).check()
