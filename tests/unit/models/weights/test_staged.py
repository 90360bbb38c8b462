"""Weights that threads copy through buffers are the stored ones, and a file that is too short is an error."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.errors import ModelError
from models.weights import checkpoint
from models.weights.checkpoint import SafetensorsReader, TensorSlice
from models.weights.staged import StagedCopies
from tests.support.models_harness import CPU

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32)


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, torch.Tensor]:
    tensors = {f"model.{dtype}": torch.randn(7, 3, 5).mul(40).to(dtype) for dtype in DTYPES}
    tensors["model.long"] = torch.randn(900, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


@pytest.fixture
def reader(tmp_path: Path, stored: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> SafetensorsReader:
    monkeypatch.setattr(checkpoint, "_LEAST_STAGED_BYTES", 1)
    reader = SafetensorsReader(tmp_path, device=CPU, dtype=torch.float32)
    reader._staged = StagedCopies(CPU, num_threads=3, chunk_bytes=52)  # ends within a row
    return reader


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 0, 7), (0, 2, 5), (1, 0, 3), (1, 1, 2), (2, 4, 5)])
def test_staged_parts_are_the_stored_ones(
    reader: SafetensorsReader, stored: dict[str, torch.Tensor], dim: int, start: int, stop: int
) -> None:
    for dtype in DTYPES:
        name = f"model.{dtype}"
        part = reader.read(TensorSlice(name, (7, 3, 5), dim, start, stop, (dtype,)))
        expected = stored[name].narrow(dim, start, stop - start)
        assert part.dtype == dtype
        assert torch.equal(part.view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_more_chunks_than_buffers_are_read_and_cast(reader: SafetensorsReader, stored: dict[str, torch.Tensor]) -> None:
    assert torch.equal(reader.read(TensorSlice("model.long", (900, 2), 0, 0, 900)), stored["model.long"])
    name = f"model.{torch.bfloat16}"
    assert torch.equal(reader.read(TensorSlice(name, (7, 3, 5), 0, 1, 7)), stored[name][1:].float())
    reader.finish(has_tied_embeddings=False, ignored_prefixes=("model.",))


def test_a_file_that_has_become_shorter_is_an_error(reader: SafetensorsReader, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    copy = tmp_path / "short"
    copy.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OSError, match="it ends 100 bytes too early"):
        StagedCopies(CPU).read(copy, first=path.stat().st_size - 200, shape=(200,), dtype=torch.uint8)
    path.write_bytes(path.read_bytes()[:-7500])
    with pytest.raises(ModelError, match=r"tensor model.long cannot be read: it ends \d+ bytes too early"):
        reader.read(TensorSlice("model.long", (900, 2), 0, 0, 900))
