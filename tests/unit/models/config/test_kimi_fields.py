"""Kimi-Linear: its published config, both spellings of fields and of tensors, what is refused, and what ranks keep."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import distributed

from models.config.kimi_delta import KimiDeltaConfig
from models.config.layer_cache import LayerCache
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.layers.kimi_delta import KimiDelta
from models.parallel import TensorParallel
from models.quantization.schemes import Unquantized
from models.weights.weights import Weights
from tests.support.checkpoints import make_config
from tests.support.models_harness import CPU, PagedRunner, load
from tests.support.reference import reference_logits, save_checkpoint

ATTENTION = [4, 8, 12, 16, 20, 24, 27]
LINEAR = {
    "full_attn_layers": ATTENTION,
    "head_dim": 128,
    "kda_layers": [layer for layer in range(1, 28) if layer not in ATTENTION],
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
# Kimi-Linear-48B-A3B, in the spelling of its publisher
KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": LINEAR,
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
KINDS = ("kimi_linear", "kimi_linear_groups")
PROMPT = [3, 90, 17, 4, 55, 8, 8, 61, 96, 0, 42]


def parse(**changes):
    return ModelConfig.from_json(KIMI | changes)


def without(*names):
    return {name: value for name, value in KIMI.items() if name not in names}


def with_linear(**changes):
    return parse(linear_attn_config=LINEAR | changes)


def test_the_published_model_has_its_size_and_keeps_latents_and_states(caplog):
    config = parse()
    assert not caplog.records
    with torch.device("meta"):
        theirs = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**without("rope_scaling")))
    biases = 26 * 256  # buffers in transformers
    assert config.num_parameters == sum(parameter.numel() for parameter in theirs.parameters()) + biases
    assert config.num_active_parameters / 1e9 == pytest.approx(3.4, abs=0.1)
    assert [layer + 1 for layer, cache in enumerate(config.caches) if cache is not None] == ATTENTION
    assert set(config.kv_caches) == {LayerCache(1, 576, 512, values_in_keys=True)}
    assert config.recurrence == KimiDeltaConfig(num_heads=32, head_dim=128, conv_width=4)
    assert config.kv_bytes_per_token(1, torch.bfloat16) == 7 * 1152
    # in float32: a matrix for each head, and the last three inputs of three convolutions
    assert config.state_bytes == 20 * (2 * 2**20 + 3 * 3 * 4096 * 4)
    assert set(config.ropes) == {None}
    assert config.sparse_layers == (False, *[True] * 26)
    assert config.max_context_len == 1048576


@pytest.mark.parametrize("tp_size", [2, 4, 8, 32])
def test_ranks_share_heads_and_each_has_all_latents_and_the_vector_of_gates(tp_size):
    config = parse()
    config.check_tensor_parallel(tp_size)
    state = config.share_of_rank(tp_size).states[0]
    heads = 32 // tp_size
    assert state.shapes == [(3 * heads * 128, 3), (heads * 128, 128)]
    assert state.num_inputs == 3 * heads * 128 + heads + 128
    assert config.kv_bytes_per_token(tp_size, torch.bfloat16) == 7 * 1152


def test_heads_that_do_not_split_are_refused():
    with pytest.raises(ModelError, match="num_heads of linear_attn_config 6 does not split over 4 ranks"):
        with_linear(num_heads=6).check_tensor_parallel(4)


def test_fields_of_transformers_mean_the_same():
    kinds = ["full_attention" if layer in ATTENTION else "linear_attention" for layer in range(1, 28)]
    dense = ["dense", *["sparse"] * 26]
    sizes = {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    raw = without("linear_attn_config", "first_k_dense_replace") | sizes
    assert ModelConfig.from_json(raw | {"layer_types": kinds, "mlp_layer_types": dense}) == parse()
    # as it saves a published config: both, and the object's sizes count
    other = {"linear_head_dim": 64, "linear_num_heads": 3, "linear_conv_kernel_dim": 9}
    assert parse(layer_types=kinds, mlp_layer_types=dense, **other) == parse()


@pytest.mark.parametrize(
    ("name", "usual", "value"),
    [
        ("model_max_length", "max_position_embeddings", 4096),
        ("num_experts", "num_local_experts", 64),
        ("num_experts_per_token", "num_experts_per_tok", 4),
        ("num_shared_experts", "n_shared_experts", 2),
        ("num_expert_group", "n_group", 8),
        ("moe_renormalize", "norm_topk_prob", False),
    ],
)
def test_the_usual_names_of_fields_are_read_as_well(name, usual, value, caplog):
    assert ModelConfig.from_json(without(name) | {usual: value}) == parse(**{name: value}) != parse()
    assert not caplog.records


def test_layers_and_sizes_that_are_left_out_are_those_of_transformers(caplog):
    config = ModelConfig.from_json(without("linear_attn_config", "first_k_dense_replace"))
    theirs = transformers.KimiLinearConfig(num_hidden_layers=27)
    kinds = ["linear_attention" if cache is None else "full_attention" for cache in config.caches]
    assert kinds == theirs.layer_types
    assert config.sparse_layers == parse().sparse_layers
    assert config.recurrence == parse().recurrence
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "linear_attn_config: num_heads must be a positive integer, found 0"),
        ({"num_heads": "32"}, "linear_attn_config: num_heads must be a positive integer, found '32'"),
        ({"head_dim": 257}, "linear_attn_config: head_dim 257 is not supported: served are 2 to 256"),
        ({"short_conv_kernel_size": 1}, "short_conv_kernel_size 1 is not supported: served are 2 to 64"),
        ({"short_conv_kernel_size": 65}, "short_conv_kernel_size 65 is not supported: served are 2 to 64"),
        ({"gate_lower_bound": -5.0}, "linear_attn_config: gate_lower_bound -5.0 is not supported: served are "),
        ({"kda_layers": None}, "linear_attn_config: kda_layers must be layers from 1 to 27, found None"),
        ({"kda_layers": [0, 1]}, r"kda_layers must be layers from 1 to 27, found \[0, 1\]"),
        ({"kda_layers": [True]}, r"kda_layers must be layers from 1 to 27, found \[True\]"),
        ({"full_attn_layers": [28]}, r"full_attn_layers must be layers from 1 to 27, found \[28\]"),
        ({"full_attn_layers": [4, 8]}, "full_attn_layers and kda_layers must name each of the 27 layers once, found"),
        ({"full_attn_layers": [*ATTENTION, 1]}, "must name each of the 27 layers once, found"),
        ({"full_attn_layers": [], "kda_layers": list(range(1, 28))}, "none of its 27 layers has attention"),
    ],
)
def test_what_the_object_cannot_say_is_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        with_linear(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attn_config": [1]}, "linear_attn_config must be an object, found"),
        ({"linear_attn_config": None, "linear_head_dim": 512}, "config.json: linear_head_dim 512 is not supported"),
        ({"layer_types": ["kda"] * 27}, "layer_types 'kda' is not supported: served are 'linear_attention' and"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 27 names, one for each layer"),
        ({"layer_types": ["full_attention"] * 27}, "layer_types and linear_attn_config name other layers of attention"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 'dense' and 'sparse' for 27 layers"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace must be the index of a layer, found '1'"),
        ({"mla_use_nope": False}, "mla_use_nope is not supported: served is True or None, found False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is not supported: served is 'sigmoid'"),
        ({"use_grouped_topk": False}, "use_grouped_topk is not supported: served is True or None, found False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is not supported: served is 1 or None, found 2"),
        ({"num_expert_group": 7}, "num_expert_group 7 does not cut 256 experts into groups"),
        ({"num_expert_group": 64}, "topk_group 1 of num_expert_group 64 leaves 4 experts for num_experts_per_token 8"),
        ({"num_experts_per_token": 257}, "num_experts_per_token 257 is more than num_experts 256"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_fields_that_are_not_served_are_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        parse(**changes)


def test_positions_of_a_config_change_nothing():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert parse(rope_theta=5e5, rope_scaling=yarn, rope_interleave=True) == parse()


def logits_of(folder):
    runner = PagedRunner(load(folder), ModelConfig.from_folder(folder))
    return runner.step([(runner.add_row(), PROMPT)])[0]


def rename_as_published(tensors):
    """Rename what save_pretrained of transformers writes: the dense layer is an `mlp`."""
    dense = tuple(f".block_sparse_moe.{name}_proj.weight" for name in ("gate", "up", "down"))
    return {name.replace("block_sparse_moe", "mlp") if name.endswith(dense) else name: t for name, t in tensors.items()}


def rename_as_in_memory(tensors):
    """Rename and merge as transformers has the tensors in memory, experts aside."""
    merged = {}
    for name, tensor in tensors.items():
        block, found, rest = name.partition(".self_attn.")
        if rest.endswith("_conv1d.weight"):
            continue
        moved = rest.startswith(("f_a", "f_b", "dt_bias", "A_log"))
        merged[f"{block}{found}{'forget_gate.' if moved else ''}{rest}".replace("block_sparse_moe", "mlp")] = tensor
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        parts = [tensors[name.replace("q_conv1d", f"{part}_conv1d")] for part in "qkv"]
        merged[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    return merged


def with_flat_decays(tensors):
    return {name: t.flatten() if name.endswith("A_log") else t for name, t in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewrite", [rename_as_published, rename_as_in_memory, with_flat_decays])
def test_tensors_in_other_spellings_give_the_same_logits(rewrite, kind, tmp_path):
    save_checkpoint(tmp_path, make_config(kind))
    expected = logits_of(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    rewritten = rewrite(stored)
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (stored, rewritten)]
    assert shapes[0] != shapes[1]
    save_file(rewritten, path)
    assert torch.equal(logits_of(tmp_path), expected)
    if rewrite is rename_as_published:  # and it is what transformers itself reads there
        torch.testing.assert_close(reference_logits(tmp_path, PROMPT), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_missing_tensor_of_gates_is_named(tmp_path):
    save_checkpoint(tmp_path, make_config("kimi_linear"))
    path = tmp_path / "model.safetensors"
    for name in ("A_log", "f_b_proj.weight", "v_conv1d.weight"):
        stored = load_file(path)
        kept = {other: tensor for other, tensor in stored.items() if other != f"model.layers.2.self_attn.{name}"}
        save_file(kept, path)
        with pytest.raises(ModelError, match=rf"model\.layers\.2\.self_attn\.{name}"):
            load(tmp_path)
        save_file(stored, path)


def test_ranks_have_their_shares_of_each_head(tmp_path):
    save_checkpoint(tmp_path, make_config("kimi_linear"))
    config = ModelConfig.from_folder(tmp_path)

    def mixer(tp):
        w = Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32) / "model.layers.0.self_attn"
        return KimiDelta(config, w, tp, layer_index=0, method=Unquantized())

    whole = mixer(TensorParallel())
    ranks = [mixer(TensorParallel(rank, 4, distributed.GroupMember.NON_GROUP_MEMBER)) for rank in range(4)]
    for name in ("a_log", "dt_bias"):
        assert torch.equal(torch.cat([getattr(rank, name) for rank in ranks]), getattr(whole, name))
    assert (whole.a_log.shape, whole.dt_bias.shape) == ((4,), (64,))
    thirds = zip(*(rank.conv_weight.chunk(3) for rank in ranks), strict=True)
    assert torch.equal(torch.cat([torch.cat(parts) for parts in thirds]), whole.conv_weight)
    gates, *_, low = whole.in_proj.params["weight"].split((16, 64, 64, 64, 4, 16))
    for rank in ranks:
        own = rank.in_proj.params["weight"]
        assert torch.equal(own[:16], gates)
        assert torch.equal(own[-16:], low)
