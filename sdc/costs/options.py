"""Options of the compiler: how they are written, and whether the compiler at hand knows them."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from sdc._lazy import jax
from sdc.settings import SettingError

Value: TypeAlias = bool | int | str
UNKNOWN = re.compile(r"[Nn]o such compile option:? '?([\w.\-]+)")
"""What the compilers say of an option that they do not have."""


def read_options(texts: Sequence[str]) -> dict[str, Value]:
    """Options of the compiler, by name.

    Args:
        texts: each `NAME=VALUE`; `true`, `false` and whole numbers are what they look like.

    Raises:
        SettingError: a text is not of that form, or a name is there twice.

    Example:
        >>> from sdc.costs.options import read_options
        >>> read_options(["xla_tpu_enable_sdc_checker=true", "xla_cpu_parallel_codegen_split_count=4"])
        {'xla_tpu_enable_sdc_checker': True, 'xla_cpu_parallel_codegen_split_count': 4}
    """
    found: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SettingError("compiler_option", text, "expected NAME=VALUE")
        if name in found:
            raise SettingError("compiler_option", text, f"{name} is given twice; give it once")
        found[name] = {"true": True, "false": False}.get(value.lower(), int(value) if value.isdigit() else value)
    return found


def check_options(options: Mapping[str, Value]) -> None:
    """Compiles a small program with the options.

    Raises:
        SettingError: the compiler has no such option, or takes no such value.
    """
    if not options:
        return
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError as error:
        refuse_unknown(error, jax.default_backend())
        first = str(error).partition("\n")[0]
        told = " ".join(f"{name}={value}" for name, value in options.items())
        raise SettingError("compiler_option", told, f"the compiler refuses that ({first})") from error


def refuse_unknown(error: Exception, target: str) -> None:
    """Raises a `SettingError` where a compiler has said that it has no such option."""
    if found := UNKNOWN.search(str(error)):
        raise SettingError(
            "compiler_option", found[1], f"the compiler of {target} has no such option; look for another name"
        ) from error
