"""Four and eight ranks share the layers of every quantisation, and give the logits of one."""

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.quantized_weights import requantize
from tests.support.int_checkpoints import FORMATS, save_quantized
from tests.support.quantized_checkpoints import logits_of, relative_error
from tests.support.rank_group import run_ranks
from tests.support.reference import save_checkpoint
from tests.support.tensor_parallel_rank import PROMPT, run_rank
from tests.unit.models.quantization import test_bitsandbytes as bitsandbytes
from tests.unit.models.quantization import test_float4 as float4
from tests.unit.models.quantization import test_fp8 as fp8
from tests.unit.models.quantization import test_int8 as int8

# Eight ranks have 128 inputs each of o_proj and down_proj, and copies of two key heads
LLAMA = LlamaConfig(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=64,
    pad_token_id=None,
)
BITSANDBYTES = {
    "bnb_int8": (bitsandbytes.as_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bnb_nf4": (bitsandbytes.as_nf4, {"quant_method": "bitsandbytes"} | bitsandbytes.NF4_CONFIG),
}
W8A8 = {"w8a8": (int8.int8, float4.W8A8), "w8a8_static": (int8.int8_static, float4.W8A8_STATIC)}
STORES = fp8.KINDS | W8A8 | BITSANDBYTES | {kind: float4.KINDS[kind] for kind in ("mxfp4", "nvfp4", "modelopt")}
INTEGERS = ("awq", "gptq", "gptq_desc_act", "packed_asymmetric", "packed_channel")
# Where activations are rounded by token, each rank rounds its share of a row layer's inputs by the scale of that share;
# with a static scale an activation between two integers falls on either, as the order of a sum says
ROUNDED = {"fp8_tensor": 0.15, "compressed_channel": 0.15, "compressed_tensor": 0.15, "w8a8": 0.06, "w8a8_static": 0.02}


@pytest.mark.full
@pytest.mark.parametrize("size", [4, 8])
def test_ranks_give_the_logits_of_one(size, tmp_path):
    save_checkpoint(tmp_path / "source", LLAMA)
    folders = [requantize(tmp_path / "source", tmp_path / kind, *STORES[kind]) for kind in STORES]
    for kind in INTEGERS:
        save_checkpoint(tmp_path / f"dense-{kind}", LLAMA)
        save_quantized(tmp_path / f"dense-{kind}", tmp_path / kind, FORMATS[kind])
        folders.append(tmp_path / kind)
    run_ranks(run_rank, size, tmp_path / "store", folders, timeout_s=600)
    for folder in folders:
        expected = logits_of(folder, prompt=PROMPT)
        found = [torch.load(folder / f"logits-{size}-{rank}.pt") for rank in range(size)]
        assert all(torch.equal(logits, found[0]) for logits in found), folder.name
        error = relative_error(found[0], expected)
        assert error < ROUNDED.get(folder.name, 1e-5), (folder.name, error)
