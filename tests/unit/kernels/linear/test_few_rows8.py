"""Few rows of 8 bits on Hopper: tiles, shares of programs, and which products have which kernel."""

from __future__ import annotations

import types
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.linear import eight_bits
from kernels.linear.eight_bits import Fp8BlockLinear, Int8Linear
from kernels.linear.few_rows_configs import (
    MAX_ROWS,
    MAX_ROWS_BY_BLOCK,
    FewRowsConfig,
    Row8Config,
    begins_early,
    few_rows_config,
    row8_config,
)
from kernels.linear.reference import FP8
from kernels.linear.rounding import RoundedRows
from kernels.linear.splits import SCRATCH_SUMS, SCRATCH_TILES, SplitKScratch
from tests.support.compiled_kernels import HOPPER_SHARED_BYTES

SIZES = [(n, k) for n in (16, 1000, 4096, 6144, 10240, 28672, 151936) for k in (16, 256, 1088, 4096, 28672)]
NUM_SMS = [114, 132]  # of an H100 with PCIe, and the others


def _configs(num_rows):
    for by_block in (False, True):
        if num_rows <= (MAX_ROWS_BY_BLOCK if by_block else MAX_ROWS):
            for n, k in SIZES:
                for num_sms in NUM_SMS:
                    shape = {"n": n, "k": k, "by_block": by_block, "num_sms": num_sms}
                    yield shape, few_rows_config(num_rows=num_rows, **shape)


def test_rows_up_to_a_power_of_two_have_one_kernel():
    for num_rows in range(1, MAX_ROWS + 1):
        most = max(8, 1 << (num_rows - 1).bit_length())
        for shape, config in _configs(num_rows):
            assert config == few_rows_config(num_rows=most, **shape)


def test_tiles_fit_the_device_and_the_warps():
    for num_rows in range(1, MAX_ROWS + 1):
        m_pad = max(8, 1 << (num_rows - 1).bit_length())
        for shape, config in _configs(num_rows):
            box = 128 * (config.block_n + m_pad)
            barriers = 8 * (2 * config.num_stages + 1)
            exchanged = 17 * 1024  # in which the compiler exchanges sums between threads
            shared_bytes = config.num_stages * config.boxes * box + 128 * m_pad + barriers
            assert config.num_stages >= 2
            assert shared_bytes <= HOPPER_SHARED_BYTES - exchanged, (shape, config)
            assert config.block_n % (16 * config.num_warps) == 0
            assert config.num_warps in (4, 8)


def test_parts_of_tiles_fit_the_scratch_that_products_by_block_alone_have():
    found = 0
    for num_rows in range(1, MAX_ROWS + 1):
        m_pad = max(8, 1 << (num_rows - 1).bit_length())
        for shape, config in _configs(num_rows):
            if config.is_whole:
                continue
            found += 1
            assert shape["by_block"]
            assert 2 * shape["num_sms"] * config.block_n * m_pad <= SCRATCH_SUMS
            assert -(-shape["n"] // config.block_n) <= SCRATCH_TILES
    assert found


def test_rounding_lets_a_product_begin_early_where_it_is_of_few_rows():
    early = {by_block: [rows for rows in range(1, 300) if begins_early(rows, 4096, columns=128 if by_block else None)]
             for by_block in (False, True)}  # fmt: skip
    assert early == {False: list(range(1, 65)), True: list(range(1, 33))}
    assert not begins_early(8, 4096, columns=64)
    assert not begins_early(8, 4104, columns=None)


def test_programs_of_one_row_load_16_bytes_a_thread():
    for n, k in SIZES:
        for dtype, by_block in ((FP8, False), (FP8, True), (torch.int8, False)):
            config = row8_config(n=n, k=k, dtype=dtype, by_block=by_block)
            assert config.block_n * config.block_k >= 16 * 32 * config.num_warps
            assert all(size & (size - 1) == 0 for size in (config.block_n, config.block_k))
            assert config.prefetch % 128 == 0
            assert not by_block or 64 % config.block_n == 0  # outputs of a program have one scale


@pytest.fixture(scope="module")
def shares():
    """What the kernel calculates of programs and units, for tensors of them."""
    kernel = pytest.importorskip("kernels.linear.gluon_few_rows", reason="needs triton 3.6", exc_type=ImportError)
    scope = {"gl": SimpleNamespace(int32=torch.int32)}
    for name in ("first_unit", "_owner_of", "_slot_of"):
        scope[name] = types.FunctionType(getattr(kernel, name).fn.__code__, scope)
    return SimpleNamespace(first=scope["first_unit"], owner=scope["_owner_of"], slot=scope["_slot_of"])


@given(steps=st.integers(1, 60), tiles=st.integers(1, 80), most=st.integers(1, 150))
def test_each_unit_has_one_program_and_each_part_of_a_tile_a_slot(shares, steps, tiles, most):
    units = steps * tiles
    programs = min(most, units)
    places = torch.arange(programs + 1, dtype=torch.int32)
    first = shares.first(places, programs, units)
    assert (int(first[0]), int(first[-1])) == (0, units)
    assert set(first.diff().tolist()) <= {units // programs, -(-units // programs)}  # equal shares, none without
    owners = shares.owner(torch.arange(units, dtype=torch.int32), programs, units)
    assert owners.tolist() == torch.repeat_interleave(places[:-1], first.diff()).tolist()
    taken = []
    for tile, of_tile in enumerate(owners.view(tiles, steps).tolist()):
        if of_tile[0] < of_tile[-1]:
            sharing = torch.arange(of_tile[0], of_tile[-1] + 1, dtype=torch.int32)
            assert set(of_tile) == set(sharing.tolist())  # as many arrivals as the last one waits for
            slots = shares.slot(sharing, programs, tile, steps, units)
            assert (slots // 2).tolist() == sharing.tolist()
            taken += slots.tolist()
    assert len(set(taken)) == len(taken)
    assert max(taken, default=0) < 2 * programs


def test_units_of_the_largest_products_fit_32_bits():
    for n, k in ((262144, 28672), (28672, 65536)):
        units = -(-n // 64) * -(-k // 256)
        assert (units + 1) * 132 < 1 << 31


@pytest.fixture
def chosen(monkeypatch):
    """Launches nothing, and returns which kernel a product of these sizes would have, and its arguments."""
    if not eight_bits.HAS_GLUON:
        pytest.skip("needs Triton 3.6")
    calls = []

    def kernel(name):
        return lambda *args, **options: calls.append((name, args, options)) or torch.zeros(())

    monkeypatch.setattr(eight_bits, "triton_row8", SimpleNamespace(row8_linear=kernel("row")))
    takes = eight_bits.gluon_few_rows.takes
    monkeypatch.setattr(eight_bits, "gluon_few_rows", SimpleNamespace(few_rows_linear=kernel("few rows"), takes=takes))
    others = {"blocks_linear": kernel("other"), "int8_linear": kernel("other"), "can_load_by_tma": lambda x: False}
    monkeypatch.setattr(eight_bits, "triton_scaled8", SimpleNamespace(**others))
    monkeypatch.setattr(eight_bits, "triton_fp8", SimpleNamespace(rows_linear=kernel("other"), MAX_ROWS=64))
    monkeypatch.setattr(eight_bits, "_scaled_mm", kernel("other"))
    for name in ("is_hopper", "has_twin", "on_triton", "has_pdl", "_has_rowwise_product"):
        monkeypatch.setattr(eight_bits, name, lambda x: True)
    monkeypatch.setattr(eight_bits, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))

    def choose(kind, num_rows, *, n=256, k=4096, rows=128, columns=128):
        calls.clear()
        dtype = torch.int8 if kind == "integers" else FP8
        w, values = torch.zeros(n, k).to(dtype), torch.zeros(num_rows, k).to(dtype)
        if kind == "blocks":
            x = RoundedRows(values, torch.ones(num_rows, -(-k // columns)), torch.bfloat16)
            scales = torch.ones(-(-n // rows), -(-k // columns))
            Fp8BlockLinear().multiply(x, w, scales, None, rows=rows, columns=columns)
        elif kind == "integers":
            Int8Linear().multiply(RoundedRows(values, torch.ones(num_rows), torch.bfloat16), w, torch.ones(n), None)
        else:
            eight_bits.rows_linear(values, torch.ones(num_rows), w, torch.ones(n), None, torch.bfloat16)
        (call,) = calls
        return call

    return choose


KINDS = ["rows", "integers", "blocks"]


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_have_kernels_of_their_own(chosen, kind):
    most = MAX_ROWS_BY_BLOCK if kind == "blocks" else MAX_ROWS
    found = {num_rows: chosen(kind, num_rows)[0] for num_rows in (1, 2, 3, 32, 33, 64, 65, 300)}
    assert found == {rows: "row" if rows == 1 else "few rows" if rows <= most else "other" for rows in found}


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_are_no_multiple_of_16_have_another(chosen, kind):
    for num_rows in (1, 2, 16):
        assert chosen(kind, num_rows, k=1000)[0] == "other"
        assert chosen(kind, num_rows, k=1008)[0] != "other"


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_have_another(chosen, kind):
    """The copy engine has no boxes of tensors without rows."""
    assert chosen(kind, 0)[0] == "other"


def test_scales_of_other_columns_have_another(chosen):
    for num_rows in (1, 2):
        assert chosen("blocks", num_rows, columns=64)[0] == "other"


def test_a_row_whose_programs_would_have_several_scales_is_multiplied_as_rows_are(chosen):
    for rows, expected in ((1, "few rows"), (3, "few rows"), (6, "few rows"), (64, "row")):
        name, _, options = chosen("blocks", 1, rows=rows)
        assert name == expected
        assert options["rows_per_scale"] == rows
    assert isinstance(options["config"], Row8Config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_that_cuts_tiles_is_given_a_scratch(chosen, kind):
    name, args, options = chosen(kind, 4, n=1024, k=8192)
    assert name == "few rows"
    assert args[-1].is_whole is (kind != "blocks")
    assert (options["scratch"] is not None) is (kind == "blocks")
    assert options["pdl"]


@pytest.mark.parametrize("kind", KINDS)
def test_other_devices_have_other_kernels(chosen, kind, monkeypatch):
    monkeypatch.setattr(eight_bits, "is_hopper", lambda device: False)
    assert {chosen(kind, num_rows)[0] for num_rows in (1, 2, 16)} == {"other"}


def test_without_triton_a_hopper_gpu_has_neither(chosen, monkeypatch):
    monkeypatch.setattr(eight_bits, "on_triton", lambda x: False)
    assert chosen("rows", 1)[0] == "other"


def test_rows_and_weights_that_the_copy_engine_does_not_read_have_another(chosen):
    wide = torch.zeros(4, 528).to(FP8)
    w = torch.zeros(32, 512).to(FP8)
    for x, matrix, expected in (
        (wide[:, :512], w, True),
        (wide[:, 8:520], w, False),  # not at a multiple of 16 bytes
        (torch.zeros(4, 520).to(FP8)[:, :512], w, False),
        (wide[:, :512].to(torch.int8), w, False),
    ):
        assert eight_bits.gluon_few_rows.takes(x, matrix) is expected


@pytest.fixture
def launched(monkeypatch):
    """Launches of the kernel of few rows, which are noted: the number of programs, and the kernel's arguments."""
    kernel = pytest.importorskip("kernels.linear.gluon_few_rows", reason="needs triton 3.6", exc_type=ImportError)
    launches = []

    class Noted:
        def __getitem__(self, grid):
            return lambda *args, **options: launches.append((grid[0], args, options))

    monkeypatch.setattr(kernel, "_kernel", Noted())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return SimpleNamespace(multiply=kernel.few_rows_linear, launches=launches)


def test_one_scale_that_is_expanded_to_all_rows_is_that_of_each(launched):
    w, scales = torch.zeros(64, 256).to(FP8), torch.tensor(0.5).expand(5)
    config = few_rows_config(num_rows=5, n=64, k=256, by_block=False, num_sms=132)
    launched.multiply(w[:5], scales, w, torch.ones(64), None, config, dtype=torch.bfloat16)
    ((_, args, _),) = launched.launches
    assert args[2].stride() == (1,)
    assert args[2].tolist() == [0.5] * 5


def test_programs_are_as_many_as_have_equal_shares(launched):
    scratch = SplitKScratch.allocate(torch.device("cpu"))
    for n, is_whole, expected in (
        (64, True, 1), (132 * 64, True, 132), (133 * 64, True, 67), (300 * 64, True, 100),
        (64, False, 8), (133 * 64, False, 132),
    ):  # fmt: skip
        w = torch.empty(n, 1024, dtype=torch.int8)
        config = FewRowsConfig(64, 1, 4, 4, 64, is_whole)
        launched.multiply(w[:2], torch.ones(2), w, torch.ones(n), None, config, dtype=torch.bfloat16, scratch=scratch)
        assert launched.launches[-1][0] == expected
