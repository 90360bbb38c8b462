"""ModelError: the model folder is missing, broken or unsupported."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be served: one sentence that names the folder, file, field or tensor, and the value found."""
