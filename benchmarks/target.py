"""Finds a server's API base, model and accepted prompt form from its URL."""

import ssl
from urllib.parse import SplitResult, urlsplit

import httpx
import msgspec

from benchmarks.load import LoadConfig
from benchmarks.load_client import run_load
from benchmarks.load_connection import RequestTiming
from benchmarks.report import BenchError
from server.config.other_scheme import other_scheme

_TIMEOUT_S = 15.0
_REFUSED = ("HTTP 400", "HTTP 404", "HTTP 405", "HTTP 422", "HTTP 501")  # statuses that reject the request itself


def find_target(url: str, *, endpoint: str, model: str | None, api_key: str) -> LoadConfig:
    """Ask the server for its models; return a config with its address and model only. Raises BenchError.

    A bare host has its API under /v1. A path is taken as OpenAI's clients take a base_url, and with /v1 added if it
    has no models. endpoint: completions | chat.
    """
    parts = _split(url)
    path = parts.path.rstrip("/")
    bases = [path] if path.endswith("/v1") else [f"{path}/v1", path] if path else ["/v1"]
    base, found = _first_that_answers(parts, bases, api_key)
    if not (model or found):
        raise BenchError(f"{url} names no model under {bases[0]}/models: give one with --model.")
    return LoadConfig(
        host=parts.hostname or "",
        port=parts.port or (443 if parts.scheme == "https" else 80),
        is_tls=parts.scheme == "https",
        path=base + ("/chat/completions" if endpoint == "chat" else "/completions"),
        model=model or found,
        api_key=api_key,
    )


def settle_prompts(config: LoadConfig, prompt_format: str) -> LoadConfig:
    """Send a trial request, so that the load's first is not slower; return the config with an accepted prompt form.

    prompt_format: ids | text | auto (ids if accepted, which makes the lengths exact). Raises BenchError.
    """
    if config.path.endswith("/chat/completions"):
        formats = ["text"]
    else:
        formats = ["ids", "text"] if prompt_format == "auto" else [prompt_format]
    trial = RequestTiming(0.0)
    for tried in formats:
        config = msgspec.structs.replace(config, prompt_format=tried)
        trial = _try(config)
        if not trial.error and (trial.num_token_ids or tried == "text" or not config.wants_token_ids):
            return config
        if trial.error and trial.error_kind not in _REFUSED:
            break
    if not trial.error:
        raise BenchError(
            f"The server returns no token ids of answers, which the next prompts of the workload {config.workload} are "
            "made of: --prompt-format text."
        )
    raise BenchError(
        f"The server refused a trial request to {config.path}: {trial.error_kind}: {trial.error.rstrip('.')}"
        f"{_hint(trial)}."
    )


def _split(url: str) -> SplitResult:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_known = False
    if not is_known:
        raise BenchError(f"--url {url!r} is not a URL such as http://127.0.0.1:8000.", exit_code=2)
    return parts


def _first_that_answers(parts: SplitResult, bases: list[str], api_key: str) -> tuple[str, str]:
    """Return the base path whose /models is there, and the first model; the first base and "" if none is."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    host = parts.netloc.rpartition("@")[2]
    tls = ssl.create_default_context()  # as the load's own connections do
    for base in bases:
        url = f"{parts.scheme}://{host}{base}/models"
        try:
            reply = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=tls)
        except httpx.HTTPError as error:
            other = other_scheme(url)
            reason = str(error) or type(error).__name__
            if other is not None:
                reason = f"the server there speaks {other.partition(':')[0]}, not {parts.scheme}"
            raise BenchError(f"No server answers at {url}: {reason}.") from error
        if reply.status_code in (401, 403):
            raise BenchError(f"{url} answers HTTP {reply.status_code}: it wants a key, or another one: --api-key KEY.")
        if reply.status_code >= 500:
            raise BenchError(f"{url} answers HTTP {reply.status_code}: the server is not ready to be measured.")
        if reply.status_code == 200:
            return base, _first_model(reply)
    return bases[0], ""


def _first_model(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return ""


def _try(config: LoadConfig) -> RequestTiming:
    """Send one request of the load's kind, with two output tokens and its own seed."""
    trial = msgspec.structs.replace(
        config,
        workload="",
        num_requests=1,
        concurrency=1,
        rate_per_s=0.0,
        output_len=min(2, config.output_len),
        seed=-1,
    )
    return run_load(trial).timings[0]


def _hint(trial: RequestTiming) -> str:
    if trial.error_kind in ("HTTP 401", "HTTP 403"):
        return " (--api-key KEY)"
    if "ignore_eos" in trial.error:
        return " (--no-ignore-eos leaves that field out)"
    if trial.error_kind in ("HTTP 404", "HTTP 405"):
        return " (--model NAME, --endpoint chat or another --url)"
    return ""
