"""The training loop of the demo model: rows, a schedule, a loss curve. Imports torch and transformers.

All rows are on the device before the first step, and nothing waits for it but the log's line every few steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

from models.demo.documents import Kind, Rows

_SAVE_EVERY_S = 150.0
_LOG_EVERY_STEPS = 50
_VALIDATE_EVERY_STEPS = 250


@dataclass(frozen=True)
class Recipe:
    """All that the weights depend on but the corpus's text and the hardware."""

    shape: str = "full"
    num_dialogues: int = 3_000_000
    steps: int = 20_000
    minutes: float = 1440.0  # of wall-clock time, the making of the corpus included
    row_tokens: int = 512
    batch_tokens: int = 65_536
    learning_rate: float = 3e-3
    warm_up_steps: int = 200
    weight_decay: float = 0.1
    context_weight: float = 0.1  # of what users, tools and the system say, against 1 for answers
    seed: int = 0


class Trainer:
    """One run: made from rows, `run` until the end of its schedule."""

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
        self.model = model.to(device).train()
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
            if self.step % _LOG_EVERY_STEPS == 0:  # the only place that waits for the device
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
        """Go on where the run that gave `state` was cut off."""
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
    """Return the loss to learn from, and that of answers alone. tokens: [rows, row_tokens] int64; kinds: uint8.

    A document sees only itself. Positions go on through the row: RoPE cares for distances alone.
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


def _optimizer(model: Qwen3ForCausalLM, recipe: Recipe, *, is_fused: bool) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=is_fused)


def _bfloat16(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
