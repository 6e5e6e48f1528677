"""`sdc checkpoint`: what a folder of checkpoints holds, and whether it restores to what was saved."""

import dataclasses
import os
from typing import Any

from .. import CheckpointOptions, CountProgress, Exit, show, usage_errors


def run(options: CheckpointOptions) -> int:
    """Looks at the checkpoints and returns the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed but digests
    from sdc.checkpoints import audit, certify_folder, checkpoints_in

    with usage_errors():
        there = checkpoints_in(options.folder)
        if unknown := sorted({*options.step} - {*there}):
            raise ValueError(f"--step {unknown[0]}: {options.folder} has the steps {', '.join(map(str, there))}")
    rows: list[dict[str, Any]] = []
    steps = options.step or there
    with CountProgress("checkpoint", len(steps)) as progress:
        for step in steps:
            found = audit(options.folder, step, restore=options.action == "verify")
            if options.action == "certify" and found.status is None and "there is no certificate" in found.problem:
                with usage_errors():
                    certify_folder(options.folder, step)
                found = audit(options.folder, step, restore=False)
            rows.append(dataclasses.asdict(found))
            progress.advance(f"step {step}")
    code = _code(rows)
    verdict = {Exit.CLEAN: "clean", Exit.CORRUPT: "corrupt", Exit.INCONCLUSIVE: "inconclusive"}[code]
    compared = options.action == "verify"
    show("checkpoint", {"verdict": verdict if compared else None, "checkpoints": rows}, as_json=options.json)
    return int(code if compared or code is Exit.INCONCLUSIVE else Exit.CLEAN)


def _code(rows: list[dict[str, Any]]) -> Exit:
    """What differs was compared; what has a problem and does not differ was not. Remains of others do not count."""
    rows = [row for row in rows if not row["remains"]] or rows
    if any(row["wrong"] for row in rows):
        return Exit.CORRUPT
    return Exit.INCONCLUSIVE if any(row["problem"] or row["uncovered"] for row in rows) else Exit.CLEAN
