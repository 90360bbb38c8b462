"""EmbeddingModel: the pooling, prompts and normalisation of a sentence-transformers folder. Never torch.

modules.json names the steps (Transformer, Pooling and Normalize are supported), 1_Pooling/config.json the pooling
of the hidden states, config_sentence_transformers.json the prompts before a text. Imports engine.interface.
"""

from pathlib import Path
from typing import Any

import msgspec

from engine.interface.errors import StartupError
from engine.interface.protocol import PoolingKind
from server.text.generation_defaults import read_json

_MODULES_FILE, _PROMPTS_FILE = "modules.json", "config_sentence_transformers.json"
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")
_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_MODE = "pooling_mode"


class EmbeddingModel(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling and prompts of an embedding model. Its embeddings always have length 1."""

    pooling: PoolingKind
    prompts: dict[str, str] = {}  # by name: what goes before a text
    default_prompt: str = ""  # the same where none is asked for


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def load_embedding_model(folder: Path, *, pooling: str = "auto") -> EmbeddingModel | None:
    """Read a folder. None: a generating model without --pooling. Raises StartupError for unsupported modules.

    pooling: "last" or "mean" overrides the folder; "auto": the folder decides.
    """
    modules = _read_modules(folder / _MODULES_FILE)
    unserved = [module.kind for module in modules if module.kind not in _SERVED_MODULES]
    if unserved:
        raise StartupError(
            f"{folder / _MODULES_FILE} has a module of the kind {unserved[0]}; served are {', '.join(_SERVED_MODULES)}."
        )
    kind: PoolingKind | None = {"last": "last", "mean": "mean"}.get(pooling)  # type: ignore[assignment]
    if kind is None and modules:
        kind = _read_kind(folder, modules)
    if kind is None:
        _check_generates(folder)
        return None
    prompts = _read_prompts(folder / _PROMPTS_FILE)
    return EmbeddingModel(pooling=kind, prompts=prompts, default_prompt=_default_prompt(folder, prompts))


def _read_modules(path: Path) -> list[_Module]:
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except RecursionError as error:
        raise StartupError(f"{path} cannot be read: arrays or objects are nested too deeply.") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError(f"{path} cannot be read: {error}.") from error


def _read_kind(folder: Path, modules: list[_Module]) -> PoolingKind:
    paths = [module.path for module in modules if module.kind == "Pooling"]
    if len(paths) != 1 or Path(paths[0]).name != paths[0]:
        raise StartupError(
            f"{folder / _MODULES_FILE} needs one Pooling module in a folder of its own, found {paths}:"
            " use --pooling last or mean."
        )
    path = folder / paths[0] / "config.json"
    if not path.is_file():
        raise StartupError(f"No {path}, so how to pool is not known: use --pooling last or mean.")
    config = read_json(path)
    modes = _modes(config)
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise StartupError(
            f"{path} pools by {', '.join(modes) or 'nothing'}; served are lasttoken and mean_tokens, which"
            " --pooling last or mean chooses."
        )
    kind = _KINDS[modes[0]]
    if kind == "mean" and config.get("include_prompt") is False:
        raise StartupError(f"{path}: include_prompt false, a mean without the prompt's tokens, is not served.")
    return kind


def _modes(config: dict[str, Any]) -> list[str]:
    """Return the modes that are on, in the older form of one flag each or the newer one of a name or names."""
    named = config.get(_MODE)
    if named is not None:
        return [str(mode) for mode in named] if isinstance(named, list) else [str(named)]
    return [name.removeprefix(f"{_MODE}_") for name, on in config.items() if name.startswith(f"{_MODE}_") and on]


def _check_generates(folder: Path) -> None:
    names = read_json(folder / "config.json").get("architectures")
    if isinstance(names, list) and names and str(names[0]).endswith("Model"):
        raise StartupError(
            f"{folder} is a {names[0]}, which has no language-model head, and nothing in it says how its hidden states"
            " become embeddings: use --pooling last or mean."
        )


def _read_prompts(path: Path) -> dict[str, str]:
    prompts = read_json(path).get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise StartupError(f"{path}: prompts must be an object of texts.")
    return prompts


def _default_prompt(folder: Path, prompts: dict[str, str]) -> str:
    name = read_json(folder / _PROMPTS_FILE).get("default_prompt_name")
    if name is None:
        return ""
    if name not in prompts:
        raise StartupError(f"{folder / _PROMPTS_FILE}: default_prompt_name {name!r} is none of its prompts.")
    return prompts[name]
