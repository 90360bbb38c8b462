"""A hub id is checked before its weights are fetched; a cut download goes on. Against a small hub of the test."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from engine.interface.errors import StartupError
from server.cli import serve_parser
from server.commands.doctor.checks import check_files, find_model
from server.config import hub_download
from server.config.fit_check import check_fits
from server.config.model_source import DEMO_FOLDER, resolve_model
from tests.support.fake_hub import FakeHub, fake_hub

DEMO = {path.name: path.read_bytes() for path in DEMO_FOLDER.iterdir() if path.is_file()}
FOREIGN = {**DEMO, "config.json": json.dumps({"architectures": ["NobodysForCausalLM"], "model_type": "no"}).encode()}
LARGE = json.loads(DEMO["config.json"]) | {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 96}
LARGE["layer_types"] = ["full_attention"] * 96
REPOSITORIES = {
    "owner/demo": DEMO,
    "owner/foreign": FOREIGN,
    "owner/large": {**DEMO, "config.json": json.dumps(LARGE).encode()},
    "owner/gguf": {"README.md": b"", "model-Q4_K_M.gguf": b"GGUF", "config.json": b"{}"},
    "owner/mute": {name: data for name, data in DEMO.items() if name != "tokenizer.json"}
    | {"tiktoken.model": b"IQ== 0"},
    "owner/torn": {**DEMO, "tokenizer.json": b"{"},
    "owner/empty": {"README.md": b"", "config.json": b"{}"},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(REPOSITORIES) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield running


def check(*flags: str) -> Any:
    arguments = serve_parser({}).parse_args(["x/y", "--device", "cpu", *flags])
    return lambda folder: check_fits(arguments, folder)


def refusal(hub: FakeHub, name: str, **options: Any) -> str:
    """Return the sentence, after a look that no weights were sent."""
    with pytest.raises(StartupError) as caught:
        resolve_model(name, **options)
    assert "model.safetensors" not in hub.sent
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_model_is_fetched_after_the_check_of_its_configuration(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def look(folder: Path) -> None:
        assert (folder / "config.json").is_file()
        assert not (folder / "model.safetensors").exists()
        order.append("checked")

    found = resolve_model("owner/demo", check=look)
    assert (found.folder / "model.safetensors").read_bytes() == DEMO["model.safetensors"]
    assert order == ["checked"]
    assert "training.json" in hub.sent
    assert "Downloading owner/demo: 16 MiB of weights" in capsys.readouterr().err
    hub.sent.clear()
    assert resolve_model("owner/demo", check=look).folder == found.folder  # nothing is missing: no check, no bytes
    assert (order, hub.sent) == (["checked"], {})


def test_an_unsupported_architecture_costs_no_weights(hub: FakeHub) -> None:
    message = refusal(hub, "owner/foreign", check=check("--model-impl", "quire"))
    assert message.startswith("owner/foreign was not downloaded")
    assert "NobodysForCausalLM" in message


def test_a_model_that_does_not_fit_the_memory_costs_no_weights(hub: FakeHub) -> None:
    message = refusal(hub, "owner/large", check=check())
    assert message.startswith("owner/large was not downloaded: this machine has ")
    assert "for its weights" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/mute", "tokenizer.json (or tokenizer.model) is missing, and its tiktoken.model is for the model's own"),
        ("owner/torn", "owner/torn was not downloaded: the tokenizer in "),
    ],
)
def test_a_tokenizer_that_cannot_be_read_costs_no_weights(hub: FakeHub, name: str, said: str) -> None:
    assert said in refusal(hub, name, check=check())


def test_the_doctor_refuses_a_repository_without_a_tokenizer(hub: FakeHub, tmp_path: Path) -> None:
    found = find_model("owner/mute", revision=None, scratch=tmp_path / "scratch")
    with pytest.raises(StartupError, match="No tokenizer in owner/mute: "):
        check_files(found)
    assert check_files(find_model("owner/demo", revision=None, scratch=tmp_path / "scratch"))
    assert hub.sent.keys() == {"config.json"}


def test_too_little_disk_is_said_with_both_sizes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=260 * 1024**2)
    monkeypatch.setattr(hub_download.shutil, "disk_usage", lambda folder: usage)
    message = refusal(hub, "owner/demo", check=None)
    assert "its weights take 16 MiB" in message
    assert "260 MiB free" in message


@pytest.mark.parametrize(("name", "words"), [("owner/gguf", "only *.gguf"), ("owner/empty", "no weights")])
def test_a_repository_without_weights_that_are_read_is_refused(hub: FakeHub, name: str, words: str) -> None:
    assert words in refusal(hub, name)
    assert hub.sent == {}


def test_a_repository_that_is_not_there_is_said_as_before(hub: FakeHub) -> None:
    assert "neither a local folder nor a repository" in refusal(hub, "owner/nothing")


def test_random_weights_need_no_download_of_any(hub: FakeHub) -> None:
    folder = resolve_model("owner/demo", load_format="dummy").folder
    assert (folder / "tokenizer.json").is_file()
    assert "model.safetensors" not in hub.sent


def test_a_cut_download_goes_on_where_it_ended(hub: FakeHub) -> None:
    hub.cut["model.safetensors"] = 12_000_000
    folder = resolve_model("owner/demo").folder
    assert (folder / "model.safetensors").read_bytes() == DEMO["model.safetensors"]
    assert hub.ranges == [f"model.safetensors from {10 * 1024**2}"]  # whole chunks are kept


def test_without_a_connection_the_cache_serves(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve_model("owner/demo").folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("owner/demo").folder == found
