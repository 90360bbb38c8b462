"""A split that a scheme's blocks do not allow is refused by the config alone, as the load would refuse it."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
from torch import distributed

from models.build import build
from models.config.model_config import ModelConfig
from models.config.size import quantized_experts, quantized_matrices
from models.errors import ModelError
from models.layers.delta_net import DeltaNet
from models.layers.kimi_delta import KimiDelta
from models.layers.mamba2 import Mamba2
from models.layers.short_conv import ShortConv
from models.parallel import TensorParallel
from models.quantization.config import QuantizationConfig
from models.quantization.experts_scheme import DenseExperts
from models.quantization.schemes import Unquantized
from models.weights.weights import Weights
from tests.support.checkpoints import make_configs
from tests.support.int_checkpoints import packed_config
from tests.support.models_harness import CPU
from tests.unit.models.config.test_model_config import parse

KINDS = make_configs()
# Projections of 1376 inputs for each of eight ranks; 1376 is 43 times 32
WIDTH = {"intermediate_size": 11_008}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
PACKED = packed_config(group_size=128)


class Recording:
    """A scheme whose layers say what they load."""

    output_multiple = input_multiple = 1

    def __init__(self):
        self.loaded = Counter()
        self.num_expert_values = 0

    def describe(self):
        return "recording"

    def make_method(self):
        return self

    def load(self, w, parts):
        for part in parts:
            name = w.projection(part.name, part.out_features).name
            shared = "outputs" if part.dim == 0 else "inputs"
            self.loaded[name, shared, part.inputs] += part.outputs
        return Unquantized().load(w, parts)

    def apply(self, params, x, bias):
        return Unquantized().apply(params, x, bias)

    def load_each(self, w, experts, parts):
        self.num_expert_values += len(experts) * sum(part.outputs * part.inputs for part in parts)
        return DenseExperts().load_each(w, experts, parts)

    def load_all(self, w, share, part, *, takes_turns):
        self.num_expert_values += len(share.here) * part.outputs * part.inputs
        return torch.zeros(len(share.here), part.outputs, part.inputs)


def found_in(config, tp_size, *, is_expert_parallel=False):
    """What the config says of the matrices that build() loads, and what it loads: outputs and inputs of one rank.

    A matrix that is loaded in bands counts once. Routed experts are compared by the number of their values alone.
    """
    scheme = Recording()
    config = dataclasses.replace(config, quantization=QuantizationConfig.of_all("recording", scheme))
    w = Weights.dummy(device=CPU, dtype=torch.float32)
    tp = TensorParallel(0, tp_size, distributed.GroupMember.NON_GROUP_MEMBER, is_expert_parallel=is_expert_parallel)
    build(config, w, tp)
    said = Counter()
    for matrix, _ in quantized_matrices(config):
        num_shares = min(tp_size, matrix.num_kv_heads) if matrix.num_kv_heads else tp_size
        splits_outputs = matrix.shared == "outputs"
        num_inputs = matrix.in_features if splits_outputs else matrix.in_features // num_shares
        num_outputs = matrix.out_features // num_shares if splits_outputs else matrix.out_features
        said[matrix.name, matrix.shared, num_inputs] += num_outputs
    matrices = [(matrix, count) for matrix, _, count in quantized_experts(config)]
    stored = [len(tp.share_of_experts(count).here) for _, count in matrices]
    sizes = [matrix.out_features * matrix.in_features for matrix, _ in matrices]
    values = sum(size * count for size, count in zip(sizes, stored, strict=True))
    assert values // (1 if is_expert_parallel else tp_size) == scheme.num_expert_values
    assert (values > 0) == (config.experts is not None)
    return said, scheme.loaded


@pytest.mark.parametrize("tp_size", [2, 4])  # more than most have KV heads
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_config_knows_every_matrix_that_is_loaded_by_name_size_and_share(kind, tp_size):
    name = type(KINDS[kind]).__name__.removesuffix("Config").removesuffix("Text")
    sizes = {"linear_num_key_heads": 4} if hasattr(KINDS[kind], "linear_num_key_heads") else {}  # no rank without one
    config = ModelConfig.from_json(KINDS[kind].to_dict() | sizes | {"architectures": [f"{name}ForCausalLM"]})
    said, loaded = found_in(config, tp_size)
    assert said
    assert said == loaded


RECURRENCES = (DeltaNet, KimiDelta, Mamba2, ShortConv)
HYBRIDS = {
    "qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "olmo_hybrid": "OlmoHybrid", "lfm2_biases": "Lfm2",
    "kimi_linear": "KimiLinear", "falcon_h1": "FalconH1", "bamba": "Bamba", "nemotron_h": "NemotronH",
    "granite_hybrid": "GraniteMoeHybrid",
}  # fmt: skip


def num_held(module):
    """The numbers of all tensors of a module, its own and those of what it holds."""
    found, todo = {}, [module]
    while todo:
        each = todo.pop()
        if torch.is_tensor(each):
            found[id(each)] = each.numel()
        elif isinstance(each, torch.nn.Module):
            todo.append({name: value for name, value in vars(each).items() if name not in ("factors", "tp")})
        elif isinstance(each, dict):
            todo += each.values()
    return sum(found.values())


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("kind", list(HYBRIDS))
def test_a_ranks_share_of_a_recurrence_has_the_size_of_its_tensors(kind, tp_size):
    sizes = {"linear_num_key_heads": 4} if hasattr(KINDS[kind], "linear_num_key_heads") else {}
    config = ModelConfig.from_json(KINDS[kind].to_dict() | sizes | {"architectures": [f"{HYBRIDS[kind]}ForCausalLM"]})
    config.check_tensor_parallel(tp_size)
    tp = TensorParallel(0, tp_size, distributed.GroupMember.NON_GROUP_MEMBER)
    model = build(config, Weights.dummy(device=torch.device("meta"), dtype=torch.bfloat16), tp)
    held = [num_held(module) for module in model.modules() if isinstance(module, RECURRENCES)]
    share = config.share_of_rank(tp_size).recurrence
    said = sum(matrix.out_features * matrix.in_features for matrix in share.matrices(config.hidden_size))
    assert held == [said + share.num_other_parameters] * len(held)
    assert held
    removed = dataclasses.replace(config.share_of_rank(tp_size), states=(None,) * config.num_layers)
    assert config.share_of_rank(tp_size).num_parameters - removed.num_parameters == sum(held)


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss", "deepseek_v3", "llama4", "mixtral_windows"])
def test_the_config_knows_the_same_of_ranks_with_whole_experts(kind):
    name = type(KINDS[kind]).__name__.removesuffix("Config").removesuffix("Text")
    config = ModelConfig.from_json(KINDS[kind].to_dict() | {"architectures": [f"{name}ForCausalLM"]})
    said, loaded = found_in(config, 2, is_expert_parallel=True)
    assert said == loaded


def test_the_matrices_of_a_text_part_are_named_as_in_its_checkpoint():
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": KINDS["gemma3"].to_dict()}
    said, loaded = found_in(ModelConfig.from_json(raw), 1)
    assert next(iter(said))[0] == "language_model.model.layers.0.self_attn.q_proj"
    assert said == loaded


@pytest.mark.parametrize(("fields", "multiple"), [(NF4, 64), (FP8_BLOCKS, 128), (AWQ, 128), (GPTQ, 128), (PACKED, 128)])
def test_ranks_that_would_cut_a_block_of_inputs_are_refused(fields, multiple):
    config = parse(quantization_config=fields, **WIDTH)
    config.check_tensor_parallel(2 if multiple == 128 else 4)
    words = (
        "model.layers.0.mlp.down_proj: 8 ranks have 1376 inputs each, but "
        f"{config.quantization.describe()} is split only at multiples of {multiple}: use fewer ranks"
    )
    with pytest.raises(ModelError, match=re.escape(words)):
        config.check_tensor_parallel(8)


def test_what_is_quantised_on_load_is_refused_alike():
    config = parse(**WIDTH).quantized("bitsandbytes-nf4")
    with pytest.raises(ModelError, match=r"down_proj: 8 ranks have 1376 inputs each, .*only at multiples of 64"):
        config.check_tensor_parallel(8)


def test_ranks_that_would_cut_a_word_of_outputs_are_refused():
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 8192}
    config = parse(quantization_config=AWQ | {"group_size": 16}, **sizes)
    config.check_tensor_parallel(2)
    with pytest.raises(ModelError, match=r"k_proj: 4 ranks have 4 outputs each, .*only at multiples of 8"):
        config.check_tensor_parallel(4)


@pytest.mark.parametrize(
    "fields", [{"quant_method": "fp8"}, INT8, GPTQ | {"desc_act": True}, GPTQ | {"group_size": -1}]
)
def test_schemes_without_blocks_of_inputs_split_anywhere(fields):
    parse(quantization_config=fields, **WIDTH).check_tensor_parallel(8)


def test_layers_that_are_not_quantised_split_anywhere():
    skipped = {"llm_int8_skip_modules": ["down_proj"]}
    parse(quantization_config=NF4 | skipped, **WIDTH).check_tensor_parallel(8)
    phi3 = {"architectures": ["Phi3ForCausalLM"], "tie_word_embeddings": False, "num_attention_heads": 4}
    sizes = {"num_key_value_heads": 4, "head_dim": 4, "hidden_size": 64, "intermediate_size": 128}
    awq = AWQ | {"group_size": 16, "modules_to_not_convert": ["qkv_proj", "o_proj"]}
    parse(quantization_config=awq, **phi3, **sizes).check_tensor_parallel(4)
