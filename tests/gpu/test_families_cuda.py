"""Each model family on CUDA, graphs and Triton kernels included, gives the tokens of the torch path on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.reference import save_checkpoint
from tests.unit.engine.test_families import KINDS, PROMPTS, config_of

pytestmark = pytest.mark.gpu

NUM_TOKENS = 40


def wide_config(kind: str) -> transformers.PreTrainedConfig:
    """The tiny config of the unit tests, with heads of 64 as the kernels take them."""
    config = config_of(kind)
    config.hidden_size, config.head_dim, config.tie_word_embeddings = 256, 64, False
    if kind == "gemma4_shared":
        config.hidden_size = 320  # with 256, random weights write one token for ever
    if kind in ("phi3_long", "phimoe"):
        pairs = int(64 * config.rope_parameters.get("partial_rotary_factor", 1)) // 2
        config.rope_parameters |= {"short_factor": [1.0] * pairs, "long_factor": [1.0 + i for i in range(pairs)]}
        if kind == "phimoe":  # transformers keeps the short factors
            config.rope_parameters |= {"long_factor": [1.0] * pairs}
    # 8 heads of 64 are twice the hidden size; a config derives their size when it is made
    for name, size in (("mamba_d_head", 64), ("mamba_head_dim", 64), ("mamba_d_state", 32), ("ssm_state_size", 32)):
        if hasattr(config, name):
            setattr(config, name, size)
    if getattr(config, "mamba_d_ssm", None) is not None:
        config.mamba_d_ssm = 512
    return config


def _tokens(folder: Path, **settings: object) -> list[list[int]]:
    settings = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 4, "dtype": "float32"} | settings
    offline = OfflineEngine.load(EngineConfig(model=str(folder), **settings))
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)] * len(PROMPTS)
    return [generation.token_ids for generation in offline.generate(PROMPTS, params)]


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_gives_the_cpus_tokens(kind: str, tmp_path: Path) -> None:
    if kind.startswith("mistral4") and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("this transformers has no class for the text part alone")
    torch.backends.cuda.matmul.allow_tf32 = False
    save_checkpoint(tmp_path, wide_config(kind))
    expected = _tokens(tmp_path, device="cpu")
    assert all(len(set(token_ids)) > 3 for token_ids in expected)
    for enforce_eager in (False, True):
        pool = {"kv_cache_memory_bytes": 64 * 1024**2}
        assert _tokens(tmp_path, device="cuda", enforce_eager=enforce_eager, **pool) == expected
