"""Runs every op on the CPU and prints those that fail; started by test_without_triton.py where Triton is hidden."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch

from kernels import ops
from kernels.e2m1 import quantize_mxfp4
from kernels.inputs.reference import DecodeInputs, DraftInputs, MixedInputs, PackedInputs
from kernels.linear import eight_bits, reference
from kernels.linear import ops as linear_ops
from kernels.linear.float4 import make_float4_weight
from kernels.linear.late_norm import LateNorm
from kernels.linear.reference import make_int_weight, make_lut4_weight
from kernels.linear.rounding import Rounding
from kernels.linear.w8a8 import quantize_rows_int8
from kernels.lora.reference import LoraWeights
from kernels.moe.reference import ExpertSum
from kernels.states import StateMetadata, StateView
from models.build import build
from models.config.model_config import ModelConfig
from models.weights.weights import Weights
from tests.support.models_harness import CPU, SINGLE, PagedRunner

MODULES = (ops, linear_ops, eight_bits)
# The Triton sampler itself, which engine/device/sampler.py makes on CUDA devices only
CUDA_ONLY = {"TokenSampler"}

ROW = torch.zeros(1, dtype=torch.int64)
X = torch.randn(3, 128)
W = torch.randn(64, 128)
BIAS = torch.randn(64)


def norm_rope_write_kv() -> None:
    caches = torch.zeros(2, 4, 4, 1, 16)
    tokens = torch.arange(3)
    ops.norm_rope_write_kv(
        torch.randn(3, 64), torch.ones(16), torch.ones(16), 1e-6, tokens, torch.randn(8, 16), *caches, tokens,
        num_heads=2,
    )  # fmt: skip


def norm_rope_write_latent() -> None:
    tokens = torch.arange(3)
    ops.norm_rope_write_latent(
        torch.randn(3, 24), torch.randn(3, 2, 8), torch.ones(16), 1e-6, tokens, torch.randn(8, 8),
        torch.zeros(4, 4, 1, 24), tokens,
    )  # fmt: skip


def gather_decode_inputs() -> None:
    ops.gather_decode_inputs(
        ROW, last_token=ROW, num_computed=torch.zeros(2, dtype=torch.int64),
        block_tables=torch.zeros(1, 2, 4, dtype=torch.int32), block_size=16, padding_row=1,
        out=DecodeInputs.allocate(num_tables=1, max_rows=2, max_blocks=4, device=CPU),
    )  # fmt: skip


def gather_mixed_inputs() -> None:
    plan = PackedInputs.view(torch.zeros(PackedInputs.num_values(1, 1), dtype=torch.int32), 1, 1)
    plan.seq_lens.fill_(1)
    plan.query_start_loc[1] = 1
    ops.gather_mixed_inputs(
        ROW, plan, num_computed=ROW.clone(), block_tables=torch.zeros(1, 1, 4, dtype=torch.int32),
        block_size=16, out=MixedInputs.allocate(num_tables=1, max_tokens=4, max_rows=2, max_blocks=4, device=CPU),
    )  # fmt: skip


def gather_draft_inputs() -> None:
    packed = torch.zeros(PackedInputs.num_values(1, 1, has_drafts=True), dtype=torch.int32)
    plan = PackedInputs.view(packed, 1, 1, has_drafts=True)
    out = DraftInputs.allocate(max_rows=1, ring_size=2, device=CPU)
    ops.gather_draft_inputs(torch.zeros(2, dtype=torch.int32), plan, ring_size=2, padding_row=1, out=out)


def penalize() -> None:
    ops.penalize(
        torch.randn(1, 8), ROW, ROW, output_counts=torch.ones(1, 8, dtype=torch.int32),
        in_prompt=torch.zeros(1, 8, dtype=torch.bool), presence=torch.ones(1), frequency=torch.ones(1),
        repetition=torch.ones(1),
    )  # fmt: skip


def add_loras() -> None:
    tokens = ops.LoraTokens(num_adapters=1, max_tokens=4, device=CPU)
    tokens.gather(torch.ones(1, dtype=torch.int32), ROW)
    tokens.add(torch.zeros(1, 64), X[:1], LoraWeights(torch.randn(1, 1, 4, 128), torch.randn(1, 64, 4), (64,)))


def state(num_rows: int, row_size: int) -> tuple[StateView, StateMetadata]:
    """A state's place, and two rows: two first tokens, and a fifth."""
    view = StateView(torch.zeros(2, 3, 64), first_piece=1, num_rows=num_rows, row_size=row_size)
    starts, seq_lens = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32)
    return view, StateMetadata(starts, seq_lens, torch.tensor([1, 0]), torch.tensor([[1, 0], [2, 0]]), None, 2, None)


def mamba2() -> None:
    b = torch.randn(3, 1, 16)
    ops.mamba2(torch.randn(3, 2, 4), b, b, torch.rand(3, 2), -torch.ones(2), torch.ones(2), *state(2 * 4, 16))


def gated_delta_rule() -> None:
    q, v, gates = torch.randn(3, 1, 16), torch.randn(3, 2, 4), torch.rand(3, 2)
    ops.gated_delta_rule(q, q, v, -gates, gates, *state(2 * 4, 16), scale=1.0)


def gated_delta_step() -> None:
    q, v, gates = torch.randn(3, 1, 16), torch.randn(3, 2, 4), torch.rand(3, 2)
    ops.gated_delta_step(q, q, v, gates, gates, torch.ones(2), torch.ones(2), *state(2 * 4, 16), scale=1.0)


def fused_moe() -> None:
    ops.fused_moe(
        X, torch.randn(3, 4), torch.randn(4, 64, 128), torch.randn(4, 128, 32), top_k=2, renormalize=True,
        round_weights=False,
    )  # fmt: skip


def late_sum() -> ExpertSum:
    return ExpertSum(torch.randn(6, 128), torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32), has_absent=False)


def multiply_dense() -> None:
    linear = linear_ops.DenseLinear()
    linear(X, W, BIAS)
    assert not linear.gates(X, W)
    assert not linear.takes_norm(X[:1], W)
    linear.gated(X, W, is_gelu=True)
    linear.normed(LateNorm(X[:1], X[1:2], torch.ones(128), 1e-6, torch.empty(1, 128)), W, BIAS)


def multiply_int() -> None:
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    linear_ops.IntLinear()(X, make_int_weight(codes, torch.rand(2, 64).half(), None, bits=4), BIAS)


def multiply_4bit() -> None:
    packed, scales = reference.quantize_nf4(W)
    weight = make_lut4_weight(packed, scales, torch.tensor(reference.NF4_TABLE), X.dtype)
    linear_ops.Linear4Bit()(X, weight, BIAS)


def multiply_fp8_rows() -> None:
    eight_bits.rows_linear(*eight_bits.quantize_rows(X), *reference.quantize_rows(W), BIAS, X.dtype)


def multiply_fp8_blocks() -> None:
    blocks = reference.quantize_blocks(W, 32, 64)
    eight_bits.Fp8BlockLinear()(X, *blocks, BIAS, rows=32, columns=64)


def multiply_float4() -> None:
    weight = make_float4_weight(*quantize_mxfp4(W), torch.ones(64), X.dtype)
    linear_ops.Float4Linear()(X, weight, BIAS)


CASES: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: ops.rms_norm(X, torch.ones(128), 1e-6),
    "add_rms_norm": lambda: ops.add_rms_norm(X, X, torch.ones(128), 1e-6),
    "layer_norm": lambda: ops.layer_norm(X, torch.ones(128), None, 1e-6),
    "add_layer_norm": lambda: ops.add_layer_norm(X, X, torch.ones(128), torch.ones(128), 1e-6),
    "relu_squared": lambda: ops.relu_squared(X),
    "xielu": lambda: ops.xielu(X, torch.ones(4)),
    "silu_and_mul": lambda: ops.silu_and_mul(X),
    "gelu_tanh_and_mul": lambda: ops.gelu_tanh_and_mul(X),
    "add_rms_norm_rounded": lambda: eight_bits.add_rms_norm_rounded(X, X, torch.ones(128), 1e-6, Rounding(32)),
    "gate_and_mul_rounded": lambda: eight_bits.gate_and_mul_rounded(X, Rounding(), is_gelu=False),
    "causal_conv": lambda: ops.causal_conv(X[:, :8], W[:8, :4], None, *state(8, 3), has_silu=True),
    "gated_delta_rule": gated_delta_rule,
    "gated_delta_step": gated_delta_step,
    "delta_gates": lambda: ops.delta_gates(X, X, torch.ones(128), torch.ones(128)),
    "gated_rms_norm": lambda: ops.gated_rms_norm(X[:, None], X[:, None], torch.ones(128), 1e-6),
    "mamba2": mamba2,
    "mamba2_dt": lambda: ops.mamba2_dt(torch.randn(3, 2), torch.ones(2), (0.0, 1.0)),
    "grouped_gated_norm": lambda: ops.grouped_gated_norm(X, X, torch.ones(128), 1e-6, group_size=32),
    "fused_moe": fused_moe,
    "sums_late": lambda: ops.sums_late(X),
    "sum_experts": lambda: ops.sum_experts(late_sum()),
    "sum_experts_add_rms_norm": lambda: ops.sum_experts_add_rms_norm(late_sum(), X, torch.ones(128), 1e-6, None),
    "norm_rope_write_kv": norm_rope_write_kv,
    "norm_rope_write_latent": norm_rope_write_latent,
    "gather_decode_inputs": gather_decode_inputs,
    "gather_mixed_inputs": gather_mixed_inputs,
    "gather_draft_inputs": gather_draft_inputs,
    "penalize": penalize,
    "allow_only": lambda: ops.allow_only(torch.randn(1, 64), ROW, torch.ones(1, 2, dtype=torch.int32)),
    "LoraTokens": add_loras,
    "DenseLinear": multiply_dense,
    "IntLinear": multiply_int,
    "quantize_rows": lambda: eight_bits.quantize_rows(X),
    "quantize_by": lambda: eight_bits.quantize_by(X, torch.tensor(0.1)),
    "has_twin": lambda: eight_bits.has_twin(X),
    "rounds_before": lambda: eight_bits.rounds_before(W),
    "round_rows": lambda: eight_bits.round_rows(X, Rounding(64)),
    "quantize_groups": lambda: eight_bits.quantize_groups(X, 64),
    "rows_linear": multiply_fp8_rows,
    "Fp8BlockLinear": multiply_fp8_blocks,
    "Float4Linear": multiply_float4,
    "quantize_rows_int8": lambda: eight_bits.quantize_rows_int8(X),
    "quantize_by_int8": lambda: eight_bits.quantize_by_int8(X, torch.tensor(0.1)),
    "Int8Linear": lambda: eight_bits.Int8Linear()(X, *quantize_rows_int8(W), BIAS, input_scale=None),
    "Linear4Bit": multiply_4bit,
    "linear_int8": lambda: linear_ops.linear_int8(X, *reference.quantize_int8(W), BIAS),
}


def run_model(folder: Path, quantization: str) -> None:
    """Two steps of a model of random weights."""
    config = ModelConfig.from_folder(folder).quantized(quantization)
    with torch.inference_mode():
        model = build(config, Weights.dummy(device=CPU, dtype=torch.float32), SINGLE)
    runner = PagedRunner(model, config)
    row = runner.add_row()
    for prompt in ([3, 30, 17], [4]):
        assert bool(runner.step([(row, prompt)])[0].isfinite().all())


def public_names(module: ModuleType) -> Iterator[str]:
    """What the module itself defines under a public name, by def, class or assignment."""
    for node in ast.parse(inspect.getsource(module)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        for name in (getattr(target, "name", getattr(target, "id", "_")) for target in targets):
            if not name.startswith("_") and name not in CUDA_ONLY:
                yield name


def failures(folder: Path) -> Iterator[str]:
    """A line for each op without a case, and for each case that raises."""
    defined = {name for module in MODULES for name in public_names(module)}
    if defined != CASES.keys():
        yield f"ops and cases differ by {sorted(defined ^ CASES.keys())}"
    models = {f"a model in {name}": lambda name=name: run_model(folder, name) for name in ("fp8", "bitsandbytes-nf4")}
    for name, case in (CASES | models).items():
        try:
            case()
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {error}"


def main() -> None:
    """Print the failures; argument: a folder with a config.json."""
    assert importlib.util.find_spec("triton") is None
    assert not ops.HAS_TRITON
    print("\n".join(failures(Path(sys.argv[1]))))
