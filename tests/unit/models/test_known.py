"""Models by name: their sizes are those that the publishers state, and what is said instead of an unserved one."""

import json
from pathlib import Path

import pytest

from models.errors import ModelError
from models.known import instead_of
from models.registry import find_architecture, is_served
from tests.known_models import SERVED, UNSERVED, config_of

TABLE = json.loads((Path(__file__).parents[3] / "models" / "known_models.json").read_text(encoding="utf-8"))


def test_parameters_that_follow_from_the_sizes_are_those_that_are_stated() -> None:
    wrong = [
        f"{known.model}: {config_of(known).num_parameters / 1e9:.3f} and not {known.billions}"
        for known in SERVED
        if abs(config_of(known).num_parameters / 1e9 / known.billions - 1) > 0.01
    ]
    assert wrong == []


def test_no_id_is_listed_twice_and_every_architecture_is_what_the_list_says() -> None:
    ids = [entry.model for entry in (*SERVED, *UNSERVED)]
    assert len(ids) == len(set(ids))
    assert [row["model"] for row in TABLE["served"] if not is_served(row["architecture"])] == []
    assert [entry.model for entry in UNSERVED if is_served(entry.architecture)] == []
    served = {known.model for known in SERVED}
    assert [entry.model for entry in UNSERVED if entry.instead and entry.instead not in served] == []


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("Qwen2VLForConditionalGeneration", "nearest served model is Qwen/Qwen2.5-VL-7B-Instruct"),
        ("DeepseekV32ForCausalLM", "nearest served model is deepseek-ai/DeepSeek-V3.1"),
        ("Qwen4ForCausalLM", "nearest served model is Qwen/"),
        ("Glm5MoeForCausalLM", "nearest served model is zai-org/GLM-4.5-Air"),
    ],
)
def test_the_nearest_served_model_is_named(architecture: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        find_architecture(architecture)
    assert str(caught.value).endswith("; quire models lists those that are")
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "architecture", ["NobodysForCausalLM", "WhisperForConditionalGeneration", "", "Xyz", "FooModel"]
)
def test_no_model_is_named_where_none_is_near(architecture: str) -> None:
    assert "nearest" not in instead_of(architecture)
