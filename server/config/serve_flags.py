"""The flags of what is served, and in which memory. Imports argparse."""

import argparse

from server.config.loras import named_folder
from server.config.value_types import BACKEND_NAMES, KV_CACHE_DTYPES, QUANTIZATION_NAMES, integer, share, size, text


def add_model_flags(group: argparse._ArgumentGroup) -> None:
    """Add the model, and how it is loaded."""
    add = group.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or hub id (default: the built-in demo)")
    add("--revision", type=text, metavar="REV", help="branch, tag or commit of the hub id")
    add(
        "--served-model-name",
        action="append",
        type=text,
        metavar="NAME",
        help="name for requests; repeatable (folder or hub id)",
    )
    add(
        "--device", choices=("auto", "cuda", "mps", "cpu"), metavar="DEV", default="auto", help="auto, cuda, mps or cpu"
    )
    add(
        "--tensor-parallel-size",
        type=integer(1, 64),
        metavar="N",
        default=1,
        help="GPUs of this machine that share the model (1)",
    )
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        metavar="TYPE",
        default="auto",
        help="auto, bfloat16, float16 or float32",
    )
    add(
        "--quantization",
        choices=QUANTIZATION_NAMES,
        metavar="NAME",
        default="auto",
        help=f"of linear layers (auto: as the checkpoint is): {', '.join(QUANTIZATION_NAMES)}",
    )
    add("--load-format", choices=("auto", "dummy"), metavar="FMT", default="auto", help="dummy: random weights")
    add(
        "--attention-backend",
        choices=BACKEND_NAMES,
        default="auto",
        metavar="NAME",
        help="auto, triton, flash-attn, torch",
    )
    add(
        "--pooling",
        choices=("auto", "last", "mean"),
        metavar="KIND",
        default="auto",
        help="embeddings: auto (as an embedding model's folder says), last or mean",
    )
    add(
        "--lora", action="append", type=named_folder, metavar="NAME=FOLDER", default=[], help="LoRA adapter; repeatable"
    )
    add("--chat-template", type=text, metavar="FILE", help="Jinja file that replaces the model's own template")


def add_memory_flags(group: argparse._ArgumentGroup) -> None:
    """Add memory and batching."""
    add = group.add_argument
    add("--max-model-len", type=integer(1, 2**24), metavar="N", help="context length in tokens")
    add("--max-num-seqs", type=integer(1, 16_384), metavar="N", help="requests running at once (256 on cuda, else 64)")
    add(
        "--max-num-batched-tokens",
        type=integer(1, 32_768),
        metavar="N",
        help="tokens computed per step (8192 on cuda, else 512)",
    )
    add("--max-num-mixed-tokens", type=integer(1, 32_768), metavar="N", help="the same while requests decode")
    add("--block-size", type=integer(1, 1024), metavar="N", help="tokens per KV block (16)")
    add("--kv-cache-memory", type=size, metavar="SIZE", help="memory of the KV cache, e.g. 4GiB or 512MB")
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        metavar="TYPE",
        help="auto: as --dtype; fp8 (e4m3): twice the tokens",
    )
    add("--gpu-memory-utilization", type=share, default=0.9, metavar="F", help="share of GPU memory (0.9)")
    add("--no-prefix-caching", action="store_true", help="do not reuse the KV of shared prefixes")
    add("--depth", type=integer(1, 2), metavar="N", help="steps in flight (2 on cuda, else 1)")
    add("--enforce-eager", action="store_true", help="no CUDA graphs, for debugging")
    add("--max-waiting", type=integer(1, 2**20), default=2048, metavar="N", help="requests queued at most (2048)")
    add("--max-queued-tokens", type=integer(1, 2**40), metavar="N", help="their tokens at most (64 full contexts)")
