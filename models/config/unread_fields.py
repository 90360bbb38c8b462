"""Refuses or reports the fields of a config.json that ModelConfig does not read.

A field that changes the computation and is not read would give wrong tokens without a word. So each field is read,
changes nothing whatever its value (HARMLESS), or must have one of the values that change nothing (NEUTRAL). A field in
none of the tables is refused if its name looks like computation (SUSPICIOUS), otherwise named in one warning, as
transformers ignores it, too. Each row of models/registry.py adds its own fields.

tests/unit/models/config/test_unread_fields.py compares the tables with the config classes of transformers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from models.architecture import Architecture
from models.errors import ModelError
from models.fields import Fields

logger = logging.getLogger(__name__)

# null is neutral for each
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "per_layer_config": ({},),  # transformers: other values of some fields in some layers
    "pruned_heads": ({},),
    "position_embedding_type": ("rope",),
    "alibi": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "scoring_func": ("softmax",),  # these four: routers of DeepSeek's kind
    "topk_method": ("greedy",),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "rope_interleaved": (False,),  # SmolLM2
    "rope_interleave": (False,),
    "use_mrope": (False,),
    "full_attn_mod": (1,),  # Phi-4-mini
    "interpolate_factor": (1,),  # Phi-4-mini
}

_ORIGIN = """
    architectures auto_map base_model_name_or_path custom_pipelines finetuning_task is_llama_config license model_type
    name_or_path prefix problem_type task_specific_params tokenizer_class transformers_version transformers.js_config
    unsloth_fixed unsloth_version
"""
_TRAINING = """
    gradient_checkpointing id2label label2id neftune_noise_alpha num_labels output_router_logits
    pretraining_tp router_aux_loss_coef router_jitter_noise
"""
# How transformers computes or returns the same values
_EXECUTION = """
    cache_implementation chunk_size_feed_forward is_decoder output_attentions output_hidden_states output_scores
    return_dict return_dict_in_generate tf_legacy_loss tie_encoder_decoder tie_last_hidden_states torchscript
    use_bfloat16 use_cache
"""
# Read from generation_config.json alone, as transformers does
_GENERATION = """
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff
    eta_cutoff exponential_decay_length_penalty is_assistant length_penalty max_length max_matching_ngram_size
    max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values repetition_penalty
    suppress_tokens target_lookbehind temperature top_k top_p typical_p
"""
HARMLESS = frozenset(f"{_ORIGIN} {_TRAINING} {_EXECUTION} {_GENERATION}".split())
# Private names, token ids (those that stop an answer are read), training, choices of a kernel
_HARMLESS_NAMES = re.compile(r"^_|_token_(id|ids|index)$|initializer|dropout|_pdrop$|flash|fused?_|_implementation$")
# Outside the text part of a multimodal model
_VISION = """
    alignment_intermediate_size audio_config downsample_factor downsample_ratio ignore_index image_seq_length
    mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size text_config vision_config
    vision_feature_layer vision_feature_select_strategy
"""

# Unknown names that look like computation, and their neutral values. Biases and norms with weights need no entry: a
# tensor that no layer pulls is an error already. Many files have a sliding_window that their model does not know
SUSPICIOUS: tuple[tuple[re.Pattern[str], tuple[Any, ...]], ...] = (
    (re.compile(r"(scalar|scale|scaling|multiplier|factor|temperature(_tuning)?)s?$|^scale_|^mup_"), (False, 1)),
    (re.compile(r"(alpha|beta|clip|limit|(^|_|soft)cap(ping)?)$|^clip_"), (False, 0)),
    (re.compile(r"(?<!^sliding_)window(?!_layers)|(sinks?|attention_chunk_size)$"), (False, 0)),
    (re.compile(r"^(use_)?(q|k|qk|query|key)_\w*norm$|^per_layer_|layer_types$"), (False, 0)),
    (re.compile(r"(^|_)(rope|rotary|alibi|nope)"), ()),
)


def check_unread_fields(config: Fields, architecture: Architecture) -> None:
    """Check what parsing left unread. Logs one warning with the names that are unknown. Raises ModelError."""
    neutral = {name: values for name, values in NEUTRAL.items() if name not in config.seen} | dict(architecture.neutral)
    _check(config.raw, {*config.seen, *architecture.harmless}, neutral, config.where)


def check_vision_fields(raw: Mapping[str, Any], *, where: str, read: tuple[str, ...]) -> None:
    """Check the fields of a multimodal config outside its text part. read: those that the text part takes."""
    _check(raw, {*read, *_VISION.split()}, NEUTRAL, where)


def _check(raw: Mapping[str, Any], known: set[str], neutral: Mapping[str, tuple[Any, ...]], where: str) -> None:
    for name, values in neutral.items():
        value = raw.get(name)
        if value is not None and value not in values:
            served = " or ".join(repr(value) for value in (*values, None))
            raise ModelError(f"{where}: {name} is not supported: served is {served}, found {value!r}")
    unknown = find_unknown(raw, {*known, *neutral})
    for name in unknown:
        if sounds_like_computation(name, raw[name]):
            raise ModelError(
                f"{where}: {name} {raw[name]!r} is unknown and looks like part of the computation:"
                " remove it from the file if the model computes the same without it"
            )
    named = sorted(name for name in unknown if raw[name] and not any(pattern.search(name) for pattern, _ in SUSPICIOUS))
    if named:
        logger.warning("file=%s fields=%s are unknown and have no effect", where, ",".join(named))


def find_unknown(raw: Mapping[str, Any], known: set[str]) -> list[str]:
    """Return the fields that are not known and not harmless."""
    return [name for name in raw if name not in {*known, *HARMLESS} and not _HARMLESS_NAMES.search(name)]


def sounds_like_computation(name: str, value: Any) -> bool:
    """Return True if a field of this name would change the computation, and this value is not neutral."""
    values = [(None, *values) for pattern, values in SUSPICIOUS if pattern.search(name)]
    return any(value not in neutral for neutral in values)
