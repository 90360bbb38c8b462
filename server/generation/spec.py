"""GenerationSpec and Stats: what one HTTP request asks of its generation, and what that was. Never imports torch."""

import msgspec

from engine.interface.protocol import CacheReport, GrammarSpec, SamplingParams, ThinkingBudget
from engine.interface.tenant import Charge, Rates, Tenant


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: `prompts` × `n` engine requests, and how their tokens become text."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    params: SamplingParams  # of choice 0; choice i of all, prompt after prompt, uses seed + i
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    visible_ids: frozenset[int] = frozenset()  # special tokens that are text nevertheless: tags to be parsed
    continues_prompt: bool = False  # the answers continue the prompts' text; else each is a turn of its own
    cache_salt: str = ""
    open_salt: str = ""  # cache_salt, if the client had given none
    pin_s: float = 0.0  # how long the prompt stays in the prefix cache after its last token; 0: as all others
    priority: int = 0
    tenant: Tenant = Tenant()
    lora_index: int = 0  # as in AddRequest
    grammar: GrammarSpec | None = None  # what each answer must match, checked to compile
    grammar_param: str | None = None  # the field of the client's request that asks for it
    thinking: ThinkingBudget | None = None  # the limit of each answer's reasoning
    is_scoring_only: bool = False  # no answer: the single token that the engine has to make is dropped
    timeout_s: float | None = None  # from arrival
    arrival_s: float  # time.monotonic()

    @property
    def deadline_s(self) -> float | None:
        """The time.monotonic() at which the request is over."""
        return None if self.timeout_s is None else self.arrival_s + self.timeout_s

    def charge(self) -> Charge:
        """Return what the whole request asks of its tenant's limits."""
        num_prompt, num_answers = sum(map(len, self.prompts)), self.n * len(self.prompts)
        return Charge(num_prompt, self.n * num_prompt + num_answers * self.params.max_tokens)

    def text_context(self, index: int) -> tuple[int, ...]:
        """Return the prompt's tokens before the text of choice `index`."""
        return self.prompts[index // self.n] if self.continues_prompt else ()


class Stats(msgspec.Struct, kw_only=True):
    """Tokens and times of one generation so far; the source of usage, timings and the access log."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0  # of the output; counted in chats alone
    queue_s: float | None = None  # of the first choice that started, as prefill_s and ttft_s
    prefill_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None  # mean over all tokens after each choice's first
    total_s: float = 0.0
    cache: CacheReport | None = None  # of the first choice
    rates: Rates | None = None  # of its API key when it was accepted
    num_replays: int = 0  # of the choice with the most: how often it went on with another engine
    finish_reasons: list[str] = []  # distinct ones, in order of arrival
