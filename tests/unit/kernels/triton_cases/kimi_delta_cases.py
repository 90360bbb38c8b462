"""A whole layer of Kimi delta attention by its Triton kernels against the torch ops, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.causal_conv import triton as conv_triton
from kernels.delta_rule import triton as delta_triton
from kernels.delta_rule import triton_gates
from models.config.model_config import ModelConfig
from models.context import ForwardContext, StepStates
from models.layers import kimi_delta
from models.parallel import TensorParallel
from models.quantization.schemes import Unquantized
from models.weights.weights import Weights
from tests.unit.kernels.triton_cases.recurrent_problem import (
    MIXED,
    ONE_TOKEN,
    RAGGED,
    SHORT,
    assert_only_states_changed,
    clone,
    make_metadata,
    make_view,
    states_after,
)  # fmt: skip

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "model_max_length": 64,
    "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 24, "num_heads": 3},
}
# Half precision stands for bf16, which the interpreter truncates
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def run(layer, metadata, views, hidden):
    """The layer's outputs, and its states after the step."""
    states = StepStates([views], metadata, None)
    with torch.inference_mode():
        out = layer(hidden, ForwardContext(torch.arange(len(hidden)), [], None, [], states=states))
    return out, [states_after(view, metadata) for view in views]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [MIXED, RAGGED, SHORT, ONE_TOKEN])
def test_a_layer_equals_its_torch_ops(rows, dtype, monkeypatch):
    config = ModelConfig.from_json(CONFIG)
    w = Weights.dummy(device=CPU, dtype=dtype) / "model.layers.0.self_attn"
    layer = kimi_delta.KimiDelta(config, w, TensorParallel(), layer_index=0, method=Unquantized())
    metadata = make_metadata(rows)
    hidden = torch.randn(int(metadata.query_start_loc[-1]), 40).to(dtype)
    shapes = config.states[0].shapes
    before = tuple(make_view(metadata, *shape, rows_per_piece=7, seed=seed) for seed, shape in enumerate(shapes))
    mine, theirs = (tuple(map(clone, before)) for _ in range(2))
    out, states = run(layer, metadata, theirs, hidden)
    assert out.isfinite().all()
    assert out.norm() > 0
    for module, name in (
        (conv_triton, "causal_conv"),
        (delta_triton, "gated_delta_rule"),
        (delta_triton, "gated_delta_step"),
        (triton_gates, "delta_gates"),
        (triton_gates, "gated_rms_norm"),
    ):
        monkeypatch.setattr(kimi_delta, name, getattr(module, name))
    found, after = run(layer, metadata, mine, hidden)
    for each, expected in ((found, out), *zip(after, states, strict=True)):
        assert (each - expected).float().norm() <= TOLERANCE[dtype] * expected.float().norm()
    for view, old in zip(mine, before, strict=True):
        assert_only_states_changed(view, old, metadata)
