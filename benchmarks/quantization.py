"""Every quantisation scheme on one model's shapes: error of its layers, GiB of weights, tokens/s of decoding.

    python -m benchmarks.quantization --json out.json                      all schemes, Llama 3.1 8B, random weights
    python -m benchmarks.quantization --schemes bf16 nf4 --batches 1 8     some of them
    python -m benchmarks.quantization --model ./folder --device cpu        another config.json, a smoke test
    python -m benchmarks.quantization --trained --device cpu               errors on trained weights: the demo's

A scheme is a row of SCHEMES. Each runs in its own process, so that none shares another's memory. The error is that of
each layer's product for normal inputs, relative to the product in the model's dtype; random weights are normal, so it
does not cover outliers. --trained measures a trained model's layers and logits; its code and questions are in
benchmarks/demo_model, which only a checkout has.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.offline import versions
from benchmarks.quantization_schemes import SCHEMES
from benchmarks.report import Report, format_table, now, write_report
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.device_choice import resolve_device, resolve_dtype
from models.config.model_config import ModelConfig
from models.layers.linear import make_linear_method
from models.quantization.linear_method import LinearPart
from models.quantization.schemes import Unquantized
from models.weights.weights import Weights
from server.config.model_source import DEMO_FOLDER

_SHAPES = Path(__file__).parent / "shapes"
_GIB = 1024**3
_ERROR_ROWS = 64  # of normal inputs
_MAX_ANSWERS = 150  # fewer than the demo's corpus has kinds of questions
_SHORT, _LONG = 8, 136  # tokens generated in the two runs whose difference is timed


def main() -> int:
    """Measure each scheme in its own process; print a table and write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantization", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(_SHAPES / "llama-3.1-8b"), help="folder whose config.json says the shapes"
    )
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--trained", nargs="?", type=Path, const=DEMO_FOLDER, help="compare on this folder's weights, and time nothing"
    )
    parser.add_argument("--answers", type=int, default=100, help=f"with --trained: how many, 1 to {_MAX_ANSWERS}")
    parser.add_argument("--max-tokens", type=int, default=96, help="with --trained: of an answer")
    parser.add_argument("--json", default="")
    parser.add_argument("--inner", default="", help=argparse.SUPPRESS)  # where a child process writes its measurements
    args = parser.parse_args()
    if not 1 <= args.answers <= _MAX_ANSWERS:
        parser.error(f"--answers must be 1 to {_MAX_ANSWERS}, found {args.answers}")
    if args.trained and importlib.util.find_spec("benchmarks.demo_model") is None:
        parser.error("--trained asks the questions of benchmarks/demo_model, which only a checkout of Quire has")
    if args.inner:
        results = measure(args.schemes[0], Path(args.model), batches=args.batches, device=args.device)
        Path(args.inner).write_text(json.dumps(results))
        return 0
    report: Report = {"benchmark": "quantization", "date": now(), "versions": versions()}
    if args.trained:
        from benchmarks.demo_model.quantization import choose_questions, format_trained, measure_trained

        report |= {"benchmark": "quantization-trained", "model": _name(args.trained)}
        questions, others = choose_questions(args.answers)
        report |= measure_trained(
            args.schemes,
            args.trained,
            questions,
            calibrating=others,
            device=args.device,
            max_tokens=args.max_tokens,
        )
        print(format_trained(report))
    else:
        given = {"model": _name(Path(args.model)), "batches": args.batches, "device": args.device}
        report |= {"args": given, "schemes": {name: _measure_apart(name, args) for name in args.schemes}}
        print(format_report(report))
    if args.json:
        write_report(args.json, report)
    return 1 if any("failed" in result for result in report["schemes"].values()) else 0


def measure(name: str, folder: Path, *, batches: list[int], device: str) -> Report:
    """Measure one scheme, in this process."""
    candidate = SCHEMES[name]
    with tempfile.TemporaryDirectory() as scratch:
        raw = json.loads((folder / "config.json").read_text())
        (Path(scratch) / "config.json").write_text(json.dumps(raw | {"quantization_config": candidate.section}))
        config = EngineConfig(
            model=scratch,
            load_format="dummy",
            device=device,
            quantization=candidate.flag,
            max_model_len=min(1024, ModelConfig.from_folder(folder).max_context_len),
            max_num_seqs=max(batches),
            enable_prefix_caching=False,
        )
        errors = measure_errors(config)
        started_s = time.perf_counter()
        offline = OfflineEngine.load(config)
        load_s = time.perf_counter() - started_s
        offline.self_test()
        model = ModelConfig.from_folder(Path(scratch)).quantized(candidate.flag)
    runner = offline.loaded.runner
    return {
        "describe": offline.loaded.facts.get("Quantization", "unquantized"),
        "weights_gib": model.weight_bytes(resolve_dtype("auto", model, runner.device), runner.device) / _GIB,
        "errors": errors,
        "load_s": load_s,
        "decode_tok_per_s": {str(batch): measure_decode(offline, batch) for batch in batches},
        "peak_gib": torch.cuda.max_memory_allocated() / _GIB if runner.device.type == "cuda" else None,
    }


def measure_errors(config: EngineConfig) -> dict[str, float]:
    """Return the relative error of each kind of layer, by name."""
    model = ModelConfig.from_folder(Path(config.model)).quantized(config.quantization)
    device = resolve_device(config.device)
    w = Weights.dummy(device=device, dtype=resolve_dtype(config.dtype, model, device))
    methods = (make_linear_method(model), Unquantized())
    hidden, wide, heads = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    errors = {}
    for name, (out_features, in_features) in shapes.items():
        block, _, projection = name.partition(".")
        part = LinearPart(projection, out_features, in_features, dim=0, rank=0, size=1)
        x = torch.randn(_ERROR_ROWS, in_features, device=device).to(w.dtype)
        with torch.inference_mode():
            layer = w / "model.layers.0" / block
            found, expected = (method.apply(method.load(layer, [part]), x, None).double() for method in methods)
        errors[name] = float((found - expected).norm() / expected.norm())
    return errors


def measure_decode(offline: OfflineEngine, batch: int) -> float:
    """Return tokens per second of `batch` requests that decode together, without prompts and start."""
    _run_s(offline, batch, _SHORT)
    short_s, long_s = (min(_run_s(offline, batch, count) for _ in range(2)) for count in (_SHORT, _LONG))
    return batch * (_LONG - _SHORT) / (long_s - short_s)


def format_report(report: Report) -> str:
    """Return a row per scheme."""
    batches = report["args"]["batches"]
    rows = [["scheme", "GiB", "error", *(f"tok/s × {batch}" for batch in batches)]]
    for name, result in report["schemes"].items():
        if "failed" in result:
            rows.append([name, "failed", *[""] * (len(batches) + 1)])
            continue
        rates = [f"{result['decode_tok_per_s'][str(batch)]:,.0f}" for batch in batches]
        rows.append([name, f"{result['weights_gib']:.2f}", f"{max(result['errors'].values()):.2%}", *rates])
    return format_table(rows)


def _name(folder: Path) -> str:
    return "demo" if folder == DEMO_FOLDER else folder.resolve().name


def _measure_apart(name: str, args: argparse.Namespace) -> Report:
    print(f"{name} …", file=sys.stderr, flush=True)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.quantization", "--inner", file.name, "--schemes", name]
        command += ["--model", args.model, "--device", args.device, "--batches", *map(str, args.batches)]
        child = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if child.returncode != 0:
            print(child.stderr[-4000:], file=sys.stderr)
            return {"failed": child.stderr.strip().rpartition("\n")[2]}
        return json.loads(Path(file.name).read_text())


def _run_s(offline: OfflineEngine, batch: int, num_tokens: int) -> float:
    params = [SamplingParams(max_tokens=num_tokens, temperature=0.0)] * batch
    started_s = time.perf_counter()
    generations = offline.generate([[1 + i % 97, 5, 9] for i in range(batch)], params)
    seconds = time.perf_counter() - started_s
    failed = [generation.error.message for generation in generations if generation.error is not None]
    if failed:
        raise RuntimeError(failed[0])
    return seconds


if __name__ == "__main__":
    sys.exit(main())
