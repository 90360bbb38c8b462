"""read_vocabulary(): each token's bytes as llguidance finds them in a tokenizer.json, without building a tokenizer.

llguidance builds one of the whole file, to ask it for each token's name. Here names are read alone, in a tenth of that
time. Two kinds are known: names that stand for bytes one character each, as of GPT-2 (Qwen, Llama 3, DeepSeek, GLM,
gpt-oss), and names in UTF-8 with bytes as "<0x0A>" and a character for the space (Gemma, Llama 2). None: all others.
The rules, odd ones too, are those of llguidance's crate toktrie_hf_tokenizers; tests compare both ways token by token.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

_BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The tokens' bytes by id, in the form in which llguidance takes a tokenizer. The last token ends a text."""

    bos_token_id: int | None = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        """Return one token a byte, as a tokenizer without merges. Masks need none: they depend on the bytes alone."""
        ids = {token: token_id for token_id, token in enumerate(self.tokens) if len(token) == 1}
        return [ids[text[i : i + 1]] for i in range(len(text)) if text[i : i + 1] in ids]


class _Model(msgspec.Struct):
    type: str
    vocab: dict[str, int]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Decoder(msgspec.Struct):
    type: str
    decoders: list[_Decoder] = []  # of a "Sequence"
    pattern: dict[str, str] = {}  # of a "Replace"
    content: str = ""


class _File(msgspec.Struct):
    model: _Model
    decoder: _Decoder
    added_tokens: list[_AddedToken] | None = None


def read_vocabulary(tokenizer_json: bytes, *, end: str) -> Vocabulary | None:
    """Return the vocabulary of a tokenizer.json with `end` behind it, as a special token that ends a text.

    None: it is of another kind, is at fault, or has such a token.
    """
    try:
        file = msgspec.json.decode(tokenizer_json, type=_File)
        return _vocabulary(file, end)
    except (msgspec.DecodeError, ValueError, IndexError):  # names without bytes, ids with gaps
        return None


def _vocabulary(file: _File, end: str) -> Vocabulary:
    """Raises ValueError or IndexError where read_vocabulary() returns None."""
    if file.model.type != "BPE":
        raise ValueError(file.model.type)
    bytes_of = _bytes_of_names(file.decoder)
    names = file.model.vocab
    added = file.added_tokens or []
    num_tokens = len(names) + sum(token.content not in names for token in added)
    added = [*added, _AddedToken(num_tokens, end, special=True)]
    added_names = {token.content for token in added}
    if end in names or "" in added_names or len(added_names) < len(added) or min(names.values(), default=0) < 0:
        raise ValueError("a token that is read otherwise")
    tokens: list[bytes | None] = [None] * len(names)
    for name, token_id in names.items():
        tokens[token_id] = b"" if name in added_names else bytes_of(name)
    special = []
    for token in added:
        if token.content not in names:
            tokens.append(None)  # tokenizers numbers them on, whatever the file says
        if names.get(token.content, len(tokens) - 1) != token.id:
            raise ValueError(token.id)
        if token.special or (token.content.startswith("<") and token.content.endswith(">")):
            special.append(token.id)
            tokens[token.id] = token.content.encode()
        else:
            try:
                tokens[token.id] = bytes_of(token.content)
            except UnicodeEncodeError:
                tokens[token.id] = token.content.encode()
    complete = [token for token in tokens if token is not None]
    if len(complete) < len(tokens):
        raise ValueError("an id twice")
    return Vocabulary(complete, special)


def _bytes_of_names(decoder: _Decoder) -> Callable[[str], bytes]:
    """Return what makes a name's bytes by this decoder. Both raise ValueError for what they do not know."""
    parts = decoder.decoders if decoder.type == "Sequence" else [decoder]
    types = [part.type for part in parts]
    if types == ["ByteLevel"]:
        return _bytes_of_characters
    if decoder.type != "Sequence" or "Sequence" in types or "ByteFallback" not in types:
        raise ValueError(types)
    spaces = [part.pattern.get("String", "") for part in parts if part.type == "Replace" and part.content == " "]
    return _names_in_utf8([" ", *(space for space in spaces if len(space) == 1)][-1])


def _names_in_utf8(space: str) -> Callable[[str], bytes]:
    def bytes_of(name: str) -> bytes:
        if not name.startswith("<0x"):
            return name.replace(space, " ").encode()
        found = _BYTE_NAME.fullmatch(name)
        if found is None:
            raise ValueError(name)
        return bytes([int(found[1], 16)])

    return bytes_of


def _character_bytes() -> dict[int, int]:
    """Return the byte of each of GPT-2's 256 characters; other code points below 256 get one that is no byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | dict.fromkeys(others, 256) | {256 + i: b for i, b in enumerate(others)}


_CHARACTER_BYTES = _character_bytes()


def _bytes_of_characters(name: str) -> bytes:
    return name.translate(_CHARACTER_BYTES).encode("latin-1")
