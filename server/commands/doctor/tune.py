"""`quire doctor --tune`: has a model measured here, chooses settings, and writes them as YAML with their reasons.

The measurements are the engine's (engine/tune.py, a separate process); the choice is here. Settings that the user gave
are kept. Never torch.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.interface.child_process import PROJECT_ROOT
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.interface.tune_report import Measured, Rate, TuneAsk, TuneReport
from server.config.value_types import UsageError
from server.config.version import package_version

LIMIT_S = 120.0
_GRACE_S = 180.0  # to load, and for a measurement that has begun
_MOST_STEP_TOKENS = 32_768  # that --max-num-batched-tokens takes
_GOOD_SHARE = 0.95  # of the best rate: the smallest size that has it is chosen


class Choice(NamedTuple):
    """A setting, and its reason in one sentence. value: None where the default stays."""

    key: str
    value: str | None
    reason: str


def tune(
    config: EngineConfig, model: str | None, given: dict[str, str], *, path: Path, limit_s: float = LIMIT_S
) -> str:
    """Measure, write the file, and return what to do with it. Raises StartupError; an existing file is kept.

    model: as the file is to name it; None: the demo, which it does not name. given: the user's own settings by key,
    which the file has as well.
    """
    if path.exists():
        raise UsageError(f"--output {path} exists already: name another file.")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"--output {path}: its folder does not exist.")
    print(f"Measuring for up to {limit_s:.0f} s …", file=sys.stderr, flush=True)
    report = _measure(TuneAsk(config=config, limit_s=limit_s))
    if report.problem is not None:
        raise StartupError(report.problem)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(to_yaml(report, model, given))
    except OSError as error:
        raise StartupError(f"--output {path} cannot be written: {error.strerror}.") from error
    return f"{path} is written. Start with it: quire serve --config {path}"


def choose(report: TuneReport, given: dict[str, str]) -> list[Choice]:
    """Return the settings that the measurements speak for. The faster dtype counts, if there are two."""
    choices = []
    best = max(report.measured, key=_speed)
    if len(report.measured) > 1:
        reason = "; ".join(f"{measured.dtype}: {_speed(measured):,.0f}" for measured in report.measured)
        choices.append(Choice("dtype", best.dtype, f"Answer tokens per second, at most: {reason}."))
    requests = None
    if best.answers and "max-num-seqs" not in given:
        requests = _smallest_good(best.answers, is_complete=report.is_complete)
        reason = f"Answer tokens per second by requests at once: {_listed(best.answers)}."
        choices.append(_choice("max-num-seqs", requests, reason))
    if best.prompts and "max-num-batched-tokens" not in given:
        step = _smallest_good(best.prompts, is_complete=report.is_complete)
        least = int(given["max-num-seqs"]) if "max-num-seqs" in given else requests
        reason = f"Prompt tokens per second by tokens a step: {_listed(best.prompts)}."
        # a step has a token for each request; as many are left for prompts, which would else wait for answers to end
        size = None if step is None or least is None else max(step, min(2 * least, _MOST_STEP_TOKENS))
        if size is not None and size != step:
            reason += " Twice the requests at once, so that half of a step is left for prompts."
            choices.append(Choice("max-num-batched-tokens", str(size), reason))
        else:
            choices.append(_choice("max-num-batched-tokens", size, reason))
    return choices


def _choice(key: str, size: int | None, reason: str) -> Choice:
    if size is None:
        return Choice(key, None, f"{reason} The time was over before the best was known: the default stays.")
    return Choice(key, str(size), f"{reason} {_RULE}")


_RULE = f"The smallest with {_GOOD_SHARE:.0%} of the best: more would only make each token wait longer."


def to_yaml(report: TuneReport, model: str | None, given: dict[str, str]) -> str:
    """Return the file's text."""
    lines = [
        f"# quire doctor --tune: quire {package_version()} on {report.device}, {report.seconds:.0f} s of measurements",
        f"# Context: {report.max_model_len:,} tokens; the KV cache holds {report.kv_cache_tokens:,}.",
    ]
    if not report.is_complete:
        lines.append("# The time was over before all sizes were measured.")
    if model is not None:
        lines.append(f"model: {msgspec.json.encode(model).decode()}")
    for choice in choose(report, given):
        is_default = choice.value is None
        lines += ["", f"# {choice.reason}", f"# {choice.key}:" if is_default else f"{choice.key}: {choice.value}"]
    if given:
        lines += ["", "# As given."]
        lines += [f"{key}: {msgspec.json.encode(value).decode()}" for key, value in given.items()]
    return "\n".join(lines) + "\n"


def _speed(measured: Measured) -> float:
    return max((rate.tokens_per_s for rate in measured.answers), default=0.0)


def _smallest_good(rates: list[Rate], *, is_complete: bool) -> int | None:
    """Return the smallest size with nearly the best rate; None if it is the last of those there was time for."""
    best = max(rate.tokens_per_s for rate in rates)
    size = next(rate.size for rate in rates if rate.tokens_per_s >= _GOOD_SHARE * best)
    return size if is_complete or size != rates[-1].size else None


def _listed(rates: list[Rate]) -> str:
    return ", ".join(f"{rate.size:,}: {rate.tokens_per_s:,.0f}" for rate in rates)


def _measure(ask: TuneAsk) -> TuneReport:
    """Run the engine's part, whose progress goes on to standard error. Raises StartupError."""
    command = [sys.executable, "-m", "engine.tune"]
    begun_s = time.monotonic()
    try:
        done = subprocess.run(
            command,
            input=msgspec.json.encode(ask),
            cwd=PROJECT_ROOT,
            stdout=subprocess.PIPE,
            timeout=ask.limit_s + _GRACE_S,
        )
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=TuneReport)
        reason = f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"it took longer than {time.monotonic() - begun_s:.0f} s"
    except msgspec.MsgspecError as error:
        reason = f"it answered what is not understood: {error}"
    raise StartupError(f"The measurement failed: {reason}.")
