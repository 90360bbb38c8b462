"""The adapters of --lora: NAME=FOLDER on the command line, a model name for clients. Never torch.

Whether a folder has an adapter that fits the model is the engine's to say, which reads it. Imports
engine.interface.config when it is needed, so that `quire --help` is instant.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.interface.errors import StartupError
from server.config.value_types import limited

if TYPE_CHECKING:
    from engine.interface.config import LoraSource

_EXIT_USAGE = 2


@limited("NAME=FOLDER")
def named_folder(text: str) -> tuple[str, str]:
    """Parse NAME=FOLDER. Raises argparse.ArgumentTypeError, to which argparse adds the flag's name."""
    name, _, folder = (part.strip() for part in text.partition("="))
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER, such as sql=./sql-adapter")
    return name, folder


def resolve_loras(loras: Sequence[tuple[str, str]], *, served_model_names: Sequence[str]) -> "list[LoraSource]":
    """Return the adapters, given as name and folder, with absolute folders.

    Raises StartupError for a name that is taken, and where there is no folder.
    """
    from engine.interface.config import LoraSource

    resolved: list[LoraSource] = []
    for name, folder in loras:
        if name in served_model_names:
            raise StartupError(f"--lora {name}: this is the name of the model itself.", exit_code=_EXIT_USAGE)
        if name in (other.name for other in resolved):
            raise StartupError(f"--lora {name} is given twice; each needs a name.", exit_code=_EXIT_USAGE)
        try:
            path = Path(folder).expanduser()
            is_folder, is_file = path.is_dir(), path.is_file()
        except (OSError, RuntimeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StartupError(f"--lora {name}: {folder[:200]!r}: {reason}.", exit_code=_EXIT_USAGE) from error
        if not is_folder:
            what = "is a file, not a folder" if is_file else "does not exist"
            raise StartupError(f"--lora {name}: {folder[:200]} {what}.", exit_code=_EXIT_USAGE)
        resolved.append(LoraSource(name, str(path.resolve())))
    return resolved
