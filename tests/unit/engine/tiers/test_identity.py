"""A cache's identity changes with each fact on which its blocks depend, and with nothing else, in every process."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from engine.core.request import Request
from engine.interface.config import CacheGroup
from engine.interface.protocol import SamplingParams
from engine.tiers.identity import (
    CacheIdentity,
    DigestMemory,
    adapter_digest,
    digest_of_dummy,
    stamps_of,
    weights_digest,
)

IDENTITY = CacheIdentity(
    weights=bytes(32),
    config_json=b"{}",
    model_impl="quire",
    quantization="none",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    is_long=False,
    block_size=16,
    groups=(CacheGroup("full", 16), CacheGroup("window", 32, 2, window=64)),
    page_layout="1024: 0 1",
    tensor_parallel_size=1,
    tensor_parallel_rank=0,
    is_expert_parallel=False,
    device="cuda",
    attention_backend="triton",
)
OTHERS = {
    "weights": bytes(31) + b"\1",
    "config_json": b'{"rope_theta": 1}',
    "model_impl": "transformers",
    "quantization": "fp8",
    "dtype": "float16",
    "kv_dtype": "float8_e4m3fn",
    "is_long": True,
    "block_size": 32,
    "groups": (CacheGroup("full", 16), CacheGroup("window", 32, 2, window=128)),
    "page_layout": "1024: 1 0",
    "tensor_parallel_size": 2,
    "tensor_parallel_rank": 1,
    "is_expert_parallel": True,
    "device": "cpu",
    "attention_backend": "torch",
}


def test_every_fact_has_another_value_here():
    assert list(OTHERS) == list(CacheIdentity.__struct_fields__)


@pytest.mark.parametrize("fact", OTHERS)
def test_a_fact_changes_the_digest(fact):
    other = msgspec.structs.replace(IDENTITY, **{fact: OTHERS[fact]})
    assert other.digest() != IDENTITY.digest()
    assert msgspec.structs.replace(other, **{fact: getattr(IDENTITY, fact)}).digest() == IDENTITY.digest()


@pytest.mark.parametrize("change", [{"pages_per_block": 3}, {"block_tokens": 64}, {"chunk": 64, "window": None}])
def test_a_fact_of_a_group_changes_the_digest(change):
    first, second = IDENTITY.groups
    other = msgspec.structs.replace(IDENTITY, groups=(first, msgspec.structs.replace(second, **change)))
    assert other.digest() != IDENTITY.digest()


def test_digests_and_chains_are_equal_in_every_process():
    code = """
from engine.core.request import Request
from engine.interface.protocol import SamplingParams
from tests.unit.engine.tiers.test_identity import IDENTITY, chain
print(IDENTITY.digest().hex(), chain().hex())
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert printed == {f"{IDENTITY.digest().hex()} {chain().hex()}"}


def chain(salt="salt", lora_index=1, digest=b"adapter"):
    """The last link of a prompt's chain of hashes."""
    request = Request(
        "r",
        list(range(64)),
        SamplingParams(max_tokens=1),
        cache_salt=salt,
        lora_index=lora_index,
        adapter_digest=digest,
    )
    request.extend_hashes(64, unit=16)
    return request.block_hashes[-1]


def test_the_root_of_a_chain_has_the_salt_and_the_adapter():
    different = [chain(), chain(salt=""), chain(digest=b"other"), chain(lora_index=0, digest=b""), chain(digest=b"")]
    assert len(set(different)) == len(different)
    assert chain(lora_index=2) == chain(), "adapters of equal content share prefixes, whatever their numbers"
    assert chain(lora_index=2, digest=b"") != chain(digest=b"")


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    paths = [folder / f"model-{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (100_000 * number + 50))
    return paths


def digest_of(files, memory_folder):
    return weights_digest(files, DigestMemory(memory_folder))


def test_any_changed_byte_of_the_weights_counts(files, tmp_path):
    before = digest_of(files, tmp_path)
    data = bytearray(files[2].read_bytes())
    data[150_000] ^= 1
    files[2].write_bytes(data)
    after = digest_of(files, tmp_path)
    assert after != before
    data[150_000] ^= 1
    files[2].write_bytes(data)
    assert digest_of(files, tmp_path) == before


def test_a_change_under_equal_size_and_time_counts(files, tmp_path):
    before, found = digest_of(files, tmp_path), files[2].stat()
    files[2].write_bytes(b"\7" * found.st_size)
    os.utime(files[2], ns=(found.st_atime_ns, found.st_mtime_ns))
    assert digest_of(files, tmp_path) != before


def test_names_and_bytes_count_and_the_folder_does_not(files, tmp_path):
    before = digest_of(files, tmp_path)
    moved = files[0].parent.rename(tmp_path / "elsewhere")
    again = [moved / path.name for path in files]
    assert digest_of(again, tmp_path) == before
    again[0].rename(moved / "other.safetensors")
    assert digest_of([moved / "other.safetensors", *again[1:]], tmp_path) != before


def test_weights_are_read_once(files, tmp_path, monkeypatch):
    before = digest_of(files, tmp_path)
    monkeypatch.setattr("engine.tiers.identity._read_digest", None)
    assert digest_of(files, tmp_path) == before
    assert (tmp_path / "digests.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"x": 1}', b"\xff\0", json.dumps({"a": [[1], "!!"]}).encode()])
def test_a_damaged_memory_costs_another_reading(files, tmp_path, data):
    before = digest_of(files, tmp_path)
    (tmp_path / "digests.json").write_bytes(data)
    assert digest_of(files, tmp_path) == before
    assert len(json.loads((tmp_path / "digests.json").read_bytes())) == 3


def test_a_memory_that_cannot_be_written_is_none(files, tmp_path):
    assert digest_of(files, tmp_path / "missing") == digest_of(files, tmp_path)


def test_weights_that_change_while_the_model_loads_are_noticed(files, tmp_path):
    before = stamps_of(files)
    assert stamps_of(files) == before
    files[1].write_bytes(files[1].read_bytes())
    os.utime(files[1])
    assert stamps_of(files) != before
    files[1].unlink()
    assert stamps_of(files).keys() == before.keys() - {str(files[1])}


def test_dummy_weights_have_a_seed_and_a_generator():
    digests = [(0, "torch 2.13.0"), (1, "torch 2.13.0"), (0, "torch 2.14.0")]
    assert len({digest_of_dummy(seed=seed, generator=generator) for seed, generator in digests}) == 3


def test_an_adapter_counts_by_its_content(tmp_path):
    def make(name, config=b"{}", weights=b"1234"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config").write_bytes(config)
        (folder / "weights").write_bytes(weights)
        return adapter_digest(folder / "config", folder / "weights")

    assert make("a") == make("b")
    assert len({make("c"), make("d", config=b"[]"), make("e", weights=b"1235")}) == 3
