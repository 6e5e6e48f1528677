"""`sdc fleet`: results of many hosts, and whom to pair with whom. Nothing here needs JAX."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sdc.records import endless, reason
from sdc.settings import SettingError

from .. import VERDICTS, Exit, FleetOptions, ScheduleOptions, SimulateOptions, SummarizeOptions, usage_errors

LARGEST = 10_000_000
"""Bytes of a file of host names."""


def run(options: FleetOptions) -> int:
    """Summarizes, schedules or simulates."""
    match options.command:
        case SummarizeOptions() as command:
            return _summarize(command)
        case ScheduleOptions() as command:
            return _schedule(command)
        case SimulateOptions() as command:
            return _simulate(command)


def _summarize(options: SummarizeOptions) -> int:
    with _uncollected():
        return _summarized(options)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for cycles, of which there are none: it would walk through all rows of a fleet many times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _summarized(options: SummarizeOptions) -> int:
    from sdc.analysis.fleet import (
        collect,
        device_rows,
        find_results,
        prepare_folder,
        read_ledger,
        summarize_results,
        update_ledger,
        vote,
        write_pages,
    )

    from .. import CountProgress, show

    with usage_errors():
        if not options.files:
            raise SettingError("FILES", None, "expected results of sdc burnin, or folders that hold them")
        files = list(find_results(options.files))
        ledger, added = None, None
        if options.ledger is not None:
            if not options.ledger.absolute().parent.is_dir():
                raise SettingError("ledger", options.ledger, "its folder does not exist; make it, or name another")
            read_ledger(options.ledger)  # what is wrong with it is told before the work
        if options.output is not None:
            prepare_folder(options.output)
        with CountProgress("result", len(files)) as progress:
            found = collect(files, lambda file: progress.advance(""))
        votes = vote(found.results)
        if options.ledger is not None and found.results:
            ledger, added = update_ledger(options.ledger, found.results, votes)
        summary = summarize_results(found, votes=votes, ledger=ledger, added=added)
        if options.output is not None:
            devices = device_rows(found.results, votes, summary["suspects"], ledger)
            summary["report"] = str(write_pages(options.output, summary, devices))
    show("fleet", summary, as_json=options.json)
    return int(VERDICTS[summary["verdict"]])


def _schedule(options: ScheduleOptions) -> int:
    from sdc.analysis.fleet import jobset_lines, make_schedule, srun_lines

    from .. import show, write

    with usage_errors():
        hosts = [*_named(options.hosts)]
        suspects = [*_named(tuple(name.strip() for name in options.suspects.split(",") if name.strip()))]
        made = make_schedule(hosts, options.rounds, suspects=suspects, seed=_seed(options.seed))
        if options.format == "srun":
            text = "\n".join(srun_lines(made, options.folder))
        elif options.format == "jobset":
            text = "\n".join(jobset_lines(made, options.folder, options.image))
    if options.format == "json":
        rounds = [
            {"pairs": pairs, "resting": resting} for pairs, resting in zip(made.rounds, made.resting, strict=True)
        ]
        show("fleet", {"rounds": rounds, "suspects": suspects, "notes": list(made.notes)}, as_json=True)
    else:
        write(text)
    return int(Exit.CLEAN)


def _simulate(options: SimulateOptions) -> int:
    from sdc.analysis.fleet import simulate_naming

    from .. import show

    with usage_errors():
        rows = simulate_naming(
            options.hosts,
            options.bad,
            options.probability,
            options.rounds,
            trials=options.trials,
            seed=_seed(options.seed),
        )
    asked = {"hosts": options.hosts, "bad": options.bad, "probability": options.probability, "trials": options.trials}
    result = {"simulated": True, **asked, "seed": options.seed, "rounds": [row._asdict() for row in rows]}
    show("fleet simulation", result, as_json=options.json)
    return int(Exit.CLEAN)


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**31:
        raise SettingError("seed", seed, "expected 0 to 2147483647")
    return seed


def _named(words: Sequence[str]) -> Iterator[str]:
    """Names of hosts, those in files among them."""
    for word in words:
        if not word.startswith("@"):
            yield word
            continue
        lines = _text(word, Path(word[1:])).splitlines()
        yield from (name for line in lines for name in line.partition("#")[0].replace(",", " ").split())


def _text(word: str, path: Path) -> str:
    """A file of host names. What has no end is not opened, and never more is read than such a file can hold."""
    try:
        what = "a folder" if path.is_dir() else endless(path)
        if what is not None:
            raise SettingError("HOSTS", word, f"is {what}, expected a text file of host names; name such a file")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)  # files of the kernel have no size, and yet contents
    except FileNotFoundError as error:
        raise SettingError("HOSTS", word, "there is no such file; name a text file of host names") from error
    except OSError as error:
        raise SettingError("HOSTS", word, f"cannot be read ({reason(error)}); name another file") from error
    if len(content) > LARGEST:
        raise SettingError("HOSTS", word, f"expected a file of {LARGEST:,} bytes at most; name another file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingError("HOSTS", word, "is no text in UTF-8; name a text file of host names") from error
