"""Where the processes of a run find one another."""

import dataclasses

from sdc.settings import SettingError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """The processes of a run.

    Attributes:
        coordinator: `HOST:PORT` of process 0; None for what JAX detects of the cluster.
        processes: number of processes.
        process: number of this one.
        timeout: seconds to wait for the others at the start.

    Example:
        >>> from sdc.train.peers import Peers
        >>> Peers(coordinator="10.0.0.1:4321", processes=2, process=0).check()
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    timeout: float = 300.0

    def check(self) -> None:
        """Checks what is said of the processes.

        Raises:
            SettingError: it makes no sense.
        """
        given = {name: getattr(self, name) for name in ("coordinator", "processes", "process")}
        missing = [name for name, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            name, value = next((name, value) for name, value in given.items() if value is not None)
            raise SettingError(name, value, f"goes with {' and '.join(missing)}; give all three or none")
        if self.processes is not None and self.processes < 1:
            raise SettingError("processes", self.processes, "expected a number of at least 1")
        if self.process is not None and self.processes is not None and not 0 <= self.process < self.processes:
            raise SettingError("process", self.process, f"expected a number from 0 to {self.processes - 1}")
        if self.coordinator is not None and not _is_address(self.coordinator):
            raise SettingError("coordinator", self.coordinator, "expected HOST:PORT, as in 10.0.0.1:4321")
        if not self.timeout > 0:
            raise SettingError("timeout", self.timeout, "expected a number of seconds above 0")


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon and port.isdecimal() and 0 < int(port) < 65536)
