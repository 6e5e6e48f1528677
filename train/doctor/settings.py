"""Settings that may decide bits, as environment variables: read, changed, and written as lines for a shell.

A setting's name is that of its variable, or, of `XLA_FLAGS`, the flag: `--xla_allow_excess_precision`.
"""

import re
import shlex
from collections.abc import Mapping

FLAGS = "XLA_FLAGS"
_DECIDE = re.compile(
    r"NPROC|LIBTPU_INIT_ARGS|LD_PRELOAD|GLIBC_TUNABLES|NVIDIA_TF32_OVERRIDE|"
    r"(JAX|XLA|NCCL|RCCL|CUBLAS|CUBLASLT|CUDNN|CUDA|TF|TSL|OMP|ROCBLAS|HIPBLASLT|MIOPEN)_\w+"
)
"""Variables that JAX, XLA and the libraries below them read."""
_ASIDE = re.compile(
    r"XLA_FLAGS|\w*_(DIR|PATH|FILE|HOME|LOG_LEVEL|MIN_VLOG_LEVEL|VISIBLE_DEVICES|IFNAME)|NCCL_DEBUG\w*|NCCL_SOCKET\w*|"
    r"JAX_(COORDINATOR|COMPILATION_CACHE|PERSISTENT_CACHE|ENABLE_COMPILATION_CACHE|LOG|DUMP|TRACEBACK)\w*|XLA_PYTHON_CLIENT_\w+|"
    r"CUDA_(VERSION|PKG)\w*|NCCL_VERSION|TF_(ENABLE_ONEDNN_OPTS)|JAX_SDC_\w+"
)
"""Those of them that say where things are, or what is told, and decide no bits."""
PLACES = frozenset(
    {"--xla_force_host_platform_device_count", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "JAX_PLATFORM_NAME"}
)
"""Those that say which devices there are: with others it would be another question."""


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that may decide bits, sorted by name; a flag without a value has an empty one.

    Example:
        >>> from sdc.train.doctor.settings import settings_of
        >>> settings_of({"NPROC": "2", "XLA_FLAGS": "--xla_a=1 --xla_b", "HOME": "/"})
        {'--xla_a': '1', '--xla_b': '', 'NPROC': '2'}
    """
    found = {name: value for name, value in environ.items() if _DECIDE.fullmatch(name) and not _ASIDE.fullmatch(name)}
    return dict(sorted({**found, **_flags(environ)}.items()))


def changed(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with some settings changed; None takes a setting away.

    Example:
        >>> from sdc.train.doctor.settings import changed
        >>> changed({"NPROC": "2", "XLA_FLAGS": "--xla_a=1 --xla_b"}, {"--xla_a": "2", "NPROC": None})
        {'XLA_FLAGS': '--xla_a=2 --xla_b'}
    """
    flags, found = _flags(environ), dict(environ)
    for name, value in changes.items():
        place = flags if name.startswith("--") else found
        if value is None:
            place.pop(name, None)
        else:
            place[name] = value
    text = " ".join(f"{name}={value}" if value else name for name, value in flags.items())
    if text or FLAGS in found:
        found[FLAGS] = text
    return found


def lines(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> list[str]:
    """The same changes as lines for a shell, with the whole of `XLA_FLAGS`.

    Example:
        >>> from sdc.train.doctor.settings import lines
        >>> lines({"XLA_FLAGS": "--xla_a=1"}, {"--xla_b": "2", "NPROC": "4", "NCCL_ALGO": None})
        ['export XLA_FLAGS="--xla_a=1 --xla_b=2"', 'export NPROC=4', 'unset NCCL_ALGO']
    """
    found = []
    if any(name.startswith("--") for name in changes):
        text = changed(environ, changes)[FLAGS]
        found.append(f'export {FLAGS}="{text}"' if text else f"unset {FLAGS}")
    for name, value in changes.items():
        if not name.startswith("--"):
            found.append(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    return found


def shown(name: str, value: str | None) -> str:
    """A setting in a sentence.

    Example:
        >>> from sdc.train.doctor.settings import shown
        >>> shown("--xla_a", "1"), shown("NPROC", None)
        ('--xla_a=1', 'no NPROC')
    """
    return f"no {name}" if value is None else f"{name}={value}" if value else name


def _flags(environ: Mapping[str, str]) -> dict[str, str]:
    words = (word.partition("=") for word in environ.get(FLAGS, "").split())
    return {name: value for name, _, value in words}
