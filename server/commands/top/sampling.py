"""Looks at a server again and again, and says what each look shows. Imports httpx; draws nothing.

Life of a Watch: made → look …, each a Frame over the last `window_s`.
"""

import time
from collections import deque

import httpx
import msgspec

from server.commands.server_target import Target, ToolError, error_message, make_client, transport_message
from server.commands.tool_text import one_line
from server.commands.top.top_metrics import Activity, Reading, activity, read_metrics

_TIMEOUT_S = 5.0


class KvRow(msgspec.Struct):
    """One request that holds or waits for KV blocks, as GET /kv/snapshot lists it."""

    id: str
    state: str
    index: int = 0
    num_blocks: int = 0
    num_shared_blocks: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_hit_tokens: int = 0
    age_s: float = 0.0
    num_preemptions: int = 0


class _Snapshot(msgspec.Struct):
    requests: list[KvRow]
    num_unlisted: int = 0


class Frame(msgspec.Struct):
    """One look. requests: null where the server does not tell of each."""

    url: str
    time: float  # Unix seconds
    model: str
    version: str
    num_running: int
    num_waiting: int
    kv_usage: float
    kv_blocks_used: int | None
    kv_blocks_total: int | None
    block_size: int | None
    recent: Activity
    total: Activity
    requests: list[KvRow] | None
    num_unlisted: int


class Watch:
    """One server, watched."""

    def __init__(self, target: Target, *, window_s: float) -> None:
        self._target = target
        self._window_s = window_s
        self._client = make_client(target, timeout_s=_TIMEOUT_S)
        self._readings: deque[Reading] = deque()
        self._has_requests = True  # until the server says that it knows no such route

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def look(self) -> Frame:
        """Return what is to be seen now. Raises ToolError when there is nothing."""
        response = self._get("/metrics")
        if response.status_code in (401, 403):
            what = "refuses this API key" if self._target.api_key else "needs an API key"
            raise ToolError(f"{self._target.url} {what}: give its key with --api-key or in QUIRE_API_KEY.", exit_code=2)
        if response.status_code != 200:
            raise ToolError(
                f"{self._target.url} shows no metrics: {error_message(response.status_code, response.content)}"
            )
        try:
            new = read_metrics(response.text, time_s=time.monotonic())
        except ValueError as error:
            raise ToolError(f"{self._target.url}/metrics cannot be read: {one_line(str(error))}.") from error
        self._readings.append(new)
        while len(self._readings) > 2 and new.time_s - self._readings[1].time_s >= self._window_s:
            self._readings.popleft()
        return self._frame(new, self._snapshot())

    def _frame(self, new: Reading, snapshot: _Snapshot | None) -> Frame:
        values = new.values
        old = self._readings[0] if len(self._readings) > 1 else None
        total = values.get("kv_cache_blocks_total")
        return Frame(
            url=self._target.url,
            time=time.time(),
            model=new.model,
            version=new.version,
            num_running=int(values.get("num_requests_running", 0)),
            num_waiting=int(values.get("num_requests_waiting", 0)),
            kv_usage=values.get("kv_cache_usage_ratio", 0.0),
            kv_blocks_used=int(values.get("kv_cache_blocks_used", 0)) if total is not None else None,
            kv_blocks_total=int(total) if total is not None else None,
            block_size=new.block_size or None,
            recent=activity(new, old),
            total=activity(new, None),
            requests=snapshot.requests if snapshot is not None else None,
            num_unlisted=snapshot.num_unlisted if snapshot is not None else 0,
        )

    def _snapshot(self) -> _Snapshot | None:
        """Return the requests one by one, where the server tells of them and can just now."""
        if not self._has_requests:
            return None
        response = self._get("/kv/snapshot")
        if response.status_code in (401, 403, 404, 405):
            self._has_requests = False
        if response.status_code != 200:
            return None
        try:
            return msgspec.json.decode(response.content, type=_Snapshot)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._has_requests = False
            return None

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(path)
        except httpx.HTTPError as error:
            raise ToolError(transport_message(self._target, error)) from error
