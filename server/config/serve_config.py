"""Makes the configurations of engine and HTTP workers from the parsed flags of `quire serve`. Never torch.

check_flags reads only the flags and the files that they name; find_model may download. The port is bound between
them.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.interface.config import EngineConfig, LoraSource, ServerConfig
from engine.interface.tenant import Tenant
from server.config.api_keys import FileKeys, merge_roles, read_file_keys, read_key_hashes
from server.config.disaggregation import min_prefill_tokens, peer_of
from server.config.fit_check import check_fits
from server.config.kv_flags import check_kv_events
from server.config.model_source import local_folder, resolve_model
from server.config.packages import check_packages
from server.config.serve_flags import is_expert_parallel, num_steps_in_flight, speculative_of, traces_endpoint
from server.config.value_types import UsageError, readable_file, resolve_loras
from server.text.embedding_model import load_embedding_model


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of an HTTP worker process, as JSON in the run directory."""

    server: ServerConfig
    listen_fd: int  # the inherited listening socket
    more_listen_fds: list[int] = []  # of a daemon that had more workers, whose port was taken over
    tls_cert: str | None  # PEM files, both or neither
    tls_key: str | None
    log_level: str
    log_format: str  # text | json
    debug: bool


class CheckedFlags(NamedTuple):
    """Values that check_flags reads from files and the environment."""

    chat_template: str | None
    traces_endpoint: str | None
    given_key_hashes: list[str]  # of keys that are not in the file
    api_key_roles: dict[str, list[str]]  # of all, by hash
    api_key_tenants: dict[str, Tenant]  # of those with a name, by hash

    @property
    def api_key_hashes(self) -> list[str]:
        """The hashes of all keys."""
        return list(self.api_key_roles)


def check_flags(arguments: argparse.Namespace) -> CheckedFlags:
    """Check combinations of flags, and read the files that flags name. Raises StartupError."""
    _check_together(arguments)
    if arguments.model is not None:
        local_folder(arguments.model, revision=arguments.revision)  # a wrong name is told before a port in use
    chat_template = None
    if arguments.chat_template is not None:
        chat_template = readable_file("--chat-template", arguments.chat_template, is_text=True)
    endpoint = traces_endpoint(arguments.otlp_traces_endpoint)
    given = read_key_hashes(arguments.api_key, file=None, environment=os.environ)
    in_file = FileKeys({}, {}) if arguments.api_key_file is None else read_file_keys(arguments.api_key_file)
    check_packages()
    return CheckedFlags(chat_template, endpoint, given, merge_roles(given, in_file.roles), in_file.tenants)


def find_model(
    arguments: argparse.Namespace, checked: CheckedFlags, *, allowed_hosts: list[str] | None = None
) -> tuple[EngineConfig, ServerConfig]:
    """Find or download the model; return the configurations of engine and workers. Raises StartupError.

    allowed_hosts: as ServerConfig.allowed_hosts.
    """
    model = resolve_model(
        arguments.model,
        revision=arguments.revision,
        load_format=arguments.load_format,
        check=partial(check_fits, arguments),
    )
    load_embedding_model(model.folder, pooling=arguments.pooling)  # what it refuses must not cost a load
    names = arguments.served_model_name or [model.name]
    loras = resolve_loras(arguments.lora, served_model_names=names)
    server_config = ServerConfig(
        model=str(model.folder),
        served_model_names=names,
        lora_names=[source.name for source in loras],
        chat_template=checked.chat_template,
        pooling=arguments.pooling,
        strict=arguments.reject_unknown_fields,
        request_timeout_s=arguments.request_timeout,
        max_replays=arguments.max_replays,
        api_key_hashes=checked.api_key_hashes,
        api_key_roles=checked.api_key_roles,
        api_key_tenants=checked.api_key_tenants,
        priority=arguments.priority,
        allowed_hosts=allowed_hosts,
        cors_origins=arguments.cors_origin,
        root_path=arguments.root_path,
        otlp_traces_endpoint=checked.traces_endpoint,
        min_prefill_tokens=min_prefill_tokens(arguments),
    )
    return _engine_config(arguments, str(model.folder), loras), server_config


def _check_together(arguments: argparse.Namespace) -> None:
    speculative_of(arguments)
    check_kv_events(arguments)
    is_expert_parallel(arguments)
    peer_of(arguments)
    budget, rows = arguments.max_num_batched_tokens, arguments.max_num_seqs
    if budget is not None and rows is not None and budget < rows:
        raise UsageError(
            f"--max-num-batched-tokens {budget} must be at least --max-num-seqs {rows}, one token per running request."
        )
    if arguments.revision is not None and arguments.model is None:
        raise UsageError(f"--revision {arguments.revision} needs a hub id as MODEL.")


def _engine_config(arguments: argparse.Namespace, folder: str, loras: list[LoraSource]) -> EngineConfig:
    return EngineConfig(
        model=folder,
        model_impl=arguments.model_impl,
        load_format=arguments.load_format,
        device=arguments.device,
        tensor_parallel_size=arguments.tensor_parallel_size,
        is_expert_parallel=is_expert_parallel(arguments),
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        loras=loras,
        attention_backend=arguments.attention_backend,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_decode_step_tokens=arguments.max_decode_step_tokens,
        block_size=arguments.block_size,
        kv_cache_memory_bytes=arguments.kv_cache_memory,
        kv_host_memory_bytes=arguments.kv_host_memory if isinstance(arguments.kv_host_memory, int) else None,
        chooses_host_memory=arguments.kv_host_memory == "auto",
        kv_disk=None if arguments.kv_disk is None else str(Path(arguments.kv_disk).expanduser().absolute()),
        kv_disk_bytes=arguments.kv_disk_size,
        kv_events=arguments.kv_events_config,
        kv_cache_dtype=arguments.kv_cache_dtype,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        enable_prefix_caching=not arguments.no_prefix_caching,
        pin_share=arguments.prompt_cache_budget,
        enforce_eager=arguments.enforce_eager,
        overlap_depth=num_steps_in_flight(arguments.overlap),
        max_queued_requests=arguments.max_queued_requests,
        max_queued_tokens=arguments.max_queued_tokens,
        max_queue_wait_s=arguments.max_queue_wait or None,
        speculative=speculative_of(arguments),
        peer=peer_of(arguments),
    )
