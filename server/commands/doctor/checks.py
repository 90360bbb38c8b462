"""Checks of `quire doctor` outside the engine: the model's files, compiler, disk, port, packages. Never torch.

find_model() turns MODEL into a folder with a configuration: a local folder, a cached one, or one for which
only the configuration is downloaded.
"""

import os
import platform
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.interface.config import LaunchConfig
from engine.interface.errors import StartupError
from server.config.hub_download import fetch, list_files
from server.config.model_source import check_folder, has_pickles, local_folder, what_else
from server.config.packages import check_packages
from server.config.tokenizer_files import TOKENIZER_FILES, check_names
from server.config.version import package_version
from server.launcher.listener import bind

# Of the model, and of what makes it an embedding model (server/text/embedding_model.py)
_CONFIG_FILES = ["config.json", "modules.json", "config_sentence_transformers.json", "[0-9]*/config.json"]


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """This machine without its GPUs. Sizes in bytes."""

    quire: str
    python: str
    system: str
    c_compiler: str | None  # which Triton calls for every kernel's launcher
    has_python_headers: bool  # which that needs
    cache: str  # folder of downloaded models
    cache_free: int
    address: str
    port_problem: str | None  # why the port cannot be listened on
    packages_problem: str | None  # why a package of ours is another one


def look_at_host(address: LaunchConfig) -> Host:
    """Check the machine. The port is bound for a moment."""
    cache = _hub_cache()
    return Host(
        quire=package_version(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        c_compiler=_c_compiler(),
        has_python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        cache=str(cache),
        cache_free=_free_bytes(cache),
        address=f"{address.host}:{address.port}",
        port_problem=_problem(lambda: _bind(address)),
        packages_problem=_problem(check_packages),
    )


class FoundModel(NamedTuple):
    """A model's name and the folder of its configuration."""

    folder: Path
    name: str
    origin: str  # for people
    is_hub: bool
    needs_download: bool
    revision: str | None = None


def find_model(model: str, *, revision: str | None, scratch: Path) -> FoundModel:
    """Find a model. Raises StartupError: exit code 2 for a wrong argument, 3 where nothing is found.

    scratch: a folder that takes the configuration files of a hub id which is not cached; weights are never fetched.
    """
    path = local_folder(model, revision=revision)
    if path is not None:
        if not (path / "config.json").is_file():
            raise StartupError(f"No config.json in {path}: {what_else(path)}")
        return FoundModel(path, path.name or "model", f"folder {path}", is_hub=False, needs_download=False)
    cached = _find_cached(model, revision)
    if cached is not None:
        is_whole = _problem(lambda: check_folder(cached)) is None
        origin = "Hugging Face cache" if is_whole else "Hugging Face cache, without all of its files"
        return FoundModel(cached, model, origin, is_hub=True, needs_download=not is_whole, revision=revision)
    folder = _fetch_config(model, revision, scratch)
    return FoundModel(
        folder,
        model,
        "Hugging Face hub, configuration files alone",
        is_hub=True,
        needs_download=True,
        revision=revision,
    )


def check_files(found: FoundModel) -> list[str]:
    """Return notes on missing files. Raises StartupError if serving would fail without them."""
    if found.is_hub:
        if not found.needs_download:
            return []
        files = list_files(found.name, found.revision, ["*"], ())
        if files is not None:  # else it cannot be told
            check_names(found.name, [file.filename for file in files])
        return ["Serving it downloads its weights first."]
    has_weights = any(found.folder.glob("*.safetensors")) or has_pickles(found.folder)
    if not has_weights and not any((found.folder / name).is_file() for name in TOKENIZER_FILES):
        return [f"{found.folder} has a configuration alone: it is judged by that, and serving needs the rest."]
    check_folder(found.folder)
    return []


def _c_compiler() -> str | None:
    """Return the compiler that Triton uses: CC, else gcc, else clang."""
    names = [name for name in (os.environ.get("CC"), "gcc", "clang") if name]
    return next((path for path in map(shutil.which, names) if path is not None), None)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _free_bytes(folder: Path) -> int:
    """Free bytes where a folder is, or would be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _bind(address: LaunchConfig) -> None:
    for listener in bind(address):
        listener.close()


def _problem(check: Callable[[], None]) -> str | None:
    """Return what a check says against this machine or folder."""
    try:
        check()
    except StartupError as error:
        return error.message
    return None


def _find_cached(repo_id: str, revision: str | None) -> Path | None:
    """Return the snapshot of a hub id in the local cache, if its configuration is there. Does no network I/O."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(repo_id, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):  # fetching the configuration reports what is wrong
        return None
    return folder if (folder / "config.json").is_file() else None


def _fetch_config(repo_id: str, revision: str | None, scratch: Path) -> Path:
    import huggingface_hub

    def download() -> str:  # not hf_hub_download, which offline tries for half a minute
        return huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=_CONFIG_FILES, cache_dir=scratch
        )

    folder = fetch(download, repo_id, revision=revision)
    if not (folder / "config.json").is_file():
        raise StartupError(f"{repo_id} has no config.json, so it is no model in Hugging Face layout.")
    return folder
