"""Registers of golden digests: whole or refused, merged without belief, and of this environment or not used."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec
import pytest
from hypothesis import given, strategies as st

from sdc.burnin import BurninSettings, Session
from sdc.burnin.golden_register import (
    GOLDEN,
    Register,
    describe_dispute,
    foreign,
    itself_alone,
    lookup,
    mark_of,
    merge,
    parse_key,
    shortfall,
)
from sdc.burnin.host import flat_surroundings, surroundings
from sdc.burnin.results import BurninResult, CheckedDevice, Tally
from sdc.records.determinism import environment
from sdc.records.format import write_sealed
from sdc.records.storage import RecordError
from sdc.schema import Device, Host

from .registers import BAD, ENVIRONMENT, GOOD, register, subject


def test_a_register_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = register(digests={"w": GOOD, "x": BAD})
    GOLDEN.write(tmp_path / "a.golden", written)
    read = GOLDEN.read(tmp_path / "a.golden")
    assert read == written
    assert lookup(read) == {subject("w").key: GOOD, subject("x").key: BAD}
    assert [path.name for path in tmp_path.iterdir()] == ["a.golden"]


def test_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.golden"
    GOLDEN.write(path, register())
    whole = path.read_bytes()
    for place in [*range(0, len(whole) - 40, 3), *range(len(whole) - 40, len(whole))]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(RecordError):
            GOLDEN.read(path)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError, match="is damaged"):
            GOLDEN.read(path)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Writes a register that was changed by somebody who computed its checksum anew."""
    value = msgspec.to_builtins(register())
    change(value)
    write_sealed(path, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format="jax-sdc burn-in"), "is not a register of golden digests"),
        (lambda v: v.update(schema=2), "has layout 2, but this version of jax-sdc reads layout 1"),
        (lambda v: v.update(schema="1"), "has layout '1'"),
        (lambda v: v.pop("entries"), "different fields .*entries"),
        (lambda v: v["entries"][0].update(digest=5), "different fields .*digest"),
        (lambda v: v["entries"][0].update(digest="0" * 15), "'000000000000000' is not a digest"),
        (lambda v: v["entries"].append(v["entries"][0]), "is listed twice"),
        (lambda v: v["entries"][0].update(seen=[]), "no burn-in recorded"),
        (lambda v: v["entries"][0]["seen"][0].update(devices=[2]), "has no devices 2"),
        (lambda v: v["entries"][0]["seen"][0].update(agreed=[]), "no runs agreed"),
        (lambda v: v.update(recordings={}), "burn-in a is not described"),
        (lambda v: v.update(environments={}), "environment .* is not described"),
        (lambda v: next(iter(v["environments"].values())).update(driver="545.2"), "does not match its name"),
        (lambda v: v.update(disputed=[{"subject": v["entries"][0]["subject"], "claims": {}}]), "twice"),
    ],
)
def test_what_cannot_be_so_is_refused(change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path) -> None:
    changed(tmp_path / "a.golden", change)
    with pytest.raises(RecordError, match=message):
        GOLDEN.read(tmp_path / "a.golden")


def test_a_file_that_is_not_there_or_nothing_of_the_kind(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"there is no .*sdc golden record"):
        GOLDEN.read(tmp_path / "a.golden")
    (tmp_path / "b.golden").write_text(json.dumps(msgspec.to_builtins(register())))
    with pytest.raises(RecordError, match="no checksum"):
        GOLDEN.read(tmp_path / "b.golden")
    with pytest.raises(ValueError, match="is not a digest"):
        GOLDEN.write(tmp_path / "c.golden", register(digests={"w": "what"}))
    assert not (tmp_path / "c.golden").exists()


def test_registers_of_hosts_that_agree() -> None:
    merged = merge([register("a", {"w": GOOD}), register("b", {"w": GOOD, "x": BAD})])
    assert lookup(merged) == {subject("w").key: GOOD, subject("x").key: BAD}
    assert [each.recording for each in merged.entries[0].seen] == ["a", "b"]
    assert sorted(merged.recordings) == ["a", "b"]
    assert merged.disputed == []


def test_a_disagreement_is_told_and_nobody_is_believed(tmp_path: Path) -> None:
    a, b, c = register("a", {"w": GOOD, "x": GOOD}), register("b", {"w": BAD}), register("c", {"w": GOOD})
    merged = merge([a, b])
    assert lookup(merged) == {subject("x").key: GOOD}
    (disputed,) = merged.disputed
    told = describe_dispute(merged, disputed)
    assert told.startswith(f"{subject('w').key}: {GOOD} by host-a (device 0 uuid GPU-a0, device 1 uuid GPU-a1; 4 runs")
    assert f"{BAD} by host-b (device 0 uuid GPU-b0" in told
    GOLDEN.write(tmp_path / "m.golden", merged)
    again = GOLDEN.read(tmp_path / "m.golden")
    # A majority that comes later, and is asked of the merged file alone, does not settle it in silence.
    assert merge([again, c]) == merge([c, b, a])
    assert subject("w").key not in lookup(merge([again, c]))


def test_one_burn_in_that_is_described_twice() -> None:
    other = register("a")
    other.recordings["a"].rounds = 5
    with pytest.raises(RecordError, match="described differently"):
        merge([register("a"), other])


REGISTERS = st.lists(
    st.builds(
        lambda host, digests, driver: register(f"{host}{driver}{sorted(digests.items())}", digests, {"driver": driver}),
        st.sampled_from("abc"),
        st.dictionaries(st.sampled_from("wxyz"), st.sampled_from([GOOD, BAD]), min_size=1),
        st.sampled_from(["1", "2"]),
    ),
    min_size=1,
    max_size=5,
)


@given(REGISTERS, st.randoms(use_true_random=False), st.integers(0, 5))
def test_neither_order_nor_repetition_matters(registers: list[Register], random: Any, cut: int) -> None:
    merged = merge(registers)
    shuffled = copy.deepcopy(registers) + registers[:cut]
    random.shuffle(shuffled)
    assert merge(shuffled) == merged
    assert merge([merged]) == merged
    assert merge([merge(shuffled[:cut] or shuffled), merge(shuffled)]) == merged
    # Each digest is either that of all who saw its subject, or none is used.
    for each in {entry.subject for one in registers for entry in one.entries}:
        said = {entry.digest for one in registers for entry in one.entries if entry.subject == each}
        assert lookup(merged).get(each.key) == (next(iter(said)) if len(said) == 1 else None)
        assert any(row.subject == each and set(row.claims) == said for row in merged.disputed) == (len(said) > 1)


@pytest.mark.parametrize("shard", [None, 3])
def test_a_key_says_all_of_its_subject(shard: int | None) -> None:
    one = subject("collectives/psum/4x16", shard=shard, seed=7)
    assert parse_key(one.key) == one
    with pytest.raises(ValueError, match="is not the key"):
        parse_key("w | seed 0")


GPU = {**environment(), "platform": "gpu", "platform_version": "cuda 12080", "xla_flags": "--b=2 --a=1"}


def mark(driver: str = "550.1", variables: dict[str, str] | None = None, **differs: Any) -> str:
    return mark_of(flat_surroundings({**GPU, **differs}, driver, variables or {}))


def test_whatever_decides_bits_changes_the_key() -> None:
    packages, options = GPU["packages"], GPU["options"]
    same = mark()
    assert mark(xla_flags="--a=1 --b=2 --xla_cpu_fast_math=false") == same  # order, and flags of another platform
    assert mark(packages={**packages, "grain": "0"}, local_devices=3) == same  # no part in it
    others = [
        mark(driver="545.2"),
        mark(variables={"NVIDIA_TF32_OVERRIDE": "0"}),
        mark(packages={**packages, "jax": "0.0"}),
        mark(packages={**packages, "jaxlib": "0.0"}),
        mark(platform_version="cuda 12090"),
        mark(xla_flags="--a=1 --b=3"),
        mark(xla_flags="--a=1"),
        mark(options={**options, "jax_enable_x64": "True"}),
    ]
    assert len({same, *others}) == 9


def test_the_processor_and_its_threads_change_the_key_of_a_cpu() -> None:
    cpu = {**environment(), "processor": "EPYC", "cpu_threads": "8", "processors": 8}

    def of(**differs: Any) -> str:
        return mark_of(flat_surroundings({**cpu, **differs}, None, {}))

    assert of(processors=64) == of()  # the size of the pool was chosen
    assert of(cpu_threads=None) == of()  # and is that of the host where it was not
    assert len({of(), of(processor="Xeon"), of(cpu_threads="4"), of(cpu_threads=None, processors=2)}) == 4


def test_this_process_has_surroundings() -> None:
    found = surroundings(jax.local_devices())
    assert found["jax"] == jax.__version__
    assert found["cpu_threads"] == "8"
    assert all(isinstance(value, str) for value in found.values())


def test_digests_that_apply_here() -> None:
    known = register(digests={"w": GOOD, "x": BAD})
    both = [subject("w").key, subject("x").key]
    assert shortfall(known, both, ENVIRONMENT) is None
    assert shortfall(known, both[:1], ENVIRONMENT) is None
    assert shortfall(known, [], ENVIRONMENT) == "no workload ran whose outputs could be compared with a digest"
    assert shortfall(known, [*both, subject("new").key], ENVIRONMENT) == (
        "only 2 of the 3 digests that this host needs are in the file: no digest was recorded (1 workload)"
    )


def test_foreign_digests_are_explained() -> None:
    known = register(digests={"w": GOOD, "x": BAD})
    here = {**ENVIRONMENT, "driver": "560.9", "NVIDIA_TF32_OVERRIDE": "0"}
    keys = [subject(workload, here).key for workload in "wx"]
    assert shortfall(known, keys, here) == (
        "none of the 2 digests that this host needs are in the file: NVIDIA_TF32_OVERRIDE 0 on this host, nothing in "
        "the register, driver 560.9 on this host, 550.1 in the register (2 workloads)"
    )
    for differs, words in (
        ({"kind": "gpu H200"}, "device gpu H200 on this host, gpu H100 in the register"),
        ({"seed": 5}, "seed 5 on this host, 0 in the register"),
        ({"algorithm": "two"}, "digest algorithm two on this host, one in the register"),
        ({"program": "abcdef0123456789"}, "program abcdef012345 on this host, 5feb in the register"),
    ):
        assert foreign(known, [subject("w", **differs).key], ENVIRONMENT) == [f"{words} (1 workload)"]
    disputed = merge([known, register("b", {"w": BAD})])
    assert foreign(disputed, [subject("w").key], ENVIRONMENT) == ["hosts disagree on the digest (1 workload)"]


def test_of_several_recordings_the_nearest_explains() -> None:
    near, far = {**ENVIRONMENT, "driver": "551"}, {**ENVIRONMENT, "driver": "400", "jax": "0.1", "jaxlib": "0.1"}
    known = merge([register("a", environment=far), register("b", environment=near)])
    assert foreign(known, [subject("w").key], ENVIRONMENT) == [
        "driver 550.1 on this host, 551 in the register (1 workload)"
    ]


def test_a_device_that_is_its_own_witness_is_reported(tmp_path: Path) -> None:
    known = register("a")
    known.entries[0] = msgspec.structs.replace(
        known.entries[0], seen=(msgspec.structs.replace(known.entries[0].seen[0], devices=(1,)),)
    )

    def tested(uuid: str = "GPU-a1", key: str = subject("w").key) -> BurninResult:
        device = CheckedDevice(index=0, machine="a", kind="H100", uuid=uuid, id=3)
        return BurninResult(devices=[device], workloads=[Tally(workload="w", device=0, family="", work=1.0, key=key)])

    doubt = itself_alone(known, tested())
    assert doubt is not None
    assert doubt.startswith("1 of the golden digests was recorded only on the tested device itself")
    session = Session(BurninSettings(), tmp_path)
    session._register, session._here = known, ENVIRONMENT
    stopped = msgspec.structs.replace(tested(), stopped="SIGTERM")  # perhaps before the digests of other devices
    assert [session._doubt(result, final=True) for result in (tested(), stopped)] == [doubt, None]
    assert itself_alone(known, tested(uuid="GPU-a0")) is None
    assert itself_alone(register("a"), tested()) is None  # the other device had it too
    assert itself_alone(known, tested(key=subject("new").key)) is None


# The tested device and its host, whose register was recorded on GPU-1 in slot 1 of machine a in boot b
WITNESSES: dict[str, tuple[dict[str, str | None], dict[str, str | None], bool]] = {
    "the same": ({}, {}, False),
    "another machine-id": ({"machine": "z"}, {"machine": "z"}, False),
    "no machine-id": ({"machine": None}, {"machine": None}, False),
    "another slot": ({}, {"bus": "2"}, False),
    "another UUID": ({}, {"uuid": "GPU-2"}, True),
    "no UUID, another slot": ({}, {"uuid": None, "bus": "2"}, False),
    "no UUID, no machine-id": ({"machine": None}, {"machine": None, "uuid": None}, False),
    "no UUID, another machine": ({"machine": "z"}, {"machine": "z", "uuid": None}, True),
    "no UUID, another machine-id in one boot": ({"machine": "z", "boot": "b"}, {"machine": "z", "uuid": None}, False),
}


@pytest.mark.parametrize("case", WITNESSES)
def test_only_another_device_is_a_witness(case: str) -> None:
    host, device, other = WITNESSES[case]
    known = register("a")
    here = CheckedDevice(index=0, id=0, kind="H100", machine="a", bus="1", uuid="GPU-1")
    recording = known.recordings["a"]
    recording = msgspec.structs.replace(
        recording,
        host=msgspec.structs.replace(recording.host, boot="b"),
        devices=2 * [msgspec.convert(here, Device, from_attributes=True)],
    )
    known.recordings["a"] = recording
    result = BurninResult(
        host=Host(**{"name": "x", "machine": "a", "boot": "c", **host}),
        devices=[msgspec.structs.replace(here, **device)],
        workloads=[Tally(workload="w", device=0, family="", work=1.0, key=subject().key)],
    )
    assert (itself_alone(known, result) is None) == other


def test_registers_of_the_first_layout_stay_readable() -> None:
    read = GOLDEN.read(Path(__file__).parent / "schema_1.golden")
    assert (read.schema, read.host.name) == (1, "host-a")
    assert (read.entries, read.recordings) == (register().entries, register().recordings)
