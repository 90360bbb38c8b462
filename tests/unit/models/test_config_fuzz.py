"""Whatever stands in a config.json, it is understood or refused in one sentence, never a crash."""

from contextlib import suppress

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.layers.rotary import make_cos_sin_caches
from models.registry import ARCHITECTURES
from tests.support.models_harness import CPU
from tests.unit.models.config.test_published_configs import LLAMA3, LONGROPE, NAMES

SIZES = dict(zip(NAMES, (100, 32, 48, 4, 4, 2, 64), strict=True)) | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
}
FIELDS = (
    *[name for name in NAMES if name != "num_hidden_layers"],  # a large one is a large tuple
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "hidden_activation",
    "dtype",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "max_window_layers",
    "sliding_window_pattern",
    "text_config",
    "no_rope_layers",
    "no_rope_layer_interval",
    "rope_theta",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "bos_token_id",
    "eos_token_id",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "qkv_bias",
    "quantization_config",
    "use_bidirectional_attention",
)
ROPE_FIELDS = (
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
    "short_factor",
    "long_factor",
    "partial_rotary_factor",
    "full_attention",
    "sliding_attention",
)
ROPE_TYPES = st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"])
NUMBERS = st.sampled_from([float("inf"), float("nan"), 10**400, 2**31, 5e-324, 0, -1, 1e308])
SCALARS = NUMBERS | st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner))
ROPES = st.sampled_from([LLAMA3, LONGROPE, {"factor": 2.0}]).flatmap(
    lambda base: st.builds(
        lambda kind, changes: base | {"rope_type": kind} | changes,
        ROPE_TYPES,
        st.dictionaries(st.sampled_from(ROPE_FIELDS), VALUES, max_size=3),
    )
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)


@settings(max_examples=settings.default.max_examples * 3, deadline=None)
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    changes=CHANGES,
    rope=st.none() | ROPES,
    spelling=st.sampled_from(["rope_scaling", "rope_parameters"]),
)
def test_any_config_is_understood_or_refused(architecture, changes, rope, spelling):
    fields = SIZES | ({} if rope is None else {spelling: rope}) | changes
    raw = {"architectures": [architecture], "text_config": fields, **fields}
    try:
        config = ModelConfig.from_json(raw)
    except ModelError:
        return
    assert len(config.sliding_windows) == len(config.ropes) == len(config.sparse_layers) == config.num_layers
    assert config.max_context_len > 0
    with suppress(ModelError):
        for table in make_cos_sin_caches(config.with_max_model_len(70), device=CPU, dtype=torch.float32):
            assert table.isfinite().all()
    assert 0 < config.num_active_parameters <= config.num_parameters
    assert config.one_layer_of_each_kind().num_layers <= config.num_layers
