"""Processes that measure in one environment and in changed ones, within a limit of time."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from .children import CHILD, ChildFailed, Request, ask
from .layout import Answer
from .settings import changed

UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
LONGEST = 150.0
"""Seconds that one process may take."""


@dataclasses.dataclass
class Laboratory:
    """Starts processes, and knows how much time is left.

    Attributes:
        environ: the environment that is examined.
        request: what is measured.
        seconds: all that may be taken, from now on.
        workers: processes at a time: one where devices cannot be shared.
        tell: hears what is done next.
        command: what is started.
    """

    environ: Mapping[str, str]
    request: Request
    seconds: float
    workers: int = 1
    tell: Callable[[str], None] = lambda text: None
    command: Sequence[str] = CHILD

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + self.seconds

    def ask(
        self,
        what: str,
        changes: Mapping[str, str | None],
        *,
        only: Sequence[str] | None = None,
        cache: str | None = None,
    ) -> Answer:
        """Measures in a process of its own.

        Args:
            what: in words.
            changes: of the environment; a flag that XLA does not know is left out.
            only: operations; None for all.
            cache: folder of a persistent compilation cache; None for none.

        Raises:
            ChildFailed: it told nothing, or no time is left.
        """
        asked = dict(changes)
        while True:
            left = self._ends - time.monotonic()
            if left <= 0:
                raise ChildFailed(f"the limit of {self.seconds:g} s is over")
            self.tell(what)
            environ = changed(self.environ, {**(UNCACHED if cache is None else _cached(cache)), **asked})
            request = dataclasses.replace(self.request, only=only)
            try:
                return ask(request, environ, limit=min(left, LONGEST), command=self.command)
            except ChildFailed as failed:
                unknown = set(failed.unknown) & set(asked)
                if not unknown:
                    raise
                asked = {name: value for name, value in asked.items() if name not in unknown}

    def together(self, jobs: Sequence[Callable[[], Answer]]) -> list[Answer | ChildFailed]:
        """Answers of several processes, or how they failed; as many at a time as devices allow."""

        def run(job: Callable[[], Answer]) -> Answer | ChildFailed:
            try:
                return job()
            except ChildFailed as failed:
                return failed

        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(run, jobs))


def _cached(folder: str) -> dict[str, str]:
    """Everything that is compiled is kept."""
    return {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
