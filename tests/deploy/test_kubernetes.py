"""The manifests, against the schemas of Kubernetes, JobSet and Kubeflow Trainer."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from averaging import PeerConfig
from averaging.elastic.options import read_options
from tests.support.pages import ROOT

pytestmark = pytest.mark.deploy

KUBERNETES = ROOT / "deploy" / "kubernetes"
AVERAGING = Path(sys.executable).with_name("averaging")
CREDENTIALS = "/etc/averaging/credentials/"

Manifest = dict[str, Any]


def manifests(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


SERVICE, STATEFUL_SET = manifests("peers.yaml")
[JOB_SET], [TRAIN_JOB] = manifests("jobset.yaml"), manifests("trainjob.yaml")
JOB = JOB_SET["spec"]["replicatedJobs"][0]["template"]["spec"]


def check(manifest: Manifest) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("manifest", [SERVICE, STATEFUL_SET], ids=["Service", "StatefulSet"])
def test_the_peers_are_valid(manifest: Manifest) -> None:
    check(manifest)


@pytest.mark.parametrize(
    ("model", "manifest"), [("JobsetV1alpha2JobSet", JOB_SET), ("TrainerV1alpha1TrainJob", TRAIN_JOB)]
)
def test_custom_resources_have_only_fields_that_their_models_know(model: str, manifest: Manifest) -> None:
    """The models are made from the definitions of the custom resources; a field that they do not know gets lost."""
    from kubeflow_trainer_api import models

    known = getattr(models, model)
    assert known.from_dict(manifest).to_dict() == manifest


def test_the_pods_of_the_job_set_are_valid() -> None:
    check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": JOB})


@pytest.fixture(scope="module")
def kustomized(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """What `kubectl apply --kustomize` sends, after the commands of the page."""
    here = tmp_path_factory.mktemp("kubernetes")
    shutil.copytree(KUBERNETES, here / "deploy" / "kubernetes", ignore=shutil.ignore_patterns("credentials"))
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    make = re.search(r"```sh\n( *cd deploy/kubernetes\n.*?) *```", page, re.DOTALL)
    assert make
    environment = os.environ | {"PATH": f"{AVERAGING.parent}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", "-euc", textwrap.dedent(make[1])], cwd=here, env=environment, check=True, capture_output=True
    )
    built = subprocess.run(
        ["kubectl", "kustomize", here / "deploy" / "kubernetes"], check=True, capture_output=True, text=True
    )
    return list(yaml.safe_load_all(built.stdout))


def test_kustomize_makes_valid_manifests(kustomized: list[Manifest]) -> None:
    assert [manifest["kind"] for manifest in kustomized] == ["ConfigMap", "Secret", "Service", "StatefulSet"]
    for manifest in kustomized:
        check(manifest)


def files_of(variables: list[Manifest], pod: str = "") -> set[str]:
    values = " ".join(variable.get("value", "") for variable in variables).replace("$(POD_NAME)", pod)
    return set(re.findall(rf"{CREDENTIALS}([\w.-]+)", values))


def test_the_secret_has_every_file_that_a_pod_names_and_no_key_of_the_authority(kustomized: list[Manifest]) -> None:
    _, secret, _, stateful_set = kustomized
    container = stateful_set["spec"]["template"]["spec"]["containers"][0]
    named = {"ca.pem", "token"}
    for n in range(stateful_set["spec"]["replicas"]):
        named |= files_of(container["env"], f"averaging-{n}")
    named |= files_of(JOB["template"]["spec"]["containers"][0]["env"]) | files_of(TRAIN_JOB["spec"]["trainer"]["env"])
    assert set(secret["data"]) == named


def test_a_peer_advertises_a_name_that_its_certificate_covers(kustomized: list[Manifest]) -> None:
    import base64

    from cryptography import x509

    from averaging.common import covers
    from averaging.security import hosts_of

    config, secret, service, stateful_set = kustomized
    spec = stateful_set["spec"]
    for n in range(spec["replicas"]):
        pod = f"averaging-{n}"
        variables = {
            v["name"]: v["value"].replace("$(POD_NAME)", pod)
            for v in spec["template"]["spec"]["containers"][0]["env"]
            if "value" in v
        }
        toml = ROOT / "deploy" / "kubernetes" / "peer.toml"
        options = PeerConfig.from_toml(toml, environ=variables)
        assert config["data"]["peer.toml"] == toml.read_text()
        assert options.advertise == f"{pod}.{spec['serviceName']}:4222"
        pem = base64.b64decode(secret["data"][f"{pod}.pem"])
        hosts = hosts_of(x509.load_pem_x509_certificate(pem))
        assert covers(hosts, f"{pod}.{spec['serviceName']}")
        assert covers(hosts, service["metadata"]["name"])


@pytest.mark.parametrize(
    "variables", [JOB["template"]["spec"]["containers"][0]["env"], TRAIN_JOB["spec"]["trainer"]["env"]]
)
def test_the_rendezvous_takes_the_options_of_a_job(variables: list[Manifest]) -> None:
    values = {variable["name"]: variable["value"] for variable in variables}
    assert values["PET_RDZV_BACKEND"] == "averaging"
    conf = dict(entry.split("=") for entry in values["PET_RDZV_CONF"].split(","))
    endpoint = values.get("PET_RDZV_ENDPOINT", "site-node-0-0.site:29500")
    assert read_options(endpoint, conf, 3).endpoints == (endpoint,)


def test_the_commands_of_a_pod_are_spelt_right() -> None:
    """`averaging leave` takes these options, and the probes are at a port that the options open."""
    container = STATEFUL_SET["spec"]["template"]["spec"]["containers"][0]
    [_, _, script] = container["lifecycle"]["preStop"]["exec"]["command"]
    shown = subprocess.run([AVERAGING, "leave", "--help"], check=True, capture_output=True, text=True).stdout
    assert script.startswith("exec averaging leave ")
    assert all(option in shown for option in re.findall(r"--[\w-]+", script))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    toml = (KUBERNETES / "peer.toml").read_text()
    assert f'metrics_listen = "0.0.0.0:{ports["metrics"]}"' in toml
    assert f'listen = "0.0.0.0:{ports["peers"]}"' in toml
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {"metrics"}
    assert [probe["path"] for probe in probes.values()] == ["/healthz", "/healthz", "/readyz"]
