"""A page of each kind, written by the functions that the commands call."""

import contextlib
import io
import random
from pathlib import Path

from sdc.analysis import (
    conclude,
    write_beside,
    write_burnin_report,
    write_difference,
    write_overview,
    write_report,
)  # fmt: skip
from sdc.analysis.studies import write_study
from sdc.records.record import Record
from sdc.tools import cli
from sdc.twins.traces import diff, read_trace

from ..analysis import test_burnin_page, test_campaigns, test_studies
from ..analysis.records import PUBLISHED, free_steps, manifest, step_row, steps, write_run
from ..analysis.test_headline import DEVICES, REAL, TRAIN, flagged, hits
from ..analysis.traces import write_traces
from ..reports import WORKLOADS, digest_of, make_report, put_report

RATES = {site: known["frequency"] for site, known in PUBLISHED.items()}


def write_pages(folder: Path) -> dict[str, Path]:
    """Pages by name."""
    runs = {
        "clean": (manifest(**REAL), *steps(20)),
        "corrupt": (manifest(**REAL, devices=DEVICES[:4]), *hits(31)),
        "simulated": (manifest(), *steps(20, rates=RATES)),
        "deep": (manifest(**REAL, layers=32), *steps(8, 32, rates=RATES)),
        "three twins": (manifest(**REAL, twins=3, devices=DEVICES), *hits(*range(5, 40), twins=(0,))),
        "free": (manifest(**REAL, sync="none", steps=60), free_steps(60)),
        "products": (manifest(**TRAIN), *flagged(2)),
        "training": (manifest(**REAL, kind="train", twins=None, sync=None), [step_row(step, 1) for step in range(20)]),
        "empty": (manifest(**REAL), []),
    }
    pages = {name: Path(conclude(write_run(folder / name, *lines))["report"]) for name, lines in runs.items()}
    pages["under way"] = write_report(write_run(folder / "under way", manifest(**REAL), *steps(9), ended=False))
    pages["campaign"] = _campaign(folder / "campaign")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "steps.jsonl").write_text("{")
    measured = {
        "lossy": test_studies.lossy({0.1: 0.2, 0.2: 0.4, 0.4: 0.95}), "paft": test_studies.paft(test_studies.EXACT)
    }  # fmt: skip
    for name, study in measured.items():
        pages[name] = Path(write_study(folder / name, study)["report"])
    golden, suspect, copy = (read_trace(path) for path in write_traces(folder))
    pages["trace"] = write_report(Path(golden.path))
    pages["diff"] = write_difference(folder / "diff", golden, suspect, diff(golden, suspect))
    pages["diff clean"] = write_difference(folder / "equal", golden, copy, diff(golden, copy))
    pages["side by side"] = Path(write_beside(folder / "clean", folder / "three twins").report)
    burnin = test_burnin_page.result(*test_burnin_page.WRONG, readings=True)
    pages["burn-in"] = write_burnin_report(burnin, folder / "burn-in")
    for number in range(12):
        digests = {(WORKLOADS[0], 0): digest_of("wrong")} if number == 3 else None
        put_report(folder / "results", make_report(f"gpu-{number:02}.rack-7.example", digests=digests))
    words = ["fleet", "summarize", str(folder / "results"), "--output", str(folder / "fleet")]
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.run(words) == 1
    pages["fleet"] = folder / "fleet" / "index.html"
    pages["index"] = Path(write_overview(folder).report)
    return pages


def _campaign(folder: Path) -> Path:
    draw = random.Random(0)
    rows = [
        test_campaigns.row(
            number,
            draw.choice(["masked", "benign", "benign", "spike", "divergence", "nonfinite"]),
            operation=draw.choice(["dot_general", "exp", "add", "tanh", "reduce_sum", "custom_vjp_call"]),
            layer=draw.randrange(6), bits=[draw.randrange(32)], phase=draw.choice(["fwd", "bwd", "update"]),
            detected={"loss_spike": draw.choice([None, 0, 1, 3])},
        )
        for number in range(300)
    ]  # fmt: skip
    about = {**test_campaigns.MANIFEST, "injections": len(rows)}
    with Record.create(folder, about) as record:
        for row in rows:
            record.line(row)
        record.finish(test_campaigns.summarize_campaign(about, rows))
    return write_report(folder)
