"""`sdc doctor` from the command line: exit codes, JSON for another host, and errors before anything starts."""

import json
from pathlib import Path

import pytest

from sdc.tools.cli import run
from sdc.train.doctor.results import Examined, read_examined
from tests.tools import test_doctor as units

# Fixtures.
environ = units.environ


def test_two_hosts_by_file(environ: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first is fit; the second has one more flag, which is named with the variable to set."""
    assert run(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert (value["format"], value["schema"], value["verdict"]) == ("jax-sdc doctor", 1, "clean")
    assert value["settings"] == {"JAX_PLATFORMS": "cpu", "NPROC": "2"}
    assert {row["operation"] for row in value["operations"]} == {"steady", "product", "sum", "roundings", "types"}
    file = tmp_path / "first.json"
    file.write_text(captured.out)
    assert isinstance(read_examined(file), Examined)

    environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"
    assert run(["doctor", "--against", str(file)]) == 1
    out = capsys.readouterr().out
    said = "no --xla_allow_excess_precision on the other host, --xla_allow_excess_precision=false on this host"
    assert f"roundings: caused by {said}" in out
    assert "NOT FIT  bits differ: bits of both hosts" in out
    advice = out[out.index("to make bits comparable, set") :]
    assert "  unset XLA_FLAGS\n" in advice
    assert advice.count("NPROC") == 1

    for arguments, said in (
        (("--devices", "2"), "was written without --devices; use the same flags"),
        (("--config", "tiny"), "was written without --config; use the same flags"),
    ):
        assert run(["doctor", "--against", str(file), *arguments]) == 2
        assert said in capsys.readouterr().err
