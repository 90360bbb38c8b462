"""The config.json of models that people download: each is understood, down to the number of parameters it states."""

import pytest

from models.config.model_config import ModelConfig
from models.config.size import mlp_values_per_token
from models.errors import ModelError

NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
TIED = {"tie_word_embeddings": True}
QWEN_MOE = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def read(architecture, sizes, **fields):
    raw = {"architectures": [f"{architecture}ForCausalLM"], **dict(zip(NAMES, sizes, strict=True)), **fields}
    return ModelConfig.from_json(raw)


PUBLISHED = {
    "TinyLlama-1.1B": (
        read("Llama", (32000, 2048, 5632, 22, 32, 4, 2048), rope_scaling=None),
        1_100_048_384,
    ),
    "Llama-2-7b": (read("Llama", (32000, 4096, 11008, 32, 32, 32, 4096), rope_scaling=None), 6_738_415_616),
    "Llama-3.2-1B": (
        read("Llama", (128256, 2048, 8192, 16, 32, 8, 131072), head_dim=64, rope_scaling=LLAMA3, **TIED),
        1_235_814_400,
    ),
    "SmolLM2-135M": (read("Llama", (49152, 576, 1536, 30, 9, 3, 8192), **TIED), 134_515_008),
    "Mistral-7B-v0.1": (
        read("Mistral", (32000, 4096, 14336, 32, 32, 8, 32768), sliding_window=4096),
        7_241_732_096,
    ),
    "Mistral-Nemo": (
        read("Mistral", (131072, 5120, 14336, 40, 32, 8, 131072), head_dim=128, sliding_window=None),
        12_247_782_400,
    ),
    "Mistral-Small-24B": (
        read("Mistral", (131072, 5120, 32768, 40, 32, 8, 32768), head_dim=128, sliding_window=None),
        23_572_403_200,
    ),
    "Mixtral-8x7B": (
        read("Mixtral", (32000, 4096, 14336, 32, 32, 8, 32768), sliding_window=None, rope_theta=1e6),
        46_702_792_704,
    ),
    "Mixtral-8x22B": (
        read("Mixtral", (32768, 6144, 16384, 56, 48, 8, 65536), sliding_window=None, num_local_experts=8),
        140_630_071_296,
    ),
    "Qwen1.5-MoE-A2.7B": (
        read(
            "Qwen2Moe",
            (151936, 2048, 5632, 24, 16, 16, 8192),
            **QWEN_MOE | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            shared_expert_intermediate_size=5632,
            norm_topk_prob=False,
            use_sliding_window=False,
        ),
        14_315_784_192,
    ),
    "Qwen2-57B-A14B": (
        read(
            "Qwen2Moe",
            (151936, 3584, 18944, 28, 28, 4, 131072),
            **QWEN_MOE | {"num_experts": 64, "moe_intermediate_size": 2560},
            shared_expert_intermediate_size=20480,
            norm_topk_prob=False,
            use_sliding_window=False,
        ),
        57_408_658_944,
    ),
    "Qwen3-30B-A3B": (
        read("Qwen3Moe", (151936, 2048, 6144, 48, 32, 4, 40960), head_dim=128, **QWEN_MOE, norm_topk_prob=True),
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        read(
            "Qwen3Moe",
            (151936, 4096, 12288, 94, 64, 4, 40960),
            head_dim=128,
            **QWEN_MOE | {"moe_intermediate_size": 1536},
            norm_topk_prob=True,
        ),
        235_093_634_560,
    ),
    "SmolLM3-3B": (
        read("SmolLM3", (128256, 2048, 11008, 36, 16, 4, 65536), no_rope_layers=[1, 1, 1, 0] * 9, rope_theta=5e6),
        3_075_098_624,
    ),
    "Phi-3-mini-4k": (read("Phi3", (32064, 3072, 8192, 32, 32, 32, 4096), sliding_window=2047), 3_821_079_552),
    "Phi-4": (read("Phi3", (100352, 5120, 17920, 40, 40, 10, 16384), rope_theta=250000), 14_659_507_200),
    "Phi-4-mini": (
        read(
            "Phi3",
            (200064, 3072, 8192, 32, 24, 8, 131072),
            partial_rotary_factor=0.75,
            original_max_position_embeddings=4096,
            rope_scaling=LONGROPE,
            sliding_window=262144,
            **TIED,
        ),
        3_836_021_760,
    ),
    "Granite-3.1-2b": (
        read("Granite", (49155, 2048, 8192, 40, 32, 8, 131072), attention_multiplier=0.015625, **TIED),
        2_533_531_648,
    ),
    "OLMo-2-7B": (read("Olmo2", (100352, 4096, 11008, 32, 32, 32, 4096)), 7_298_617_344),
    "gemma-2b": (
        read("Gemma", (256000, 2048, 16384, 18, 8, 1, 8192), head_dim=256, hidden_act="gelu", hidden_activation=None),
        2_506_172_416,
    ),
    "gemma-2-2b": (
        read(
            "Gemma2",
            (256000, 2304, 9216, 26, 8, 4, 8192),
            head_dim=256,
            hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh",
        ),
        2_614_341_888,
    ),
    "gemma-3-1b": (
        read("Gemma3", (262144, 1152, 6912, 26, 4, 1, 32768), head_dim=256, sliding_window=512, rope_theta=1000000),
        999_885_952,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    config, num_parameters = PUBLISHED[name]
    assert config.num_parameters == num_parameters


def test_smollm3_has_no_positions_in_every_fourth_layer():
    config, _ = PUBLISHED["SmolLM3-3B"]
    assert [rope is None for rope in config.ropes] == [False, False, False, True] * 9
    assert {rope.theta for rope in config.ropes if rope is not None} == {5e6}
    assert config.tie_word_embeddings


def test_smollm3_derives_its_layers_without_positions():
    sizes = (100, 32, 32, 8, 4, 4, 64)
    every_third = read("SmolLM3", sizes, no_rope_layer_interval=3)
    assert [rope is None for rope in every_third.ropes] == [layer in (2, 5) for layer in range(8)]
    assert every_third.ropes[0].theta == 2e6
    windows = read("SmolLM3", sizes, use_sliding_window=True, sliding_window=9).sliding_windows
    assert windows == (None, None, None, 9) * 2
    with pytest.raises(ModelError, match="no_rope_layers must be a list of 0 and 1 for 8 layers"):
        read("SmolLM3", sizes, no_rope_layers=[1, 0])


def test_phi_windows_longer_than_the_context_are_none():
    assert set(PUBLISHED["Phi-3-mini-4k"][0].sliding_windows) == {2047}
    assert set(PUBLISHED["Phi-4-mini"][0].sliding_windows) == {None}
    assert set(PUBLISHED["Phi-4"][0].sliding_windows) == {None}


def test_phi_4_mini_turns_three_quarters_of_each_head():
    config, _ = PUBLISHED["Phi-4-mini"]
    (rope,) = set(config.ropes)
    assert (config.head_dim, rope.rotary_dim(config.head_dim)) == (128, 96)
    assert (rope.type, rope.original_max_position_embeddings, rope.factor) == ("longrope", 4096, 32.0)
    assert config.max_context_len == 131072


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi_3_calls_longrope_by_several_names(name):
    sizes = (32064, 3072, 8192, 32, 32, 32, 131072)
    scaling = {"type": name, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    assert read("Phi3", sizes, rope_scaling=scaling).ropes[0].type == "longrope"
    assert read("Phi3", sizes, rope_scaling=scaling).ropes[0].original_max_position_embeddings == 4096


def test_granite_constants():
    fields = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    found = read("Granite", (100, 32, 32, 2, 4, 4, 64), attention_multiplier=0.015625, **fields).multipliers
    assert (found.attention, found.embedding, found.residual, found.logits_divisor) == (0.015625, 12.0, 0.22, 8.0)


def test_gemma_constants_and_layers():
    one, two, three = (PUBLISHED[name][0] for name in ("gemma-2b", "gemma-2-2b", "gemma-3-1b"))
    assert [config.multipliers.embedding for config in (one, two, three)] == [2048**0.5, 2304**0.5, 1152**0.5]
    assert [config.multipliers.attention for config in (one, two, three)] == [1 / 16] * 3
    assert [config.multipliers.attention_softcap for config in (one, two, three)] == [0, 50, 0]
    assert [config.multipliers.logits_softcap for config in (one, two, three)] == [0, 30, 0]
    assert {config.activation for config in (one, two, three)} == {"gelu_tanh"}
    assert all(config.tie_word_embeddings for config in (one, two, three))
    assert two.sliding_windows == (4096, None) * 13
    assert three.sliding_windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert [rope.theta for rope in three.ropes] == [1e4 if window else 1e6 for window in three.sliding_windows]


def test_gemma_3_stretches_only_the_layers_that_see_all():
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = read(
        "Gemma3",
        (262208, 2560, 10240, 6, 8, 4, 131072),
        head_dim=256,
        sliding_window=1024,
        rope_scaling=scaling,
        rope_local_base_freq=10000.0,
    )
    assert [rope.type for rope in config.ropes] == ["default"] * 5 + ["linear"]
    assert config.max_context_len == 131072


def test_kinds_of_layers_are_told_apart():
    small = PUBLISHED["gemma-3-1b"][0].one_layer_of_each_kind()
    assert small.num_layers == 3
    assert small.sliding_windows == (512, 512, None)
    assert [rope.theta for rope in small.ropes] == [1e4, 1e4, 1e6]
    assert PUBLISHED["Llama-2-7b"][0].one_layer_of_each_kind().num_layers == 2


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Mixtral-8x7B", 12.9), ("Qwen1.5-MoE-A2.7B", 2.7), ("Qwen3-30B-A3B", 3.3), ("Qwen3-235B-A22B", 22.2)],
)
def test_a_token_meets_as_many_parameters_as_published(name, billions):
    assert PUBLISHED[name][0].num_active_parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_layers_with_experts_are_those_that_the_config_means():
    every_second = read("Qwen3Moe", (100, 32, 32, 6, 4, 4, 64), **QWEN_MOE | {"decoder_sparse_step": 2})
    assert every_second.sparse_layers == (False, True) * 3
    named = read("Qwen3Moe", (100, 32, 32, 4, 4, 4, 64), **QWEN_MOE | {"mlp_only_layers": [0, 3]})
    assert named.sparse_layers == (False, True, True, False)
    assert named.one_layer_of_each_kind().sparse_layers == (False, True, False)
    none = read("Qwen3Moe", (100, 32, 32, 2, 4, 4, 64), **QWEN_MOE | {"mlp_only_layers": [0, 1]})
    assert (none.experts, none.num_parameters) == (None, none.num_active_parameters)
    assert set(PUBLISHED["Mixtral-8x7B"][0].sparse_layers) == {True}


def test_a_step_has_room_for_what_each_expert_of_a_token_makes():
    assert mlp_values_per_token(PUBLISHED["Qwen3-30B-A3B"][0]) == 8 * (768 + 2048) + 2048
    assert mlp_values_per_token(PUBLISHED["Qwen1.5-MoE-A2.7B"][0]) == 4 * (1408 + 2048) + 3 * 5632 + 2048
    assert mlp_values_per_token(PUBLISHED["Llama-2-7b"][0]) == 3 * 11008
    mixed = read("Qwen3Moe", (100, 32, 10**6, 2, 4, 4, 64), **QWEN_MOE | {"mlp_only_layers": [0]})
    assert mlp_values_per_token(mixed) == 3 * 10**6


def test_experts_go_by_either_name():
    sizes = (100, 32, 32, 2, 4, 4, 64)
    newer = {key: value for key, value in QWEN_MOE.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert read("Qwen3Moe", sizes, **newer) == read("Qwen3Moe", sizes, **QWEN_MOE)


def test_windows_of_mixtures_follow_their_transformers_classes():
    fields = {"use_sliding_window": True, "sliding_window": 9}
    qwen3 = read("Qwen3Moe", (100, 32, 32, 3, 4, 4, 64), **QWEN_MOE, **fields)
    assert qwen3.sliding_windows == (9, 9, 9)
    shared = {"shared_expert_intermediate_size": 8, "max_window_layers": 4}
    qwen2 = read("Qwen2Moe", (100, 32, 32, 6, 4, 4, 64), **QWEN_MOE, **fields, **shared)
    assert qwen2.sliding_windows == (9, None, 9, None, None, None)
    assert read("Mixtral", (100, 32, 32, 2, 4, 4, 64)).sliding_windows == (None, None)


@pytest.mark.parametrize(
    ("tp_size", "name", "message"),
    [
        (16, "Qwen1.5-MoE-A2.7B", None),
        (32, "Mixtral-8x7B", None),
        (64, "Qwen3-30B-A3B", "num_heads 32 does not split over 64 ranks"),
        (7, "Qwen2-57B-A14B", "intermediate_size of each expert 2560 does not split over 7 ranks"),
    ],
)
def test_what_each_rank_has_of_an_expert_is_checked(tp_size, name, message):
    if message is None:
        PUBLISHED[name][0].check_tensor_parallel(tp_size)
        return
    with pytest.raises(ModelError, match=message):
        PUBLISHED[name][0].check_tensor_parallel(tp_size)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ("Gemma", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported: supported is 'gelu_pytorch_tanh'"),
        ("Phi3", {"partial_rotary_factor": 0.4}, "would rotate 3 of 8 dimensions"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "would rotate 12 of 8 dimensions"),
        ("Phi3", {"partial_rotary_factor": 1e308}, "partial_rotary_factor 1e[+]308 is not supported: a share"),
        ("Granite", {"logits_scaling": 0}, "logits_scaling must be a positive number, found 0"),
        ("Gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping must be a non-negative number"),
        ("Gemma3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("Mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 8"),
        ("Qwen3Moe", {"num_experts": 4}, "num_experts_per_tok is missing"),
        ("Qwen3Moe", QWEN_MOE | {"num_experts": 0}, "num_experts must be a positive integer, found 0"),
        ("Qwen3Moe", QWEN_MOE | {"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layer indices"),
        ("Qwen3Moe", QWEN_MOE | {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layer indices"),
        ("Qwen2Moe", QWEN_MOE, "shared_expert_intermediate_size is missing"),
        (
            "Qwen2Moe",
            QWEN_MOE | {"shared_expert_intermediate_size": 8, "qkv_bias": 1},
            "qkv_bias must be true or false, found 1",
        ),
    ],
)
def test_what_a_family_does_not_do_is_refused_by_name(architecture, fields, message):
    with pytest.raises(ModelError, match=message):
        read(architecture, (100, 32, 32, 2, 4, 4, 64), **fields)
