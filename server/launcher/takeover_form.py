"""The form of a takeover: the next daemon's model is loaded beside the running one's, or in its place. Never torch.

    beside    memory holds both: the running daemon serves until the next one is ready, and finishes its requests itself
    instead   it does not: the running daemon stops its engine, and its open requests go on in the next one's
For the second form both must speak of the same model in the same way: EngineFacts. Imports engine.interface and
server.config.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.interface.config import EngineConfig, LoraSource, ServerConfig
from engine.interface.errors import StartupError
from engine.interface.fit_report import Ask, ModelReport
from engine.interface.protocol import FromEngine, ToEngine
from server.config.fit_check import ask_engine
from server.config.tokenizer_files import TOKENIZER_FILES

_ADAPTER_CONFIG = "adapter_config.json"
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 16  # of a file of weights: two models of one shape differ in each


class EngineFacts(msgspec.Struct, frozen=True):
    """What two daemons must have in common for requests to go on in the other one's engine.

    protocol, model, loras: hashes; model "": the files could not be read. problem: why requests cannot go on in another
    daemon's engine; "" if they can.
    """

    protocol: str = ""
    model: str = ""
    loras: list[str] = []
    problem: str = ""


class Form(NamedTuple):
    """The chosen form, and why in a few words."""

    is_instead: bool
    reason: str


def facts_of(engine: EngineConfig, server: ServerConfig) -> EngineFacts:
    """Return the facts of a daemon. Blocks: it reads the tokenizer and samples of the weights. Raises OSError."""
    problem = ""
    if engine.peer is not None:
        problem = "with --disaggregate there are several engines"
    elif not server.max_replays:
        problem = "with --max-replays 0 a request goes on in no other engine"
    return EngineFacts(
        protocol=protocol_digest(),
        model=_digest_model(Path(engine.model), is_dummy=engine.load_format == "dummy"),
        loras=[_digest_adapter(source) for source in engine.loras],
        problem=problem,
    )


@functools.cache
def protocol_digest() -> str:
    """Return a hash of the messages between HTTP workers and engine: names, types and defaults of all fields."""
    kinds: list[Any] = [*ToEngine.__args__, *FromEngine.__args__]
    schemas, components = msgspec.json.schema_components(kinds)
    return hashlib.sha256(msgspec.json.encode([list(schemas), components], order="sorted")).hexdigest()


def why_not_instead(running: EngineFacts | None, following: EngineFacts) -> str:
    """Return why requests of the running daemon cannot go on in the next one's engine, as a clause; "" if they can."""
    if running is None:
        return "it is of a version that keeps its engine to itself"
    if not running.model:
        return "its model's files could not be read"
    if running.problem or following.problem:
        return running.problem or following.problem
    if running.protocol != following.protocol:
        return "its HTTP workers and this version's engine speak different protocols"
    if running.model != following.model:
        return "it serves another model"
    if running.loras != following.loras[: len(running.loras)]:
        return "its adapters (--lora), by name and content, are not the first ones of this daemon"
    return ""


def choose_form(
    wanted: str, ask: Ask, *, running: EngineFacts | None, engine: EngineConfig, server: ServerConfig
) -> Form:
    """Choose the form by --takeover-form and by what the memory holds now. Blocks for seconds. Raises StartupError."""
    has_peers = engine.peer is not None
    if wanted == "beside" or (wanted == "auto" and has_peers):  # of --disaggregate each engine has its own device
        return Form(False, "asked for" if wanted == "beside" else "several engines")
    try:
        problem = why_not_instead(running, facts_of(engine, server))
    except OSError as error:
        raise StartupError(f"The model's files cannot be read: {error}.") from error
    if wanted == "instead":
        if problem:
            raise StartupError(f"--takeover-form instead: the running daemon's requests cannot go on here: {problem}.")
        _check(_examine(msgspec.structs.replace(ask, is_alone=True)))
        return Form(True, "asked for")
    report = _examine(ask)
    if report.room is not None and not report.problem:
        room = report.room
        if problem or room.kv_cache_alone is None or 2 * room.kv_cache >= room.kv_cache_alone:
            return Form(False, "memory holds both")
        return Form(True, "beside the running daemon the KV cache would be less than half as large")
    _check(_examine(msgspec.structs.replace(ask, is_alone=True)))
    if problem:
        raise StartupError(
            f"{report.problem} It cannot be loaded in the running daemon's place either: {problem}. Stop that daemon,"
            " and start without --takeover."
        )
    return Form(True, "memory does not hold both")


def _examine(ask: Ask) -> ModelReport:
    report = ask_engine(ask).model
    assert report is not None, "the question names a folder"
    return report


def _check(report: ModelReport) -> None:
    if report.problem:
        raise StartupError(report.problem)


def _digest_model(folder: Path, *, is_dummy: bool) -> str:
    """Return a hash of what gives tokens their meaning: configuration, tokenizer, samples of the weights."""
    digest = hashlib.sha256()
    for name in ("config.json", *TOKENIZER_FILES):
        path = folder / name
        digest.update(f"{name} {path.is_file()}".encode())
        if path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    if not is_dummy:
        _sample_weights(folder, digest)
    return digest.hexdigest()


def _digest_adapter(source: LoraSource) -> str:
    """Return a hash of an adapter: its name, configuration, samples of its weights. One may be trained in its place."""
    digest, folder = hashlib.sha256(f"{source.name}\n".encode()), Path(source.folder)
    digest.update((folder / _ADAPTER_CONFIG).read_bytes())
    _sample_weights(folder, digest)
    return digest.hexdigest()[:32]  # an offer holds those of some thousand


def _sample_weights(folder: Path, digest: "hashlib._Hash") -> None:
    """Add samples of a folder's files of weights."""
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(_NUM_SAMPLES + 1):
                file.seek(max(size - _SAMPLE_BYTES, 0) * i // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
