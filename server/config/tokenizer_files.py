"""check_tokenizer(): whether a folder has a tokenizer that can be read, before gigabytes of weights are fetched for it.

Imports server.text when called, and engine.interface. Never torch.
"""

from collections.abc import Collection
from pathlib import Path

from engine.interface.errors import StartupError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_OF_ITS_CODE = "tiktoken.model"


def check_names(place: Path | str, names: Collection[str]) -> None:
    """Raise StartupError if none of the files that `place`, a folder or a hub id, has is a tokenizer. names: theirs."""
    if any(name in names for name in TOKENIZER_FILES):
        return
    missing = "tokenizer.json (or tokenizer.model) is missing"
    if _OF_ITS_CODE in names:
        missing += f", and its {_OF_ITS_CODE} is for the model's own code, which is never run"
    raise StartupError(f"No tokenizer in {place}: {missing}.")


def check_tokenizer(folder: Path) -> None:
    """Raise StartupError if a folder has no tokenizer, or one that cannot be loaded. Takes a second or some."""
    from server.text.tokenizer import load_tokenizer

    check_names(folder, [path.name for path in folder.iterdir()])
    load_tokenizer(folder)
