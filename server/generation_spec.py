"""GenerationSpec: a validated request, and what validation takes from outside. Imports server only."""

from typing import NamedTuple

import msgspec

from engine.protocol import GrammarSpec, SamplingParams
from server.schemas import ChatBody, CompletionBody
from server.schemas_embeddings import EmbeddingBody


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: `prompts` × `n` engine requests, and how their tokens become text."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    params: SamplingParams  # the first child's; child i of a prompt uses seed + i
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    visible_ids: frozenset[int] = frozenset()  # special tokens that are text nevertheless: tags to be parsed
    continues_prompt: bool = False  # the texts join the prompts'; else each is a turn of its own
    cache_salt: str = ""
    priority: int = 0
    lora_index: int = 0  # as in AddRequest
    grammar: GrammarSpec | None = None  # what each answer must match, checked to compile
    grammar_param: str | None = None  # the field that asks for it, in the client's words
    is_scoring_only: bool = False  # no answer: the one token that the engine makes at least is dropped
    timeout_s: float | None = None  # from arrival
    arrival_s: float  # time.monotonic()

    @property
    def deadline_s(self) -> float | None:
        """The time.monotonic() at which the request is over."""
        return None if self.timeout_s is None else self.arrival_s + self.timeout_s

    def text_context(self, index: int) -> tuple[int, ...]:
        """The tokens that the text of choice `index` goes on from."""
        return self.prompts[index // self.n] if self.continues_prompt else ()


class Moment(NamedTuple):
    """What a spec takes from outside: arrival, the server's deadline, a drawn seed, and whose request it is."""

    arrival_s: float
    timeout_s: float | None
    seed: int
    key_hash: str = ""

    def timeout_of(self, body: ChatBody | CompletionBody | EmbeddingBody) -> float | None:
        """Return the seconds that a request has from its arrival on."""
        return min((seconds for seconds in (body.timeout, self.timeout_s) if seconds is not None), default=None)
