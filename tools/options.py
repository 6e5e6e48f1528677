"""Flags of the commands that run, compare and report."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What to train on what text, and how to print the result."""

    config: str = "tiny"
    """Configuration: tiny, bench, smollm2_135m, llama3_8b_16l or llama3_8b."""
    seed: int = 0
    """Seed of the parameters, the order of the data and everything simulated."""
    corpus: tuple[str, ...] = ("python",)
    """Text to train on: python (the standard library's source), or files and folders of text or JSONL."""
    tokenizer: str = "bytes"
    """Tokenizer: bytes, or the path of a Hugging Face tokenizer.json."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadOptions(TextOptions):
    """Where to train, and what to keep of it."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of activations and compute parameters; by default the configuration's."""
    data: int = 1
    """Number of data-parallel ranks; of each twin where there are twins."""
    model: int = 1
    """Number of tensor-parallel ranks; of each twin where there are twins."""
    devices: int | None = None
    """Simulate this many CPU devices, over all processes; by default as many as needed if there is only a CPU."""
    run: Path | None = None
    """Run folder; by default a new one below runs/."""
    resume: bool = False
    """Continue the run in the folder that --run names, from its newest checkpoint or its last injection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(WorkloadOptions):
    """How long to run, and with which other processes."""

    steps: int = 20
    """Number of optimizer steps."""
    checkpoint_every: int = 10
    """Steps from one checkpoint to the next; the last step is always saved."""
    compiler_option: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=VALUE for the compiler, such as xla_tpu_enable_sdc_checker=true; may be repeated."""
    coordinator: str | None = None
    """HOST:PORT of process 0, for a run of several processes."""
    processes: int | None = None
    """Number of processes."""
    process: int | None = None
    """Number of this process, from 0."""
    timeout: float = 300.0
    """Seconds to wait for the other processes at the start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedOptions(RunOptions):
    """What to simulate, and how to check matrix products."""

    suspect: str | None = None
    """Simulated suspect: node1 ... node15 of the published study, silicon:gpu and others, or healthy. node11:uniform is
    a simpler model of a node, and node4,times=1e6 multiplies its rates (docs/faults.md)."""
    fault: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Simulated fault, as in bitflip,rate=1e-5,site=fwd/attn or scale,rate=1e-6,where=products; may be repeated.
    Grammar: docs/faults.md."""
    abft: bool = False
    """Check matrix products by checksums, forward and backward; a simulated suspect is then corrupted in them."""
    abft_mode: Literal["detect", "locate", "correct"] = "detect"
    """Flag wrong rows (detect), name wrong elements too (locate), or replace wrong rows as well (correct)."""
    abft_scheme: Literal["two-tier", "blocks", "deterministic", "paper"] = "two-tier"
    """How large a disagreement makes a row count as wrong; docs/abft.md compares the schemes."""
    abft_where: str = "products"
    """Selector of the products to check."""
    least_coverage: float = 0.9
    """Share of the products' operations that must be checked for a verdict of clean; what cannot be entered, and does
    nobody knows how much, counts as all of them."""
    abft_profile: Path | None = None
    """File that sdc abft calibrate wrote on this kind of device; by default assumptions about the platform are used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwinOptions(CheckedOptions):
    """Trains twins side by side and compares them bit for bit.

    Example: sdc twin --model 2 --suspect node11 --steps 20

    By default simulated faults strike the last twin. Without --suspect and --fault nothing is simulated: this is the
    test of real hosts, with one twin on each (`--coordinator`, `--processes`, `--process`, or a cluster that JAX
    detects). Exit codes: 0 clean, 1 corruption found, 2 bad usage, 3 inconclusive.
    """

    sync: Literal["compute", "params", "none"] = "compute"
    """Compare and repair after every submodule (compute), after every optimizer step (params), or only compare."""
    twins: int = 2
    """Number of twins. Of two the first is the reference; of three or more the majority is."""
    placement: Literal["mesh", "vmap"] = "mesh"
    """One device per twin and rank (mesh), or all twins of a rank on one device (vmap)."""
    require_processes: int = 1
    """Distinct hosts that there must be, one process on each at least; a run on fewer ends with 3 before it starts."""
    least_elements: int = 0
    """Elements that must be checked for a verdict of clean; where they are fewer, it is inconclusive."""
    compare: Literal["gated", "always"] = "gated"
    """Move tensors only where digests differ (gated), or compare all of them every time (always)."""
    exchange: Literal["probe", "step", "call"] = "probe"
    """Exchange digests at every probe, or once in a microstep (step) or in a step (call), repeated if any differs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(CheckedOptions):
    """Trains one copy: plainly, or so that it checks its own matrix products, or combines gradients by another method.

    Example: sdc train --steps 20 --abft --run runs/checked
    Example: sdc train --data 4 --steps 50 --aggregate noise,sigma=0.01+paft,max_period=20

    Exit codes: 0 trained, and clean where something is checked (--abft, --aggregate shadow), 1 corruption found, 2 bad
    usage, 3 inconclusive (a flagged row came out the same when computed again, which another device has to judge).
    """

    aggregate: str | None = None
    """How gradients are aggregated, methods joined by +: noise,sigma=S; paft_sync,period=N; paft,max_period=N;
    dropcompute,threshold=SECONDS|auto,latency=KIND,...; lossy,p=P,packet=N; shadow. Settings: docs/aggregation.md."""
    checkpoint: Literal["full", "scar"] = "full"
    """Full checkpoints, or a running one (scar), of which the blocks that moved most are saved, more often."""
    checkpoint_fraction: float = 0.125
    """Fraction of the bytes that a save of --checkpoint scar writes; a save follows after so many times
    --checkpoint-every steps."""
    local_copies: Path | None = None
    """Folder on this host for copies of what its devices hold, one every --checkpoint-every steps, that a run which
    lost a process goes on from; by default the system's for temporary files. Needs --checkpoint scar."""
    lose_shards: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Simulated loss, as in shards,step=30,fraction=0.5,recover=partial (or full); may be repeated. Needs --checkpoint
    scar."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions(RunOptions):
    """Records a digest of every selected value at every step of a run, in the folder RUN.

    Example: sdc trace runs/golden --steps 20 --where 'primitive("dot_general")'

    Trace the same run on two machines, or on two days, and compare with `sdc diff`; or give the healthy machine's trace
    with --against and compare at once. Exit codes: 0 traced (with --against: equal), 1 the traces differ, 2 bad
    usage, 3 inconclusive.
    """

    run: Annotated[Path, tyro.conf.Positional] = dataclasses.field()
    """Run folder, a new one."""
    where: str = "everything"
    """Selector of the values: everything, probes, primitive("dot_general") & direction("bwd"), boundary(1), ..."""
    against: Path | None = None
    """Recorded trace; compare with it at every step, and stop at the first difference."""
    simulate: str | None = None
    """Simulated fault, as in bitflip,bits=30,step=3,site=fwd/attn,iteration=0+2,element=7,model=1; none for a golden
    trace of the same program."""


@dataclasses.dataclass(frozen=True)
class DiffOptions:
    """Compares two traces: names the first step and operation that differ, and says how much agrees before.

    Example: sdc diff runs/golden runs/suspect

    Exit codes: 0 equal, 1 they differ, 2 bad usage or a damaged trace, 3 not comparable.
    """

    run_a: Annotated[Path, tyro.conf.Positional]
    """Run folder of a trace."""
    run_b: Annotated[Path, tyro.conf.Positional]
    """Run folder of another trace of the same program."""
    output: Path | None = None
    """Folder for a report of the comparison, diff.html and diff.md; by default none is written."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignOptions(WorkloadOptions):
    """Injects thousands of single simulated faults into training, and tells what becomes of it after each.

    Example: sdc campaign --injections 1000 --faults bitflip nan --run runs/campaign

    Every injection starts from the clean state just before its step; all of them share one compiled program. Exit
    codes: 0 done, 2 bad usage, 3 inconclusive (the clean run does not repeat itself).
    """

    injections: int = 1000
    """Number of injections."""
    steps: int = 16
    """Number of steps of the clean run; faults strike all but the last --follow of them."""
    follow: int = 5
    """Number of steps to follow after the struck one, unless the outcome is certain before."""
    where: str = "arithmetic"
    """Selector of what is struck: arithmetic, primitive("dot_general"), argument("0/params/*"), collectives, ..."""
    faults: tuple[str, ...] = ("bitflip",)
    """Kinds of faults: bitflip, bitflip,field=exponent, bitflip,count=2, stuck1, sign, zero, nan, scale,factor=2,
    swap, ..., with a pattern such as run=8, tile=4x4 or row."""
    abft: bool = False
    """Also detect faults by checksums of the matrix products of the struck step; faults in products hit their sums."""
    batch: int | None = None
    """How many injections run at the same time, under vmap; by default 1 on a CPU and 8 on accelerators."""


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Writes report.html and report.md of a run, finished or not, and prints its summary.

    Example: sdc report runs/demo
    Example: sdc report runs
    Example: sdc report runs/demo runs/other
    Example: sdc report runs/plain runs/partial runs/full

    Given a folder of runs, it writes the report of each and an index.html with a row for each, the gravest first. Given
    two to six runs, it writes one page with all side by side, beside-FIRST.html in the folder of the last, with the
    losses over each other, and what lost shards cost. Exit codes are those of the run, of several the gravest: 0 clean,
    1 corruption found, 2 bad usage, 3 inconclusive.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folder, a folder of run folders, or several run folders."""
    output: Path | None = None
    """Folder for the page of several runs; by default that of the last run."""
    json: bool = False
    """Print the summary as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Look at certified checkpoints of any program that saves with Orbax.

    Example: sdc checkpoint verify runs/my-training/checkpoints

    Exit codes: 0 everything was restored as it was saved, 1 something was not, 2 bad usage, 3 something could not be
    compared (no certificate, or files that cannot be read).
    """

    action: tyro.conf.Positional[Literal["show", "verify", "certify"]]
    """List checkpoints and what is known of them (show), restore and compare them (verify), or give those that have no
    certificate one of what they restore to now (certify)."""
    folder: tyro.conf.Positional[str]
    """Folder that an Orbax checkpointer wrote: it holds one folder a step."""
    step: Annotated[tuple[int, ...], tyro.conf.UseAppendAction] = ()
    """Only this step; may be repeated. By default all."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""
