"""Names of targets, and what is wrong with others."""

import importlib.metadata
from typing import Any

import pytest

from sdc.costs import check_compiler, find_target
from sdc.costs.targets import H100, _description
from sdc.settings import SettingError


@pytest.mark.parametrize(
    ("name", "slices", "shape", "devices"),
    [
        ("v5p:2x2x4", 1, (2, 2, 4), 16),
        ("2xv5e:4x4", 2, (4, 4), 32),
        ("7x:2x2x1", 1, (2, 2, 1), 8),
        ("TPU7x:2x2x1", 1, (2, 2, 1), 8),
        ("3x7x:2x2x1", 3, (2, 2, 1), 24),
        ("h100x8", 1, (8,), 8),
        ("2xh100x8", 2, (8,), 16),
    ],
)
def test_names(name: str, slices: int, shape: tuple[int, ...], devices: int) -> None:
    target = find_target(name)
    assert (target.slices, target.shape, target.devices) == (slices, shape, devices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "known chips: v4:..., v5e:..., v5p:..., v6e:..., 7x:..., h100x..."),
        ("v5p", "expected a target such as v5p:2x2x4"),
        ("v5px4", "expected a shape, as in v5p:2x2x4"),
        ("h100:2x2", "expected a shape, as in h100x8"),
        ("v5p:0x1x1", "has no chips"),
        ("0xh100x8", "has no chips"),
        ("v5p:99999x1", "expected a target"),
        ("", "expected a target"),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(SettingError, match=message.replace(".", r"\.")):
        find_target(name)


@pytest.mark.parametrize(
    ("name", "versions", "message"),
    [
        ("v5e:2x2", {}, "libtpu, which is not installed; pip install 'jax-sdc"),
        ("h100x1", {}, "jax-cuda12-plugin, which is not installed; pip install 'jax-sdc"),
        ("v5e:2x2", {"libtpu": "0.0.1"}, r"libtpu 0\.0\.1 does not match jax"),
        ("h100x1", {"jax-cuda12-plugin": "0.4.1"}, r"0\.4\.1 does not match jax .* expects"),
    ],
)
def test_a_compiler_that_is_missing_or_of_another_version(
    name: str, versions: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(package: str) -> Any:
        if package in ("libtpu", "jax-cuda12-plugin"):
            if package not in versions:
                raise importlib.metadata.PackageNotFoundError(package)
            return versions[package]
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SettingError, match=message):
        check_compiler(find_target(name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2xh100x8", {"platform": "cuda", "target_config": H100, "topology": "2x1x8"}),
        ("v5p:2x2x4", {"platform": "tpu", "topology_name": "v5p:2x2x4", "chips_per_host_bounds": (2, 2, 1)}),
    ],
)
def test_the_description_for_the_compiler(name: str, expected: dict[str, Any]) -> None:
    found = _description(find_target(name))
    assert {key: found[key] for key in expected} == expected
