"""GPU tests give their memory back: several processes of them share one device."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """Free what torch caches once a test has ended, which other processes, and the engine's sizing, count as taken."""
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
