"""Settings of a check, and what they depend on: unit roundoffs of types, the rounding of a device, and measured
profiles.

JAX is imported on first use, so that invalid settings are rejected before JAX is loaded.
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
Examine: TypeAlias = Literal["within", "again"]
# Schemes that check a product as a whole, and cannot distinguish its rows.
AS_A_WHOLE: tuple[SchemeName, ...] = ("paper",)

SIGMAS = 3.4  # bound on a sum of rounding errors, in units of the largest relative error times the norm of the terms
# Bound on the errors of two sums of k and n terms, in units of u sqrt(k + n). The largest value measured, on seven
# kinds of factors and in real training, is 0.9, 2.5 times smaller.
SPREAD = 2.25


@functools.lru_cache
def unit(dtype: Any) -> float:
    """Returns the unit roundoff of a type: the largest relative error of rounding to nearest, which is half of its
    `eps`."""
    return float(2.0 ** -(_info(dtype).nmant + 1))


def spacing(dtype: Any) -> float:
    """Returns the largest rounding error near zero: half of the smallest subnormal number, or the smallest normal
    number if subnormals are flushed.

    XLA's CPU backend and accelerators flush the subnormals of float32, and therefore those of bfloat16.
    """
    info = _info(dtype)
    flushed = info.minexp <= jnp.finfo(jnp.float32).minexp
    return float(info.tiny) if flushed else float(info.smallest_subnormal) / 2


@functools.lru_cache
def known(dtype: Any) -> bool:
    """Returns whether the roundoff of a type is known."""
    return jnp.issubdtype(dtype, jnp.floating) and jax.dtypes.itemsize_bits(dtype) >= 8


@functools.lru_cache
def work_type(*dtypes: Any) -> Any:
    """Returns the type in which products of these types are accumulated and checked: float32 or float64."""
    for dtype in dtypes:
        _info(dtype)
    return jnp.float64 if any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes) else jnp.float32


def _info(dtype: Any) -> Any:
    if not known(dtype):
        raise ValueError(
            f"a product of {jnp.dtype(dtype).name} cannot be checked, because its roundoff is unknown; use float64, "
            "float32, bfloat16, float16 or a float8 type, or exclude the product with where="
        )
    return jnp.finfo(dtype)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The rounding of a device's multiplications and additions.

    Attributes:
        kappa: constant of truncated sums, whose rounding errors grow as `k / kappa`: infinite if sums are rounded to
            nearest, and about 16 for tensor cores, which truncate.
        inputs: largest relative error of rounding float32 inputs before they are multiplied: 0 if products are exact,
            2^-11 for TF32, and 2^-8 if inputs are rounded to bfloat16.
    """

    kappa: float = math.inf
    inputs: float = 0.0

    def __post_init__(self) -> None:
        if not self.kappa >= 1 or not 0 <= self.inputs <= 2.0**-4:
            raise ValueError(
                f"kappa={self.kappa}, inputs={self.inputs}: kappa must be at least 1, and inputs (a relative error) "
                "must be between 0 and 1/16; with other values, checks would detect nothing"
            )


EXACT = Rounding()  # sums that round to nearest, of exact products
# Assumed rounding of platforms without calibration.
PLATFORMS = {
    "cpu": EXACT,
    "gpu": Rounding(kappa=16.0, inputs=2.0**-11),
    "tpu": Rounding(kappa=16.0, inputs=2.0**-8),
}


@dataclasses.dataclass(frozen=True)
class Units:
    """Relative and absolute errors of one product, which follow from its types and the device."""

    sum: float  # unit roundoff of the sums
    inputs: float  # relative error of rounding the inputs before they are multiplied
    output: float  # relative error of rounding the sums to the output's type; 0 if they are not rounded
    least: float  # absolute error of rounding the smallest sums to the output's type
    kappa: float  # see `Rounding`

    @classmethod
    def of(cls, a: Any, b: Any, c: Any, rounding: Rounding, *, exact: bool = False) -> Units:
        """Returns these errors for a product of arrays of the given types."""
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
        """Returns lambda, the relative error of a row's check: `u (2.25 sqrt(k + n) + k / kappa)`, plus the error of
        rounding the inputs."""
        return self.sum * (SPREAD * math.sqrt(depth + width) + depth / self.kappa) + SIGMAS * self.inputs


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings for checking matrix products.

    Attributes:
        mode: `detect` flags rows, `locate` also locates wrong elements, and `correct` also replaces wrong rows.
        scheme: see `schemes`.
        rounding: rounding of the device.
        tier: the tier with which checks begin.
        cancels: whether terms may cancel, so that the first tier uses q_i too, without scaling.
        lenient: whether the first tier allows for terms that long sums lose (see `Scheme.lenience`).
        fused: whether the fused kernel computes the products for which it is suitable.
        columns: whether the first tier tests the columns of a product of bfloat16 numbers, with sums that XLA computes
            on the matrix units and together with the product (see `schemes.sketch`).

    Raises:
        SettingError: a mode or scheme is unknown, or the scheme does not support the mode.
    """

    mode: Mode = "detect"
    scheme: SchemeName = "two-tier"
    rounding: Rounding = EXACT
    tier: int = 1
    cancels: bool = False
    lenient: bool = False
    fused: bool = False
    columns: bool = False

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("scheme", self.scheme, get_args(SchemeName))
        if self.mode != "detect" and self.scheme in AS_A_WHOLE:
            raise SettingError(
                "mode",
                self.mode,
                f"needs to know which rows are wrong, but scheme={self.scheme} checks a product as a whole; choose "
                "mode=detect, or another scheme",
            )


def check_choice(setting: str, given: str, choices: tuple[str, ...]) -> None:
    """Raises SettingError if a setting is not one of its choices."""
    if given not in choices:
        raise SettingError(setting, given, f"expected one of {', '.join(map(repr, choices))}")


class Profile(Header, tag="jax-sdc abft profile"):
    """Profile of one kind of device, which determines how products are checked on it; `sdc abft calibrate` writes it to
    a file.

    Attributes:
        rounding: rounding of the device.
        second_tier: sites whose checks begin with the second tier, because the first tier would pass on too many rows.
        fused: whether the fused kernel is faster than XLA's product and sums.
        measured_on: device and library versions; None if nothing was measured.
        measurements: the measurements, as `sdc abft calibrate` prints them.
    """

    rounding: Rounding
    second_tier: tuple[str, ...] = ()
    fused: bool = False
    measured_on: dict[str, Any] | None = None
    measurements: dict[str, Any] = msgspec.field(default_factory=dict)

    @classmethod
    def assumed(cls) -> Profile:
        """Returns the profile that is assumed for the current devices if nothing was measured."""
        return cls(PLATFORMS.get(compiled_for().platform, PLATFORMS["gpu"]))

    @classmethod
    def given(cls, profile: Profile | None) -> Profile:
        """Returns the caller's profile, or the assumed profile if the caller gives None."""
        if profile is None:
            return cls.assumed()
        if not isinstance(profile, Profile):
            raise TypeError(f"profile={profile!r} is not a profile; read one with sdc.checksums.Profile.load(path)")
        return profile

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Reads a profile, and warns if the profile was measured on another device or with other libraries."""
        profile = cls.read(path)
        if lines := profile.departs():
            warnings.warn(
                f"the profile {path} was measured with other devices or libraries, so its thresholds may not fit: "
                + "; ".join(lines),
                stacklevel=2,
            )
        return profile

    @classmethod
    def read(cls, path: Path | str) -> Profile:
        """Reads a profile without comparing it with the current devices."""
        return PROFILE.read(path)

    def save(self, path: Path) -> None:
        """Writes the profile atomically."""
        PROFILE.write(path, msgspec.structs.replace(self, measured_on=self.measured_on or hardware()))

    def departs(self) -> list[str]:
        """Returns the differences between the current devices and libraries and those of the measurement, one line
        each."""
        if self.measured_on is None:
            return []
        return [found.describe(("measured on", "here")) for found in differences([self.measured_on, hardware()])]

    def settings(self, settings: Settings, site: str) -> Settings:
        """Returns the settings of one site."""
        tier = 2 if site in self.second_tier else 1
        return dataclasses.replace(settings, rounding=self.rounding, tier=tier, fused=self.fused)


PROFILE = Format(type=Profile, noun="profile of products", remedy="create one with sdc abft calibrate")


def hardware() -> dict[str, Any]:
    """Returns the devices and libraries on which the rounding of products depends."""
    known = environment()
    kept = ("platform", "device_kind", "platform_version", "processor")
    packages = {name: known["packages"][name] for name in ("jax", "jaxlib")}
    return {name: known[name] for name in kept if name in known} | {"packages": packages}
