"""The kernels in C for a module of tests, which is skipped where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kernels.native.library import Compilation, Library, loaded, products_level, unload


@contextmanager
def compiled_library(*, with_products: bool) -> Iterator[Library]:
    """Compile and load the library until the end. Skips without a C compiler, or without what products.c needs."""
    compilation = Compilation.start()
    if compilation is None:
        pytest.skip("no C compiler on this machine")
    assert compilation.finish()
    library = loaded()
    assert library is not None
    try:
        if with_products and not products_level():
            pytest.skip("this CPU has no products in C")
        yield library
    finally:
        unload()
