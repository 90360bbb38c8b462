"""The start says which attention backend was chosen and why, or why there is none."""

import pytest

from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.startup.load import load_engine
from server.config.model_source import DEMO_FOLDER

DEMO = str(DEMO_FOLDER)


def _fact(attention_backend: str) -> str:
    config = EngineConfig(model=DEMO, device="cpu", attention_backend=attention_backend)
    return load_engine(config, lambda stage: None).facts["Attention"]


def test_auto_names_the_choice_and_the_order() -> None:
    fact = _fact("auto")
    assert fact.startswith("torch (")
    assert "triton, flash-attn, torch" in fact


def test_a_backend_asked_for_is_said_to_be() -> None:
    assert _fact("torch").startswith("torch (asked for)")


def test_one_that_refuses_ends_the_start_with_its_reason() -> None:
    with pytest.raises(StartupError, match="flash-attn: it needs a CUDA device, not cpu"):
        _fact("flash-attn")
