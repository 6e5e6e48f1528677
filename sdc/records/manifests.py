"""Manifests and summaries as types: what is known before the first line of a record, and after the last one."""

from typing import Annotated, Any

import msgspec

from ..verdict import Verdict
from .header import Fields, Header, Number, about
from .rows import Counts, ProductCounts, SiteCounts, SkippedProduct


class Environment(Fields, kw_only=True):
    """What must be equal for bits to be comparable."""

    python: Annotated[str | None, about("version of Python")] = None
    packages: Annotated[dict[str, str], about("versions of the libraries that decide what is computed")] = (
        msgspec.field(default_factory=dict)
    )
    platform: Annotated[str | None, about("`cpu`, `gpu` or `tpu`")] = None
    platform_version: Annotated[str | None, about("version of the backend and of its driver")] = None
    device_kind: Annotated[str | None, about("model of the devices")] = None
    local_devices: Annotated[int | None, about("number of devices of the process")] = None
    machine: Annotated[str | None, about("instruction set of the host")] = None
    processor: Annotated[str | None, about("model of the CPU, if the platform is `cpu`")] = None
    processors: Annotated[int | None, about("number of cores of the host, if the platform is `cpu`")] = None
    cpu_threads: Annotated[
        str | None, about("threads of XLA, which decide how products are split, if the platform is `cpu`")
    ] = None
    xla_flags: Annotated[str | None, about("the environment variable `XLA_FLAGS`")] = None
    options: Annotated[dict[str, str], about("those options of JAX that change results")] = msgspec.field(
        default_factory=dict
    )


class Data(Fields, kw_only=True):
    """What a run was trained on."""

    source: Annotated[str | None, about("where the data comes from")] = None
    documents: Annotated[int | None, about("number of documents")] = None
    tokens: Annotated[int | None, about("number of tokens")] = None
    digest: Annotated[str | None, about("digest of the tokens")] = None
    tokenizer: Annotated[str | None, about("`bytes`, or the file of the tokenizer")] = None


class Suspect(Fields, kw_only=True):
    """The hardware under suspicion, which may be simulated."""

    name: Annotated[
        str | None,
        about("`null` for real hardware, `custom` for other simulated faults, else the node of the study"),
    ] = None
    simulated: Annotated[bool | None, about("whether faults are simulated")] = None
    faults: Annotated[list[str], about("the simulated faults, one readable line each")] = msgspec.field(
        default_factory=list
    )


class Device(Fields, kw_only=True):
    """A device that takes part in a run, and the hardware behind it. What the platform does not tell is absent."""

    process: Annotated[int | None, about("index of the process that the device belongs to, from 0")] = None
    host: Annotated[str | None, about("host name")] = None
    machine: Annotated[str | None, about("hash of the machine's identity, as in `host` of the manifest")] = None
    id: Annotated[int | None, about("number of the device in JAX, among those of all processes")] = None
    kind: Annotated[str | None, about("model of the device")] = None
    rank: Annotated[
        dict[str, int] | None,
        about("its place on the mesh: the index on each axis. Without `twin` among them it computes for all twins"),
    ] = None
    serial: Annotated[str | None, about("serial number of the board, for GPUs that have one")] = None
    uuid: Annotated[
        str | None,
        about("identity of the GPU, and of the whole GPU where a part of it is used: NVIDIA's UUID, AMD's unique ID"),
    ] = None
    bus: Annotated[str | None, about("PCI address of the GPU: `domain:bus:device.function`, hexadecimal")] = None
    coordinates: Annotated[list[int] | None, about("place of the TPU chip in its slice")] = None
    core: Annotated[int | None, about("number of the core on the TPU chip")] = None
    slice: Annotated[int | None, about("number of the TPU slice, where there are several")] = None
    driver: Annotated[str | None, about("version of the GPU's kernel driver, or of the TPU's library")] = None
    firmware: Annotated[str | None, about("version of the GPU's video BIOS, or of the CPU's microcode")] = None
    simulated: Annotated[
        bool | None, about("`true` for each of several devices that a process makes of one processor")
    ] = None

    @property
    def mark(self) -> str:
        """What tells it from others of its kind, such as `serial 1003`; empty where nothing does."""
        marks = ((name, getattr(self, name)) for name in ("serial", "uuid", "bus"))
        return next((f"{name} {value}" for name, value in marks if value), "")


class Manifest(Header, kw_only=True, tag="jax-sdc record"):
    """`manifest.json` of any kind."""

    kind: Annotated[
        str,
        about(
            "`twin`, `train`, `trace`, `campaign`, `abft study`, `aggregation study`, `scar study`, `nodes study` or "
            "`estimate`; see "
            "[above](#kinds)"
        ),
    ]
    discarded: Annotated[
        int | None, about("lines of `discarded.jsonl` when the run was last continued; absent where there were none")
    ] = None
    command: Annotated[list[str] | None, about("the command line, if a command wrote the record")] = None
    created: Annotated[str | None, about("when the run started, UTC")] = None
    resumed_at: Annotated[
        list[int] | None, about("steps or injections at which the run was continued; absent if it never was")
    ] = None
    config: Annotated[
        Any, about("the configuration: `name`, `model`, `optimizer`, `sequence_length`, `batch_size`, `microsteps`")
    ] = None
    steps: Annotated[int | None, about("planned steps")] = None
    seed: Annotated[int | None, about("seed of parameters, data order and simulated faults")] = None
    mesh: Annotated[
        dict[str, int] | None,
        about("size of each mesh axis, such as `twin` (with `placement` `mesh`), `data`, `model`"),
    ] = None
    environment: Annotated[Environment | str | None, about("what must be equal for bits to be comparable; below")] = (
        None
    )
    digests: Annotated[
        str | None,
        about("algorithm of the digests. Two algorithms are never compared"),
    ] = None
    data: Annotated[Data | str | None, about("what the run is trained on; below")] = None
    suspect: Annotated[Suspect | None, about("the hardware under suspicion; below")] = None


class ProductSettings(Fields, kw_only=True):
    """`abft` of a manifest: how products are checked."""

    mode: Annotated[str | None, about("`detect` or `correct`")] = None
    scheme: Annotated[str | None, about("scheme of the checksums")] = None
    where: Annotated[str | None, about("selector of the products")] = None
    profile: Annotated[str | None, about("file of the profile; `null` where it is assumed")] = None
    kappa: Annotated[Number, about("rounding of sums")] = None
    inputs: Annotated[Number, about("rounding of factors")] = None
    second_tier: Annotated[list[str] | None, about("sites that begin with the second tier")] = None
    departs: Annotated[list[str] | None, about("what differs from the device that the profile was measured on")] = None
    least_coverage: Annotated[Number, about("share of the work that must be checked for a verdict of clean")] = None


class RunningSettings(Fields, kw_only=True):
    """`running` of a manifest: how a running checkpoint is saved."""

    fraction: Annotated[Number, about("share of the state that each save writes")] = None
    losses: Annotated[list[str], about("simulated losses, one readable line each")] = msgspec.field(
        default_factory=list
    )


class PublishedSite(Fields, kw_only=True):
    """What the study published of a submodule of a node."""

    frequency: Annotated[Number, about("mean mismatch frequency")] = None
    severity: Annotated[Number, about("largest severity")] = None


class RunManifest(Manifest, kw_only=True):
    """`manifest.json` of a twin, a training run or a trace."""

    program: Annotated[
        dict[str, str] | str | None,
        about("SHA-256 of the StableHLO text: `step`, and for twins `observe` (what is compared after the step)"),
    ] = None
    checkpoint_every: Annotated[int | None, about("steps from one checkpoint to the next")] = None
    layers: Annotated[int | None, about("number of decoder layers")] = None
    sync: Annotated[str | None, about("what twins synchronize; `null` without twins")] = None
    compare: Annotated[str | None, about("when twins compare tensors")] = None
    exchange: Annotated[
        str | None,
        about("when twins exchange digests: `probe`, also where absent, `step` (in each microstep) or `call`"),
    ] = None
    compiler_options: Annotated[
        dict[str, Any] | None, about("options that the compiler was given, by name; absent where there were none")
    ] = None
    placement: Annotated[str | None, about("where twins lie: `mesh` or `vmap`")] = None
    twins: Annotated[int | None, about("number of twins; `null` without twins")] = None
    processes: Annotated[int | None, about("number of operating-system processes")] = None
    hosts: Annotated[int | None, about("number of distinct hosts, told apart by the boot of their system")] = None
    require_processes: Annotated[int | None, about("twins: hosts that there had to be")] = None
    least_elements: Annotated[int | None, about("twins: elements that must be checked for a verdict of clean")] = None
    devices: Annotated[list[Device], about("the devices that take part, and the hardware behind them; below")] = (
        msgspec.field(default_factory=list)
    )
    abft: Annotated[
        ProductSettings | None,
        about(
            "`null`, or how products are checked: `mode`, `scheme`, `where`, `profile`, `kappa`, `inputs`, "
            "`second_tier`, `departs` (what differs from the device that the profile was measured on), "
            "`least_coverage`"
        ),
    ] = None
    running: Annotated[
        RunningSettings | None,
        about("how a running checkpoint is saved: `fraction`, `losses`; absent where there is none"),
    ] = None
    aggregate: Annotated[
        str | None, about("text of the method by which gradients are aggregated; absent for the plain mean")
    ] = None
    published: Annotated[
        dict[str, PublishedSite] | None,
        about("twins without checked products: `frequency` and `severity` by site of the simulated node, else `null`"),
    ] = None
    expected: Annotated[
        dict[str, Number] | None,
        about("twins without checked products: expected frequency by site over the planned steps, else `null`"),
    ] = None


class TraceManifest(RunManifest, kw_only=True):
    """`manifest.json` of a trace."""

    where: Annotated[str | None, about("selector of the values whose digests are recorded")] = None
    against: Annotated[str | None, about("the golden trace that the run is compared with, or `null`")] = None


class CampaignManifest(Manifest, kw_only=True):
    """`manifest.json` of a campaign."""

    where: Annotated[str | None, about("selector of the values that are struck")] = None
    faults: Annotated[list[str], about("kinds of faults")] = msgspec.field(default_factory=list)
    injections: Annotated[int | None, about("planned injections")] = None
    follow: Annotated[int | None, about("steps that are followed after the struck one")] = None
    batch: Annotated[int | None, about("injections that run at the same time")] = None
    sites: Annotated[int | None, about("number of the sites that can be struck")] = None
    devices: Annotated[list[Device], about("the devices that take part, and the hardware behind them; below")] = (
        msgspec.field(default_factory=list)
    )
    thresholds: Annotated[dict[str, Number], about("thresholds of the outcomes and of the detectors")] = msgspec.field(
        default_factory=dict
    )
    detectors: Annotated[list[str], about("names of the detectors")] = msgspec.field(default_factory=list)
    clean: Annotated[
        dict[str, list[Any]] | None, about("`loss`, `gradient_norm` and `digest` of each step of the clean run")
    ] = None


class StudyManifest(Manifest, kw_only=True):
    """`manifest.json` of a study. Each study adds settings of its own."""

    study: Annotated[str | None, about("name of a study of aggregation")] = None
    seconds: Annotated[Number, about("wall time of the study in seconds")] = None
    workers: Annotated[Any, about("number of workers")] = None
    workloads: Annotated[dict[str, str] | None, about("for each workload the source of its data")] = None


class Share(Fields, kw_only=True):
    """A part of the injections, with its interval."""

    count: Annotated[int, about("how many")]
    of: Annotated[int, about("of how many")]
    share: Annotated[Number, about("one divided by the other; `null` where that is 0")] = None
    low: Annotated[Number, about("lower end of the 95 % interval")] = None
    high: Annotated[Number, about("upper end of the 95 % interval")] = None


class Ending(Header, kw_only=True, tag="jax-sdc record summary"):
    """`summary.json` of any kind."""

    verdict: Annotated[
        Verdict | None,
        about("`clean`, `corrupt`, `inconclusive`; `null` where nothing was compared, checked or shadowed"),
    ] = None
    reason: Annotated[str | None, about("the reason of the verdict, in words")] = None
    simulated: Annotated[bool | None, about("whether faults were injected")] = None
    lines: Annotated[
        dict[str, tuple[int, str]],
        about("for each file of lines how many it has, and the checksum of the last one"),
    ] = msgspec.field(default_factory=dict)


class SiteTotals(SiteCounts, kw_only=True):
    """Counts of a site over the steps."""

    frequency: Annotated[Number, about("mismatched / checked")] = None
    severity: Annotated[Number, about("largest of all steps")] = None
    frequency_upper_95: Annotated[Number, about("one-sided 95 % bound of the frequency")] = None


class LayerTotals(Fields, kw_only=True):
    """Counts of a site by layer."""

    frequency: Annotated[list[Number], about("equation (1), over all steps")]
    severity: Annotated[list[Number], about("equation (3), the largest of all steps")]
    mismatched: Annotated[list[int], about("mismatched elements")]
    injected: Annotated[list[int], about("injected elements")]


class FlaggedPlace(Fields, kw_only=True):
    """Rows of a product that were flagged on a rank and in a layer."""

    site: Annotated[str | None, about("name of the product")] = None
    layer: Annotated[Number, about("number of the layer")] = None
    twin: Annotated[Number, about("number of the twin")] = None
    data: Annotated[Number, about("data-parallel rank")] = None
    model: Annotated[Number, about("tensor-parallel rank")] = None
    flagged: Annotated[int, about("rows flagged")] = 0
    confirmed: Annotated[int, about("of them right when computed again")] = 0


class ProductTotals(ProductCounts, kw_only=True):
    """Counts of the checked products over the steps."""

    first_step: Annotated[int | None, about("number of the first step with a flag")] = None
    coverage: Annotated[Number, about("the least share of the products' work that was checked")] = None
    skipped: Annotated[list[SkippedProduct], about("products that could not be checked")] = msgspec.field(
        default_factory=list
    )
    sites: Annotated[dict[str, ProductCounts], about("the same counts for each product")] = msgspec.field(
        default_factory=dict
    )
    places: Annotated[list[FlaggedPlace], about("where rows were flagged, the most often flagged first")] = (
        msgspec.field(default_factory=list)
    )


class ShadowTotals(Fields, kw_only=True):
    """What a shadow replica found."""

    shares: Annotated[list[Number], about("for each data rank, of its comparisons the share that differed")] = (
        msgspec.field(default_factory=list)
    )
    suspects: Annotated[list[int], about("data ranks that are wrong")] = msgspec.field(default_factory=list)
    differences: Annotated[Number, about("comparisons that differed")] = None
    comparisons: Annotated[Number, about("comparisons")] = None


class RunSummary(Ending, kw_only=True):
    """`summary.json` of a twin, a training run or a trace."""

    steps: Annotated[int | None, about("number of steps in the record")] = None
    sync: Annotated[str | None, about("as in the manifest")] = None
    submodules: Annotated[
        dict[str, SiteTotals],
        about(
            "for each of `fwd/attn`, `fwd/ffn`, `bwd/attn`, `bwd/ffn`: the counts above summed over steps, "
            "`frequency` (mismatched / checked), `severity` (largest of all steps), `frequency_upper_95` (one-sided "
            "95 % bound)"
        ),
    ] = msgspec.field(default_factory=dict)
    other_sites: Annotated[dict[str, SiteTotals], about("the same for any other site")] = msgspec.field(
        default_factory=dict
    )
    layers: Annotated[
        dict[str, LayerTotals],
        about("for each site, lists with one entry per layer: `frequency`, `severity`, `mismatched`, `injected`"),
    ] = msgspec.field(default_factory=dict)
    state: Annotated[Counts | None, about("`checked` and `mismatched` elements of the state, summed over steps")] = None
    gradient: Annotated[Counts | None, about("the same for the gradient")] = None
    worst_noise_to_signal: Annotated[Number, about("equation (5)")] = None
    parameter_difference: Annotated[Number, about("at the last step, the largest of all twins")] = None
    final_loss: Annotated[list[Number], about("loss of each twin at the last step")] = msgspec.field(
        default_factory=list
    )
    published: Annotated[dict[str, PublishedSite] | None, about("as in the manifest")] = None
    expected: Annotated[dict[str, Number] | None, about("as in the manifest")] = None
    seconds_per_step: Annotated[Number, about("median wall time of a step")] = None
    first_mismatch_step: Annotated[
        Number, about("number of the first step with a mismatch; `null` if there is none")
    ] = None
    odd_twins: Annotated[
        list[int],
        about("numbers of the twins that differ from the reference: the majority of three or more, the first of two"),
    ] = msgspec.field(default_factory=list)
    twins: Annotated[int | None, about("as in the manifest")] = None
    hosts: Annotated[int | None, about("as in the manifest")] = None
    rehearsal: Annotated[
        bool | None, about("whether all twins ran on simulated devices of one processor, which tests no hardware")
    ] = None
    first_difference: Annotated[
        dict[str, Any] | None,
        about(
            "of a trace that parted from another: `step`, `site`, `layer`, `devices`, as `sdc diff --json` tells them"
        ),
    ] = None
    abft: Annotated[
        ProductTotals | None, about("counts of the checked products, summed over steps, if the run checked any")
    ] = None
    shadow: Annotated[ShadowTotals | None, about("what the shadow replica found, if there was one")] = None
    state_digest: Annotated[
        list[str] | None,
        about("64-bit digest of each twin's final state, in hexadecimal: equal for equal bits on any mesh"),
    ] = None


class GroupTotals(Fields, kw_only=True):
    """A group of injections."""

    injections: Annotated[int, about("how many reached their site")]
    outcomes: Annotated[dict[str, int], about("how many had each outcome")]
    vulnerability: Annotated[Share, about("share that changed training")]
    harm: Annotated[Share, about("share that harmed training")]


class DetectorTotals(Fields, kw_only=True):
    """What a detector found."""

    of_unmasked: Annotated[Share, about("share of the injections that changed training")]
    of_harmful: Annotated[Share, about("share of the injections that harmed training")]
    median_latency: Annotated[Number, about("median steps from the fault to the detection")] = None
    largest_latency: Annotated[Number, about("the most")] = None
    latencies: Annotated[dict[str, int], about("how many were found after each number of steps")]


class CampaignSummary(Ending, kw_only=True):
    """`summary.json` of a campaign."""

    planned: Annotated[int | None, about("planned injections")] = None
    done: Annotated[int | None, about("injections in the record")] = None
    complete: Annotated[bool | None, about("whether all are done")] = None
    reached: Annotated[int | None, about("injections whose step executed the struck operation")] = None
    outcomes: Annotated[
        dict[str, Share], about("for each outcome: `count`, `of`, `share`, and the 95 % interval from `low` to `high`")
    ] = msgspec.field(default_factory=dict)
    vulnerability: Annotated[Share | None, about("share of the injections that changed training")] = None
    harm: Annotated[Share | None, about("share of the injections that harmed training")] = None
    groups: Annotated[
        dict[str, dict[str, GroupTotals]],
        about("the same, grouped by `operation`, `layer`, `phase`, `scope`, `bit`, `field`, `fault`, `site`"),
    ] = msgspec.field(default_factory=dict)
    bits: Annotated[dict[str, dict[str, dict[str, int]]], about("outcomes by dtype and bit")] = msgspec.field(
        default_factory=dict
    )
    detectors: Annotated[
        dict[str, DetectorTotals], about("for each detector what it found, and after how many steps")
    ] = msgspec.field(default_factory=dict)
    harmful_missed: Annotated[
        int | None, about("harmful injections that no detector found without a recorded trace")
    ] = None
    visible: Annotated[Share | None, about("share of the injections whose loss changed visibly")] = None
    steps_to_visible: Annotated[Number, about("median number of steps until the loss changed visibly")] = None


class StudySummary(Ending, kw_only=True):
    """`summary.json` of a study. Each study adds its own figures."""

    study: Annotated[str | None, about("name of a study of aggregation")] = None
