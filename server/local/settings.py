"""read_settings(): the keywords of LLM(…) as configurations of engine and text side. Imports server.config.

The keywords are the flags of `quire serve` on model, memory and speculation, so that values, limits and errors are the
same: max_model_len=8192 is --max-model-len 8192, loras of a list is --lora given several times.
"""

import argparse
from typing import Any

import msgspec

from engine.interface.config import EngineConfig, ServerConfig
from engine.interface.errors import sentence
from server.config.known_flags import about_setting
from server.config.serve_config import check_flags, find_model
from server.config.serve_flags import add_memory_flags, add_model_flags, add_speculative_flags
from server.config.value_types import UsageError
from server.hosted.daemon import parse_flags

# flags of a server's queue, of keys and of several engines, which a process without clients has not
_OF_A_SERVER = (
    "model",
    "served_model_name",
    "max_queued_requests",
    "max_queued_tokens",
    "prompt_cache_budget",
    "disaggregate",
    "disaggregate_from",
    "disaggregate_listen",
    "disaggregate_cert",
    "disaggregate_key",
    "disaggregate_ca",
    "prefill_hosts",
    "kv_transport",
)


def read_settings(model: str | None, settings: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Return the configurations of a model, which may be downloaded now. Raises StartupError."""
    actions = _actions()
    flags = [] if model is None else [model]
    for name, value in settings.items():
        if name not in actions:
            near = about_setting(name, {action.replace("_", "-"): action for action in actions})
            raise UsageError(f"LLM has no setting {name}{near}.")
        if value is not None:
            flags += _flags(actions[name], value)
    try:
        arguments = parse_flags(flags)
    except UsageError as error:
        flag, colon, rest = error.message.partition(":")
        raise UsageError(sentence(flag.removeprefix("--").replace("-", "_") + colon + rest)) from error
    engine_config, server_config = find_model(arguments, check_flags(arguments))
    engine_config = msgspec.structs.replace(engine_config, is_offline=True)
    return engine_config, msgspec.structs.replace(server_config, strict=True)


def _actions() -> dict[str, argparse.Action]:
    """Return the flags that are settings here, by keyword."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for add_flags in (add_model_flags, add_memory_flags, add_speculative_flags):
        add_flags(parser.add_argument_group())
    return {
        action.option_strings[0].removeprefix("--").replace("-", "_"): action
        for action in parser._actions
        if action.option_strings and action.help != argparse.SUPPRESS and action.dest not in _OF_A_SERVER
    }


def _flags(action: argparse.Action, value: Any) -> list[str]:
    """Return a setting as the command line has it."""
    flag = action.option_strings[0]
    keyword = flag.removeprefix("--").replace("-", "_")
    if isinstance(value, bool):
        if action.nargs != 0:
            raise UsageError(f"{keyword} takes a value, not {value}.")
        if value:
            return [flag]
        return [flag.replace("--", "--no-", 1)] if isinstance(action, argparse.BooleanOptionalAction) else []
    if isinstance(value, dict):  # loras by name
        return [f"{flag}={name}={folder}" for name, folder in value.items()]
    if isinstance(value, list | tuple):
        return [f"{flag}={item}" for item in value]
    if action.nargs == 0:
        raise UsageError(f"{keyword} is True or False, not {value!r}.")
    return [f"{flag}={value}"]
