"""--quantization makes of any family's dense experts what its schemes make of each matrix, one expert at a time."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from kernels.linear.reference import NF4_TABLE, dequantize_4bit, quantize_nf4, quantize_rows
from kernels.moe.storage import dense_matrix
from models.build import build
from models.config.model_config import ModelConfig
from models.config.size import quantized_experts
from models.errors import ModelError
from models.layers.moe import ExpertWeights
from models.parallel import TensorParallel
from models.quantization.config import LayerNames, QuantizationConfig, Rule
from models.quantization.schemes import ON_LOAD
from models.weights.checkpoint import SafetensorsReader
from models.weights.weights import Weights
from tests.support.checkpoints import make_config
from tests.support.models_harness import CPU, SINGLE, PagedRunner
from tests.support.packed_experts import num_bytes
from tests.support.quantized_checkpoints import PROMPT, load_model, logits_of
from tests.support.rank_group import run_ranks
from tests.support.reference import save_checkpoint
from tests.support.tensor_parallel_rank import PROMPT as RANKS_PROMPT
from tests.support.tensor_parallel_rank import run_rank
from tests.unit.models.test_experts import merge_experts

pytestmark = pytest.mark.slow

# Every order of experts in checkpoints: by themselves, without gates, and in tensors of all: as they are, transposed,
# and with gates and ups in turns
KINDS = ["qwen3_moe", "mixtral", "deepseek_v3", "nemotron_3", "granite_moe", "gemma4_experts", "llama4", "gpt_oss"]
SPLIT = ["qwen3_moe", "granite_moe", "llama4", "gpt_oss"]
SIZES = {"hidden_size": 64, "moe_intermediate_size": 128, "intermediate_size": 128}
NF4 = "bitsandbytes-nf4"


def _save(folder, kind):
    config = make_config(kind)
    for name, size in SIZES.items():
        if name in config.to_dict():
            setattr(config, name, size)
    save_checkpoint(folder, config)


def _config(folder, flag):
    """Quantises experts; other layers are as they are, since small ones have no blocks of 64."""
    rules = (Rule(LayerNames((r"re:.*\.(experts|block_sparse_moe)\.",)), ON_LOAD[flag]),)
    quantization = QuantizationConfig(flag, rules, is_on_load=True)
    return dataclasses.replace(ModelConfig.from_folder(folder), quantization=quantization)


def _load(folder, flag, tp=SINGLE):
    config = _config(folder, flag)
    return build(config, Weights.from_folder(folder, device=CPU, dtype=torch.float32), tp)


def _load_as_named(folder, tp=SINGLE):
    """Quantised as the folder above it is named."""
    return _load(folder, folder.parent.name, tp)


def _experts(model):
    """The weights of every layer's experts, by the layer's place."""
    return {
        name: module.weights
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weights", None), ExpertWeights)
    }


def _rounded(dense, flag):
    """What the scheme makes of a matrix, by the specifications of linear layers."""
    if flag == "fp8":
        values, scales = quantize_rows(dense)
        return values.float() * scales[:, None]
    return dequantize_4bit(*quantize_nf4(dense), torch.tensor(NF4_TABLE), torch.float32)


def _check(packed, dense, flag):
    assert packed.keys() == dense.keys()
    assert packed
    for name, weights in packed.items():
        for found, expected in ((weights.gate_up, dense[name].gate_up), (weights.down, dense[name].down)):
            assert not isinstance(found, torch.Tensor)
            for expert in range(expected.shape[0]):
                assert torch.equal(dense_matrix(found, expert, torch.float32), _rounded(expected[expert], flag))


@pytest.mark.parametrize("flag", ["fp8", NF4])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_every_layout_are_rounded_by_matrix(kind, flag, tmp_path):
    _save(tmp_path, kind)
    dense, packed = _experts(load_model(tmp_path)), _experts(_load(tmp_path, flag))
    _check(packed, dense, flag)
    for name, weights in packed.items():
        if weights.biases is not None:
            assert torch.equal(weights.biases.gate_up, dense[name].biases.gate_up)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_that_transformers_merged_are_rounded_alike(kind, tmp_path):
    _save(tmp_path, kind)
    expected = logits_of(tmp_path, "fp8")
    merge_experts(tmp_path)
    assert torch.equal(logits_of(tmp_path, "fp8"), expected)


@pytest.mark.parametrize("is_expert_parallel", [False, True])
@pytest.mark.parametrize("flag", ["fp8", NF4])
@pytest.mark.parametrize("kind", SPLIT)
def test_ranks_round_their_shares(kind, flag, is_expert_parallel, tmp_path):
    _save(tmp_path, kind)
    for rank in range(2):
        group = distributed.GroupMember.NON_GROUP_MEMBER
        tp = TensorParallel(rank, 2, group, is_expert_parallel=is_expert_parallel)
        packed, dense = _experts(_load(tmp_path, flag, tp)), _experts(load_model(tmp_path, tp=tp))
        _check(packed, dense, flag)
        firsts = {each.first_expert for each in packed.values()}
        assert firsts == {each.first_expert for each in dense.values()}
        assert (firsts != {0}) == (is_expert_parallel and rank == 1)


def test_ranks_with_whole_experts_give_the_logits_of_one(tmp_path):
    folders = [tmp_path / flag / kind for flag in ("fp8", NF4) for kind in SPLIT]
    for folder in folders:
        _save(folder, folder.name)
    run_ranks(run_rank, 2, tmp_path / "store", folders, True, _load_as_named)
    for folder in folders:
        runner = PagedRunner(_load_as_named(folder), ModelConfig.from_folder(folder))
        expected = runner.step([(runner.add_row(), RANKS_PROMPT)])[0]
        for rank in range(2):
            found = torch.load(folder / f"logits-2-{rank}.pt")
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=str(folder))


@pytest.mark.parametrize("flag", ["fp8", NF4])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_logits_are_those_of_the_rounded_weights(kind, flag, tmp_path):
    _save(tmp_path, kind)
    model, dense = _load(tmp_path, flag), _experts(load_model(tmp_path))
    logits = _run(model, tmp_path)
    for name, module in model.named_modules():
        if name in dense:
            gate_up, down = (
                torch.stack([_rounded(expert, flag) for expert in matrix])
                for matrix in (dense[name].gate_up, dense[name].down)
            )
            module.weights = ExpertWeights(gate_up, down, dense[name].biases)
    torch.testing.assert_close(_run(model, tmp_path), logits, atol=1e-4, rtol=0)
    assert logits.argmax(-1).unique().numel() > 3


def _run(model, folder):
    runner = PagedRunner(model, ModelConfig.from_folder(folder))
    row = runner.add_row()
    logits = [*runner.step([(row, PROMPT[:5])]), *runner.step([(row, PROMPT[5:])])]
    for _ in range(6):
        logits += runner.step([(row, [int(logits[-1][-1].argmax())])])
    return torch.cat(logits)


@pytest.mark.parametrize("kind", ["granite_moe", "llama4", "gpt_oss"])
def test_tensors_of_all_experts_are_read_one_expert_at_a_time(kind, tmp_path, monkeypatch):
    _save(tmp_path, kind)
    largest = {name: tensor.shape[0] for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    read, parts = SafetensorsReader.read, []
    monkeypatch.setattr(SafetensorsReader, "read", lambda self, part: parts.append(part) or read(self, part))
    load_model(tmp_path, "fp8")
    merged = [part for part in parts if len(part.shape) == 3 and part.shape[0] == largest[part.name]]
    assert merged
    assert all(part.dim == 0 and part.stop - part.start == 1 for part in merged)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_random_experts_are_rounded_alike(kind):
    raw = make_config(kind).to_dict() | SIZES
    architecture = {"qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}[kind]
    config = ModelConfig.from_json(raw | {"architectures": [f"{architecture}ForCausalLM"]})
    w = Weights.dummy(device=CPU, dtype=torch.float32)
    dense, packed = (_experts(build(each, w, TensorParallel())) for each in (config, config.quantized("fp8")))
    _check(packed, dense, "fp8")


@pytest.mark.parametrize("flag", ["fp8", NF4])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "granite_moe"])
def test_sizes_are_those_of_the_tensors(kind, flag, tmp_path):
    _save(tmp_path, kind)
    packed = [each for weights in _experts(_load(tmp_path, flag)).values() for each in (weights.gate_up, weights.down)]
    assert packed
    num_weights = sum(matrix.shape[0] * matrix.shape[1] * matrix.shape[2] for matrix in packed)
    sizes = [each.weight_bytes(torch.bfloat16) for each in (ModelConfig.from_folder(tmp_path), _config(tmp_path, flag))]
    assert sizes[0] - sizes[1] == 2 * num_weights - num_bytes(packed)


def test_experts_without_whole_blocks_are_refused_by_layer_and_scheme():
    raw = make_config("mixtral").to_dict() | {"architectures": ["MixtralForCausalLM"], "intermediate_size": 96}
    config = ModelConfig.from_json(raw | {"hidden_size": 64}).quantized(NF4)
    with pytest.raises(ModelError, match=r"experts\.0\.w2: 96 inputs are no multiple of 64, .*nf4"):
        config.check_tensor_parallel(1)
    whole = ModelConfig.from_json(raw | {"hidden_size": 256, "intermediate_size": 192}).quantized(NF4)
    whole.check_tensor_parallel(1)
    with pytest.raises(ModelError, match=r"experts\.0\.w2: 2 ranks have 96 inputs each, .* multiples of 64"):
        whole.check_tensor_parallel(2)
    whole.check_tensor_parallel(2, is_expert_parallel=True)
    narrow = ModelConfig.from_json(raw | {"hidden_size": 256}).quantized(NF4)
    with pytest.raises(ModelError, match=r"experts\.0\.w2: 96 inputs are no multiple of 64, .*nf4"):
        narrow.check_tensor_parallel(2, is_expert_parallel=True)


def test_int8_on_load_leaves_experts_as_they_are_and_says_so(tmp_path):
    _save(tmp_path, "qwen3_moe")
    (weights, *_) = _experts(load_model(tmp_path, "bitsandbytes-int8")).values()
    assert isinstance(weights.gate_up, torch.Tensor)
    assert list(quantized_experts(ModelConfig.from_folder(tmp_path).quantized("bitsandbytes-int8"))) == []
    config = ModelConfig.from_folder(tmp_path)
    assert config.quantized("bitsandbytes-int8").describe_quantization().endswith("on load; experts stay as they are")
    assert config.quantized("fp8").describe_quantization().endswith("quantized on load")
    assert config.describe_quantization() is None
