"""Trains the demo model: `python -m benchmarks.demo_model.train --out FOLDER [--minutes M]`.

The corpus is a function of the seed, made by all cores before the first step. The model is a Qwen3 from transformers,
trained with AdamW (arXiv:1711.05101) over float32 weights, bfloat16 products on CUDA, and a cosine schedule from the
peak to zero over the steps or the minutes, whichever end first. FOLDER is a whole checkpoint, saved every few minutes;
--resume continues it. All rows are on the device before the first step, and only the log line every few steps syncs.
Imports torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
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
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.demo_model.corpus.mixture import stream
from benchmarks.demo_model.dataset import (
    END_OF_TEXT,
    MAX_MODEL_LEN,
    TURN_END,
    Kind,
    Rows,
    Stream,
    documents,
    make_rows,
    save_tokenizer,
    shard_seed,
    train_tokenizer,
)

_TOKENIZER_DIALOGUES = 60_000
_NUM_UNSEEN = 4096
_UNSEEN = 999_983  # the shard whose dialogues measure the loss; not trained on
_SAVE_EVERY_S = 150.0
_LOG_EVERY_STEPS = 50
_VALIDATE_EVERY_STEPS = 250


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, except the corpus's text and the hardware."""

    shape: str = "full"
    num_dialogues: int = 3_000_000
    steps: int = 20_000
    minutes: float = 1440.0  # of wall-clock time, generation of the corpus included
    row_tokens: int = 512
    batch_tokens: int = 65_536
    learning_rate: float = 3e-3
    warm_up_steps: int = 200
    weight_decay: float = 0.1
    context_weight: float = 0.1  # weight of the text of users, tools and the system; answers have 1
    seed: int = 0


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
    generation = {
        "do_sample": True,
        "eos_token_id": ends,
        "max_new_tokens": 512,  # some answers do not end by themselves
        "pad_token_id": ends[1],
        "temperature": 0.3,
        "top_p": 0.95,
    }
    _write_json(folder / "generation_config.json", generation)


class Trainer:
    """One training run over rows. Life: __init__ → run, until the end of its schedule."""

    def __init__(
        self,
        recipe: Recipe,
        model: Qwen3ForCausalLM,
        rows: Rows,
        unseen: Rows,
        device: torch.device,
        *,
        is_compiled: bool = False,
    ) -> None:
        self.recipe, self.device = recipe, device
        self.model = model.to(device).train()  # type: ignore[arg-type]  # transformers wraps `to` without its self
        self.optimizer = _optimizer(self.model, recipe, is_fused=device.type == "cuda")
        self.rows_per_step = min(recipe.batch_tokens // recipe.row_tokens, len(rows.tokens), len(unseen.tokens))
        self.tokens = torch.from_numpy(rows.tokens.astype(np.int16)).to(device)
        self.kinds = torch.from_numpy(rows.kinds).to(device)
        self.unseen = tuple(
            torch.from_numpy(array[: self.rows_per_step].astype(kind)).to(device)
            for array, kind in ((unseen.tokens, np.int64), (unseen.kinds, np.uint8))
        )
        self.losses = torch.compile(losses) if is_compiled else losses
        self.step = 0
        self.elapsed_s = 0.0  # in training, earlier parts of a resumed run included
        self.curve: list[dict[str, float]] = []

    def run(self, deadline_s: float, *, save: Callable[[], None]) -> None:
        """Train until the steps are done or time.monotonic() is `deadline_s`. save: called every few minutes."""
        self._forward(*self.unseen)[0].backward()  # compiles, before the clock starts
        self.optimizer.zero_grad()
        earlier_s, started_s, saved_s = self.elapsed_s, time.monotonic(), time.monotonic()
        budget_s = max(earlier_s + deadline_s - started_s, 1e-9)
        recent: list[torch.Tensor] = []
        for tokens, kinds in self._batches():
            share = max(self.step / self.recipe.steps, self.elapsed_s / budget_s)
            if share >= 1.0:
                break
            recent.append(self._update(tokens, kinds, share))
            self.step += 1
            if self.step % _LOG_EVERY_STEPS == 0:  # the only sync with the device
                self._log(torch.stack(recent).mean().item())
                recent.clear()
            self.elapsed_s = earlier_s + time.monotonic() - started_s
            if time.monotonic() - saved_s > _SAVE_EVERY_S:
                save()
                saved_s = time.monotonic()
        if recent:
            self._log(torch.stack(recent).mean().item())
        if self.curve:
            self.curve[-1].setdefault("unseen_loss", self._unseen_loss())

    def state(self) -> dict[str, Any]:
        """Return all that `resume` needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "curve": self.curve,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the `state` of an interrupted run."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed_s, self.curve = state["step"], state["elapsed_s"], state["curve"]

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        per_epoch = len(self.tokens) // self.rows_per_step
        while True:
            epoch, first = divmod(self.step, per_epoch)
            generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
            order = torch.randperm(len(self.tokens), generator=generator).to(self.device)
            for index in range(first, per_epoch):
                chosen = order[index * self.rows_per_step : (index + 1) * self.rows_per_step]
                yield self.tokens[chosen].long(), self.kinds[chosen]

    def _update(self, tokens: torch.Tensor, kinds: torch.Tensor, share: float) -> torch.Tensor:
        warm_up = min(1.0, (self.step + 1) / self.recipe.warm_up_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * warm_up * 0.5 * (1.0 + math.cos(math.pi * share))
        loss, answer_loss = self._forward(tokens, kinds)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return answer_loss.detach()

    def _forward(self, tokens: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with _bfloat16(self.device):
            return self.losses(self.model, tokens, kinds, self.recipe.context_weight)

    def _unseen_loss(self) -> float:
        return self._forward(*self.unseen)[1].item()  # the same call as in training, so nothing compiles anew

    def _log(self, answer_loss: float) -> None:
        num_tokens = self.step * self.rows_per_step * self.recipe.row_tokens
        point = {"step": self.step, "tokens": num_tokens, "seconds": round(self.elapsed_s, 1), "loss": answer_loss}
        if self.step % _VALIDATE_EVERY_STEPS == 0:
            point["unseen_loss"] = self._unseen_loss()
        self.curve.append(point)
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in point.items() if name.endswith("loss"))
        rate = num_tokens / max(self.elapsed_s, 1e-9)
        print(f"{self.elapsed_s:7.1f} s  step {self.step:6d}  {numbers}  {rate:,.0f} tokens/s", flush=True)


def losses(
    model: Qwen3ForCausalLM, tokens: torch.Tensor, kinds: torch.Tensor, context_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training loss, and the loss of answers alone. tokens: [rows, row_tokens] int64; kinds: uint8.

    A document attends only to itself. Positions continue through the row: RoPE depends only on distances.
    """
    document = (kinds == Kind.FIRST.value).cumsum(1)
    sees = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    dtype = torch.bfloat16 if tokens.is_cuda else torch.float32  # of the residual stream too: it is served so
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, torch.finfo(dtype).min)
    embedded = model.model.embed_tokens(tokens).to(dtype)
    output = model.model(inputs_embeds=embedded, attention_mask={"full_attention": mask}, use_cache=False)
    logits = model.lm_head(output.last_hidden_state[:, :-1]).float().flatten(0, 1)
    entropy = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
    is_answer = (kinds[:, 1:] == Kind.TARGET.value).flatten().float()
    weights = is_answer + context_weight * (kinds[:, 1:] == Kind.CONTEXT.value).flatten()
    return (entropy * weights).sum() / weights.sum(), (entropy * is_answer).sum() / is_answer.sum()


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
    """Make the corpus, train, fill the folder `out`; return the contents of training.json."""
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
    """Return the training rows, and the rows that measure the loss."""
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


def _optimizer(model: Qwen3ForCausalLM, recipe: Recipe, *, is_fused: bool) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=is_fused)


def _bfloat16(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


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
