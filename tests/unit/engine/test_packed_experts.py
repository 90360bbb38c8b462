"""Packed experts through the whole engine: the text of the dequantised checkpoint, cut, cached and preempted."""

from functools import partial
from pathlib import Path

import pytest
import torch

from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from models.config.model_config import ModelConfig
from tests.support.float_experts import SCHEMES, save_float_experts
from tests.support.int_experts import FORMATS, save_int_experts
from tests.support.packed_experts import save_fp8_blocks, save_mxfp4

PREFIX = [3, 90, 17, 4, 55, 8, 8, 61, 96, 0, 42, 7, 19]
PROMPTS = [[*PREFIX, 10 + i, 3 * i] for i in range(16)]
PARAMS = [SamplingParams(max_tokens=24, temperature=0.0)]


def save_awq(dense, packed):
    save_int_experts(dense, packed, FORMATS["awq"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "save", [save_mxfp4, save_fp8_blocks, save_awq, *(partial(save_float_experts, scheme=name) for name in SCHEMES)]
)
@pytest.mark.table(most=3)  # tests/unit/models/quantization compares the logits of all of them
def test_16_requests_that_share_a_prefix_and_are_preempted_have_the_text_of_the_dequantised_model(save, tmp_path: Path):
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    save(dense, packed)
    alone = OfflineEngine.load(EngineConfig(model=str(dense), device="cpu", max_model_len=60))
    expected = [alone.generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 3
    scarce = 160 * ModelConfig.from_folder(packed).kv_bytes_per_token(1, torch.float32)
    settings = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 16, "max_model_len": 60}
    offline = OfflineEngine.load(
        EngineConfig(model=str(packed), device="cpu", kv_cache_memory_bytes=scarce, **settings)
    )  # fmt: skip
    assert offline.generate(PROMPTS[:1], PARAMS)[0].token_ids == expected[0]
    together = offline.generate(PROMPTS, PARAMS * 16)
    assert [generation.token_ids for generation in together] == expected
    assert max(generation.num_cached_tokens for generation in together) > 0
    assert offline.engine.scheduler.num_preemptions > 0
