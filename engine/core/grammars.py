"""Grammars: makes the token masks of constrained requests for each step. Uses bitmasks only; never torch or text.

A request is constrained by a grammar, by a TokenFilter (bad_words, allowed_token_ids), or by both.
Life of a request with a grammar: defer() keeps it while its grammar compiles in a thread → pop_compiled() returns it to
the loop, with its own matcher → masks() before each of its tokens is sampled, advance() after each is committed → end.
Without a grammar its life begins with follow().
The Request owns its matcher. Matcher and filter depend on committed tokens only, so preemption, recomputation, dropped
steps and aborts need no code here. Without constrained requests the loop only tests `live`, `pending` and `compiling`.
"""

import logging
import math
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import numpy as np

from engine.core.planned_step import RowOutput
from engine.core.request import Request
from engine.core.step import StepPlan, TokenMasks
from engine.grammar.compiler import GrammarCompiler, Matcher
from engine.interface.errors import GrammarError, Overloaded, ServiceError, UnsupportedFeature
from engine.interface.protocol import GrammarSpec, SamplingParams

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 15.0  # of one grammar: the server has test-compiled it before, with a shorter timeout
_LANES = (False, True, True)  # one thread each: is_costly of the grammars that it compiles
_STACK_BYTES = 16 << 20  # far more than in the test compilation, since a stack overflow ends the process
_MAX_CACHED = 32  # compiled grammars
_THINKING_FORBIDDEN = (
    "The limit of reasoning cannot be kept: the answer's grammar does not allow the end of the reasoning here."
)


class Outcome(NamedTuple):
    """A request to queue (pop_compiled) or to end (advance, masks). `error`: the request fails with it."""

    request: Request
    error: ServiceError | None


class _Wanted(NamedTuple):
    """The grammar for which a pending request waits, since a time."""

    spec: GrammarSpec
    since_s: float


class TokenFilter:
    """Applies one request's allowed_token_ids and bad_words to its token masks."""

    def __init__(self, params: SamplingParams, *, vocab_size: int) -> None:
        allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
        allowed[params.allowed_token_ids or slice(vocab_size)] = True
        allowed[[word[0] for word in params.bad_words if len(word) == 1]] = False
        self._always = _packed(allowed)  # [num_words] uint32
        # Longer words, by their second-to-last token: all tokens but the last, and the last
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        for word in params.bad_words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append((word[:-1], word[-1]))

    def apply(self, mask: np.ndarray, output_token_ids: list[int]) -> None:
        """Clear the tokens in mask ([num_words] uint32, in place) that must not follow the committed output."""
        mask &= self._always
        if self._longer and output_token_ids:
            for prefix, last in self._longer.get(output_token_ids[-1], ()):
                if output_token_ids[-len(prefix) :] == prefix:
                    mask[last // 32] &= ~_bit(last)


class Grammars:
    """Owns the pending requests, the compiled grammars and the set of live constrained requests."""

    def __init__(self, get_compiler: Callable[[], GrammarCompiler], *, vocab_size: int) -> None:
        """get_compiler: called in threads; may block and raise UnsupportedFeature. vocab_size: the model's."""
        self._get_compiler = get_compiler
        self._num_words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self.pending: dict[str, Request] = {}  # requests whose grammar compiles, by request_id
        self.num_pending_prompt_tokens = 0  # total length of their prompts
        self._wanted: dict[str, _Wanted] = {}  # by request_id
        self._progress_s = dict.fromkeys(_LANES, -math.inf)  # when the last of a lane was compiled, or failed
        self._taken: deque[GrammarSpec] = deque()  # by a thread, since the last pop_compiled()
        self._taken_s: dict[GrammarSpec, float] = {}  # when a thread took one that is not compiled yet
        self.live: dict[Request, TokenFilter | None] = {}  # the queued and running constrained requests
        self._compiled: OrderedDict[GrammarSpec, Matcher] = OrderedDict()  # initial states; least recently used first
        self.compiling: set[GrammarSpec] = set()  # queued in a thread, or with a result for pop_compiled()
        # By is_costly: a cheap grammar waits for no costly one
        self._todo: dict[bool, queue.SimpleQueue[GrammarSpec]] = {lane: queue.SimpleQueue() for lane in _LANES}
        self._done: deque[tuple[GrammarSpec, Matcher | ServiceError]] = deque()
        self._threads: list[threading.Thread] = []
        self._compiler: GrammarCompiler | None = None  # set once a grammar was compiled
        self._vocabulary = self._bits_below(vocab_size)
        self._valid: np.ndarray | None = None  # [num_words] uint32: tokens of both model and compiler

    def defer(self, request: Request, spec: GrammarSpec, now: float) -> None:
        """Keep a request until its grammar is compiled.

        It waits as long as grammars before it become ready: a new engine compiles all those of its replays at once.
        """
        self.pending[request.request_id] = request
        self.num_pending_prompt_tokens += request.num_tokens
        self._wanted[request.request_id] = _Wanted(spec, now)
        if spec not in self._compiled:
            self._begin(spec)

    def follow(self, request: Request) -> None:
        """Add a request that is about to be queued to the live ones, if it has a matcher or a token filter."""
        params = request.params
        if request.matcher is not None or params.has_filter or request.thinking is not None:
            self.live[request] = TokenFilter(params, vocab_size=self._vocab_size) if params.has_filter else None

    def drop(self, request_id: str, reason: str) -> Request | None:
        """End a pending request and return it; None if it is not pending."""
        if request_id not in self.pending:
            return None
        request = self._remove(request_id)
        request.finish_reason = reason
        return request

    def pop_compiled(self, now: float) -> list[Outcome]:
        """Remove and return the pending requests whose grammar is compiled, or (with an error) has failed."""
        failures: dict[GrammarSpec, ServiceError] = {}
        while self._taken:
            spec = self._taken.popleft()
            if spec in self.compiling:
                self._taken_s[spec] = now
        while self._done:
            spec, result = self._done.popleft()
            self.compiling.discard(spec)
            self._taken_s.pop(spec, None)
            self._progress_s[spec.is_costly] = now
            if isinstance(result, ServiceError):
                failures[spec] = result
            else:
                self._compiled[spec] = result
        compiled_now = [outcome for id_ in self.pending if (outcome := self._compile_outcome(id_, failures, now))]
        for request, error in compiled_now:
            self._remove(request.request_id)
            if error is None:
                self.follow(request)
        while len(self._compiled) > _MAX_CACHED:
            self._compiled.popitem(last=False)
        return compiled_now

    def advance(self, outputs: Iterable[RowOutput]) -> list[Outcome]:
        """Advance matchers and reasoning by the committed tokens; return the requests that must end now."""
        outcomes: list[Outcome] = []
        for request, token_ids, _ in outputs:
            if request.thinking is not None:
                request.thinking.advance(token_ids)
            matcher = request.matcher
            if matcher is not None and request.hand_over is not None and request.finish_reason == "length":
                if matcher.accept(token_ids[0]) and matcher.is_ended:
                    request.finish_reason = "stop"  # else another engine would go on behind the end of the grammar
                continue
            if matcher is None or request.finish_reason is not None:
                continue
            if not matcher.accept(token_ids[0]):  # constrained requests have no drafts
                outcomes.append(self._fail(request, matcher))
            elif matcher.is_ended:
                outcomes.append(Outcome(request, None))
        return outcomes

    def masks(self, plan: StepPlan) -> tuple[TokenMasks | None, list[Outcome]]:
        """Return the token masks of a plan's constrained rows, and the requests that must end instead of sampling."""
        self.live = {request: filter_ for request, filter_ in self.live.items() if request.finish_reason is None}
        sampling = {row.req_index for row in plan.singles if row.samples}  # constrained requests are not steady
        requests = [
            request
            for request, filter_ in self.live.items()
            if request.req_index in sampling and _is_constrained(request, filter_)
        ]
        if not requests:
            return None, []
        masks, may_end = self._grammar_masks(requests)
        outcomes: list[Outcome] = []
        free_rows: list[int] = []
        for row, request in enumerate(requests):
            matcher, filter_ = request.matcher, self.live[request]
            forced = _limit_thinking(masks[row], request)
            if forced == "possible":
                free_rows.append(row)
                continue
            if forced == "forbidden":
                outcomes.append(Outcome(request, GrammarError(_THINKING_FORBIDDEN)))
                continue
            if filter_ is not None:
                filter_.apply(masks[row], request.output_token_ids)
            _apply_stop_tokens(masks[row], request, may_end=may_end[row])
            if filter_ is not None and may_end[row]:  # stop tokens have been added
                filter_.apply(masks[row], request.output_token_ids)
            if matcher is not None and matcher.error:
                outcomes.append(self._fail(request, matcher))
            elif masks[row].any():
                free_rows.append(row)
            elif matcher is None or may_end[row]:
                outcomes.append(Outcome(request, None))
            else:
                outcomes.append(Outcome(request, GrammarError(_dead_end_message(request.params))))
        if not free_rows:
            return None, outcomes
        req_indices = [requests[row].req_index for row in free_rows]
        chosen = masks if len(free_rows) == len(requests) else masks[free_rows]
        return TokenMasks(req_indices, chosen.tobytes()), outcomes

    def _remove(self, request_id: str) -> Request:
        request = self.pending.pop(request_id)
        del self._wanted[request_id]
        self.num_pending_prompt_tokens -= request.num_tokens
        return request

    def _grammar_masks(self, requests: list[Request]) -> tuple[np.ndarray, list[bool]]:
        """Return the grammars' masks and, per row, whether its grammar may end; without one: all tokens, False."""
        rows = [row for row, request in enumerate(requests) if request.matcher is not None]
        matchers = [request.matcher for request in requests if request.matcher is not None]
        if self._compiler is not None and len(rows) == len(requests):
            return self._fill(self._compiler, matchers)
        masks, may_end = np.tile(self._vocabulary, (len(requests), 1)), [False] * len(requests)
        if self._compiler is not None and rows:
            masks[rows], ends = self._fill(self._compiler, matchers)
            for row, is_end in zip(rows, ends, strict=True):
                may_end[row] = is_end
        return masks, may_end

    def _fill(self, compiler: GrammarCompiler, matchers: list[Matcher]) -> tuple[np.ndarray, list[bool]]:
        """Return masks [C, num_words] uint32 of the model's vocabulary and, per row, whether its grammar may end."""
        words = compiler.fill_masks(matchers)
        end = compiler.end_token_id
        may_end = ((words[:, end // 32] >> (end % 32)) & 1).astype(bool).tolist()
        if self._valid is None:
            self._valid = self._bits_below(min(end, self._vocab_size))
        masks = np.zeros((len(matchers), self._num_words), dtype=np.uint32)
        width = min(self._num_words, compiler.num_words)
        np.bitwise_and(words[:, :width], self._valid[:width], out=masks[:, :width])
        return masks, may_end

    def _bits_below(self, end: int) -> np.ndarray:
        """Return a mask [num_words] uint32 with the tokens 0 to end - 1."""
        return _packed(np.arange(self._num_words * 32) < end)

    def _compile_outcome(
        self, request_id: str, failures: dict[GrammarSpec, ServiceError], now: float
    ) -> Outcome | None:
        request, (spec, since_s) = self.pending[request_id], self._wanted[request_id]
        compiled = self._compiled.get(spec)
        if compiled is not None:
            self._compiled.move_to_end(spec)
            request.matcher = compiled.copy()
            if not all(map(request.matcher.accept, request.output_token_ids)):  # of a replayed request
                return self._fail(request, request.matcher)
            return Outcome(request, None)
        if spec in failures:
            return Outcome(request, failures[spec])
        taken_s = self._taken_s.get(spec)
        if taken_s is not None:
            is_over = now >= max(taken_s, since_s) + COMPILE_TIMEOUT_S
            error = GrammarError(f"The grammar was not compiled within {COMPILE_TIMEOUT_S:g} s.")
            return Outcome(request, error) if is_over else None
        self._begin(spec)  # again, if a request failed in a compiled one
        if now < max(since_s, self._progress_s[spec.is_costly]) + COMPILE_TIMEOUT_S:
            return None
        return Outcome(
            request,
            Overloaded(
                f"The grammars of other requests are compiled before this one's, and none of them was ready for "
                f"{COMPILE_TIMEOUT_S:g} s.",
                retry_after_s=math.ceil(COMPILE_TIMEOUT_S),
            ),
        )

    def _begin(self, spec: GrammarSpec) -> None:
        """Queue a grammar for its lane's threads, unless it is there."""
        if spec not in self.compiling:
            self._start_threads()
            self.compiling.add(spec)
            self._todo[spec.is_costly].put(spec)

    def _fail(self, request: Request, matcher: Matcher) -> Outcome:
        """Report a matcher's error and drop the compiled grammar, whose shared state may be the cause."""
        logger.warning("grammar failed request_id=%s tokens=%d", request.request_id, len(request.output_token_ids))
        self._compiled.pop(matcher.spec, None)
        return Outcome(request, GrammarError(f"The grammar cannot be followed any further: {matcher.error}"))

    def _start_threads(self) -> None:
        if self._threads:
            return
        previous = threading.stack_size(_STACK_BYTES)
        try:
            for lane in _LANES:
                thread = threading.Thread(target=self._compile, args=(self._todo[lane],), name="grammar", daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(previous)

    def _compile(self, todo: queue.SimpleQueue[GrammarSpec]) -> None:
        while True:
            spec = todo.get()
            self._taken.append(spec)
            outcome: Matcher | ServiceError
            try:
                self._compiler = self._get_compiler()
                outcome = self._compiler.compile(spec)
            except ServiceError as error:
                outcome = error
            except BaseException as error:  # a bug or a panic of the library: its request must end
                logger.exception("grammar compilation failed")
                outcome = GrammarError(f"The grammar could not be compiled: {type(error).__name__}.")
            self._done.append((spec, outcome))


def no_compiler() -> GrammarCompiler:
    """Replace get_compiler in an engine without a tokenizer. Raises UnsupportedFeature."""
    raise UnsupportedFeature("This engine runs without a tokenizer, so it does not do structured output.")


def _dead_end_message(params: SamplingParams) -> str:
    """Return the error of a request whose masks leave no token before its grammar may end."""
    fields = " and ".join(name for name in ("allowed_token_ids", "bad_words") if getattr(params, name))
    if not fields:
        return "The answer cannot go on: no token fits its grammar."
    return f"The answer cannot go on: {fields} leave no token that fits its grammar."


def _apply_stop_tokens(mask: np.ndarray, request: Request, *, may_end: bool) -> None:
    """Allow a request's stop tokens if its grammar may end and min_tokens is reached.

    Before min_tokens they are forbidden, even if the grammar allows them, unless it allows nothing else.
    """
    params = request.params
    if len(request.output_token_ids) >= params.min_tokens:
        if may_end:
            for token_id in params.stop_token_ids:
                mask[token_id // 32] |= _bit(token_id)
        return
    allowed = mask.copy()
    for token_id in params.stop_token_ids:
        allowed[token_id // 32] &= ~_bit(token_id)
    if allowed.any():
        mask[:] = allowed


def _is_constrained(request: Request, filter_: TokenFilter | None) -> bool:
    """Return whether not every token may be sampled next."""
    is_limited = request.thinking is not None and request.thinking.is_acting
    return is_limited or request.matcher is not None or filter_ is not None


def _limit_thinking(mask: np.ndarray, request: Request) -> Literal["none", "possible", "forbidden"]:
    """Clear the tokens that must not follow the reasoning; return whether one token is forced, whatever else holds.

    forbidden: the request's grammar does not allow the forced token.
    """
    thinking = request.thinking
    forced = thinking.forced_token if thinking is not None else None
    if thinking is None or forced is None:
        for token_id in thinking.banned_tokens if thinking is not None else ():
            mask[token_id // 32] &= ~_bit(token_id)
        return "none"
    if not mask[forced // 32] & _bit(forced):
        return "forbidden"
    mask[:] = 0
    mask[forced // 32] = _bit(forced)
    return "possible"


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _bit(token_id: int) -> np.uint32:
    return np.uint32(1 << token_id % 32)
