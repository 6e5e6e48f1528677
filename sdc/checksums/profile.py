"""Profiles: what was measured of a device's products, and what follows for their checks."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdc.records import RecordError

from ..program import compiled_for
from ..records import endless, read_json, reason, write_json
from .roundoff import PLATFORMS, Rounding, Settings

SCHEMA = 1
TITLE = "sdc abft profile"


@dataclasses.dataclass(frozen=True)
class Profile:
    """How products are checked on one kind of device.

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
    measured_on: Mapping[str, Any] | None = None
    measurements: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
        remedy = "make one with sdc abft calibrate"
        try:
            if found := endless(path):
                raise RecordError(f"it is {found}, not a file")
            values = read_json(path)
        except OSError as error:
            raise ValueError(f"cannot read the profile {path} ({reason(error)}); {remedy}") from error
        except RecordError as error:
            raise ValueError(f"cannot read the profile {path} ({error}); {remedy}") from error
        if values.get("title") != TITLE or values.get("schema") != SCHEMA:
            raise ValueError(f"{path} is no profile of version {SCHEMA} (title and schema say so); {remedy}")
        try:
            names = values["second_tier"]
            named = isinstance(names, list) and all(isinstance(name, str) for name in names)
            if not isinstance(values["fused"], bool) or not named:
                raise TypeError(f"fused={values['fused']!r}, second_tier={values['second_tier']!r}")
            profile = cls(
                Rounding(float(values["arithmetic"]["kappa"]), float(values["arithmetic"]["inputs"])),
                tuple(names),
                values["fused"],
                dict(values["measured_on"]),
                dict(values["measurements"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the profile {path} is damaged ({error!r}); {remedy}") from error
        return profile

    def save(self, path: Path) -> None:
        """Writes the profile, whole or not at all."""
        write_json(
            path,
            {
                "title": TITLE,
                "schema": SCHEMA,
                "measured_on": self.measured_on or hardware(),
                "arithmetic": dataclasses.asdict(self.rounding),
                "second_tier": self.second_tier,
                "fused": self.fused,
                "measurements": self.measurements,
            },
        )

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


def hardware() -> dict[str, Any]:
    """Devices and libraries on which the rounding of products depends."""
    from ..records import environment

    known = environment()
    kept = ("platform", "device_kind", "platform_version", "processor")
    packages = {name: known["packages"][name] for name in ("jax", "jaxlib")}
    return {name: known[name] for name in kept if name in known} | {"packages": packages}
