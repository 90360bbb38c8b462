"""Flags of `quire serve` that say what the daemon tells of itself: logs, metrics, traces. Imports argparse."""

import argparse
import importlib.util
from urllib.parse import urlsplit

from engine.interface.errors import StartupError
from server.config.value_types import text

_TRACES_PATH = "/v1/traces"

_OPENTELEMETRY = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def add_log_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the log."""
    add = group.add_argument
    add(
        "--log-format",
        choices=("auto", "text", "json"),
        metavar="FMT",
        default="auto",
        help="auto (bars on a terminal), text or json",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        metavar="LEVEL",
        default="info",
        help="debug, info, warning or error",
    )
    add("--debug", action="store_true", help="show tracebacks")


def add_metrics_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of metrics and traces."""
    add = group.add_argument
    add(
        "--metrics-compat",
        choices=("vllm", "none"),
        metavar="NAMES",
        default="vllm",
        help="vllm: /metrics has vLLM's names too; none: only quire_*",
    )
    add("--otlp-traces-endpoint", type=text, metavar="URL", help="send a trace per request there, by OTLP over HTTP")


def traces_endpoint(url: str | None) -> str | None:
    """Return the URL that traces are posted to: without a path it is a collector's. Raises StartupError."""
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_url = urlsplit(""), False
    if not is_url:
        raise StartupError(f"--otlp-traces-endpoint {url} is not a URL such as http://127.0.0.1:4318.", exit_code=2)
    if not has_opentelemetry():
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise StartupError(f"--otlp-traces-endpoint needs OpenTelemetry: pip install {packages}.", exit_code=2)
    return url if parts.path.strip("/") else parts._replace(path=_TRACES_PATH).geturl()


def has_opentelemetry() -> bool:
    """Tell if the packages of the extra are installed, without importing them."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in _OPENTELEMETRY)
    except ModuleNotFoundError:  # not even its parent
        return False
