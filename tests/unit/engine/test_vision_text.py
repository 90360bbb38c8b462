"""The text of models that also see, through the whole engine: greedy text equals transformers'."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.vision_checkpoints import VISION_MODELS, fill

NUM_TOKENS = 30
PROMPTS = [[3, 80, 17, 4], [*range(5, 30)]]


@pytest.mark.parametrize("make", VISION_MODELS)
@pytest.mark.table(most=3)
def test_greedy_text_of_a_model_that_sees_equals_transformers(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    fill(model)
    model.save_pretrained(tmp_path)
    settings = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "device": "cpu"}
    offline = OfflineEngine.load(EngineConfig(model=str(tmp_path), **settings))
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)] * len(PROMPTS)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generations = offline.generate(PROMPTS, params)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        input_ids = torch.tensor([prompt])
        theirs = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)[0, len(prompt) :]
        assert generation.token_ids == theirs.tolist()
    assert len({token_id for generation in generations for token_id in generation.token_ids}) > 3
