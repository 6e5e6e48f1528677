"""How the processes of a run find one another."""

import dataclasses
import ipaddress
import platform
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from sdc.settings import SettingError

# Function that resolves the name of a host to its addresses, and raises OSError if the name has none
Resolver: TypeAlias = Callable[[str], Sequence[str]]
# Maximum number of seconds to wait for the other processes: one week, since timers overflow at some larger number
LONGEST = 7 * 86_400
REMEDY = "give an address that the other processes can reach, as in --coordinator 10.0.0.1:4321"


def resolved(host: str) -> Sequence[str]:
    """Returns the addresses to which this host resolves a name, in the order in which they are tried."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"not a host name: {error}") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Route(NamedTuple):
    """The route to the coordinator, and a possible problem with it."""

    address: str | None  # the address that is tried, with the port; None if the name has no address
    hint: str | None  # a remedy; None if no problem is known


def route(coordinator: str, *, own: str | None = None, resolve: Resolver = resolved) -> Route:
    """Returns the address that is tried for a coordinator, and a hint in case the coordinator is unreachable.

    Debian maps the name of every host to an address that leads back to that host (127.0.1.1). If such a name is given
    as the coordinator, every process looks for the coordinator on its own host. Moreover, CPU processes advertise the
    address of their own host's name to the other processes. Both addresses are correct if all processes are on one
    host, so a hint is not an error.
    """
    host, _, port = coordinator.rpartition(":")
    bare = _bare(host)
    try:
        address = resolve(bare)[0]
    except OSError as error:
        return Route(None, _unknown(host, error))
    tried = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    if _leads_back(address):
        place = "is an address that each host uses for itself"
        if bare != address:
            place = f"resolves to {address} on this host, but each host uses this address for itself"
        return Route(tried, f"{host} {place}; {REMEDY}")
    own = own or platform.node()
    try:
        mine = next(filter(_leads_back, resolve(own)))
    except (OSError, StopIteration):
        return Route(tried, None)
    return Route(
        tried,
        f"this host's own name {own} resolves to {mine}, where CPU processes on other hosts cannot reach this host; "
        "map the name to the host's address in /etc/hosts",
    )


def _bare(host: str) -> str:
    """Strips the brackets that enclose an IPv6 address before a port."""
    return host.removeprefix("[").removesuffix("]")


def _unknown(host: str, error: OSError | UnicodeError) -> str:
    return f"{host} cannot be resolved on this host ({getattr(error, 'strerror', None) or error}); {REMEDY}"


def _leads_back(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """The processes of a run."""

    coordinator: str | None = None
    """HOST:PORT of process 0, in a run with several processes (default: JAX detects it from the cluster)."""
    processes: int | None = None
    """Number of processes, usually one per host."""
    process: int | None = None
    """Index of this process, counted from 0."""
    timeout: float = 300.0
    """Seconds to wait for the other processes at startup."""

    def check(self) -> None:
        """Checks the settings; raises SettingError if one is invalid."""
        given = {name: getattr(self, name) for name in ("coordinator", "processes", "process")}
        missing = [name for name, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            name, value = next((name, value) for name, value in given.items() if value is not None)
            raise SettingError(name, value, f"also needs {' and '.join(missing)}; give all three or none")
        if self.processes is not None and self.processes < 1:
            raise SettingError("processes", self.processes, "expected at least 1")
        if self.process is not None and self.processes is not None and not 0 <= self.process < self.processes:
            raise SettingError("process", self.process, f"expected an integer from 0 to {self.processes - 1}")
        host, _, port = ("a:1" if self.coordinator is None else self.coordinator).rpartition(":")
        if not (host and port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
            raise SettingError("coordinator", self.coordinator, "expected HOST:PORT, as in 10.0.0.1:4321")
        if not 0 < self.timeout <= LONGEST:
            raise SettingError("timeout", self.timeout, f"expected a number of seconds above 0 and at most {LONGEST:,}")
        try:
            _bare(host).encode("idna")
        except UnicodeError as error:
            raise SettingError("coordinator", self.coordinator, _unknown(host, error)) from error

    def known(self) -> bool:
        """Returns whether the coordinator's name resolves; in a cluster that is just starting, the name may not resolve
        yet."""
        return self.coordinator is None or route(self.coordinator).address is not None

    def tried(self, *, resolve: Resolver = resolved) -> str:
        """Describes the coordinator's address and a possible problem with it; returns an empty string if no coordinator
        is set."""
        if self.coordinator is None:
            return ""
        found = route(self.coordinator, resolve=resolve)
        return f" at {found.address or self.coordinator}" + (f" ({found.hint})" if found.hint else "")
