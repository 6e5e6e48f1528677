"""Where processes find one another: the name of the coordinator leads to it, or the message says where it leads."""

import socket
from collections.abc import Sequence

import pytest

from sdc.multihost import Unreachable
from sdc.settings import SettingError
from sdc.train import cluster
from sdc.train.peers import REMEDY, Peers, resolved, route

HOSTS = {
    "localhost": ["127.0.0.1"],
    "127.0.0.1": ["127.0.0.1"],
    "::1": ["::1"],
    "gpu-1": ["127.0.1.1"],
    "gpu-2": ["10.0.0.2", "fe80::1%eth0"],
    "gpu-3": ["fe80::1%eth0"],
}


def resolve(host: str) -> Sequence[str]:
    """A Debian host named gpu-1, whose own name leads back to it."""
    if host not in HOSTS:
        raise socket.gaierror(-2, "Name or service not known")
    return HOSTS[host]


@pytest.mark.parametrize(
    ("coordinator", "own", "address", "hint"),
    [
        (
            "gpu-1:4",
            "gpu-1",
            "127.0.1.1:4",
            "gpu-1 resolves to 127.0.1.1 on this host, but each host uses this address for itself; ",
        ),
        ("gpu-1:4", "gpu-2", "127.0.1.1:4", "gpu-1 resolves to 127.0.1.1 on this host"),
        ("localhost:4", "gpu-2", "127.0.0.1:4", "localhost resolves to 127.0.0.1 on this host"),
        ("[::1]:4", "gpu-2", "[::1]:4", "[::1] is an address that each host uses for itself; "),
        ("gpu-2:4", "gpu-1", "10.0.0.2:4", "this host's own name gpu-1 resolves to 127.0.1.1, where CPU"),
        ("gpu-2:4", "gpu-2", "10.0.0.2:4", None),
        ("gpu-2:4", "unknown", "10.0.0.2:4", None),
        ("gpu-3:4", "gpu-2", "[fe80::1%eth0]:4", None),
        ("gpu-9:4", "gpu-1", None, f"gpu-9 cannot be resolved on this host (Name or service not known); {REMEDY}"),
    ],
)  # fmt: skip
def test_the_address_that_is_tried_and_what_may_be_wrong(
    coordinator: str, own: str, address: str | None, hint: str | None
) -> None:
    found = route(coordinator, own=own, resolve=resolve)
    assert found.address == address
    assert found.hint is None if hint is None else str(found.hint).startswith(hint)
    assert found.hint is None or REMEDY in found.hint or "/etc/hosts" in found.hint


def test_what_was_tried_and_what_may_be_wrong_with_it() -> None:
    def tried(host: str) -> str:
        peers = Peers(coordinator=f"{host}:4321", processes=2, process=1)
        peers.check()
        return peers.tried(resolve=resolve)

    assert (
        tried("gpu-9")
        == f" at gpu-9:4321 (gpu-9 cannot be resolved on this host (Name or service not known); {REMEDY})"
    )
    assert tried("gpu-1").startswith(" at 127.0.1.1:4321 (gpu-1 resolves to 127.0.1.1 on this host")
    assert tried("gpu-2").startswith(" at 10.0.0.2:4321")
    assert Peers().tried() == ""


def test_the_runtime_starts_when_the_coordinators_name_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])

    def initialize(*_: object, **__: object) -> None:
        raise RuntimeError(f"started with {len(list(answers))} answers to come")

    monkeypatch.setattr(Peers, "known", lambda self: next(answers))
    monkeypatch.setattr(cluster, "BEAT", 0.01)
    monkeypatch.setattr("jax.distributed.initialize", initialize)
    with pytest.raises(Unreachable, match="started with 0 answers to come"):
        cluster._initialize(Peers(coordinator="127.0.0.1:4321", processes=2, process=1), 1, lambda: None)


@pytest.mark.parametrize("host", [64 * "x", "a..b"])
def test_what_never_is_the_name_of_a_host_is_told_at_once(host: str) -> None:
    with pytest.raises(SettingError, match=r"cannot be resolved on this host"):
        Peers(coordinator=f"{host}:4321", processes=2, process=1).check()


def test_names_are_looked_up_by_the_system() -> None:
    assert resolved("::1") == ["::1"]
    with pytest.raises(OSError, match="not a host name"):
        resolved(64 * "x" + ".invalid")


@pytest.mark.parametrize("port", ["0", "65536", "٤٣٢١", "9" * 5_000, "x", "", "-1"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(SettingError, match=r"expected HOST:PORT, as in 10\.0\.0\.1:4321"):
        Peers(coordinator=f"gpu-2:{port}", processes=2, process=0).check()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf"), 1e300, 604_801.0])
def test_a_time_that_nobody_waits(timeout: float) -> None:
    with pytest.raises(SettingError, match=r"timeout=.*: expected a number of seconds above 0 and at most 604,800"):
        Peers(timeout=timeout).check()
    Peers(timeout=604_800.0).check()
