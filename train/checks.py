"""What a run simulates, and how it checks its own products: settings that can be checked without a device."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from sdc.checksums import Mode, Profile, SchemeName, Settings
from sdc.faults import (
    NODES,
    Fault,
    Load,
    describe,
    expected_frequency,
    node_faults,
    parse_fault,
    parse_suspect,
    published,
)
from sdc.program import Selector, as_selector
from sdc.settings import SettingError, check_types

from .submodules import submodule_products

if TYPE_CHECKING:
    from .programs import Transform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """How the matrix products of a run are checked by checksums; see `sdc.abft`.

    Attributes:
        mode: `detect`, `locate` or `correct`.
        scheme: when a row counts as wrong.
        where: selector of the products, or its text.
        profile: file that `sdc abft calibrate` wrote on this kind of device; None for what is assumed of the platform.
        least_coverage: share of the products' work that must be checked for a verdict of clean; see
            `sdc.checksums.coverage`.
    """

    mode: Mode = "detect"
    scheme: SchemeName = "two-tier"
    where: Selector | str = "products"
    profile: str | PathLike[str] | None = None
    least_coverage: float = 0.9

    def check(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: one of them makes no sense.
        """
        Settings(self.mode, self.scheme)
        check_types(self)
        as_selector(self.where)
        if not 0 <= self.least_coverage <= 1:
            raise SettingError("least_coverage", self.least_coverage, "expected a share, from 0 to 1")
        if self.profile is not None:
            try:
                Profile.read(self.profile)  # type: ignore[arg-type] # str or path
            except ValueError as error:
                raise SettingError("profile", str(self.profile), str(error)) from error

    def transform(self) -> "Transform":
        """The transformation of a step; JAX's devices have started."""
        import sdc

        return functools.partial(
            sdc.abft, where=as_selector(self.where), mode=self.mode, scheme=self.scheme, profile=self.read_profile()
        )

    def read_profile(self) -> Profile:
        """The profile, or what is assumed of the platform; JAX's devices have started."""
        return Profile.assumed() if self.profile is None else Profile.read(self.profile)  # type: ignore[arg-type]

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the checks."""
        read = self.read_profile()
        if departs := read.departs():
            warnings.warn(
                f"the profile {self.profile} was measured elsewhere, and its thresholds may not fit: "
                + "; ".join(departs),
                stacklevel=2,
            )
        return {
            "mode": self.mode,
            "scheme": self.scheme,
            "where": self.where if isinstance(self.where, str) else self.where.text,
            "profile": "assumed of the platform" if self.profile is None else str(self.profile),
            "kappa": read.rounding.kappa,
            "inputs": read.rounding.inputs,
            "second_tier": list(read.second_tier),
            "departs": departs,
            "least_coverage": self.least_coverage,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated:
    """Simulated faults of a run: those of a node of the study, or any others.

    Attributes:
        suspect: a node, a profile of silicon or `healthy`, see `sdc.faults.nodes.parse_suspect`; None for none.
        faults: faults, or lines of text as `sdc.faults.parse_fault` reads them.
        twin: the twin that has them, where there are twins and the fault does not say another.
        products: whether they strike matrix products rather than the outputs of submodules.
        sync: what of a node is synchronized, see `sdc.faults.node_faults`.
    """

    suspect: str | None = None
    faults: Sequence[Fault | str] = ()
    twin: int | None = None
    products: bool = False
    sync: Load = "none"

    @property
    def _at(self) -> dict[str, int]:
        return {} if self.twin is None else {"twin": self.twin}

    def check(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: one of them makes no sense.
        """
        check_types(self)
        if self.suspect is not None and self.faults:
            raise SettingError("suspect", self.suspect, "faults are given too; give one of them, since both simulate")
        try:
            self.make(layers=1)
        except ValueError as error:
            if self.suspect is None:
                raise
            raise SettingError("suspect", self.suspect, str(error)) from error

    def make(self, *, layers: int) -> tuple[Fault, ...]:
        """The faults, for a model of so many layers."""
        if self.suspect is not None:
            where = submodule_products if self.products else str
            return tuple(node_faults(self.suspect, layers=layers, at=self._at, where=where, sync=self.sync))
        read = (parse_fault(fault) if isinstance(fault, str) else fault for fault in self.faults)
        return tuple(dataclasses.replace(fault, at={**self._at, **fault.at}) for fault in read)

    def describe(self, *, layers: int, steps: int) -> dict[str, Any]:
        """What the manifest says of the suspect."""
        told = describe(self.make(layers=layers))
        name = self.suspect or ("custom" if told else None)
        suspect = parse_suspect(self.suspect) if self.suspect is not None else None
        if suspect is not None and (departs := suspect.departs()):
            warnings.warn(departs, stacklevel=2)
        # Published are frequencies of wrong elements in the outputs of submodules.
        known = suspect is not None and suspect.name in NODES and not self.products
        figures = published(suspect.name) if known and suspect is not None else None
        return {
            "suspect": {"name": name, "simulated": bool(told), "faults": told},
            "published": figures
            and {site: {"frequency": f.frequency, "severity": f.severity} for site, f in figures.items()},
            "expected": expected_frequency(str(self.suspect), steps, sync=self.sync) if figures else None,
        }


def as_aggregated(told: Mapping[str, Any], text: str, simulated: Sequence[str]) -> dict[str, Any]:
    """What the manifest says of the suspect of a run with a way of aggregation."""
    suspect = told["suspect"]
    every = [*suspect["faults"], *simulated]
    name = suspect["name"] or ("aggregation" if every else None)
    return {**told, "aggregate": text, "suspect": {"name": name, "simulated": bool(every), "faults": every}}
