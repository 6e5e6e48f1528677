"""Flags of `sdc estimate`."""

import dataclasses
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """Says what a step, and the tools around it, cost on chips that are not here, by the compiler's estimate.

    Example: sdc estimate --target v5p:2x2x4 --config llama3_8b_16l --model 8

    Compiles the plain step, and the step with each tool, for named targets, with the real compilers and without the
    hardware (pip install 'jax-sdc[targets]'). Tells cycles and the operations that take most of them (TPU), kernels and
    bytes that they move (GPU), collectives, memory and compile time. Nothing is measured. Exit codes: 0 done, 2 bad
    usage, or a step that does not fit the memory, 3 the compiler crashed.
    """

    target: tuple[str, ...]
    """Chips: v4:2x2x1, v5e:4x4, v5p:2x2x4, v6e:4x4, 7x:2x2x1; 2xv5p:2x2x4 for two slices; h100x1, h100x8, 2xh100x8."""
    config: str | None = None
    """Configuration of the reference workload: tiny, bench, smollm2_135m, llama3_8b_16l or llama3_8b."""
    step: str | None = None
    """Your own step: MODULE:FUNCTION, a function that returns (step, *arguments); arguments may be shapes."""
    tool: tuple[Literal["plain", "lockstep", "fingerprint", "abft", "inject"], ...] = ("plain", "lockstep")
    """Tools to estimate; the first is what the others are compared with."""
    where: str | None = None
    """Selector of sites; by default probes, for abft every product, for inject those of the backward pass."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of activations and compute parameters; by default the configuration's."""
    sync: Literal["compute", "params", "none"] = "compute"
    """What twins of a configuration synchronize inside a step."""
    compare: Literal["gated", "always"] = "gated"
    """Move tensors only where digests differ, or always."""
    exchange: Literal["probe", "step", "call"] = "probe"
    """Exchange digests at every probe, or once in a microstep (step) or in a step (call), repeated if any differs."""
    twins: int = 2
    """Number of twins."""
    data: int = 1
    """Number of data-parallel ranks; of each twin where there are twins."""
    model: int = 1
    """Number of tensor-parallel ranks; of each twin where there are twins."""
    compiler_option: tuple[str, ...] = ()
    """NAME=VALUE for the compiler, such as xla_tpu_enable_sdc_checker=true."""
    run: Path | None = None
    """Folder of the record, a new one; by default one below runs/."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""
