"""Formats a Snapshot as lines of text that fit a terminal. Pure functions."""

import time

from server.commands.server_target import one_line
from server.commands.top.sampling import KvRow, Percentiles, Snapshot

_BAR_WIDTH = 16
_NONE = "–"
_WIDE = 80  # columns that all figures take; on fewer they take more lines


def snapshot_lines(snapshot: Snapshot, *, width: int, height: int | None) -> list[str]:
    """Return the whole snapshot, whose names, states and ids are the server's own text. height: None for no limit."""
    is_wide = width >= _WIDE
    parts = [part for line in _state(snapshot) for part in ([_joined(line)] if is_wide else _in_lines(line, width))]
    lines = [_title(snapshot, width), "", *parts, "", *_latencies(snapshot, is_wide=is_wide)]
    if snapshot.requests is not None:
        rest = None if height is None else height - len(lines) - 3
        lines += ["", *_requests(snapshot.requests, snapshot.num_unlisted, most=rest, is_wide=is_wide)]
    return [one_line(line)[:width].rstrip() for line in lines]


def _joined(parts: list[str]) -> str:
    return f"{parts[0]:<10}" + "   ".join(parts[1:])


def _in_lines(parts: list[str], width: int) -> list[str]:
    """Return a label and its figures in as many lines as they take."""
    lines = [f"{parts[0]:<10}{parts[1]}"]
    for part in parts[2:]:
        longer = f"{lines[-1]}   {part}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"{'':10}{part}")
    return lines


def _title(snapshot: Snapshot, width: int) -> str:
    version = f" · {snapshot.version}" if snapshot.version else ""
    left = f"{snapshot.model}{version} · {snapshot.url}"
    right = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    return f"{_cut(left, width - len(right) - 2):<{width - len(right)}}{right}"


def _state(snapshot: Snapshot) -> list[list[str]]:
    """Return a label and figures for each subject."""
    recent, total = snapshot.recent, snapshot.total
    filled = min(_BAR_WIDTH, round(snapshot.kv_usage * _BAR_WIDTH))
    pool = []
    if snapshot.kv_blocks_total is not None:
        of_tokens = f" of {snapshot.block_size} tokens" if snapshot.block_size else ""
        pool = [f"{snapshot.kv_blocks_used or 0:,} of {snapshot.kv_blocks_total:,} blocks{of_tokens}"]
    hits = _percent(recent.prefix_hit_rate) if recent.prefix_hit_rate is not None else _percent(total.prefix_hit_rate)
    done, generated, prompt = (
        _rate(count, recent.seconds) for count in (recent.num_finished, recent.generated_tokens, recent.prompt_tokens)
    )
    bar = f"[{'█' * filled}{'·' * (_BAR_WIDTH - filled)}]"
    return [
        ["Requests", f"{snapshot.num_running:,} running", f"{snapshot.num_waiting:,} waiting", f"{done} done"],
        [
            "",
            f"{total.num_finished:,} done since the start",
            f"{total.num_rejected:,} refused",
            f"{total.num_preemptions:,} preempted",
        ],
        ["KV cache", f"{bar} {snapshot.kv_usage:6.1%}", *pool],
        ["Tokens", f"{generated} generated", f"{prompt} prompt", f"{hits} of prompts cached"],
    ]


def _rate(count: int, seconds: float | None) -> str:
    """Return a rate; there is none after a single sample."""
    return f"{count / seconds:,.1f}/s" if seconds else f"{_NONE}/s"


def _latencies(snapshot: Snapshot, *, is_wide: bool) -> list[str]:
    """Return the table: recent figures and those since the start beside each other, or below."""
    seconds = snapshot.recent.seconds
    recent = f"last {seconds:.0f} s" if seconds and seconds >= 0.95 else "recent"
    names = f"{'p50':>10}{'p95':>10}{'p99':>10}"
    new, old = snapshot.recent, snapshot.total
    rows = [
        ("TTFT", new.ttft_s, old.ttft_s),
        ("ITL", new.itl_s, old.itl_s),
        ("E2E", new.e2e_s, old.e2e_s),
        ("Queue", new.queue_s, old.queue_s),
    ]
    # one sample alone has no recent figures
    now = [(label, _columns(recently if seconds is not None else Percentiles(0))) for label, recently, _ in rows]
    always = [f"{_columns(percentiles)}{_count(percentiles.count):>9}" for _, _, percentiles in rows]
    if is_wide:
        heads = [f"{'':8}{recent:>12}{'':18}   {'since start':>12}", f"{'':8}{names}   {names}{'n':>9}"]
        return heads + [f"{label:<8}{left}   {right}" for (label, left), right in zip(now, always, strict=True)]
    lines = [f"{recent:<8}"[:8] + names, *(f"{label:<8}{left}" for label, left in now), ""]
    lines += [f"{'started':<8}{names}{'n':>9}"]
    return lines + [f"{label:<8}{right}" for (label, _), right in zip(now, always, strict=True)]


def _columns(percentiles: Percentiles) -> str:
    return "".join(f"{_duration(value):>10}" for value in (percentiles.p50, percentiles.p95, percentiles.p99))


def _requests(rows: list[KvRow], num_unlisted: int, *, most: int | None, is_wide: bool) -> list[str]:
    middle = f"{'BLOCKS':>7}{'SHARED':>7}" if is_wide else ""
    hits = f"{'HITS':>9}" if is_wide else ""
    name_width, state_width = (22, 10) if is_wide else (15, 10)
    lines = [f"{'REQUEST':<{name_width}}{'STATE':<{state_width}}{middle}{'TOKENS':>17}{hits}{'AGE':>8}"]
    shown = rows if most is None else rows[: max(0, most)]
    for row in shown:
        name = f"{row.id}#{row.index}" if row.index else row.id
        tokens = f"{row.num_computed_tokens:,}/{row.num_tokens:,}"
        state = row.state + (f" p{row.num_preemptions}" if row.num_preemptions else "")
        middle = f"{row.num_blocks:>7,}{row.num_shared_blocks:>7,}" if is_wide else ""
        hits = f"{row.num_hit_tokens:>9,}" if is_wide else ""
        lines.append(
            f"{_cut(name, name_width - 1):<{name_width}}{_cut(state, state_width - 1):<{state_width}}{middle}"
            f"{tokens:>17}{hits}{_duration(row.age_s):>8}"
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
