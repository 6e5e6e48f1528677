"""Records in an S3 bucket, on a server of this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec
import msgspec
import pytest
from moto.server import ThreadedMotoServer

from sdc.records import FolderTaken, Record, RecordBusy, RecordError, identify, read_record, stamp, storage
from sdc.records.format import seal, to_text
from sdc.records.lines import link, start
from sdc.records.lock import LOCK, Holder, Lock, _namespace


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }.items():
            patch.setenv(name, value)
        client = fsspec.filesystem("s3")
        client.mkdir("bucket")
        yield client
    server.stop()


def test_a_record_lives_in_a_bucket_as_on_a_disk(store: Any, tmp_path: Path) -> None:
    found = {}
    for path in ("s3://bucket/runs/a", str(tmp_path / "runs/a")):
        with Record.create(path, {"created": "then"}, kind="twin") as record:
            for step in range(4):
                record.line({"step": step, "loss": [1.0 / 3, float("nan")]}, [{"step": step, "site": "x"}])
            record.rewind(3)
            record.line({"step": 3, "loss": [2.0, 2.0]})
        with Record.resume(path, {}, at=2) as record:
            assert record.count == 2
            record.line({"step": 2, "loss": [3.0, 3.0]})
            record.file("sites.json", {"sites": []})
            record.finish({"verdict": "clean"})
        found[path] = {name: storage.read_bytes(f"{path}/{name}") for name in storage.names(path)}
        contents = read_record(path)
        assert ([row["step"] for row in contents.lines], contents.ended) == ([0, 1, 2], True)
    bucket, disk = found.values()
    assert bucket == disk
    assert len(disk) == 6  # and no lock


def test_lines_are_in_the_bucket_after_a_flush(store: Any) -> None:
    with Record.create("s3://bucket/runs/b", {}, kind="train") as record:
        record.line({"step": 0})
        assert store.ls("bucket/runs/b", detail=False, refresh=True) == [
            f"bucket/runs/b/{name}" for name in (LOCK, "manifest.json")
        ]
        record.flush()
        assert [row["step"] for row in read_record("s3://bucket/runs/b").lines] == [0]
        record.line({"step": 1})
        assert len(read_record("s3://bucket/runs/b").lines) == 1
    assert len(read_record("s3://bucket/runs/b").lines) == 2


def test_what_another_host_has_written_is_seen(store: Any) -> None:
    """The client remembers what it listed, with the sizes of objects."""
    folder = "s3://bucket/runs/d"
    Record.create(folder, {}, kind="train").close()
    assert "steps.jsonl" in [Path(name).name for name in store.ls(folder, detail=False)]
    other = boto3.client("s3")
    line, _ = link(b'{"step": 0}', start("steps.jsonl"))
    other.put_object(Bucket="bucket", Key="runs/d/steps.jsonl", Body=line + b"\n")
    summary = {**stamp("jax-sdc record summary"), "steps": 1}
    other.put_object(Bucket="bucket", Key="runs/d/summary.json", Body=seal(to_text(summary).encode()))
    contents = read_record(folder)
    assert (len(contents.lines), contents.ended) == (1, True)


def test_one_writer_at_a_time(store: Any) -> None:
    folder = "s3://bucket/runs/c"
    with Record.create(folder, {}, kind="train"):
        for act in (lambda: Record.resume(folder, {}, at=0), lambda: Record.create(folder, {}, kind="train")):
            with pytest.raises(RecordBusy, match=f"on host {identify().name}"):
                act()
        assert not storage.create_bytes(f"{folder}/{LOCK}", b"mine")
    with pytest.raises(FolderTaken):
        Record.create(folder, {}, kind="train")
    mine = Holder(token="a", namespace=_namespace(), started="1")  # this number is another process by now
    storage.write_bytes(f"{folder}/{LOCK}", msgspec.json.encode(mine))
    Lock(folder).release()
    assert LOCK not in storage.names(folder)
    mine.host.name = "elsewhere"
    storage.write_bytes(f"{folder}/{LOCK}", msgspec.json.encode(mine))
    with pytest.raises(RecordBusy, match=f"if that process is gone, remove {folder}/{LOCK}"):
        Lock(folder)


def test_a_store_without_conditional_writes(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only TensorFlow reaches a store, a file is looked up before it is written."""

    def missing(path: Any) -> Any:
        raise ImportError(path)

    monkeypatch.setattr(storage, "_filesystem", missing)
    path = "s3://bucket/runs/e/lock.json"
    assert storage.create_bytes(path, b"mine")
    assert not storage.create_bytes(path, b"theirs")
    assert storage.read_bytes(path) == b"mine"


def test_what_is_not_there_is_said(store: Any) -> None:
    with pytest.raises(RecordError, match="s3://bucket/runs/none is not a run folder"):
        read_record("s3://bucket/runs/none")
    with pytest.raises(RecordError, match=r"cannot write run folder s3://nobucket/run: .*bucket"):
        Record.create("s3://nobucket/run", {}, kind="twin")
    assert not store.exists("nobucket")


def test_a_store_without_a_client_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, **_: Any) -> Any:
        raise ImportError(f"Install a client of {name}")

    monkeypatch.setattr("fsspec.filesystem", missing)
    monkeypatch.setattr("etils.epath.backend.fsspec_backend._get_filesystem", missing)
    with pytest.raises(RecordError, match="cannot be reached without gcsfs; install it"):
        Record.create("gs://bucket/run", {}, kind="twin")
