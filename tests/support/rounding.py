"""The error of a model in bf16, measured by transformers' own: both against transformers in float32.

The weights are rounded to bf16 before anything is computed, so they are equal in all three, and what differs is
arithmetic alone.

An error at one token is its largest over the vocabulary. The typical one, the median over the tokens of all prompts, is
compared closely. The worst one is not, and is that of the prompt whose worst token is best: a router's near-tie gives a
token other experts, and a norm over a head that reads almost nothing makes rounding large, in either implementation and
at a token of one prompt or another, while a fault at a boundary of steps is in every prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from models.config.model_config import ModelConfig
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

# One of each family (tests/support/checkpoints.py)
RECURRENT = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "nemotron_h", "nemotron_3", "granite_hybrid",
    "granite_hybrid_dense", "falcon_h1", "bamba", "lfm2", "lfm2_moe", "kimi_linear",
)  # fmt: skip
TYPICAL_FACTOR, WORST_FACTOR = 1.5, 2.5
FLOOR = 0.01  # a logit between 1 and 2 is rounded by 0.004; all of them are
NUM_TOKENS = 96  # more than a chunk of the delta rule, or of a scan
# The lengths of the steps that compute them
WAYS = {"whole": [96], "chunks": [13, 1, 30, 50, 2], "decode": [32, *[1] * 64]}
PROMPTS = torch.randint(0, 97, (3, NUM_TOKENS), generator=torch.Generator().manual_seed(7)).tolist()


@dataclass(frozen=True)
class RoundingError:
    """How far logits in bf16 are from those in float32, of the largest of each token."""

    typical: float  # the median over the tokens of all prompts
    worst: float  # that every prompt has

    @classmethod
    def of(cls, logits: torch.Tensor, exact: torch.Tensor) -> RoundingError:
        """logits, exact: [prompts, NUM_TOKENS, vocab_size]."""
        errors = (logits.float().cpu() - exact).abs().amax(-1)
        assert errors.isfinite().all()
        return cls(errors.median().item(), errors.amax(-1).min().item())

    def is_about(self, theirs: RoundingError) -> bool:
        """Whether it is no larger than another implementation's, but for chance."""
        return (
            self.typical <= TYPICAL_FACTOR * theirs.typical + FLOOR
            and self.worst <= WORST_FACTOR * theirs.worst + FLOOR
        )


def rounding_errors(
    folder: Path,
    config: transformers.PreTrainedConfig,
    device: torch.device = CPU,
    *,
    make_runner: Callable[..., PagedRunner] = PagedRunner,
) -> tuple[RoundingError, dict[str, RoundingError]]:
    """Return transformers' error, and ours by way of computing. folder: an empty one, for the checkpoint.

    config: of a vocabulary of 97 tokens or more. device: ours; transformers runs on the CPU.
    """
    config.max_position_embeddings = max(config.max_position_embeddings, NUM_TOKENS)
    save_checkpoint(folder, config)
    for file in folder.glob("*.safetensors"):
        rounded = {name: tensor.to(torch.bfloat16).to(tensor.dtype) for name, tensor in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    exact = torch.stack([reference_logits(folder, prompt) for prompt in PROMPTS])
    rounded_logits = [reference_logits(folder, prompt, dtype=torch.bfloat16) for prompt in PROMPTS]
    theirs = RoundingError.of(torch.stack(rounded_logits), exact)
    model, ours = load(folder, dtype=torch.bfloat16, device=device), {}
    for way, lengths in WAYS.items():
        logits = []
        for prompt in PROMPTS:
            runner = make_runner(model, ModelConfig.from_folder(folder), dtype=torch.bfloat16, device=device)
            row, chunks = runner.add_row(), torch.tensor(prompt).split(lengths)
            logits.append(torch.cat([runner.step([(row, chunk.tolist())])[0] for chunk in chunks]))
        ours[way] = RoundingError.of(torch.stack(logits), exact)
    return theirs, ours
