"""Two ranks with whole experts: the tokens of one rank, the panel's row, and refusals before any rank starts."""

from pathlib import Path

import msgspec
import pytest

from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.errors import StartupError
from engine.interface.fit_report import Ask
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.fit import examine
from tests.support.checkpoints import make_config
from tests.support.packed_experts import save_mxfp4
from tests.support.reference import save_checkpoint
from tests.unit.engine.test_real_model import prompts, tokens

LENGTHS = (5, 17, 30, 12, 40, 23)


def config_of(folder: Path, **changes: object) -> EngineConfig:
    """Small steps and blocks, so that prompts come in parts."""
    return EngineConfig(
        model=str(folder), device="cpu", block_size=4, max_num_batched_tokens=24, max_num_seqs=8, max_model_len=60,
        **changes,
    )  # fmt: skip


def save(folder: Path, kind: str) -> Path:
    config = make_config(kind)
    save_checkpoint(folder, config)
    return folder


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Of MXFP4 experts, with drafts."""
    folder = tmp_path / "packed"
    save_mxfp4(tmp_path / "dense", folder)
    config = config_of(folder, speculative=SpeculativeConfig(ngram_min=1))
    inputs = [[token % 97 for token in prompt] for prompt in prompts(*LENGTHS)]
    params = [SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), seed=i) for i in range(len(inputs))]
    expected = tokens(OfflineEngine.load(config).generate(inputs, params))
    offline = OfflineEngine.load(msgspec.structs.replace(config, tensor_parallel_size=2, is_expert_parallel=True))
    try:
        assert offline.loaded.facts["Experts"] == "4 whole ones of 8 on each of 2"
        for _ in range(2):
            assert tokens(offline.generate(inputs, params)) == expected
    finally:
        offline.loaded.close()


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("qwen3_moe", 1, "--expert-parallel .*--tensor-parallel-size is 1: it must be at least 2"),
        ("qwen3", 2, "--expert-parallel: Qwen3ForCausalLM has no experts"),
        (
            "mixtral",
            8,
            "--expert-parallel: MixtralForCausalLM has 4 experts.* --tensor-parallel-size 8 must be at most",
        ),
    ],
)
def test_what_has_no_experts_for_each_rank_is_refused_before_any_starts(
    kind: str, size: int, words: str, tmp_path: Path
) -> None:
    config = config_of(save(tmp_path, kind), tensor_parallel_size=size, is_expert_parallel=True)
    with pytest.raises(StartupError, match=words):
        OfflineEngine.load(config)


def test_the_doctor_plans_with_the_bytes_of_the_largest_share(tmp_path: Path) -> None:
    save(tmp_path, "mixtral_windows")  # 5 experts
    ask = Ask(folder=str(tmp_path), gpu_memory=1 << 34, num_gpus=2, dtype="float32")
    whole, cut, parallel = (
        examine(each).model
        for each in (
            msgspec.structs.replace(ask, num_gpus=1),
            ask,
            msgspec.structs.replace(ask, is_expert_parallel=True),
        )
    )
    assert whole is not None
    assert cut is not None
    assert parallel is not None
    assert parallel.problem is None
    config = make_config("mixtral_windows")
    expert = config.num_hidden_layers * 3 * config.hidden_size * config.intermediate_size * 4
    assert whole.weights is not None
    assert cut.weights is not None
    # three of five experts instead of half of each
    assert parallel.weights == cut.weights + expert // 2
    assert parallel.kv_bytes_per_token == cut.kv_bytes_per_token
    refused = examine(msgspec.structs.replace(ask, num_gpus=8, is_expert_parallel=True)).model
    assert refused is not None
    assert refused.problem is not None
    assert "5 experts" in refused.problem
