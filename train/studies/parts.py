"""The parts of a study, which its record keeps, so that an interrupted study resumes after its last complete part."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from sdc.records import Record, RecordError, from_json, read_manifest, to_json
from sdc.schema import PartRow

from .. import check_resumed, rows_in_order

T = TypeVar("T")
# A study is resumed only with its original settings.
SETTINGS = ("settings", "workloads", "environment")


def open_parts(folder: Path, manifest: Mapping[str, Any], *, resume: bool = False) -> tuple[Record, list[PartRow]]:
    """Opens the record of a study, and returns it together with the parts that it contains.

    Raises:
        RecordError: the folder contains something else, or a study with other settings.
    """
    if not resume:
        return Record.create(folder, manifest), []
    kind = str(manifest["kind"])
    then = read_manifest(folder, kind)
    if then["study"] != manifest["study"]:
        raise RecordError(f"{folder} contains a study of {then['study']}, not of {manifest['study']}; give its folder")
    check_resumed(folder, "study", then, to_json(manifest), SETTINGS)
    rows: list[PartRow] = rows_in_order(folder, kind, "part")
    return Record.resume(folder, manifest, at=len(rows)), rows


class RecordedParts:
    """Runs the parts of a study in order, except those that are on record.

    Example:
        >>> from sdc.train.studies import RecordedParts
        >>> RecordedParts()("the answer", int, lambda: 42)
        42
    """

    def __init__(self, record: Record | None = None, rows: Sequence[PartRow] = ()) -> None:
        """Takes an open record, to which the parts are written, and the parts that it contains."""
        self._record, self._rows, self._number = record, rows, 0

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, folder: Path, manifest: Mapping[str, Any], *, resume: bool = False
    ) -> Iterator[tuple[Record, "RecordedParts"]]:
        """Opens the record in `folder`, and yields it together with its parts; see `open_parts`."""
        record, rows = open_parts(folder, manifest, resume=resume)
        with record:
            yield record, cls(record, rows)

    @property
    def on_record(self) -> bool:
        """Whether the next part is on record, so that it need not run."""
        return self._number < len(self._rows)

    def __call__(self, title: str, kind: type[T], run: Callable[[], T]) -> T:
        """Returns the result of the next part.

        Args:
            title: title of the part, which identifies it.
            kind: type of the result: numbers, texts, dataclasses and arrays, also nested.
            run: computes the result.

        Raises:
            RecordError: the record contains another part at this place.
        """
        on_record, number = self.on_record, self._number
        self._number += 1
        if on_record:
            row = self._rows[number]
            if row.what != title:
                raise RecordError(
                    f"part {number} on record is {row.what!r}, expected {title!r}: another version of jax-sdc wrote "
                    "it; run the study again in another folder"
                )
        else:
            began = time.perf_counter()
            found = {"result": to_json(_plain(run()))}
            row = PartRow(part=number, what=title, workload="", seconds=time.perf_counter() - began, found=found)
            if self._record is not None:
                self._record.line(msgspec.to_builtins(row))
        return msgspec.convert(from_json(row.found["result"]), kind, dec_hook=lambda kind, value: np.asarray(value))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
