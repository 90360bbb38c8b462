"""deploy/kubernetes without kubectl: every file is YAML, the base keeps the rules, and metrics have their names.

What the overlays render to is checked by tests/deploy/test_kubernetes.py.
"""

import re
from pathlib import Path

import pytest
import yaml

from server.http.routes.health import health_routes
from tests.deploy.manifests import (
    ENGINE_FREE_PATHS,
    KUBERNETES,
    READ_BY_THE_ENDPOINT_PICKER,
    check_server,
    exported_names,
    load,
    one,
)

FILES = sorted(KUBERNETES.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_each_file_is_yaml_without_duplicate_keys(path: Path) -> None:
    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{path}: {keys}"
            return super().construct_mapping(node, deep)

    assert list(yaml.load_all(path.read_text(), Loader))


def test_every_file_is_named_by_a_kustomization() -> None:
    for folder in {path.parent for path in FILES}:
        text = (folder / "kustomization.yaml").read_text()
        for path in folder.glob("*.yaml"):
            assert path.name == "kustomization.yaml" or path.name in text


def test_the_base_keeps_the_rules() -> None:
    deployment = one(load((KUBERNETES / "base/deployment.yaml").read_text()), "Deployment")
    check_server(deployment)


def test_probes_ask_routes_that_need_no_key() -> None:
    class Nobody:
        launcher = client = None

    paths = {route.path for route in health_routes(Nobody()) if route.is_public}
    assert paths >= ENGINE_FREE_PATHS


def test_every_metric_that_is_asked_for_is_exported() -> None:
    asked = set(READ_BY_THE_ENDPOINT_PICKER)
    for path in FILES:
        asked |= set(re.findall(r"\b(?:quire_num|vllm:)[a-z_]+", path.read_text()))
    assert {"quire_num_requests_waiting", "quire_num_requests_running"} < asked
    assert asked <= exported_names()
