"""Rotary tables hold transformers' frequencies and magnitudes, for every type, at any length."""

import dataclasses
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.build import build
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.layers.rotary import attention_factor, inverse_frequencies, make_cos_sin_caches
from models.parallel import ALONE
from models.weights.weights import Weights
from tests.support.checkpoints import TINY
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

ARCHITECTURE = "LlamaForCausalLM"
HEAD_DIM = 32
FACTORS = {
    "short_factor": [1.0 + 0.1 * pair for pair in range(16)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(16)],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.0},
    "llama3": LLAMA3,
    "llama3_other_bands": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 16.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_betas": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 0.5},
    "yarn_not_truncated": {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    "yarn_mscale": {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn_attention_factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
    "longrope": FACTORS | {"original_max_position_embeddings": 64},
    "longrope_factor": FACTORS | {"original_max_position_embeddings": 64, "factor": 3.0},
    "longrope_attention_factor": FACTORS | {"original_max_position_embeddings": 64, "attention_factor": 1.3},
}


def their_config(scaling, **changes):
    rope = {"rope_theta": 5000.0, "rope_type": scaling.partition("_")[0], **SCALINGS[scaling]}
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": 256}
    return LlamaConfig(**sizes, head_dim=HEAD_DIM, rope_parameters=rope, **changes)


def our_config(theirs):
    return ModelConfig.from_json({**json.loads(theirs.to_json_string(use_diff=False)), "architectures": [ARCHITECTURE]})


@pytest.mark.parametrize("num_positions", [64, 256])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_and_magnitude_are_those_of_transformers(scaling, num_positions):
    theirs = their_config(scaling)
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling.partition("_")[0]](theirs, seq_len=num_positions)
    (rope,) = set(our_config(theirs).ropes)
    torch.testing.assert_close(inverse_frequencies(rope, HEAD_DIM, num_positions), frequencies, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor)


def test_dynamic_rows_turn_by_the_base_of_the_length_that_ends_there():
    theirs = their_config("dynamic")
    config = our_config(theirs)
    table = make_cos_sin_caches(config, device=CPU, dtype=torch.float32)[0]
    assert table.shape == (3 * 256, HEAD_DIM)
    for position in (0, 5, 255, 256, 300, 767):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=position + 1)
        expected = torch.cat(((position * frequencies).cos(), (position * frequencies).sin()))
        torch.testing.assert_close(table[position], expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("scaling", "length"), [("linear", 640), ("dynamic", 768), ("llama3", 256), ("yarn", 256), ("longrope", 256)]
)
def test_context_reaches_as_far_as_positions_are_stretched(scaling, length):
    config = our_config(their_config(scaling))
    assert config.max_context_len == length
    assert make_cos_sin_caches(config, device=CPU, dtype=torch.float32)[0].shape == (length, HEAD_DIM)


def test_table_is_as_long_as_what_is_served():
    config = our_config(their_config("yarn"))
    limited = config.with_max_model_len(100)
    assert limited.max_context_len == 100
    assert config.with_max_model_len(None) == config.with_max_model_len(10**6) == config
    whole, part = (make_cos_sin_caches(c, device=CPU, dtype=torch.float32)[0] for c in (config, limited))
    assert torch.equal(part, whole[:100])


def test_layers_that_turn_alike_share_one_table():
    tables = make_cos_sin_caches(our_config(their_config("yarn")), device=CPU, dtype=torch.float32)
    assert len({table.data_ptr() for table in tables}) == 1


@pytest.mark.parametrize("scaling", ["yarn", "linear"])
def test_shapes_alone_cost_no_table(scaling, monkeypatch):
    """A check of headers builds the model on meta, also with a context of ten million tokens."""
    config = dataclasses.replace(our_config(their_config(scaling)), max_context_len=10_485_760)
    outer, num_rows = torch.outer, []
    monkeypatch.setattr(torch, "outer", lambda rows, columns: num_rows.append(len(rows)) or outer(rows, columns))
    tables = make_cos_sin_caches(config, device=torch.device("meta"), dtype=torch.float32)
    assert all(table is tables[0] for table in tables)
    assert tables[0].shape == (10_485_760, HEAD_DIM)
    assert num_rows == [1]


def test_dynamic_beyond_the_original_length_is_what_transformers_decodes(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    save_checkpoint(tmp_path, LlamaConfig(**TINY | {"max_position_embeddings": 12}, rope_parameters=rope))
    token_ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        first = model(torch.tensor([token_ids[:10]]), use_cache=True)
        expected, cache = [first.logits[0]], first.past_key_values
        for token_id in token_ids[10:]:
            expected.append(model(torch.tensor([[token_id]]), past_key_values=cache, use_cache=True).logits[0])
    runner = PagedRunner(load(tmp_path), ModelConfig.from_folder(tmp_path))
    row = runner.add_row()
    logits = runner.step([(row, token_ids[:7])]) + runner.step([(row, token_ids[7:30])])
    logits += [runner.step([(row, [token_id])])[0] for token_id in token_ids[30:]]
    torch.testing.assert_close(torch.cat(logits), torch.cat(expected), atol=1e-4, rtol=0)
    assert (reference_logits(tmp_path, token_ids[:12]) - torch.cat(expected)[:12]).abs().max() < 1e-4


@pytest.mark.parametrize(("max_model_len", "is_same"), [(16, True), (64, False)])
def test_longrope_of_short_requests_is_transformers_if_no_longer_ones_are_served(max_model_len, is_same, tmp_path):
    factors = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16, **factors}
    save_checkpoint(tmp_path, LlamaConfig(**TINY, rope_parameters=rope))
    config = ModelConfig.from_folder(tmp_path).with_max_model_len(max_model_len)
    model = build(config, Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32), ALONE)
    token_ids = list(range(12))
    runner = PagedRunner(model, config)
    logits = runner.step([(runner.add_row(), token_ids)])[0]
    assert ((logits - reference_logits(tmp_path, token_ids)).abs().max() < 1e-4) == is_same


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_logits_beyond_the_original_length_are_those_of_transformers(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 1000.0, **SCALINGS[kind]}
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = 16
    save_checkpoint(tmp_path, LlamaConfig(**TINY | {"max_position_embeddings": 80}, rope_parameters=rope))
    token_ids = torch.randint(0, 97, (75,), generator=torch.Generator().manual_seed(3)).tolist()
    runner = PagedRunner(load(tmp_path), ModelConfig.from_folder(tmp_path))
    logits = runner.step([(runner.add_row(), token_ids)])[0]
    torch.testing.assert_close(logits, reference_logits(tmp_path, token_ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": [1.0] * 16}, "long_factor is missing"),
        ({"short_factor": [1.0] * 3, "long_factor": [1.0] * 16}, "short_factor has 3 entries, but 16 pairs"),
        ({"short_factor": 1.0, "long_factor": [1.0] * 16}, "short_factor must be a list of positive numbers"),
        ({"short_factor": [0.0] * 16, "long_factor": [1.0] * 16}, "short_factor must be a list of positive numbers"),
    ],
)
def test_longrope_factors_that_fit_no_head_are_refused(changes, message):
    raw = json.loads(their_config("yarn").to_json_string(use_diff=False)) | {"architectures": [ARCHITECTURE]}
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_json(raw | {"rope_parameters": {"rope_type": "longrope", **changes}})
