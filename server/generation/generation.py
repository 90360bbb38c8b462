"""CompletionStream: the generation of one HTTP request: engine requests in, one ordered stream of text events out.

    GenerationSpec ─ submit prompts × n ─→ RequestOutputs per choice
        ─ detokenize, stop strings, in a chat MessageSplitter ─→ TextDelta* ChoiceFinished, merged

A choice of the answer is one engine request. An early end of batches() (a stop string, an error, a client that
disconnects, a deadline) closes it, which aborts every engine request that is still open. Never imports torch.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from engine.interface.client import EngineClient
from engine.interface.errors import EngineError, GrammarError, RequestAborted
from engine.interface.mailbox import RequestOutput
from engine.interface.metrics import Metrics
from engine.interface.protocol import (
    AddRequest,
    CacheReport,
    TokenLogprobs,
    pack_token_ids,
)
from engine.interface.tenant import Rates
from server.generation.deadline import Deadline
from server.generation.events import ChoiceFinished, Event, TextDelta
from server.generation.message_splitter import MessageSplitter
from server.generation.spec import GenerationSpec, Stats
from server.text.detokenizer import StopChecker
from server.text.tokenizer import Tokenizer

T = TypeVar("T")


class _End:
    """A source has ended."""


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources in order of arrival until all have ended. Raises the first error of a source.

    All sources are closed at the end, also at an early one.
    """
    # Bounded, so that a slow reader slows its own sources and the queue does not grow.
    queue: asyncio.Queue[T | Exception | _End] = asyncio.Queue(maxsize=2 * len(sources))

    async def pump(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put(item)
            await queue.put(_End())
        except Exception as error:  # handed to the reader, who raises it
            await queue.put(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, _End):
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class CompletionStream:
    """Runs one spec once. `request_id` is unique; the engine requests are numbered below it.

    `make_splitter`: returns the splitter of the choice with that index, or None if its text is the answer.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        *,
        request_id: str,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        make_splitter: Callable[[int], MessageSplitter | None] = lambda index: None,
    ) -> None:
        self.spec = spec
        self.request_id = request_id
        self._client = client
        self._is_cancelled = False
        self._choices = [
            _ChoiceStream(
                spec,
                index=i,
                request_id=f"{request_id}-{i}",
                tokenizer=tokenizer,
                metrics=metrics,
                splitter=make_splitter(i),
            )
            for i in range(len(spec.prompts) * spec.n)
        ]

    @property
    def num_choices(self) -> int:
        """Return the number of ChoiceFinished events of the whole stream."""
        return len(self._choices)

    @property
    def is_decided(self) -> bool:
        """True once an engine has accepted the first choice, and with it all, or has refused it."""
        return self._client.is_decided(self._choices[0].request_id)

    def batches(self) -> AsyncGenerator[list[Event], None]:
        """Yield every choice's events and its end. A list has one choice's events of one engine output, at least one.

        Raises ServiceErrors, DeadlineExceeded among them.
        """
        sources = [self._drive(choice) for choice in self._choices]
        return sources[0] if len(sources) == 1 else merged(sources)

    def cancel(self) -> None:
        """Cancel the generation: batches() raises RequestAborted, at once or when it starts."""
        self._is_cancelled = True
        for choice in self._choices:
            if not choice.finish_reason:
                self._client.abort(choice.request_id)

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        """The entries of a choice's prompt from its second token on, if asked for; complete at its first event."""
        return self._choices[index].prompt_logprobs

    def stats(self) -> Stats:
        """Return the sums over the choices so far."""
        choices, n = self._choices, self.spec.n
        started = [choice for choice in choices if choice.first_s is not None]
        first = min(started, key=lambda choice: choice.first_s or 0.0, default=None)
        num_intervals = sum(max(choice.num_tokens - 1, 0) for choice in started)
        decode_s = sum(choice.last_s - (choice.first_s or 0.0) for choice in started)
        return Stats(
            num_prompt_tokens=sum(map(len, self.spec.prompts)),
            num_cached_tokens=sum(choice.num_cached_tokens for choice in choices[::n]),
            num_output_tokens=sum(choice.num_tokens for choice in choices),
            num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
            cache=choices[0].cache,
            rates=choices[0].rates,
            num_replays=max(choice.num_replays for choice in choices),
            queue_s=None if first is None else first.queue_s,
            prefill_s=None if first is None else first.prefill_s,
            ttft_s=None if first is None else (first.first_s or 0.0) - self.spec.arrival_s,
            itl_s=decode_s / num_intervals if num_intervals else None,
            total_s=max([choice.last_s for choice in started], default=self.spec.arrival_s) - self.spec.arrival_s,
            finish_reasons=list(dict.fromkeys(choice.finish_reason for choice in choices if choice.finish_reason)),
        )

    async def _drive(self, choice: "_ChoiceStream") -> AsyncGenerator[list[Event], None]:
        if self._is_cancelled:
            raise RequestAborted("The request was cancelled.")
        has_end = self.spec.deadline_s is not None
        deadline = Deadline(self.spec.deadline_s, limit_s=self.spec.timeout_s or 0.0)
        try:
            async with aclosing(self._client.submit(choice.add_request())) as outputs:  # closing it early aborts
                while not choice.finish_reason:
                    output = await (_next_before(deadline, outputs) if has_end else anext(outputs, None))
                    if output is None:
                        raise EngineError("The engine ended the request without a reason.")
                    events = choice.feed(output)
                    if choice.finish_reason:
                        self._finish(choice)
                    if events:
                        yield events
        except GrammarError as error:  # the engine does not know the request's fields
            error.param = error.param or self.spec.grammar_param
            raise
        finally:
            deadline.close()

    def _finish(self, choice: "_ChoiceStream") -> None:
        if choice.is_stopped_early:
            self._client.abort(choice.request_id, reason="stop")
        if all(sibling.finish_reason for sibling in self._choices):
            longest = max(sibling.num_tokens for sibling in self._choices)
            choice.metrics.observe("request_max_num_generation_tokens", longest)


async def _next_before(deadline: Deadline, outputs: AsyncIterator[RequestOutput]) -> RequestOutput | None:
    with deadline:
        return await anext(outputs, None)


class _ChoiceStream:
    """The engine request of one choice: its text state, counts and times."""

    def __init__(
        self,
        spec: GenerationSpec,
        *,
        index: int,
        request_id: str,
        tokenizer: Tokenizer,
        metrics: Metrics,
        splitter: MessageSplitter | None,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_replays = 0
        self.cache: CacheReport | None = None
        self.rates: Rates | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.queue_s: float | None = None
        self.prefill_s: float | None = None
        self.first_s: float | None = None  # time.monotonic() of the first token
        self.last_s = spec.arrival_s
        self.finish_reason = ""
        self._spec = spec
        self.metrics = metrics
        self._splitter = splitter
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=spec.skip_special_tokens,
            visible_ids=spec.visible_ids,
            context=spec.text_context(index),
        )
        self._stop = StopChecker(spec.stop, include_in_output=spec.include_stop_str_in_output) if spec.stop else None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, its tags among them."""
        return self._splitter.num_reasoning_tokens if self._splitter is not None else 0

    @property
    def is_stopped_early(self) -> bool:
        """Whether a stop string was found: the engine does not see text, so its request has to be aborted."""
        return self._stop is not None and self._stop.matched is not None

    def add_request(self) -> AddRequest:
        """Return the request for the engine."""
        spec = self._spec
        params = msgspec.structs.replace(spec.params, seed=(spec.params.seed + self.index) % 2**63)
        return AddRequest(
            request_id=self.request_id,
            prompt=pack_token_ids(spec.prompts[self.index // spec.n]),
            params=params,
            arrival_s=spec.arrival_s,
            cache_salt=spec.cache_salt,
            open_salt=spec.open_salt,
            pin_s=spec.pin_s,
            priority=spec.priority,
            grammar=spec.grammar,
            lora_index=spec.lora_index,
            thinking=spec.thinking,
            tenant=spec.tenant,
            charge=None if self.index else spec.charge(),
            counts_prompt=self.index % spec.n == 0,
            deadline_s=spec.deadline_s,
        )

    def feed(self, output: RequestOutput) -> list[Event]:
        """Return the events of one engine output. Raises RequestAborted if the request was ended elsewhere."""
        self.num_replays = output.num_replays
        if output.finish_reason == "abort":
            raise RequestAborted("The request was cancelled.")
        self.rates = output.rates or self.rates
        if output.prompt_logprobs:
            self.prompt_logprobs += output.prompt_logprobs
        if self._spec.is_scoring_only:
            output.token_ids, output.logprobs, output.stop_token_id = [], None, None
            output.finish_reason = output.finish_reason and "length"
        texts, num_used = self._advance(output)
        self._count(output, num_used)
        tail, end = "", None
        if output.finish_reason or self.is_stopped_early:
            tail, end = self._end(output)
        deltas = self._deltas(output, texts, tail, num_used)
        if self._splitter is not None:
            events = self._splitter.feed(deltas, end)
        else:
            events = [*deltas, end] if end is not None else [*deltas]
        if end is not None:
            self.finish_reason = end.finish_reason
        return events

    def _end(self, output: RequestOutput) -> tuple[str, ChoiceFinished]:
        """Return the text that was held back, and the end of the choice, which a stop string may be."""
        tail = self._finish_text() if output.finish_reason else ""
        self.metrics.observe("e2e_request_latency_seconds", self.last_s - self._spec.arrival_s)
        stop_string = self._stop.matched if self._stop is not None else None
        finish_reason = "stop" if stop_string is not None else output.finish_reason or ""
        return tail, ChoiceFinished(self.index, finish_reason, stop_string)

    def _deltas(self, output: RequestOutput, texts: list[str], tail: str, num_used: int) -> list[TextDelta]:
        """Return one delta, or one per token for a splitter; the tail belongs to the last."""
        ids, logprobs = output.token_ids, output.logprobs
        if self._splitter is None or num_used < 2:
            text = "".join(texts) + tail
            shown = logprobs[:num_used] if logprobs is not None else None
            return [TextDelta(self.index, "text", text, ids[:num_used], shown)] if num_used or text else []
        texts += [""] * (num_used - len(texts))  # a stop token has no text
        texts[-1] += tail
        return [
            TextDelta(self.index, "text", text, ids[i : i + 1], logprobs[i : i + 1] if logprobs is not None else None)
            for i, text in enumerate(texts)
        ]

    def _advance(self, output: RequestOutput) -> tuple[list[str], int]:
        """Return the texts to give out (one per token if they are needed or known) and how many of the tokens count:
        those up to a stop string's end.
        """
        ids = output.token_ids
        num_shown = len(ids)
        if output.stop_token_id is not None and not self._spec.include_stop_str_in_output:
            num_shown -= 1  # a stop token counts but has no text
        if self._stop is None:
            if self._splitter is None or num_shown == 1:
                return [self._detokenizer.push(ids[:num_shown])], len(ids)
            return [self._detokenizer.push((token_id,)) for token_id in ids[:num_shown]], len(ids)
        parts = []
        for i, token_id in enumerate(ids[:num_shown]):
            text = self._detokenizer.push((token_id,))
            is_checked = self.num_tokens + i >= self._spec.params.min_tokens
            parts.append(self._stop.push(text) if is_checked else text)
            if self._stop.matched is not None:
                return parts, i + 1
        return parts, len(ids)

    def _finish_text(self) -> str:
        tail = self._detokenizer.finish()
        if self._stop is None:
            return tail
        return self._stop.push(tail) + self._stop.finish()

    def _count(self, output: RequestOutput, num_tokens: int) -> None:
        now_s = output.arrival_s or time.monotonic()
        is_scored = self._spec.is_scoring_only and output.queue_s is not None
        if self.first_s is None and (num_tokens or is_scored):
            self.first_s = now_s
            self.num_cached_tokens = output.num_cached_tokens or 0
            self.queue_s, self.prefill_s, self.cache = output.queue_s, output.prefill_s, output.cache
            self.metrics.observe("time_to_first_token_seconds", now_s - self._spec.arrival_s)
            if num_tokens > 1:
                self.metrics.observe("inter_token_latency_seconds", 0.0, num_tokens - 1)
        elif num_tokens:
            self.metrics.observe("inter_token_latency_seconds", (now_s - self.last_s) / num_tokens, num_tokens)
        self.num_tokens += num_tokens
        self.last_s = max(self.last_s, now_s)
