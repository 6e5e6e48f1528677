"""Manifests against the published schemas, and the script of labels and taints with the real kubectl."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .api_server import Server, api_server
from .slurm import DEPLOY, ENVIRONMENT, FAULT, SDC, SMALL

pytestmark = pytest.mark.fleet
FOLDER = DEPLOY / "kubernetes"
FILLED = {"__NODE__": "gpu-17", "__IMAGE__": "jax-sdc:1", "__KUBECTL_IMAGE__": "kubectl:1", "__DEVICES__": "8"}


def manifests(name: str) -> list[dict[str, Any]]:
    text = (FOLDER / name).read_text()
    for word, value in FILLED.items():
        text = text.replace(word, value)
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("version", ["1.31", "1.34"])
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_manifests_are_of_the_published_schema(name: str, version: str) -> None:
    import kubernetes_validate

    found = manifests(name)
    assert found
    for manifest in found:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_field_is_refused() -> None:
    import kubernetes_validate

    (job,) = manifests("burnin-job.yaml")
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_scripts_pass_shellcheck() -> None:
    files = [str(path) for path in sorted(DEPLOY.glob("*/*")) if path.suffix in (".sh", ".sbatch")]
    done = subprocess.run(["shellcheck", "--external-sources", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def server() -> Iterator[Server]:
    with api_server() as server:
        yield server


def tell(server: Server, folder: Path, what: str, **more: str) -> int:
    """Exit code of the script for a file in a folder, or `begin`."""
    port = server.server_address[1]
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "current-context": "c",
        "users": [{"name": "u", "user": {}}],
    }  # fmt: skip
    (folder / "kubeconfig").write_text(json.dumps(config))
    environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder), "NODE_NAME": "gpu-17"}
    words = ["sh", str(FOLDER / "node-verdict.sh"), what]
    done = subprocess.run(words, env={**environment, **more}, capture_output=True, text=True, check=False)
    assert done.returncode != 4, done.stderr
    return done.returncode


def pod(folder: Path, *flags: str) -> str:
    """The file that a burn-in of a pod leaves."""
    file = folder / "verdict"
    environment = {**os.environ, "SDC": str(SDC), "SDC_STATE": str(folder / "state"), **ENVIRONMENT}
    words = ["bash", str(FOLDER / "burnin.sh"), str(file), *SMALL.split(), *flags]
    subprocess.run(words, env=environment, check=True, capture_output=True)
    return str(file)


def test_a_failing_burn_in_taints_the_node(server: Server, tmp_path: Path) -> None:
    assert tell(server, tmp_path, "begin") == 0
    labels, notes = server.node["metadata"]["labels"], server.node["metadata"]["annotations"]
    assert labels["sdc.verdict"] == "INCONCLUSIVE"
    assert tell(server, tmp_path, pod(tmp_path, *FAULT.split())) == 1
    assert labels == {"sdc.verdict": "FAIL", "sdc.simulated": "true"}
    assert notes["sdc.reason"].startswith("SIMULATION")
    assert notes["sdc.ended"].startswith("20")
    taint = {"key": "sdc.verdict", "value": "FAIL", "effect": "NoSchedule"}
    assert server.node["spec"]["taints"] == [taint]
    assert tell(server, tmp_path, pod(tmp_path)) == 0
    assert labels == {"sdc.verdict": "PASS", "sdc.simulated": "false"}
    assert server.node["spec"]["taints"] == [taint]  # one PASS does not clear a node
    assert tell(server, tmp_path, str(tmp_path / "verdict"), SDC_UNTAINT="yes") == 0
    assert not server.node["spec"].get("taints")
    assert set(server.asked) == {"PATCH /api/v1/nodes/gpu-17"}  # what rbac.yaml allows


def test_what_is_no_verdict_is_inconclusive(server: Server, tmp_path: Path) -> None:
    server.node["metadata"]["labels"]["sdc.verdict"] = "PASS"
    assert tell(server, tmp_path, str(tmp_path / "nowhere")) == 2
    assert server.node["metadata"]["labels"]["sdc.verdict"] == "INCONCLUSIVE"
    assert tell(server, tmp_path, pod(tmp_path, "--devices", "banana")) == 2
    assert "taints" not in server.node["spec"]
