"""Flags of `sdc doctor`."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Says whether this environment is fit for bitwise comparison, and if not, which setting or operation is why.

    Example: sdc doctor --json > host-a.json, then on another host: sdc doctor --against host-a.json

    Runs a small training step and single operations twice in one process, in several, from an empty and a warm
    compilation cache, and with the devices in the opposite order; looks at flags, variables and libraries; narrows down
    what differs by running it again with other settings. Exit codes: 0 fit, 1 bits differed, 2 bad usage, 3 it could
    not be found out.
    """

    config: str | None = None
    """Configuration of the training step: tiny, bench, smollm2_135m, ...; by default one that compiles in seconds."""
    devices: int | None = None
    """Simulate this many CPU devices; by default what there is."""
    prepared: bool = False
    """Look at the environment as the commands of sdc set it up (flags of GPUs, NPROC), instead of as it is."""
    against: Path | None = None
    """What sdc doctor --json wrote on another host: says what differs between the two, operation by operation."""
    seconds: float = 300.0
    """How long it may take; what was not found out until then is told as such."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""
