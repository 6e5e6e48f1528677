"""One compilation for all devices of a kind: what was compiled for one of them is loaded on the others.

It is the same machine code, so that a difference between devices is none of the compiler, and it takes milliseconds.
JAX has a door for this only where the devices are the same as before (`serialize_executable`); that of its compilation
cache takes the device as an option.
"""

import io
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import serialize_executable


class Loadable:
    """A compiled program of one device, for other devices of its kind.

    Args:
        compiled: the program.

    Raises:
        Exception: whatever JAX raises where it cannot be written as bytes.

    Example:
        >>> import jax, numpy as np
        >>> from sdc.burnin.loading import Loadable
        >>> device = jax.local_devices()[0]
        >>> x = jax.device_put(np.ones(3, np.float32), device)
        >>> print(Loadable(jax.jit(lambda x: x + x).lower(x).compile()).load(device)(x))
        [2. 2. 2.]
    """

    def __init__(self, compiled: jax.stages.Compiled) -> None:
        self._bytes, self._inputs, self._outputs = serialize_executable.serialize(compiled)

    def load(self, device: jax.Device) -> jax.stages.Compiled:
        """The program on a device.

        Raises:
            Exception: whatever JAX raises where it cannot be loaded.
        """
        unpickler = _Onto(io.BytesIO(self._bytes), device.client, [device])
        program, arguments, no_keywords = unpickler.load()
        return jax.stages.Compiled(
            program.load(), [], self._inputs.unflatten(arguments), self._outputs, no_kwargs=no_keywords
        )


class _Onto(serialize_executable._JaxPjrtUnpickler):
    """Puts one device in the place of the one that the program was compiled for."""

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        (device,) = self.devices_by_id.values()
        if pid[0] == "exec":
            options = compiler.get_compile_options(
                num_replicas=1, num_partitions=1, device_assignment=np.asarray([[device.id]])
            )
            return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
        return device if pid[0] == "device" else super().persistent_load(pid)
