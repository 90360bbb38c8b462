"""The flags of `quire serve`, in groups: model, memory, speculation, address, requests, log, metrics.

Each add_*_flags function adds one group; server/hosted/daemon.py and `quire bench` add some of them too. Each *_of
function turns parsed values into a checked value, of which server/cli.py and server/config/serve_config.py make the
configurations. Imports argparse; ssl and engine.interface.config when needed.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from server.config.kv_flags import add_kv_flags
from server.config.setting import add_alias
from server.config.value_types import (
    BACKEND_NAMES,
    DTYPES,
    KV_CACHE_DTYPES,
    MODEL_IMPLS,
    QUANTIZATION_NAMES,
    UsageError,
    deadline,
    depth_overlaps,
    integer,
    named_folder,
    readable_file,
    seconds,
    share,
    share_or_none,
    size,
    text,
)

if TYPE_CHECKING:
    from engine.interface.config import SpeculativeConfig

_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 8000
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less its end; 103 on macOS
_TRACES_PATH = "/v1/traces"
_OPENTELEMETRY = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_METHODS = ("ngram",)
_DETAILS = ("--num-speculative-tokens", "--ngram-min", "--ngram-max")


def add_model_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the model and its loading."""
    add = group.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or hub id (default: the built-in demo)")
    add("--revision", type=text, metavar="REV", help="branch, tag or commit of the hub id")
    add(
        "--served-model-name",
        action="append",
        type=text,
        metavar="NAME",
        help="name in requests; repeatable (folder or hub id)",
    )
    add(
        "--device", choices=("auto", "cuda", "mps", "cpu"), metavar="DEV", default="auto", help="auto, cuda, mps or cpu"
    )
    add_tensor_parallel_flags(group, help="GPUs of this machine over which the model is split (1)")
    add(
        "--dtype",
        choices=DTYPES,
        metavar="TYPE",
        default="auto",
        help="auto, bfloat16, float16 or float32",
    )
    add(
        "--quantization",
        choices=QUANTIZATION_NAMES,
        metavar="NAME",
        default="auto",
        help=f"format of linear layers and experts (auto: the checkpoint's): {', '.join(QUANTIZATION_NAMES)}",
    )
    add(
        "--model-impl",
        choices=MODEL_IMPLS,
        default="auto",
        metavar="NAME",
        help="who computes the model: quire, or transformers' own class, slower (auto: the first that knows it)",
    )
    add(
        "--load-format", choices=("auto", "dummy"), metavar="FMT", default="auto", help="auto, or dummy: random weights"
    )
    add(
        "--attention-backend",
        choices=BACKEND_NAMES,
        default="auto",
        metavar="NAME",
        help="auto, triton, flash-attn, torch",
    )
    add(
        "--pooling",
        choices=("auto", "last", "mean"),
        metavar="KIND",
        default="auto",
        help="pooling of embeddings: auto (from the model's folder), last or mean",
    )
    add(
        "--lora", action="append", type=named_folder, metavar="NAME=FOLDER", default=[], help="LoRA adapter; repeatable"
    )
    add("--chat-template", type=text, metavar="FILE", help="Jinja file that replaces the model's own template")


def add_memory_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of memory and batching."""
    add = group.add_argument
    add("--max-model-len", type=integer(1, 2**24), metavar="N", help="context length in tokens")
    add(
        "--max-num-seqs",
        type=integer(1, 16_384),
        metavar="N",
        help="requests at once (32 to 256, by the memory)",
    )
    add(
        "--max-num-batched-tokens",
        type=integer(1, 32_768),
        metavar="N",
        help="tokens computed per step (8192 on GPUs from 40 GiB, 2048, 1024 below 12; else 512)",
    )
    decode_step_tokens = add(
        "--max-decode-step-tokens",
        type=integer(1, 32_768),
        metavar="N",
        help="tokens computed per step while requests decode",
    )
    add_alias(group, "--max-num-mixed-tokens", decode_step_tokens)
    add("--block-size", type=integer(1, 1024), metavar="N", help="tokens per KV block (16)")
    add("--kv-cache-memory", type=size, metavar="SIZE", help="memory of the KV cache, e.g. 4GiB or 512MB")
    add_kv_flags(group)
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        metavar="TYPE",
        help="auto: same as --dtype; fp8 (e4m3): twice the tokens; int8: nearly twice, finer",
    )
    add("--gpu-memory-utilization", type=share, default=0.9, metavar="F", help="fraction of GPU memory to use (0.9)")
    add("--no-prefix-caching", action="store_true", help="do not reuse the KV of shared prefixes")
    add(
        "--prompt-cache-budget",
        type=share_or_none,
        default=0.25,
        metavar="F",
        help="fraction of the KV cache that one API key may keep by request (0.25)",
    )
    add_overlap_flag(group)
    add("--enforce-eager", action="store_true", help="disable CUDA graphs, for debugging")
    queued_requests = add(
        "--max-queued-requests",
        type=integer(1, 2**20),
        default=2048,
        metavar="N",
        help="limit of queued requests (2048)",
    )
    add_alias(group, "--max-waiting", queued_requests)
    add(
        "--max-queued-tokens",
        type=integer(1, 2**40),
        metavar="N",
        help="limit of prompt tokens in the queue (64 full contexts)",
    )
    add(
        "--max-queue-wait",
        type=seconds,
        default=30.0,
        metavar="S",
        help="refuse requests whose first token would come later than in S seconds; 0: never (30)",
    )


def add_tensor_parallel_flags(container: argparse._ActionsContainer, *, help: str) -> None:  # noqa: A002 - argparse's name
    """Add --tensor-parallel-size, with this help, and --expert-parallel."""
    add = container.add_argument
    add("--tensor-parallel-size", type=integer(1, 64), default=1, metavar="N", help=help)
    add("--expert-parallel", action="store_true", help="each GPU has some experts whole, not a part of each")


def is_expert_parallel(arguments: argparse.Namespace) -> bool:
    """Return the value of --expert-parallel. Raises StartupError if there is one GPU."""
    if arguments.expert_parallel and arguments.tensor_parallel_size == 1:
        raise UsageError("--expert-parallel needs --tensor-parallel-size 2 or more, and it is 1.")
    return bool(arguments.expert_parallel)


def add_overlap_flag(container: argparse._ActionsContainer) -> None:
    """Add --overlap and --no-overlap, and --depth, which they were called before."""
    overlap = container.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="launch a step before the previous one's results are handled (true on cuda, else false)",
    )
    add_alias(container, "--depth", overlap, parse=depth_overlaps)


def num_steps_in_flight(overlap: bool | None) -> int | None:
    """Return the engine's depth for --overlap; None lets the device decide."""
    return None if overlap is None else 2 if overlap else 1


class Address(NamedTuple):
    """The listening address: a unix socket, or host and port."""

    host: str
    port: int
    uds: str | None


class Tls(NamedTuple):
    """Paths of a certificate chain and its key."""

    cert: str
    key: str


def add_address_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the listening address."""
    add = group.add_argument
    add("--host", type=text, help="address to listen on (127.0.0.1)")
    add("--port", type=integer(0, 65_535), metavar="N", help="port to listen on; 0: any free port (8000)")
    add("--uds", type=text, metavar="PATH", help="listen on a unix socket (mode 0660) instead of host and port")
    add("--tls-cert", type=text, metavar="FILE", help="certificate chain in PEM: serve HTTPS; needs --tls-key")
    add("--tls-key", type=text, metavar="FILE", help="private key of --tls-cert in PEM, without a passphrase")


def add_request_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of request checking and timeouts."""
    add = group.add_argument
    reject = add(
        "--reject-unknown-fields",
        action="store_true",
        help="answer 400 to unknown request fields instead of reporting them",
    )
    add_alias(group, "--strict", reject)
    add("--request-timeout", type=deadline, metavar="S", help="time limit of every request in seconds (none)")
    add(
        "--max-replays",
        type=integer(0, 1000),
        default=2,
        metavar="N",
        help="engines in a row that may end under open requests before any got a further token; 0: none goes on (2)",
    )
    add("--standby", action="store_true", help="keep a second engine process, which takes over when the engine ends")
    add(
        "--stall-timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="restart an engine that makes no progress for S seconds; 0: never (300)",
    )


def address_of(arguments: argparse.Namespace) -> Address:
    """Return the listening address. Raises StartupError for a unix socket together with host or port."""
    host, port, uds = arguments.host, arguments.port, arguments.uds
    if uds is not None:
        for flag, value in (("--host", host), ("--port", port)):
            if value is not None:
                raise UsageError(f"--uds {uds} and {flag} {value} exclude each other.")
        uds = str(Path(uds).expanduser().absolute())
        if len(uds.encode()) > _MAX_SOCKET_PATH_BYTES:
            raise UsageError(f"--uds {uds} has {len(uds.encode())} bytes, the limit is {_MAX_SOCKET_PATH_BYTES}.")
    return Address(host if host is not None else _DEFAULT_HOST, port if port is not None else _DEFAULT_PORT, uds)


def tls_of(arguments: argparse.Namespace) -> Tls | None:
    """Return the TLS files after a trial load, or None. Raises StartupError that names the flag at fault."""
    cert, key = arguments.tls_cert, arguments.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise UsageError(f"{given} needs {missing} as well.")
    tls = Tls(readable_file("--tls-cert", cert), readable_file("--tls-key", key))
    check_tls(tls)
    return tls


def check_tls(tls: Tls) -> None:
    """Load the files as a trial. Raises StartupError if they cannot be used."""
    import ssl

    try:
        # a passphrase would be asked for on the terminal, and again by every worker
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else "not PEM files that fit together"
        raise UsageError(
            f"--tls-cert {tls.cert} and --tls-key {tls.key} cannot be used: {reason.replace('_', ' ').lower()}."
        ) from error


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
        help="vllm: add vLLM's names to /metrics; none: only quire_*",
    )
    add(
        "--otlp-traces-endpoint",
        type=text,
        metavar="URL",
        help="send a trace of every request to this URL, by OTLP over HTTP",
    )


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
        raise UsageError(f"--otlp-traces-endpoint {url} is not a URL such as http://127.0.0.1:4318.")
    if not has_opentelemetry():
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise UsageError(f"--otlp-traces-endpoint needs OpenTelemetry: pip install {packages}.")
    return url if parts.path.strip("/") else parts._replace(path=_TRACES_PATH).geturl()


def has_opentelemetry() -> bool:
    """Return True if the packages of the extra are installed, without importing them."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in _OPENTELEMETRY)
    except ModuleNotFoundError:  # not even its parent
        return False


def add_speculative_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags to a parser or a group of it."""
    add = group.add_argument
    add(
        "--speculative",
        choices=_METHODS,
        metavar="HOW",
        help="ngram: draft the tokens that followed the same tokens earlier",
    )
    add("--num-speculative-tokens", type=integer(1, 32), metavar="N", help="draft tokens per step (4)")
    add("--ngram-min", type=integer(1, 32), metavar="N", help="shortest match of earlier tokens (2)")
    add("--ngram-max", type=integer(1, 64), metavar="N", help="longest match of earlier tokens (4, or --ngram-min)")


def speculative_of(arguments: argparse.Namespace) -> "SpeculativeConfig | None":
    """Return the configuration of speculation, None if it is off. Raises StartupError for conflicting flags."""
    from engine.interface.config import SpeculativeConfig

    given = (arguments.num_speculative_tokens, arguments.ngram_min, arguments.ngram_max)
    if arguments.speculative is None:
        for flag, value in zip(_DETAILS, given, strict=True):
            if value is not None:
                raise UsageError(f"{flag} {value} needs --speculative ngram.")
        return None
    default = SpeculativeConfig()
    num_tokens, shortest, longest = given
    shortest = shortest or min(default.ngram_min, longest or default.ngram_min)
    longest = longest or max(default.ngram_max, shortest)
    if longest < shortest:
        raise UsageError(f"--ngram-max {longest} is less than --ngram-min {shortest}.")
    return SpeculativeConfig(
        method=arguments.speculative,
        num_tokens=num_tokens or default.num_tokens,
        ngram_min=shortest,
        ngram_max=longest,
    )
