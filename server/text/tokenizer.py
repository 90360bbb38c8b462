"""Tokenizer: text to ids and back, chat messages to ids. Imports tokenizers; transformers only when needed.

Loaded once per HTTP worker from the model's folder: tokenizer.json, tokenizer_config.json and the chat template
(chat_template.jinja, chat_template.json, tokenizer_config.json: the first that exists; some models have a second
template for chats with tools). A folder without tokenizer.json is loaded by transformers' AutoTokenizer, which is
slow to import.
"""

import json
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from engine.interface.errors import InvalidParameter, PromptTooLong, StartupError, UnsupportedFeature, sentence
from server.text.chat_template import ChatTemplate, Message, split_marked
from server.text.detokenizer import ByteLevelDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer
from server.text.generation_defaults import read_json
from server.text.parsers.detect import ChatFormat, detect_format
from server.text.template_sandbox import FREE_SIZE

TEMPLATE_DEADLINE_S = 2.0  # of the thread: others that run meanwhile make no chat invalid
_BRIEF_S, _BRIEF_SIZE = 0.005, 1 << 16  # most small chats take 0.3 ms
_USUAL_BYTES_PER_TOKEN = 8  # over the average of texts: a longer text is counted before it is encoded whole
_PIECE_CHARS = 64 * 1024  # of a text that is counted; encoding takes some hundred bytes per character
_MAX_COMPOSED = 4  # characters that NFC joins to one at most
CONTEXT = "This model's maximum context length"
_TEMPLATE_NAMES = ("default", "tool_use")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class RenderedChat(NamedTuple):
    """A chat as text. is_marked: control tokens that users wrote are wrapped in marks."""

    text: str
    is_marked: bool


class Tokenizer:
    """Encodes and decodes for one model. Thread-safe: nothing changes after construction but a cache."""

    def __init__(
        self,
        backend: HfTokenizer,
        *,
        named_tokens: dict[str, str],
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        """`tool_template`: renders chats with tools instead of the other one, if the model has two."""
        backend.no_truncation()  # tokenizer.json can carry a training set-up's truncation, which would cut prompts
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._id_of_added = {token.content: id_ for id_, token in added.items()}
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.named_tokens = named_tokens
        kinds = _kinds_of(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else set()
        self._byte_level = TokenBytes(backend) if kinds == {"ByteLevel"} else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._has_space_marks = bool(kinds & {"Metaspace", "Replace"})
        self._max_token_bytes = _max_token_bytes(backend) if self._byte_level is not None else None
        special = [token.content for token in added.values() if token.special]
        others = [token.content for token in added.values() if not token.special]
        self.chat_template, self._tool_template = (
            ChatTemplate(source, variables=named_tokens, special_tokens=special, added_tokens=others)
            if source is not None
            else None
            for source in (chat_template, tool_template)
        )
        self.chat_format = _chat_format(self.chat_template, self._tool_template, added_tokens=self._id_of_added)

    @property
    def template_variables(self) -> frozenset[str]:
        """Return the names that the model's chat templates read, of which a request may set some."""
        templates = (self.chat_template, self._tool_template)
        return frozenset().union(*(template.names_read for template in templates if template is not None))

    def tag_ids(self, tags: Iterable[str]) -> dict[str, int]:
        """Return the ids of those tags that are one added token, whether a special one or not."""
        return {tag: self._id_of_added[tag] for tag in tags if tag in self._id_of_added}

    def added_tokens(self) -> dict[int, AddedToken]:
        """Return the tokens beside the vocabulary, control tokens among them, by their ids."""
        return self._backend.get_added_tokens_decoder()

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's end-of-sequence id, if it names one."""
        return self._backend.token_to_id(self.named_tokens.get("eos_token", ""))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a raw prompt; control tokens written in it count as such, as everywhere in the field."""
        # a batch of one, since encode() holds the GIL: a long prompt would stop every stream of the worker
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_inner(self, text: str) -> list[int]:
        """Return the ids of text within a text: sentencepiece must not put its first space there.

        The trick of transformers' _encode_chat_piece: encode after a newline, then take the newline off.
        """
        newline = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        if ids[: len(newline)] == newline:
            return ids[len(newline) :]
        return self.encode(text, add_special_tokens=False)

    def check_length(self, text: str, *, max_tokens: int, param: str, limit: str = CONTEXT) -> None:
        """Raise PromptTooLong for a text that is hopelessly long, without encoding all of it (8 MiB take 1.5 GB).

        Its size alone is proof where the vocabulary bounds the text of a token. Else it is counted in pieces, up to
        twice `max_tokens`, which is proof enough: encoding is local but for a piece's first and last word.
        `param`: the text's field; `limit`: the name of max_tokens.
        """
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if num_bytes <= _USUAL_BYTES_PER_TOKEN * max_tokens:
            return
        if self._max_token_bytes is not None and (least := num_bytes // self._max_token_bytes) > max_tokens:
            raise PromptTooLong(
                f"{limit} is {max_tokens} tokens, but the prompt's {num_bytes} bytes are at least {least} tokens.",
                param=param,
            )
        num_tokens = 0
        for begin in range(0, len(text), _PIECE_CHARS):
            num_tokens += len(self.encode(text[begin : begin + _PIECE_CHARS], add_special_tokens=False))
            if num_tokens > 2 * max_tokens:
                end = begin + _PIECE_CHARS
                counted = f"the prompt's {len(text)} characters are"
                if end < len(text):
                    counted = f"the first {end} of the prompt's {len(text)} characters alone are"
                raise PromptTooLong(f"{limit} is {max_tokens} tokens, but {counted} {num_tokens} tokens.", param=param)

    def encode_checked(
        self, texts: Sequence[str], *, max_model_len: int, max_total: int, param: str
    ) -> list[list[int]]:
        """Return the ids of raw prompts, up to the first that exceeds max_model_len, which the caller refuses.

        Raises PromptTooLong as check_length() does, before any is encoded, and InvalidParameter for more tokens
        together than max_total.
        """
        for text in texts:
            self.check_length(text, max_tokens=max_model_len, param=param)
        prompts: list[list[int]] = []
        num_tokens = 0
        for text in texts:
            prompts.append(self.encode(text))
            num_tokens += len(prompts[-1])
            if len(prompts[-1]) > max_model_len:
                break
            if num_tokens > max_total:
                raise InvalidParameter(
                    f"{param} has more than {max_total} tokens in all, the limit: send it in several requests.",
                    param=param,
                )
        return prompts

    def render_chat(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        is_brief: bool = False,
    ) -> "RenderedChat":
        """Render a chat within TEMPLATE_DEADLINE_S. Blocks: run it in a thread, unless it is to be brief: within 5 ms.

        Raises UnsupportedFeature without a template, InvalidParameter if the template refuses, RenderTooLong.
        """
        template = (self._tool_template if tools else None) or self.chat_template
        if template is None:
            raise UnsupportedFeature(
                "This model has no chat template: use /v1/completions, or serve it with --chat-template FILE.",
                param="messages",
            )
        is_marked = any(map(template.has_control_tokens, (list(messages), tools, template_kwargs)))
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            mark=is_marked,
            deadline_s=time.thread_time() + (_BRIEF_S if is_brief else TEMPLATE_DEADLINE_S),
            free_size=_BRIEF_SIZE if is_brief else FREE_SIZE,
        )
        return RenderedChat(text, is_marked)

    def encode_chat(self, rendered: "RenderedChat") -> list[int]:
        """Return the ids of a rendered chat; the template writes the beginning-of-sequence token itself. Blocks."""
        if rendered.is_marked:
            return self._encode_marked(rendered.text)
        return self.encode(rendered.text, add_special_tokens=False)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all ids at once."""
        return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]  # as in encode()

    def detokenizer(
        self, *, skip_special_tokens: bool, visible_ids: frozenset[int] = frozenset(), context: Sequence[int] = ()
    ) -> Detokenizer:
        """Return a fresh incremental decoder. `visible_ids`: special tokens that are not skipped in any case.

        `context`: the tokens whose text the new text goes on from.
        """
        hidden_ids = frozenset[int]()
        if skip_special_tokens:
            hidden_ids = self.special_ids - visible_ids if visible_ids else self.special_ids
        if self._byte_level is not None:
            return ByteLevelDetokenizer(self._byte_level, hidden_ids=hidden_ids, context=context)
        return WindowDetokenizer(self._backend, hidden_ids=hidden_ids, context=context)

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's own bytes, which need not be whole characters."""
        if self._byte_level is not None:
            return self._byte_level(token_id)
        token = self._backend.id_to_token(token_id) or ""
        if self._has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return (token.replace("▁", " ") if self._has_space_marks else token).encode()

    def token_name(self, token_id: int) -> str:
        """Return the vocabulary's own spelling of a token, e.g. "Ġhello"; "" for an id that it does not know."""
        return self._backend.id_to_token(token_id) or ""

    def _encode_marked(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece, is_plain in split_marked(text):
            if not ids:
                ids += self._encode_plain(piece) if is_plain else self.encode(piece, add_special_tokens=False)
            else:
                ids += self._encode_plain(piece) if is_plain else self.encode_inner(piece)
        return ids

    def _encode_plain(self, token: str) -> list[int]:
        """Encode a control token's text as the characters that it is made of."""
        for parts in ((token[:1], token[1:]), tuple(token)):
            ids = [id_ for part in parts if part for id_ in self.encode_inner(part)]
            if self._added_ids.isdisjoint(ids):
                return ids
        return []  # a vocabulary whose single characters are control tokens: nothing can stand for it but nothing


def load_tokenizer(folder: Path, *, chat_template: Path | None = None) -> Tokenizer:
    """Load a model folder's tokenizer; `chat_template` replaces the model's own template. Raises StartupError."""
    config = read_json(folder / "tokenizer_config.json")
    sources = _find_templates(folder, config) if chat_template is None else (_read_text(chat_template), None)
    named_tokens = _named_tokens({**read_json(folder / "special_tokens_map.json"), **config})
    path = folder / "tokenizer.json"
    try:
        backend = HfTokenizer.from_file(str(path)) if path.is_file() else _through_transformers(folder)
    except StartupError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        reason = str(error).strip().split("\n", 1)[0].rstrip(".:")
        raise StartupError(f"The tokenizer in {folder} cannot be loaded: {reason}.") from error
    try:
        return Tokenizer(backend, named_tokens=named_tokens, chat_template=sources[0], tool_template=sources[1])
    except jinja2.TemplateSyntaxError as error:
        reason = sentence(str(error.message))
        raise StartupError(f"The chat template of {folder} has an error in line {error.lineno}: {reason}") from error
    except (RecursionError, MemoryError, SyntaxError) as error:  # of Python's compiler, on the template as Python code
        raise StartupError(f"The chat template of {folder} is nested too deeply.") from error


def _find_templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the template, and the one for chats with tools if it is another."""
    if (folder / "chat_template.jinja").is_file():
        other = folder / "additional_chat_templates" / "tool_use.jinja"
        return _read_text(folder / "chat_template.jinja"), _read_text(other) if other.is_file() else None
    template = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if not isinstance(template, list):
        return template if isinstance(template, str) else None, None
    named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    default, tool_use = (named.get(name) if isinstance(named.get(name), str) else None for name in _TEMPLATE_NAMES)
    return default, tool_use


def _chat_format(
    template: ChatTemplate | None, tool_template: ChatTemplate | None, *, added_tokens: Collection[str]
) -> ChatFormat:
    if template is None:
        return ChatFormat()
    found = detect_format(template.source, names_read=template.names_read, added_tokens=added_tokens)
    if tool_template is None:
        return found
    other = detect_format(tool_template.source, names_read=tool_template.names_read, added_tokens=added_tokens)
    return msgspec.structs.replace(found, tools=other.tools, takes_tools=other.takes_tools)


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _kinds_of(decoder: dict[str, Any]) -> set[str]:
    """The types in a decoder's JSON, sequences taken apart."""
    if decoder["type"] == "Sequence":
        return set().union(*map(_kinds_of, decoder["decoders"]))
    return {decoder["type"]}


def _max_token_bytes(backend: HfTokenizer) -> int | None:
    """Return the most bytes of a text that a byte-level tokenizer makes one token of; None: there is no such bound."""
    normalizer = json.loads(backend.normalizer.__getstate__()) if backend.normalizer is not None else None
    added = backend.get_added_tokens_decoder().values()
    vocabulary = backend.get_vocab(with_added_tokens=False)  # a character for each byte
    has_lost_text = (
        (normalizer is not None and normalizer["type"] != "NFC")
        or (backend.pre_tokenizer is not None and b'"Removed"' in backend.pre_tokenizer.__getstate__())
        or any(token.lstrip or token.rstrip for token in added)
        or not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    )
    if has_lost_text:
        return None
    longest = max([*map(len, vocabulary), *(len(token.content.encode()) for token in added)])
    return longest * (1 if normalizer is None else _MAX_COMPOSED)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"The chat template {path} cannot be read: {error}.") from error


def _through_transformers(folder: Path) -> HfTokenizer:
    from transformers import AutoTokenizer  # slow (seconds), so only for folders without tokenizer.json

    # a folder, already resolved: nothing is downloaded
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)  # nosec B615
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if backend is None:
        raise StartupError(f"The tokenizer in {folder} has no fast form (no tokenizer.json can be made of it).")
    return backend
