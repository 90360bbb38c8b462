"""One GPU measures the figures of docs/reference/measurements.md: `python -m benchmarks.record FOLDER`.

Each script runs in its own process and writes JSON to FOLDER. The dense shapes of the first tables come first (about
seven minutes on an H100), then one group of rows for each kind of model. A failed script is named, and the others still
run; none is begun once --max-seconds have passed.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

_KINDS = ("startup", "attention", "offline", "online", "profile", "kernels")
_SERVER_FLAGS = ("--max-model-len", "8192", "--no-prefix-caching")
_LATE = ("single", "batch8", "mixed64", "prefill16")  # workloads of the models with experts, states and latents


class Script(NamedTuple):
    """One script of the record."""

    kind: str
    shape: str  # or what else its file is named after
    command: list[str]  # module and flags

    @property
    def name(self) -> str:
        """The first words of its file's name."""
        return f"{self.kind}-{self.shape}" if self.shape else self.kind


def main() -> int:
    """Run the chosen scripts; return 1 if one failed or was not begun."""
    parser = _parser()
    args = parser.parse_args()
    chosen = [
        script
        for script in scripts()
        if script.kind in args.only and (not args.shapes or script.shape.startswith(tuple(args.shapes)))
    ]
    if args.list:
        for script in chosen:
            print(f"{script.name}: python -m {' '.join(script.command)}")
        return 0
    if args.folder is None:
        parser.error("a folder is needed, for the JSON files (--list alone needs none)")
    args.folder.mkdir(parents=True, exist_ok=True)
    suffix = f"{args.hardware}-{datetime.now(UTC).date()}.json"
    end_s = time.monotonic() + args.max_seconds
    failed, left_out = [], []
    for script in chosen:
        if time.monotonic() > end_s:
            left_out.append(script.name)
            continue
        print(f"== {script.name}", flush=True)
        json_flags = ("--json", str(args.folder / f"{script.name}-{suffix}"))
        if subprocess.run([sys.executable, "-m", *script.command, *json_flags]).returncode:
            failed.append(script.name)
    for word, names in (("failed", failed), ("no time was left for", left_out)):
        if names:
            print(f"{word}: {', '.join(names)}", file=sys.stderr)
    return 1 if failed or left_out else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="where the JSON files go")
    parser.add_argument("--hardware", default="h100", help="a word for the file names")
    parser.add_argument("--only", nargs="+", choices=_KINDS, default=_KINDS)
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="only scripts whose shape begins with one of these")
    parser.add_argument(
        "--max-seconds", type=float, default=3600.0, metavar="N", help="begin no script after N seconds"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    return parser


def scripts() -> Iterator[Script]:
    """Yield every script, in the order in which they run."""
    yield Script("startup", "", ["benchmarks.startup", "--warm-starts", "1"])
    yield Script("attention", "", ["server", "bench", "kernels"])
    for shape, num_rows in (("qwen3-0.6b", 240), ("llama-3.1-8b", 60)):
        yield _offline(shape, "single", "batch8", "mixed256", "prefill")
        yield Script("online", shape, ["benchmarks.online", "--shape", shape, *_SERVER_FLAGS])
        mixed = ("--mixed", "512", "1024", "2048", "--mixed-rows", str(num_rows))
        yield Script("profile", shape, ["benchmarks.profile_step", "--shape", shape, *mixed])
    yield _offline("llama-3.1-8b", "long", "longctx", flags=("--max-model-len", "32768"), suffix="-long")
    yield _offline("llama-3.1-8b", "long128k", flags=("--max-model-len", "131072"), suffix="-128k")
    yield from _variants()
    yield from _profiles()
    yield _offline("qwen2.5-7b", "single", "mixed128", "prefill16")
    for shape in ("qwen3-30b-a3b", "qwen3-30b-a3b-fp8", "qwen3-30b-a3b-awq", "qwen3-30b-a3b-nvfp4"):
        yield _offline(shape, *_LATE)
    for shape in ("gpt-oss-20b-mxfp4", "gpt-oss-120b-mxfp4", "gemma-2-9b", "gemma-4-31b"):
        yield _offline(shape, *_LATE)
    for shape in ("qwen3.5-4b", "qwen3.5-27b", "qwen3.5-35b-a3b", "nemotron-3-nano-30b-a3b"):
        yield _offline(shape, *_LATE)
    yield _offline("qwen3.5-4b", "long128k", flags=("--max-model-len", "131072"), suffix="-128k")
    fp8_kv = ("--max-model-len", "131072", "--kv-cache-dtype", "fp8")  # beside 65 GiB of weights
    yield _offline("qwen3.5-35b-a3b", "long128k", flags=fp8_kv, suffix="-128k")
    for shape in ("qwen3-0.6b", "llama-3.1-8b"):
        for suffix, flags in (("-shared", ()), ("-shared-ungrouped", ("--no-row-groups",))):
            yield _offline(shape, "shared", flags=("--max-num-seqs", "256", *flags), suffix=suffix)
    for kind in (
        "packed_experts",
        "expert_layers",
        "moe",
        "recurrent_kernels",
        "mamba2_kernels",
        "latent_attention",
        "few_rows",
    ):
        yield Script("kernels", kind.replace("_", "-"), [f"benchmarks.{kind}"])
    yield Script("kernels", "moe-ranks", ["benchmarks.moe_ranks"])
    yield Script("kernels", "shared-prefix", ["benchmarks.shared_prefix"])
    yield Script("kernels", "attention-kinds", ["benchmarks.attention_kinds", "--seconds", "120"])


def _variants() -> Iterator[Script]:
    """Yield the dense shapes with 8-bit keys and values, and with 8- and 4-bit weights."""
    for shape in ("qwen3-0.6b", "llama-3.1-8b"):
        online = ["benchmarks.online", "--shape", shape, "--concurrency", "256", *_SERVER_FLAGS]
        for kind in ("fp8", "int8"):
            yield Script("online", f"{shape}-{kind}-kv", [*online, "--kv-cache-dtype", kind])
            yield _offline(shape, "mixed256", flags=("--kv-cache-dtype", kind), suffix=f"-{kind}-kv")
    yield _offline("llama-3.1-8b", *_LATE, "mixed256", flags=("--quantization", "fp8"), suffix="-fp8")
    for scheme in ("fp8-blocks", "w8a8", "awq", "mxfp4", "nvfp4"):
        yield _offline(f"llama-3.1-8b-{scheme}", *_LATE, "mixed256")


def _profiles() -> Iterator[Script]:
    """Yield what shows where the time of single rows, first tokens, long contexts and 8-bit keys and values goes."""
    for shape in ("qwen3-0.6b", "llama-3.1-8b"):
        yield _profile(shape, "few-rows", "--contexts", "384", "640x8", "--first-token", "512", "--num-steps", "100")
        for kind in ("auto", "fp8", "int8"):
            full = ("--batch", "256", "--prompt-len", "0", "--mixed", "1024", "--mixed-rows", "240")
            yield _profile(shape, f"{kind}-kv", *full, "--kv-cache-dtype", kind)
    shape = "llama-3.1-8b"
    yield _profile(shape, "long-rows", "--contexts", "30000x4", "16000x16", "--offline")
    few = ("--offline", "--num-steps", "6")
    yield _profile(shape, "long-prompts", "--prompt", "8192", "--behind", "0", "8192", "21808", *few)
    beside = ("--contexts", "30000x3", "--prompt", "8189", "--behind", "21808")
    yield _profile(shape, "long-beside", *beside, *few)
    yield _profile(shape, "128k", "--contexts", "131072,1000x63", "1000x64")


def _profile(shape: str, suffix: str, *flags: str) -> Script:
    return Script("profile", f"{shape}-{suffix}", ["benchmarks.profile_step", "--shape", shape, *flags])


def _offline(shape: str, *workloads: str, flags: tuple[str, ...] = (), suffix: str = "") -> Script:
    """Return one process of `quire bench offline`. suffix: what its file's name says of its flags."""
    return Script("offline", shape + suffix, ["server", "bench", "offline", *workloads, "--shape", shape, *flags])


if __name__ == "__main__":
    sys.exit(main())
