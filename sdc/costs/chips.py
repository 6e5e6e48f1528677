"""What is published of the chips that programs can be compiled for, and how a target is named.

`v5p:2x2x4` is one TPU slice of 16 chips and `2xv5p:2x2x4` two such slices; `h100x8` is one host of eight GPUs and
`2xh100x8` two hosts.

Sources: the pages of Cloud TPU on v4, v5e, v5p, v6e and TPU7x (memory, bandwidths, peak arithmetic), NVIDIA's data
sheet of the H100 SXM. Clocks follow from the peak arithmetic and the number and size of the matrix units.
"""

import dataclasses
import math
import re

from sdc.settings import SettingError


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a device of a target can do. All figures are per device as JAX counts them, and not measured.

    Attributes:
        platform: `tpu` or `gpu`.
        compiler: the chip's name in the descriptions that the compiler takes.
        memory: bytes of high-bandwidth memory.
        bandwidth: of that memory, bytes per second.
        clock: cycles per second.
        link: bytes per second that a device sends to the next one along one axis of its slice, or to its host's other
            GPUs.
        network: bytes per second of a device's share of the data-centre network.
        latency: seconds that a collective takes at the least, within a slice or host and over the network.
        host: chips of a host along each dimension.
        cores: `megacore` where one device is both cores of a chip.
        devices: devices that JAX makes of one chip.
    """

    platform: str
    compiler: str
    memory: int
    bandwidth: float
    clock: float
    link: float
    network: float
    latency: tuple[float, float]
    host: tuple[int, ...]
    cores: str = "default"
    devices: int = 1


GIB, GB = 2**30, 1e9
NEAR = (1e-6, 3e-5)
"""Assumed: a microsecond a hop, and thirty over the network. Nothing is published of either."""

CHIPS = {
    "v4": Chip("tpu", "v4", 32 * GIB, 1228 * GB, 1.05e9, 100 * GB, 6.25 * GB, NEAR, (2, 2, 1), "megacore"),
    "v5e": Chip("tpu", "v5e", 16 * GIB, 819 * GB, 1.5e9, 100 * GB, 3.125 * GB, NEAR, (2, 2, 1)),
    "v5p": Chip("tpu", "v5p", 95 * GIB, 2765 * GB, 1.75e9, 200 * GB, 6.25 * GB, NEAR, (2, 2, 1), "megacore"),
    "v6e": Chip("tpu", "v6e", 32 * GIB, 1638 * GB, 1.75e9, 200 * GB, 12.5 * GB, NEAR, (2, 2, 1)),
    "7x": Chip("tpu", "tpu7x", 96 * GIB, 3690 * GB, 2.2e9, 200 * GB, 6.25 * GB, NEAR, (2, 2, 1), devices=2),
    "h100": Chip("gpu", "h100", 85_899_345_920, 3352 * GB, 1.98e9, 450 * GB, 50 * GB, (5e-6, 3e-5), (8,)),
}
"""A ring along one axis of a slice has the two links of that axis: a third (3D torus) or half (2D) of all of them. Of
v4 no figure of the network is published; that of v5p stands in."""
_NAME = re.compile(
    r"(?:(?P<slices>\d{1,4})x)?(?P<chip>[a-z0-9]+?)(?::(?P<shape>\d{1,4}(?:x\d{1,4}){1,2})|x(?P<count>\d{1,4}))"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """Chips that a program is compiled for.

    Attributes:
        name: as it was given.
        chip: what they are.
        slices: TPU slices, or hosts of GPUs, between which is the data-centre network.
        shape: chips of a slice along each of its dimensions; GPUs of a host.
    """

    name: str
    chip: Chip
    slices: int
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of devices that JAX sees."""
        return self.slices * math.prod(self.shape) * self.chip.devices


def find_target(name: str) -> Target:
    """The target of that name.

    Raises:
        SettingError: it is no name of a target.

    Example:
        >>> from sdc.costs import find_target
        >>> find_target("2xv5p:2x2x4").devices
        32
    """
    found = _NAME.fullmatch(name.lower().removeprefix("tpu"))
    if found is None or found["chip"] not in CHIPS:
        raise SettingError(
            "target", name, f"expected a target such as v5p:2x2x4, 2xv5e:4x4 or h100x8; known are {_known()}"
        )
    chip = CHIPS[found["chip"]]
    if (found["shape"] is None) is (chip.platform == "tpu"):
        example = "v5p:2x2x4" if chip.platform == "tpu" else "h100x8"
        raise SettingError("target", name, f"expected the shape of a slice, as in {example}")
    shape = tuple(int(side) for side in (found["shape"] or found["count"]).split("x"))
    slices = int(found["slices"] or 1)
    if not all(shape) or not slices:
        raise SettingError("target", name, "has no chips; give numbers of at least 1")
    return Target(name, chip, slices, shape)


def _known() -> str:
    return ", ".join(f"{name}:..." if chip.platform == "tpu" else f"{name}x..." for name, chip in CHIPS.items())
