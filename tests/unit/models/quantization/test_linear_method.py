"""Linear layers ask their LinearMethod for exactly their rank's parts, and leave storage and product to it."""

import pytest
import torch
from torch import distributed

from kernels.lora.reference import LoraWeights
from kernels.ops import LoraTokens
from models.layers.linear import ColumnLinear, RowLinear, column_part, qkv_parts, row_part
from models.parallel import TensorParallel
from models.quantization.linear_method import LinearPart
from models.weights.weights import Weights
from tests.unit.models.config.test_model_config import parse

NO_GROUP = distributed.GroupMember.NON_GROUP_MEMBER
W = Weights.dummy(device=torch.device("cpu"), dtype=torch.float32)


class RecordingMethod:
    """A LinearMethod with a layout of its own: it keeps the parts it was asked for, and multiplies by nothing."""

    def load(self, w, parts):
        self.parts = list(parts)
        return {"scales": torch.tensor(2.0)}

    def apply(self, params, x, bias):
        return x * params["scales"] + (0 if bias is None else bias)


@pytest.mark.parametrize(
    ("rank", "size", "kv_rank", "kv_size"),
    [(0, 1, 0, 1), (1, 2, 1, 2), (3, 4, 1, 2), (1, 4, 0, 2), (5, 8, 1, 2)],
)
def test_qkv_parts_replicate_kv_heads_over_neighbouring_ranks(rank, size, kv_rank, kv_size):
    config = parse(hidden_size=32, num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    assert qkv_parts(config, TensorParallel(rank, size, NO_GROUP), 0) == [
        LinearPart("q_proj", 32, 32, dim=0, rank=rank, size=size),
        LinearPart("k_proj", 8, 32, dim=0, rank=kv_rank, size=kv_size),
        LinearPart("v_proj", 8, 32, dim=0, rank=kv_rank, size=kv_size),
    ]


def two_columns(tp):
    return [column_part(name, out_features=4, in_features=6, tp=tp) for name in ("a", "b")]


def test_merged_columns_split_outputs_and_their_biases():
    method, tp = RecordingMethod(), TensorParallel(1, 2, NO_GROUP)
    layer = ColumnLinear(
        W,
        two_columns(tp),
        has_bias=True,
        method=method,
    )
    assert method.parts == [LinearPart(name, 4, 6, dim=0, rank=1, size=2) for name in ("a", "b")]
    biases = [(W / name).tensor("bias", (4,))[2:] for name in ("a", "b")]
    assert torch.equal(layer(torch.ones(3, 4)), torch.full((3, 4), 2.0) + torch.cat(biases))


def test_row_splits_inputs_and_adds_its_bias_on_one_rank_only():
    method = RecordingMethod()
    biases = []
    for rank in range(2):
        tp = TensorParallel(rank, 2, NO_GROUP)
        layer = RowLinear(W, row_part("o", out_features=4, in_features=6, tp=tp), has_bias=True, method=method, tp=tp)
        assert method.parts == [LinearPart("o", 4, 6, dim=1, rank=rank, size=2)]
        biases.append(layer.bias)
    assert torch.equal(biases[0], (W / "o").tensor("bias", (4,)))
    assert biases[1] is None


class OneModuleStack:
    """What a layer asks of an AdapterStack: here one adapter, with the same matrices for whatever layer."""

    def __init__(self, part_sizes):
        generator = torch.Generator().manual_seed(0)
        self.tokens = LoraTokens(num_adapters=1, max_tokens=8, device=torch.device("cpu"))
        a, b = (
            torch.randn(1, 2, 16, 6, generator=generator),
            torch.randn(1, sum(part_sizes), 16, generator=generator),
        )
        self.weights = LoraWeights(a, b, part_sizes)

    def load(self, w, parts):
        return self.weights


def test_adapters_add_to_what_any_method_gives():
    adapters, method, tp = OneModuleStack((4, 4)), RecordingMethod(), TensorParallel()
    w = Weights.dummy(device=torch.device("cpu"), dtype=torch.float32, adapters=adapters)
    layer = ColumnLinear(
        w,
        two_columns(tp),
        has_bias=False,
        method=method,
    )
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    method.apply = lambda params, x, bias: torch.full((3, 8), 5.0) * params["scales"]
    adapters.tokens.gather(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 0, 1]))
    a, b = adapters.weights.a[0], adapters.weights.b[0]
    delta = torch.cat([x @ a[0].T @ b[:4].T, x @ a[1].T @ b[4:].T], dim=1)
    expected = 10.0 + delta * torch.tensor([1.0, 0.0, 1.0])[:, None]
    torch.testing.assert_close(layer(x), expected)
