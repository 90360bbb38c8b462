"""The demo model's tokenizer: byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2). Never imports torch.

Words and their leading space are cut apart first, and every digit stands alone, so that a number is read and written
column by column. Training it twice on the same texts gives the same tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = Path(__file__).parent / "chat_template.jinja"
VOCAB_SIZE = 6144
MAX_MODEL_LEN = 4096
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
# Tokens, but not special ones, as in Qwen3: they are part of the text that a client sees
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_WORDS = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train on rendered dialogues; poor texts give fewer than `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": MAX_MODEL_LEN,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
