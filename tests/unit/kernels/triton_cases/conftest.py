"""Mends Triton 3.6's interpreter for numpy 2.4 and NaN in fp8, spares it repeated work, and seeds each case.

Most of its time goes to types: each operation makes its result's anew, with a shape whose every part has a type itself.
Shapes are few, so they are made once, and types of tuples when somebody asks. Each sum and product of integers is also
computed in 64 bits, to assert in a debug run alone that it does not overflow.
"""

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
    _convert_float, _get_np_dtype = interpreter._convert_float, interpreter._get_np_dtype
    core = triton.language.core
    semantic = triton.language.semantic.TritonSemantic
    _equals, _unwrap, _check_overflow = (
        core.dtype.__eq__,
        core._unwrap_if_constexpr,
        semantic.binary_op_sanitize_overflow_impl,
    )
    _integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    _np_dtypes: dict[str, np.dtype] = {}
    _init_block_type, _init_tensor = core.block_type.__init__, core.tensor.__init__
    _block_shapes: dict[tuple[int, ...], tuple[core.tuple, int, str]] = {}
    _tensor_shapes: dict[tuple[int, ...], tuple[core.constexpr, core.tuple]] = {}
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

    def _make_block_type(self, element_ty, shape):
        """What block_type.__init__ does, with the shape of the first type that had it."""
        values = shape.values if isinstance(shape, core.tuple) else shape
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in values)
        if sizes not in _block_shapes:
            _init_block_type(self, element_ty, shape)
            _block_shapes[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, said = _block_shapes[sizes]
        self.name = f"<{said}, {element_ty}>"

    def _make_tensor(self, handle, ty):
        """What tensor.__init__ does, with the shape of the first tensor that had it."""
        sizes = tuple(ty.shape.values) if ty.is_block() else ()
        if sizes not in _tensor_shapes:
            _init_tensor(self, handle, ty)
            _tensor_shapes[sizes] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, ty, ty.scalar
        self.numel, self.shape = _tensor_shapes[sizes]

    def _make_tuple(self, args, ty=None):
        self.values, self._type = list(args), ty

    def _type_of_tuple(self):
        if self._type is None:
            self._type = core._type_for_tuple_values(self.values)
        elif not isinstance(self._type, core.tuple_type):
            self._type = core.tuple_type(self._type)
        return self._type

    def _np_dtype_of(tt_dtype):
        """What _get_np_dtype does, with a table that is made once for each type of numbers."""
        scalar = tt_dtype.element_ty if isinstance(tt_dtype, core.block_type) else tt_dtype
        if scalar.name not in _np_dtypes:
            _np_dtypes[scalar.name] = _get_np_dtype(scalar)
        return _np_dtypes[scalar.name]

    def _is_equal(self, other):
        return self is other or _equals(self, other)

    def _unwrap_quickly(o):
        """What _unwrap_if_constexpr does; first the cases of which there are millions."""
        kind = type(o)
        if kind is core.constexpr:
            return o.value
        return o if kind is core.tensor or kind is core.dtype or kind is int else _unwrap(o)

    def _check_overflow_of_debug_run(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            _check_overflow(self, lhs, rhs, binary_op)

    core.block_type.__init__ = _make_block_type
    core.dtype.__eq__ = _is_equal
    core.dtype.is_int = lambda self: self.name in _integers
    core._unwrap_if_constexpr = _unwrap_quickly
    semantic.binary_op_sanitize_overflow_impl = _check_overflow_of_debug_run
    core.tensor.__init__ = _make_tensor
    core.tuple.__init__ = _make_tuple
    core.tuple.type = property(_type_of_tuple)
    interpreter._patch_lang_tensor = _patch_with_index
    interpreter._patch_lang = _patch_once
    interpreter._convert_float = _convert_float_and_nan
    interpreter._get_np_dtype = _np_dtype_of


def pytest_itemcollected(item):
    """What is interpreted is slow, so make test runs one row of each table."""
    item.add_marker(pytest.mark.table(most=1))


@pytest.fixture(autouse=True)
def _seed():
    """The same numbers for a case whatever ran before it."""
    import torch

    torch.manual_seed(0)
