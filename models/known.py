"""instead_of(): the nearest served model for an architecture that is not served. Imports the standard library.

models/known_models.json has the models that people search for, served or not (tests/known_models.py makes it).
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path

_TABLE = Path(__file__).parent / "known_models.json"
_NEAR = 0.8  # of difflib's ratio: a wrong suggestion is worse than none
_SAME_START = 3  # letters that two names of one family have in common
_PARTS = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "Model")


def instead_of(architecture: str) -> str:
    """Return the end of a sentence on an unserved architecture: why, and the nearest model; "" if none is near."""
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    for entry in table["unserved"]:
        if architecture and entry["architecture"] == architecture:
            nearest = f"; the nearest served model is {entry['instead']}" if entry["instead"] else ""
            return f" ({entry['why']}){nearest}"
    stem = _stem(architecture)
    by_stem: dict[str, str] = {}
    for entry in table["served"]:
        by_stem.setdefault(_stem(entry["architecture"]), entry["model"])
    family = [name for name in by_stem if name[:_SAME_START] == stem[:_SAME_START]]
    found = difflib.get_close_matches(stem, family, n=1, cutoff=_NEAR)
    return f"; the nearest served model is {by_stem[found[0]]}" if found else ""


def _stem(architecture: str) -> str:
    for part in _PARTS:
        architecture = architecture.removesuffix(part)
    return architecture.lower().replace("_", "")
