"""Lets Triton 3.6's interpreter read a scalar under numpy 2.4: int() of an array of one element. Seeds each case."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*"]
else:
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope):
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index


@pytest.fixture(autouse=True)
def _seed():
    """The same numbers for a case whatever ran before it."""
    import torch

    torch.manual_seed(0)
