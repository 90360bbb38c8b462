"""Times products in C on a CPU beside torch's: python -m benchmarks.cpu_products [--json FILE].

µs of CPU time of one thread, and GB/s of a matrix that comes from memory, by form, size and rows. In turns, the best of
--rounds: other work on the cores lengthens the others. Needs a C compiler and a CPU with AVX-512 in BF16 and VNNI.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.report import Report, format_table, host_facts, now
from kernels.linear import int4_cpu, onednn
from kernels.linear.reference import make_int_weight
from kernels.native import library

_SIZES = ((4096, 1024), (6144, 1024), (1024, 3072), (12288, 4096))  # outputs, inputs
_ROWS = (1, 2, 4, 8, 31, 64, 128, 512)
_FORMS = ("bf16", "int8", "int4")
_GROUP_SIZE = 32
_MEMORY = 128 * 2**20  # bytes of matrices that are read in turn: more than a core's share of the last cache

Product = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    """Print a table; write all numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", choices=_FORMS, default=_FORMS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compilation = library.Compilation.start()
    if compilation is None or not compilation.finish() or not library.products_level():
        sys.exit("benchmarks.cpu_products needs a C compiler and a CPU with AVX-512 in BF16 and VNNI.")
    results: list[Report] = []
    for form in options.forms:
        for size in _SIZES:
            results += time_matrix(form, *size, rounds=options.rounds)
            print(f"{form} {size[0]} x {size[1]}", file=sys.stderr)
    if options.json:
        report = {"date": now(), "host": host_facts(), "torch": torch.__version__, "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    columns = ("form", "outputs", "inputs", "rows", "c_us", "c_gb_s", "torch_us")
    print(format_table([list(columns), *([str(result[column]) for column in columns] for result in results)]))


def time_matrix(form: str, num_outputs: int, num_inputs: int, *, rounds: int) -> list[Report]:
    """Return the times of a matrix for all numbers of rows."""
    product, num_bytes = make_product(form, num_outputs, num_inputs)
    products = [product]
    products += [make_product(form, num_outputs, num_inputs)[0] for _ in range(_MEMORY // num_bytes)]
    results = []
    for num_rows in _ROWS:
        x = torch.randn(num_rows, num_inputs).bfloat16()
        best = [float("inf")] * 2
        for _ in range(rounds):
            best[0] = min(best[0], time_us(products, x))
            with without_c():
                best[1] = min(best[1], time_us(products, x))
        case = {"form": form, "outputs": num_outputs, "inputs": num_inputs, "rows": num_rows}
        figures = {"c_us": round(best[0]), "c_gb_s": round(num_bytes / best[0] / 1e3, 1), "torch_us": round(best[1])}
        results.append(case | figures)
    return results


def make_product(form: str, num_outputs: int, num_inputs: int) -> tuple[Product, int]:
    """Return the product with a random matrix, and the matrix's bytes."""
    w = torch.randn(num_outputs, num_inputs)
    if form == "bf16":
        matrix = onednn.pack(w.bfloat16())
        return functools.partial(onednn.packed_linear, w=matrix, bias=None), matrix.nbytes
    if form == "int8":
        values, scales = (30 * w).round().clamp(-127, 127).to(torch.int8), torch.rand(num_outputs)
        bytes_matrix = onednn.pack_int8(values, scales)
        return functools.partial(onednn.int8_linear, w=bytes_matrix, bias=None), bytes_matrix.nbytes
    codes = torch.randint(16, (num_outputs, num_inputs), dtype=torch.uint8)
    scales = torch.rand(num_inputs // _GROUP_SIZE, num_outputs)
    weight = int4_cpu.pack_int4(make_int_weight(codes, scales, None, bits=4), torch.bfloat16)
    num_bytes = weight.packed.nbytes + weight.scales_zeros.nbytes
    return functools.partial(int4_cpu.int4_linear, weight=weight, bias=None), num_bytes


def time_us(products: list[Product], x: torch.Tensor) -> float:
    """Return the mean µs of this thread for a product."""
    begun_s = time.thread_time()
    for product in products:
        product(x)
    return (time.thread_time() - begun_s) / len(products) * 1e6


@contextmanager
def without_c() -> Iterator[None]:
    """Compute with torch's own products."""
    native = library.loaded()
    library.unload()
    try:
        yield
    finally:
        library._loaded[:] = [] if native is None else [native]


if __name__ == "__main__":
    main()
