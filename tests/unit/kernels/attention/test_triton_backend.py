"""TritonAttention names a reason for everything it does not serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention import triton_backend
from kernels.attention.base import AttentionSpec
from kernels.attention.triton_backend import TritonAttention

SPEC = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), block_size=16)


@pytest.mark.parametrize(("change", "word"), [
    ({"device": torch.device("cpu")}, "cpu"), ({"dtype": torch.float64}, "float64"), ({"head_dim": 584}, "584"),
    ({"value_head_dim": 640}, "640"),
    ({"block_size": 8}, "8"), ({"block_size": 48}, "48"), ({"num_heads": 17}, "17"), ({"num_heads": 512}, "64"),
])  # fmt: skip
def test_a_refusal_names_the_value(monkeypatch, change, word):
    monkeypatch.setattr(triton_backend, "HAS_TRITON", True)
    assert word in (TritonAttention.refuse(replace(SPEC, **change)) or "")


def test_the_usual_model_is_taken_where_triton_is_installed(monkeypatch):
    monkeypatch.setattr(triton_backend, "HAS_TRITON", True)
    assert TritonAttention.refuse(SPEC) is None
    assert TritonAttention.refuse(replace(SPEC, block_size=None)) is None


@pytest.mark.parametrize("change", [
    {"head_dim": 256}, {"head_dim": 512}, {"head_dim": 576, "value_head_dim": 512}, {"has_sinks": True},
    {"has_chunks": True}, {"frees_windows": True},
    {"head_dim": 576, "value_head_dim": 512, "num_kv_heads": 1, "num_heads": 128, "has_latents": True},
])  # fmt: skip
def test_layers_of_every_kind_are_taken(monkeypatch, change):
    monkeypatch.setattr(triton_backend, "HAS_TRITON", True)
    assert TritonAttention.refuse(replace(SPEC, **change)) is None


def test_everything_is_refused_without_triton(monkeypatch):
    monkeypatch.setattr(triton_backend, "HAS_TRITON", False)
    assert "triton" in (TritonAttention.refuse(SPEC) or "")
