"""What `serve run deploy.ray.app:build KEY=VALUE …` and quire.yaml may say. Never imports ray, so that any test can.

Keys of RaySettings are for Ray; `model` and all others are the flags of `quire serve`, with - or _ between words.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from server.hosted_daemon import parse_flags

_Replicas = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas there are, what each may use, and how it ends."""

    replicas: _Replicas = 1  # with max_replicas: the fewest
    max_replicas: _Replicas | None = None  # None: there are always `replicas`
    target_ongoing_requests: Annotated[float, msgspec.Meta(gt=0)] = 32.0  # per replica: more add one, fewer end one
    cpus: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # of each replica
    gpus: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # of each: 0 computes on the CPU, a share shares a GPU
    max_ongoing_requests: Annotated[int, msgspec.Meta(ge=1)] = 256  # per replica; the next go to another one
    max_queued_requests: Annotated[int, msgspec.Meta(ge=1)] = 1024  # per proxy, when all replicas are full; then 503
    max_imbalance: Annotated[int, msgspec.Meta(ge=0)] = 8  # requests by which a replica may lead, to keep its sessions
    drain_timeout: Annotated[float, msgspec.Meta(ge=0)] = 60.0  # seconds that a replica's streams have to finish
    health_period: Annotated[float, msgspec.Meta(gt=0)] = 10.0  # seconds; three bad checks replace a replica


def read_arguments(arguments: Mapping[str, Any]) -> tuple[RaySettings, list[str]]:
    """Return what is for Ray, and the flags of `quire serve`. Raises ValueError, StartupError for wrong flags."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(RaySettings)}
    values: dict[str, Any] = {}
    flags: list[str] = []
    for key, value in arguments.items():
        name = key.replace("-", "_")
        if name in kinds:
            values[name] = _convert(name, value, kinds[name])
        elif name == "model":
            flags = [*([] if value is None else [str(value)]), *flags]
        else:
            flags += _flag(name, value)
    settings = RaySettings(**values)
    if settings.max_replicas is not None and settings.max_replicas < settings.replicas:
        raise ValueError(f"max_replicas={settings.max_replicas} must be at least replicas={settings.replicas}.")
    return settings, flags + _device(settings, parse_flags(flags).device)


def _device(settings: RaySettings, device: str) -> list[str]:
    """Return the flag that keeps a replica off GPUs that Ray has not given to it: Ray itself hides none."""
    if settings.gpus == 0 and device == "cuda":
        raise ValueError("device=cuda needs gpus=1, or a share of one: gpus=0 reserves none for a replica.")
    return ["--device=cpu"] if settings.gpus == 0 and device == "auto" else []


def _convert(name: str, value: Any, kind: Any) -> Any:
    if name == "gpus" and str(value).strip().isdigit() and int(value) > 1:
        raise ValueError(f"gpus={value}: a replica computes on one GPU, quire serve splits no model over several yet.")
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}={value!r}: {error}.") from None


def _flag(name: str, value: Any) -> list[str]:
    """Return one flag: true is a flag without a value, false and null none, a list the flag several times."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, list | tuple):
        return [f"{flag}={item}" for item in value]
    if value is None or value is False or value == "false":
        return []
    return [flag] if value is True or value == "true" else [f"{flag}={value}"]
