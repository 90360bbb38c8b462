"""The files by which sentence-transformers makes an embedding model of a folder. Imports no transformers."""

import json
from pathlib import Path

PROMPTS = {"query": "Instruct: Find what answers the question\nQuery:", "document": ""}


def write_embedding_files(
    folder: Path,
    *,
    pooling: str = "lasttoken",
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
) -> None:
    """Add modules.json, 1_Pooling/config.json and config_sentence_transformers.json, as Qwen3-Embedding has them."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(kinds)
    ]
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    flags = {f"pooling_mode_{mode}": mode == pooling for mode in modes}
    config = {"word_embedding_dimension": 64, **flags, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    wanted = {"prompts": PROMPTS if prompts is None else prompts, "default_prompt_name": default_prompt}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(wanted))
