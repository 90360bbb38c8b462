"""Which products of few tokens with experts in planes kernels/moe/gluon_few.py computes, and its tiles.

From whole layers of seven mixtures with 1, 2, 4, 8 and 16 tokens, each in every tile of `python -m
benchmarks.few_experts` on an H100 (benchmarks/notes.md). Numbers of tokens between two powers of two have the config of
the larger one, as the rehearsal before serving meets one of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.moe.configs import uses_pairs

MOST_TOKENS = 16
CHUNK_TOKENS = 4  # as of GroupedConfig


@dataclass(frozen=True)
class FewTile:
    """Sizes of one product of few tokens by mma.sync."""

    outputs: int  # of a program; gate and up have so many each. A multiple of 16 that divides all
    num_warps: int  # at most a warp for 16 outputs of each split and, of the sum, of each expert
    splits: int  # of the inputs; with the rows of a tile, or the experts of the sum, 8 or 16 columns
    ahead: int  # groups of each split whose loads are in flight at once
    max_registers: int | None = None  # of a thread


@dataclass(frozen=True)
class FewConfig:
    """Settings of both products of a step of few tokens by mma.sync."""

    # Rows of a tile: (token, expert) pairs of one expert. 1: each pair is a tile of its own, and the second product
    # sums over a token's experts
    block_m: int
    up: FewTile
    down: FewTile
    chooses: bool = False  # of one row: both products choose the experts themselves, if a softmax alone chooses them


# A layer of Qwen3-30B-A3B in NVFP4 takes 64.6 us for 8 tokens with 8 rows, 64.9 with 4 (of two launches 67.1 and
# 67.6), 90.1 and 96.6 for 16; in FP8 95.0 and 98.5, 143.1 and 148.9. 2 rows lose to 4 nearly everywhere, 16 to all
_ROWS_8 = FewConfig(8, FewTile(64, 4, 1, 2), FewTile(64, 4, 1, 3))
# With 2 tokens 1.02 to 1.19 as fast as what serves otherwise. With 4 tokens of gpt-oss-20b 79.3 us, with 8 rows 82.1
_ROWS_4 = FewConfig(4, FewTile(32, 4, 2, 2), FewTile(32, 4, 2, 6))
# Up to so many inputs of the second product, which are 4 groups: a layer of Qwen3.5-35B-A3B takes 123.8 us for 16
# tokens with 4 rows and 126.9 with 8
_FEW_INPUTS = 512
# Of the first product of one token, of FP8; with more it spills, and was not measured
_MOST_INPUTS_FP8 = 2048
# Expected bytes of weights from which larger tiles have no loads to wait for, so that little is gained: a layer of
# gpt-oss-120b with 16 tokens reads 684 MB (1.002 as fast), one of GLM-4.5-Air in int4 796 MB (1.008), and with 8 tokens
# 507 MB (1.06)
_MOST_BYTES = 1 << 29
# Of one token, up to which both products choose the experts: a launch of 1 us less, and as many instructions more in
# every program. 20 to 25 MB: 14.5 to 14.9 us instead of 15.1 to 15.4. 38 MB: no gain. 53 MB: 30.1 instead of 29.7
_MOST_BYTES_THAT_CHOOSE = 1 << 25


def few_config(
    kind: str,
    *,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    num_here: int,
    hidden_size: int,
    intermediate_size: int,
    expert_bytes: int,
) -> FewConfig | None:
    """Return the config of so many tokens; None: other products serve them, since these gain nothing or do not fit.

    num_here: of num_experts, those whose products are computed. intermediate_size: of this rank's part of an expert.
    """
    if num_tokens > MOST_TOKENS:
        return None
    padded = 1 << (num_tokens - 1).bit_length()
    num_hit = num_here * (1 - (1 - top_k / num_experts) ** padded)
    if num_hit * expert_bytes > _MOST_BYTES:
        return None
    if num_tokens == 1:
        config = _of_one_token(
            kind,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            has_all=num_here == num_experts,
            num_bytes=top_k * expert_bytes,
        )
    else:
        config = _of_some_tokens(
            kind, num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, intermediate_size=intermediate_size
        )
    if config is None or intermediate_size % config.up.outputs or hidden_size % config.down.outputs:
        return None
    return config


def _of_one_token(
    kind: str, *, top_k: int, hidden_size: int, intermediate_size: int, has_all: bool, num_bytes: int
) -> FewConfig | None:
    """Return the config if each expert has columns, and no column is without one: of others nothing was measured."""
    if top_k not in (4, 8) or not has_all:
        return None
    if kind == "fp8" and hidden_size > _MOST_INPUTS_FP8:
        return None
    up = FewTile(16, 8, 8, 3 if kind == "mxfp4" else 2, 128)
    if top_k == 4:
        down = FewTile(16, 8, 2, 3)
    else:  # six groups of FP8 take the registers of twice the threads: 7.5 us instead of 8.1
        down = FewTile(16, 8 if kind == "fp8" and intermediate_size > _FEW_INPUTS else 4, 1, 6)
    return FewConfig(1, up, down, chooses=num_bytes <= _MOST_BYTES_THAT_CHOOSE)


def _of_some_tokens(
    kind: str, *, num_tokens: int, top_k: int, num_experts: int, intermediate_size: int
) -> FewConfig | None:
    # Products of pairs are as fast in FP8, and with a scale for each row faster: 35.7 us instead of 39.1
    if kind == "fp8" and num_tokens == 2:
        return None
    is_short = intermediate_size <= _FEW_INPUTS
    # Products that lay nothing out are as fast: a layer of Qwen3.5-35B-A3B takes 45.5 us for 4 tokens, with 4 rows 46.3
    if (
        num_tokens > 2
        and (is_short or kind == "nvfp4")
        and uses_pairs(num_tokens=num_tokens, top_k=top_k, num_experts=num_experts)
    ):
        return None
    if num_tokens == 2 or is_short or (kind == "mxfp4" and num_tokens <= 8):
        return _ROWS_4
    return _ROWS_8
