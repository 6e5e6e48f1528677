"""What a step and its tools cost on chips that are not here: ratios to the first of them, and a report."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..report import (
    COLOURS,
    Action,
    Definition,
    Drawing,
    Figure,
    Headline,
    Json,
    LeftOut,
    Report,
    Table,
    Text,
    marked,
    record_page,
    show,
)

STUDY = "estimate"
MARK = "compiler's estimate"
SOURCE = "The compiler's own estimates where there are any; docs/estimate.md says what is charged for the rest."
DEFINITIONS = (
    Definition("Cycles", "sum of the compiler's", "Of operations, kernels and collectives; overlap is not modelled."),
    Definition("Kernels, moved", "GPU", "Kernels that are launched, and bytes of their operands and results."),
    Definition("Ratio", "cost / cost of the first", "Of programs for the same chips, on each device."),
    Definition("Memory", "arguments + outputs + temporaries", "On each device, or the compiler's peak."),
)


def summarize_estimates(rows: Iterable[Json]) -> Json:
    """The programs of an estimate, each with its ratio to the first of the same target."""
    programs: list[Json] = []
    first: dict[str, float] = {}
    for row in rows:
        cost = None
        if "does_not_fit" not in row:
            cost = float(row["seconds"] if row["cycles"] is None else row["cycles"])
            first.setdefault(row["target"], cost)
        ratio = None if cost is None or not first[row["target"]] else cost / first[row["target"]]
        programs.append({**row, "ratio": ratio})
    return {"verdict": None, "reason": "an estimate tests no device", "programs": programs}


def build(title: str, manifest: Json, summary: Json) -> Report:
    """Collects the text, tables and figures of the report."""
    programs = summary.get("programs") or ()
    none = "none: an estimate, not a test of a device"
    said = (f"{row['target']}: {row['tool']} {row['ratio']:.3f}" for row in programs if row.get("ratio") is not None)
    sentence = "; ".join(said) or "nothing could be estimated"
    actions = (Action("Measure it", "An estimate compares programs; only the chips tell a time: sdc bench transform."),)
    return record_page(
        manifest,
        mark=MARK,
        kind="estimate",
        title=title,
        verdict=None,
        label="COMPILER'S ESTIMATE",
        headline=Headline(sentence, none, none, "not asked", "nothing was run: an estimate", actions),
        simulated="nothing was run: all figures are the compiler's estimate",
        notes=[str(row["does_not_fit"]) for row in programs if "does_not_fit" in row],
        facts=[("step", manifest.get("subject")), ("started", manifest.get("created"))],
        measured=[_costs(programs), _memory(programs), _collectives(programs), *map(_parts, programs)],
        drawn=[_drawn(programs)],
        settings={"Settings": manifest.get("settings")},
        definitions=DEFINITIONS,
        about=[SOURCE],
        brief=[
            marked(_costs(programs), MARK),
            marked(_memory(programs), MARK),
            *(
                Text(f"{row['target']}, {row['tool']}: {row['does_not_fit']}", lead="DOES NOT FIT", tone="corrupt")
                for row in programs
                if "does_not_fit" in row
            ),
            marked(_collectives(programs), MARK),
        ],
    )


def _costs(programs: Sequence[Any]) -> Table:
    header = ("target", "program", "ratio", "cycles", "of kernels", "kernels", "moved", "compiled in")
    rows = [
        (
            row["target"], row["tool"], show(row.get("ratio")), show(row.get("cycles")), show(row.get("kernel_cycles")),
            show(row.get("kernels")), size(row.get("moved") or None), f"{row['compile_seconds']:.1f} s",
        )
        for row in programs
        if "does_not_fit" not in row
    ]  # fmt: skip
    return Table("Cost on each device", header, tuple(rows))


def _memory(programs: Sequence[Any]) -> Table:
    header = ("target", "program", "devices", "arguments", "outputs", "temporaries", "in all", "there are", "program")
    names = ("arguments", "outputs", "temporaries", "memory", "capacity", "code")
    rows = [
        (row["target"], row["tool"], show(row["devices"]), *(size(row[name]) for name in names))
        for row in programs
        if "does_not_fit" not in row
    ]
    return Table("Memory of each device", header, tuple(rows))


def _collectives(programs: Sequence[Any]) -> Table:
    header = ("target", "program", "collective", "axes", "crosses", "blocking", "count", "sent", "time", "of it hidden")
    rows = [
        (
            row["target"], row["tool"], each["kind"], each["axes"] or "-", each["crosses"] or "-",
            "yes" if each["blocking"] else "no", show(each["count"]), size(each["sent"]),
            f"{1e3 * each['seconds']:.3g} ms", f"{1e3 * each['hidden']:.3g} ms" if "hidden" in each else "-",
        )
        for row in programs
        for each in row.get("collectives") or ()
    ]  # fmt: skip
    return Table("Collectives, by bytes over a stated bandwidth", header, tuple(rows))


def _parts(row: Json) -> Table:
    rows = tuple((name, f"{share:.1%}") for name, share in dict(row.get("parts") or {}).items())
    return Table(f"Dearest operations: {row['tool']} on {row['target']}", ("operation", "share"), rows)


def _drawn(programs: Sequence[Any]) -> Figure | LeftOut:
    title = "Cost of each tool, as a multiple of the first program"
    known = [row for row in programs if row.get("ratio") is not None]
    if not known:
        return LeftOut(title, "nothing could be estimated")

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        places = range(len(known), 0, -1)
        targets = list(dict.fromkeys(row["target"] for row in known))
        colours = [COLOURS[targets.index(row["target"]) % len(COLOURS)] for row in known]
        axes.barh(list(places), [row["ratio"] for row in known], color=colours, height=0.7)
        axes.set_yticks(list(places), [f"{row['target']}  {row['tool']}" for row in known])
        axes.set_xlabel("cost / cost of the first program")

    caption = "Cycles (TPU), or time to move the kernels' bytes (GPU), on each device."
    return Figure(title, caption, draw, height=0.9 + 0.32 * len(known))


def size(value: Any) -> str:
    """Bytes for people."""
    if value is None:
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} GiB"
