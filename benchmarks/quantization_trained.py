"""Every quantisation scheme on trained weights: error of its layers, and of its logits along a model's own answers.

The unquantised model answers questions of the demo's corpus greedily; then each scheme reads prompts and answers, and
is compared at every token of the answers. Weights become what the scheme is made of by its own code: on load, or as a
checkpoint written by benchmarks/quantized_weights.py (rounded to nearest: without what AWQ and GPTQ search for).
"""

from __future__ import annotations

import copy
import math
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.demo_score import choose, encode
from benchmarks.quantization_schemes import SCHEMES, Candidate
from benchmarks.quantized_weights import requantize, store_of
from benchmarks.report import Report, format_table
from engine.config import EngineConfig
from engine.device import resolve_device, resolve_dtype
from engine.offline import OfflineEngine
from engine.protocol import SamplingParams
from kernels.attention.base import AttentionMetadata
from kernels.attention.torch_ref import TorchAttention
from models.config import ModelConfig
from models.context import ForwardContext
from models.demo.corpus.base import Question
from models.demo.corpus.mixture import examination
from models.errors import ModelError
from models.parallel import TensorParallel
from models.registry import build
from models.weights import Weights
from server.model_info import load_generation_defaults
from server.tokenizer import load_tokenizer

_NUM_CALIBRATING = 8  # questions whose prompts say how large inputs are, none of them among the compared
_LAYER_ROWS = 8  # first tokens of each answer, at which layers are compared
_BLOCK = 16
_MEMORY_SHARE = 0.5  # of the device, for the engine that answers
MAX_ANSWERS = 150  # fewer than the corpus has kinds of questions


@dataclass(frozen=True)
class Conversation:
    """A prompt, and what the unquantised model answered."""

    token_ids: list[int]
    num_prompt: int

    @property
    def answered(self) -> slice:
        """Where a token of the answer is predicted, or the end after it."""
        return slice(self.num_prompt - 1, len(self.token_ids))


@dataclass(frozen=True)
class Reading:
    """What a model makes of a conversation."""

    # [tokens, vocab_size]
    logits: torch.Tensor
    # layer → [tokens, in]
    inputs: dict[str, torch.Tensor]


@dataclass
class Reference:
    """The unquantised model, and what it makes of each conversation."""

    folder: Path
    device: torch.device
    dtype: torch.dtype
    conversations: Sequence[Conversation]
    model: nn.Module
    # [tokens of the answer, vocab_size] each
    logits: list[torch.Tensor] = field(default_factory=list)
    # layer → [rows, in], its inputs at the beginnings of the answers
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    # layer → the largest magnitude of its inputs, on other conversations
    input_amax: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        folder: Path,
        conversations: Sequence[Conversation],
        others: Sequence[Conversation],
        *,
        device: torch.device,
    ) -> Reference:
        """Load the model, and keep what schemes are compared with. Raises ModelError."""
        config = ModelConfig.from_folder(folder)
        dtype = resolve_dtype("auto", config, device)
        found = cls(folder, device, dtype, conversations, load(folder, "none", device=device, dtype=dtype))
        for other in others:
            for name, x in read(found.model, config, other.token_ids, found).inputs.items():
                found.input_amax[name] = max(found.input_amax.get(name, 0.0), float(x.abs().amax()))
        kept: dict[str, list[torch.Tensor]] = {}
        for conversation in conversations:
            reading = read(found.model, config, conversation.token_ids, found)
            found.logits.append(reading.logits[conversation.answered])
            for name, x in reading.inputs.items():
                kept.setdefault(name, []).append(x[conversation.answered][:_LAYER_ROWS])
        found.inputs = {name: torch.cat(rows) for name, rows in kept.items()}
        return found

    def amax_of(self, projection: str) -> float:
        """The largest magnitude of the input of a projection that a checkpoint names so."""
        prefix, _, name = projection.rpartition(".")
        block = prefix.removeprefix("model.")
        for layer, amax in self.input_amax.items():
            owner, _, merged = layer.rpartition(".")
            if owner.endswith(f".{block}") and is_last(name) == is_last(merged):
                return amax
        raise ModelError(f"{projection}: no layer of the model has it")


def choose_questions(num_answers: int) -> tuple[list[Question], list[Question]]:
    """Questions of the corpus to compare answers to, of all skills, and others to calibrate with."""
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
    """Everything about the schemes: {"answers", "tokens", "dtype", "schemes"}, one that failed said as such."""
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
    """Make the scheme's model and compare it. Raises ModelError where it cannot have the model's shapes."""
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
    """The scheme with the largest groups, up to its own, that divide the inputs of every layer."""
    section = copy.deepcopy(candidate.section)
    if section is None:
        return candidate
    owner = section["config_groups"]["group_0"]["weights"] if "config_groups" in section else section
    size = owner.get("group_size")
    if size is not None:
        owner["group_size"] = math.gcd(
            size, model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
        )
    return replace(candidate, section=section)


def compare_layers(model: nn.Module, reference: Reference) -> dict[str, float]:
    """Relative error of each kind of layer on the unquantised model's inputs, in the mean over its layers."""
    own, theirs = layers_of(model), layers_of(reference.model)
    errors: dict[str, list[float]] = {}
    with torch.inference_mode():
        for name, x in reference.inputs.items():
            kind = ".".join(name.split(".")[-2:])
            errors.setdefault(kind, []).append(relative_error(own[name](x), theirs[name](x)))
    return {kind: sum(values) / len(values) for kind, values in errors.items()}


def compare_logits(model: nn.Module, config: ModelConfig, reference: Reference) -> Report:
    """Relative error, KL divergence in nats, and how often the likeliest token is the same, over all answers."""
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
    """The conversations to compare, and those to calibrate with, of prompts alone. Raises StartupError."""
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


def load(folder: Path, flag: str, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a model as the flag --quantization says. Raises ModelError."""
    config = ModelConfig.from_folder(folder).quantized(flag)
    with torch.inference_mode():
        return build(config, Weights.from_folder(folder, device=device, dtype=dtype), TensorParallel())


def layers_of(model: nn.Module) -> Mapping[str, nn.Module]:
    """The layers that a scheme may have, by name."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def is_last(projection: str) -> bool:
    """Whether a projection's input is what its block has made, not what the block is given."""
    return projection in ("o_proj", "down_proj")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole tensor, by its norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def read(model: nn.Module, config: ModelConfig, token_ids: list[int], reference: Reference) -> Reading:
    """Run a model over a conversation, as one prefill."""
    inputs: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor]], None]:
        return lambda module, arguments: inputs.update({name: arguments[0]})

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers_of(model).items()]
    with torch.inference_mode():
        logits = model.compute_logits(model.forward(*_plan(token_ids, config, reference)))
    for handle in handles:
        handle.remove()
    return Reading(logits, inputs)


def _plan(token_ids: list[int], config: ModelConfig, reference: Reference) -> tuple[torch.Tensor, ForwardContext]:
    """A step of one row whose blocks lie side by side."""
    device, num_tokens = reference.device, len(token_ids)
    num_blocks = -(-num_tokens // _BLOCK)
    shape = (num_blocks, _BLOCK, config.num_kv_heads_per_rank(1), config.head_dim)
    caches = [
        tuple(torch.zeros(shape, dtype=reference.dtype, device=device) for _ in range(2))
        for _ in range(config.num_layers)
    ]
    places = torch.arange(num_tokens, device=device)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_table=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=places,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        num_decodes=0,
    )
    input_ids = torch.tensor(token_ids, device=device)
    return input_ids, ForwardContext(places, metadata, TorchAttention(), caches)


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
