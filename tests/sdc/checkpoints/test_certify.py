"""Certified checkpoints: what is restored is what was on the devices, or it is said what is not."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import replica_slices

import sdc
from sdc.checkpoints import CertificateError, Certified, Damaged, Status, audit, certificate
from sdc.checkpoints.certificate import Draft
from sdc.records.format import read_json, write_sealed
from tests.storms import bits

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
KEEP_TWO = ocp.training.preservation_policies.LatestN(2)


def mesh(*shape: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()).reshape(shape), ("a", "b"))


def state(step: int, on: Mesh | None = None) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(step), 2)
    tree = {
        "layers": [{"kernel": jax.random.normal(keys[0], (512, 64)), "bias": jnp.arange(64, dtype=jnp.bfloat16)}],
        "step": jnp.int32(step),
        "key": keys[1],
    }
    place = NamedSharding(on or mesh(2, 4), P("a", "b"))
    tree["layers"][0]["kernel"] = jax.device_put(tree["layers"][0]["kernel"], place)
    return tree


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def same(a: Any, b: Any) -> bool:
    return bits.bits_of(a) == bits.bits_of(b)


def certified_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "certificates").iterdir() if path.is_dir())


def opened(folder: Path, **options: Any) -> Certified:
    return sdc.certify(ocp.training.Checkpointer(folder, **options))


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Certified]:
    with opened(tmp_path, preservation_policy=KEEP_TWO) as certified:
        yield certified


def change(folder: Path, step: int) -> None:
    """A checkpoint of something else, as Orbax alone would write and restore it."""
    other = state(step)
    kernel = other["layers"][0]["kernel"]
    other["layers"][0]["kernel"] = jax.device_put(kernel.at[200, 3].set(7.0), kernel.sharding)
    with ocp.training.Checkpointer(folder) as plain:
        plain.save(step, other, force=True, overwrite=True)


def test_what_is_saved_is_restored_on_another_mesh(checkpointer: Certified) -> None:
    assert checkpointer.save(3, state(3))
    assert checkpointer.status(3).state == "CANDIDATE"
    got, step = checkpointer.restore_verified(abstract(state(3, mesh(4, 2))))
    assert step == 3
    assert same(got, state(3))
    assert got["layers"][0]["kernel"].sharding.mesh.shape == {"a": 4, "b": 2}
    assert checkpointer.status(3) == Status(3, "VERIFIED", ("digest",), True)
    assert same(checkpointer.load(), state(3))


def test_the_state_may_be_donated_while_it_is_saved(checkpointer: Certified) -> None:
    given = state(5)
    response = checkpointer.save_async(5, given)
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf, tree), donate_argnums=0)(given)
    assert response is not None
    assert response.result()
    assert same(checkpointer.load(5, abstract(state(5))), state(5))


def test_a_change_is_told_with_its_block_and_older_steps_are_taken(
    checkpointer: Certified, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        checkpointer.save(step, state(step))
    change(tmp_path, 2)
    with pytest.raises(Damaged, match=r"checkpoint 2 of .* is damaged: state/layers/0/kernel differs in rows 0:256"):
        checkpointer.load(2, abstract(state(0)))
    with caplog.at_level(logging.WARNING, "sdc.checkpoints"):
        got, step = checkpointer.restore_verified(abstract(state(0)))
    assert step == 1
    assert same(got, state(1))
    assert [step for step, _ in checkpointer.rejected] == [2]
    assert "skipping checkpoint 2: checkpoint 2" in caplog.text
    change(tmp_path, 1)
    with pytest.raises(CertificateError, match=r"can be verified \(2: checkpoint 2 .*; 1: checkpoint 1 "):
        checkpointer.restore_verified(abstract(state(0)))


def test_a_bit_flipped_in_the_copy_on_the_host_is_found(
    checkpointer: Certified, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between device and file: neither a checksum of the file nor Orbax could know."""
    flipped = []

    class Flipping:
        """NumPy, and a bit of one large copy flipped."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def asarray(self, x: Any) -> Any:
            copy = np.array(x)
            if copy.nbytes > 1000 and not flipped:
                copy.view(np.uint8)[0, 1] ^= 4
                flipped.append(copy)
            return copy

    monkeypatch.setattr(replica_slices, "np", Flipping())
    checkpointer.save(1, state(1))
    assert flipped
    with pytest.raises(Damaged, match="differs"):
        checkpointer.load(1, abstract(state(1)))


def test_what_is_verified_stays(checkpointer: Certified, tmp_path: Path) -> None:
    """The policy keeps two; the last verified one is a third, until another is verified."""
    for step in range(4):
        checkpointer.save(step, state(step))
        if step == 1:
            checkpointer.vouch(1, "twins")
    steps = lambda: [checkpoint.step for checkpoint in checkpointer.checkpoints]  # noqa: E731
    assert steps() == [1, 2, 3]
    assert checkpointer.status(1).reasons == ("twins",)
    checkpointer.load(3, abstract(state(0)))
    for step in (4, 5):
        checkpointer.save(step, state(step))
    assert steps() == [3, 4, 5]
    assert certified_steps(tmp_path) == ["3", "4", "5"]
    checkpointer.delete(3)
    assert certified_steps(tmp_path) == ["4", "5"]
    with pytest.raises(CertificateError, match="'luck' is not a valid reason; expected one of digest, twins, guard"):
        checkpointer.vouch(4, "luck")  # type: ignore[arg-type]


def test_saved_once_more(checkpointer: Certified) -> None:
    """What was verified of the state before is not verified of this one."""
    checkpointer.save(1, state(1))
    checkpointer.load(1, abstract(state(1)))
    checkpointer.save(1, state(9), overwrite=True, force=True)
    assert checkpointer.status(1).state == "CANDIDATE"
    assert same(checkpointer.load(1, abstract(state(9))), state(9))


def test_a_checkpoint_that_a_policy_skips(tmp_path: Path) -> None:
    every = ocp.training.save_decision_policies.FixedIntervalPolicy(2)
    with opened(tmp_path, save_decision_policy=every) as certified:
        assert [certified.save(step, state(step)) for step in range(4)] == [True, False, True, False]
        assert certified.save_async(5, state(5)) is None
    assert certified_steps(tmp_path) == ["0", "2"]


def test_a_checkpoint_of_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ocp.training.Checkpointer(tmp_path) as plain:
        plain.save(1, state(1))
    with opened(tmp_path) as certified:
        with pytest.raises(CertificateError, match=r"step 1: there is no certificate \(.*process-0.json is missing"):
            certified.load(1, abstract(state(1)))
        certified.certify_existing(1, abstract(state(1)))
        assert not certified.status(1).history
        with caplog.at_level(logging.WARNING, "sdc.checkpoints"):
            assert certified.restore_verified(abstract(state(1)))[1] == 1
        assert "history not verified" in caplog.text
        with pytest.raises(CertificateError, match="has a certificate"):
            certified.certify_existing(1)
        change(tmp_path, 1)
        with pytest.raises(Damaged):
            certified.load(1, abstract(state(1)))


def test_several_checkpointables_and_values(checkpointer: Certified, caplog: pytest.LogCaptureFixture) -> None:
    """NumPy's arrays, numbers and text are covered as well; a tree with anything else is named."""
    tree = {"array": np.arange(5), "whole": 3, "part": 0.5, "text": "word", "device": jnp.arange(3.0)}
    checkpointer.save_checkpointables(1, {"model": tree, "extra": {"x": jnp.zeros(2)}})
    found = checkpointer.load_checkpointables(1)
    assert found["model"]["text"] == "word"
    assert checkpointer.status(1).state == "VERIFIED"
    assert "cannot be verified" not in caplog.text
    part = checkpointer.load_checkpointables(1, {"extra": {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}})
    assert list(part) == ["extra"]


def test_a_part_alone_is_compared_and_vouches_for_nothing(checkpointer: Certified, tmp_path: Path) -> None:
    checkpointer.save(1, state(1))
    wanted = jax.tree.map(lambda _: ..., state(1)) | {"step": jax.ShapeDtypeStruct((), jnp.int32)}
    assert checkpointer.load(1, wanted)["step"] == 1
    assert checkpointer.status(1).state == "CANDIDATE"
    change(tmp_path, 1)
    assert checkpointer.load(1, wanted)["step"] == 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda body: body | {"schema": 2}, "has layout 2, but this version of jax-sdc reads layout 1"),
        (lambda body: body | {"algorithm": "sum"}, "has digests of the algorithm 'sum'; expected 'sum-and-squares'"),
        (lambda body: body | {"step": 7}, "belongs to step 7, process 0"),
        (lambda body: body | {"processes": 2}, "the certificate lacks the part of process 1"),
        (lambda body: body | {"arrays": {"state/key": {}}}, "has different fields"),
        (lambda body: body | {"arrays": {}}, "does not match checkpoint 1: it has state/key, which was not saved"),
        (lambda body: body | {"apart": ["state/key at 0:2"]}, "state/key differed between devices when it was saved"),
    ],
)
def test_certificates_of_something_else(checkpointer: Certified, tmp_path: Path, spoil: Any, words: str) -> None:
    checkpointer.save(1, state(1))
    path = tmp_path / "certificates" / "1" / "process-0.json"
    write_sealed(path, spoil(read_json(path)))
    with pytest.raises(CertificateError, match=words):
        checkpointer.load(1, abstract(state(1)))


def test_blocks_that_are_missing_in_a_certificate(checkpointer: Certified, tmp_path: Path) -> None:
    checkpointer.save(1, state(1))
    path = tmp_path / "certificates" / "1" / "process-0.json"
    body = read_json(path)
    body["arrays"]["state/layers/0/kernel"]["blocks"].popitem()
    write_sealed(path, body)
    with pytest.raises(CertificateError, match="covers only part of state/layers/0/kernel"):
        checkpointer.load(1, abstract(state(1)))


def test_a_status_that_is_damaged_or_of_another_step_vouches_for_nothing(
    checkpointer: Certified, tmp_path: Path
) -> None:
    for step in (1, 2):
        checkpointer.save(step, state(step))
        checkpointer.vouch(step, "guard")
    path = tmp_path / "certificates" / "1" / "status.json"
    (tmp_path / "certificates" / "2" / "status.json").write_bytes(path.read_bytes())
    path.write_text(json.dumps({"step": 1, "reasons": ["twins"]}))
    assert [checkpointer.status(step).state for step in (1, 2)] == ["CANDIDATE", "CANDIDATE"]


def test_another_type_or_structure_is_no_silent_conversion(checkpointer: Certified) -> None:
    checkpointer.save(1, state(1))
    other = abstract(state(1))
    other["layers"][0]["bias"] = jax.ShapeDtypeStruct((64,), jnp.float32)
    with pytest.raises(CertificateError, match="was certified as bfloat16, not as float32; restore it as bfloat16"):
        checkpointer.load(1, other)
    other["layers"][0]["bias"] = jax.ShapeDtypeStruct((65,), jnp.bfloat16)
    with pytest.raises(CertificateError, match=r"was certified with shape \[64\], not \[65\]"):
        checkpointer.load(1, other)
    del other["layers"]
    with pytest.raises(CertificateError, match="it has no state/layers/0/bias, which was saved"):
        checkpointer.load(1, other)
    assert checkpointer.status(1).state == "CANDIDATE"
    assert same(checkpointer.load(1, abstract(state(1))), state(1))
    with pytest.raises(CertificateError, match=r"no checkpoint of step 4 in .*; available steps: 1"):
        checkpointer.load(4)


def test_a_certificate_that_cannot_be_written(checkpointer: Certified, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training goes on; the checkpoint counts as not certified, and the one before stays."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    checkpointer.save(1, state(1))
    monkeypatch.setattr(Draft, "write", full)
    with pytest.raises(CertificateError, match=r"certificate of the last checkpoint cannot be written .*No space"):
        checkpointer.save(2, state(2))
    monkeypatch.undo()
    assert checkpointer.restore_verified(abstract(state(0)))[1] == 1
    assert checkpointer.save(3, state(3))


def test_what_is_found_damaged_is_verified_no_more(checkpointer: Certified, tmp_path: Path) -> None:
    """Or the policy would keep it in the place of one that is good."""
    for step in (1, 2):
        checkpointer.save(step, state(step))
        checkpointer.load(step, abstract(state(0)))
    change(tmp_path, 2)
    with pytest.raises(Damaged):
        checkpointer.load(2, abstract(state(0)))
    assert checkpointer.status(2).state == "CANDIDATE"
    for step in (3, 4, 5):
        checkpointer.save(step, state(step))
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [1, 4, 5]
    status = tmp_path / "certificates" / "1" / "status.json"
    status.write_bytes(status.read_bytes().replace(b"digest", b"digesu"))
    for step in (6, 7):
        checkpointer.save(step, state(step))
    assert 1 in [checkpoint.step for checkpoint in checkpointer.checkpoints]


def test_what_cannot_be_read_is_in_doubt(checkpointer: Certified, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the storage: the step stays, and so does an older one that is verified."""
    for step in (1, 2):
        checkpointer.save(step, state(step))
        checkpointer.vouch(step, "twins")

    def stale(*_: object) -> None:
        raise OSError("stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(checkpointer._orbax, "load_checkpointables", stale)
        with pytest.raises(Damaged, match="stale file handle"):
            checkpointer.load(2, abstract(state(2)))
    assert checkpointer.status(2).state == "CANDIDATE"
    for step in (3, 4, 5):
        checkpointer.save(step, state(step))
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [1, 2, 4, 5]
    checkpointer.load(2, abstract(state(2)))
    assert checkpointer.status(2).reasons == ("digest", "twins")


def test_a_status_that_cannot_be_written_keeps_nobody_from_restoring(
    checkpointer: Certified, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer.save(1, state(1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(certificate.KNOWN), "write", full)
    assert same(checkpointer.load(1, abstract(state(1))), state(1))
    assert "cannot update the status of checkpoint" in caplog.text
    with pytest.raises(CertificateError, match=r"cannot write to .*No space left"):
        checkpointer.vouch(1, "twins")


def test_paths_that_look_alike_are_told_apart(checkpointer: Certified, tmp_path: Path) -> None:
    tree = {"a/b": jnp.zeros(4), "a": {"b": jnp.ones(4)}}
    checkpointer.save(1, tree)
    assert len(audit(str(tmp_path), 1).wrong) == 0
    assert audit(str(tmp_path), 1).covered == 2
    with ocp.training.Checkpointer(tmp_path) as plain:
        plain.save(1, tree | {"a/b": jnp.ones(4)}, overwrite=True, force=True)
    with pytest.raises(Damaged, match=r"state/\['a/b'\] differs"):
        checkpointer.load(1, tree)


def test_one_writer(checkpointer: Certified, tmp_path: Path) -> None:
    checkpointer.save(1, state(1))
    other = opened(tmp_path)
    assert same(other.load(1, abstract(state(1))), state(1))
    with pytest.raises(CertificateError, match="is being written by process"):
        other.save(2, state(2))
    checkpointer.close()
    assert other.save(2, state(2))
    other.close()


@pytest.mark.parametrize("name", ["ckpt", "step_00"])
def test_folders_of_other_names(tmp_path: Path, name: str) -> None:
    form = ocp.path.step.standard_name_format(step_prefix=name)
    with opened(tmp_path, step_name_format=form, preservation_policy=KEEP_TWO) as certified:
        for step in range(4):
            certified.save(step, state(step))
        assert certified.restore_verified(abstract(state(0)))[1] == 3
        certified.save(4, state(4))
    assert certified_steps(tmp_path) == ["2", "3", "4"]


def test_what_is_no_checkpointer_and_what_is_not_certified(checkpointer: Certified) -> None:
    with pytest.raises(CertificateError, match=r"expected orbax.checkpoint.v1.training.Checkpointer"):
        sdc.certify(checkpointer)
    with pytest.raises(AttributeError, match="load_async of the checkpointer is not certified"):
        checkpointer.load_async(1)
    assert checkpointer.latest is None
    with pytest.raises(CertificateError, match="there are no checkpoints"):
        checkpointer.restore_verified()


def test_unknown_arguments_are_errors(checkpointer: Certified) -> None:
    saved = {"w": jnp.arange(4.0)}
    checkpointer.save(1, saved)
    with pytest.raises(TypeError, match="verify"):
        checkpointer.load(1, saved, verify=False)  # type: ignore[call-arg]  # refused at run time, too
    with pytest.raises(TypeError, match="verify"):
        checkpointer.restore_verified(saved, verify=False)  # type: ignore[call-arg]  # likewise


@pytest.mark.parametrize("endless", ["pipe", "device", "pipe behind a link"])
def test_a_checkpoint_that_would_never_end_is_skipped(tmp_path: Path, endless: str) -> None:
    saved = {"w": jnp.arange(4.0)}
    folder = tmp_path / "run"
    with sdc.certify(ocp.training.Checkpointer(folder)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, saved)
        place = next((folder / "2").glob("*/_METADATA")).parent
        if endless == "device":
            (place / "more").symlink_to("/dev/zero")
        elif endless == "pipe":
            os.mkfifo(place / "more")
        else:
            (tmp_path / "elsewhere").mkdir()
            os.mkfifo(tmp_path / "elsewhere" / "more")
            (place / "more").symlink_to(tmp_path / "elsewhere")
        assert checkpointer.restore_verified(saved)[1] == 1
        assert "more is a" in checkpointer.rejected[0][1]
    assert "delete" in audit(str(folder), 2).problem
    assert audit(str(folder), 1).problem == ""


def test_a_checkpoint_that_was_passed_over_is_saved_again(tmp_path: Path) -> None:
    with sdc.certify(ocp.training.Checkpointer(tmp_path)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": jnp.full(4, step)})
    os.mkfifo(tmp_path / "2" / "more")
    os.mkfifo(tmp_path / "3")
    with Certified.open(tmp_path) as checkpointer:
        assert checkpointer.restore_verified()[1] == 1
        for step in (2, 3):
            assert checkpointer.save(step, {"w": jnp.full(4, step)})
    with Certified.open(tmp_path) as checkpointer:
        restored, step = checkpointer.restore_verified({"w": jnp.zeros(4, jnp.int32)})
        assert (step, restored["w"].tolist()) == (3, [3] * 4)


def test_a_lock_is_released_although_the_checkpointer_cannot_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError("no space left")

    checkpointer = sdc.certify(ocp.training.Checkpointer(tmp_path))
    checkpointer.save(1, {"w": jnp.arange(4.0)})
    with monkeypatch.context() as patched:
        patched.setattr(type(checkpointer._orbax), "close", failing)
        with pytest.raises(OSError, match="no space left"):
            checkpointer.close()
    with sdc.certify(ocp.training.Checkpointer(tmp_path)) as other:
        assert other.save(2, {"w": jnp.arange(4.0)})
