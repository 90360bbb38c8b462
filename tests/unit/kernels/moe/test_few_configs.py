"""Which mixtures the products of few tokens serve, and with which tiles."""

from __future__ import annotations

import pytest

from kernels.moe.few_configs import MOST_TOKENS, FewConfig, few_config

# name: kind, experts, top-k, hidden size, intermediate size, bytes of a weight
SHAPES = {
    "qwen3-30b-a3b-awq": ("int4", 128, 8, 2048, 768, 0.53),
    "qwen3-30b-a3b-nvfp4": ("nvfp4", 128, 8, 2048, 768, 0.56),
    "qwen3-30b-a3b-fp8": ("fp8", 128, 8, 2048, 768, 1.0),
    "qwen3.5-35b-a3b-fp8": ("fp8", 256, 8, 2048, 512, 1.0),
    "gpt-oss-20b": ("mxfp4", 32, 4, 2880, 2880, 0.53),
    "gpt-oss-120b": ("mxfp4", 128, 4, 2880, 2880, 0.53),
    "glm-4.5-air-int4": ("int4", 128, 8, 4096, 1408, 0.56),
    "mixtral-int4": ("int4", 8, 2, 4096, 14336, 0.53),
    "deepseek-v2-lite-fp8": ("fp8", 64, 6, 2048, 1408, 1.0),
    "glm-4.7-flash-fp8": ("fp8", 64, 4, 2048, 1536, 1.0),
    "minimax-m2-fp8": ("fp8", 256, 8, 3072, 1536, 1.0),
    "ernie-int4": ("int4", 64, 6, 2560, 1536, 0.53),
    "qwen3-next-fp8": ("fp8", 512, 10, 2048, 512, 1.0),
    "gpt-oss-20b-on-two": ("mxfp4", 32, 4, 2880, 1440, 0.53),
    "odd": ("fp8", 64, 8, 2064, 784, 1.0),
}
# Rows of a tile with 1, 2, 4, 8 and 16 tokens; c: the products choose the experts; .: other products serve
ROWS = {
    "qwen3-30b-a3b-awq": "1c 4 8 8 8",
    "qwen3-30b-a3b-nvfp4": "1c 4 . 8 8",
    "qwen3-30b-a3b-fp8": "1 . 8 8 8",
    "qwen3.5-35b-a3b-fp8": "1c . . 4 4",
    "gpt-oss-20b": "1 4 4 4 8",
    "gpt-oss-120b": "1 4 4 4 .",
    "glm-4.5-air-int4": "1 4 8 8 .",
    "mixtral-int4": ". 4 8 . .",
    "deepseek-v2-lite-fp8": ". . 8 8 8",
    "glm-4.7-flash-fp8": "1 . 8 8 8",
    "minimax-m2-fp8": ". . 8 . .",
    "ernie-int4": ". 4 8 8 8",
    "qwen3-next-fp8": ". . . 4 4",
    "gpt-oss-20b-on-two": "1c 4 4 4 .",
    "odd": ". . . . .",
}


def _config(name: str, num_tokens: int, *, num_here: int | None = None) -> FewConfig | None:
    kind, num_experts, top_k, hidden_size, intermediate_size, weight_bytes = SHAPES[name]
    return few_config(
        kind,
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        num_here=num_experts if num_here is None else num_here,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        expert_bytes=int(3 * hidden_size * intermediate_size * weight_bytes),
    )


def _rows(config: FewConfig | None) -> str:
    return "." if config is None else f"{config.block_m}{'c' if config.chooses else ''}"


@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_tiles(name: str) -> None:
    assert " ".join(_rows(_config(name, num_tokens)) for num_tokens in (1, 2, 4, 8, 16)) == ROWS[name]
    assert _config(name, MOST_TOKENS + 1) is None


def test_tiles_divide_all_outputs_and_have_8_columns() -> None:
    for name, (_, _, top_k, hidden_size, intermediate_size, _) in SHAPES.items():
        for num_tokens in range(1, MOST_TOKENS + 1):
            config = _config(name, num_tokens)
            if config is None:
                continue
            assert intermediate_size % config.up.outputs == hidden_size % config.down.outputs == 0, name
            assert config.block_m * config.up.splits == 8, name
            assert (top_k if config.block_m == 1 else config.block_m) * config.down.splits == 8, name


def test_the_rehearsed_numbers_of_tokens_have_every_config() -> None:
    """Numbers between powers of two have the config of one that is rehearsed with the same launch of routing."""
    for name in SHAPES:
        for num_tokens, rehearsed in ((5, 6), (7, 8), (9, 12), (10, 12), (11, 12), (13, 16), (14, 16), (15, 16)):
            assert _config(name, num_tokens) == _config(name, rehearsed), name


def test_a_rank_with_some_experts_leaves_one_token_to_other_products() -> None:
    assert _config("gpt-oss-120b", 1, num_here=64) is None
    assert _config("gpt-oss-120b", 16, num_here=64) is not None, "it reads a half of the bytes"
