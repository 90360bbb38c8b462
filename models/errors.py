"""ModelError: the model folder is missing, broken or unsupported; parse_json() raises it."""

from __future__ import annotations

import json
from typing import Any


class ModelError(ValueError):
    """A model cannot be served: one sentence that names the folder, file, field or tensor, and the value found."""


def parse_json(data: bytes, *, where: str) -> Any:
    """Return the value of a JSON file. where: names it in errors. Raises ModelError."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ModelError(f"{where}: malformed JSON: arrays or objects are nested too deeply") from error
    except ValueError as error:
        raise ModelError(f"{where}: malformed JSON: {error}") from error
