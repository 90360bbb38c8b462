"""Experts arranged in planes are the same numbers."""

import dataclasses

import pytest
import torch

from kernels.moe.planes import (
    PlanesMatrix,
    fp8_planes_bytes,
    int_planes_bytes,
    lut4_planes_bytes,
    mxfp4_planes_bytes,
    nvfp4_planes_bytes,
    takes_planes,
    to_planes,
)
from kernels.moe.storage import ExpertMatrix, Fp8Matrix, Mxfp4Matrix, dense_matrix
from kernels.moe.storage_int import IntMatrix
from kernels.moe.storage_lut4 import Lut4Matrix
from kernels.moe.storage_nvfp4 import Nvfp4Matrix
from tests.unit.kernels.triton_cases.int_experts_problem import Integers, random_integers


def _mxfp4(k: int) -> Mxfp4Matrix:
    blocks = torch.randint(0, 256, (3, 10, k // 2), dtype=torch.uint8)
    return Mxfp4Matrix(blocks, torch.randint(0, 129, (3, 10, k // 32), dtype=torch.uint8))


def _nvfp4(k: int) -> Nvfp4Matrix:
    blocks = torch.randint(0, 256, (3, 10, k // 2), dtype=torch.uint8)
    scales = torch.arange(3 * 10 * k // 16).remainder(127).to(torch.uint8).view(3, 10, k // 16)
    return Nvfp4Matrix(blocks, scales.view(torch.float8_e4m3fn), torch.rand(3, 2) + 0.5)


def _nf4(k: int) -> Lut4Matrix:
    packed = torch.randint(0, 256, (3, 10, k // 2), dtype=torch.uint8)
    return Lut4Matrix(packed, torch.rand(3, 10, k // 64), "nf4")


def _fp8(k: int, rows: int, columns: int) -> Fp8Matrix:
    codes = torch.randint(0, 256, (3, 10, k), dtype=torch.uint8)
    codes = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)
    return Fp8Matrix(codes, torch.rand(3, 2, -(-5 // rows), -(-k // columns)), rows, columns)


def _integers(k: int, group_size: int, *, has_zeros: bool = True, bits: int = 4) -> IntMatrix:
    kind = Integers(bits, group_size, has_zeros, torch.float16 if has_zeros else torch.bfloat16)
    return random_integers(3, 10, k, kind, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "matrix",
    [
        *(_mxfp4(128), _mxfp4(288), _nvfp4(256), _nvfp4(144), _nvfp4(16), _nf4(256), _nf4(192), _nf4(64)),
        *(_fp8(256, 4, 128), _fp8(200, 4, 128), _fp8(40, 1, 40)),
    ],
)
def test_planes_have_the_codes_and_scales_of_their_matrix(matrix: ExpertMatrix) -> None:
    planes = to_planes(matrix)
    assert isinstance(planes, PlanesMatrix)
    assert planes.shape == matrix.shape
    for expert in range(3):
        assert torch.equal(planes.dense(expert, torch.float32), dense_matrix(matrix, expert, torch.float32))


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("k", "group_size"),
    [(384, 128), (512, 256), (128, 64), (192, 64), (288, 32), (96, 32), (32, 32), (256, -1), (77, -1), (202, -1)],
)
def test_planes_have_the_integers_zero_points_and_scales_of_their_matrix(k, group_size, has_zeros):
    matrix = _integers(k, group_size, has_zeros=has_zeros)
    planes = to_planes(matrix)
    assert isinstance(planes, PlanesMatrix)
    assert planes.shape == matrix.shape
    for expert in range(3):
        unpacked = planes.unpack(expert)
        assert isinstance(unpacked, IntMatrix)
        assert torch.equal(unpacked.words[0], matrix.words[expert])
        assert torch.equal(unpacked.groups[0], matrix.groups[expert])
        assert torch.equal(planes.dense(expert, torch.float32), matrix.dense(expert, torch.float32))


def test_integers_in_planes_take_the_bytes_of_their_matrix():
    for has_zeros in (False, True):
        for group_size in (32, 64, 128, -1):
            matrix = _integers(512, group_size, has_zeros=has_zeros)
            planes = to_planes(matrix)
            assert isinstance(planes, PlanesMatrix)
            assert planes.words.nbytes == matrix.words.nbytes
            assert planes.scales.nbytes == matrix.groups.nbytes


@pytest.mark.parametrize("k", [32, 96, 128, 288, 640])
def test_bytes_of_planes_are_those_of_their_tensors(k: int) -> None:
    found = [(to_planes(_mxfp4(k)), mxfp4_planes_bytes(10, k)), (to_planes(_nvfp4(k)), nvfp4_planes_bytes(10, k))]
    if k % 64 == 0:
        found.append((to_planes(_nf4(k)), lut4_planes_bytes(10, k)))
    for rows, columns in ((4, 128), (1, k), (4, 64)):
        halves = [fp8_planes_bytes(5, k, rows=rows, columns=columns) for _ in range(2)]
        found.append((to_planes(_fp8(k, rows, columns)), None if None in halves else sum(halves)))
    for has_zeros in (False, True):
        for group_size, bits in ((32, 4), (16, 4), (64, 4), (-1, 4), (32, 8)):
            if k % group_size != 0:
                continue
            matrix = _integers(k, group_size, has_zeros=has_zeros, bits=bits)
            size = int_planes_bytes(10, k, bits=bits, num_groups=matrix.num_groups, has_zeros=has_zeros)
            found.append((to_planes(matrix), size))
    for matrix, size in found:
        if size is None:
            assert not isinstance(matrix, PlanesMatrix)
        else:
            assert isinstance(matrix, PlanesMatrix)
            factors = 0 if matrix.factors is None else matrix.factors.nbytes
            assert matrix.words.nbytes + matrix.scales.nbytes + factors == 3 * size


def test_planes_are_for_bfloat16_and_of_integers_for_float16_on_hopper(monkeypatch) -> None:
    gpu, found = torch.device("cuda", 0), {}
    for is_here, capability in ((False, None), (True, (9, 0)), (True, (8, 0)), (True, (10, 0))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_here=is_here: is_here)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, version=capability: version)
        found[capability] = takes_planes(torch.bfloat16, gpu, is_integer=False)
        assert takes_planes(torch.float16, gpu, is_integer=True) == found[capability]
        assert not takes_planes(torch.float16, gpu, is_integer=False)
        assert not takes_planes(torch.float32, gpu, is_integer=True)
        assert not takes_planes(torch.bfloat16, torch.device("cpu"), is_integer=True)
    # a GPU of a plan, which this process lacks, may be one
    assert found == {None: True, (9, 0): True, (8, 0): False, (10, 0): False}


def test_what_planes_cannot_hold_stays_as_it_is() -> None:
    dense = torch.zeros(2, 4, 128)
    assert to_planes(dense) is dense
    large = _mxfp4(128)
    large.scales[1, 3, 2] = 129
    assert to_planes(large) is large
    no_numbers = _nvfp4(128)
    no_numbers.scales.view(torch.uint8)[1, 3, 2] = 127
    assert to_planes(no_numbers) is no_numbers
    small_blocks = _fp8(256, 4, 64)
    assert to_planes(small_blocks) is small_blocks
    for integers in (_integers(256, 128, bits=8), _integers(192, 96), _integers(144, 24), _integers(32, 16)):
        assert to_planes(integers) is integers
    undefined = _fp8(128, 4, 128)
    codes = undefined.values.view(torch.uint8).clone()
    codes[2, 1, 7] = 255
    undefined = dataclasses.replace(undefined, values=codes.view(torch.float8_e4m3fn))
    assert to_planes(undefined) is undefined
