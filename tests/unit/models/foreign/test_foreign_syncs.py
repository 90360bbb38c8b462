"""A step of transformers' own class reads no number back from the device: each would be a wait for the GPU."""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention.base import AttentionMetadata
from models.context import ForwardContext, LayerKV
from models.foreign.interface import ATTENTION
from models.foreign.model import ForeignModel
from models.foreign.probe import probe

NUM_TOKENS = 5
OLD_SIZES = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "vocab_size": 97}
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 97}
CLASSES = {
    "gpt2": (transformers.GPT2LMHeadModel, lambda: transformers.GPT2Config(**OLD_SIZES, pad_token_id=0)),
    "gpt_bigcode": (
        transformers.GPTBigCodeForCausalLM,
        lambda: transformers.GPTBigCodeConfig(**OLD_SIZES, pad_token_id=0),
    ),
    "starcoder2": (
        transformers.Starcoder2ForCausalLM,
        lambda: transformers.Starcoder2Config(**SIZES, num_key_value_heads=2, intermediate_size=64, pad_token_id=0),
    ),
}


class Reads(TorchDispatchMode):
    """Counts the reads of a tensor's number, as by .item()."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten  # item: in inference mode
        self.count += func in (aten.item.default, aten._local_scalar_dense.default, aten.nonzero.default)
        return func(*args, **(kwargs or {}))


class NoAttention:
    """The part of an AttentionBackend that a forward pass calls; its own reads are not those of the class."""

    def forward(self, q, k_cache, v_cache, metadata, **_):
        return torch.zeros(*q.shape[:2], v_cache.shape[3])


def context(calls):
    slots = torch.arange(NUM_TOKENS)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=slots,
        max_query_len=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
        num_decodes=0,
    )
    shape = (1, 16, calls[0].num_kv_heads, calls[0].head_dim)
    caches = [LayerKV(torch.zeros(shape), torch.zeros(shape)) for _ in calls]
    return ForwardContext(slots, [metadata], NoAttention(), caches)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_forward_pass_reads_no_number_of_a_tensor(kind):
    cls, make_config = CLASSES[kind]
    config = make_config()
    calls = probe(cls, config, longest=64)
    made = ForeignModel(cls._from_config(config, attn_implementation=ATTENTION).eval(), calls)
    ctx = context(calls)
    with torch.inference_mode(), Reads() as reads:
        hidden = made(torch.zeros(NUM_TOKENS, dtype=torch.int64), ctx)  # padding, by the config
        logits = made.compute_logits(hidden)
    assert logits.shape == (NUM_TOKENS, 97)
    assert reads.count == 0
