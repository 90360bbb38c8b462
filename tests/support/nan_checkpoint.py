"""Checkpoints in which one token's embedding is NaN: a request with that token has no finite logits, others have."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from server.config.model_source import DEMO_FOLDER

NAN_TOKEN = 300


def spoil_embedding(folder: Path, *, token_id: int = NAN_TOKEN) -> Path:
    """Replace the token's input embedding by NaN, in place; its row of the language-model head stays."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embeddings = tensors["model.embed_tokens.weight"]
    tensors.setdefault("lm_head.weight", embeddings.clone())
    embeddings[token_id] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


def spoiled_demo(folder: Path) -> Path:
    """Write the demo model with NaN for one token into an empty folder."""
    shutil.copytree(DEMO_FOLDER, folder, dirs_exist_ok=True)
    return spoil_embedding(folder)
