"""A model split over several processes (gloo) gives the logits of the whole one, on every rank."""

import copy

import pytest
import torch
from torch import distributed
from transformers import LlamaConfig, Olmo2Config, Qwen3Config

from kernels.elementwise.reference import add_rms_norm
from models.config.model_config import ModelConfig
from models.layers.causal_lm import load_vocab_rows
from models.parallel import PartialSum, TensorParallel, whole
from models.weights.weights import Weights
from tests.support.checkpoints import TINY, make_config
from tests.support.hybrid_checkpoints import make_hybrids
from tests.support.int_checkpoints import FORMATS, save_quantized, with_groups_of
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.rank_group import run_ranks
from tests.support.reference import save_checkpoint
from tests.support.tensor_parallel_rank import PROMPT, pool_dtype, run_rank


def _with_eight_heads(config):
    """Give each of eight ranks a query head of its own, and a head of each recurrence."""
    config = copy.deepcopy(config)
    config.num_attention_heads = 8
    if config.model_type == "phimoe":  # its rotary factors are for heads of this size
        config.head_dim = 8
    if "linear_num_key_heads" in vars(config):
        config.linear_num_key_heads = config.linear_num_value_heads = 8
    return config


def _with_more_heads(config):
    """Give each of four ranks key heads of its own."""
    config.linear_num_key_heads, config.linear_num_value_heads = 4, 8
    return config


# With FOUR_RANKS every family of docs/reference/models.md is in both tables: tests/test_models_page.py
# Every vocabulary here is odd, so the last rank's rows are padded
TWO_RANKS = {
    "llama": make_config("llama3.1"),
    "biases": make_config("llama_all_biases"),
    **{kind: make_config(kind) for kind in ("mistral", "qwen2", "granite_moe")},
    "replicated_kv_head": LlamaConfig(**TINY, num_key_value_heads=1),
    "fp8_pool": LlamaConfig(**TINY, num_key_value_heads=2),
    "fp8_pool_replicated": LlamaConfig(**TINY, num_key_value_heads=1),
    "qwen3_tied": make_config("qwen3"),
    "qwen3_replicated": Qwen3Config(**TINY, num_key_value_heads=1, head_dim=24),
    **{kind: make_config(kind) for kind in ("ministral3", "smollm3", "phi3", "phi3_long")},
    **{kind: make_config(kind) for kind in ("granite_biases", "olmo2")},
    **{kind: make_config(kind) for kind in ("seed_oss_biases", "arcee_biases", "apertus", "ernie4_5_biases")},
    **{kind: make_config(kind) for kind in ("glm4", "hunyuan", "olmo3", "exaone4", "cohere2_biases", "ministral")},
    **{kind: make_config(kind) for kind in ("granite_moe_shared", "phimoe", "ernie4_5_moe", "hunyuan_moe")},
    **{kind: make_config(kind) for kind in ("mellum", "glm4_moe", "glm4_moe_groups", "llama4")},
    "olmo2_replicated": Olmo2Config(**TINY, num_key_value_heads=1, pad_token_id=None),
    **{kind: make_config(kind) for kind in ("gemma", "gemma2", "gemma3")},
    **{kind: make_config(kind) for kind in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")},
    **{kind: make_config(kind) for kind in ("gemma4", "gemma4_shared", "gemma4_experts", "gemma4_unified")},
    **{kind: make_config(kind) for kind in ("qwen3_next", "qwen3_next_dense", "qwen3_5", "qwen3_5_moe")},
    **{kind: make_config(kind) for kind in ("olmo_hybrid", "olmo_hybrid_rope")},
    **{kind: make_config(kind) for kind in ("deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
    **{kind: make_config(kind) for kind in ("minimax_m2", "minimax_m2_rotary_dim", "dots1", "exaone_moe")},
    "solar_open": make_config("solar_open"),
    **{kind: make_config(kind) for kind in ("cohere2_moe", "cohere2_moe_prefix", "mistral4", "mistral4_groups")},
    "fp8_pool_latent": make_config("deepseek_v3_halves"),
    **make_hybrids(TINY),
}
# one of each way to share a layer: heads, copied heads, a vocabulary, experts, states, latents, caches in eight bits
QUICK = {
    "replicated_kv_head", "qwen3_tied", "gemma4_shared", "gpt_oss", "qwen3_next", "falcon_h1", "fp8_pool_latent",
}  # fmt: skip
QUICK_PACKED = ("gptq_own_orders", "packed_asymmetric")
OTHER_PACKED = ("awq", "gptq", "gptq_desc_act", "packed_channel")
FOUR_RANKS = {
    "each_kv_head_on_two_ranks": make_config("llama3.1"),
    **{kind: make_config(kind) for kind in ("qwen3", "phi3", "olmo2")},
    **{kind: make_config(kind) for kind in ("mixtral", "qwen2_moe", "qwen3_moe")},
    **{kind: _with_more_heads(make_config(kind)) for kind in ("qwen3_next", "qwen3_5", "olmo_hybrid_rope")},
    # one, two and four groups of Mamba-2's heads
    **{kind: make_config(kind) for kind in ("granite_hybrid", "nemotron_3_latent", "bamba_biases", "lfm2_moe")},
    **{kind: make_config(kind) for kind in ("deepseek_v2", "kimi_linear", "kimi_linear_groups")},
    **{kind: make_config(kind) for kind in ("minimax_m2", "dots1", "exaone_moe", "cohere2_moe", "mistral4")},
    **{kind: make_config(kind) for kind in ("mistral", "ministral", "ministral3", "mellum", "qwen2", "gpt_oss")},
    **{kind: make_config(kind) for kind in ("gemma", "gemma2", "gemma3", "gemma4", "gemma4_shared", "gemma4_unified")},
    **{kind: make_config(kind) for kind in ("smollm3", "olmo3", "exaone4", "cohere2_biases", "glm4", "hunyuan")},
    "gemma4_unified": make_config("gemma4_unified"),
    **{kind: make_config(kind) for kind in ("seed_oss_biases", "arcee_biases", "apertus", "ernie4_5_biases")},
    **{kind: make_config(kind) for kind in ("granite_biases", "granite_moe", "granite_moe_shared", "phimoe")},
    **{kind: make_config(kind) for kind in ("ernie4_5_moe", "hunyuan_moe", "solar_open", "llama4")},
    **{kind: make_config(kind) for kind in ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "lfm2", "falcon_h1")},
    "qwen3_5_moe": _with_more_heads(make_config("qwen3_5_moe")),
    "fp8_pool_replicated": LlamaConfig(**TINY, num_key_value_heads=1),
}
# Most have fewer key heads than ranks: up to eight ranks keep copies of one. kimi_linear_groups stands for kimi_linear
EIGHT_RANKS = {name: _with_eight_heads(config) for name, config in FOUR_RANKS.items() if name != "kimi_linear"}


@pytest.mark.parametrize(
    ("size", "configs"),
    [
        (2, {name: TWO_RANKS[name] for name in sorted(QUICK)}),
        pytest.param(2, {name: TWO_RANKS[name] for name in TWO_RANKS if name not in QUICK}, marks=pytest.mark.full),
        pytest.param(4, FOUR_RANKS, marks=pytest.mark.full),
        pytest.param(8, EIGHT_RANKS, marks=pytest.mark.full),
    ],
    ids=["2", "2-others", "4", "8"],
)
@pytest.mark.slow
def test_split_model_gives_the_logits_of_the_whole(size, configs, tmp_path):
    folders = [tmp_path / name for name in configs]
    for folder, config in zip(folders, configs.values(), strict=True):
        save_checkpoint(folder, config)
    run_ranks(run_rank, size, tmp_path / "store", folders, timeout_s=600)
    for folder in folders:
        runner = PagedRunner(load(folder), ModelConfig.from_folder(folder), dtype=pool_dtype(folder))
        expected = runner.step([(runner.add_row(), PROMPT)])[0]
        for rank in range(size):
            logits = torch.load(folder / f"logits-{size}-{rank}.pt")
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "kinds", [QUICK_PACKED, pytest.param(OTHER_PACKED, marks=pytest.mark.full)], ids=["few", "others"]
)
@pytest.mark.slow
def test_split_model_of_packed_integers_gives_the_logits_of_the_whole(kinds, tmp_path):
    folders = [tmp_path / kind for kind in kinds]
    for folder in folders:
        save_checkpoint(tmp_path / "dense", make_config("llama_all_biases"))
        save_quantized(tmp_path / "dense", folder, with_groups_of(8, FORMATS[folder.name]))
    run_ranks(run_rank, 2, tmp_path / "store", folders)
    for folder in folders:
        runner = PagedRunner(load(folder), ModelConfig.from_folder(folder))
        expected = runner.step([(runner.add_row(), PROMPT)])[0]
        for rank in range(2):
            logits = torch.load(folder / f"logits-2-{rank}.pt")
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("vocab_size", "size"), [(97, 2), (97, 4), (9, 4), (8, 4), (5, 4), (1, 3)])
def test_vocab_rows_of_all_ranks_are_the_matrix_and_zeros(vocab_size, size):
    w = Weights.dummy(device=CPU, dtype=torch.float32) / "lm_head"
    ranks = [TensorParallel(rank, size, distributed.GroupMember.NON_GROUP_MEMBER) for rank in range(size)]
    rows = [load_vocab_rows(w, vocab_size=vocab_size, hidden_size=6, tp=tp) for tp in ranks]
    assert len({shard.shape for shard in rows}) == 1
    assert torch.equal(torch.cat(rows)[:vocab_size], w.tensor("weight", (vocab_size, 6)))
    assert torch.cat(rows)[vocab_size:].abs().sum() == 0


def test_a_rank_without_vocab_rows_reads_none_of_the_file(tmp_path):
    save_checkpoint(tmp_path, LlamaConfig(**TINY | {"vocab_size": 9}, num_key_value_heads=4))
    w = Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32) / "lm_head"
    last = TensorParallel(3, 4, distributed.GroupMember.NON_GROUP_MEMBER)
    assert load_vocab_rows(w, vocab_size=9, hidden_size=32, tp=last).tolist() == [[0.0] * 32] * 3


def test_one_rank_needs_no_process_group():
    tp, x = TensorParallel(), torch.ones(2, 3)
    assert tp.all_reduce(x) is x
    assert tp.all_gather(x, 0) is x
    assert tp.broadcast(x) is x


class TwiceTheSmall:
    """OneShotAllReduce over two ranks with equal parts; takes a single row."""

    def takes(self, x):
        return x.shape[0] == 1

    def all_reduce(self, x):
        return x.mul_(2)

    def add_rms_norm(self, x, residual, weight, eps):
        return add_rms_norm(2 * x, residual, weight, eps)


def test_a_sum_that_small_sums_take_is_made_by_the_norm_behind_it():
    tp = TensorParallel(0, 2, one_shot_all_reduce=TwiceTheSmall())
    row, rows = torch.randn(1, 6), torch.randn(2, 6)
    late = tp.sum_late(row)
    assert isinstance(late, PartialSum)
    assert isinstance(late * 3.0, PartialSum)
    assert torch.equal(whole(late * 3.0), row * 3.0 * 2)
    residual, weight = torch.randn(1, 6), torch.randn(6)
    for mine, expected in zip(
        late.add_rms_norm(residual, weight, 1e-6), add_rms_norm(2 * row, residual, weight, 1e-6), strict=True
    ):
        assert torch.equal(mine, expected)
    doubled = 2 * row
    assert torch.equal(tp.all_reduce(row), doubled)
    assert tp.sum_late(rows) is rows  # without a group: nobody to sum with
    assert whole(rows) is rows
