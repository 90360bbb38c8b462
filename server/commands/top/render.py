"""Formats a Snapshot as lines of text that fit a terminal. Pure functions."""

import time

from server.commands.server_target import one_line
from server.commands.top.sampling import KvRow, Percentiles, Snapshot

_BAR_WIDTH = 16
_NONE = "–"


def snapshot_lines(snapshot: Snapshot, *, width: int, height: int | None) -> list[str]:
    """Return the whole snapshot, whose names, states and ids are the server's own text. height: None for no limit."""
    lines = [_title(snapshot, width), "", *_state(snapshot), "", *_latencies(snapshot)]
    if snapshot.requests is not None:
        rest = None if height is None else height - len(lines) - 3
        lines += ["", *_requests(snapshot.requests, snapshot.num_unlisted, most=rest)]
    return [one_line(line)[:width].rstrip() for line in lines]


def _title(snapshot: Snapshot, width: int) -> str:
    version = f" · {snapshot.version}" if snapshot.version else ""
    left = f"{snapshot.model}{version} · {snapshot.url}"
    right = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    return f"{_cut(left, width - len(right) - 2):<{width - len(right)}}{right}"


def _state(snapshot: Snapshot) -> list[str]:
    recent, total = snapshot.recent, snapshot.total
    filled = min(_BAR_WIDTH, round(snapshot.kv_usage * _BAR_WIDTH))
    pool = ""
    if snapshot.kv_blocks_total is not None:
        pool = f"   {snapshot.kv_blocks_used or 0:,} of {snapshot.kv_blocks_total:,} blocks"
        pool += f" of {snapshot.block_size} tokens" if snapshot.block_size else ""
    hits = _percent(recent.prefix_hit_rate) if recent.prefix_hit_rate is not None else _percent(total.prefix_hit_rate)
    done, generated, prompt = (
        _rate(count, recent.seconds) for count in (recent.num_finished, recent.generated_tokens, recent.prompt_tokens)
    )
    return [
        f"Requests  {snapshot.num_running:,} running   {snapshot.num_waiting:,} waiting   {done} done",
        f"          {total.num_finished:,} done, {total.num_rejected:,} refused, "
        f"{total.num_preemptions:,} preempted since the start",
        f"KV cache  [{'█' * filled}{'·' * (_BAR_WIDTH - filled)}] {snapshot.kv_usage:6.1%}{pool}",
        f"Tokens    {generated} generated   {prompt} prompt   {hits} of prompts cached",
    ]


def _rate(count: int, seconds: float | None) -> str:
    """Return a rate; there is none after a single sample."""
    return f"{count / seconds:,.1f}/s" if seconds else f"{_NONE}/s"


def _latencies(snapshot: Snapshot) -> list[str]:
    seconds = snapshot.recent.seconds
    recent = f"last {seconds:.0f} s" if seconds and seconds >= 0.95 else "recent"
    lines = [
        f"{'':8}{recent:>12}{'':18}   {'since start':>12}",
        f"{'':8}{'p50':>10}{'p95':>10}{'p99':>10}   {'p50':>10}{'p95':>10}{'p99':>10}{'n':>9}",
    ]
    new, old = snapshot.recent, snapshot.total
    rows = [
        ("TTFT", new.ttft_s, old.ttft_s),
        ("ITL", new.itl_s, old.itl_s),
        ("E2E", new.e2e_s, old.e2e_s),
        ("Queue", new.queue_s, old.queue_s),
    ]
    for label, recently, always in rows:
        shown = recently if seconds is not None else Percentiles(0)  # one sample alone has no recent figures
        lines.append(f"{label:<8}{_columns(shown)}   {_columns(always)}{_count(always.count):>9}")
    return lines


def _columns(percentiles: Percentiles) -> str:
    return "".join(f"{_duration(value):>10}" for value in (percentiles.p50, percentiles.p95, percentiles.p99))


def _requests(rows: list[KvRow], num_unlisted: int, *, most: int | None) -> list[str]:
    lines = [f"{'REQUEST':<22}{'STATE':<10}{'BLOCKS':>7}{'SHARED':>7}{'TOKENS':>17}{'HITS':>9}{'AGE':>8}"]
    shown = rows if most is None else rows[: max(0, most)]
    for row in shown:
        name = f"{row.id}#{row.index}" if row.index else row.id
        tokens = f"{row.num_computed_tokens:,}/{row.num_tokens:,}"
        state = row.state + (f" p{row.num_preemptions}" if row.num_preemptions else "")
        lines.append(
            f"{_cut(name, 21):<22}{_cut(state, 9):<10}{row.num_blocks:>7,}{row.num_shared_blocks:>7,}"
            f"{tokens:>17}{row.num_hit_tokens:>9,}{_duration(row.age_s):>8}"
        )
    rest = len(rows) - len(shown) + num_unlisted
    if rest:
        lines.append(f"… {rest:,} more")
    elif not rows:
        lines.append("none")
    return lines


def _duration(seconds: float | None) -> str:
    """Return a time in three digits or so: 850 µs, 12.3 ms, 1.25 s, 3:05 m, 7.2 h."""
    if seconds is None:
        return _NONE
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        milliseconds = seconds * 1000
        return f"{milliseconds:.1f} ms" if milliseconds < 99.95 else f"{milliseconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} m" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _count(n: int) -> str:
    return f"{n:,}" if n < 10**7 else f"{n / 1e6:,.0f} M"


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{share:.0%}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
