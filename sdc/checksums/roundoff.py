"""Settings of a check, and what they rest on: unit round-offs of types, how a device rounds, and what was measured.

JAX is imported when it is first used, so that settings can be refused before.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from sdc._lazy import jax, jnp
from sdc.settings import SettingError

from ..program import compiled_for
from ..records import Format, differences, environment
from ..schema import Header

if TYPE_CHECKING:
    from pathlib import Path

Mode: TypeAlias = Literal["detect", "locate", "correct"]
SchemeName: TypeAlias = Literal["two-tier", "blocks", "residual", "deterministic", "paper"]
Output: TypeAlias = Literal["float32 accumulator", "as is"]
# Schemes that judge a product as a whole, and cannot distinguish its rows.
AS_A_WHOLE: tuple[SchemeName, ...] = ("paper",)

SIGMAS = 3.4  # bound of a sum of rounding errors, in units of their largest value times the root of the sum of squares
# Bound of the errors of two sums of k and n terms, in units of u sqrt(k + n). Measured on seven kinds of factors and
# on real training: 0.9 at the most, at which the bound is 2.5 times as large.
SPREAD = 2.25


@functools.lru_cache
def unit(dtype: Any) -> float:
    """The unit round-off of a type: the largest relative error of rounding to nearest, half its `eps`."""
    return float(2.0 ** -(_info(dtype).nmant + 1))


def spacing(dtype: Any) -> float:
    """The largest error of rounding numbers near zero: half the smallest subnormal; all of it where those are flushed.

    XLA's CPU backend and accelerators flush the subnormals of float32, and with them those of bfloat16.
    """
    info = _info(dtype)
    flushed = info.minexp <= jnp.finfo(jnp.float32).minexp
    return float(info.tiny) if flushed else float(info.smallest_subnormal) / 2


@functools.lru_cache
def known(dtype: Any) -> bool:
    """Whether the round-off of a type is known."""
    return jnp.issubdtype(dtype, jnp.floating) and jax.dtypes.itemsize_bits(dtype) >= 8


@functools.lru_cache
def work_type(*dtypes: Any) -> Any:
    """The type in which products of these types are accumulated and checked: float32, or float64 for float64."""
    for dtype in dtypes:
        _info(dtype)
    return jnp.float64 if any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes) else jnp.float32


def _info(dtype: Any) -> Any:
    if not known(dtype):
        raise ValueError(
            f"a product of {jnp.dtype(dtype).name} cannot be checked: its round-off is not known; expected float64, "
            "float32, bfloat16, float16 or a float8 (leave the product out with where=)"
        )
    return jnp.finfo(dtype)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How a device rounds what it multiplies and adds.

    Attributes:
        kappa: rounding errors of long sums that are cut off and not rounded grow as `k / kappa`; infinite where sums
            round to nearest. Tensor cores truncate: about 16.
        inputs: largest relative error of what is done to float32 inputs before they are multiplied: 0 where products
            are exact, 2^-11 for TF32, 2^-8 where they are rounded to bfloat16.
    """

    kappa: float = math.inf
    inputs: float = 0.0

    def __post_init__(self) -> None:
        if not self.kappa >= 1 or not 0 <= self.inputs <= 2.0**-4:
            raise ValueError(
                f"kappa={self.kappa}, inputs={self.inputs}: expected kappa of 1 or more, and a relative error of "
                "inputs from 0 to 1/16; with others nothing would be found"
            )


EXACT = Rounding()  # sums that round to nearest, of products that are exact
# What is assumed of a platform that was not calibrated.
PLATFORMS = {
    "cpu": EXACT,
    "gpu": Rounding(kappa=16.0, inputs=2.0**-11),
    "tpu": Rounding(kappa=16.0, inputs=2.0**-8),
}


@dataclasses.dataclass(frozen=True)
class Units:
    """Relative and absolute errors of one product, from its types and the device."""

    sum: float  # unit round-off of the sums
    inputs: float  # relative error of rounding the inputs before they are multiplied
    output: float  # relative error of rounding the sums to the output's type; 0 where they are not rounded
    least: float  # absolute error of rounding the smallest sums to the output's type
    kappa: float  # see `Rounding`

    @classmethod
    def of(cls, a: Any, b: Any, c: Any, rounding: Rounding, *, exact: bool = False) -> Units:
        """The units of a product of arrays of these types."""
        work = work_type(a, b, c)
        wide = max(a, b, key=lambda dtype: jnp.finfo(dtype).nmant)
        inputs = 0.0 if exact or unit(wide) >= rounding.inputs else rounding.inputs
        rounded = unit(c) > unit(work)
        return cls(
            sum=unit(work),
            inputs=inputs,
            output=unit(c) if rounded else 0.0,
            least=spacing(c) if rounded else 0.0,
            kappa=rounding.kappa,
        )

    def relative(self, depth: int, width: int) -> float:
        """Lambda, the error of a row's check relative to the row: `u (2.25 sqrt(k + n) + k / kappa)` + the inputs'."""
        return self.sum * (SPREAD * math.sqrt(depth + width) + depth / self.kappa) + SIGMAS * self.inputs


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


class Profile(Header, tag="jax-sdc abft profile"):
    """How products are checked on one kind of device: the file that `sdc abft calibrate` writes.

    Attributes:
        rounding: how the device rounds.
        second_tier: sites whose first tier has so much to pass on that they begin with the second.
        fused: whether the fused kernel is faster than XLA's product and its sums.
        measured_on: device and library versions; None where nothing was measured.
        measurements: what was measured, as `sdc abft calibrate` prints it.
    """

    rounding: Rounding
    second_tier: tuple[str, ...] = ()
    fused: bool = False
    measured_on: dict[str, Any] | None = None
    measurements: dict[str, Any] = msgspec.field(default_factory=dict)

    @classmethod
    def assumed(cls) -> Profile:
        """What is assumed of the devices at hand, where nothing was measured."""
        return cls(PLATFORMS.get(compiled_for().platform, PLATFORMS["gpu"]))

    @classmethod
    def given(cls, profile: Profile | None) -> Profile:
        """A profile that a caller gave, or what is assumed without one."""
        if profile is None:
            return cls.assumed()
        if not isinstance(profile, Profile):
            raise TypeError(f"profile={profile!r} is no profile; read one with sdc.checksums.Profile.load(path)")
        return profile

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Reads a profile, and warns if it is of another device or of other libraries than those at hand."""
        profile = cls.read(path)
        if lines := profile.departs():
            warnings.warn(
                f"the profile {path} was measured elsewhere, and its thresholds may not fit: " + "; ".join(lines),
                stacklevel=2,
            )
        return profile

    @classmethod
    def read(cls, path: Path | str) -> Profile:
        """Reads a profile without a look at the devices at hand."""
        return PROFILE.read(path)

    def save(self, path: Path) -> None:
        """Writes the profile, whole or not at all."""
        PROFILE.write(path, msgspec.structs.replace(self, measured_on=self.measured_on or hardware()))

    def departs(self) -> list[str]:
        """What the devices and libraries at hand differ in from those that were measured, one line each."""
        if self.measured_on is None:
            return []
        return [found.describe(("measured on", "here")) for found in differences([self.measured_on, hardware()])]

    def settings(self, settings: Settings, site: str) -> Settings:
        """The settings of one site."""
        tier = 2 if site in self.second_tier else 1
        return dataclasses.replace(settings, rounding=self.rounding, tier=tier, fused=self.fused)


PROFILE = Format(type=Profile, noun="profile of products", remedy="make one with sdc abft calibrate")


def hardware() -> dict[str, Any]:
    """Devices and libraries on which the rounding of products depends."""
    known = environment()
    kept = ("platform", "device_kind", "platform_version", "processor")
    packages = {name: known["packages"][name] for name in ("jax", "jaxlib")}
    return {name: known[name] for name in kept if name in known} | {"packages": packages}
