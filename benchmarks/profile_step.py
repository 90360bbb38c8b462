"""Profiles steps: device time by group of kernels beside its floor, idle device, and the host's part.

    python -m benchmarks.profile_step --shape qwen3-0.6b --batch 1 64 256 --context 512 --json out.json
    python -m benchmarks.profile_step --shape llama-3.1-8b --contexts 131072,512x63 512x64 --kv-cache-dtype fp8
    python -m benchmarks.profile_step --shape llama-3.1-8b --prompt 8192 --behind 22000 --offline

Runs the engine's own loop (benchmarks/profiled_steps.py), with random weights. A step's time is that without the
profiler, and what the device did in it is that of a trace of as many steps. Each moment belongs to one kernel
(benchmarks/device_time.py), so groups and idle time add up to the step. A floor is bytes ÷ bandwidth or FLOPs ÷ rate of
the card (benchmarks/floors.py, benchmarks/step_work.py), from the rows of the very steps that were traced.
Without a GPU it traces torch's operators, but no kernels in C, and has no floors.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.device_time import LAYERS, Breakdown, breakdown, group_of
from benchmarks.floors import CARDS, Card, StepCosts
from benchmarks.offline import versions
from benchmarks.profiled_steps import Kind, Profile, profile_steps
from benchmarks.report import BenchError, Report, check_outputs, format_table, host_facts, now, write_report
from benchmarks.step_work import Floor, StepWork, step_floors
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.startup.device_choice import resolve_kv_dtype
from engine.startup.load import load_engine
from models.config.model_config import ModelConfig
from server.config.value_types import KV_CACHE_DTYPES

_SHAPES = Path(__file__).parent / "shapes"
_MODEL_LEN = 8192
_MIXED_PROMPT_LEN = 512
_BATCHES, _PROMPT_LEN = (1, 64, 256), 4096  # without flags
_NOT_SAVED = ("json", "rows")  # flags that change no figure


def main(argv: Sequence[str] | None = None) -> int:
    """Profile each kind of step that the flags name."""
    args = parser().parse_args(argv)
    try:
        check_outputs(json_path=args.json, plot_path=None, html_path=None)
        _measure(args, kinds(args))
    except (BenchError, StartupError) as error:
        print(error, file=sys.stderr)
        return error.exit_code if isinstance(error, BenchError) else 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of this command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batch", type=_count, nargs="*", help="decoding rows of --context each; default"
                        " 1 64 256, without --contexts, --prompt and --first-token")  # fmt: skip
    parser.add_argument("--context", type=_count, default=512, help="tokens of these rows' prompts (default 512)")
    parser.add_argument("--contexts", type=_lengths, nargs="+", default=[], metavar="N[xROWS],…", help="of each step:"
                        " tokens of its decoding rows' prompts, such as 131072,512x63")  # fmt: skip
    parser.add_argument("--prompt", type=_lengths, default=(), metavar="N[xM],…", help="tokens of the prompts that each"
                        " step computes: beside the rows of --contexts, if there are some")  # fmt: skip
    parser.add_argument("--behind", type=int, nargs="+", default=[0], metavar="N", help="tokens before each of these,"
                        " in the prefix cache, in whole blocks: a kind of step each")  # fmt: skip
    parser.add_argument("--first-token", type=_count, nargs="*", default=[], metavar="N", help="tokens of prompts that"
                        " come when nothing runs: from the engine's message to its answer")  # fmt: skip
    parser.add_argument("--prompt-len", type=int, help="of the prompts that fill a step; default 4096,"
                        " as --batch; 0: none")  # fmt: skip
    parser.add_argument(
        "--mixed", type=_count, nargs="*", default=[], help="tokens of steps with 512-token prompts too"
    )
    parser.add_argument("--mixed-rows", type=_count, default=240, help="requests that decode in them")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--quantization", default="auto", help="scheme of the weights, as of quire serve")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--offline", action="store_true", help="with the limits of quire bench offline")
    parser.add_argument("--max-num-seqs", type=_count)
    parser.add_argument("--max-num-batched-tokens", type=_count)
    parser.add_argument("--num-steps", type=_count, default=20, help="measured, and traced (default 20)")
    parser.add_argument("--rows", type=int, default=14, help="kernels shown")
    parser.add_argument("--json", default="")
    return parser


def kinds(args: argparse.Namespace) -> dict[str, Kind]:
    """Return the kinds of steps that the flags name, by their titles. Raises BenchError."""
    if any(args.behind) and not args.prompt:
        raise BenchError("--behind is for the tokens of --prompt.", exit_code=2)
    if min(args.behind) < 0:
        raise BenchError("--behind is at least 0.", exit_code=2)
    if 1 in args.prompt:
        raise BenchError("--prompt: a prompt has at least 2 tokens: a row of one decodes.", exit_code=2)
    is_usual = not (args.contexts or args.prompt or args.first_token)
    batches = (_BATCHES if is_usual else ()) if args.batch is None else args.batch
    prompt_len = (_PROMPT_LEN if is_usual else 0) if args.prompt_len is None else args.prompt_len
    found = {f"decode B{batch}": Kind(contexts=(args.context,) * batch) for batch in batches}
    for behind in args.behind:
        prompts = f"prompts {_named(args.prompt)}" if args.prompt else ""
        prompts += f" behind {behind}" if behind else ""
        for contexts in args.contexts:
            title = f"decode {_named(contexts)}" + f" beside {prompts}" * bool(prompts)
            found[title] = Kind(contexts=contexts, prompts=args.prompt, behind=behind)
        if args.prompt and not args.contexts:
            found[prompts] = Kind(prompts=args.prompt, behind=behind)
    for length in args.first_token:
        found[f"first token {length}"] = Kind(prompts=(length,), is_alone=True)
    if prompt_len:
        found[f"prompt {prompt_len}"] = Kind(queued=prompt_len)
    for num_tokens in args.mixed:
        contexts = (args.context,) * args.mixed_rows
        title = f"mixed {num_tokens} tokens, {args.mixed_rows} decoding"
        found[title] = Kind(contexts=contexts, queued=_MIXED_PROMPT_LEN, step_tokens=num_tokens)
    if not found:
        raise BenchError("The flags name no step.", exit_code=2)
    return found


def step_report(profile: Profile, config: ModelConfig, costs: StepCosts, card: Card | None) -> Report:
    """Return the figures of one kind of steps, each of the mean step. card: None: its rates are not known."""
    names = partial(group_of, has_states=config.state_bytes > 0)
    found, num_steps = breakdown(profile.intervals, names), profile.num_steps
    floors = step_floors(costs, profile.works, has_whole_layers=LAYERS in found.groups)
    wall_ms, busy_ms = 1e3 * profile.host.turn_s, found.busy_us / 1e3 / num_steps
    idle_ms = max(wall_ms - busy_ms, 0.0)
    between_ms = min(found.short_gaps_us / 1e3 / num_steps, idle_ms)
    floors_ms = {group: None if card is None else 1e3 * floor.seconds(card) for group, floor in floors.items()}
    return {
        "is_gpu": profile.is_gpu,
        "work": _work(profile.works),
        "wall_ms": wall_ms,
        "busy_ms": busy_ms,
        "gpu_ms": sum(share.own_us for share in found.kernels.values()) / 1e3 / num_steps,
        "between_kernels_ms": between_ms,
        "waits_for_host_ms": idle_ms - between_ms,
        "trace": {
            "num_short_gaps": found.num_short_gaps / num_steps,
            "num_long_gaps": found.num_long_gaps / num_steps,
            "long_gaps_ms": found.long_gaps_us / 1e3 / num_steps,
        },
        "floor_ms": None if card is None else sum(1e3 * floor.seconds(card) for floor in floors.values()),
        "host": {
            "launch_ms": 1e3 * profile.host.launch_s,
            "wait_ms": 1e3 * profile.host.wait_s,
            "rest_ms": 1e3 * profile.host.rest_s,
        },
        "groups": _groups(found, floors, floors_ms, num_steps),
        "kernels": [
            {
                "name": name,
                "group": names(name),
                "calls_per_step": share.num_calls / num_steps,
                "us_per_step": share.own_us / num_steps,
                "share_us_per_step": share.us / num_steps,
            }
            for name, share in found.kernels.items()
        ],
    }


def format_step(title: str, step: Report, *, num_kernels: int) -> str:
    """Format one kind of steps: groups with their floors, idle time, the host, and the first kernels."""
    work, wall_ms, host = step["work"], step["wall_ms"], step["host"]
    lines = [f"{title}: {wall_ms:.3f} ms a step, device busy {step['busy_ms']:.3f}"]
    lines.append(
        f"  {work['rows']:g} decoding rows at {work['shortest']:,} to {work['longest']:,} tokens,"
        f" {work['prompt_tokens']:,.0f} prompt tokens behind {work['behind']:,.0f} (means of steps)"
    )
    rows = [["", "ms", "share", "calls", "with waits", "GB", "TFLOP", "floor, ms", "of floor"]]
    for group in step["groups"]:
        ms = group["ms"]
        cells = [f"{ms:.3f}", f"{ms / wall_ms:.1%}", f"{group['calls']:.1f}", f"{group['own_ms']:.3f}"]
        amounts = [f"{amount:.3f}" if amount else "" for amount in (group["gb"], group["tflop"])]
        rows.append([f"  {group['group']}", *cells, *amounts, *_floor_cells(group["floor_ms"], ms)])
    waits = "device waits for the host" if step["is_gpu"] else "outside torch's operators"
    for name, field in (("between kernels", "between_kernels_ms"), (waits, "waits_for_host_ms")):
        rows.append([f"  {name}", f"{step[field]:.3f}", f"{step[field] / wall_ms:.1%}", *[""] * 6])
    rows.append(["  step", f"{wall_ms:.3f}", "100.0%", *[""] * 4, *_floor_cells(step["floor_ms"], wall_ms)])
    lines.append(format_table(rows))
    lines.append(
        f"  host: launches {host['launch_ms']:.3f} ms, waits for the device {host['wait_ms']:.3f},"
        f" plans, commits and sends {host['rest_ms']:.3f}"
    )
    for kernel in step["kernels"][:num_kernels]:
        times = f"{kernel['share_us_per_step']:>9.1f} µs (with waits {kernel['us_per_step']:.1f})"
        lines.append(f"  {times} {kernel['calls_per_step']:>6.1f} × {kernel['name'][:80]}")
    return "\n".join(lines)


def _measure(args: argparse.Namespace, chosen: dict[str, Kind]) -> None:
    folder = _SHAPES / args.shape
    if not (folder / "config.json").is_file():
        raise BenchError(f"There is no --shape {args.shape!r}.", exit_code=2)
    shape = ModelConfig.from_folder(folder)
    longest = max(
        max((*kind.contexts, 0)) + kind.room(args.num_steps) + kind.behind + max((*kind.prompts, kind.queued))
        for kind in chosen.values()
    )
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device=args.device,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=min(max(longest, _MODEL_LEN), shape.max_context_len),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        is_offline=args.offline,
        enable_prefix_caching=any(kind.behind for kind in chosen.values()),
        groups_rows=False,
    )
    report: Report = {"benchmark": "profile_step", "date": now(), "host": host_facts(), "versions": versions()}
    report |= {"shape": args.shape, "context": args.context}
    report["args"] = {flag: value for flag, value in vars(args).items() if flag not in _NOT_SAVED}
    with contextlib.closing(load_engine(config, lambda stage: None)) as loaded:
        report |= {"facts": loaded.facts, "steps": {}}
        costs = StepCosts(
            shape.quantized(args.quantization),
            resolve_kv_dtype(args.kv_cache_dtype, torch.bfloat16, torch.device("cpu")),
        )
        card = CARDS.get(torch.cuda.get_device_name()) if loaded.runner.device.type == "cuda" else None
        for title, kind in chosen.items():
            profile = profile_steps(loaded, kind, num_steps=args.num_steps)
            report["steps"][title] = step_report(profile, loaded.model_config, costs, card)
            print(format_step(title, report["steps"][title], num_kernels=args.rows), flush=True)
            if args.json:  # a time limit may end this process before the next one is measured
                write_report(args.json, report)


def _groups(
    found: Breakdown, floors: dict[str, Floor], floors_ms: dict[str, float | None], num_steps: int
) -> list[Report]:
    return [
        {
            "group": group,
            "ms": share.us / 1e3 / num_steps,
            "own_ms": share.own_us / 1e3 / num_steps,
            "calls": share.num_calls / num_steps,
            "gb": floors[group].num_bytes / 1e9 if group in floors else 0.0,
            "tflop": floors[group].flops / 1e12 if group in floors else 0.0,
            "floor_ms": floors_ms.get(group),
        }
        for group, share in found.groups.items()
    ]


def _work(works: Sequence[StepWork]) -> Report:
    rows = [context for work in works for context in work.rows]
    prompts = [prompt for work in works for prompt in work.prompts]
    return {
        "rows": len(rows) / len(works),
        "shortest": min(rows, default=0),
        "longest": max(rows, default=0),
        "prompt_tokens": sum(work.num_prompt_tokens for work in works) / len(works),
        "behind": sum(behind for _, behind in prompts) / len(prompts) if prompts else 0.0,
    }


def _floor_cells(floor_ms: float | None, ms: float) -> list[str]:
    if floor_ms is None:
        return ["", ""]
    return [f"{floor_ms:.3f}", f"{floor_ms / ms:.0%}" if ms else ""]


def _named(lengths: tuple[int, ...]) -> str:
    """Return lengths as on the command line, runs of equal ones together."""
    runs = [(length, lengths.count(length)) for length in dict.fromkeys(lengths)]
    return ",".join(f"{length}x{count}" if count > 1 else str(length) for length, count in runs)


def _lengths(text: str) -> tuple[int, ...]:
    """Parse 131072,512x63: each number of tokens, with how many times it stands."""
    found = [re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", part) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 131072,512x63")
    return tuple(int(match[1]) for match in found if match for _ in range(int(match[2] or 1)))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
