"""Profiles: what was measured of a device's products, and what follows for their checks."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import msgspec

from ..program import compiled_for
from ..records import Format
from ..schema import Header
from .roundoff import PLATFORMS, Rounding, Settings


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
    def assumed(cls) -> "Profile":
        """What is assumed of the devices at hand, where nothing was measured."""
        return cls(PLATFORMS.get(compiled_for().platform, PLATFORMS["gpu"]))

    @classmethod
    def given(cls, profile: "Profile | None") -> "Profile":
        """A profile that a caller gave, or what is assumed without one."""
        if profile is None:
            return cls.assumed()
        if not isinstance(profile, Profile):
            raise TypeError(f"profile={profile!r} is no profile; read one with sdc.checksums.Profile.load(path)")
        return profile

    @classmethod
    def load(cls, path: Path | str) -> "Profile":
        """Reads a profile, and warns if it is of another device or of other libraries than those at hand."""
        profile = cls.read(path)
        if lines := profile.departs():
            warnings.warn(
                f"the profile {path} was measured elsewhere, and its thresholds may not fit: " + "; ".join(lines),
                stacklevel=2,
            )
        return profile

    @classmethod
    def read(cls, path: Path | str) -> "Profile":
        """Reads a profile without a look at the devices at hand."""
        return PROFILE.read(path)

    def save(self, path: Path) -> None:
        """Writes the profile, whole or not at all."""
        PROFILE.write(path, msgspec.structs.replace(self, measured_on=self.measured_on or hardware()))

    def departs(self) -> list[str]:
        """What the devices and libraries at hand differ in from those that were measured, one line each."""
        from ..records import differences

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
    from ..records import environment

    known = environment()
    kept = ("platform", "device_kind", "platform_version", "processor")
    packages = {name: known["packages"][name] for name in ("jax", "jaxlib")}
    return {name: known[name] for name in kept if name in known} | {"packages": packages}
