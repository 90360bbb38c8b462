"""The kernels in C for a module of tests, which is skipped where there are none. A process compiles them once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kernels.native import library
from kernels.native.library import Compilation, Library, loaded, products_level, unload


@contextmanager
def compiled_library(*, with_products: bool) -> Iterator[Library]:
    """Compile and load the library until the end. Skips without a C compiler, or without what products.c needs."""
    native = _compiled()
    native.products_level = native.use_products(library._ALL_PRODUCTS)  # as it is loaded, whatever another module chose
    library._loaded[:] = [native]
    try:
        if with_products and not products_level():
            pytest.skip("this CPU has no products in C")
        yield native
    finally:
        unload()


@functools.cache
def _compiled() -> Library:
    unload()
    compilation = Compilation.start()
    if compilation is None:
        pytest.skip("no C compiler on this machine")
    assert compilation.finish()
    native = loaded()
    assert native is not None
    return native
