"""Parses the arguments of `serve run deploy.ray.app:build KEY=VALUE …` and quire.yaml. Never imports ray.

Keys of RaySettings are for Ray; `model` and all others are the flags of `quire serve`, with - or _ between words.
Both sides hear of tensor_parallel_size and disaggregate, two flags: as many devices are reserved for each replica, all
on one node.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from server.hosted.daemon import parse_flags

_HAS_OPPOSITE = ("overlap",)  # switches whose default is not false


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for Ray: number of replicas, their resources, routing and shutdown."""

    replicas: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 1  # with max_replicas: the fewest, and may be 0
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None  # None: there are always `replicas`
    target_ongoing_requests: Annotated[float, msgspec.Meta(gt=0)] = 32.0  # per replica: more add one, fewer end one
    cpus: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # of each rank, and so of a replica that is not split
    gpus: Annotated[float, msgspec.Meta(ge=0)] | None = None  # of each replica: one a rank; 0 computes on the CPU
    max_ongoing_requests: Annotated[int, msgspec.Meta(ge=1)] = 256  # per replica; the next go to another one
    max_queued_requests: Annotated[int, msgspec.Meta(ge=1)] = 1024  # per proxy, when all replicas are full; then 503
    max_imbalance: Annotated[int, msgspec.Meta(ge=0)] = 8  # requests by which a replica may lead, to keep its sessions
    drain_timeout: Annotated[float, msgspec.Meta(ge=0)] = 60.0  # seconds that a replica's streams have to finish
    health_period: Annotated[float, msgspec.Meta(gt=0)] = 10.0  # seconds; three bad checks replace a replica


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that Ray reserves for each replica's actor, whose processes use them."""

    cpus: float
    gpus: float
    is_split: bool  # over several ranks, whose devices must be on one node

    def bundle(self) -> dict[str, float]:
        """Return all of it as one bundle of a placement group: Ray shows an actor the GPUs of its bundle alone."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


class RayArguments(NamedTuple):
    """The parsed arguments: for Ray, for the reservation, and for `quire serve`."""

    settings: RaySettings
    reservation: Reservation
    flags: list[str]  # of `quire serve`


def read_arguments(arguments: Mapping[str, Any]) -> RayArguments:
    """Read all arguments. Raises ValueError, and StartupError for wrong flags."""
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
    if settings.max_replicas is None and settings.replicas == 0:
        raise ValueError("replicas=0 needs max_replicas: without it nothing would ever be served.")
    parsed = parse_flags(flags)
    size, name = parsed.tensor_parallel_size, f"tensor_parallel_size={parsed.tensor_parallel_size}"
    if parsed.disaggregate is not None:
        of_engines = f"disaggregate={arguments['disaggregate']}"
        name = of_engines if size == 1 else f"{of_engines} with {name}"
        size *= sum(parsed.disaggregate)
    gpus = _gpus(settings.gpus, parsed.device, size, name=name)
    reservation = Reservation(cpus=settings.cpus * size, gpus=gpus, is_split=size > 1)
    # Ray hides no GPU from a replica that has none
    device = ["--device=cpu"] if gpus == 0 and parsed.device == "auto" else []
    return RayArguments(settings, reservation, flags + device)


def _gpus(said: float | None, device: str, size: int, *, name: str) -> float:
    """Return how many GPUs a replica needs. Raises ValueError if what was said is another number.

    name: the flag that sets this size. said: None for what it needs: none if it is alone and was not sent to a GPU.
    """
    needed = size if device == "cuda" or (size > 1 and device == "auto") else 0
    gpus = needed if said is None else said
    if device == "cpu" and gpus:
        raise ValueError(f"gpus={gpus:g} and device=cpu: a replica that computes on the CPU uses no GPU.")
    if device == "cuda" and not gpus:
        raise ValueError("gpus=0 and device=cuda: gpus=0 reserves no GPU for a replica.")
    if gpus not in (0, size) and (size > 1 or gpus > 1):
        raise ValueError(
            f"gpus={gpus:g} and {name}: a replica has one whole GPU for each rank of each engine, {size} here:"
            " set both to the same number."
        )
    return gpus


def _convert(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}={value!r}: {error}.") from None


def _flag(name: str, value: Any) -> list[str]:
    """Return one flag: true is a flag without a value, false and null none, a list the flag several times."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, list | tuple):
        return [f"{flag}={item}" for item in value]
    if value is None or ((value is False or value == "false") and name not in _HAS_OPPOSITE):
        return []
    if value is False or value == "false":
        return ["--no-" + flag.removeprefix("--")]
    return [flag] if value is True or value == "true" else [f"{flag}={value}"]
