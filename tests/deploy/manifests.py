"""What must hold of Quire's Kubernetes objects, whoever rendered them. Pure: needs PyYAML alone."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import yaml

from engine.interface.control import STALL_AFTER_S
from engine.interface.metrics import METRICS
from server.cli import _parser
from server.launcher import shutdown

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
USER_ID = 10001
ENGINE_FREE_PATHS = {"/health", "/ready"}  # answered without a key
# llm-d's engine "vllm", and what the HPA and KEDA ask for
READ_BY_THE_ENDPOINT_PICKER = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)

Manifest = dict[str, Any]


def load(text: str) -> list[Manifest]:
    """Every object of a YAML stream."""
    return [document for document in yaml.safe_load_all(text) if document]


def one(manifests: list[Manifest], kind: str, name: str = "quire") -> Manifest:
    """The object of this kind and name."""
    (found,) = [item for item in manifests if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def exported_names() -> set[str]:
    """Every metric name of the /metrics page, ours and the aliases."""
    page = (ROOT / "docs/reference/metrics.md").read_text()  # which a test compares with the real page
    names = {f"quire_{metric.name}" for metric in METRICS.values()} | {metric.alias for metric in METRICS.values()}
    return (names | set(re.findall(r"`((?:quire_|vllm:)[a-z_]+)", page))) - {""}


def check_server(deployment: Manifest) -> None:
    """Raise AssertionError if a Deployment of Quire breaks a rule of its own, of the daemon's or of hardening."""
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = check_arguments(container)
    _check_probes(deployment, container, stall_timeout_s=arguments["stall_timeout"])
    _check_end(pod, container, drain_s=arguments["drain_timeout"])
    _check_security(pod, container)
    _check_volumes(pod, container, arguments)
    num_engines = sum(arguments["disaggregate"] or (1,))
    _check_gpus(pod, container, num_gpus=num_engines * arguments["tensor_parallel_size"])
    if isinstance(size := arguments["kv_host_memory"], int):
        _check_memory(container, num_bytes=num_engines * size)


def check_arguments(container: Manifest) -> dict[str, Any]:
    """Parse the container's command as `quire` does; return the values. A flag that is not there raises."""
    program, *arguments = [*container["command"], *container["args"]]
    assert program == "quire"
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            values = vars(_parser().parse_args(arguments))
    except SystemExit:
        raise AssertionError(errors.getvalue()) from None
    (port,) = container["ports"]
    assert (values["host"], values["port"]) == ("0.0.0.0", port["containerPort"])
    assert (values["api_key_file"] is None) == values["allow_anonymous"], "the server refuses to start without keys"
    return values


def _check_probes(deployment: Manifest, container: Manifest, *, stall_timeout_s: float) -> None:
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(paths.values()) <= ENGINE_FREE_PATHS
    assert all(container[f"{kind}Probe"]["httpGet"]["port"] == "http" for kind in paths)
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] < deployment["spec"]["progressDeadlineSeconds"]
    liveness = container["livenessProbe"]
    patience_s = liveness["periodSeconds"] * liveness["failureThreshold"]
    assert 2 * STALL_AFTER_S < patience_s < stall_timeout_s, "longer than a slow step, before the daemon acts itself"


def _check_end(pod: Manifest, container: Manifest, *, drain_s: float) -> None:
    """The daemon must be able to end by itself: the kubelet kills once the grace period is over."""
    pre_stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    most_s = pre_stop_s + drain_s + shutdown._DRAIN_GRACE_S + shutdown._ENGINE_END_S
    assert pre_stop_s > 0
    assert most_s < pod["terminationGracePeriodSeconds"], f"may take {most_s:g} s to end"
    readiness = container["readinessProbe"]
    assert drain_s > readiness["periodSeconds"] * readiness["failureThreshold"]


def _check_security(pod: Manifest, container: Manifest) -> None:
    context = pod["securityContext"]
    assert (context["runAsUser"], context["fsGroup"], context["runAsNonRoot"]) == (USER_ID, USER_ID, True)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "a Service named quire would set QUIRE_… in the environment"
    resources = container["resources"]
    assert set(resources["requests"]) >= {"cpu", "memory"}
    assert "memory" in resources["limits"]
    assert "cpu" not in resources["limits"]


def _check_volumes(pod: Manifest, container: Manifest, arguments: dict[str, Any]) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert mounts["tmp"] == "/tmp"
    written = [item["value"] for item in container["env"] if item["name"] in ("HOME", "HF_HOME", "TRITON_CACHE_DIR")]
    assert len(written) == 3
    assert all(path.startswith(mounts["cache"]) for path in written), "the root file system is read-only"
    if (key_file := arguments["api_key_file"]) is not None:
        assert Path(key_file).parent == Path(mounts["api-keys"])
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "api-keys"]
        assert [item["path"] for item in volume["secret"]["items"]] == [Path(key_file).name]
        assert not any(item["name"] == "QUIRE_API_KEY" and "value" in item for item in container["env"])


def _check_gpus(pod: Manifest, container: Manifest, *, num_gpus: int) -> None:
    """A pod must have as many GPUs as share its model, and memory in which their processes meet."""
    limits = container["resources"]["limits"]
    if "nvidia.com/gpu" not in limits:
        return
    assert limits["nvidia.com/gpu"] == str(num_gpus), "--tensor-parallel-size or --disaggregate is another number"
    (name,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == name]
    assert volume["medium"] == "Memory"
    assert volume["sizeLimit"] == "1Gi", "without a limit: half of the node's memory"


def _check_memory(container: Manifest, *, num_bytes: int) -> None:
    """Host memory behind the KV caches is taken at the start: it must be there, and leave half as much for the rest."""
    for kind in ("requests", "limits"):
        memory = container["resources"][kind]["memory"]
        assert memory.endswith("Gi")
        assert int(memory.removesuffix("Gi")) * 2**30 >= num_bytes * 1.5, f"{kind}: --kv-host-memory leaves too little"
