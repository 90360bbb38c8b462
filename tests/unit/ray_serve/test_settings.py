"""What may be said to deploy.ray.app:build, and how it is refused."""

from pathlib import Path

import pytest
import yaml

from deploy.ray.settings import RayArguments, RaySettings, Reservation, read_arguments
from engine.interface.errors import StartupError
from server.hosted.daemon import parse_flags

ROOT = Path(__file__).parents[3]


def test_nothing_said_is_one_replica_of_the_demo_model_on_the_cpu() -> None:
    alone = Reservation(cpus=1, gpus=0, is_split=False)
    assert read_arguments({}) == RayArguments(RaySettings(), alone, ["--device=cpu"])


@pytest.mark.parametrize(
    ("arguments", "gpus", "flags"),
    [
        ({"gpus": 1}, 1, []),
        ({"gpus": 0.5, "device": "cuda"}, 0.5, ["--device=cuda"]),
        ({"device": "cuda"}, 1, ["--device=cuda"]),
        ({"gpus": None, "device": "cpu"}, 0, ["--device=cpu"]),
        ({"gpus": 0}, 0, ["--device=cpu"]),
    ],
)
def test_a_replica_computes_where_ray_has_reserved_something_for_it(
    arguments: dict[str, object], gpus: float, flags: list[str]
) -> None:
    found = read_arguments(arguments)
    assert found.reservation == Reservation(cpus=1, gpus=gpus, is_split=False)
    assert found.flags == flags


@pytest.mark.parametrize(
    ("arguments", "bundle", "flags"),
    [
        ({}, {"CPU": 4, "GPU": 4}, []),
        ({"gpus": "4"}, {"CPU": 4, "GPU": 4}, []),
        ({"device": "cuda", "cpus": 2}, {"CPU": 8, "GPU": 4}, ["--device=cuda"]),
        ({"device": "cpu", "cpus": 0.5}, {"CPU": 2}, ["--device=cpu"]),
        ({"gpus": 0}, {"CPU": 4}, ["--device=cpu"]),
    ],
)
def test_a_split_model_has_a_device_for_each_rank_in_one_bundle(
    arguments: dict[str, object], bundle: dict[str, float], flags: list[str]
) -> None:
    found = read_arguments({"tensor_parallel_size": "4", **arguments})
    assert found.reservation.is_split
    assert found.reservation.bundle() == bundle
    assert found.flags == ["--tensor-parallel-size=4", *flags]
    assert parse_flags(found.flags).tensor_parallel_size == 4


def test_prefill_and_decode_engines_have_a_device_each_in_one_bundle() -> None:
    found = read_arguments({"disaggregate": "1p2d", "device": "cuda"})
    assert found.reservation.is_split
    assert found.reservation.bundle() == {"CPU": 3, "GPU": 3}
    assert parse_flags(found.flags).disaggregate == (1, 2)
    with pytest.raises(ValueError, match=r"^gpus=2 and disaggregate=1p2d: "):
        read_arguments({"disaggregate": "1p2d", "gpus": 2})


def test_every_rank_of_every_engine_has_a_gpu() -> None:
    split = {"disaggregate": "1p1d", "tensor_parallel_size": 2}
    found = read_arguments(split | {"device": "cuda", "cpus": 3})
    assert found.reservation.bundle() == {"CPU": 12, "GPU": 4}
    with pytest.raises(ValueError, match=r"^gpus=2 and disaggregate=1p1d with tensor_parallel_size=2: .* 4 here"):
        read_arguments(split | {"gpus": 2})


@pytest.mark.parametrize(
    ("gpus", "size"), [(2, 1), ("2", None), (1, 2), (4, 2), (0.5, 2), (1.5, 1), (2.5, 2), ("inf", 1)]
)
def test_gpus_that_are_not_one_for_each_rank_are_refused_naming_both(gpus: object, size: int | None) -> None:
    with pytest.raises(ValueError, match=rf"^gpus={gpus} and tensor_parallel_size={size or 1}: ") as caught:
        read_arguments({"gpus": gpus, "tensor_parallel_size": size})
    assert "set both to the same number" in str(caught.value)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cuda"), (1, "cpu"), (0.5, "cpu")])
def test_gpus_that_the_device_does_not_use_or_needs_are_refused_naming_both(gpus: float, device: str) -> None:
    with pytest.raises(ValueError, match=f"^gpus={gpus} and device={device}: "):
        read_arguments({"gpus": gpus, "device": device})


def test_a_deployment_may_end_its_last_replica_only_if_it_may_start_one() -> None:
    assert read_arguments({"replicas": 0, "max_replicas": 2}).settings.replicas == 0
    with pytest.raises(ValueError, match="replicas=0 needs max_replicas"):
        read_arguments({"replicas": 0})


def test_text_of_a_command_line_and_values_of_yaml_mean_the_same() -> None:
    found = read_arguments(
        {"replicas": "2", "max-replicas": "5", "gpus": "0.5", "max_model_len": "512", "strict": "true", "model": "."}
    )
    assert found == read_arguments(
        {"replicas": 2, "max_replicas": 5, "gpus": 0.5, "max-model-len": 512, "strict": True, "model": "."}
    )
    settings = found.settings
    assert (settings.replicas, settings.max_replicas, settings.gpus) == (2, 5, 0.5)
    arguments = parse_flags(found.flags)
    assert (arguments.model, arguments.max_model_len, arguments.reject_unknown_fields) == (".", 512, True)


def test_false_and_null_leave_a_flag_out_and_a_list_repeats_it() -> None:
    flags = read_arguments({"strict": False, "debug": "false", "dtype": None, "served_model_name": ["a", "--b"]}).flags
    assert flags == ["--served-model-name=a", "--served-model-name=--b", "--device=cpu"]
    assert parse_flags(flags).served_model_name == ["a", "--b"]


def test_overlap_can_be_switched_off_and_the_old_names_work() -> None:
    assert parse_flags(read_arguments({"overlap": False}).flags).overlap is False
    assert parse_flags(read_arguments({"overlap": "true"}).flags).overlap is True
    found = parse_flags(read_arguments({"depth": 1, "max_waiting": 7, "strict": True}).flags)
    assert (found.overlap, found.max_queued_requests, found.reject_unknown_fields) == (False, 7, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replicas": "none"}, ["replicas='none'", "int"]),
        ({"replicas": -1}, ["replicas=-1", ">= 0"]),
        ({"max_replicas": 0, "replicas": 0}, ["max_replicas=0", ">= 1"]),
        ({"replicas": 3, "max_replicas": 2}, ["max_replicas=2", "replicas=3"]),
        ({"cpus": -1}, ["cpus=-1", "> 0"]),
        ({"gpus": -1}, ["gpus=-1", ">= 0"]),
        ({"gpus": "all"}, ["gpus='all'", "float"]),
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
    found = read_arguments(application["args"])
    assert found.settings.max_replicas == 4
    assert found.flags == ["--max-model-len=4096", "--device=cpu"]


def test_the_page_of_docs_has_every_key() -> None:
    page = (ROOT / "docs" / "how-to" / "ray.md").read_text()
    for name in RaySettings.__struct_fields__:
        assert f"`{name}`" in page
