"""Measures every quantisation scheme on trained weights: error of its layers, and of its logits along answers.

The unquantised model answers questions of the demo's corpus greedily; then each scheme reads prompts and answers, and
is compared at every token of the answers. Weights are quantised by the scheme's own code: on load, or as a checkpoint
written by benchmarks/quantized_weights.py (rounded to nearest, without the search of AWQ and GPTQ).
"""

from __future__ import annotations

import copy
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.demo_model.corpus.base import Question
from benchmarks.demo_model.corpus.mixture import examination
from benchmarks.demo_model.score import choose, encode
from benchmarks.quantization_reference import Conversation, Reference, layers_of, load, read
from benchmarks.quantization_schemes import SCHEMES, Candidate
from benchmarks.quantized_weights import requantize, store_of
from benchmarks.report import Report, format_table
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.device_choice import resolve_device
from models.build import Model
from models.config.model_config import ModelConfig
from models.errors import ModelError
from server.text.generation_defaults import load_generation_defaults
from server.text.tokenizer import load_tokenizer

_NUM_CALIBRATING = 8  # questions used for calibration, to measure the size of inputs; none is compared
_MEMORY_SHARE = 0.5  # of the device, for the engine that generates the answers


def choose_questions(num_answers: int) -> tuple[list[Question], list[Question]]:
    """Choose questions of all skills to compare answers to, and others to calibrate with."""
    chosen = random.Random(0).sample(choose(examination(0), 1), num_answers + _NUM_CALIBRATING)
    return chosen[:num_answers], chosen[num_answers:]


def measure_trained(
    schemes: Sequence[str],
    folder: Path,
    questions: Sequence[Question],
    *,
    calibrating: Sequence[Question],
    device: str,
    max_tokens: int,
) -> Report:
    """Measure all schemes: {"answers", "tokens", "dtype", "schemes"}; a failed scheme has its error."""
    asked, others = converse(folder, questions, calibrating=calibrating, device=device, max_tokens=max_tokens)
    reference = Reference.of(folder, asked, others, device=resolve_device(device))
    results: Report = {}
    for name in schemes:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            results[name] = measure_scheme(SCHEMES[name], reference)
        except ModelError as error:
            results[name] = {"failed": str(error)}
    return {
        "device": reference.device.type,
        "dtype": str(reference.dtype).removeprefix("torch."),
        "answers": len(reference.conversations),
        "tokens": sum(len(logits) for logits in reference.logits),
        "schemes": results,
    }


def measure_scheme(candidate: Candidate, reference: Reference) -> Report:
    """Make the scheme's model and compare it. Raises ModelError if it does not support the model's shapes."""
    candidate = fitted(candidate, ModelConfig.from_folder(reference.folder))
    with tempfile.TemporaryDirectory() as scratch:
        folder = reference.folder
        if candidate.section is not None:
            store = store_of(candidate.section, reference.amax_of)
            folder = requantize(folder, Path(scratch) / "stored", store, candidate.section)
        config = ModelConfig.from_folder(folder).quantized(candidate.flag)
        model = load(folder, candidate.flag, device=reference.device, dtype=reference.dtype)
    return {
        "describe": "unquantized" if config.quantization is None else config.quantization.describe(),
        "errors": compare_layers(model, reference),
        **compare_logits(model, config, reference),
    }


def fitted(candidate: Candidate, model: ModelConfig) -> Candidate:
    """Return the scheme with the largest groups, up to its own, that divide the inputs of every layer."""
    if candidate.section is None:
        return candidate
    section = copy.deepcopy(dict(candidate.section))
    owner = section["config_groups"]["group_0"]["weights"] if "config_groups" in section else section
    size = owner.get("group_size")
    if size is not None:
        owner["group_size"] = math.gcd(
            size, model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
        )
    return replace(candidate, section=section)


def compare_layers(model: Model, reference: Reference) -> dict[str, float]:
    """Return each kind of layer's relative error on the unquantised model's inputs, the mean over its layers."""
    own, theirs = layers_of(model), layers_of(reference.model)
    errors: dict[str, list[float]] = {}
    with torch.inference_mode():
        for name, x in reference.inputs.items():
            kind = ".".join(name.split(".")[-2:])
            errors.setdefault(kind, []).append(relative_error(own[name](x), theirs[name](x)))
    return {kind: sum(values) / len(values) for kind, values in errors.items()}


def compare_logits(model: Model, config: ModelConfig, reference: Reference) -> Report:
    """Return relative error, KL divergence in nats, and the share of equal most likely tokens, over all answers."""
    found = [
        read(model, config, conversation.token_ids, reference).logits[conversation.answered]
        for conversation in reference.conversations
    ]
    is_same = [one.argmax(-1) == other.argmax(-1) for one, other in zip(found, reference.logits, strict=True)]
    logits, expected = torch.cat(found).double(), torch.cat(reference.logits).double()
    log_q, log_p = logits.log_softmax(-1), expected.log_softmax(-1)
    return {
        "logits_error": relative_error(logits, expected),
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "same_tokens": float(torch.cat(is_same).double().mean()),
        "same_answers": sum(bool(same.all()) for same in is_same),
    }


def converse(
    folder: Path, questions: Sequence[Question], *, calibrating: Sequence[Question], device: str, max_tokens: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Return the conversations to compare, and those to calibrate with, prompts only. Raises StartupError."""
    tokenizer = load_tokenizer(folder)
    prompts, others = ([encode(tokenizer, question) for question in some] for some in (questions, calibrating))
    config = EngineConfig(
        model=str(folder),
        device=device,
        max_model_len=max(map(len, prompts)) + max_tokens,
        gpu_memory_utilization=_MEMORY_SHARE,
        enable_prefix_caching=False,
    )
    ends = load_generation_defaults(folder, tokenizer_eos_id=tokenizer.eos_id).eos_token_ids
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=list(ends))
    compared = []
    generations = OfflineEngine.load(config).generate(prompts, [params] * len(prompts))
    for prompt, generation in zip(prompts, generations, strict=True):
        if generation.error is not None:
            raise RuntimeError(generation.error.message)
        answer = [token_id for token_id in generation.token_ids if token_id not in ends]
        compared.append(Conversation(prompt + answer, len(prompt)))
    return compared, [Conversation(prompt, len(prompt)) for prompt in others]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of the whole tensor, by its norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def format_trained(report: Report) -> str:
    """A row per scheme."""
    rows = [["scheme", "layers", "logits", "KL", "same tokens", "same answers"]]
    for name, result in report["schemes"].items():
        if "failed" in result:
            rows.append([name, f"failed: {result['failed']}", *[""] * 4])
            continue
        shares = [max(result["errors"].values()), result["logits_error"]]
        same = [f"{result['same_tokens']:.2%}", f"{result['same_answers']} of {report['answers']}"]
        rows.append([name, *(f"{share:.2%}" for share in shares), f"{result['kl']:.5f}", *same])
    return format_table(rows)
