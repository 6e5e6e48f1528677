"""The process around a command: its standard output, its end, and its end when a peer or the runtime is lost."""

import ctypes
import os
import signal
import sys

from .errors import Exit


def keep_standard_output() -> None:
    """Gloo writes on standard output, which belongs to the command: it gets standard error instead."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding="utf-8")


def give_up(message: str) -> None:
    """Ends the process of a run that lost a peer: the main thread may wait in a collective for ever."""
    print(f"sdc: inconclusive: {message}", file=sys.stderr, flush=True)
    os._exit(Exit.INCONCLUSIVE)


def leave_at_once(code: int) -> None:
    """Ends a process of several without the runtime's farewell, which would wait for lost peers."""
    if "jax" not in sys.modules:
        return
    from jax._src import distributed

    if distributed.global_state.client is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _aborted(_: int) -> None:
    os.write(2, b"sdc: inconclusive: the runtime gave up on a lost peer (its log is above); nothing can be said\n")
    os._exit(Exit.INCONCLUSIVE)


_ABORTED = ctypes.CFUNCTYPE(None, ctypes.c_int)(_aborted)
"""Kept alive as long as the module: the C library holds its address."""


def end_aborts_well() -> None:
    """The runtime aborts the process when process 0 is lost: let that end with exit code 3 and a message.

    Python's own signal handlers do not run in an abort, so this one is set below it.
    """
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _ABORTED)
