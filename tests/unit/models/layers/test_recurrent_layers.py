"""Recurrent layers but the gated delta net: long prompts however they are cut, and drafts that are rejected."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from kernels.states import StateMetadata
from models.config.model_config import ModelConfig
from models.context import DraftRing, ForwardContext, StepStates
from models.layers.kimi_delta import KimiDelta
from models.layers.mamba2 import Mamba2
from models.layers.short_conv import ShortConv
from tests.support.checkpoints import make_config
from tests.support.models_harness import PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

KINDS = ("lfm2", "lfm2_moe", "granite_hybrid", "bamba_biases", "falcon_h1", "nemotron_3")
LENGTH = 560
PROMPT = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
NUM_DRAFTS = 2
MIXERS = (ShortConv, Mamba2, KimiDelta)
LAYERS = ("lfm2", "lfm2_biases", "granite_hybrid", "falcon_h1_norm_first", "nemotron_h", "kimi_linear")


@functools.cache
def model_of(kind: str) -> tuple[torch.nn.Module, ModelConfig, torch.Tensor]:
    """Return our model, its config, and transformers' logits of the prompt."""
    with tempfile.TemporaryDirectory() as name:
        folder, config = Path(name), make_config(kind)
        config.max_position_embeddings = 640
        save_checkpoint(folder, config)
        return load(folder), ModelConfig.from_folder(folder), reference_logits(folder, PROMPT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1,) * 70 + (490,), (64,) * 9, (63, 65, 2, 130, 300), (512, 48), (LENGTH,)])
@pytest.mark.table(most=6)
@pytest.mark.slow
def test_a_long_prompt_in_chunks(kind: str, sizes: tuple[int, ...]) -> None:
    model, config, expected = model_of(kind)
    runner = PagedRunner(model, config, block_size=16)
    row, start, logits = runner.add_row(), 0, []
    for size in sizes:
        logits += runner.step([(row, PROMPT[start : start + size])])
        start += size
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_sixteen_rows_at_once(kind: str) -> None:
    model, config, expected = model_of(kind)
    runner = PagedRunner(model, config)
    lengths = [1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 20, 26]
    rows = [runner.add_row() for _ in lengths]
    first = runner.step([(row, PROMPT[:length]) for row, length in zip(rows, lengths, strict=True)])
    second = runner.step([(row, [PROMPT[length]]) for row, length in zip(rows, lengths, strict=True)])
    for length, *logits in zip(lengths, first, second, strict=True):
        torch.testing.assert_close(torch.cat(logits), expected[: length + 1], atol=1e-4, rtol=0)


class Layer:
    """The first recurrent layer of a model over one request's state, and its ring of drafts."""

    def __init__(self, folder: Path, kind: str) -> None:
        save_checkpoint(folder, make_config(kind))
        config = ModelConfig.from_folder(folder)
        self.index = next(layer for layer, state in enumerate(config.states) if state is not None)
        state = config.states[self.index]
        assert state is not None
        self.module = next(module for module in load(folder).modules() if isinstance(module, MIXERS))
        runner = PagedRunner(torch.nn.Module(), config)
        self.views, self.pages = runner.state_views, runner.state_pages
        self.ring = torch.zeros(NUM_DRAFTS + 1, state.num_inputs)
        self.hidden_size = config.hidden_size

    def metadata(self, *, end: int, num_tokens: int, writes: bool, most: int | None = None) -> StateMetadata:
        """Return one row of the request that ends at token `end`; most: the bound of its tokens, if it is larger."""
        return StateMetadata(
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            req_index=torch.tensor([0], dtype=torch.int32),
            pages=self.pages,
            writes=torch.tensor([int(writes)], dtype=torch.int32),
            max_query_len=most or num_tokens,
            num_decodes=None if most else int(num_tokens == 1),
        )

    def run(self, hidden: torch.Tensor, start: int, *, settled: tuple[int, int], has_drafts: bool) -> torch.Tensor:
        """Compute tokens from `start` after settling the ring's first tokens, those of positions `settled`."""
        first, end = settled
        kept = torch.arange(len(hidden) if has_drafts else 1)
        ring = DraftRing(
            inputs=[self.ring if layer == self.index else None for layer in range(len(self.views))],
            source=torch.arange(NUM_DRAFTS + 1),
            settling=self.metadata(end=end, num_tokens=end - first, writes=True, most=NUM_DRAFTS + 1),
            tokens=kept,
            target=kept,
        )
        rows = self.metadata(end=start + len(hidden), num_tokens=len(hidden), writes=not has_drafts)
        states = StepStates(self.views, rows, ring)
        with torch.inference_mode():
            ctx = ForwardContext(torch.arange(len(hidden)), [], None, [], states=states)  # type: ignore[arg-type]
            return self.module(hidden, ctx)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("num_true", [1, 2, 3])
def test_a_rejected_draft_never_enters_a_state(kind: str, num_true: int, tmp_path: Path) -> None:
    layer = Layer(tmp_path, kind)
    generator = torch.Generator().manual_seed(3)
    tokens, wrong = torch.randn(12, layer.hidden_size, generator=generator), torch.randn(3, layer.hidden_size)
    whole = layer.run(tokens, 0, settled=(0, 0), has_drafts=False)
    start = layer.run(tokens[:6], 0, settled=(0, 0), has_drafts=False)
    drafted = torch.cat((tokens[6 : 6 + num_true], wrong[num_true:]))
    guessed = layer.run(drafted, 6, settled=(0, 0), has_drafts=True)
    rest = layer.run(tokens[6 + num_true :], 6 + num_true, settled=(6, 6 + num_true), has_drafts=False)
    torch.testing.assert_close(torch.cat((start, guessed[:num_true], rest)), whole, atol=1e-5, rtol=0)
