"""Writes the built-in demo checkpoint, models/demo/checkpoint/: `python -m models.demo.build [FOLDER]`.

Imports numpy and tokenizers; never torch. Everything is a function of this file and corpus.txt (a frozen
copy of the project's own text), so two builds are byte-identical and tests/unit/models/test_demo.py can say so. The
weights are random: the demo shows the daemon, not a language. The shape is small enough for two CPU cores and still
divides by two tensor-parallel ranks.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CHECKPOINT = Path(__file__).parent / "checkpoint"
CORPUS = Path(__file__).parent / "corpus.txt"

SEED = 20251121
VOCAB_SIZE = 2048
HIDDEN_SIZE = 128
INTERMEDIATE_SIZE = 384
NUM_LAYERS = 4
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 32
MAX_MODEL_LEN = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build(folder: Path) -> None:
    """Write the whole checkpoint into `folder`, in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", model_config())
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0})
    _write_json(folder / "tokenizer_config.json", tokenizer_config())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    train_tokenizer(CORPUS.read_text(encoding="utf-8")).save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(safetensors_file(make_weights()))


def model_config() -> dict[str, object]:
    """Return config.json: a Llama that transformers loads too."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": NUM_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": NUM_KV_HEADS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def tokenizer_config() -> dict[str, object]:
    """Return tokenizer_config.json."""
    return {
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": MAX_MODEL_LEN,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def train_tokenizer(text: str) -> tokenizers.Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) of VOCAB_SIZE tokens on `text`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def make_weights() -> dict[str, np.ndarray]:
    """Return every tensor, in float32.

    Uniform numbers of the legacy RandomState: numpy freezes its stream, and no libm function takes part, so the bytes
    are the same on every machine.
    """
    random = np.random.RandomState(SEED)
    kv_size = NUM_KV_HEADS * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN_SIZE)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN_SIZE,)
        shapes[prefix + "self_attn.q_proj.weight"] = (NUM_HEADS * HEAD_DIM, HIDDEN_SIZE)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_size, HIDDEN_SIZE)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_size, HIDDEN_SIZE)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN_SIZE, NUM_HEADS * HEAD_DIM)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN_SIZE,)
        shapes[prefix + "mlp.gate_proj.weight"] = (INTERMEDIATE_SIZE, HIDDEN_SIZE)
        shapes[prefix + "mlp.up_proj.weight"] = (INTERMEDIATE_SIZE, HIDDEN_SIZE)
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN_SIZE, INTERMEDIATE_SIZE)
    shapes["model.norm.weight"] = (HIDDEN_SIZE,)
    shapes["lm_head.weight"] = (VOCAB_SIZE, HIDDEN_SIZE)
    weights: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
        else:
            # variance 1 / fan-in keeps activations of order one; the head is hotter so that likely tokens stand out
            scale = (3.0 / shape[1]) ** 0.5 * (4.0 if name == "lm_head.weight" else 1.0)
            weights[name] = (random.uniform(-1.0, 1.0, shape) * scale).astype(np.float32)
    return weights


def safetensors_file(weights: dict[str, np.ndarray]) -> bytes:
    """Return the tensors as a bfloat16 safetensors file: header length, JSON header, data.

    Written here because safetensors' own serializer needs torch for bfloat16, or changes its interface by version.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in weights.items():
        start, data = len(data), data + _bfloat16_bytes(values)
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def _bfloat16_bytes(values: np.ndarray) -> bytes:
    """Round float32 to bfloat16, ties to even, as little-endian bytes."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT)
