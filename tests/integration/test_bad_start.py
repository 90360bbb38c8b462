"""Whatever is wrong at the start is one sentence with the cause, and exit code 2 or 3. Never a traceback or a hang."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from server.config.model_source import DEMO_FOLDER
from tests.support.daemon import ROOT

NESTED = '{"a":' * 100_000 + "1" + "}" * 100_000


def start_fails(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run `quire serve` to its end; return its exit code and its last words, after checking their form."""
    result = subprocess.run(
        [sys.executable, "-m", "server", "serve", "--device", "cpu", "--port", "0", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=90,
    )
    output = result.stdout + result.stderr
    assert "Traceback" not in output
    assert not [name for name in ("RecursionError", "MemoryError", "recursion depth") if name in output], output
    errors = [line for line in output.splitlines() if "error: " in line]
    assert len(errors) == 1, output
    assert output.splitlines()[-1] == errors[0]
    assert errors[0].startswith("quire")
    assert errors[0].endswith((".", "…", "(see quire --help)", "(see quire serve --help)"))
    assert not errors[0].endswith("..")
    return result.returncode, errors[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the demo checkpoint to break."""
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


def edit_config(folder: Path, **change: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def corrupt_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')


def corrupt_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)


def fill_weights_with_noise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x93not safetensors at all" * 100)


def index_of_missing_shards(folder: Path) -> None:
    remove_weights(folder)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (remove_tokenizer, "tokenizer"),
        (corrupt_tokenizer, "tokenizer"),
        (corrupt_template, "template"),
        (remove_weights, "safetensors"),
        (pickle_weights, "save_pretrained"),
        (cut_weights, "safetensors"),
        (fill_weights_with_noise, "safetensors"),
        (index_of_missing_shards, "model-00001-of-00001.safetensors"),
        (lambda folder: edit_config(folder, architectures=["NoSuchForCausalLM"]), "quire models lists"),
        (lambda folder: edit_config(folder, num_hidden_layers=7, layer_types=None), "layers.6"),
        (lambda folder: edit_config(folder, num_hidden_layers=5, layer_types=None), "layers.5"),
        (lambda folder: edit_config(folder, hidden_size="big"), "hidden_size"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text(NESTED), "config.json"),
        (lambda folder: (folder / "tokenizer_config.json").write_text(NESTED), "tokenizer_config.json"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text(NESTED), "model.safetensors.index.json"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{" + "(" * 10_000 + ")" * 10_000 + "}}"), "chat"),
        (lambda folder: edit_config(folder, num_hidden_layers=10**9, layer_types=None), "num_hidden_layers"),
    ],
    ids=[
        "no-tokenizer",
        "bad-tokenizer",
        "bad-template",
        "no-weights",
        "pickled-weights",
        "cut-weights",
        "noise-weights",
        "missing-shard",
        "unknown-architecture",
        "missing-tensors",
        "unread-tensors",
        "bad-config-value",
        "bad-config-json",
        "nested-config",
        "nested-tokenizer-config",
        "nested-index",
        "nested-template",
        "billion-layers",
    ],
)
@pytest.mark.table(most=4)
def test_a_broken_model_folder_is_explained(folder: Path, break_it: Callable[[Path], None], words: str) -> None:
    break_it(folder)
    code, message = start_fails(str(folder), "--port", "0")
    assert code in (2, 3)
    assert words in message


def test_an_unknown_folder_is_wrong_usage() -> None:
    code, message = start_fails("/no/such/folder", "--port", "0")
    assert code == 2
    assert "/no/such/folder" in message


def test_a_hub_id_offline_is_a_failed_start(tmp_path: Path) -> None:
    code, message = start_fails(
        "no-such-owner/no-such-model", "--port", "0", env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    )
    assert code == 3
    assert "no-such-owner/no-such-model" in message


def test_a_port_in_use_is_a_failed_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, message = start_fails("--port", str(port))
    assert code == 3
    assert str(port) in message
    assert "--port" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-model-len", "8192"], "4096"),
        (["--kv-cache-memory", "1KB"], "--kv-cache-memory gives 1000 bytes: use a larger --kv-cache-memory"),
        (["--kv-cache-memory", "1MB", "--max-model-len", "4096"], "--max-model-len"),
        (["--device", "cuda"], "cuda"),
        (["--attention-backend", "nonsense"], "flash-attn"),
        (["--attention-backend", "triton"], "it needs a CUDA device"),
        (["--chat-template", "/no/such"], "--chat-template"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.table(most=2)
def test_a_value_that_does_not_fit_model_or_machine_is_explained(arguments: list[str], words: str) -> None:
    code, message = start_fails("--port", "0", *arguments)
    assert code in (2, 3)
    assert words in message
