"""Rows of the text parts of multimodal models, and the names of those that a model may have instead."""

from __future__ import annotations

import dataclasses

from models.architecture import Architecture

_MARK = " with the text part "  # between an architecture and the model_type of its text part


def text_part_of(architecture: Architecture, *others: Architecture) -> Architecture:
    """Return the row of a multimodal model with this text part, in the layout of transformers' save_pretrained.

    others: text parts that it may have instead.
    """
    return dataclasses.replace(
        architecture,
        text_config="text_config",
        other_text_parts=others,
        text_prefix="language_model",
        ignored_prefixes=("vision_tower.", "multi_modal_projector."),
    )


def with_text_part(whole: Architecture, model_type: str) -> Architecture:
    """Return the row of another text part where it lies in the checkpoints of the whole model."""
    (row,) = (part for part in whole.other_text_parts if part.model_type == model_type)
    return dataclasses.replace(
        row,
        text_config=whole.text_config,
        text_prefix=whole.text_prefix,
        body_prefix=whole.body_prefix,
        ignored_prefixes=whole.ignored_prefixes,
    )


def text_part_name(name: str, whole: Architecture, row: Architecture) -> str:
    """Return the name by which find_architecture finds another text part than the whole model's own, else `name`."""
    return name if row.model_type == whole.model_type else f"{name}{_MARK}{row.model_type}"


def split_text_part(name: str) -> tuple[str, str]:
    """Return the name of the whole model, and the model_type of its text part if text_part_name added one."""
    name, _, model_type = name.partition(_MARK)
    return name, model_type
