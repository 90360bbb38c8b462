"""Latent attention through the engine: steps with expanded rows use no graph, others do, and texts are the same."""

from pathlib import Path

import pytest
import torch

from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from kernels.attention import latent
from kernels.attention.latent import LatentSizes
from tests.support.checkpoints import make_config
from tests.support.hybrid_model import PaddedMixed, pad_steps
from tests.support.reference import save_checkpoint

PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(length)] for i, length in enumerate((5, 33, 20, 50))]
PARAMS = [SamplingParams(max_tokens=12, temperature=0.0)] * len(PROMPTS)


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe_lite"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(path, make_config(request.param))
    return path


def _load(folder: Path, **changes: object) -> OfflineEngine:
    settings = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 4, "device": "cpu"} | changes
    return OfflineEngine.load(EngineConfig(model=str(folder), **settings))


def _texts(offline: OfflineEngine) -> list[list[int]]:
    return [generation.token_ids for generation in offline.generate(PROMPTS, PARAMS)]


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The forms that are computed meanwhile."""
    seen: set[str] = set()
    for name in ("_absorbed", "_expanded"):
        whole = getattr(latent, name)

        def note(*args: object, name: str = name, whole=whole, **options: object) -> torch.Tensor:
            seen.add(name)
            return whole(*args, **options)

        monkeypatch.setattr(latent, name, note)
    return seen


def _never_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentSizes, "expands", lambda self, row_lens, *, is_cuda: False)


def test_both_forms_give_the_same_text(folder: Path, forms: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _texts(_load(folder))
    assert forms == {"_absorbed", "_expanded"}
    forms.clear()
    _never_expanded(monkeypatch)
    assert _texts(_load(folder)) == expected
    assert _texts(pad_steps(_load(folder))) == expected  # as graphs have them
    assert forms == {"_absorbed"}


@pytest.mark.parametrize("is_expanded", [False, True])
def test_a_step_uses_a_graph_unless_rows_are_expanded(
    folder: Path, is_expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = []
    replay = PaddedMixed.replay

    def watch(self, packed, *, is_grouped):
        replayed.append(packed)
        return replay(self, packed, is_grouped=is_grouped)

    monkeypatch.setattr(PaddedMixed, "replay", watch)
    monkeypatch.setattr(LatentSizes, "expands", lambda self, row_lens, *, is_cuda: is_expanded)
    _texts(pad_steps(_load(folder)))
    assert bool(replayed) != is_expanded


def test_drafts_give_the_same_text(folder: Path, forms: set[str]) -> None:
    expected = _texts(_load(folder))
    offline = _load(folder, speculative=SpeculativeConfig(num_tokens=3))
    assert _texts(offline) == expected
    assert forms == {"_absorbed", "_expanded"}
