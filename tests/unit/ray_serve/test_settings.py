"""What may be said to deploy.ray.app:build, and how it is refused."""

from pathlib import Path

import pytest
import yaml

from deploy.ray.settings import RaySettings, read_arguments
from engine.errors import StartupError
from server.hosted_daemon import parse_flags

ROOT = Path(__file__).parents[3]


def test_nothing_said_is_one_replica_of_the_demo_model_on_the_cpu() -> None:
    assert read_arguments({}) == (RaySettings(), ["--device=cpu"])


def test_a_replica_computes_where_ray_has_reserved_something_for_it() -> None:
    assert read_arguments({"gpus": 1})[1] == []
    assert read_arguments({"gpus": 0.5, "device": "cuda"})[1] == ["--device=cuda"]
    with pytest.raises(ValueError, match="device=cuda needs gpus=1"):
        read_arguments({"device": "cuda"})


def test_text_of_a_command_line_and_values_of_yaml_mean_the_same() -> None:
    settings, flags = read_arguments(
        {"replicas": "2", "max-replicas": "5", "gpus": "0.5", "max_model_len": "512", "strict": "true", "model": "."}
    )
    assert (settings, flags) == read_arguments(
        {"replicas": 2, "max_replicas": 5, "gpus": 0.5, "max-model-len": 512, "strict": True, "model": "."}
    )
    assert (settings.replicas, settings.max_replicas, settings.gpus) == (2, 5, 0.5)
    arguments = parse_flags(flags)
    assert (arguments.model, arguments.max_model_len, arguments.strict) == (".", 512, True)


def test_false_and_null_leave_a_flag_out_and_a_list_repeats_it() -> None:
    _, flags = read_arguments({"strict": False, "debug": "false", "dtype": None, "served_model_name": ["a", "--b"]})
    assert flags == ["--served-model-name=a", "--served-model-name=--b", "--device=cpu"]
    assert parse_flags(flags).served_model_name == ["a", "--b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replicas": "none"}, ["replicas='none'", "int"]),
        ({"replicas": 0}, ["replicas=0", ">= 1"]),
        ({"replicas": 3, "max_replicas": 2}, ["max_replicas=2", "replicas=3"]),
        ({"cpus": -1}, ["cpus=-1", "> 0"]),
        ({"gpus": "2"}, ["gpus=2", "one GPU"]),
        ({"gpus": 1.5}, ["gpus=1.5", "<= 1"]),
        ({"drain_timeout": "soon"}, ["drain_timeout='soon'"]),
    ],
)
def test_wrong_values_name_the_key_and_the_limit(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]) as caught:
        read_arguments(arguments)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"port": 8000}, "--port=8000"),
        ({"replica": 3}, "--replica=3"),
        ({"max_model_len": "long"}, "--max-model-len"),
        ({"strict": "maybe"}, "--strict"),
    ],
)
def test_what_quire_serve_does_not_know_or_ray_decides_is_refused(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(StartupError) as caught:
        read_arguments(arguments)
    assert word in caught.value.message
    assert caught.value.exit_code == 2


def test_the_shipped_yaml_is_accepted() -> None:
    (application,) = yaml.safe_load((ROOT / "deploy" / "ray" / "quire.yaml").read_text())["applications"]
    assert application["import_path"] == "deploy.ray.app:build"
    settings, flags = read_arguments(application["args"])
    assert settings.max_replicas == 4
    assert flags == ["--max-model-len=4096", "--device=cpu"]


def test_the_page_of_docs_has_every_key() -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    for name in RaySettings.__struct_fields__:
        assert f"`{name}`" in page
