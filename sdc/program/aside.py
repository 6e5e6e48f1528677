"""What a transformed step takes beside the arguments of the step itself, such as the moment of an injected one."""

from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type[Any])
_KINDS: set[type[Any]] = set()


def aside(kind: Kind) -> Kind:
    """Declares a type whose values, before the step's own arguments, are no part of the step: they are no sites."""
    _KINDS.add(kind)
    return kind


def is_aside(value: object) -> bool:
    """Whether a value is of such a type."""
    return type(value) in _KINDS
