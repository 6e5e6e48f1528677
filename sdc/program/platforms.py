"""What a program is compiled for, which need not be what this process runs on."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from sdc._lazy import jax


class _Target(NamedTuple):
    platform: str
    whole: bool
    kind: str


_target: ContextVar[_Target | None] = ContextVar("target", default=None)


def compiled_for() -> str:
    """The platform of the devices that a program is traced for: `cpu`, `gpu` or `tpu`.

    That is the platform of the mesh where there is one, and else of the devices that a process uses by default, unless
    `compiling_for` says otherwise.
    """
    device, target = jax.sharding.get_abstract_mesh().abstract_device, _target.get()
    if device is not None:
        return str(device.platform)
    return str(jax.default_backend()) if target is None else target.platform


def device_kind() -> str:
    """What JAX calls the devices that a program is traced for, such as `TPU v5 lite`; see `compiled_for`."""
    device, target = jax.sharding.get_abstract_mesh().abstract_device, _target.get()
    if device is not None:
        return str(device.device_kind)
    return str(jax.devices()[0].device_kind) if target is None else target.kind


def is_whole() -> bool:
    """Whether each array that is traced lies on one device, as a kernel needs it that is no business of the compiler's.

    That is so inside of a `shard_map` over all axes of the mesh, and where there is but one device and no mesh. It is
    not known to be so wherever else the compiler may have to share work out, be it over axes of one device.
    """
    mesh, target = jax.sharding.get_abstract_mesh(), _target.get()
    if not mesh.empty:
        return set(mesh.axis_names) == set(mesh.manual_axes)
    return jax.device_count() == 1 if target is None else target.whole


@contextmanager
def compiling_for(platform: str, *, whole: bool, kind: str = "") -> Iterator[None]:
    """Traces for devices that are not here, while the block lasts.

    What was traced before may have been for others, and JAX does not know: its caches are emptied.

    Args:
        platform: of the devices.
        whole: what `is_whole` says where there is no mesh.
        kind: what `device_kind` says there.
    """
    jax.clear_caches()
    token = _target.set(_Target(platform, whole, kind))
    try:
        yield
    finally:
        _target.reset(token)
        jax.clear_caches()
