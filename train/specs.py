"""Specifications of runs, as frozen dataclasses. Errors that can be detected without a device are reported before any
device is started.

`sdc.train.run` executes a job, `run_campaign` executes a campaign, and `escalate` compares hosts. Jobs differ in the
program that they build from the reference step, and in the fields that they add to the manifest.
"""

import abc
import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import sdc
from sdc.aggregation import Aggregation, parse_aggregation
from sdc.checksums import LEAST_COVERAGE, Examine, Mode, Profile, SchemeName, Settings
from sdc.costs import read_options
from sdc.faults import Fault, as_fault, parse_fault, read_hit, write_hit
from sdc.nodes import NODES, Load, expected_frequency, node_faults, parse_suspect, published
from sdc.program import Selector, as_selector, direction, matching, products, scope
from sdc.settings import LARGEST_SEED, Flag, SettingError, Within, check_fields, refuse_url

from . import programs
from .keeper import Running
from .policy import Attempt, Decision, Golden, StepPolicy
from .programs import DType, Remat, TrainConfig, check, get_config

if TYPE_CHECKING:
    from .data import Dataset

LARGEST_COUNT = 2**31 - 1  # compiled programs number steps and injections with 32-bit integers
Count: TypeAlias = Annotated[int, Within(1, LARGEST_COUNT)]
# The same types as in `sdc.twins`, which cannot be imported here because it imports JAX
Compare: TypeAlias = Literal["gated", "always"]
Exchange: TypeAlias = Literal["probe", "step", "call"]


class Loaded(NamedTuple):
    """A workload whose data are in memory.

    Attributes:
        config: the configuration, with an embedding large enough for the tokenizer.
        dataset: chunks of tokens in training order.
    """

    config: TrainConfig
    dataset: "Dataset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A training workload: a configuration, its data, and the seed of both.

    Example:
        >>> from sdc.train.specs import Workload
        >>> config, dataset = Workload(config="tiny").load()
        >>> config.model.layers, dataset.chunks.shape[1]
        (4, 129)
    """

    config: Annotated[TrainConfig | str, Flag(type=str)] = "tiny"
    """Model configuration: tiny, bench, smollm2_135m, llama3_8b_16l or llama3_8b."""
    dtype: DType | None = None
    """Data type of activations and compute parameters (default: that of the configuration)."""
    remat: Remat | None = None
    """Part of each layer that the backward pass computes again, instead of saving its values: ffn or layer (default:
    that of the configuration)."""
    seed: Annotated[int, Within(0, LARGEST_SEED)] = 0
    """Seed for the parameters, the order of the data and all simulations."""
    corpus: Sequence[str] = ("python",)
    """Training text: python (the source of the standard library), or files and folders of text or JSONL."""
    tokenizer: str = "bytes"
    """Tokenizer: bytes, or the path of a Hugging Face tokenizer.json file."""

    def resolve(self) -> TrainConfig:
        check_fields(self)
        if not self.corpus:
            raise SettingError("corpus", None, "expected python, or at least one file or folder")
        config = get_config(self.config) if isinstance(self.config, str) else self.config
        return config.of_type(self.dtype, self.remat)

    def load(self) -> Loaded:
        """Reads the corpus and cuts it into chunks; returns the chunks with the final configuration."""
        from .data import load_tokenizer, make_dataset, padded_vocab, read_corpus

        config = self.resolve()
        tokenizer = load_tokenizer(self.tokenizer)
        vocabulary = padded_vocab(tokenizer)
        if vocabulary > config.model.vocab_size:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocabulary))
        corpus = read_corpus(self.corpus if len(self.corpus) > 1 else self.corpus[0])
        return Loaded(config, make_dataset(corpus, tokenizer, config.sequence_length, seed=self.seed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """Settings for the checksums that check the matrix products of a run; see `sdc.abft`."""

    mode: Annotated[Mode, Flag("abft_mode")] = "detect"
    """Flag wrong rows (detect), flag wrong rows and locate their wrong elements (locate), or flag and replace wrong
    rows (correct)."""
    scheme: Annotated[SchemeName, Flag("abft_scheme", Literal["two-tier", "blocks", "deterministic", "paper"])] = (
        "two-tier"
    )
    """Threshold scheme that decides when a row counts as wrong; docs/abft.md compares the schemes."""
    where: Annotated[Selector | str, Flag("abft_where", str)] = "products"
    """Selector of the matrix products to check."""
    profile: Annotated[str | PathLike[str] | None, Flag("abft_profile", Path)] = None
    """Profile that sdc abft calibrate wrote on this kind of device (default: assumptions about the platform)."""
    examine: Annotated[Examine, Flag("abft_examine")] = "again"
    """Examine suspicious steps again, in another program that is compiled when it is first needed (only a run of one
    copy in one process; it holds a second copy of its state, and four during an examination), or within each step."""
    least_coverage: Annotated[float, Within(0, 1)] = LEAST_COVERAGE
    """Minimum share of the matrix products' arithmetic that must be checked for a verdict of clean. If the step calls
    an opaque kernel of unknown cost, the share is 0."""

    def check(self) -> None:
        Settings(self.mode, self.scheme)
        check_fields(self)
        as_selector(self.where)
        if self.profile is not None:
            try:
                Profile.read(self.profile)  # type: ignore[arg-type] # str or path
            except ValueError as error:
                raise SettingError("profile", str(self.profile), str(error)) from error

    def transform(self) -> "programs.Transform":
        """Returns the transformation of a step. JAX must have started its devices."""
        return functools.partial(
            sdc.abft, where=as_selector(self.where), mode=self.mode, scheme=self.scheme, profile=self.read_profile()
        )

    def screens(self) -> "programs.Transform | None":
        """Returns the transformation with the first tier alone; None if steps are examined within."""
        import jax

        # Several processes compile before they meet, so that no examination can be compiled later.
        if self.examine == "within" or jax.process_count() > 1:
            return None
        where, settings = as_selector(self.where), Settings(self.mode, self.scheme)
        return functools.partial(sdc.checksums.screened, where=where, settings=settings, profile=self.read_profile())

    def read_profile(self) -> Profile:
        """Returns the profile, or the assumptions about the platform. JAX must have started its devices."""
        return Profile.assumed() if self.profile is None else Profile.read(self.profile)  # type: ignore[arg-type]

    def describe(self) -> dict[str, Any]:
        read = self.read_profile()
        if departs := read.departs():
            warnings.warn(
                f"the profile {self.profile} was measured on another setup, so its thresholds may not fit: "
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
class Guarding:
    """Settings for watching a run; see `sdc.guard`."""

    budget: Annotated[float, Flag("guard_budget"), Within(0, 0.99, above=True)] = 0.01
    """Share of the time of the steps that the guard's checks may take."""


STRUCK = 'bitflip(bits=30, step=3, site="fwd/attn", iteration=(0, 2), element=7, model=1)'
_KEYS: Mapping[str, Any] = {"step": int, "site": str, "iteration": tuple[int, ...], "element": int}


@dataclasses.dataclass(frozen=True, repr=False)
class Simulation:
    """The single simulated fault of a traced run, or no fault for a golden run of the same program."""

    fault: Fault | None = None  # which elements change, how, and on which device; None for no fault
    step: int = -1  # the step that the fault strikes
    site: str = ""  # pattern of site names
    iteration: tuple[int, ...] = ()  # index in the enclosing loops
    element: int = 0  # flat index of the first element

    def __repr__(self) -> str:
        if self.fault is None:
            return "none"
        given = {key: x for key in _KEYS if (x := getattr(self, key)) != getattr(Simulation, key)}
        return write_hit(self.fault, **given, **self.fault.at)

    def strike(self, sites: "Sequence[sdc.Site]", step: int) -> "sdc.Strike":
        """Returns the strike at `step` on a program with these sites."""
        axes = sorted({axis for site in sites for axis, _ in site.mesh})
        if self.fault is None:
            return sdc.no_strike(axes=axes)
        exact = [site for site in sites if site.name == self.site]
        found = exact or [site for site in sites if matching(self.site)(site)]
        if len(found) != 1:
            names = ", ".join(site.name for site in found[:5])
            raise ValueError(
                f"simulation {str(self)!r}: {len(found)} traced sites match site={self.site}"
                f"{' (' + names + ')' if found else ''}; give the name of exactly one traced site"
            )
        room = self.fault.pattern.size(found[0].outputs[0].shape)
        struck = sdc.strike_on(found[0], self.fault, self.element, iteration=self.iteration, room=room, axes=axes)
        nothing = sdc.no_strike(room=room, axes=[*axes, *self.fault.at])
        return struck if step == self.step else nothing


def parse_simulation(text: str) -> Simulation:
    """Parses the simulated fault of a trace: `KIND(..., step=N, site=PATTERN)`, or `none`.

    Kinds and patterns are those of `as_fault`. The other keys are `step`, `site`, `iteration` (one number for each
    enclosing loop) and `element` (the first element that is struck); any other key is the name of a mesh axis, and its
    value, an integer, selects the device along this axis.
    """
    if text == "none":
        return Simulation()
    fault, term = read_hit("simulation", text, STRUCK, _KEYS)
    if missing := [key for key in ("step", "site") if key not in term.common]:
        raise ValueError(f"simulation {text!r}: {missing[0]!r} is missing; expected none or a fault such as {STRUCK!r}")
    return Simulation(fault, **{key: term.common[key] for key in _KEYS if key in term.common})


def submodule_products(name: str) -> Selector:
    """Returns the selector of a submodule's matrix products in the layers; recomputed matrix products belong to the
    backward pass."""
    way, _, submodule = name.partition("/")
    in_pass = direction("fwd") if way == "fwd" else direction("bwd", "remat")
    return products & in_pass & scope(f"*/{submodule}/*", f"*/{submodule}")


LARGEST_MESH = 1 << 16  # maximum number of devices of a run; more than any cluster has


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """Fields common to runs and campaigns."""

    kind: ClassVar[str]

    workload: Workload = dataclasses.field(default_factory=Workload)
    """The training workload."""
    steps: Count = 20
    """Number of optimizer steps."""
    data: Count = 1
    """Number of data-parallel ranks (of each twin, if there are twins)."""
    model: Count = 1
    """Number of tensor-parallel ranks (of each twin, if there are twins)."""
    folder: Annotated[str | PathLike[str] | None, Flag("run", Path)] = None
    """Run folder; must be new unless the run is resumed (default: a new folder in runs/)."""
    resume: bool = False
    """Resume the run in the folder given by --run, from its newest checkpoint or last injection."""

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh and their lengths; the product of the lengths is the number of devices."""
        return {"data": self.data, "model": self.model}

    @property
    def copies(self) -> int:
        """Number of training states on the same devices."""
        return 1

    def check(self) -> None:
        """Checks every setting that can be checked without a device, a peer or data."""
        check_fields(self)
        if self.resume and self.folder is None:
            problem = "needs the folder of the run to resume; set folder, or give --run DIR"
            raise SettingError("resume", None, problem)
        if self.folder is not None:
            refuse_url(self.folder)
        self._check_size(self.workload.resolve())

    def _check_size(self, config: TrainConfig) -> None:
        """Checks the size of the mesh, and the memory needed on each device, before anything is allocated."""
        count = math.prod(self.axes.values())
        if count > LARGEST_MESH:
            product = " × ".join(f"{number:,} {axis}" for axis, number in self.axes.items())
            problem = f"{product} needs {count:,} devices; expected at most {LARGEST_MESH:,}; choose smaller numbers"
            axis, largest = max(self.axes.items(), key=lambda each: each[1])
            raise SettingError({"twin": "twins"}.get(axis, axis), largest, problem)
        check(config, self.data, self.model, copies=self.copies)

    def load(self) -> Loaded:
        """Checks the job and reads its data."""
        self.check()
        config, dataset = self.workload.load()
        self._check_size(config)
        dataset.require(batch_size=config.batch_size, microsteps=config.microsteps)
        return Loaded(config, dataset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Planned, abc.ABC):
    """Fields common to all runs."""

    checkpoint_every: Count = 10
    """Number of steps between checkpoints; the last step is always saved."""
    compiler_options: Annotated[Sequence[str], Flag("compiler_option", repeated=True)] = ()
    """Compiler option NAME=VALUE, such as xla_tpu_enable_sdc_checker=true; may be repeated."""

    def check(self) -> None:
        super().check()
        read_options(self.compiler_options)

    unsaved: ClassVar[bool] = False
    """Whether the run saves only its record."""

    @property
    def number(self) -> int | None:
        """Number of twins; None if there is a single copy."""
        return None

    @property
    def keeping(self) -> Running | None:
        """Settings of the running checkpoint; None for full checkpoints."""
        return None

    @property
    def layout(self) -> Literal["mesh", "vmap"]:
        """Layout of the twins: each on its own devices (mesh), or all on the same devices (vmap)."""
        return "mesh"

    @abc.abstractmethod
    def program(self, config: TrainConfig, placement: "programs.Placement", *, donate: bool) -> "programs.Program":
        """Builds the program of the job."""

    def manifest(self, config: TrainConfig) -> Mapping[str, Any]:
        """Returns the manifest fields of this kind of job. JAX must have started its devices."""
        return {"sync": None, "compare": "gated", "exchange": "probe"}

    def policy(self) -> StepPolicy | None:
        """Returns the policy that this job applies after each step, in addition to any other policy."""
        return None

    def check_evidence(self, evidence: Mapping[str, Any]) -> None:
        """Checks that the `devices` and `hosts` of a run suffice for its purpose; by default, any suffice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedJob(Job):
    """A run that can simulate faults and check matrix products."""

    suspect: str | None = None
    """Simulated suspect: node1 ... node15 of the published study, silicon:gpu and others, or healthy. node11:uniform is
    a simpler model of node11; node4,times=1e6 multiplies the rates of node4 (docs/faults.md)."""
    faults: Annotated[Sequence[Fault | str], Flag("fault", tuple[str, ...], repeated=True)] = ()
    """Simulated fault, such as bitflip,rate=1e-5,site=fwd/attn or scale,rate=1e-6,where=products; may be repeated.
    Grammar: docs/faults.md."""
    checks: Annotated[
        Checks | None, Flag("abft", bool, without="configures the checks of matrix products, which are off; add --abft")
    ] = None
    """Check the forward and backward matrix products with checksums; the faults of a simulated suspect then strike
    these products."""

    @property
    def node_sync(self) -> Load:
        """Synchronization level to which the fault rates of a simulated node refer; see `sdc.nodes.node_faults`."""
        return "none"

    def simulated(self, layers: int) -> tuple[Fault, ...]:
        """Returns the simulated faults for a model with `layers` layers; with twins, they strike the last twin."""
        at = {} if self.number is None else {"twin": self.number - 1}
        if self.suspect is not None:
            # If matrix products are checked, faults strike these products instead of the outputs of submodules.
            where = str if self.checks is None else submodule_products
            return tuple(node_faults(self.suspect, layers=layers, at=at, where=where, sync=self.node_sync))
        read = (parse_fault(fault) if isinstance(fault, str) else fault for fault in self.faults)
        return tuple(dataclasses.replace(fault, at={**at, **fault.at}) for fault in read)

    def check(self) -> None:
        super().check()
        if self.suspect is not None and self.faults:
            raise SettingError("suspect", self.suspect, "faults are given too; give either a suspect or faults")
        try:
            self.simulated(layers=1)
        except ValueError as error:
            if self.suspect is None:
                raise
            raise SettingError("suspect", self.suspect, str(error)) from error
        if self.checks is not None:
            self.checks.check()

    def tools(self, config: TrainConfig) -> dict[str, Any]:
        """Returns the faults and the checks of matrix products, as arguments of the program. JAX must have started its
        devices."""
        faults = self.simulated(config.model.layers)
        checks = None if self.checks is None else self.checks.transform()
        return {"faults": faults, "checks": checks, "seed": self.workload.seed}

    def manifest(self, config: TrainConfig) -> Mapping[str, Any]:
        described = [fault.describe() for fault in self.simulated(config.model.layers)]
        suspect = None if self.suspect is None else parse_suspect(self.suspect)
        if suspect is not None and (departs := suspect.departs()):
            warnings.warn(departs, stacklevel=2)
        # The study published frequencies of wrong elements in the outputs of submodules.
        known = suspect is not None and suspect.name in NODES and self.checks is None
        figures = published(suspect.name) if known and suspect is not None else None
        return {
            **super().manifest(config),
            "suspect": _suspect(str(suspect or "custom") if suspect or described else None, described),
            "published": figures
            and {site: {"frequency": f.frequency, "severity": f.severity} for site, f in figures.items()},
            "expected": expected_frequency(str(self.suspect), self.steps, sync=self.node_sync) if figures else None,
            "abft": None if self.checks is None else self.checks.describe(),
        }


def _suspect(name: str | None, faults: Sequence[Any]) -> dict[str, Any]:
    return {"name": name, "simulated": bool(faults), "faults": list(faults)}


def _with_faults(manifest: Mapping[str, Any], name: str, more: Sequence[str]) -> dict[str, Any]:
    """Adds simulated faults to a manifest; if the suspect has no name, `name` becomes its name."""
    suspect = manifest["suspect"]
    faults = [*suspect["faults"], *more]
    return {**manifest, "suspect": _suspect(suspect["name"] or (name if faults else None), faults)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(CheckedJob):
    """A run of one copy: plain, with checked matrix products, or with another method of aggregating gradients.

    Example:
        >>> from sdc.train.specs import Training
        >>> Training(steps=3, faults=['nan(rate=1e-4, site="fwd/attn")']).check()
    """

    kind: ClassVar[str] = "train"

    aggregate: str | None = None
    """Aggregation of gradients, as methods joined by +: noise,sigma=S; paft_sync,period=N; paft,max_period=N;
    dropcompute,threshold=SECONDS|auto,latency=KIND,...; lossy,p=P,packet=N; shadow. Settings: docs/aggregation.md."""
    guard: Annotated[
        Guarding | None, Flag("guard", bool, without="is for the checks of a guard, which is off; add --guard")
    ] = None
    """Watch the run for corruption: for a share of the time, compare steps with recomputations, neighbours and
    checksums, and replicas with each other (docs/guard.md)."""
    running: Annotated[
        Running | None,
        Flag("checkpoint", Literal["full", "scar"], without="applies to a running checkpoint; add --checkpoint scar"),
    ] = None
    """Save full checkpoints (full), or save only the blocks that changed most, but more frequently (scar, a running
    checkpoint)."""

    @property
    def keeping(self) -> Running | None:
        return self.running

    @property
    def aggregation(self) -> Aggregation | None:
        return None if self.aggregate is None else parse_aggregation(self.aggregate)

    def check(self) -> None:
        super().check()
        if (aggregation := self.aggregation) is not None:
            config = self.workload.resolve()
            aggregation.check(
                data=self.data, model=self.model, batch_size=config.batch_size, microsteps=config.microsteps
            )
            self._check_clock(aggregation)
        if self.guard is not None:
            check_fields(self.guard)
        if self.running is not None:
            self.running.check(self.steps)

    def _check_clock(self, aggregation: Aggregation) -> None:
        if aggregation.clocked and (self.checks is not None or self.guard is not None or self.simulated(layers=1)):
            problem = "a run on a real clock can have no simulated faults, checks of products or guard; leave them out"
            raise SettingError("aggregate", self.aggregate, problem)

    def program(self, config: TrainConfig, placement: "programs.Placement", *, donate: bool) -> "programs.Program":
        work = programs.sharded(config)
        if (aggregation := self.aggregation) is not None:
            replicas = programs.make_replicas(config, aggregation, placement, seed=self.workload.seed, steps=self.steps)
            work = programs.replicated(replicas, placement)
            if aggregation.clocked:
                self._check_clock(aggregation)
                return programs.ClockedProgram(work, placement, replicas, donate=donate)
        again: dict[str, Any] = {}
        if self.checks is not None:
            again = {"screens": self.checks.screens(), "corrects": self.checks.mode == "correct"}
        tools = {**again, **self.tools(config)}
        if self.guard is None:
            return programs.SingleProgram(work, placement, donate=donate, **tools)
        return programs.GuardedProgram(work, placement, donate=donate, budget=self.guard.budget, **tools)

    def manifest(self, config: TrainConfig) -> Mapping[str, Any]:
        manifest = super().manifest(config)
        if self.checks is not None:
            examine = "within" if self.checks.screens() is None else "again"
            manifest = {**manifest, "abft": {**manifest["abft"], "examine": examine}}
        if self.guard is not None:
            manifest = {**manifest, "guard": dataclasses.asdict(self.guard)}
        if self.running is not None:
            running = self.running.describe()
            manifest = _with_faults({**manifest, "running": running}, "losses", running["losses"])
        if (aggregation := self.aggregation) is not None:
            manifest = _with_faults({**manifest, "aggregate": str(aggregation)}, "aggregation", aggregation.simulated)
        return manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twins(CheckedJob):
    """A run of twins that are compared bit for bit. Simulated faults strike the last twin.

    Example:
        >>> from sdc.train.specs import Twins
        >>> Twins(suspect="node11", steps=3).check()
    """

    kind: ClassVar[str] = "twin"

    twins: Annotated[int, Within(2, LARGEST_COUNT)] = 2
    """Number of twins. With two twins, the first is the reference; with three or more, the majority is the
    reference."""
    sync: Load = "compute"
    """Compare and repair after every submodule (compute) or after every optimizer step (params), or only compare
    (none)."""
    compare: Compare = "gated"
    """Exchange tensors only if their digests differ (gated), or always."""
    exchange: Exchange = "probe"
    """Exchange digests at every probe (probe), once per microstep (step) or once per step (call); step and call repeat
    the computation if a digest differs."""
    placement: Literal["mesh", "vmap"] = "mesh"
    """Give each twin of a rank its own device (mesh), or put all twins of a rank on one device (vmap)."""
    require_processes: Count = 1
    """Minimum number of distinct hosts, with at least one process each; with fewer hosts, the run exits with code 3
    before its first step."""
    least_elements: Annotated[int, Within(0, 10**18)] = 0
    """Minimum number of checked elements for a verdict of clean; with fewer, the verdict is inconclusive."""

    @property
    def number(self) -> int | None:
        return self.twins

    @property
    def layout(self) -> Literal["mesh", "vmap"]:
        return self.placement

    @property
    def axes(self) -> dict[str, int]:
        return {**({"twin": self.twins} if self.placement == "mesh" else {}), **super().axes}

    @property
    def copies(self) -> int:
        return 1 if self.placement == "mesh" else self.twins

    @property
    def node_sync(self) -> Load:
        return self.sync

    def check(self) -> None:
        super().check()
        if self.exchange != "probe" and self.compare == "always":
            problem = "compare=always exchanges tensors at every probe; choose exchange=probe or compare=gated"
            raise SettingError("exchange", self.exchange, problem)
        if self.exchange != "probe" and self.sync != "compute":
            problem = f"sync={self.sync} exchanges nothing inside a step; leave exchange out"
            raise SettingError("exchange", self.exchange, problem)

    def manifest(self, config: TrainConfig) -> Mapping[str, Any]:
        return {
            **super().manifest(config),
            "sync": self.sync,
            "compare": self.compare,
            "exchange": self.exchange,
            "require_processes": self.require_processes,
            "least_elements": self.least_elements,
        }

    def check_evidence(self, evidence: Mapping[str, Any]) -> None:
        from .cluster import Incomparable

        if evidence["hosts"] < self.require_processes:
            raise Incomparable(
                f"require_processes={self.require_processes}: the twins are on {evidence['hosts']} distinct "
                f"host{'s' * (evidence['hosts'] > 1)}, so their comparison would not test the hardware; start a "
                "process on each host"
            )

    def program(self, config: TrainConfig, placement: "programs.Placement", *, donate: bool) -> "programs.Program":
        ways: dict[str, Any] = {"sync": self.sync, "compare": self.compare, "exchange": self.exchange}
        return programs.TwinProgram(programs.sharded(config), placement, donate=donate, **ways, **self.tools(config))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracing(Job):
    """A run that records digests of all selected values at every step.

    Example:
        >>> from sdc.train.specs import Tracing
        >>> Tracing(steps=3, where="probes").check()
    """

    kind: ClassVar[str] = "trace"

    folder: Annotated[str | PathLike[str] | None, Flag("run", Path, argument=True)] = None
    """Run folder; must be new unless the run is resumed."""
    where: Annotated[Selector | str, Flag(type=str)] = "everything"
    """Selector of the recorded values: everything, probes, primitive("dot_general") & direction("bwd"), boundary(1)
    and others."""
    against: Annotated[str | PathLike[str] | None, Flag(type=Path)] = None
    """Recorded trace with which every step is compared; the run stops at the first difference."""
    simulate: Annotated[str | None, Flag("fault")] = None
    """Simulated fault, such as bitflip,bits=30,step=3,site=fwd/attn,iteration=0+2,element=7,model=1; or none, for a
    golden trace of the same program."""

    @property
    def simulation(self) -> Simulation | None:
        return None if self.simulate is None else parse_simulation(self.simulate)

    def check(self) -> None:
        super().check()
        as_selector(self.where)
        simulation = self.simulation
        if simulation is not None and simulation.fault and not 0 <= simulation.step < self.steps:
            raise SettingError("simulate", self.simulate, f"expected a step from 0 to {self.steps - 1}")
        self.policy()

    def policy(self) -> StepPolicy | None:
        if self.against is None:
            return None
        from sdc.records import read_manifest

        read_manifest(self.against, "trace")  # rejects anything but a trace before JAX is imported
        return Golden(self.against)

    def program(self, config: TrainConfig, placement: "programs.Placement", *, donate: bool) -> "programs.Program":
        struck = None if self.simulation is None else self.simulation.strike
        return programs.TraceProgram(
            programs.sharded(config), placement, as_selector(self.where), struck, donate=donate
        )

    def manifest(self, config: TrainConfig) -> Mapping[str, Any]:
        simulation = self.simulation
        faults = [str(simulation)] if simulation is not None and simulation.fault else []
        return {
            **super().manifest(config),
            "where": as_selector(self.where).text,
            "against": None if self.against is None else str(self.against),
            "suspect": _suspect("custom" if faults else None, faults),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignJob(Planned):
    """A campaign of single simulated faults in the reference workload.

    Example:
        >>> from sdc.train.specs import CampaignJob
        >>> CampaignJob(injections=40, faults=["bitflip", "nan"]).check()
    """

    kind: ClassVar[str] = "campaign"

    injections: Count = 1000
    """Number of injections."""
    steps: Count = 16
    """Number of steps of the clean run; faults strike any step except the last --follow steps."""
    follow: int = 5
    """Number of steps to run after the struck step, unless the outcome is certain earlier."""
    where: Annotated[Selector | str, Flag(type=str)] = "arithmetic"
    """Selector of the sites to strike: arithmetic, primitive("dot_general"), `argument("0/params/*")`, collectives
    and others."""
    faults: Annotated[Sequence[str], Flag("fault")] = ("bitflip",)
    """Fault kinds: bitflip, bitflip,field=exponent, bitflip,count=2, stuck1, sign, zero, nan, scale,factor=2,
    swap and others; each may have a pattern such as run=8, tile=4x4 or row."""
    abft: bool = False
    """Also detect faults with checksums of the matrix products of the struck step; faults in matrix products then
    strike the sums before they are rounded."""
    batch: Annotated[int | None, Within(1, LARGEST_COUNT)] = None
    """Number of injections that run simultaneously, under vmap (default: 1 on a CPU, 8 on an accelerator)."""

    @property
    def copies(self) -> int:
        """Number of states: one before each step of the clean run, and one for each of the simultaneous injections."""
        return self.steps + (self.batch or 1)

    def check(self) -> None:
        super().check()
        if not 0 <= self.follow < self.steps:
            problem = f"expected an integer from 0 to {self.steps - 1}, less than the number of steps"
            raise SettingError("follow", self.follow, problem)
        if not self.faults:
            raise SettingError("faults", None, "expected at least one kind, such as bitflip or nan")
        for text in self.faults:
            as_fault(text)
        as_selector(self.where)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedTwins(Twins):
    """A run of twins that saves only its record, and so cannot be resumed."""

    unsaved: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullLoad(ComparedTwins):
    """A run of twins that exchange digests once per step and do not synchronize in between.

    A simulated node is struck as often as under parameter synchronization, because the study's accelerators also waited
    little in that mode. A node is struck less often in lock-step.

    Example:
        >>> from sdc.train.specs import FullLoad
        >>> FullLoad(suspect="node14").node_sync
        'params'
    """

    exchange: Exchange = "call"

    @property
    def node_sync(self) -> Load:
        return "params"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operations(ComparedTwins):
    """A run of twins that compare digests of every operation and stop at the first difference."""

    sync: Load = "params"

    def program(self, config: TrainConfig, placement: "programs.Placement", *, donate: bool) -> "programs.Program":
        return programs.OperationsProgram(
            programs.sharded(config), placement, donate=donate, sync=self.sync, **self.tools(config)
        )

    def policy(self) -> StepPolicy | None:
        return stop_at_operation


def stop_at_operation(attempt: Attempt) -> Decision:
    return Decision.STOP if "site" in attempt.row["operations"] else Decision.CONTINUE
