"""How products are checked: data alone, so that settings can be refused before JAX is imported."""

import dataclasses
from typing import Literal, TypeAlias, get_args

from sdc.settings import SettingError

from .roundoff import EXACT, Rounding

Mode: TypeAlias = Literal["detect", "locate", "correct"]
SchemeName: TypeAlias = Literal["two-tier", "blocks", "residual", "deterministic", "paper"]
Output: TypeAlias = Literal["float32 accumulator", "as is"]
AS_A_WHOLE: tuple[SchemeName, ...] = ("paper",)
"""Schemes that judge a product as a whole, and cannot tell one row from another."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How products are checked.

    Attributes:
        mode: `detect` flags rows, `locate` names wrong elements too, `correct` replaces wrong rows as well.
        scheme: see `schemes`.
        rounding: how the device rounds.
        tier: tier that rows are judged by at first.
        fused: whether the fused kernel computes the products that it fits.

    Raises:
        SettingError: a mode or scheme is unknown, or the mode needs what the scheme does not know.
    """

    mode: Mode = "detect"
    scheme: SchemeName = "two-tier"
    rounding: Rounding = EXACT
    tier: int = 1
    fused: bool = False

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("scheme", self.scheme, get_args(SchemeName))
        if self.mode != "detect" and self.scheme in AS_A_WHOLE:
            raise SettingError(
                "mode",
                self.mode,
                f"needs to know which rows are wrong, but scheme={self.scheme} judges a product as a whole; choose "
                "mode=detect, or another scheme",
            )


def check_choice(setting: str, given: str, choices: tuple[str, ...]) -> None:
    """Raises a SettingError if a setting is none of its choices."""
    if given not in choices:
        raise SettingError(setting, given, f"expected one of {', '.join(map(repr, choices))}")
