"""The demo model's tokenizer and its training rows: dialogues rendered, encoded, weighed, packed. Never imports torch.

The tokenizer is byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2). Words are split with their leading space, and
every digit is its own token, so that numbers are read and written digit by digit. Training twice on the same texts
gives the same tokenizer.

A document is a dialogue up to one of its answers, chosen at random, rendered as serving renders it: only then does the
template put the generation prompt and kept thoughts at the same places. Documents share rows of equal length, uncut; a
document attends only to itself (Kind.FIRST marks where each begins).
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import jinja2
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.demo_model.corpus.base import Dialogue

Stream = Callable[[int], Iterator[Dialogue]]

TEMPLATE = Path(__file__).parent / "chat_template.jinja"
VOCAB_SIZE = 6144
MAX_MODEL_LEN = 4096
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
# Ordinary tokens, not special ones, as in Qwen3: they are part of the text that a client sees
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_WORDS = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"
_SHARD_DIALOGUES = 4096
_LONG_CHATS = 0.08
_LONGEST_CHAT = 24  # messages
_LONGEST_TEXT = 1200  # characters
_HEADER_TOKENS = 3  # <|im_start|>, assistant, newline


class Kind(IntEnum):
    """A token's part in the loss."""

    SILENT = 0  # no loss: written by the template, or different in serving
    CONTEXT = 1  # text of users, tools and the system
    TARGET = 2  # text that the model learns to write
    FIRST = 3  # begins a document; no loss either


@dataclass(frozen=True)
class Rows:
    """Packed documents. tokens: [num_rows, row_tokens] uint16; kinds: the same shape, uint8."""

    tokens: np.ndarray
    kinds: np.ndarray
    num_dialogues: int  # those that fitted into a row


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train on rendered dialogues; texts with little variety give fewer than `vocab_size` tokens."""
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


def documents(stream: Iterator[Dialogue], rng: random.Random) -> Iterator[str]:
    """Render each dialogue up to one of its answers."""
    render = _template()
    for dialogue in stream:
        answers = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
        yield render(
            messages=dialogue.messages[: rng.choice(answers) + 1],
            tools=list(dialogue.tools),
            enable_thinking=dialogue.enable_thinking,
        )


def with_long_chats(stream: Iterator[Dialogue], rng: random.Random) -> Iterator[Dialogue]:
    """Yield the dialogues, sometimes several as one chat: earlier messages do not change an answer.

    Dialogues with tools or a system message stay alone, since both apply to a whole chat.
    """
    for dialogue in stream:
        if rng.random() >= _LONG_CHATS or not _can_join(dialogue):
            yield dialogue
            continue
        messages, length = list(dialogue.messages), rng.randrange(4, _LONGEST_CHAT)
        while len(messages) < length and sum(len(message["content"]) for message in messages) < _LONGEST_TEXT:
            following = next(stream)
            if _can_join(following):
                messages += following.messages
            else:
                yield following
        yield Dialogue(messages)


def make_rows(
    stream: Stream, tokenizer: Tokenizer, *, seed: int, num_dialogues: int, row_tokens: int, num_processes: int = 1
) -> Rows:
    """Make the rows of `num_dialogues` dialogues, in shards that depend on (seed, shard) alone."""
    counts = [_SHARD_DIALOGUES] * (num_dialogues // _SHARD_DIALOGUES) + [num_dialogues % _SHARD_DIALOGUES]
    serialized = tokenizer.to_str()
    jobs = [
        (stream, serialized, shard_seed(seed, shard), count, row_tokens) for shard, count in enumerate(counts) if count
    ]
    if num_processes == 1:
        shards = [_make_shard(job) for job in jobs]
    else:
        with multiprocessing.get_context("spawn").Pool(num_processes, initializer=_use_one_core) as pool:
            shards = pool.map(_make_shard, jobs, chunksize=1)
    return Rows(
        tokens=np.concatenate([shard.tokens for shard in shards]),
        kinds=np.concatenate([shard.kinds for shard in shards]),
        num_dialogues=sum(shard.num_dialogues for shard in shards),
    )


def shard_seed(seed: int, shard: int) -> int:
    """The seed of one shard's stream."""
    return seed * 1_000_003 + shard


def kinds_of(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the Kind of each token of rendered documents, laid end to end; FIRST is not marked yet.

    SILENT are the empty <think></think>, which the template writes, and the first token of an older answer, before
    which serving has that empty block. With a loss on it, a thinking model would learn to answer at once.
    """
    token_id = _ids_of(tokenizer)
    kinds = np.full(len(tokens), Kind.CONTEXT, np.uint8)
    is_header = (tokens[:-1] == token_id[TURN_START]) & (tokens[1:] == token_id["assistant"])
    starts = np.flatnonzero(is_header) + _HEADER_TOKENS
    ends = np.flatnonzero(tokens == token_id[TURN_END])
    steps = np.zeros(len(tokens) + 1, np.int8)
    steps[starts] = 1
    steps[ends[np.searchsorted(ends, starts)] + 1] = -1
    kinds[np.cumsum(steps[:-1]) == 1] = Kind.TARGET
    thinks = tokens[starts] == token_id["<think>"]
    kinds[starts[~thinks]] = Kind.SILENT
    is_empty = tokens[starts[thinks] + 2] == token_id["</think>"]
    for offset in range(4):  # <think>, blank line, </think>, blank line
        kinds[starts[thinks][is_empty] + offset] = Kind.SILENT
    return kinds


def pack(lengths: list[int], row_tokens: int) -> list[tuple[int, int]]:
    """Return (row, start) of each document: the row where it leaves the least room (best fit), or a new row."""
    places: list[tuple[int, int]] = []
    rooms: list[tuple[int, int]] = []  # (room, row), ascending
    num_rows = 0
    for length in lengths:
        index = bisect_left(rooms, (length, -1))
        if index < len(rooms):
            room, row = rooms.pop(index)
        else:
            room, row, num_rows = row_tokens, num_rows, num_rows + 1
        places.append((row, row_tokens - room))
        if room > length:
            insort(rooms, (room - length, row))
    return places


def _make_shard(job: tuple[Stream, str, int, int, int]) -> Rows:
    stream, serialized, seed, num_dialogues, row_tokens = job
    tokenizer = Tokenizer.from_str(serialized)
    rng = random.Random(seed)
    dialogues = itertools.islice(with_long_chats(stream(seed), rng), num_dialogues)
    texts = list(documents(dialogues, rng))
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    encoded = [ids for ids in encoded if len(ids) <= row_tokens]
    flat = np.array(list(itertools.chain.from_iterable(encoded)), np.uint16)
    flat_kinds = kinds_of(flat, tokenizer)
    places = pack([len(ids) for ids in encoded], row_tokens)
    shape = (max(row for row, _ in places) + 1, row_tokens)
    tokens = np.full(shape, tokenizer.token_to_id(END_OF_TEXT), np.uint16)
    kinds = np.full(shape, Kind.FIRST, np.uint8)  # padding: documents of one silent token
    offset = 0
    for (row, start), ids in zip(places, encoded, strict=True):
        end = offset + len(ids)
        tokens[row, start : start + len(ids)] = flat[offset:end]
        kinds[row, start : start + len(ids)] = flat_kinds[offset:end]
        kinds[row, start] = Kind.FIRST
        offset = end
    return Rows(tokens, kinds, len(encoded))


def _can_join(dialogue: Dialogue) -> bool:
    return dialogue.joins and not dialogue.tools and dialogue.messages[0]["role"] == "user"


def _use_one_core() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process per core is enough


def _template() -> Callable[..., str]:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # text, no HTML  # nosec B701
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render


def _ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    names = (TURN_START, TURN_END, "assistant", "<think>", "</think>")
    ids = {name: token_id for name in names if (token_id := tokenizer.token_to_id(name)) is not None}
    assert len(ids) == len(names), f"each must be one token: {names}, found {ids}"
    return ids
