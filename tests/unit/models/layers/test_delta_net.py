"""Layers of the gated delta rule over long prompts: however they are cut, logits are those of transformers."""

from pathlib import Path

import pytest
import torch
import transformers

from models.config.model_config import ModelConfig
from models.errors import ModelError
from tests.support.checkpoints import make_config
from tests.support.models_harness import PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

KINDS = ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "kimi_linear_groups")
LENGTH = 560
PROMPT = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config = make_config(request.param)
    config.max_position_embeddings = 640
    save_checkpoint(folder, config)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return reference_logits(checkpoint, PROMPT)


@pytest.mark.parametrize("sizes", [(1,) * 70 + (490,), (64,) * 9, (63, 65, 2, 130, 300), (512, 48), (LENGTH,)])
@pytest.mark.slow
@pytest.mark.table
def test_a_long_prompt_in_chunks(checkpoint, model, expected, sizes):
    runner = PagedRunner(model, ModelConfig.from_folder(checkpoint), block_size=16)
    row, start, logits = runner.add_row(), 0, []
    for size in sizes:
        logits += runner.step([(row, PROMPT[start : start + size])])
        start += size
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_sixteen_rows_at_once(checkpoint, model, expected):
    runner = PagedRunner(model, ModelConfig.from_folder(checkpoint))
    lengths = [1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 20, 26]
    rows = [runner.add_row() for _ in lengths]
    first = runner.step([(row, PROMPT[:length]) for row, length in zip(rows, lengths, strict=True)])
    second = runner.step([(row, [PROMPT[length]]) for row, length in zip(rows, lengths, strict=True)])
    for length, *logits in zip(lengths, first, second, strict=True):
        torch.testing.assert_close(torch.cat(logits), expected[: length + 1], atol=1e-4, rtol=0)


SIZES = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
BOTH = ["linear_attention", "full_attention"] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["kda", *BOTH[1:]]}, "layer_types 'kda' is not supported: served are 'linear_attention' and"),
        ({"layer_types": BOTH[1:]}, "layer_types must be a list of 8 names, one for each layer, found"),
        ({"layer_types": "linear_attention"}, "layer_types must be a list of 8 names"),
        ({"layer_types": [["mamba"], *BOTH[1:]]}, r"layer_types \['mamba'\] is not supported"),
        ({"layer_types": BOTH[:1] * 8}, "none of its 8 layers has attention"),
        ({"full_attention_interval": 9}, "none of its 8 layers has attention"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a positive integer, found 0"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not divisible by linear_num_key_heads 16"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 is not supported: served are 2 and more"),
        ({"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim 65 is larger than 64"),
        ({"linear_key_head_dim": 257}, "linear_key_head_dim 257 is larger than 256"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive integer, found 0"),
        ({"attn_output_gate": False}, "attn_output_gate is not supported: served is True or None, found False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is not supported: served is 'float32' or None"),
    ],
)
def test_bad_fields_are_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_json(SIZES | changes)


def test_layers_are_listed_in_either_spelling_or_by_an_interval():
    listed = ModelConfig.from_json(SIZES | {"layer_types": BOTH})
    older = ["mamba", "attention"] * 4
    assert ModelConfig.from_json(SIZES | {"layer_types": older, "full_attention_interval": 4}) == listed
    assert ModelConfig.from_json(SIZES | {"full_attention_interval": 2}) == listed
    assert [state is not None for state in listed.states] == [True, False] * 4
    assert [cache is None for cache in listed.caches] == [True, False] * 4
    assert [rope is None for rope in listed.ropes] == [True, False] * 4
    assert listed.one_layer_of_each_kind().num_layers == 3


def test_ranks_share_whole_key_heads():
    config = ModelConfig.from_json(SIZES | {"linear_num_key_heads": 2, "num_attention_heads": 8})
    config.check_tensor_parallel(2)
    with pytest.raises(ModelError, match="linear_num_key_heads 2 does not split over 4 ranks"):
        config.check_tensor_parallel(4)


@pytest.mark.parametrize(
    ("fields", "rotates"),
    [
        ({}, True),
        ({"rope_theta": 5e5}, True),
        ({"rope_theta": None}, False),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 500.0}}, True),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False),
    ],
)
def test_olmo_hybrid_rotates_unless_its_base_is_null(fields, rotates):
    config = ModelConfig.from_json(SIZES | {"architectures": ["OlmoHybridForCausalLM"]} | fields)
    assert [rope is not None for rope in config.ropes] == [False, False, False, rotates] * 2


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b"])
@pytest.mark.slow
def test_shapes_of_published_models_have_the_parameters_of_transformers(name):
    folder = Path("benchmarks/shapes") / name
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    config = ModelConfig.from_folder(folder)
    assert config.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())
    heads, channels = config.recurrence.num_value_heads, 2 * 2048 + config.recurrence.num_value_heads * 128
    assert config.state_bytes == config.num_layers * 3 // 4 * 4 * (heads * 128 * 128 + channels * 3)
