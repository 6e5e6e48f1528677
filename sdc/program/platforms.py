"""What a program is compiled for, which need not be what this process runs on."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sdc._lazy import jax

_named: ContextVar[str | None] = ContextVar("platform", default=None)


def compiled_for() -> str:
    """The platform of the devices that a program is traced for: `cpu`, `gpu` or `tpu`.

    That is the platform of the mesh where there is one, and else of the devices that a process uses by default, unless
    `compiling_for` says otherwise.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    named = device.platform if device is not None else _named.get()
    return named or jax.default_backend()


@contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Traces for devices that are not here, while the block lasts.

    What was traced before may have been for others, and JAX does not know: its caches are emptied.
    """
    jax.clear_caches()
    token = _named.set(platform)
    try:
        yield
    finally:
        _named.reset(token)
        jax.clear_caches()
