"""Package facades that import names on first use, which delays the import of JAX for as long as possible.

Flags, configurations and text forms are checked before anything else happens. Importing JAX alone takes longer than a
user should have to wait for an error about a mistyped flag, so a package imports nothing eagerly. Its `__init__.py`
lists its exports as ordinary imports below `if TYPE_CHECKING:`, where type checkers and readers find them, and `facade`
reads that list.

Classes that are parsed from text or configurations (kinds of faults, latencies, selectors) hold both settings and
computations. The modules that define such classes import `jax`, `jnp`, `lax` and `np` from this module. Each of these
four objects imports its module when one of its attributes is first looked up; checks of settings look up none. The
modules with such classes import array types below `if TYPE_CHECKING:`.
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from etils import epath
    from jax import lax

__all__ = ["Lazy", "epath", "facade", "jax", "jnp", "lax", "np"]


# The extra that installs each optional module.
EXTRAS = {
    "jinja2": "report", "markupsafe": "report", "matplotlib": "report", "grain": "text", "tokenizers": "text",
    "prometheus_client": "metrics", "tensorboardX": "tensorboard", "sklearn": "study", "gguf": "finetune",
}  # fmt: skip


def missing(extra: str) -> bool:
    """Returns whether any module that an extra installs is missing."""
    return any(importlib.util.find_spec(name) is None for name, of in EXTRAS.items() if of == extra)


def remedy(*extras: str) -> str:
    """Returns the part of an error message that explains how to install missing extras."""
    named = " and ".join(f"`{extra}`" for extra in extras)
    return f"needs the extra{'s' * (len(extras) > 1)} {named}: pip install 'jax-sdc[{','.join(extras)}]'"


class Lazy:
    """A module that is imported when one of its attributes is first looked up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if not TYPE_CHECKING:
    jax, jnp, lax, np = (Lazy(name) for name in ("jax", "jax.numpy", "jax.lax", "numpy"))
    epath = Lazy("etils.epath")


def facade(package: str, public: bool = True) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package, from the imports below its `if TYPE_CHECKING:`.

    Args:
        package: `__name__` of the package. Imports below its first `if TYPE_CHECKING:` are public; imports below a
            second such block are for the other packages of this project, and are not in `__all__`.
        public: whether the first block is public; if False, all exports are for other packages of this project.

    Example:
        >>> from sdc._lazy import facade
        >>> load, _, names = facade("sdc.faults")
        >>> "BitFlip" in names, load("BitFlip").__name__
        (True, 'BitFlip')
    """
    module = sys.modules.get(package) or importlib.import_module(package)
    loader: Any = module.__spec__.loader if module.__spec__ else None
    exports: dict[str, tuple[str, str | None]] = {}
    names: list[str] = []
    for node in ast.parse(loader.get_source(package)).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            names = names or sorted(exports if public else ())
            for line in node.body:
                assert isinstance(line, ast.ImportFrom), ast.unparse(line)
                source = "." * line.level + (line.module or "")
                for alias in line.names:
                    place = (f".{alias.name}", None) if source == "." else (source, alias.name)
                    exports[alias.asname or alias.name] = place

    def load(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source, attribute = exports[name]
        try:
            found = importlib.import_module(source, package)
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            raise ModuleNotFoundError(f"{package}.{name} {remedy(extra)}", name=error.name) from error
        value = found if attribute is None else getattr(found, attribute)
        setattr(module, name, value)
        return value

    names = names or sorted(exports if public else ())
    return load, lambda: sorted({*vars(module), *exports}), names
