"""Measures speculation: the same greedy answers with and without drafts, in turns: `python -m benchmarks.speculation`.

One engine is loaded; each workload runs without and with drafts alternately, and the best time of each counts, by the
clock and by this process's CPU time (on a CPU, that is the engine's own time, independent of other programs). Two kinds
of text: `copy` repeats a list, as answers that quote or edit their prompt do; `prose` has nothing to copy.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.offline import versions
from benchmarks.report import Report, format_table, now, write_report
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.load import load_engine
from engine.startup.loaded_engine import LoadedEngine
from server.config.model_source import resolve_model
from server.config.serve_flags import add_overlap_flag, add_speculative_flags, num_steps_in_flight, speculative_of

_WORDS = "one two three four five six seven eight nine ten eleven twelve"
_PROSE = (
    "A lighthouse keeper wrote every evening what the sea had done that day.",
    "The library was built where two roads met, long before the town had a name.",
    "Bread rises because yeast eats sugar and gives off a gas that cannot escape.",
    "When snow melts in the mountains, the rivers below them carry more water.",
)


def main() -> int:
    """Measure; print a table."""
    args = _parser().parse_args()
    args.speculative = args.speculative or "ngram"
    folder, name = resolve_model(args.model)
    config = EngineConfig(
        model=str(folder), device=args.device, overlap_depth=num_steps_in_flight(args.overlap),
        enable_prefix_caching=False, max_model_len=args.max_model_len, speculative=speculative_of(args),
    )  # fmt: skip
    loaded = load_engine(config, lambda stage: None)
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    report: Report = {
        "benchmark": "speculation",
        "date": now(),
        "model": name,
        "versions": versions(),
        "facts": loaded.facts,
        "args": {flag: value for flag, value in vars(args).items() if flag != "json"} | {"depth": loaded.overlap_depth},
        "workloads": {},
    }
    for kind in ("copy", "prose"):
        for num_requests in args.requests:
            prompts = [tokenizer.encode(_text(kind, i)).ids for i in range(num_requests)]
            report["workloads"][f"{kind}-{num_requests}"] = measure(loaded, prompts, args.output_len, runs=args.runs)
    print(format_report(report))
    if args.json:
        write_report(args.json, report)
    return 0


def measure(loaded: LoadedEngine, prompts: list[list[int]], output_len: int, *, runs: int) -> Report:
    """Run the prompts `runs` times each way, after a warm-up; return the best of each, and the counts of drafts."""
    plain = dataclasses.replace(loaded, speculative=None)
    _run(loaded, prompts, 8)
    results = [(_run(plain, prompts, output_len), _run(loaded, prompts, output_len)) for _ in range(runs)]
    (without, with_drafts), equal = results[-1], [a["answers"] == b["answers"] for a, b in results]
    report: Report = {"num_requests": len(prompts), "num_output_tokens": len(prompts) * output_len}
    for name, way, picked in (("without", 0, without), ("with", 1, with_drafts)):
        best = {key: min(pair[way][key] for pair in results) for key in ("seconds", "cpu_seconds")}
        rate = report["num_output_tokens"] / best["seconds"]
        report[name] = best | {"tok_per_s": rate, "num_steps": picked["num_steps"]}
    report["num_draft_tokens"] = with_drafts["num_draft_tokens"]
    report["num_accepted_tokens"] = with_drafts["num_accepted_tokens"]
    report["speedup"] = report["without"]["seconds"] / report["with"]["seconds"]
    report["cpu_speedup"] = report["without"]["cpu_seconds"] / report["with"]["cpu_seconds"]
    report["answers_equal"] = all(equal)
    return report


def format_report(report: Report) -> str:
    """Return a row per workload."""
    rows = [["workload", "tok/s without", "with", "speed-up", "of CPU time", "steps", "with", "accepted", "equal"]]
    for name, result in report["workloads"].items():
        without, drafted = result["without"], result["with"]
        accepted = f"{result['num_accepted_tokens']:,} of {result['num_draft_tokens']:,}"
        rates = [f"{without['tok_per_s']:,.0f}", f"{drafted['tok_per_s']:,.0f}"]
        gains = [f"{result['speedup']:.2f}", f"{result['cpu_speedup']:.2f}"]
        steps = [f"{without['num_steps']:,}", f"{drafted['num_steps']:,}"]
        rows.append([name, *rates, *gains, *steps, accepted, "yes" if result["answers_equal"] else "no"])
    return format_table(rows)


def _run(loaded: LoadedEngine, prompts: list[list[int]], output_len: int) -> Report:
    offline = OfflineEngine(loaded)
    params = [SamplingParams(max_tokens=output_len, temperature=0.0)] * len(prompts)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    generations = offline.generate(prompts, params)
    seconds, cpu_seconds = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    scheduler = offline.engine.scheduler
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "num_steps": scheduler.committed_step_id + 1,
        "num_draft_tokens": scheduler.drafts.num_tokens,
        "num_accepted_tokens": scheduler.drafts.num_accepted,
        "answers": [generation.token_ids for generation in generations],
    }


def _text(kind: str, index: int) -> str:
    if kind == "prose":
        return _PROSE[index % len(_PROSE)]
    words = _WORDS.split()
    turned = " ".join(words[index % len(words) :] + words[: index % len(words)])
    return f"{turned}, {turned}, {turned}, "


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--model", default=None, help="folder in Hugging Face layout, or hub id (the demo model)")
    parser.add_argument("--device", default="auto")
    add_overlap_flag(parser)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16], help="at once")
    parser.add_argument("--output-len", type=int, default=160)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", default="")
    add_speculative_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
