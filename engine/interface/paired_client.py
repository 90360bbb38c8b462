"""PairedEngineClient: an EngineClient over prefill engines and decode engines. Plain asyncio; never torch.

A request with a long prompt goes to a prefill engine, which makes its first token and gives the blocks of the prompt to
a decode engine meanwhile. Then it goes to that decode engine with this token, which goes on behind it. Its client sees
one stream.

A prefill engine that is missing, full, or dies before the first token costs a request nothing but time: the decode
engine computes the prompt. If one of several decode engines dies, its requests go on in another one behind the tokens
that their clients have. A request without a token waits FULL_WAIT_S for one that has room; then a full one takes it,
since the engine that died had let it in. If none serves, requests wait until one does, within the bounds of
`--max-replays`. A single decode engine's client waits for the next one by itself.

The engine that accepts a request first charges its tenant, and the others are told (TenantUses). If an engine dies that
had not accepted it, the next one checks the limits and charges.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from engine.interface.client import EngineClient
from engine.interface.errors import EngineDead, InvalidParameter, Overloaded, RateLimited
from engine.interface.kv_snapshot import KvSnapshot
from engine.interface.mailbox import RequestOutput
from engine.interface.metrics import Metrics
from engine.interface.protocol import AddRequest, EngineReady, HandOver, TenantUse, pack_token_ids
from engine.interface.tenant import Tenant
from engine.interface.tenant_uses import TenantUses

FALLBACKS = ("missing", "full", "died")  # reasons why a long prompt was not computed by a prefill engine
FULL_WAIT_S = 10.0  # for a decode engine with room, after one has died
_LONGEST_WAIT_S = 600.0  # for one that serves
_POLL_S = 0.05
_MOST_LOST = 20  # engines in a row that ended under a request without a further token, whether they had begun it or not


class PairedEngineClient:
    """Owns the clients of all engines, each of which is started by its caller. Use inside one event loop."""

    def __init__(
        self,
        prefill: Sequence[EngineClient],
        decode: Sequence[EngineClient],
        *,
        min_tokens: int,
        max_replays: int,
        metrics: Metrics,
        has_given_up: Callable[[], bool] = lambda: False,
        names: Sequence[str] = (),
        first_decode: int = 0,
    ) -> None:
        """prefill, decode: by the numbers of the engines. min_tokens: of a prompt that goes to a prefill engine.

        max_replays, first_decode: as in ServerConfig. has_given_up: returns True once no decode engine is to be
        expected. names: of all engines, if they are others than "prefill-0" …, "decode-0" ….
        """
        sides = (("prefill", prefill), ("decode", decode))
        self._names = list(names) or [f"{side}-{i}" for side, clients in sides for i in range(len(clients))]
        self._first_decode = first_decode
        self._prefill = prefill
        self._decode = decode
        self._min_tokens = min_tokens
        self._max_replays = max_replays
        self._has_given_up = has_given_up
        self._metrics = metrics
        self._uses = TenantUses([*prefill, *decode])
        self._num_open: Counter[EngineClient] = Counter()  # requests
        self._between: dict[str, str] = {}  # requests between two engines, and the reason to end them, or ""

    @property
    def ready(self) -> EngineReady | None:
        """The limits of a decode engine that serves; None: none does."""
        return next((client.ready for client in self._decode if client.ready is not None), None)

    @property
    def last_ready(self) -> EngineReady | None:
        """See EngineClient.last_ready."""
        return self.ready or self._decode[0].last_ready

    @property
    def is_full(self) -> bool:
        """True while the queues of all decode engines that serve are full."""
        serving = [client for client in self._decode if client.ready is not None]
        return bool(serving) and all(client.is_full for client in serving)

    @property
    def engines(self) -> dict[str, bool]:
        """The engines by name, "prefill-0", and whether each serves, and can exchange blocks."""
        known = self.last_ready
        serves = [client.ready is not None and _is_alike(client.ready, known) for client in self._prefill]
        serves += [client.ready is not None for client in self._decode]
        return dict(zip(self._names, serves, strict=True))

    def client_of(self, engine: str | None) -> tuple[str, EngineClient]:
        """Return an engine's name and client; None: the first that decodes and serves. Raises InvalidParameter."""
        names = self._names
        if engine is None:
            num_prefill = len(self._prefill)
            serving = [i for i, client in enumerate(self._decode) if client.ready is not None]
            engine = names[num_prefill + (serving[0] if serving else 0)]
        if engine not in names:
            names_all = ", ".join(names)
            raise InvalidParameter(f"engine: {engine[:100]!r} is none of this server's: {names_all}.", param="engine")
        return engine, [*self._prefill, *self._decode][names.index(engine)]

    async def submit(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """See EngineClient.submit."""
        is_single = request.pooling is not None or request.params.max_tokens == 1  # nothing is left to decode
        decode = self._choose(self._decode) or self._decode[0]
        prefill = self._choose_prefill(request, decode)
        if prefill is None:
            async for output in self._go_on(request, decode):
                yield output
            return
        first = request
        if not is_single:
            first = msgspec.structs.replace(
                request,
                params=msgspec.structs.replace(request.params, max_tokens=1),
                hand_over=HandOver(
                    self._first_decode + self._decode.index(decode),
                    is_prefill=True,
                    max_tokens=request.params.max_tokens,
                ),
            )
        token_ids: list[int] = []
        num_prompt_logprobs = 0
        self._between[request.request_id] = ""
        self._num_open[decode] += 1  # blocks are on their way to it
        try:
            async with aclosing(self._outputs(first, prefill)) as outputs:
                async for output in outputs:
                    num_prompt_logprobs += len(output.prompt_logprobs)
                    token_ids += output.token_ids
                    if not is_single and output.finish_reason == "length":
                        output.finish_reason = None  # the decode engine goes on
                        yield output
                        break
                    yield output
                    if output.finish_reason is not None:
                        return
        except EngineDead as error:
            self._fall_back("died")
            request = _after_death(request, error)
        except RateLimited:
            raise
        except Overloaded:
            self._fall_back("full")
        finally:
            self._num_open[decode] -= 1
            ended = self._between.pop(request.request_id)
        if ended:  # neither engine had it when abort() was called
            yield RequestOutput([], finish_reason=ended)
            return
        if not token_ids:
            decode = self._choose([decode]) or self._choose(self._decode) or decode  # it may be full since, or leave
        else:
            peer = self._prefill.index(prefill)
            request = msgspec.structs.replace(_behind(request, token_ids), charge=None, hand_over=HandOver(peer))
        async for output in self._go_on(request, decode, num_prompt_logprobs=0 if token_ids else num_prompt_logprobs):
            yield output

    def abort(self, request_id: str, *, reason: str = "abort") -> None:
        """See EngineClient.abort."""
        if request_id in self._between:
            self._between[request_id] = reason
        for client in (*self._prefill, *self._decode):
            client.abort(request_id, reason=reason)

    def is_decided(self, request_id: str) -> bool:
        """See EngineClient.is_decided; between two engines it is decided what the first one has."""
        return all(client.is_decided(request_id) for client in (*self._prefill, *self._decode))

    async def kv_snapshot(self) -> KvSnapshot:
        """Request a snapshot of the KV pool of the first decode engine that serves. See EngineClient.kv_snapshot."""
        return await self.client_of(None)[1].kv_snapshot()

    def check_grammar(self, tenant: Tenant) -> None:
        """See EngineClient.check_grammar."""
        for client in self._decode:
            client.check_grammar(tenant)

    def spend_grammar_s(self, tenant: Tenant, seconds: float) -> None:
        """Tell the first decode engine that serves. See EngineClient.spend_grammar_s."""
        serving = next((client for client in self._decode if client.ready is not None), self._decode[0])
        serving.spend_grammar_s(tenant, seconds)

    def tell_use(self, use: TenantUse) -> None:
        """See ToldOfUses.tell_use: all of them."""
        for client in (*self._prefill, *self._decode):
            client.tell_use(use)

    async def aclose(self) -> None:
        """See EngineClient.aclose."""
        self._uses.close()
        await asyncio.gather(*(client.aclose() for client in (*self._prefill, *self._decode)))

    async def _go_on(
        self, request: AddRequest, decode: EngineClient, *, num_prompt_logprobs: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Iterate over what decode engines make of a request, one after another if they die.

        num_prompt_logprobs: the first entries of its prompt that the client has.
        """
        num_lost = num_stuck = 0  # engines in a row that ended under it without a further token; that had begun it
        while True:
            token_ids: list[int] = []
            try:
                async with aclosing(self._outputs(request, decode)) as outputs:
                    async for output in outputs:
                        num_known = min(num_prompt_logprobs, len(output.prompt_logprobs))
                        num_prompt_logprobs -= num_known
                        output.prompt_logprobs = output.prompt_logprobs[num_known:]
                        token_ids += output.token_ids
                        yield output
                        if output.finish_reason is not None:
                            return
                return
            except EngineDead as error:
                num_lost, num_stuck = (0, 0) if token_ids else (num_lost + 1, num_stuck + error.was_begun)
                has_scores = request.params.prompt_logprobs is not None and not token_ids  # which it would send again
                is_stuck = num_stuck > self._max_replays or num_lost > _MOST_LOST
                if len(self._decode) == 1 or has_scores or is_stuck or not self._max_replays:
                    raise
                request = _after_death(_behind(request, token_ids) if token_ids else request, error)
                self._between[request.request_id] = ""
                try:
                    following = await self._next(request, decode)
                finally:
                    ended = self._between.pop(request.request_id)
                if ended:
                    yield RequestOutput([], finish_reason=ended)
                    return
                if following is None:
                    raise
                decode = following

    async def _next(self, request: AddRequest, lost: EngineClient) -> EngineClient | None:
        """Wait for a decode engine that takes a request after the end of `lost`; None: none is to be expected."""
        candidates = [client for client in self._decode if client is not lost]
        goes_on, started = bool(request.output), time.monotonic()
        while True:
            waited_s = time.monotonic() - started
            may_be_full = goes_on or (request.num_replays > 0 and waited_s >= FULL_WAIT_S)
            following = self._choose(candidates) or (
                self._choose(candidates, may_be_full=True) if may_be_full else None
            )
            is_over = waited_s >= _LONGEST_WAIT_S or self._has_given_up() or self._between[request.request_id]
            if following is not None or is_over or not (goes_on or request.num_replays):
                return following
            await asyncio.sleep(_POLL_S)
            candidates = list(self._decode)  # the next process of the lost one, too

    async def _outputs(self, request: AddRequest, client: EngineClient) -> AsyncGenerator[RequestOutput, None]:
        self._num_open[client] += 1
        self._uses.begin(request, client)
        try:
            async with aclosing(client.submit(request)) as outputs:
                async for output in outputs:
                    self._uses.note(request, client, output)
                    yield output
        finally:
            self._num_open[client] -= 1
            self._uses.end(request, client)

    def _choose_prefill(self, request: AddRequest, decode: EngineClient) -> EngineClient | None:
        """Return a prefill engine for a request, or None if it is to be computed where it is decoded.

        Daemons of several hosts may differ: an engine that computes other blocks, or shorter prompts, is not asked.
        """
        if request.num_prompt_tokens < self._min_tokens or request.output or not self._prefill:
            return None
        num_tokens = request.num_prompt_tokens + (request.pooling is None)  # an embedding has no first token
        usable = [
            client
            for client in self._prefill
            if client.ready is not None
            and _is_alike(client.ready, decode.last_ready)
            and num_tokens <= client.ready.max_model_len
        ]
        chosen = self._choose(usable)
        if chosen is None:
            self._fall_back("full" if usable else "missing")
        return chosen

    def _choose(self, clients: Sequence[EngineClient], *, may_be_full: bool = False) -> EngineClient | None:
        """Return the client with the fewest open requests of those that serve and have room; None: there is none."""
        serving = [client for client in clients if client.ready is not None and (may_be_full or not client.is_full)]
        return min(serving, key=lambda client: self._num_open[client], default=None)

    def _fall_back(self, reason: str) -> None:
        self._metrics.count("prefill_fallbacks_total", label=reason)


def _is_alike(ready: EngineReady, other: EngineReady | None) -> bool:
    """Return whether two engines can exchange blocks; one that has not served yet is no objection."""
    return other is None or ready.cache_identity == other.cache_identity


def _behind(request: AddRequest, token_ids: list[int]) -> AddRequest:
    """Return the request that goes on behind further tokens. All log-probabilities of the prompt have come by then."""
    params = msgspec.structs.replace(request.params, prompt_logprobs=None)
    output = request.output + pack_token_ids(token_ids)
    return msgspec.structs.replace(request, params=params, output=output, counts_prompt=False)


def _after_death(request: AddRequest, error: EngineDead) -> AddRequest:
    """Return the request for the next engine. If the one that died had accepted it, there is room, and it is charged.

    An engine that ended before the first token has not counted the prompt.
    """
    if not (error.was_accepted or request.output):
        return msgspec.structs.replace(request, hand_over=None)
    return msgspec.structs.replace(request, hand_over=None, num_replays=request.num_replays + 1, charge=None)
