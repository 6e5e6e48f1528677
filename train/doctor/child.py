"""The process that measures: `python -m sdc.train.doctor.child`.

It reads a request as JSON from standard input, and writes one line of JSON to standard output. Whatever else writes
there meanwhile, Gloo or an operation, is sent to standard error.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

import msgspec

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Measures what is asked for."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # A parent that is killed leaves nobody who wants to know.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    began = time.monotonic()
    import jax

    hits = 0

    def count(event: str, **_: Any) -> None:
        nonlocal hits
        hits += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(count)
    if request["devices"] is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", request["devices"])
    from sdc.records import environment

    from .operations import measure
    from .results import Answer

    module, _, name = request["suite"].partition(":")
    operations = getattr(importlib.import_module(module), name)(request["options"])
    only = request["only"]
    chosen = [each for each in operations if only is None or each.name in only]
    rows = measure(chosen, jax.local_devices(), runs=request["runs"])
    answer = Answer(
        format="jax-sdc doctor child",
        environment=msgspec.convert(environment(), Answer.__annotations__["environment"]),
        operations=rows,
        hits=hits,
        seconds=time.monotonic() - began,
    )
    answers.write(msgspec.json.encode(answer))
    answers.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the runtime's farewell can hang, and there is nothing left to do


if __name__ == "__main__":
    main()
