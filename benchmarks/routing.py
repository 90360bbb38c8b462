"""Times the choice of experts and the layout of their pairs: python -m benchmarks.routing [--json FILE].

µs of both by tokens of a step and number of experts, in a CUDA graph with early launches. Needs a GPU and Triton.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

import torch

from benchmarks.kernel_timing import BF16_CUDA, machine_facts, time_graph
from benchmarks.report import Report, format_table
from kernels.moe.configs import grouped_config
from kernels.moe.triton_route import lay_out, route

_EXPERTS = ((32, 4), (64, 6), (128, 8), (256, 8), (512, 10))
_TOKENS = (8, 64, 256, 1024, 2048, 8192, 16384)
_CALLS = 8


def main() -> None:
    """Print a table; write all numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.routing needs a CUDA device.")
    torch.manual_seed(0)
    results: list[Report] = []
    for num_experts, top_k in _EXPERTS:
        for num_tokens in _TOKENS:
            logits = [torch.randn(num_tokens, num_experts, **BF16_CUDA) for _ in range(_CALLS)]
            config = grouped_config(num_pairs=num_tokens * top_k, num_experts=num_experts, itemsize=2)
            choose = functools.partial(
                route, num_experts=num_experts, top_k=top_k, renormalize=True, weights_dtype=torch.float32,
                chunk_tokens=config.chunk_tokens, pdl=True,
            )  # fmt: skip
            place = functools.partial(lay_out, num_experts=num_experts, block_m=config.block_m, pdl=True)

            def both(
                logits: torch.Tensor, choose: functools.partial = choose, place: functools.partial = place
            ) -> None:
                place(choose(logits))

            route_us = time_graph([functools.partial(choose, each) for each in logits])
            both_us = time_graph([functools.partial(both, each) for each in logits])
            case = {"experts": num_experts, "top_k": top_k, "tokens": num_tokens}
            results.append(case | {"route_us": round(route_us, 2), "both_us": round(both_us, 2)})
    if options.json:
        options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")
    columns = ("experts", "tokens", "route_us", "both_us")
    print(format_table([list(columns), *([str(result[column]) for column in columns] for result in results)]))


if __name__ == "__main__":
    main()
