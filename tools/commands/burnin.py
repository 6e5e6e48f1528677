"""`sdc burnin`: loads the devices of this host, and prints the verdict and its evidence."""

import contextlib
import dataclasses
import os
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdc import burnin
from sdc.burnin import BurninResult, BurninSettings, DeviceRequest, Pair, Standing
from sdc.records import Record, RecordError, write_text
from sdc.schema import PAGE
from sdc.settings import SettingError
from sdc.standing import Announcement, Ledger, ledger_path, standing_here
from sdc.verdict import Exit, Verdict

from .. import ResultCommand, gently, give_up, new_folder, onward, require, run_errors, usage_errors

if TYPE_CHECKING:
    import jax

    from sdc.burnin import Session

PATIENCE = 1.5  # seconds from a signal until the burn-in ends even if its devices have not finished their runs
STARTING = 300.0  # time limit for devices to start, in seconds
SENTENCES = 12  # maximum number of sentences to print; the result holds all of them
ATTEMPTS = 2  # to write the last entry into a ledger that others use, or that needs the reserved space


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurninCommand(ResultCommand):
    """Tests the devices of this host at full load with known programs.

    Example: sdc burnin --level prejob --golden fleet.golden --prometheus /var/lib/node_exporter/sdc.prom
    Example: sdc burnin --devices 4 --only matrix --suspect node11

    Runs on one host, without a coordinator. The verdict states the evidence on which it rests: that each device
    reproduced its own bits, that all devices of the host agreed, or that they agreed with recorded digests. Exit codes:
    0 PASS, 1 FAIL, 2 bad usage, 3 INCONCLUSIVE (docs/burnin.md).
    """

    settings: BurninSettings
    devices: str | None = None
    """Required devices: gpu, tpu, cpu, gpu:8 for eight GPUs, or 4 for four simulated CPU devices. By default, the
    accelerators of the host are required; on a host without accelerators, the verdict is INCONCLUSIVE."""
    golden: Path | None = None
    """File of golden digests, from sdc golden record."""
    suspect: str | None = None
    """Simulated suspect, for rehearsals: node1 ... node15 of the published study, silicon:gpu and others."""
    run: Path | None = None
    """New folder for the result, its page, the log, and the bundle for the vendor; by default a new one below runs/."""
    resume: bool = False
    """Resume the burn-in in the folder given with --run, until its time is used up; several short sessions thus add up
    to a long one."""
    ledger: Path | None = None
    """Ledger of this host, which records the verdict on each device (default: SDC_LEDGER, or in /var/lib/sdc for root,
    in ~/.local/state/sdc for others)."""
    junit: Path | None = None
    """Also write the result as JUnit XML."""
    prometheus: Path | None = None
    """Also write the result as metrics to this file (NAME.prom), for the textfile collector of the Prometheus node
    exporter."""

    def publish(self, result: BurninResult, folder: Path) -> None:
        """Writes the JUnit and Prometheus files, and the page of a result that is complete; called whenever the result
        has changed."""
        if self.junit is not None:
            write_text(self.junit, burnin.junit(result))
        if self.prometheus is not None:
            write_text(self.prometheus, burnin.metrics(result))
        if result.stopped is None:  # before the bundle, which contains it
            write_page(result, folder)

    def say(self, result: BurninResult, folder: Path | None) -> None:
        """Prints the result; `folder` is None if the result could not be written."""
        from .. import print_parts, write_json

        if self.json:
            write_json(result)
        else:
            print_parts(_parts(result, folder))


def run(options: BurninCommand) -> int:
    with usage_errors():
        settings, asked = options.settings.resolved(), burnin.parse_devices(options.devices)
        _check_outputs(options)
        simulated = bool(burnin.rehearsed(options.suspect, settings.faults, 0))
        folder, resume = _folder(options)
        account = LedgerAccount(options.ledger or ledger_path())
        # Before anything that could end the process
        unlisted = account.begin(
            settings.level, settings.selected, simulated=simulated, asked=asked, file=folder / burnin.RESULT
        )
    from sdc.burnin import NotOnRecord, Session
    from sdc.train import register_training

    from .. import BurninProgress

    register_training()
    onward.folder = folder

    def publish(result: BurninResult) -> None:
        account.add(result, folder / burnin.RESULT, ended=not result.under_way)
        options.publish(result, folder)

    with BurninProgress(settings.minutes, settings.rounds) as progress:
        session = Session(
            settings, folder, golden=options.golden, resume=resume, command=["sdc", *sys.argv[1:]],
            doubts=[f"{Session.UNLISTED}{error}" for error in unlisted],
            on_event=progress.update, on_result=publish,
        )  # fmt: skip

        def end(why: str) -> None:
            """Handles a signal: lets the current run finish if it does so in time."""
            session.stop(why)
            _start_timer(PATIENCE, options, session, why)

        def last_words(why: str) -> tuple[int, str]:
            """Returns what a burn-in that ends at once has found so far."""
            result = session.known(why)
            found = f"{result.sentences[0]}. " if result.verdict is Verdict.CORRUPT else ""
            return int(result.verdict.code), f"{found}{why}. {onward.how()}"

        gently(end)
        onward.last_words = last_words
        unwritten = None
        with run_errors(folder):
            try:
                result = _burn(options, asked, session)
            except NotOnRecord as error:  # the findings are printed, and written to the other outputs
                result, unwritten = error.result, error
            except (SettingError, RecordError) as error:
                if not session.begun:
                    account.refuse(str(error))
                raise
            finally:
                onward.last_words = None
    if result.stopped is not None and unwritten is None:
        write_page(result, folder)
    options.say(result, folder if unwritten is None else None)
    if unwritten is not None:
        with contextlib.suppress(OSError):  # these outputs may be on the same full disk
            publish(result)
        print(f"sdc: cannot write to {folder} ({unwritten}): this folder does not contain the result", file=sys.stderr)
    code = result.verdict.code
    if account.problem is not None:
        print(f"sdc: {account.problem}", file=sys.stderr)
        code = Exit.INCONCLUSIVE if code == Exit.CLEAN else code
    elif code == Exit.CLEAN and not simulated and (standing := account.standing()).verdict is not Verdict.CLEAN:
        print(f"sdc: sdc verdict still reports {standing.verdict.acceptance}: {standing.reason}", file=sys.stderr)
    if session.hung:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread waits for its device forever
    return code


def write_page(result: BurninResult, folder: Path) -> None:
    """Writes the page, which does not affect the verdict."""
    from sdc.analysis import write_burnin_report

    try:
        write_burnin_report(result, folder)
    except (RecordError, ModuleNotFoundError) as error:
        print(f"sdc: {PAGE} was not written: {error}", file=sys.stderr)


class LedgerAccount:
    """The entries of this burn-in, pair or pool in the ledger of the host."""

    def __init__(self, path: Path) -> None:
        self._path, self._begun = path, uuid.uuid4().hex
        self._announcement: Announcement | None = None
        self.problem: str | None = None  # why the ledger does not contain the result

    def begin(
        self, level: str, only: Sequence[str] = (), *, simulated: bool, asked: DeviceRequest | None = None, file: Path
    ) -> list[RecordError]:
        """Announces the test; returns the error if that fails."""
        try:
            with Ledger(self._path, write=True) as ledger:
                self._announcement = Announcement(self._path, self._begun)
                ledger.begin(self._begun, simulated=simulated, level=level, only=only, asked=asked, file=file)
        except RecordError as error:
            return [error]
        finally:
            # On a full disk, it may hold the space for a failure.
            self._announcement = self._announcement or Announcement(self._path, self._begun)
        return []

    def refuse(self, reason: str) -> None:
        """Withdraws the announcement of a test that was refused before anything ran."""
        with contextlib.suppress(RecordError), Ledger(self._path, write=True) as ledger:
            ledger.refuse(self._begun, reason)
            self._end()

    def _end(self) -> None:
        if self._announcement is not None:
            self._announcement.end()

    def standing(self) -> Standing:
        """Returns the standing of this host."""
        return standing_here(self._path)

    def add(self, result: BurninResult | Pair, file: Path | None, *, ended: bool = True, process: int = 0) -> None:
        """Adds what is known, or keeps the `problem`; while a test is under way, the next call tries again."""
        for _ in range(ATTEMPTS if ended else 1):
            try:
                with Ledger(self._path, write=True) as ledger:
                    ledger.add(result, file, begun=self._begun, ended=ended, process=process)
                self.problem = None
                if ended:
                    self._end()
                return
            except RecordError as error:
                said = "which therefore does not count"
                if result.verdict is Verdict.CORRUPT:
                    said = "so sdc verdict may not report this FAIL; keep the host drained"
                self.problem = f"the ledger does not contain this result, {said}: {error}"
                if result.verdict is Verdict.CORRUPT and self._announcement is not None:
                    self._announcement.free()


def _burn(options: BurninCommand, asked: DeviceRequest, session: "Session") -> BurninResult:
    starting = _start_timer(STARTING, options, session, f"devices that did not start within {STARTING:g} s")
    try:
        devices, problem = start_devices(asked)
    finally:
        starting.cancel()
    platform = devices[0].platform if devices else None
    session.doubts = [*session.doubts, *asked.doubts(platform, len(devices))]
    if problem is not None or platform is None or (asked.platform is not None and platform != asked.platform):
        return session.without("; ".join([*session.doubts, *filter(None, [problem])]))
    settings = session.settings
    names = [each.name for each in settings.chosen(devices)]
    faults = burnin.rehearsed(options.suspect, settings.faults, len(devices) - 1)
    session.inject = burnin.matching(faults, names)
    session.settings = dataclasses.replace(settings, faults=tuple(map(str, session.inject)))
    return session.run(devices)


def start_devices(asked: DeviceRequest) -> "tuple[Sequence[jax.Device], str | None]":
    """Returns the devices of this process, and an error message if they cannot start."""
    import jax

    from sdc.records import prepare

    count = asked.simulated
    with usage_errors():
        prepare(cpu_devices=count, cpu_threads=max(os.cpu_count() or 1, count), only_cpu=asked.platform == "cpu")
    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # a missing or failing driver
        return [], f"JAX cannot start its devices: {' '.join(str(error).split())[:300]}"
    return devices[: asked.simulated if devices[0].platform == "cpu" else asked.number], None


def _start_timer(seconds: float, options: BurninCommand, session: "Session", why: str) -> threading.Timer:
    """Ends the process after some seconds, because the main thread may wait for a device or the compiler forever."""

    def leave() -> None:
        result = session.known(why)
        options.say(result, session.folder)
        sys.stdout.flush()
        if result.verdict is Verdict.CORRUPT:
            print("sdc: no page or bundle was written; sdc report writes the page, --resume both", file=sys.stderr)
        give_up(f"ended by {why}, and no run finished within {PATIENCE:g} s")

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    return timer


def _check_outputs(options: BurninCommand) -> None:
    """Raises SettingError before the load, rather than after an hour of it, if an output cannot be written."""
    if options.golden is not None and not options.golden.exists():
        raise SettingError("golden", options.golden, "there is no such file; sdc golden record writes one")
    if options.golden is not None:
        Record.check_owner(options.golden)
        if options.golden.is_dir():
            raise SettingError("golden", options.golden, burnin.A_FOLDER)
    if options.prometheus is not None:
        require("--prometheus", "metrics")
        burnin.check_metrics_file(options.prometheus)
    for name, path in (("junit", options.junit), ("prometheus", options.prometheus)):
        if path is not None:
            if path.is_dir():
                raise SettingError(name, path, "is a folder, expected a file; give the path of a file")
            check_place(name, path)


def check_place(setting: str, file: Path) -> None:
    """Raises SettingError if a file could not be written later, and RecordError if another user may have planted it."""
    Record.check_owner(file)
    there = file.absolute().parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = "is not writable" if there.is_dir() else "does not exist"
        raise SettingError(setting, file, f"cannot be written: {there} {problem}; choose another folder")


def _folder(options: BurninCommand) -> tuple[Path, bool]:
    """Returns the folder, and whether it holds a burn-in to resume: one that was killed at once, or had no space, has
    left nothing."""
    if not options.resume:
        return new_folder("burnin", options.run, resumable=True), False
    if options.run is None:
        raise SettingError("resume", None, "needs the folder of the burn-in to resume; give --run DIR")
    if options.run.is_dir() and Record.is_free(options.run):
        return options.run.absolute(), False
    try:
        burnin.BURN_IN.read(options.run)
    except RecordError as error:
        raise SettingError("resume", options.run, str(error)) from error
    log = options.run / burnin.EVENTS
    if os.path.lexists(log) and (log.is_symlink() or not log.is_file()):
        raise SettingError("resume", options.run, f"{log.name} is not a file; delete it")
    return options.run.absolute(), True


def _parts(result: BurninResult, folder: Path | None) -> Iterator[Any]:
    from rich.text import Text

    from sdc.analysis import burnin_report, outlook, sentence

    from .. import COLOURS

    yield from burnin_report(result).brief
    if seen := outlook(result):
        yield sentence(seen)
    yield Text.assemble(
        ("SIMULATION  ", "bold magenta") if result.simulated else "",
        (result.verdict.acceptance, COLOURS[result.verdict]),
        f"  host {result.host.name}, evidence: {', '.join(result.evidence) or 'none'}",
    )
    yield from (f"  {sentence}" for sentence in result.sentences[:SENTENCES])
    if (more := len(result.sentences) - SENTENCES) > 0:
        yield f"  and {more} more in {burnin.RESULT}"
    if folder is not None:
        yield f"result: {folder / burnin.RESULT}"
        if (folder / PAGE).exists():
            yield f"report: {folder / PAGE}"
        if (folder / burnin.BUNDLE).exists():
            yield f"evidence for the vendor, with a reproducer: {folder / burnin.BUNDLE}"
