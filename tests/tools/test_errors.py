"""Bad input gives one clear line and the right exit code, and writes no partial files."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from sdc.records.format import read_json, write_sealed
from sdc.records.record import Record
from sdc.tools import cli, parse
from sdc.tools.runtime import FLAGS, CommandError, run_errors, usage_errors
from sdc.verdict import Exit
from tests.analysis.records import manifest, steps, write_run
from tests.reports import make_report, put_report


def files(folder: Path) -> dict[str, str]:
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("a few words")
    (folder / "binary.txt").write_bytes(b"text\xff\xfe\x00")
    (folder / "not.json").write_text("{}")
    with Record.create(folder / "taken", {"kind": "twin"}) as record:
        record.line({"step": 0, "loss": [1.0]})
        record.line({"step": 1, "loss": [1.0]})
        record.finish({"verdict": "clean"})
    (folder / "link").symlink_to("nowhere")
    (folder / "damaged").mkdir()
    for path in (folder / "taken").iterdir():
        (folder / "damaged" / path.name).write_bytes(path.read_bytes().replace(b'{"step": 0', b'{"step 0'))
    return {
        name: str(folder / name)
        for name in ("empty.txt", "short.txt", "binary.txt", "not.json", "taken", "damaged", "link")
    }


CASES: dict[str, tuple[str, str]] = {
    "suspect": ("twin --suspect node99", "unknown suspect 'node99'; expected healthy, one of node1"),
    "config": ("twin --config huge", "--config huge: unknown; choose one of tiny, bench"),
    "fault": ("twin --fault meteor", "unknown kind 'meteor'; expected one of bitflip"),
    "both": ("twin --suspect node1 --fault nan,rate=1", "--suspect node1: faults are given too"),
    "twins": ("twin --twins 1", "--twins 1: expected a whole number from 2 to 2,147,483,647"),
    "steps": ("train --steps 0", "--steps 0: expected a whole number from 1 to 2,147,483,647"),
    "seed": ("train --seed -1", "--seed -1: expected a whole number from 0 to 2,147,483,646"),
    "devices": ("twin --devices 3", "--devices 3: 2 twin × 1 data × 1 model needs 2"),
    "heads": ("twin --model 3", "--model 3: heads 8 of config tiny is not divisible by 3; choose 1 or 2 or 4"),
    "batch": ("train --data 3", "--data 3: width 64 of config tiny is not divisible by 3; choose 1 or 2 or 4"),
    "corpus missing": ("train --corpus {folder}/nothing", "nothing: does not exist; give a file"),
    "corpus empty": ("train --corpus {empty.txt}", "empty.txt"),
    "corpus short": ("train --corpus {short.txt}", "short.txt: has "),
    "corpus binary": ("train --corpus {binary.txt}", "binary.txt"),
    "tokenizer": ("train --tokenizer {not.json}", "not.json: is not a tokenizer.json"),
    "tokenizer missing": ("train --tokenizer {folder}/none.json", "none.json"),
    "run is a file": ("train --run {not.json}", "not.json: is not a folder; choose a new one"),
    "long name": ("burnin --level quick --run " + "z/" * 50 + "z" * 256, "z…: has more than 255 bytes, the limit of"),
    "long path": ("burnin --level quick --run " + "z/" * 2500, "has more than 4095 bytes, the limit of"),
    "run exists": ("train --steps 1 --run {taken}", "exists already; choose another"),
    "resume nothing": ("train --resume --run {folder}/new", "is not a run folder"),
    "resume unnamed": ("train --resume", "give --run DIR"),
    "run at a link": ("burnin --only transfers --run {link}", "is a link that leads nowhere; delete it"),
    "run in a bucket": (
        "twin --steps 1 --run s3://b/run",
        "s3://b/run is in an object store; give a path on a disk, NFS or a mount",
    ),
    "report in a bucket": ("report a gs://b/run", "gs://b/run is in an object store"),
    "register in a bucket": ("golden record gs://b/a.json", "gs://b/a.json is in an object store"),
    "checkpoints out of reach": ("checkpoint verify gs://b/run", "gs://b/run cannot be reached without gcsfs; install"),
    "report nothing": ("report {folder}/new", "is not a run folder"),
    "report damaged": ("report {damaged}", "steps.jsonl line 1"),
    "coordinator": ("twin --coordinator localhost", "give all three or none"),
    "address": ("twin --coordinator localhost --processes 2 --process 0", "expected HOST:PORT"),
    "process": ("twin --coordinator a:1 --processes 2 --process 2", "expected an integer from 0 to 1"),
    "mode": ("train --abft-mode correct", "--abft-mode correct: configures the checks of matrix products"),
    "budget without a guard": ("train --guard-budget 0.1", "--guard-budget 0.1: is for the checks of a guard"),
    "budget of nothing": ("train --guard --guard-budget 0", "expected a number above 0, at most 0.99"),
    "suspect by its flag": ("twin --suspect node99", "error: --suspect node99: unknown suspect"),
    "profile by its flag": ("train --abft --abft-profile {folder}/none.json", "error: --abft-profile "),
    "too few data ranks": (
        "train --aggregate noise,sigma=0.1 --model 2 --coordinator 127.0.0.1:1 --processes 2 --process 1",
        "--aggregate noise(sigma=0.1): expected at least 2 data ranks, got 1",
    ),
    "real clock and model ranks": (
        "train --aggregate dropcompute,threshold=1 --data 2 --model 2",
        "a real clock needs one process with one device for each of the 2 data ranks",
    ),
    "real clock and faults": (
        "train --aggregate dropcompute,threshold=1 --data 2 --suspect node1",
        "a run on a real clock can have no simulated faults",
    ),
    "real clock and processes": (
        "train --aggregate dropcompute,threshold=1 --data 4 --coordinator 127.0.0.1:1 --processes 2 --process 1",
        "a real clock needs one process with one device for each of the 4 data ranks",
    ),
    "products": ("twin --abft-where dot_general", "--abft-where dot_general: configures the checks of matrix products"),
    "misspelt": ("twin --stesp 3", "Unrecognized options: --stesp, 3; did you mean --steps? See sdc twin --help"),
    "misspelt twice": ("train --step 3 --placment vmap", "--placment, vmap; did you mean --steps, --placement? See"),
    "noise": ("train --data 2 --aggregate noise,sigma=nan", "sigma=nan: expected a standard deviation of at least 0"),
    "run below a file": ("train --run {not.json}/x/y", "not.json is not a folder; choose a new one"),
    "trace below a file": ("trace {not.json}/x", "error: RUN "),
    "trace exists": ("trace {taken}", "taken: exists already; choose another folder, or continue its run with"),
    "calibrate nowhere": ("abft calibrate --out {folder}/none/x", "create it first"),
    "calibrate unwritable": ("abft calibrate --out /proc/x", "--out /proc/x: cannot be written (No such file"),
    "more devices than needed": (
        "twin --devices 2147483648",
        "--devices 2147483648: 2 twin × 1 data × 1 model needs 2",
    ),
    "more twins than devices": (
        "twin --twins 1000000000 --devices 1000000000",
        "--twins 1000000000: 1,000,000,000 twin × 1 data × 1 model needs 1,000,000,000 devices; expected at",
    ),
    "more twins than memory": (
        "twin --twins 1000000000 --placement vmap",
        "--config tiny: 1,000,000,000 copies of 238,144 parameters and their optimizer state would take 2,599 TiB",
    ),
    "more steps than memory": (
        "campaign --steps 2000000000",
        "--config tiny: 2,000,000,001 copies of 238,144 parameters and their optimizer state would take 5,198 TiB",
    ),
    "no end of time": (
        "train --timeout inf",
        "--timeout inf: expected a number of seconds above 0 and at most 604,800",
    ),
    "no such host": (
        f"twin --coordinator {64 * 'x'}:1 --processes 2 --process 1",
        "cannot be resolved on this host",
    ),
    "corpus without end": ("train --corpus /dev/zero", "--corpus /dev/zero: is a device, neither a file nor a folder"),
    "tokenizer without end": ("train --tokenizer /dev/zero", "--tokenizer /dev/zero: is a device, not a file"),
    "profile without end": ("train --abft --abft-profile /dev/zero", "is a device, not a file"),
    "path that is too long": (f"train --corpus {5_000 * 'x'}", "cannot be read (File name too long)"),
    "run that is too long": (f"report {5_000 * 'x'}", "cannot be read (File name too long)"),
    "selector that is too deep": (
        f"trace x --where {100_000 * '~'}probes",
        "characters) ... ~~",
    ),
    "fault that is too deep": (f"twin --fault nan,rate=1,where={100_000 * '~'}probes", "nested deeper than 100 levels"),
    "not UTF-8": ("train --corpus a\udcff", r"'a\udcff': expected text in UTF-8 without zero bytes"),
    "zero byte": ("train --run a\0b", r"'a\x00b': expected text in UTF-8 without zero bytes"),
    "bench steps": ("bench lockstep --steps 0", "--steps 0: expected at least 1"),
}


def words(template: str, folder: Path) -> list[str]:
    names = {**files(folder), "folder": str(folder)}
    for name, path in names.items():
        template = template.replace("{" + name + "}", path)
    found = template.split()
    if not {"--run", "--resume", "report", "bench", "trace", "abft", "study", "golden", "checkpoint"} & set(found):
        found += ["--run", str(folder / "unwanted")]
    return found


def check(code: int, out: str, err: str, message: str) -> None:
    assert code == Exit.USAGE, err
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("sdc: ")]
    assert line.startswith("sdc: error: ")
    assert message in line
    assert "Traceback" not in err


UNREADABLE = {
    "verdict {place}": 3, "verdict {place}/x": 3, "verdict --ledger {place}/ledger.sqlite": 3, "report {place}": 2,
    "golden verify {place}/g --no-run": 2, "burnin --golden {place}/g": 2, "burnin --resume --run {place}": 2,
    "burnin --prometheus {place}/x.prom": 2, "fleet summarize {place}": 3, "fleet summarize {place}/result.json": 3,
    "fleet summarize {there} --output {place}/x": 2, "pair --resolve {place} {place}": 2,
}  # fmt: skip


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    place, there = tmp_path / "place", tmp_path / "there"
    for folder in (place, there):
        put_report(folder, make_report(), "one")
    place.chmod(0)
    program = "import sys; from sdc.tools import cli; print(cli.run(sys.argv[1:]), file=sys.stderr)"
    # Root reads everything, unless it gives up the right to.
    user = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    for line, code in UNREADABLE.items():
        given = line.format(place=place, there=there).split()
        found = subprocess.run([*user, sys.executable, "-c", program, *given], capture_output=True, text=True)
        said = found.stdout + found.stderr
        assert said.split()[-1] == str(code), said
        assert "Traceback" not in said
        assert "[Errno" not in said
        assert str(place) in said
        assert "Permission denied" in said, said


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_clear_line(case: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs in this process, whose devices have started: these errors are found before any device is needed."""
    command = words(case[0], tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code = cli.run(command)
    captured = capsys.readouterr()
    check(code, captured.out, captured.err, case[1])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["twin", "--suspct", "node1"],
        ["twin", "--sync", "all"],
        ["dance"],
        [],
        ["--tyro-print-completion", "foo"],
        ["--tyro-write-completion", "bash", "/proc/x"],
    ],
)
def test_unknown_flags_and_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == Exit.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sdc: error: ")
    assert all(argument in line for argument in arguments[1:2])


@pytest.mark.parametrize(
    ("arguments", "said"), [(["train", "--run", ""], "'' after --run"), (["report", ""], "'' after report"), ([""], "")]
)
def test_an_empty_word_is_no_value(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == Exit.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{said}: expected a value" in line or not said


def test_a_run_folder_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for arguments, name in ((["twin", "--run", f"{tmp_path}/a/b"], "--run"), (["trace", f"{tmp_path}/a/b"], "RUN")):
        code = cli.run(arguments)
        captured = capsys.readouterr()
        check(code, captured.out, captured.err, f"{name} {tmp_path}/a/b: cannot be created: {tmp_path} is not writable")
    assert not list(tmp_path.iterdir())


def test_flags_of_another_name_than_the_setting_exist(capsys: pytest.CaptureFixture[str]) -> None:
    parse.parse(["train"])
    with pytest.raises(SystemExit):
        cli.run(["train", "--help"])
    options = capsys.readouterr().out
    assert {"folder", "faults", "mode", "scheme", "profile"} <= set(FLAGS)
    for setting, flag in FLAGS.items():
        assert f"--{flag.replace('_', '-')} " in options, setting


def test_the_overview_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    assert sorted(line.split()[0] for line in lines if line.startswith("  ")) == sorted(parse.COMMANDS)
    assert any("--version" in line for line in lines)


def commands() -> Iterator[tuple[str, ...]]:
    """Yields every command and subcommand."""
    for command in parse.COMMANDS:
        yield (command,)
        yield from ((command, below) for below in parse.names_below(parse.spec_of(command)))


@pytest.mark.parametrize("words", [*commands()], ids=" ".join)
def test_help_fits_80_columns_and_shows_two_commands(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run([*words, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("Output:") > text.find("Options:")  # flags that every command has come last
    block = text.split("\n\n")[2]
    examples = block.removeprefix("Example: sdc ").split("\n         sdc ")
    assert len(examples) == 2
    for example in examples:
        parse.parse(shlex.split(example.partition(" > ")[0]))


def test_a_paragraph_of_help_is_not_broken_before_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["fleet", "summarize", "--help"])
    assert "; 2 bad usage; 3 nothing could be compared, a file or folder could not be read" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_list_of_values_ends_at_a_short_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["twin", "--fault", "nan,rate=1", "-h"])
    assert ended.value.code == 0
    assert "usage: sdc twin" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("campaign", "--fault", "bitflip", "nan", "--run", "{x}"),
        ("campaign", "--fault", "bitflip", "--run", "{x}", "--fault=nan"),
        ("trace", "--compiler-option", "a=1", "{x}", "--compiler-option", "b=2"),
        ("trace", "{x}", "--compiler-option", "a=1", "b=2"),
        ("golden", "record", "--only", "matrix", "{x}", "--only", "memory"),
        ("golden", "record", "{x}", "--only", "matrix", "memory"),
    ],
    ids=" ".join,
)
def test_several_values_are_a_list_or_a_repeated_flag(words: tuple[str, ...], tmp_path: Path) -> None:
    place = tmp_path / "x"
    found = parse.parse([word.format(x=place) for word in words])
    found = getattr(found, "command", found)
    if words[0] == "campaign":
        assert (found.job.faults, found.job.folder) == (("bitflip", "nan"), place)
    elif words[0] == "trace":
        assert (found.job.compiler_options, found.job.folder) == (("a=1", "b=2"), place)
    else:
        assert (found.settings.only, found.file) == (("matrix", "memory"), place)


def test_a_failure_of_the_tool_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own exit code for an uncaught exception is 1, which would mean "corruption found"."""

    def broken(_: object) -> int:
        raise RuntimeError("broken")

    monkeypatch.setattr(parse, "command_of", lambda options: broken)
    assert cli.run(["train"]) == Exit.INCONCLUSIVE
    assert "please report it" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_reader_that_has_had_enough_does_not_change_the_exit_code(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The reader closes the pipe early, as in `sdc report RUN | head -1`."""
    rows, _ = steps(3)
    rows[1]["state"]["mismatched"] = 3
    write_run(tmp_path / "run", manifest(), rows)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert cli.run(["report", str(tmp_path / "run"), *flags]) == Exit.CORRUPT
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("mismatched", "code"), [(3, Exit.CORRUPT), (0, Exit.INCONCLUSIVE)])
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_result_that_cannot_be_printed_is_no_pass(
    flags: tuple[str, ...], mismatched: int, code: Exit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Standard output is a file on a full disk; what was found counts all the same."""
    rows, _ = steps(3)
    rows[1]["state"]["mismatched"] = mismatched
    write_run(tmp_path / "run", manifest(), rows)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert cli.run(["report", str(tmp_path / "run"), *flags]) == code
    assert capfd.readouterr().err == "sdc: cannot write to standard output (No space left on device)\n"


def test_only_what_can_resume_offers_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = files(tmp_path)["taken"]
    for command, offered in (("study paft", True), ("abft study", False)):
        assert cli.run([*command.split(), "--run", taken]) == Exit.USAGE
        said = capsys.readouterr().err
        assert "exists already; choose another folder" in said
        assert ("--resume" in said) is offered
    with pytest.raises(CommandError, match="run the command again"), run_errors("x", resumable=False):
        raise OSError(28, os.strerror(28))


def test_a_place_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    folder = tmp_path / "file" / "run"
    folder.parent.write_text("")
    with (
        pytest.raises(CommandError, match=r"cannot write to .* \(Not a directory\); choose another place"),
        run_errors(folder),
    ):
        folder.mkdir()
    with pytest.raises(FileNotFoundError), run_errors(tmp_path):  # a missing file inside is the tool's fault
        (tmp_path / "none").read_text()


def test_a_verdict_that_is_none_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words("report {taken}", tmp_path)
    summary = Path(command[1]) / "summary.json"
    write_sealed(summary, {**read_json(summary), "verdict": "bogus"})
    assert cli.run(command) == Exit.USAGE
    assert "(field verdict: expected clean, corrupt, inconclusive or null, got 'bogus')" in capsys.readouterr().err


@pytest.mark.parametrize("guard", [usage_errors, lambda: run_errors("runs/x")])
def test_a_full_disk_is_the_users_to_mend(guard: Callable[[], object]) -> None:
    with pytest.raises(CommandError) as error, guard():  # type: ignore[attr-defined] # a context manager
        raise OSError(28, os.strerror(28))
    assert error.value.code == Exit.USAGE
    assert "No space left" in str(error.value)


def test_too_little_memory_is_the_users_to_mend() -> None:
    said = "RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes."
    with (
        pytest.raises(CommandError, match=rf"too little memory for this run \({said}\); use") as error,
        run_errors("x"),
    ):
        raise jax.errors.JaxRuntimeError(f"{said}\nand more")
    assert error.value.code == Exit.USAGE
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), run_errors("x"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


@pytest.mark.parametrize(
    ("modules", "command", "said"),
    [
        ("matplotlib grain", "train", "train needs the extras `report` and `text`: pip install 'jax-sdc[report,text]'"),
        ("matplotlib", "train", "sdc train needs the extra `report`: pip install 'jax-sdc[report]'"),
        ("grain", "twin", "sdc twin needs the extra `text`: pip install 'jax-sdc[text]'"),
        ("jinja2", "report {taken}", "sdc report needs the extra `report`"),
        ("prometheus_client", "burnin --prometheus {folder}/x.prom", "--prometheus needs the extra `metrics`"),
        ("tensorboardX", "train --tensorboard {folder}/x", "--tensorboard needs the extra `tensorboard`"),
    ],
)
def test_what_is_not_installed_is_named_before_the_work(
    modules: str,
    command: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command_line = words(command, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for module in modules.split():
        monkeypatch.setitem(sys.modules, module, None)
    code = cli.run(command_line)
    captured = capsys.readouterr()
    check(code, captured.out, captured.err, said)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_page_says_which_extra_it_needs() -> None:
    code = "import sys; sys.modules['jinja2'] = None; from sdc.analysis.report import Report, to_html"
    code += "; to_html(Report('', '', None, ()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "a page needs the extra `report`: pip install 'jax-sdc[report]'" in done.stderr


def test_a_long_line_keeps_its_beginning_and_its_remedy() -> None:
    error = CommandError(f"begin {9_000 * 'x'} remedy\nshort")
    long, short = str(error).split("\n")
    assert (long[:6], long[-6:], short) == ("begin ", "remedy", "short")
    assert "x ... (5,013 characters) ... x" in long
    assert len(long) < 4_100
