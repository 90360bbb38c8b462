"""Resolves the MODEL argument to a local folder that can be served.

check_folder() checks that the files which engine and tokenizer read exist, so that a wrong folder is one sentence
at once and not a loader's exception half a minute later. The loader checks the files' contents. Imports
engine.interface.errors and server.config.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from engine.interface.child_process import PROJECT_ROOT
from engine.interface.errors import StartupError
from server.config.hub_download import Check, download
from server.config.known_words import about_model
from server.config.tokenizer_files import check_names
from server.config.value_types import UsageError

DEMO_NAME = "quire-demo"
DEMO_FOLDER = PROJECT_ROOT / "models" / "demo" / "checkpoint"
_DEMO_NOTE = "a tiny model to try the server with: knows Quire, capitals, small sums; often wrong, not for real work"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class ResolvedModel(NamedTuple):
    """A local folder in Hugging Face layout, and the name clients ask for."""

    folder: Path
    name: str


def resolve_model(
    model: str | None, *, revision: str | None = None, load_format: str = "auto", check: Check | None = None
) -> ResolvedModel:
    """Return the folder behind `model`: a folder, a hub id (downloaded now), or None for the built-in demo.

    check: as in download().
    Raises StartupError: exit code 2 when the argument itself is wrong, 3 when what it names cannot be served.
    """
    if model is None:
        resolved = ResolvedModel(DEMO_FOLDER, DEMO_NAME)
    else:
        folder = local_folder(model, revision=revision)
        if folder is not None:
            resolved = ResolvedModel(folder, folder.name or "model")
        else:
            resolved = ResolvedModel(download(model, revision, check=check, load_format=load_format), model)
    check_folder(resolved.folder, load_format=load_format)
    return resolved


def model_facts(folder: str) -> dict[str, str]:
    """Return rows for the closing panel: a note on the demo model's limits, none for other models."""
    return {"Note": _DEMO_NOTE} if Path(folder) == DEMO_FOLDER else {}


def check_folder(folder: Path, *, load_format: str = "auto") -> None:
    """Raise StartupError if config, weights or tokenizer are missing from a model folder."""
    _read_json(folder / "config.json", what_else(folder))
    if load_format != "dummy":
        _check_weights(folder)
    check_names(folder, [path.name for path in folder.iterdir() if path.is_file()])


def local_folder(model: str, *, revision: str | None) -> Path | None:
    """Return the folder that `model` is, None if it is a hub id. Raises StartupError (exit code 2) if it is neither."""
    try:
        path = Path(model).expanduser()
        is_there, is_folder = bool(model) and path.exists(), path.is_dir()
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"MODEL {model[:200]!r}: {error}.") from error
    if not is_there and (known := about_model(model)) is not None:
        raise UsageError(f"MODEL {model[:200]!r}: {known}.")
    if is_there and model.lower().endswith(".gguf"):
        raise UsageError(f"MODEL {model}: {about_model(model)}.")
    if is_there and not is_folder:
        raise UsageError(f"MODEL {model} is a file, but a folder in Hugging Face layout is needed.")
    if is_there and revision is not None:
        raise UsageError(f"--revision {revision}: {model} is a local folder, which has none.")
    if not is_there and not _HUB_ID.fullmatch(model):
        raise UsageError(f"MODEL {model!r} is no folder here, and no hub id either (those have the form owner/name).")
    return path if is_there else None


def what_else(folder: Path) -> str:
    """Return what a folder without config.json is, as far as its files tell."""
    if (folder / "model_index.json").is_file():
        return "it is a diffusion model, which makes pictures; text models are served."
    if (folder / "adapter_config.json").is_file():
        return f"it is an adapter: quire serve BASE_MODEL --lora NAME={folder}."
    if any(folder.glob("*.gguf")):
        return "it has GGUF files, llama.cpp's format; take the model's own folder with safetensors."
    if (folder / "params.json").is_file():
        return "it has its publisher's own format; take the repository in Hugging Face layout."
    if (folder / "snapshots").is_dir() and folder.name.startswith("models--"):
        return f"it is a folder of the cache: quire serve {folder.name.removeprefix('models--').replace('--', '/', 1)}."
    return "is this a model folder in Hugging Face layout?"


def _check_weights(folder: Path) -> None:
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path, "").get("weight_map")
        if not isinstance(weight_map, dict):
            raise StartupError(f"{index_path} has no weight_map.")
        shards = sorted({str(shard) for shard in weight_map.values()})
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise StartupError(
                f"{len(missing)} of {len(shards)} weight files named by {index_path.name} are missing from {folder}, "
                f"first {missing[0]}."
            )
    elif not any(folder.glob("*.safetensors")):
        raise StartupError(f"No weights in {folder}: it has no *.safetensors file, {_way_out(folder)}")


def has_pickles(folder: Path) -> bool:
    """Return True if the folder has pickled weights, which are never read because reading them runs code."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _PICKLES)


def _way_out(folder: Path) -> str:
    if not has_pickles(folder):
        return "and no other format (*.bin, *.pt, *.gguf) is read."
    code = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(folder)!r}, dtype='auto')"
    return (
        "and pickled weights (*.bin, *.pt) are never read, since that runs what code they hold. "
        f'If you trust them, python -c "{code}.save_pretrained({str(folder)!r})" converts them.'
    )


def _read_json(path: Path, hint: str) -> dict[str, object]:
    if not path.is_file():
        raise StartupError(f"No {path.name} in {path.parent}{': ' + hint if hint else '.'}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise StartupError(f"{path} cannot be read: arrays or objects are nested too deeply.") from error
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object.")
    return value
