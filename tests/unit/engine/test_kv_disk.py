"""A disk behind host memory of a real model: the first turn after kill -9 finds its blocks, and only its own."""

import json
import random
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from engine.interface.config import EngineConfig, LoraSource
from engine.interface.errors import StartupError
from engine.offline import OfflineEngine
from engine.startup import load
from engine.startup.kv_disk import check_kv_disk
from engine.tiers.block_folder import FOLDER_NAME
from tests.support.lora_adapters import adapter_config, make_tensors, save_adapter
from tests.support.tiny_llama import save_tiny_llama

MIB = 2**20
PROMPTS = [[(7 * turn + 3 * place) % 60 for place in range(70)] for turn in range(3)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def config_of(model, disk, **changes):
    settings = {
        "model": str(model),
        "device": "cpu",
        "block_size": 4,
        "max_model_len": 160,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 48,
        "kv_cache_memory_bytes": 2 * MIB,
        "kv_host_memory_bytes": 4 * MIB,
        "kv_disk": str(disk),
        "kv_disk_bytes": 64 * MIB,
    }
    return EngineConfig(**(settings | changes))


def serve(config, prompts, *, settles=True, kill_after_s=0.0):
    """Start an engine, take its answers, and kill it; return tokens, cached tokens and blocks read of each answer."""
    mode = "settle" if settles else "go on"
    command = [sys.executable, "-m", "tests.unit.engine.kv_disk_process", msgspec.json.encode(config).decode()]
    with subprocess.Popen([*command, json.dumps(prompts), mode], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in prompts]
        time.sleep(kill_after_s)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_the_first_turns_after_a_kill_are_found_and_answered_alike(llama, tmp_path):
    config = config_of(llama, tmp_path)
    first = serve(config, PROMPTS)
    assert [num_read for _, _, num_read in first] == [0, 0, 0]
    again = serve(config, PROMPTS)
    assert [tokens for tokens, _, _ in again] == [tokens for tokens, _, _ in first]
    assert [num_cached for _, num_cached, _ in again] == [68, 68, 68]
    assert again[-1][2] == 3 * 17


def files_of(disk):
    """The files of blocks in the order of their writing: of each block first that of the first rank."""
    return sorted((disk / FOLDER_NAME).glob("*.kv"), key=lambda file: file.stat().st_mtime_ns)


@pytest.mark.slow
@pytest.mark.full
def test_two_ranks_keep_their_shares_and_a_block_is_there_if_both_are(llama, tmp_path):
    config = config_of(llama, tmp_path, tensor_parallel_size=2)
    first = serve(config, PROMPTS)
    assert [num_read for _, _, num_read in first] == [0, 0, 0]
    files = files_of(tmp_path)
    assert len(files) >= 2 * 3 * 17
    damaged = files[1]  # of the second rank: the first block of the first prompt
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    again = serve(config, PROMPTS)
    assert [tokens for tokens, _, _ in again] == [tokens for tokens, _, _ in first]
    assert [num_cached for _, num_cached, _ in again] == [0, 68, 68]
    assert damaged.read_bytes() != content, "it was written again"


@pytest.mark.full
def test_a_share_that_is_lost_is_written_again_and_another_layout_has_other_blocks(llama, tmp_path):
    config = config_of(llama, tmp_path, tensor_parallel_size=2)
    first = serve(config, PROMPTS)
    ((_, num_cached, _),) = serve(config_of(llama, tmp_path), PROMPTS[:1])
    assert num_cached == 0, "blocks of another layout"
    files_of(tmp_path)[2 * 20 + 1].unlink()  # of the second rank, within the second prompt
    for expected in ([68, 0, 68], [68, 68, 68]):
        answers = serve(config, PROMPTS)
        assert [tokens for tokens, _, _ in answers] == [tokens for tokens, _, _ in first]
        found = [num_cached for _, num_cached, _ in answers]
        assert found[::2] == expected[::2]
        assert (found[1] == 68) == (expected[1] == 68)


@pytest.mark.full
def test_two_ranks_that_are_killed_under_load_leave_right_blocks(llama, tmp_path):
    config = config_of(llama, tmp_path, tensor_parallel_size=2, kv_disk_bytes=4 * MIB)
    expected = serve(config_of(llama, tmp_path / "other", tensor_parallel_size=2), PROMPTS)
    draw, num_found = random.Random(1), 0
    for _ in range(5):
        answers = serve(config, PROMPTS, settles=False, kill_after_s=draw.uniform(0, 0.5))
        assert [tokens for tokens, _, _ in answers] == [tokens for tokens, _, _ in expected]
        num_found += answers[-1][2]
    assert num_found > 0


@pytest.mark.full
def test_engines_that_are_killed_under_load_leave_right_blocks(llama, tmp_path):
    config = config_of(llama, tmp_path, kv_disk_bytes=4 * MIB)
    expected = serve(config_of(llama, tmp_path / "other"), PROMPTS)
    draw, num_found = random.Random(1), 0
    for _ in range(8):
        answers = serve(config, PROMPTS, settles=False, kill_after_s=draw.uniform(0, 0.5))
        assert [tokens for tokens, _, _ in answers] == [tokens for tokens, _, _ in expected]
        num_found += answers[-1][2]
    assert num_found > 0
    assert {file.suffix for file in (tmp_path / FOLDER_NAME).iterdir()} <= {"", ".kv", ".tmp", ".json"}


@pytest.mark.full
def test_blocks_of_another_model_are_not_found(llama, tmp_path, tmp_path_factory):
    serve(config_of(llama, tmp_path), PROMPTS[:1])
    other = save_tiny_llama(tmp_path_factory.mktemp("other"))
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    ((_, num_cached, num_read),) = serve(config_of(other, tmp_path), PROMPTS[:1])
    assert (num_cached, num_read) == (0, 0)
    ((_, num_cached, _),) = serve(config_of(llama, tmp_path), PROMPTS[:1])
    assert num_cached == 68


@pytest.mark.full
def test_blocks_of_another_kv_dtype_are_not_found(llama, tmp_path):
    int8 = config_of(llama, tmp_path, kv_cache_dtype="int8")
    (first,) = serve(int8, PROMPTS[:1])
    ((_, num_cached, num_read),) = serve(config_of(llama, tmp_path), PROMPTS[:1])
    assert (num_cached, num_read) == (0, 0)
    ((tokens, num_cached, _),) = serve(int8, PROMPTS[:1])
    assert (tokens, num_cached) == (first[0], 68)


def replaced(path):
    """Write a file anew, as one that another program puts in its place."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


CHANGES = {
    "config.json": lambda model, adapter: replaced(model / "config.json"),
    "model.safetensors": lambda model, adapter: replaced(model / "model.safetensors"),
    "model.safetensors.index.json": lambda model, adapter: (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "config.json"}})
    ),
    "adapter_config.json": lambda model, adapter: replaced(adapter / "adapter_config.json"),
    "adapter_model.safetensors": lambda model, adapter: replaced(adapter / "adapter_model.safetensors"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_files_that_are_replaced_while_the_model_loads_are_noticed(tmp_path, monkeypatch, name):
    model, adapter = save_tiny_llama(tmp_path / "model"), tmp_path / "adapter"
    weights = make_tensors(model, {f"model.layers.{layer}.self_attn.q_proj": 2 for layer in range(2)})
    save_adapter(adapter, weights, adapter_config(r=2, target_modules=["q_proj"]))
    load_weights = load._load_weights

    def load_and_change(*args):
        loaded = load_weights(*args)
        CHANGES[name](model, adapter)
        return loaded

    monkeypatch.setattr(load, "_load_weights", load_and_change)
    with pytest.raises(
        StartupError, match=r"/(config|model|adapter).* changed while the model was loaded: start again"
    ):
        OfflineEngine.load(config_of(model, tmp_path / "disk", loras=[LoraSource("one", str(adapter))]))


BAD = [
    ({"kv_disk": None}, r"--kv-disk-size .* there is no --kv-disk"),
    ({"kv_host_memory_bytes": None}, r"--kv-disk .* --kv-host-memory is off"),
    ({"kv_disk_bytes": 2**50}, r"--kv-disk-size 1048576\.0 GiB is larger than the disk"),
    ({"kv_disk_bytes": 5000}, r"--kv-disk-size 4.9 KiB is less than one block .* use at least 8 KiB"),
    ({"kv_disk_bytes": 12288, "tensor_parallel_size": 2}, r"--kv-disk-size 12 KiB is less .* at least 16 KiB"),
    ({"kv_disk": "/dev/null"}, r"--kv-disk /dev/null: the folder cannot be written: File exists"),
    ({"kv_disk": "/proc/quire"}, r"--kv-disk /proc/quire: the folder cannot be written"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD)
def test_a_disk_that_cannot_serve_is_refused(llama, tmp_path, changes, sentence):
    with pytest.raises(StartupError, match=sentence):
        check_kv_disk(config_of(llama, tmp_path, **changes), block_bytes=5000)


def test_without_a_disk_nothing_is_checked(llama, tmp_path):
    config = config_of(llama, tmp_path, kv_disk=None, kv_disk_bytes=None, kv_host_memory_bytes=None)
    check_kv_disk(config, block_bytes=5000)
