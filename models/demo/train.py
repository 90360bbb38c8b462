"""Trains the demo model: `python -m models.demo.train --out FOLDER [--minutes M]`. Imports torch and transformers.

The corpus is a function of the seed, made by all cores before the first step. A Qwen3 from transformers learns it:
AdamW (arXiv:1711.05101) over float32 weights, bfloat16 products on CUDA, a cosine from the peak down to nothing over
the steps or the minutes, whichever end first. FOLDER is a whole checkpoint every few minutes, and --resume goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.demo.corpus.mixture import stream
from models.demo.documents import Kind, Rows, Stream, documents, make_rows, shard_seed
from models.demo.tokenizer import END_OF_TEXT, MAX_MODEL_LEN, TURN_END, save_tokenizer, train_tokenizer
from models.demo.trainer import Recipe, Trainer

_TOKENIZER_DIALOGUES = 60_000
_NUM_UNSEEN = 4096
_UNSEEN = 999_983  # the shard whose dialogues measure the loss, and are not learned


@dataclass(frozen=True)
class Shape:
    """A Qwen3's sizes. Even numbers of heads split over two ranks."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    "full": Shape(320, 768, 6, 6, 2, 64),
    "small": Shape(128, 384, 4, 4, 2, 32),
    "tiny": Shape(32, 64, 2, 2, 1, 16),
}


def make_model(shape: Shape, tokenizer: tokenizers.Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 with transformers' random weights."""
    torch.manual_seed(seed)
    end_of_text, turn_end = (tokenizer.token_to_id(token) for token in (END_OF_TEXT, TURN_END))
    config = Qwen3Config(
        vocab_size=-(-tokenizer.get_vocab_size() // 128) * 128,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        eos_token_id=turn_end,
        pad_token_id=end_of_text,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write model.safetensors in bfloat16, config.json and generation_config.json."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    config = model.config.to_diff_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    config.pop("_attn_implementation", None)
    _write_json(folder / "config.json", dict(sorted(config.items())))
    ends = [model.config.eos_token_id, model.config.pad_token_id]
    generation = {"do_sample": True, "eos_token_id": ends, "pad_token_id": ends[1], "temperature": 0.3, "top_p": 0.95}
    _write_json(folder / "generation_config.json", generation)


def train(
    recipe: Recipe,
    out: Path,
    *,
    stream: Stream,
    device: torch.device,
    num_processes: int,
    is_compiled: bool = False,
    is_resumed: bool = False,
) -> dict[str, Any]:
    """Make the corpus, train, fill the folder `out`; return what training.json says."""
    started_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(recipe, out, stream, is_resumed=is_resumed)
    rows, unseen = _rows(recipe, stream, tokenizer, num_processes=num_processes)
    corpus = _describe(rows)
    corpus_s = time.monotonic() - started_s
    print(
        f"corpus: {corpus}, made in {corpus_s:.1f} s; {tokenizer.get_vocab_size()} tokens in the vocabulary", flush=True
    )
    model = make_model(SHAPES[recipe.shape], tokenizer, recipe.seed)
    trainer = Trainer(recipe, model, rows, unseen, device, is_compiled=is_compiled)
    if is_resumed:
        trainer.resume(torch.load(out / "state.pt", map_location=device, weights_only=True))

    def report() -> dict[str, Any]:
        return {
            "recipe": asdict(recipe),
            "shape": asdict(SHAPES[recipe.shape]),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "corpus": corpus,
            "steps": trainer.step,
            "seconds": {"corpus": round(corpus_s, 1), "all": round(time.monotonic() - started_s, 1)},
            "hardware": _hardware(device),
            "versions": {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
            "curve": trainer.curve,
        }

    def save_all() -> None:
        save_model(model, out)
        _write_json(out / "training.json", report())
        torch.save(trainer.state(), out / "state.pt")

    trainer.run(started_s + recipe.minutes * 60, save=save_all)
    save_all()
    (out / "state.pt").unlink()
    return report()


def main() -> None:
    """Read the flags and train on the demo's corpus."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on with the interrupted run in the folder")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile the model on CUDA")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that make the corpus")
    parser.add_argument("--shape", choices=SHAPES, default=recipe.shape)
    parser.add_argument("--minutes", type=float, default=recipe.minutes, help="of wall-clock time, the corpus included")
    for name in ("steps", "num_dialogues", "row_tokens", "batch_tokens", "warm_up_steps", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(recipe, name))
    for name in ("learning_rate", "weight_decay", "context_weight"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(recipe, name))
    flags = vars(parser.parse_args())
    out, is_resumed, is_eager, num_processes = (flags.pop(name) for name in ("out", "resume", "eager", "processes"))
    name = flags.pop("device")
    device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    train(
        Recipe(**flags),
        out,
        stream=stream,
        device=device,
        num_processes=num_processes,
        is_compiled=device.type == "cuda" and not is_eager,
        is_resumed=is_resumed,
    )


def _tokenizer(recipe: Recipe, out: Path, stream: Stream, *, is_resumed: bool) -> tokenizers.Tokenizer:
    if is_resumed:
        return tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    dialogues = islice(stream(recipe.seed), min(_TOKENIZER_DIALOGUES, recipe.num_dialogues))
    tokenizer = train_tokenizer(documents(dialogues, Random(recipe.seed)))
    save_tokenizer(tokenizer, out)
    return tokenizer


def _rows(recipe: Recipe, stream: Stream, tokenizer: tokenizers.Tokenizer, *, num_processes: int) -> tuple[Rows, Rows]:
    """Return the rows to learn, and those that measure the loss."""
    num_dialogues, row_tokens = recipe.num_dialogues, recipe.row_tokens
    rows = make_rows(
        stream,
        tokenizer,
        seed=recipe.seed,
        num_dialogues=num_dialogues,
        row_tokens=row_tokens,
        num_processes=num_processes,
    )
    seed = shard_seed(recipe.seed, _UNSEEN)
    return rows, make_rows(
        stream, tokenizer, seed=seed, num_dialogues=min(num_dialogues, _NUM_UNSEEN), row_tokens=row_tokens
    )


def _describe(rows: Rows) -> dict[str, int]:
    kinds = np.bincount(rows.kinds.ravel(), minlength=len(Kind))
    return {
        "dialogues": rows.num_dialogues,
        "rows": len(rows.tokens),
        "tokens": int(rows.tokens.size),
        "answer_tokens": int(kinds[Kind.TARGET]),
    }


def _hardware(device: torch.device) -> str:
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    return f"{torch.cuda.get_device_name()}, {cores}" if device.type == "cuda" else cores


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
