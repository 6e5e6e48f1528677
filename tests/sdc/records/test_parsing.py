"""JSON of bounded depth: what lies within the bound is read as ever, what lies beyond is told so."""

import json
from typing import Any

import pytest

from sdc.records.format import DEEPEST, parse_json


def nested(levels: int, core: str, *, objects: bool) -> str:
    return levels * '{"a": ' + core + levels * "}" if objects else levels * "[" + core + levels * "]"


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("core", ["1", '"[[["', "null"])
def test_the_bound_is_exact(core: str, objects: bool) -> None:
    text = nested(DEEPEST, core, objects=objects)
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    for levels in (DEEPEST + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested deeper than 100 levels"):
            parse_json(nested(levels, core, objects=objects))


def test_a_cut_off_text_and_an_empty_core() -> None:
    assert parse_json(nested(DEEPEST - 1, "[]", objects=False)) == json.loads(nested(DEEPEST, "", objects=False))
    for text in (nested(DEEPEST, "[]", objects=False), nested(DEEPEST, "{}", objects=True)):
        with pytest.raises(ValueError, match="nested deeper than 100 levels"):
            parse_json(text)
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json("[" * 101)


@pytest.mark.parametrize(
    "value", [{"rows": [[number, {"a": [number]}] for number in range(1_000)]}, [], 3.5, "[" * 200]
)
def test_what_is_wide_is_not_deep(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
