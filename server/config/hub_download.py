"""download(): a hub repository as a folder in the local cache, checked before its weights are fetched. Never torch.

    files of the revision and their sizes → configuration, index, tokenizer → checks → free space → weights, with a bar
What is refused costs no gigabytes. A download that was cut off goes on where it ended, at the next start. Without a
connection the cache alone is asked. Imports huggingface_hub when called, engine.interface and server.config.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from engine.interface.errors import StartupError, first_line, sentence
from engine.interface.units import format_size
from server.config.tokenizer_files import check_tokenizer
from server.config.value_types import UsageError

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

_WEIGHTS = "*.safetensors"
HUB_FILES = [_WEIGHTS, "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt"]
# Other formats of the same weights; 1_Pooling/config.json is none of them
HUB_SKIPPED = ["[!0-9]*/*", "[0-9]*/*.safetensors", "consolidated*"]
_RESERVE_BYTES = 256 * 1024**2  # that a download leaves free on the disk
_OTHER_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".onnx", ".ckpt")
Check = Callable[[Path], None]


def download(repo_id: str, revision: str | None, *, check: Check | None, load_format: str = "auto") -> Path:
    """Return the folder of a hub repository, after a download of what is missing. Blocks. Raises StartupError.

    check: called with the folder before its weights are fetched, if any are missing; raises StartupError.
    load_format: dummy fetches no weights.
    """
    import huggingface_hub

    def snapshot(patterns: Sequence[str], skipped: Sequence[str]) -> Path:
        def fetch_files() -> str:
            return huggingface_hub.snapshot_download(
                repo_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(skipped)
            )

        return fetch(fetch_files, repo_id, revision=revision)

    files = list_files(repo_id, revision, HUB_FILES, HUB_SKIPPED)
    if files is None:
        return snapshot(HUB_FILES, HUB_SKIPPED)
    if load_format == "dummy":
        return snapshot(HUB_FILES, [*HUB_SKIPPED, _WEIGHTS])
    if not any(fnmatch(file.filename, _WEIGHTS) for file in files):
        raise StartupError(_no_weights(repo_id, revision))
    weights = [file for file in files if file.will_download and fnmatch(file.filename, _WEIGHTS)]
    if not weights:
        return snapshot(HUB_FILES, HUB_SKIPPED)
    folder = snapshot(HUB_FILES, [*HUB_SKIPPED, _WEIGHTS])
    if not (folder / "config.json").is_file():
        raise StartupError(f"{repo_id} has no config.json, so it is no model in Hugging Face layout.")
    if check is not None:
        _checked(repo_id, folder, check)
    _checked(repo_id, folder, check_tokenizer)
    num_bytes = sum(file.file_size or 0 for file in weights)
    _check_disk(repo_id, folder, num_bytes)
    print(f"Downloading {repo_id}: {format_size(num_bytes)} of weights to {folder}", file=sys.stderr)
    return snapshot(HUB_FILES, HUB_SKIPPED)


def fetch(download: Callable[[], str], repo_id: str, *, revision: str | None) -> Path:
    """Run a download from the hub and return its folder. Raises StartupError with one sentence on any failure."""
    from huggingface_hub import errors, utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    where = f"{repo_id}" + (f" at revision {revision}" if revision else "")
    try:
        return Path(download())
    except errors.GatedRepoError as error:
        raise StartupError(
            f"{where} is gated: accept its licence on huggingface.co and log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(f"{where} is neither a local folder nor a repository on the Hugging Face hub.") from error
    except errors.RevisionNotFoundError as error:
        raise StartupError(f"{repo_id} has no revision {revision}.") from error
    except errors.HFValidationError as error:
        raise UsageError(f"MODEL {repo_id}: not a valid hub id: {sentence(_first_line(error))}") from error
    except errors.LocalEntryNotFoundError as error:
        raise StartupError(
            f"{where} is no local folder, is not in the local cache, and the Hugging Face hub cannot be reached; "
            "give a folder, or try again online."
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise StartupError(
            f"Download of {where} failed: {sentence(_first_line(error))} What has arrived is kept: start again."
        ) from error


def list_files(
    repo_id: str, revision: str | None, patterns: Sequence[str], skipped: Sequence[str]
) -> "list[DryRunFileInfo] | None":
    """Return the files that a download would have; None where it could not begin, and says why itself."""
    import huggingface_hub
    from huggingface_hub import errors, utils

    has_bars = not utils.are_progress_bars_disabled()
    utils.disable_progress_bars()  # it takes no time to watch
    try:
        return huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(skipped), dry_run=True
        )
    except (errors.DryRunError, errors.HfHubHTTPError, errors.HFValidationError, OSError):
        return None
    finally:
        if has_bars:
            utils.enable_progress_bars()


def _no_weights(repo_id: str, revision: str | None) -> str:
    """Return the sentence for a repository without weights that are read, whatever else it has."""
    others = list_files(repo_id, revision, [f"*{suffix}" for suffix in _OTHER_WEIGHTS], ()) or []
    suffixes = sorted({Path(file.filename).suffix for file in others})
    held = f"only {', '.join(f'*{suffix}' for suffix in suffixes)}" if suffixes else "no weights"
    hint = " GGUF is llama.cpp's format: give the model's own repository." if ".gguf" in suffixes else ""
    return f"{repo_id} has {held}, and *.safetensors files alone are read; nothing was downloaded.{hint}"


def _checked(repo_id: str, folder: Path, check: Check) -> None:
    try:
        check(folder)
    except StartupError as error:
        raise StartupError(
            f"{repo_id} was not downloaded: {error.message[:1].lower() + error.message[1:]}"
            if error.message.startswith(("A ", "Architecture ", "This ", "The "))
            else f"{repo_id} was not downloaded. {error.message}",
            exit_code=error.exit_code,
        ) from error


def _check_disk(repo_id: str, folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes + _RESERVE_BYTES > free:
        raise StartupError(
            f"{repo_id} was not downloaded: its weights take {format_size(num_bytes)}, and {folder} is on a disk with "
            f"{format_size(free)} free; HF_HOME names another place."
        )


def _first_line(error: Exception) -> str:
    return first_line(error) or type(error).__name__
