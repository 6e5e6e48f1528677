"""What is published of the layout is what is written and read."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc.records import KINDS, json_schema
from sdc.records.format import misfit
from sdc.records.layout import TABLES, render_tables
from sdc.schema import Header, InjectionRow, StepRow
from tests.pages import check_table

OLD = Path(__file__).parent / "records_1"
PAGE = "run-record"


@pytest.mark.parametrize("type", TABLES, ids=lambda type: type.__name__)
def test_the_page_as_it_is_built_has_a_table_of_every_field(type: Any) -> None:
    check_table(PAGE, type)


def test_a_type_without_a_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="Nothing"):
        render_tables("<!-- fields: Nothing -->")


def resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


@pytest.mark.parametrize("kind", ["twin", "trace", "campaign"])
def test_the_schema_names_every_field_that_is_written(kind: str) -> None:
    schema = json_schema()
    assert set(schema["files"]) == set(KINDS)
    for name, node in schema["files"][kind].items():
        if name in ("lock.json", "discarded.jsonl"):
            continue
        text = (OLD / kind / name).read_text()
        rows = [json.loads(line) for line in text.splitlines()] if name.endswith("l") else [json.loads(text)]
        known = resolve(schema, node)
        gone = {"crc32"} if name == "trace.jsonl" else set()  # these records were written when lines still had it
        assert set().union(*rows) - {"checksum"} - gone <= set(known["properties"])
        assert set(known["required"]) <= set(rows[0])
        assert all("description" in field for name, field in known["properties"].items() if name != "format")


def test_every_reference_of_the_schema_leads_somewhere() -> None:
    schema = json_schema()
    references = set(json.dumps(schema).split('"#/$defs/')[1:])
    names = {reference.partition('"')[0] for reference in references}
    assert names <= set(schema["$defs"])
    assert {"Host", "SiteCounts", "RankRow"} <= names


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"step": 0}, None),
        ({"step": 0, "loss": [float("nan"), 1, 2.5, None], "mine": {"a": 1}}, None),
        ({"step": -1}, "field step: expected int >= 0"),
        ({"loss": 1}, "object missing required field step"),
        ({"step": 0, "loss": "high"}, "field loss: expected int | float | array | null, got str"),
        (
            {"step": 0, "sites": {"a": {"checked": [1]}}},
            "field sites[...].checked: expected int | float | null, got array",
        ),
        ({"step": 0, "sites": []}, "field sites: expected object, got array"),
    ],
)
def test_a_field_that_does_not_fit_is_named(value: Any, problem: str | None) -> None:
    found = misfit(value, StepRow)
    assert found is None if problem is None else found is not None and found.startswith(problem)


@pytest.mark.parametrize("type", TABLES, ids=lambda type: type.__name__)
def test_what_a_record_does_not_say_is_null_or_empty(type: Any) -> None:
    for field in msgspec.structs.fields(type):
        if field.name not in {each.name for each in msgspec.structs.fields(Header)}:
            assert field.default in (None, msgspec.NODEFAULT), field.name
            assert field.default_factory in (dict, list, msgspec.NODEFAULT), field.name


def test_types_can_be_filled_in() -> None:
    row = msgspec.convert({"injection": 3, "outcome": "masked"}, InjectionRow)
    assert msgspec.to_builtins(row)["outcome"] == "masked"


def test_a_tie_among_operations_is_read_as_one() -> None:
    """A guess would name hosts of which no majority says that they are wrong."""
    row = msgspec.convert({"step": 0, "operations": {"checked": 8, "mismatched": 2, "undecided": True}}, StepRow)
    assert row.operations is not None
    assert row.operations.undecided
