"""GrammarCompiler: compiles a GrammarSpec into a Matcher and fills token masks. The only user of llguidance; no torch.

GrammarCompiler has one tokenizer, loaded once per process. This takes a second with a large vocabulary and holds the
interpreter lock, so it happens before serving begins, while another thread links torch. compile() releases the lock.
Matcher is the state of one request's output in its grammar. Copies of a matcher share its lexer cache.
A mask has one extra bit, for an end-of-grammar token appended to the vocabulary. No model can sample it, so the end of
a grammar is never confused with the model's own end-of-sequence tokens.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.grammar.vocabulary import read_vocabulary
from engine.interface.errors import GrammarError, UnsupportedFeature, sentence
from engine.interface.protocol import GrammarSpec

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_END = "<|end of grammar|>"
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_MIN_PARALLEL = 16  # masks; fewer are faster without threads
_MAX_THREADS = 8
_MAX_LEXER_STATES = 50_000  # 1 to 2 KiB each, kept as long as the grammar
_MAX_REASON_CHARS = 400
_REWORDED = {"NoExtensionBias": "It matches no text at all."}  # internal names of llguidance


class Matcher:
    """The state of one request's output in its grammar. Not thread-safe."""

    def __init__(self, spec: GrammarSpec, matcher: LLMatcher) -> None:
        self.spec = spec
        self.inner = matcher

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        return Matcher(self.spec, self.inner.deep_copy())

    def accept(self, token_id: int) -> bool:
        """Advance by one token; return False if it is not allowed, or the grammar became too complex to follow."""
        return self.inner.consume_token(token_id)

    @property
    def is_ended(self) -> bool:
        """True once no token may follow."""
        return self.inner.is_stopped()

    @property
    def error(self) -> str:
        """The reason why the matcher failed; empty: no error."""
        return _reason(self.inner.get_error())


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and fills masks. Thread-safe except fill_masks()."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises UnsupportedFeature if llguidance is not installed or does not support this tokenizer."""
        try:
            import llguidance
        except ImportError:
            raise UnsupportedFeature(
                "Structured output needs the package llguidance, which is not installed here."
            ) from None
        try:
            vocabulary = read_vocabulary(tokenizer_json, end=_END)
            if vocabulary is None:
                text, self.end_token_id = _with_end_token(tokenizer_json)
                self._tokenizer: LLTokenizer = llguidance.LLTokenizer(text, eos_token=self.end_token_id)
                is_last = self._tokenizer.tokenize_str(_END, parse_special=True) == [self.end_token_id]
            else:
                self.end_token_id, is_last = vocabulary.eos_token_id, True
                self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
        except BaseException as error:  # a panic of Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = sentence(_reason(str(error)) or type(error).__name__)
            raise UnsupportedFeature(f"This model's tokenizer does not work with structured output: {reason}") from None
        if not is_last:
            raise UnsupportedFeature("This model's tokenizer does not work with structured output: its ids have gaps.")
        self._llguidance = llguidance
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self._executor: LLExecutor | None = None
        self.num_words = self._tokenizer.vocab_size // 32 + (self._tokenizer.vocab_size % 32 > 0)

    @classmethod
    def from_folder(cls, folder: Path) -> GrammarCompiler:
        """Load the tokenizer of a model folder. Blocks for up to seconds. Raises UnsupportedFeature."""
        try:
            text = (folder / "tokenizer.json").read_bytes()
        except OSError:
            raise UnsupportedFeature(
                "Structured output needs a model folder with a tokenizer.json, which this one has not."
            ) from None
        return cls(text)

    def compile(self, spec: GrammarSpec) -> Matcher:
        """Compile, and make the first mask, often the slowest. Blocks, releases the GIL. Raises GrammarError."""
        source = _without_forcing(spec.source)
        inner = self._llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        matcher = Matcher(spec, inner)
        mask = bytearray() if matcher.error else bytearray(matcher.inner.compute_bitmask())
        if matcher.error:
            raise GrammarError(sentence(matcher.error))
        mask[self.end_token_id // 8] &= ~(1 << self.end_token_id % 8)
        if matcher.is_ended or not any(mask):
            raise GrammarError("It allows nothing but the empty text.")
        return matcher

    def fill_masks(self, matchers: list[Matcher]) -> np.ndarray:
        """Return masks of the allowed tokens, [len(matchers), num_words] uint32; bit b of word w: token 32 * w + b."""
        import numpy as np  # not before the head start of an engine's process has begun

        masks = np.zeros((len(matchers), self.num_words), dtype=np.uint32)
        num_bytes = self.num_words * 4
        if len(matchers) < _MIN_PARALLEL:
            for mask, matcher in zip(masks, matchers, strict=True):
                matcher.inner.unsafe_compute_mask_ptr(mask.ctypes.data, num_bytes)
            return masks
        if self._executor is None:
            self._executor = self._llguidance.LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        places = [(matcher.inner, place) for place, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, num_bytes, len(matchers))
        return masks


class CompilerLoader:
    """Loads a folder's GrammarCompiler once, in its own thread or in the first caller's of load() or get()."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._compiler: GrammarCompiler | None = None
        self._error: UnsupportedFeature | None = None

    def prepare(self) -> Callable[[], None]:
        """Import what load() needs, and return it: then it imports nothing, and waits for no thread that links."""
        with contextlib.suppress(ImportError):
            import llguidance  # noqa: F401
        return self.load

    def load(self) -> None:
        """Load in this thread, if that has not happened. Blocks, and holds the interpreter lock."""
        with self._lock:
            if self._compiler is None and self._error is None:
                try:
                    self._compiler = GrammarCompiler.from_folder(self._folder)
                except UnsupportedFeature as error:
                    self._error = error

    def start(self) -> None:
        """Load in the background, if that has not begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.load, name="grammar-vocabulary", daemon=True)
            self._thread.start()

    def settle(self) -> None:
        """Wait until no thread loads, so that this process may fork. Blocks."""
        if self._thread is not None:
            self._thread.join()

    def get(self) -> GrammarCompiler:
        """Return the compiler. Blocks until it is loaded. Raises UnsupportedFeature."""
        self.load()
        if self._compiler is None:
            assert self._error is not None
            raise UnsupportedFeature(self._error.message)
        return self._compiler


def _with_end_token(tokenizer_json: bytes) -> tuple[str, int]:
    """Append the end-of-grammar token to a tokenizer.json, without its merges; return the text and the token's id.

    Masks depend on the tokens' bytes alone, and reading the merges takes as long as all the rest.
    """
    # What is passed on stays text: hundreds of thousands of objects would take as long again
    config = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(config["model"], type=dict[str, msgspec.Raw])
    vocab: Any = msgspec.json.decode(model["vocab"])
    added: list[dict[str, Any]] = msgspec.json.decode(config.get("added_tokens", b"null")) or []
    highest = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1  # a list: of Unigram models
    token_id = max([highest, *(token["id"] for token in added)]) + 1
    if bytes(model.get("merges", b"null")) not in (b"null", b"[]"):
        config["model"] = msgspec.Raw(msgspec.json.encode(model | {"merges": msgspec.Raw(b"[]")}))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ended = [*added, {"id": token_id, "content": _END, **flags}]
    config["added_tokens"] = msgspec.Raw(msgspec.json.encode(ended))
    return msgspec.json.encode(config).decode(), token_id


def _without_forcing(source: str) -> str:
    """Disable llguidance's forced tokens, so that masks depend on bytes only, even if only one text can follow.

    With them llguidance tokenizes that text, finds a special token in it (<think> in a string of a schema), and allows
    only this token, which matches no text.
    """
    if not source.lstrip().startswith("{"):
        return source + _NO_FORCING
    form = msgspec.json.decode(source)
    for grammar in form["grammars"]:
        grammar["lark_grammar"] += _NO_FORCING
    return msgspec.json.encode(form).decode()


def _reason(error: str) -> str:
    """Return the informative line of an llguidance error, which may also contain the grammar's source."""
    lines = [line.strip() for line in error.strip().splitlines()]
    details = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]  # of a regex
    reason = ": ".join([lines[0].removesuffix(": regex parse error:"), *details]) if lines else ""
    reason = _REWORDED.get(reason, reason)
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[: _MAX_REASON_CHARS - 1] + "…"
