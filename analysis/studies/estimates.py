"""Estimated costs of a step and its tools on chips that are not present: ratios to the first program, and a report."""

from collections.abc import Iterable, Sequence

import msgspec

from sdc.records import Contents
from sdc.schema import EstimateManifest, EstimateSummary, ProgramEstimate

from ..report import (
    COLOURS,
    Action,
    Definition,
    Drawing,
    Figure,
    Headline,
    LeftOut,
    Report,
    Table,
    Text,
    marked,
    moment,
    record_page,
    show,
)

STUDY = "estimate"
MARK = "compiler's estimate"
SOURCE = (
    "Values are the compiler's own estimates where available; docs/estimate.md describes the cost model for all others."
)
DEFINITIONS = (
    Definition(
        "Cycles",
        "sum over the program",
        "Estimated cycles of operations, kernels and collectives; overlap is not modeled.",
    ),
    Definition("Kernels, moved", "GPU", "Number of launched kernels, and bytes of their operands and results."),
    Definition(
        "Ratio",
        "cost / cost of the first program",
        "Both costs are per device, and both programs are for the same chips.",
    ),
    Definition(
        "Memory",
        "arguments + outputs + temporaries",
        "Bytes per device; if the compiler reports a peak, this peak is used instead.",
    ),
)


def summarize_estimates(programs: Iterable[ProgramEstimate]) -> EstimateSummary:
    """Summarizes the programs of an estimate, each with its ratio to the first program for the same target."""
    first: dict[str, float] = {}
    rows = []
    for row in programs:
        if row.does_not_fit is None and first.setdefault(row.target, row.cost):
            row = msgspec.structs.replace(row, ratio=row.cost / first[row.target])
        rows.append(row)
    return EstimateSummary(reason="an estimate tests no device", programs=rows)


def build(record: Contents, summary: EstimateSummary) -> Report:
    """Collects the text, tables and figures of the report."""
    fitting = [row for row in summary.programs if row.does_not_fit is None]
    lacking = [row for row in summary.programs if row.does_not_fit is not None]
    manifest = msgspec.convert(record.manifest, EstimateManifest)
    said = (f"{row.target}: {row.tool} {row.ratio:.3f}" for row in fitting if row.ratio is not None)
    sentence = "; ".join(said) or "nothing could be estimated"
    actions = (
        Action(
            "Measure the times",
            "An estimate only compares programs; measure times on the chips with sdc bench transform.",
        ),
    )
    tables = [_costs(fitting), _memory(fitting), _collectives(fitting)]
    costs, memory, collectives = (marked(table, MARK) for table in tables)
    unfit = [
        Text(f"{row.target}, {row.tool}: {row.does_not_fit}", lead="DOES NOT FIT", tone="corrupt") for row in lacking
    ]
    return record_page(
        command=manifest.command,
        mark=MARK,
        kind="estimate",
        title=record.path.resolve().name,
        verdict=None,
        label="COMPILER'S ESTIMATE",
        headline=Headline(sentence, real="nothing was run; this is an estimate", actions=actions),
        simulated="nothing was run; all figures are the compiler's estimates",
        notes=[str(row.does_not_fit) for row in lacking],
        facts=[("step", manifest.subject), ("started", moment(manifest.created))],
        measured=[*tables, *map(_parts, summary.programs)],
        drawn=[_drawn(fitting)],
        settings=[
            ("Environment", record.manifest.get("environment")), ("Settings", record.manifest.get("settings")),
        ],
        definitions=DEFINITIONS,
        about=[SOURCE],
        brief=[costs, memory, *unfit, collectives],
    )  # fmt: skip


def _costs(programs: Sequence[ProgramEstimate]) -> Table:
    header = ("target", "program", "ratio", "cycles", "of kernels", "kernels", "moved", "compiled in")
    rows = [
        (
            row.target, row.tool, show(row.ratio), show(row.cycles), show(row.kernel_cycles), show(row.kernels),
            size(row.moved or None), f"{row.compile_seconds:.1f} s",
        )
        for row in programs
    ]  # fmt: skip
    return Table("Cost on each device", header, tuple(rows))


def _memory(programs: Sequence[ProgramEstimate]) -> Table:
    header = ("target", "program", "devices", "arguments", "outputs", "temporaries", "total", "available", "code")
    rows = [
        (
            row.target, row.tool, show(row.devices),
            *map(size, (row.arguments, row.outputs, row.temporaries, row.memory, row.capacity, row.code)),
        )
        for row in programs
    ]  # fmt: skip
    return Table("Memory on each device", header, tuple(rows))


def _collectives(programs: Sequence[ProgramEstimate]) -> Table:
    header = ("target", "program", "collective", "axes", "crosses", "blocking", "count", "sent", "time", "hidden time")
    rows = [
        (
            row.target, row.tool, each.kind, each.axes or "-", each.crosses or "-", "yes" if each.blocking else "no",
            show(each.count), size(each.sent), f"{1e3 * each.seconds:.3g} ms", f"{1e3 * each.hidden:.3g} ms",
        )
        for row in programs
        for each in row.collectives
    ]  # fmt: skip
    return Table("Collectives: the times follow from the bytes sent and a stated bandwidth", header, tuple(rows))


def _parts(row: ProgramEstimate) -> Table:
    rows = tuple((name, f"{share:.1%}") for name, share in row.parts.items())
    return Table(f"Most expensive operations: {row.tool} on {row.target}", ("operation", "share"), rows)


def _drawn(programs: Sequence[ProgramEstimate]) -> Figure | LeftOut:
    title = "Cost of each tool, as a multiple of the cost of the first program"
    known = [(row.target, row.tool, row.ratio) for row in programs if row.ratio is not None]
    if not known:
        return LeftOut(title, "nothing could be estimated")

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        places = range(len(known), 0, -1)
        targets = list(dict.fromkeys(target for target, _, _ in known))
        colours = [COLOURS[targets.index(target) % len(COLOURS)] for target, _, _ in known]
        axes.barh(list(places), [ratio for _, _, ratio in known], color=colours, height=0.7)
        axes.set_yticks(list(places), [f"{target}  {tool}" for target, tool, _ in known])
        axes.set_xlabel("cost / cost of the first program")

    caption = "The cost per device is the number of cycles (TPU) or the time to move the bytes of the kernels (GPU)."
    return Figure(title, caption, draw, height=0.9 + 0.32 * len(known))


def size(value: float | None) -> str:
    """Formats bytes for reading."""
    if value is None:
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} GiB"
