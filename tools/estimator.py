"""One program compiled in a process of its own: a compiler that crashes takes nothing else with it.

    python -m sdc.tools.estimator SUBJECT RESULT SCHEDULES KERNEL

KERNEL is the name of the kernel whose instructions are written, or empty for all. The process reads a `Subject` as JSON
and writes what it found as JSON, an error of the user's among that. What the compilers write to standard error stays
there for the process that started this one.
"""

import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from .errors import flag


def main() -> None:
    """Estimates one program."""
    subject, result, schedules = map(Path, sys.argv[1:4])
    found = _found(json.loads(subject.read_text(encoding="utf-8")), schedules, sys.argv[4] or None)
    result.write_text(json.dumps(found), encoding="utf-8")


def _found(subject: dict[str, Any], schedules: Path, kernel: str | None) -> dict[str, Any]:
    from sdc.costs import prepare_compilers

    prepare_compilers(schedules, kernel)
    import jax

    from sdc.costs import DoesNotFit, Uncharged
    from sdc.settings import SettingError
    from sdc.train import Subject, estimate_subject

    try:
        return {"estimate": dataclasses.asdict(estimate_subject(Subject(**subject)))}
    except DoesNotFit as error:
        return {"does_not_fit": str(error)}
    except Uncharged as error:
        return {"uncharged": str(error)}
    except SettingError as error:
        return {"usage": flag(error)}
    except jax.errors.JaxRuntimeError:  # of the compiler
        raise
    except Exception as error:
        if subject["step"] is None and not isinstance(error, ValueError | TypeError):
            raise  # nobody's code but ours has run
        first, where = str(error).partition("\n")[0], traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {first} ({where.filename}:{where.lineno})"
        return {"usage": f"{subject['step'] or subject['config']}: {told}"}


if __name__ == "__main__":
    main()
