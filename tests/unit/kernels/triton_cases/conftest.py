"""Mends Triton 3.6's interpreter for numpy 2.4 and NaN in fp8, spares it repeated work, and seeds each case."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*"]
else:
    import numpy as np
    import triton
    from triton.runtime import interpreter

    _patch_lang, _patch_lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    _convert_float = interpreter._convert_float
    _launches: list[_Launch] = []

    def _patch_with_index(tensor, scope):
        """numpy refuses int() of an array of one element."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    class _Launch(interpreter._LangPatchScope):
        """What a launch has patched, until it ends."""

        def __init__(self):
            super().__init__()
            self._languages = []

        def patch(self, fn):
            """Patch the modules of Triton that a function sees, which each call of a function would do again."""
            seen = [each for each in fn.__globals__.values() if each is triton.language or each is triton.language.core]
            if not all(language in self._languages for language in seen):
                self._changes += _patch_lang(fn)._changes
                self._languages += seen

        def restore(self):
            _launches.remove(self)
            super().restore()

    def _convert_float_and_nan(values, input_dtype, output_dtype, rounding_mode):
        """Triton's conversion makes a number of NaN, since e4m3 has no exponent for it."""
        converted = _convert_float(values, input_dtype, output_dtype, rounding_mode)
        if output_dtype == triton.language.float8e4nv and input_dtype == triton.language.float32:
            converted = np.where(np.isnan(values.view(np.float32)), 0x7F, converted).astype(converted.dtype)
        return converted

    def _patch_once(fn):
        if not _launches:
            _launches.append(_Launch())
            _launches[0].patch(fn)
            return _launches[0]
        _launches[0].patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang_tensor = _patch_with_index
    interpreter._patch_lang = _patch_once
    interpreter._convert_float = _convert_float_and_nan


def pytest_itemcollected(item):
    """What is interpreted is slow, so make test runs one row of each table."""
    item.add_marker(pytest.mark.table(most=1))


@pytest.fixture(autouse=True)
def _seed():
    """The same numbers for a case whatever ran before it."""
    import torch

    torch.manual_seed(0)
